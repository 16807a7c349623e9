"""What a command finds in its environment: named variables, never the engine's own.

The engine's environment holds provider keys. A list of what to remove forgets one;
so this is a list of what is passed on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

PASSED_ON: Final = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_COLLATE",
    "LC_CTYPE",
    "LC_MESSAGES",
    "LC_NUMERIC",
    "LC_TIME",
    "TZ",
    "USER",
    "LOGNAME",
)
"""Names that are taken from the engine's environment if they are set there."""

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def command_environment(
    extra: Mapping[str, str],
    *,
    home: str,
    temporary: str,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return all of the environment that a command gets.

    Args:
        extra: What the embedder adds by name; it wins.
        home: ``HOME``.
        temporary: ``TMPDIR``.
        inherited: What ``PASSED_ON`` is taken from; the engine's own by default.
    """
    source = os.environ if inherited is None else inherited
    environment = {name: source[name] for name in PASSED_ON if name in source}
    environment.setdefault("PATH", DEFAULT_PATH)
    environment.setdefault("LANG", "C.UTF-8")
    environment |= {
        "HOME": home,
        "TMPDIR": temporary,
        "SHELL": "/bin/bash",
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "GIT_TERMINAL_PROMPT": "0",
    }
    return environment | dict(extra)
