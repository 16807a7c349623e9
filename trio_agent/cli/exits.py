"""How the command ends: one number for each kind of ending, and the words on stderr."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import cast

from trio_agent.errors import (
    AgentError,
    CheckpointError,
    ConfigError,
    SessionBrokenError,
    SubmissionRejectedError,
)


class Exit(enum.IntEnum):
    """Exit codes of `trio-agent`; they never change their meaning."""

    OK = 0
    """Everything that was asked for is done."""
    TURN = 1
    """A turn failed or was aborted, or the session failed."""
    USAGE = 2
    """The request can never work as it stands: arguments, configuration, an unknown name."""
    STORE = 3
    """The store is unreadable, unwritable, too new, or another process has the session."""
    INTERRUPTED = 130
    """Ctrl-C, by the convention 128 + the signal's number."""
    PIPE = 141
    """Whoever read the output went away."""
    TERMINATED = 143
    """SIGTERM."""


def describe_codes() -> str:
    """Return the codes as the help shows them."""
    return (
        "exit codes: 0 done; 1 a turn failed or was aborted; 2 wrong arguments or "
        "configuration; 3 the store is broken, unwritable or owned by another process; "
        "130 interrupted by Ctrl-C; 141 the output was closed; 143 terminated"
    )


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that a group holds at any depth, or *error* itself."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)  # isinstance forgets of what
        for one in group.exceptions:
            yield from leaves(one)
    else:
        yield error


def code_of(error: BaseException) -> Exit:
    """Return how the command ends after *error*."""
    match error:
        case SessionBrokenError() if error.__cause__ is not None:
            found = {code_of(one) for one in leaves(error.__cause__)}
            return Exit.STORE if Exit.STORE in found else Exit.TURN
        case CheckpointError():
            return Exit.STORE
        case ConfigError() | SubmissionRejectedError():
            return Exit.USAGE
        case KeyboardInterrupt():
            return Exit.INTERRUPTED
        case BrokenPipeError():
            return Exit.PIPE
        case _:
            return Exit.TURN


def explain(error: AgentError) -> str:
    """Return one line for *error*: its stable kind, its message, and what caused it."""
    text = f"{error.kind}: {error}"
    cause = error.__cause__
    while cause is not None:
        said = f"{cause.kind}: {cause}" if isinstance(cause, AgentError) else str(cause)
        if said and said not in text:
            text += f" ({said})"
        cause = cause.__cause__
    return text
