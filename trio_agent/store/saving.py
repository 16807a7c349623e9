"""What one save or append writes, worked out and encoded before it waits for its turn.

A save costs what it adds. So it is compared with the last checkpoint of its
session that this store saw: records are immutable, an unchanged one is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from trio_agent.errors import ConfigError
from trio_agent.protocol.codec import CODEC_VERSION
from trio_agent.protocol.events import Draft, Event
from trio_agent.protocol.items import Item
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord, QueuedMessage, ToolCall
from trio_agent.store.base import Lease
from trio_agent.store.checksums import item_sum, label_sum, seal, session_sum
from trio_agent.store.event_rows import Row
from trio_agent.store.history import weave
from trio_agent.store.new_events import NewEvents, new_events
from trio_agent.store.quoting import places
from trio_agent.store.rows import write_cold, write_head, write_row, write_small

R = TypeVar("R")

QUEUE: Final = 0
CALLS: Final = 1
"""The two slots of part rows."""

_MESSAGE: Final = attrgetter("owner", "id")
_CALL: Final = attrgetter("call_id")
"""What tells their records apart."""


class Parts(Struct, Generic[R], frozen=True):
    """Records stored as rows of their own, each under an ordinal that grows with its place."""

    rows: tuple[tuple[int, R], ...] = ()

    @property
    def records(self) -> tuple[R, ...]:
        """The records alone."""
        return tuple(record for _, record in self.rows)


def numbered(records: Sequence[R]) -> Parts[R]:
    """Return *records* under fresh ordinals."""
    return Parts(tuple(enumerate(records)))


class PartsChange(Struct, Generic[R], frozen=True):
    """How to get from one `Parts` to the next; ``wipe`` deletes all rows first."""

    after: Parts[R]
    wipe: bool = False
    deleted: tuple[int, ...] = ()
    written: tuple[tuple[int, R], ...] = ()


_UNCHANGED: Final = PartsChange[Any](Parts())
"""The usual case: there were none, and there are none."""


def change(
    before: Parts[R] | None, records: Sequence[R], key: Callable[[R], object]
) -> PartsChange[R]:
    """Return the smallest change whose rows read *records*, in order."""
    if before is None:
        after = numbered(records)
        return PartsChange(after, wipe=True, written=after.rows)
    if not before.rows and not records:
        return _UNCHANGED
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


class Base(Struct, frozen=True, kw_only=True):
    """What this store last saw of a session; a save is worked out from it.

    ``sequence``, ``items`` and ``events`` are how far its saves, its rows and its
    journal go: a save is written only if they still do. ``checkpoint``, ``queue`` and
    ``calls`` are None if only the numbers are known; the latter two are what has
    rows of its own, and ``stats`` are the checkpoint's, encoded.
    """

    row: int
    sequence: int
    epoch: int
    start: int
    length: int
    items: int
    events: int
    tokens: int
    checkpoint: Checkpoint | None = None
    stats: bytes = b""
    queue: Parts[QueuedMessage] | None = None
    calls: Parts[ToolCall] | None = None
    contents: frozenset[str] = frozenset()

    def grown(self, job: Job) -> Base:
        """Return what the session looks like once an append is committed."""
        tokens = job.token_sequence or self.tokens
        return replace(self, events=job.last_event, tokens=tokens)


class Job(Struct, kw_only=True, eq=False):
    """One append, or the journal part of one save; ends with its numbers or ``error``.

    ``event_rows`` are worked out before the transaction if it cannot change them.
    """

    key: str
    lease: int | None
    new: NewEvents
    first: int = 0
    event_rows: list[Row] | None = None
    error: Exception | None = None
    task: Any = None
    taken: bool = False

    @property
    def last_event(self) -> int:
        """The number of the newest event once this is committed."""
        return self.first + len(self.new.entries) - 1

    @property
    def token_sequence(self) -> int:
        """The number of the newest token count, 0 if there is none."""
        return self.new.token_sequence(self.first)

    def events(self) -> tuple[Event, ...]:
        """Return the events with the numbers that they have now."""
        return self.new.events(self.first)


class Save(Job, kw_only=True, eq=False):
    """One save. ``base`` is None for a session without a row; creating it gives it one."""

    checkpoint: Checkpoint
    base: Base | None
    row: int
    begins: bool
    start: int
    last: int
    head: bytes
    stats: bytes
    small: bytes | None
    sum: int
    cold: tuple[Any, ...] | None
    items: list[Row]
    queue: PartsChange[QueuedMessage]
    calls: PartsChange[ToolCall]
    parts: list[tuple[int, int, bytes, int]]
    execution: bytes | None
    contents: dict[str, str]

    def after(self) -> Base:
        """Return what the session looks like once this is committed."""
        checkpoint, base = self.checkpoint, self.base
        known = frozenset[str]() if base is None else base.contents
        tokens = 0 if base is None else base.tokens
        return Base(
            row=self.row,
            sequence=checkpoint.sequence,
            epoch=checkpoint.context_epoch,
            start=self.start,
            length=len(checkpoint.context),
            items=self.last,
            events=self.last_event,
            tokens=self.token_sequence or tokens,
            checkpoint=checkpoint,
            stats=self.stats,
            queue=self.queue.after,
            calls=self.calls.after,
            contents=known.union(self.contents) if self.contents else known,
        )


def prepare_append(key: str, drafts: Sequence[Draft], lease: Lease | None) -> Job:
    """Encode an append.

    Raises:
        ConfigError: If something in it cannot be stored.
    """
    return Job(
        key=key,
        lease=None if lease is None else lease.incarnation,
        new=new_events(key, drafts, {}),
    )


def prepare_save(
    checkpoint: Checkpoint,
    delta: Sequence[Item],
    base: Base | None,
    *,
    lease: Lease | None,
    execution: ExecutionRecord | None,
    events: Sequence[Draft],
    contents: Mapping[str, str] | None,
) -> Save:
    """Encode a save on top of *base*.

    Raises:
        ConfigError: If something in it cannot be stored.
    """
    key = checkpoint.session_id
    epoch, length = checkpoint.context_epoch, len(checkpoint.context)
    begins = base is None or base.epoch != epoch
    tail = checkpoint.context.since(0 if base is None or begins else base.length)
    sequence, known = checkpoint.sequence, 0 if base is None else base.items
    previous = None if base is None else base.checkpoint
    try:
        woven = weave(delta, tail)
        items = [
            (
                n,
                sequence,
                int(shown),
                epoch if held else None,
                item.tag,
                CODEC_VERSION,
                body,
                item_sum(item.tag, body),
            )
            for n, (item, shown, held) in enumerate(woven, known + 1)
            for body in (write_row(item),)
        ]
        head = write_head(checkpoint)
        if (
            base is not None
            and previous is not None
            and previous.execution_stats is checkpoint.execution_stats
        ):
            stats = base.stats
        else:
            stats = msgspec.json.encode(checkpoint.execution_stats)
        cold = None
        if previous is None or cold_members(previous) != cold_members(checkpoint):
            cold = cold_row(checkpoint)
        small = write_small(checkpoint)
        queue = change(
            None if base is None else base.queue,
            checkpoint.queue if small is None else (),
            _MESSAGE,
        )
        calls = change(
            None if base is None else base.calls,
            checkpoint.pending_tools if small is None else (),
            _CALL,
        )
        parts = _written(QUEUE, queue) + _written(CALLS, calls)
        finished = None if execution is None else msgspec.json.encode(execution)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ConfigError(f"session {key!r} cannot be stored: {exc}") from exc
    texts = places((item for item, _, _ in woven), known + 1) if events else {}
    new = new_events(key, events, texts)
    first = 1 if base is None else base.events + 1
    return Save(
        key=key,
        lease=None if lease is None else lease.incarnation,
        new=new,
        first=first,
        event_rows=None if new.completes else new.rows(first),
        checkpoint=checkpoint,
        base=base,
        row=0 if base is None else base.row,
        begins=begins,
        start=known + 1 if base is None or begins else base.start,
        last=known + len(items),
        head=head,
        stats=stats,
        small=small,
        sum=session_sum(head, stats, small, (sequence, epoch, length)),
        cold=cold,
        items=items,
        queue=queue,
        calls=calls,
        parts=parts,
        execution=finished,
        contents={} if contents is None else _unknown(contents, base),
    )


def _written(slot: int, parts: PartsChange[Any]) -> list[tuple[int, int, bytes, int]]:
    if not parts.written:
        return []
    return [
        (slot, ordinal, body, seal(body, slot))
        for ordinal, record in parts.written
        for body in (msgspec.json.encode(record),)
    ]


def _unknown(contents: Mapping[str, str], base: Base | None) -> dict[str, str]:
    """Return the content that this session does not use yet."""
    known = frozenset[str]() if base is None else base.contents
    return {digest: text for digest, text in contents.items() if digest not in known}


cold_members: Final = attrgetter(
    "session_context",
    "first_user_message",
    "metadata",
    "role",
    "states",
    "grants",
    "instructions_digest",
    "tools_digest",
)
"""What seldom changes in a checkpoint; stored apart, so that no save repeats it."""


def cold_row(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """Return first message, labels, version, body and checksum of the label row."""
    first = checkpoint.first_user_message
    context = msgspec.json.encode(checkpoint.session_context)
    body = write_cold(checkpoint)
    return (first, context, CODEC_VERSION, body, label_sum(first, context, body))
