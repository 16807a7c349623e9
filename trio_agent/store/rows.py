"""The bodies of rows: records as JSON text, and back, strictly.

The head is everything of a checkpoint but its context, queue and pending calls;
it is small, read once an opening, and goes through cattrs. The others are many,
and msgspec reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

import attrs
import msgspec

from trio_agent.errors import CorruptStoreError, ProtocolError
from trio_agent.protocol import codec
from trio_agent.protocol.codec import decode_object
from trio_agent.protocol.events import EventMsg, SessionContext
from trio_agent.protocol.items import Item
from trio_agent.protocol.text import Json
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Record
from trio_agent.state.checkpoint import (
    CHECKPOINT_VERSION,
    ActiveExecution,
    ActiveModelStep,
    AgentRole,
    Checkpoint,
    ExecutionStats,
    QueuedMessage,
    ToolCall,
)

T = TypeVar("T")


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Head(Record):
    """A checkpoint without what grows; ``queued`` and ``pending`` count the rows left out."""

    session_id: str
    version: int = CHECKPOINT_VERSION
    sequence: int = 0
    session_context: SessionContext = SessionContext()
    metadata: Mapping[str, Json] = attrs.field(factory=dict[str, Json])
    role: AgentRole = AgentRole()
    first_user_message: str | None = None
    model_route: str | None = None
    context_epoch: int = 0
    total_usage: TokenUsage = TokenUsage()
    last_usage: TokenUsage | None = None
    active_execution: ActiveExecution | None = None
    active_model_step: ActiveModelStep | None = None
    execution_stats: ExecutionStats = ExecutionStats()
    grants: tuple[str, ...] = ()
    states: Mapping[str, Json] = attrs.field(factory=dict[str, Json])
    instructions_digest: str | None = None
    tools_digest: str | None = None
    queued: int = 0
    pending: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Head:
        """Return the head of *checkpoint*."""
        members: dict[str, Any] = {name: getattr(checkpoint, name) for name in _SHARED}
        queued, pending = len(checkpoint.queue), len(checkpoint.pending_tools)
        return cls(**members, queued=queued, pending=pending)

    def checkpoint(
        self,
        context: Sequence[Item],
        queue: Sequence[QueuedMessage],
        pending_tools: Sequence[ToolCall],
    ) -> Checkpoint:
        """Return the whole checkpoint."""
        members: dict[str, Any] = {name: getattr(self, name) for name in _SHARED}
        return Checkpoint(
            **members,
            context=tuple(context),
            queue=tuple(queue),
            pending_tools=tuple(pending_tools),
        )


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Small(Record):
    """A queue and pending calls that are small enough to live in the session's row."""

    queue: tuple[QueuedMessage, ...] = ()
    pending_tools: tuple[ToolCall, ...] = ()


SMALL_BYTES: Final = 1_024
"""The most that a session's row takes in; it is rewritten by every save."""


def write_small(checkpoint: Checkpoint) -> bytes | None:
    """Return queue and pending calls as JSON text, or None if they need rows of their own."""
    count = len(checkpoint.queue) + len(checkpoint.pending_tools)
    if not count:
        return b""
    if count > SMALL_BYTES // 100:
        return None
    texts = sum(len(message.text) for message in checkpoint.queue)
    texts += sum(len(call.output) for call in checkpoint.pending_tools)
    if texts > SMALL_BYTES:
        return None
    small = Small(queue=checkpoint.queue, pending_tools=checkpoint.pending_tools)
    body = msgspec.json.encode(small)
    return body if len(body) <= SMALL_BYTES else None


def read_small(version: int, body: bytes) -> Small:
    """Decode what `write_small` wrote.

    Raises:
        ProtocolError: If it is anything else.
    """
    return read_part(Small, version, body) if body else Small()


_SHARED: Final = frozenset(
    field.name for field in attrs.fields(Head) if field.name not in {"queued", "pending"}
)
_APART: Final = frozenset({"session_context", "first_user_message", "execution_stats"})
"""Members with a column of their own, which lists read without the rest."""

_COLD: Final = frozenset(
    {"metadata", "role", "states", "grants", "instructions_digest", "tools_digest"}
)
"""Members that seldom change and may be large."""

_HOT: Final = tuple(
    (field.name, field.default)
    for field in attrs.fields(Head)
    if field.name in _SHARED - _APART - _COLD
)
_hot: Final = attrgetter(*(name for name, _ in _HOT))
_Hot: Final[Any] = msgspec.defstruct(
    "_Hot",
    [
        (name, Any, msgspec.field(default=None if default is attrs.NOTHING else default))
        for name, default in (*_HOT, ("queued", 0), ("pending", 0))
    ],
    omit_defaults=True,
)


def write_head(checkpoint: Checkpoint) -> bytes:
    """Return the JSON text of what every save rewrites; untouched defaults are left out."""
    queued, pending = len(checkpoint.queue), len(checkpoint.pending_tools)
    return msgspec.json.encode(_Hot(*_hot(checkpoint), queued, pending))


def write_cold(checkpoint: Checkpoint) -> bytes:
    """Return the JSON text of what seldom changes."""
    members = {name: getattr(checkpoint, name) for name in sorted(_COLD)}
    members["metadata"] = dict(checkpoint.metadata)
    members["states"] = dict(checkpoint.states)
    return msgspec.json.encode(members)


def read_head(
    head: bytes,
    cold: bytes,
    *,
    version: int,
    session_context: bytes,
    first_user_message: str | None,
    execution_stats: bytes,
) -> Head:
    """Decode what `write_head`, `write_cold` and the columns beside them hold.

    Raises:
        ProtocolError: If it is anything else.
        StoreVersionError: If a newer version of this library wrote it.
    """
    members = decode_object("checkpoint", head, version)
    members |= decode_object("checkpoint", cold, version)
    members["session_context"] = decode_object("session context", session_context, version)
    members["execution_stats"] = decode_object("statistics", execution_stats, version)
    members["first_user_message"] = first_user_message
    return codec.structure(
        codec.upcast("checkpoint", version, members), Head, name="checkpoint"
    )


write_row = codec.encode_row


def read_row(kind: str, version: int, body: bytes) -> EventMsg | Item:
    """Decode an event or item that `write_row` wrote, perhaps with an older shape.

    Raises:
        ProtocolError: If it is anything else.
        StoreVersionError: If a newer version of this library wrote it.
    """
    return codec.decode_row(kind, body, version)


def read_part(cls: type[T], version: int, body: bytes) -> T:
    """Decode a queued message, a pending call or a finished turn.

    Raises:
        ProtocolError: If it is anything else.
        StoreVersionError: If a newer version of this library wrote it.
    """
    name = cls.__name__
    if version != codec.CODEC_VERSION:
        data = codec.upcast(name, version, decode_object(name, body, version))
        body = msgspec.json.encode(data)  # from here on it is today's
    try:
        return cast("T", _decoder(cast("Any", cls)).decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"{name}: {exc}") from None


@functools.cache
def _decoder(cls: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(cls)


def whole(
    head: Head,
    context: Sequence[Item],
    queue: Sequence[QueuedMessage],
    pending_tools: Sequence[ToolCall],
    *,
    length: int,
) -> Checkpoint:
    """Put a checkpoint together from its rows.

    Raises:
        CorruptStoreError: If rows are missing or too many.
    """
    for what, found, expected in (
        ("context items", len(context), length),
        ("queued messages", len(queue), head.queued),
        ("pending calls", len(pending_tools), head.pending),
    ):
        if found != expected:
            raise CorruptStoreError(
                f"session {head.session_id!r} has {found} {what}, expected {expected}"
            )
    return head.checkpoint(context, queue, pending_tools)
