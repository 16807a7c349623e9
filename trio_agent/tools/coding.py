"""`coding_tools`: what a model needs to work on a workspace."""

from __future__ import annotations

import importlib.util

from trio_agent.errors import ConfigError
from trio_agent.tools.base import Tool
from trio_agent.tools.files import (
    apply_patch,
    edit_file,
    list_files,
    read_file,
    search,
    write_file,
)
from trio_agent.tools.shell import poll_command, run_command, start_command, stop_command


def coding_tools() -> tuple[Tool, ...]:
    """Return the tools for files and commands; they act in the configuration's sandbox.

    Reading, listing, searching and polling run at once and change nothing; all others
    ask for approval, unless the policy waves them through.

    Raises:
        ConfigError: If the extra ``tools`` is not installed; it names the command.
    """
    for module in ("pathspec", "unidiff"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"the coding tools need {module}: pip install 'trio-agent[tools]'"
            )
    return (
        read_file,
        list_files,
        search,
        write_file,
        edit_file,
        apply_patch,
        run_command,
        start_command,
        poll_command,
        stop_command,
    )
