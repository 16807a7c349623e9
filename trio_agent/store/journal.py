"""Every statement that reads one session: its checkpoint, pages and positions."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, Final, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from trio_agent.errors import (
    ConfigError,
    CorruptStoreError,
    ProtocolError,
    UnknownError,
)
from trio_agent.protocol.events import Event
from trio_agent.protocol.items import Item
from trio_agent.state.checkpoint import (
    Checkpoint,
    ExecutionRecord,
    QueuedMessage,
    ToolCall,
    validate_checkpoint,
)
from trio_agent.store.base import (
    EventPage,
    ExecutionPage,
    JournalSlice,
    Receipt,
    TranscriptBatch,
    TranscriptPage,
)
from trio_agent.store.checksums import item_sum, label_sum, seal, session_sum
from trio_agent.store.event_rows import SELECT_EVENTS, Members, Row, decode_events, members
from trio_agent.store.rows import (
    Head,
    Small,
    read_head,
    read_part,
    read_row,
    read_small,
    whole,
)
from trio_agent.store.saving import (
    CALLS,
    QUEUE,
    Base,
    Parts,
)

T = TypeVar("T")

SLICE_BYTES: Final = 1_048_576
"""How much of a journal a reader gets at once: whoever is far behind stays small."""


class SessionRow(Struct, frozen=True):
    """The numbers of a session."""

    id: int
    key: str
    sequence: int
    first_sequence: int
    epoch: int
    start: int
    length: int
    items: int
    event_sequence: int
    token_sequence: int
    pruned_through: int


_SESSION: Final = (
    "SELECT id, key, sequence, first_sequence, epoch, start, length, items, event_sequence,"
    " token_sequence, pruned_through FROM session WHERE key=?"
)


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """Hold one view of the file for a block; writers go on meanwhile."""
    connection.execute("BEGIN")
    try:
        yield connection
    finally:
        if connection.in_transaction:
            connection.execute("COMMIT")


def find(connection: sqlite3.Connection, key: str) -> SessionRow | None:
    """Return the numbers of a session, or None."""
    found = connection.execute(_SESSION, (key,)).fetchone()
    return None if found is None else SessionRow(*found)


def require(connection: sqlite3.Connection, key: str) -> SessionRow:
    """Return the numbers of a session.

    Raises:
        UnknownError: If there is none.
    """
    session = find(connection, key)
    if session is None:
        raise UnknownError(f"there is no session {key!r}")
    return session


def base(connection: sqlite3.Connection, key: str) -> Base | None:
    """Return what a save of a session not seen before is compared with."""
    session = find(connection, key)
    return None if session is None else _base_of(session)


def _base_of(session: SessionRow) -> Base:
    """Return the base of a session of which only the numbers were read."""
    return Base(
        row=session.id,
        sequence=session.sequence,
        epoch=session.epoch,
        start=session.start,
        length=session.length,
        items=session.items,
        events=session.event_sequence,
        tokens=session.token_sequence,
    )


def load(connection: sqlite3.Connection, key: str) -> Base | None:
    """Return the newest checkpoint and its parts, validated; None if there is no session.

    Raises:
        CorruptStoreError: If a row is damaged, missing or too many.
    """
    with snapshot(connection):
        session = find(connection, key)
        if session is None:
            return None
        return load_row(connection, session)


def load_row(connection: sqlite3.Connection, session: SessionRow) -> Base:
    """Do the work of `load` inside a transaction."""
    with _blamed(session.key, "the checkpoint"):
        head, small = _head(connection, session)
    queue = _parts(connection, session, QUEUE, QueuedMessage)
    calls = _parts(connection, session, CALLS, ToolCall)
    context = items(
        session.key,
        connection.execute(
            "SELECT n, kind, version, body, sum FROM item WHERE session=? AND n>=?"
            " AND since IS NOT NULL AND until IS NULL ORDER BY n",
            (session.id, session.start),
        ),
    )
    checkpoint = whole(
        head,
        context,
        small.queue + queue.records,
        small.pending_tools + calls.records,
        length=session.length,
    )
    validate_checkpoint(checkpoint)
    found = connection.execute("SELECT digest FROM content_use WHERE session=?", (session.id,))
    return replace(
        _base_of(session),
        checkpoint=checkpoint,
        stats=msgspec.json.encode(checkpoint.execution_stats),
        queue=queue,
        calls=calls,
        contents=frozenset(digest for (digest,) in found),
    )


def _head(connection: sqlite3.Connection, session: SessionRow) -> tuple[Head, Small]:
    version, body, stats, small, check = connection.execute(
        "SELECT version, head, stats, small, sum FROM session WHERE id=?", (session.id,)
    ).fetchone()
    label = connection.execute(
        "SELECT first_user_message, context, version, body, sum FROM label WHERE session=?",
        (session.id,),
    ).fetchone()
    if label is None:
        raise CorruptStoreError(f"session {session.key!r} has no labels")
    first, context, cold_version, cold, cold_check = label
    numbers = (session.sequence, session.epoch, session.length)
    _check(session_sum(body, stats, small, numbers), check)
    _check(label_sum(first, context, cold), cold_check)
    head = read_head(
        body,
        cold,
        version=max(version, cold_version),
        session_context=context,
        first_user_message=first,
        execution_stats=stats,
    )
    named = (head.session_id, head.sequence, head.context_epoch)
    if named != (session.key, session.sequence, session.epoch):
        raise CorruptStoreError(f"session {session.key!r}: its numbers contradict each other")
    return head, read_small(version, small or b"")


def _parts(
    connection: sqlite3.Connection, session: SessionRow, slot: int, cls: type[T]
) -> Parts[Any]:
    rows: list[tuple[int, T]] = []
    for ordinal, version, body, check in connection.execute(
        "SELECT ordinal, version, body, sum FROM part WHERE session=? AND slot=?"
        " ORDER BY ordinal",
        (session.id, slot),
    ):
        with _blamed(session.key, f"{cls.__name__} {ordinal}"):
            _check(seal(body, slot), check)
            rows.append((ordinal, read_part(cls, version, body)))
    return Parts(tuple(rows))


def items(key: str, rows: Iterable[tuple[int, str, int, bytes, int]]) -> list[Item]:
    """Decode item rows, in the order given.

    Raises:
        CorruptStoreError: It names the first damaged one.
    """
    found: list[Item] = []
    n = 0
    try:
        for n, kind, version, body, check in rows:  # noqa: B007  # named by the error
            found.append(_item(kind, version, body, check))
    except (ProtocolError, TypeError) as exc:
        raise _damaged(key, f"item {n}", exc) from exc
    return found


def events(
    connection: sqlite3.Connection, session: SessionRow, rows: Iterable[Row], **which: Any
) -> Generator[tuple[Event, int]]:
    """Yield the events of the rows of `SELECT_EVENTS`; *which* of them, see `decode_events`.

    Raises:
        CorruptStoreError: It names the first damaged one.
    """
    counts_from = session.token_sequence
    for row in rows:
        try:
            yield from decode_events(
                connection, session.id, row, counts_from=counts_from, **which
            )
        except (ProtocolError, TypeError) as exc:
            raise _damaged(session.key, f"event {row[0]}", exc) from exc


def row_of(session: SessionRow, row: Row) -> Members:
    """Take a row of `SELECT_EVENTS` apart.

    Raises:
        CorruptStoreError: If it is damaged.
    """
    with _blamed(session.key, f"event {row[0]}"):
        return members(row)


def _item(kind: str, version: int, body: bytes, check: int) -> Item:
    _check(item_sum(kind, body), check)
    return cast("Item", read_row(kind, version, body))


def _check(found: int, stored: int) -> None:
    if found != stored:
        raise ProtocolError("its checksum does not match")


@contextmanager
def _blamed(key: str, what: str) -> Generator[None]:
    try:
        yield
    except (ProtocolError, TypeError) as exc:
        raise _damaged(key, what, exc) from exc


def _damaged(key: str, what: str, exc: Exception) -> CorruptStoreError:
    return CorruptStoreError(
        f"session {key!r}: {what} is damaged ({exc}); nothing was overwritten, restore a"
        " backup or rewind past it"
    )


# --- pages


def events_after(
    connection: sqlite3.Connection, key: str, after: int, limit: int
) -> JournalSlice:
    """See `CheckpointStore.events_after`."""
    with snapshot(connection):
        session = require(connection, key)
        latest = session.event_sequence
        if after > latest:
            raise ConfigError(
                f"session {key!r}: position {after} is beyond the newest event {latest}"
            )
        rows = connection.execute(
            SELECT_EVENTS + " AND sequence>? ORDER BY sequence", (session.id, after)
        )
        with closing(rows):
            page, more = _page(events(connection, session, rows, after=after), limit)
    return JournalSlice(
        events=page,
        position=page[-1].sequence if more else latest,
        latest_sequence=latest,
        pruned_through=session.pruned_through,
    )


def _page(found: Iterable[tuple[Event, int]], limit: int) -> tuple[tuple[Event, ...], bool]:
    """Return the first events of *found*, and whether it has more of them."""
    page: list[Event] = []
    size = 0
    for event, length in found:
        if len(page) == limit or size >= SLICE_BYTES:
            return tuple(page), True
        page.append(event)
        size += length
    return tuple(page), False


def event_page(connection: sqlite3.Connection, key: str, before: int, limit: int) -> EventPage:
    """See `CheckpointStore.event_page`."""
    with snapshot(connection):
        session = require(connection, key)
        at_or_behind = connection.execute(
            "SELECT min(sequence) FROM event WHERE session=? AND sequence>=?",
            (session.id, before),
        ).fetchone()  # a pack that stands there may hold older events
        rows = connection.execute(
            SELECT_EVENTS + " AND sequence<=coalesce(?, ?) ORDER BY sequence DESC",
            (session.id, *at_or_behind, before),
        )
        with closing(rows):
            found = events(connection, session, rows, before=before, backwards=True)
            page = tuple(event for event, _ in islice(found, limit + 1))
    return EventPage(
        events=page[:limit],
        latest_sequence=session.event_sequence,
        next_before_sequence=page[limit - 1].sequence if len(page) > limit else None,
    )


def transcript_page(
    connection: sqlite3.Connection, key: str, before: int, most: int
) -> TranscriptPage:
    """See `CheckpointStore.transcript_page`."""
    found: dict[int, list[tuple[int, str, int, bytes, int]]] = {}
    with snapshot(connection):
        session = require(connection, key)
        end = _end_of(connection, session, before)
        for added, *row in connection.execute(
            "SELECT added, n, kind, version, body, sum FROM item WHERE session=? AND n<?"
            " AND shown ORDER BY n DESC",
            (session.id, end),
        ):
            if added not in found and len(found) > most:
                break
            found.setdefault(added, []).append(tuple(row))
    batches = tuple(
        TranscriptBatch(sequence=added, items=tuple(items(key, reversed(rows))))
        for added, rows in list(found.items())[:most]
    )
    more = len(found) > most
    return TranscriptPage(
        batches=batches, next_before_sequence=batches[-1].sequence if more else None
    )


def _end_of(connection: sqlite3.Connection, session: SessionRow, before: int) -> int:
    """Return the first item added at or after the save *before*; items are in that order."""
    low, high = 1, session.items + 1
    while low < high:
        middle = (low + high) // 2
        found = connection.execute(
            "SELECT added FROM item WHERE session=? AND n=?", (session.id, middle)
        ).fetchone()
        if found is not None and found[0] < before:
            low = middle + 1
        else:
            high = middle
    return low


def execution_page(
    connection: sqlite3.Connection, key: str, before: int, limit: int
) -> ExecutionPage:
    """See `CheckpointStore.execution_page`."""
    with snapshot(connection):
        session = require(connection, key)
        rows = executions(connection, session, before, limit + 1)
    page = rows[:limit]
    return ExecutionPage(
        executions=tuple(record for _, record in page),
        next_before_sequence=page[-1][0] if len(rows) > limit else None,
    )


def executions(
    connection: sqlite3.Connection, session: SessionRow, before: int, limit: int
) -> Sequence[tuple[int, ExecutionRecord]]:
    """Return finished turns and the saves that ended them, newest first."""
    found: list[tuple[int, ExecutionRecord]] = []
    for sequence, version, body, check in connection.execute(
        "SELECT sequence, version, body, sum FROM execution WHERE session=? AND sequence<?"
        " ORDER BY sequence DESC LIMIT ?",
        (session.id, before, limit),
    ):
        with _blamed(session.key, f"the turn that ended with save {sequence}"):
            _check(seal(body), check)
            found.append((sequence, read_part(ExecutionRecord, version, body)))
    return found


def receipt(connection: sqlite3.Connection, key: str, submission_id: str) -> Receipt | None:
    """See `CheckpointStore.receipt`."""
    found = connection.execute(
        "SELECT receipt.sequence, digest FROM receipt JOIN session ON session.id=session"
        " WHERE key=? AND submission=?",
        (key, submission_id),
    ).fetchone()
    if found is None:
        return None
    sequence, digest = found
    return Receipt(
        submission_id=submission_id, status="duplicate", sequence=sequence, digest=digest
    )


def content(connection: sqlite3.Connection, digest: str) -> str | None:
    """See `CheckpointStore.load_content`."""
    found = connection.execute(
        "SELECT text, sum FROM content WHERE digest=?", (digest,)
    ).fetchone()
    if found is None:
        return None
    text, check = found
    if seal(text.encode()) != check:
        raise CorruptStoreError(f"content {digest!r} is damaged; restore a backup")
    return str(text)


def checkpoint_of(loaded: Base) -> Checkpoint:
    """Return the checkpoint of a base that was loaded whole."""
    assert loaded.checkpoint is not None
    return loaded.checkpoint
