"""Every text that the engine itself gives a model to read.

They never claim more than is known: a call that was entered and not seen to end
has an unknown result, even if it was cancelled.
"""

from __future__ import annotations

from typing import Final

UNKNOWN_AFTER_RESTART: Final = "execution interrupted; result unknown after restart"
READ_ONLY_AFTER_RESTART: Final = "execution interrupted by a restart; it changed nothing"
INTERRUPTED: Final = "execution interrupted; result unknown"
READ_ONLY_INTERRUPTED: Final = "execution interrupted; it changed nothing"
TIMED_OUT: Final = "stopped at its limit of {seconds:g} s; result unknown"
READ_ONLY_TIMED_OUT: Final = "stopped at its limit of {seconds:g} s; it changed nothing"
NOT_STARTED: Final = "not started: the turn ended before this call could run"
DENIED: Final = "not started: the user denied this call"
DENIED_WITH_REASON: Final = "not started: the user denied this call: {reason}"
DENIED_BY_HOOK: Final = "not started: {reason}"
ABORTED_BY_USER: Final = "not started: the user ended the turn instead"
UNKNOWN_TOOL: Final = "no tool is called {name!r}; available: {available}"
BAD_ARGUMENTS: Final = (
    "not started: the arguments are not a JSON object ({problem});"
    " call the tool again with valid arguments"
)
CUT_ARGUMENTS: Final = (
    "not started: your output reached its limit in the middle of this call;"
    " make the call smaller, for example in several parts"
)
EDITED_ARGUMENTS: Final = (
    "The user changed the arguments of {name} before approving it. It ran with: {arguments}"
)
