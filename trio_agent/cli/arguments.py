"""What the user typed: the command line as one record."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import attrs

from trio_agent import ApprovalPolicy, Recovery, __version__
from trio_agent.cli.exits import describe_codes
from trio_agent.errors import ConfigError
from trio_agent.record import Record


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Options(Record):
    """One call of the command. ``database`` is None for the user's data directory."""

    command: Literal["run", "chat", "sessions", "show"]
    prompt: str | None = None
    model: str = "demo"
    workspace: Path = Path()
    database: Path | None = None
    session_id: str | None = None
    policy: ApprovalPolicy = ApprovalPolicy.ASK
    recovery: Recovery = Recovery.ABORT
    isolation: Literal["bubblewrap", "none"] = "bubblewrap"


def parse_arguments(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line (default: the process's own).

    Raises:
        SystemExit: With code 2 and the usage on stderr for a wrong one; with code 0
            after ``--help`` and ``--version``.
    """
    parser = _parser()
    found = parser.parse_args(arguments)
    if found.command == "run" and found.prompt is None and found.session is None:
        parser.error("run needs a PROMPT, or --session to go on with what was cut off")
    return Options(
        command=found.command,
        prompt=getattr(found, "prompt", None),
        model=getattr(found, "model", "demo"),
        workspace=getattr(found, "workspace", Path()),
        database=found.db,
        session_id=getattr(found, "session", None),
        policy=ApprovalPolicy(getattr(found, "policy", "ask")),
        recovery=Recovery(getattr(found, "recovery", "abort")),
        isolation=getattr(found, "isolation", "bubblewrap"),
    )


def database_path(options: Options) -> Path:
    """Return the file that holds the sessions.

    Raises:
        ConfigError: If it is to be found by convention and `platformdirs` is missing.
    """
    if options.database is not None:
        return options.database
    try:
        import platformdirs  # noqa: PLC0415  # an extra; `--db` works without it
    except ImportError as exc:
        raise ConfigError(
            "the default place for sessions needs a package: pip install 'trio-agent[cli]'; "
            "or name a file with --db PATH"
        ) from exc
    return platformdirs.user_data_path("trio-agent", appauthor=False) / "sessions.db"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trio-agent",
        description="Run an LLM agent as a durable session.",
        epilog=describe_codes(),
    )
    parser.add_argument("--version", action="version", version=f"trio-agent {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="send one prompt and stream the answer", epilog=describe_codes()
    )
    run.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the message; - reads it from stdin; none goes on with --session",
    )
    chat = commands.add_parser("chat", help="talk, one line a message; Ctrl-D leaves")
    for command in (run, chat):
        _add_session_options(command)

    sessions = commands.add_parser("sessions", help="list the stored sessions")
    show = commands.add_parser("show", help="print a session's transcript")
    show.add_argument("session", metavar="ID")
    for command in (run, chat, sessions, show):
        command.add_argument(
            "--db", type=Path, metavar="PATH", help="the SQLite file (default: the user's own)"
        )
    return parser


def _add_session_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", default="demo", help="demo, openai:NAME, openai-chat:NAME or anthropic:NAME"
    )
    command.add_argument(
        "--workspace", type=Path, default=Path(), metavar="DIR", help="where tools work"
    )
    command.add_argument("--session", metavar="ID", help="the session to open or resume")
    command.add_argument(
        "--policy",
        choices=[policy.value for policy in ApprovalPolicy],
        default=ApprovalPolicy.ASK.value,
        help="what may run without asking (default: ask)",
    )
    command.add_argument(
        "--recovery",
        choices=[recovery.value for recovery in Recovery],
        default=Recovery.ABORT.value,
        help="what to do with a turn that was cut off (default: abort)",
    )
    command.add_argument(
        "--isolation",
        choices=["bubblewrap", "none"],
        default="bubblewrap",
        help="what holds commands in the workspace (default: bubblewrap)",
    )
