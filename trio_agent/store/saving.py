"""What one save or append writes, worked out and encoded before it waits for its turn.

A save costs what it adds. So it is compared with the last checkpoint of its
session that this store saw: records are immutable, an unchanged one is skipped.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import attrs
import msgspec

from trio_agent.errors import ConfigError
from trio_agent.protocol.codec import CODEC_VERSION
from trio_agent.protocol.events import Draft, Event, ModelStepCompleted, TokenCount
from trio_agent.protocol.items import Item
from trio_agent.record import Record
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord, QueuedMessage, ToolCall
from trio_agent.store.base import Lease
from trio_agent.store.history import weave
from trio_agent.store.numbering import Entry, arrange
from trio_agent.store.rows import write_cold, write_head, write_row, write_small

R = TypeVar("R")

QUEUE: Final = 0
CALLS: Final = 1
"""The two slots of part rows."""


def seal(body: bytes, salt: int = 0) -> int:
    """Return the checksum of a row; *salt* mixes in what stands beside the body."""
    return zlib.crc32(body, salt & 0xFFFFFFFF)


def kind_salt(kind: str) -> int:
    """Return the salt of a kind, so that a body under another kind does not pass."""
    return zlib.crc32(kind.encode())


def event_salt(kind: str, sequence: int, at_ms: int, submission_id: str | None) -> int:
    """Return the salt of an event row."""
    salt = zlib.crc32(kind.encode(), (sequence ^ at_ms * 31) & 0xFFFFFFFF)
    return salt if submission_id is None else zlib.crc32(submission_id.encode(), salt)


def session_sum(
    head: bytes, stats: bytes, small: bytes | None, numbers: tuple[int, int, int]
) -> int:
    """Return the checksum of a session's row; *numbers* are sequence, epoch and length."""
    return seal(head, seal(stats, seal(small or b"", zlib.crc32(b"%d.%d.%d" % numbers))))


@attrs.frozen(eq=False, repr=False)
class Parts(Record, Generic[R]):
    """Records stored as rows of their own, each under an ordinal that grows with its place."""

    rows: tuple[tuple[int, R], ...] = ()

    @property
    def records(self) -> tuple[R, ...]:
        """The records alone."""
        return tuple(record for _, record in self.rows)


def numbered(records: Sequence[R]) -> Parts[R]:
    """Return *records* under fresh ordinals."""
    return Parts(tuple(enumerate(records)))


@attrs.frozen(eq=False, repr=False)
class PartsChange(Record, Generic[R]):
    """How to get from one `Parts` to the next; ``wipe`` deletes all rows first."""

    after: Parts[R]
    wipe: bool = False
    deleted: tuple[int, ...] = ()
    written: tuple[tuple[int, R], ...] = ()


def change(
    before: Parts[R] | None, records: Sequence[R], key: Callable[[R], object]
) -> PartsChange[R]:
    """Return the smallest change whose rows read *records*, in order."""
    if before is None:
        after = numbered(records)
        return PartsChange(after, wipe=True, written=after.rows)
    if not before.rows and not records:
        return PartsChange(before)
    known = {key(record): (ordinal, record) for ordinal, record in before.rows}
    rows: list[tuple[int, R]] = []
    written: list[tuple[int, R]] = []
    last = -1
    fresh = before.rows[-1][0] + 1 if before.rows else 0
    for record in records:
        ordinal, old = known.pop(key(record), (fresh, None))
        if ordinal <= last:  # the order changed: number all of them anew
            after = numbered(records)
            return PartsChange(after, wipe=True, written=after.rows)
        if old is None:
            fresh += 1
        if old is not record and old != record:
            written.append((ordinal, record))
        rows.append((ordinal, record))
        last = ordinal
    deleted = tuple(ordinal for ordinal, _ in known.values())
    return PartsChange(Parts(tuple(rows)), deleted=deleted, written=tuple(written))


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Base(Record):
    """What this store last saw of a session; a save is compared with it.

    ``checkpoint``, ``queue`` and ``calls`` are None if only the numbers are known;
    the latter two are what has rows of its own.
    """

    row: int
    sequence: int
    epoch: int
    start: int
    length: int
    checkpoint: Checkpoint | None = None
    queue: Parts[QueuedMessage] | None = None
    calls: Parts[ToolCall] | None = None
    contents: frozenset[str] = frozenset()


@attrs.define(kw_only=True, eq=False, repr=False)
class Job:
    """One append, or the journal part of one save; ends with ``events`` or ``error``."""

    key: str
    lease: int | None
    entries: list[Entry]
    bodies: list[bytes | None]
    token_offset: int
    error: Exception | None = None
    first: int = 0
    task: Any = None
    taken: bool = False

    def events(self) -> tuple[Event, ...]:
        """Return the events with the numbers that the transaction gave them."""
        first = self.first
        return tuple(entry.numbered(first + at) for at, entry in enumerate(self.entries))


@attrs.define(kw_only=True, eq=False, repr=False)
class Save(Job):
    """One save. ``base`` is None for a session that does not exist yet."""

    checkpoint: Checkpoint
    base: Base | None
    head: bytes
    stats: bytes
    small: bytes | None
    sum: int
    cold: tuple[Any, ...] | None
    items: list[tuple[int, int | None, str, bytes, int]]
    queue: PartsChange[QueuedMessage]
    calls: PartsChange[ToolCall]
    parts: list[tuple[int, int, bytes, int]]
    execution: bytes | None
    contents: dict[str, str]
    row: int = 0
    start: int = 0
    moved: bool = False

    def after(self) -> Base:
        """Return what the session looks like once this is committed."""
        known = frozenset[str]() if self.base is None else self.base.contents
        return Base(
            row=self.row,
            sequence=self.checkpoint.sequence,
            epoch=self.checkpoint.context_epoch,
            start=self.start,
            length=len(self.checkpoint.context),
            checkpoint=self.checkpoint,
            queue=self.queue.after,
            calls=self.calls.after,
            contents=known.union(self.contents),
        )


def prepare_append(key: str, drafts: Sequence[Draft], lease: Lease | None) -> Job:
    """Encode an append.

    Raises:
        ConfigError: If something in it cannot be stored.
    """
    entries = arrange(drafts)
    return Job(
        key=key,
        lease=None if lease is None else lease.incarnation,
        entries=entries,
        bodies=_bodies(key, entries),
        token_offset=_token_offset(entries),
    )


def prepare_save(
    checkpoint: Checkpoint,
    delta: Sequence[Item],
    base: Base | None,
    *,
    lease: Lease | None,
    execution: ExecutionRecord | None,
    entries: list[Entry],
    contents: Mapping[str, str] | None,
) -> Save:
    """Encode a save on top of *base*.

    Raises:
        ConfigError: If something in it cannot be stored.
    """
    key = checkpoint.session_id
    epoch = checkpoint.context_epoch
    known = base.length if base is not None and base.epoch == epoch else 0
    previous = None if base is None else base.checkpoint
    try:
        items = [
            (int(woven.shown), epoch if woven.held else None, tag, body, seal(body, salt))
            for woven in weave(delta, checkpoint.context.since(known))
            for tag in (woven.item.tag,)
            for body, salt in ((write_row(woven.item), kind_salt(tag)),)
        ]
        head = write_head(checkpoint)
        stats = msgspec.json.encode(checkpoint.execution_stats)
        cold = None
        if previous is None or cold_members(previous) != cold_members(checkpoint):
            cold = cold_row(checkpoint)
        small = write_small(checkpoint)
        queue = change(
            None if base is None else base.queue,
            checkpoint.queue if small is None else (),
            lambda message: (message.owner, message.id),
        )
        calls = change(
            None if base is None else base.calls,
            checkpoint.pending_tools if small is None else (),
            lambda call: call.call_id,
        )
        parts = [*_written(QUEUE, queue), *_written(CALLS, calls)]
        finished = None if execution is None else msgspec.json.encode(execution)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ConfigError(f"session {key!r} cannot be stored: {exc}") from exc
    seen = frozenset[str]() if base is None else base.contents
    return Save(
        key=key,
        lease=None if lease is None else lease.incarnation,
        entries=entries,
        bodies=_bodies(key, entries),
        token_offset=_token_offset(entries),
        checkpoint=checkpoint,
        base=base,
        head=head,
        stats=stats,
        small=small,
        sum=session_sum(
            head, stats, small, (checkpoint.sequence, epoch, len(checkpoint.context))
        ),
        cold=cold,
        items=items,
        queue=queue,
        calls=calls,
        parts=parts,
        execution=finished,
        contents={
            digest: text for digest, text in (contents or {}).items() if digest not in seen
        },
    )


def _written(slot: int, parts: PartsChange[Any]) -> list[tuple[int, int, bytes, int]]:
    return [
        (slot, ordinal, body, seal(body, slot))
        for ordinal, record in parts.written
        for body in (msgspec.json.encode(record),)
    ]


def cold_members(checkpoint: Checkpoint) -> tuple[object, ...]:
    """Return what seldom changes; stored apart from the head, so that no save repeats it."""
    return (
        checkpoint.session_context,
        checkpoint.first_user_message,
        checkpoint.metadata,
        checkpoint.role,
        checkpoint.states,
        checkpoint.grants,
        checkpoint.instructions_digest,
        checkpoint.tools_digest,
    )


def cold_row(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """Return first message, labels, version, body and checksum of the label row."""
    first = checkpoint.first_user_message
    context = msgspec.json.encode(checkpoint.session_context)
    body = write_cold(checkpoint)
    return (first, context, CODEC_VERSION, body, label_sum(first, context, body))


def label_sum(first_user_message: str | None, context: bytes, body: bytes) -> int:
    """Return the checksum of a label row."""
    first = b"" if first_user_message is None else first_user_message.encode()
    return seal(body, seal(context, seal(first)))


def _bodies(key: str, entries: Sequence[Entry]) -> list[bytes | None]:
    """Encode events, but those whose metrics only the transaction knows."""
    try:
        return [
            write_row(entry.msg) if entry.row and not _open(entry) else None
            for entry in entries
        ]
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ConfigError(f"session {key!r}: an event cannot be stored: {exc}") from exc


def _open(entry: Entry) -> bool:
    return isinstance(entry.msg, ModelStepCompleted) and entry.msg.outcome == "completed"


def _token_offset(entries: Sequence[Entry]) -> int:
    """Return the place of the newest token count, counted from 1; 0 if there is none."""
    for place in range(len(entries), 0, -1):
        if isinstance(entries[place - 1].msg, TokenCount):
            return place
    return 0
