"""Every exception this library raises, and the stable word for each on the wire.

The tree says how much dies: a configuration, one op, one tool call, one turn,
the session. ``kind`` never changes once released; class names may.
"""

from __future__ import annotations

from typing import ClassVar


class AgentError(Exception):
    """The root of every error that `trio_agent` raises on purpose."""

    kind: ClassVar[str] = "agent"


class ConfigError(AgentError, ValueError):
    """The request can never work as it stands; nothing was started or changed."""

    kind: ClassVar[str] = "configuration"


class DuplicateError(ConfigError):
    """Two middlewares, tools, routes or commands carry one name."""

    kind: ClassVar[str] = "duplicate_registration"


class UnknownError(ConfigError, LookupError):
    """No route, tool, session or command has that name."""

    kind: ClassVar[str] = "unknown_registration"

    def __str__(self) -> str:
        """Return the message alone (`LookupError` would quote it)."""
        return str(self.args[0]) if self.args else ""


class ProtocolError(ConfigError):
    """Bytes or JSON that do not decode as the record they claim to be; says where and why."""

    kind: ClassVar[str] = "protocol"


class SubmissionRejectedError(AgentError):
    """One op was refused and nothing changed.

    Args:
        code: The stable reason, one of `trio_agent.protocol.ops.REJECTION_CODES`.
        message: What was wrong, which limit it met and what to do instead.
    """

    kind: ClassVar[str] = "submission_rejected"

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ToolError(AgentError):
    """One tool call failed; the model reads the message and the turn goes on."""

    kind: ClassVar[str] = "tool"


class TurnError(AgentError):
    """One turn failed; it is recorded as its ending and the session goes on."""

    kind: ClassVar[str] = "turn"


class ProviderError(TurnError):
    """A model could not answer.

    Args:
        message: Short and free of credentials; shown to users.
        retryable: Whether asking again may help.
        status: The HTTP status, if there was one.
        retry_after: Seconds the provider asked us to wait, if it did.
    """

    kind: ClassVar[str] = "provider"

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = False,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.status = status
        self.retry_after = retry_after


class StreamInterruptedError(ProviderError):
    """A model's stream broke or fell silent before its end; the step is retried."""

    def __init__(
        self,
        message: str = "the model's stream ended before its answer was complete",
        *,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, retryable=True, status=status, retry_after=retry_after)


class AuthError(ProviderError):
    """The provider refused the credentials, or none were given."""

    kind: ClassVar[str] = "authentication"


class ContextOverflowError(ProviderError):
    """The request is larger than the route's context window; `rewind` is the remedy."""

    kind: ClassVar[str] = "context_overflow"


class SandboxError(TurnError):
    """The sandbox refused or could not do what it was asked.

    Inside a tool call it becomes an error result that the model reads.
    """

    kind: ClassVar[str] = "sandbox"


class StepLimitError(TurnError):
    """A turn asked the model more often than ``max_model_steps`` allows."""

    kind: ClassVar[str] = "step_limit"


class CheckpointError(AgentError):
    """The store could not do what it was asked; ``__cause__`` has the engine's words."""

    kind: ClassVar[str] = "checkpoint"


class StaleSessionError(CheckpointError):
    """Another writer advanced this session; nothing of ours was written.

    Args:
        message: What was found.
        owner: Who took the session, if the lease was lost; None if only the
            sequence number did not fit.
    """

    kind: ClassVar[str] = "stale_session"

    def __init__(self, message: str, *, owner: str | None = None) -> None:
        super().__init__(message)
        self.owner = owner


class SessionOwnedError(CheckpointError):
    """Another live process holds the session; the message says which, and since when."""

    kind: ClassVar[str] = "session_owned"


class StoreVersionError(CheckpointError):
    """The file belongs to a newer version of this library, or to another program."""

    kind: ClassVar[str] = "store_version"


class CorruptStoreError(CheckpointError):
    """Stored data is unreadable or contradicts itself; nothing was overwritten."""

    kind: ClassVar[str] = "corrupt_store"


class InternalError(AgentError):
    """An invariant of ours broke. Please report it."""

    kind: ClassVar[str] = "internal"


class BusyError(AgentError):
    """An ``X_nowait`` call would have had to wait (compare `trio.WouldBlock`)."""

    kind: ClassVar[str] = "busy"


class StoppedError(AgentError):
    """The session is over (compare `trio.ClosedResourceError`)."""

    kind: ClassVar[str] = "stopped"


class SessionBrokenError(StoppedError):
    """The session failed; ``__cause__`` says why (compare `trio.BrokenResourceError`)."""

    kind: ClassVar[str] = "session_broken"
