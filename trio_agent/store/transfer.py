"""Every statement that copies a whole session: forks, exports, imports, backups."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from trio_agent.errors import ConfigError, UnknownError
from trio_agent.protocol.codec import CODEC_VERSION
from trio_agent.protocol.events import TokenCount
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store.archive import (
    Archive,
    Content,
    ScopedState,
    read_archive,
    write_archive,
)
from trio_agent.store.base import Receipt, SessionSummary
from trio_agent.store.bounds import check_id
from trio_agent.store.catalog import load_state, require_new, summary
from trio_agent.store.checksums import item_sum, seal, session_sum
from trio_agent.store.event_rows import INSERT_EVENT, SELECT_EVENTS, read_stream, rows_of
from trio_agent.store.faults import told
from trio_agent.store.history import (
    Epoch,
    EventRow,
    FinishedTurn,
    ItemRow,
    epoch_at,
    first_held,
    forked,
    past_at,
)
from trio_agent.store.journal import (
    SessionRow,
    checkpoint_of,
    events,
    executions,
    items,
    load_row,
    require,
    snapshot,
)
from trio_agent.store.numbering import Entry
from trio_agent.store.ownership import require_free
from trio_agent.store.quoting import places, quote
from trio_agent.store.rows import Head, write_head, write_row, write_small
from trio_agent.store.saving import (
    CALLS,
    QUEUE,
    cold_row,
)


def _rows(connection: sqlite3.Connection, session: SessionRow) -> list[ItemRow]:
    found = connection.execute(
        "SELECT added, shown, since, until, n, kind, version, body, sum FROM item"
        " WHERE session=? ORDER BY n",
        (session.id,),
    ).fetchall()
    decoded = items(session.key, (row[4:] for row in found))
    return [
        ItemRow(added=added, item=item, shown=bool(shown), since=since, until=until)
        for (added, shown, since, until, *_), item in zip(found, decoded, strict=True)
    ]


def _epochs(connection: sqlite3.Connection, session: SessionRow) -> list[Epoch]:
    found = connection.execute(
        "SELECT epoch, sequence, start FROM epoch WHERE session=? ORDER BY epoch", (session.id,)
    )
    return [Epoch(*row) for row in found]


def fork(
    connection: sqlite3.Connection, parent_id: str, at: int, key: str, now_ms: int
) -> SessionSummary:
    """See `CheckpointStore.fork`."""
    session = require(connection, parent_id)
    if not session.first_sequence <= at <= session.sequence:
        raise UnknownError(f"session {parent_id!r} has no save {at}")
    live = at == session.sequence
    require_new(connection, key)
    if live:
        require_free(connection, parent_id)
    parent = checkpoint_of(load_row(connection, session))
    epoch = epoch_at(_epochs(connection, session), at).epoch
    rows = past_at(_rows(connection, session), epoch, at)
    context = [row.item for row in rows if row.since is not None]
    child = forked(parent, context, epoch, key, live=live)
    archive = Archive(
        head=Head.of(child),
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
        first_sequence=0,
        event_sequence=0,
        parent_session_id=parent_id,
        parent_sequence=at,
        items=tuple(rows),
        epochs=(Epoch(epoch, 0, first_held(rows)),),
    )
    row = insert(connection, archive)
    connection.execute(
        "INSERT INTO content_use SELECT ?, digest FROM content_use WHERE session=?",
        (row, session.id),
    )
    made = summary(connection, key)
    assert made is not None
    return made


def archive_of(connection: sqlite3.Connection, key: str) -> Archive:
    """Return everything about a session; call it inside a transaction."""
    session = require(connection, key)
    checkpoint = checkpoint_of(load_row(connection, session))
    found = summary(connection, key)
    assert found is not None
    journal = connection.execute(SELECT_EVENTS + " ORDER BY sequence", (session.id,))
    receipts = connection.execute(
        "SELECT submission, sequence, digest FROM receipt WHERE session=? ORDER BY rowid",
        (session.id,),
    )
    contents = connection.execute(
        "SELECT digest, text FROM content JOIN content_use USING(digest) WHERE session=?"
        " ORDER BY digest",
        (session.id,),
    )
    states = connection.execute("SELECT key FROM state WHERE scope=? ORDER BY key", (key,))
    return Archive(
        head=Head.of(checkpoint),
        queue=checkpoint.queue,
        pending_tools=checkpoint.pending_tools,
        title=found.title,
        created_at_ms=found.created_at_ms,
        updated_at_ms=found.updated_at_ms,
        first_sequence=session.first_sequence,
        event_sequence=session.event_sequence,
        pruned_through=session.pruned_through,
        parent_session_id=found.parent_session_id,
        parent_sequence=found.parent_sequence,
        items=tuple(_rows(connection, session)),
        epochs=tuple(_epochs(connection, session)),
        events=tuple(
            EventRow(
                event=event,
                step_id=step,
                stream=None if stream is None else read_stream(stream),
            )
            for *row, step, stream in journal.fetchall()
            for event, _ in events(connection, session, [(*row, step, stream)])
        ),
        executions=tuple(
            FinishedTurn(sequence=sequence, record=record)
            for sequence, record in reversed(executions(connection, session, MAX_INTEGER, -1))
        ),
        receipts=tuple(
            Receipt(submission_id=name, status="duplicate", sequence=number, digest=digest)
            for name, number, digest in receipts
        ),
        contents=tuple(Content(digest=digest, text=text) for digest, text in contents),
        states=tuple(
            ScopedState(key=name, value=load_state(connection, key, name))
            for (name,) in states.fetchall()
        ),
    )


def export(connection: sqlite3.Connection, key: str) -> bytes:
    """See `CheckpointStore.export_session`."""
    with snapshot(connection):
        archive = archive_of(connection, key)
    return write_archive(archive)


def import_(connection: sqlite3.Connection, data: bytes, key: str | None) -> str:
    """See `CheckpointStore.import_session`."""
    archive = read_archive(data, key)
    check_id(archive.head.session_id)
    insert(connection, archive)
    return archive.head.session_id


def insert(connection: sqlite3.Connection, archive: Archive) -> int:
    """Write *archive* as a new session, and return its row."""
    checkpoint = archive.checkpoint()
    require_new(connection, checkpoint.session_id)
    row = _insert_numbers(connection, archive, checkpoint)
    for sql, rows in _tables(row, archive, checkpoint):
        connection.executemany(sql, rows)
    return row


def _insert_numbers(
    connection: sqlite3.Connection, archive: Archive, checkpoint: Checkpoint
) -> int:
    head, stats = write_head(checkpoint), msgspec.json.encode(checkpoint.execution_stats)
    small = write_small(checkpoint)
    epoch, length = checkpoint.context_epoch, len(checkpoint.context)
    tokens = [
        row.event.sequence for row in archive.events if isinstance(row.event.msg, TokenCount)
    ]
    (row,) = connection.execute(
        "INSERT INTO session(key, sequence, first_sequence, epoch, start, length, items,"
        " event_sequence, token_sequence, pruned_through, changed, updated_at_ms, version,"
        " head, stats, small, sum) SELECT ?,?,?,?,?,?,?,?,?,?,"
        " coalesce((SELECT max(changed) FROM session), 0)+1,?,?,?,?,?,? RETURNING id",
        (
            checkpoint.session_id,
            checkpoint.sequence,
            archive.first_sequence,
            epoch,
            archive.epochs[-1].start,
            length,
            len(archive.items),
            archive.event_sequence,
            max(tokens, default=0),
            archive.pruned_through,
            archive.updated_at_ms,
            CODEC_VERSION,
            head,
            stats,
            small,
            session_sum(head, stats, small, (checkpoint.sequence, epoch, length)),
        ),
    ).fetchone()
    first, *cold = cold_row(checkpoint)
    connection.execute(
        "INSERT INTO label VALUES(?,?,?,?,?,?,?,?,?,?,?)",
        (
            row,
            archive.created_at_ms,
            archive.title,
            first,
            cold[0],
            archive.parent_session_id,
            archive.parent_sequence,
            checkpoint.role.kind == "subagent",
            *cold[1:],
        ),
    )
    return int(row)


def _tables(
    row: int, archive: Archive, checkpoint: Checkpoint
) -> list[tuple[str, list[tuple[Any, ...]]]]:
    version = CODEC_VERSION
    apart = write_small(checkpoint) is None
    parts = [(QUEUE, n, record) for n, record in enumerate(checkpoint.queue) if apart]
    calls = [(CALLS, n, record) for n, record in enumerate(checkpoint.pending_tools) if apart]
    key = checkpoint.session_id
    return [
        (
            "INSERT INTO epoch VALUES(?,?,?,?)",
            [(row, one.epoch, one.sequence, one.start) for one in archive.epochs],
        ),
        (
            "INSERT INTO item VALUES(?,?,?,?,?,?,?,?,?,?)",
            [
                (
                    row,
                    n,
                    one.added,
                    int(one.shown),
                    one.since,
                    one.until,
                    one.item.tag,
                    version,
                    body,
                    item_sum(one.item.tag, body),
                )
                for n, one in enumerate(archive.items, 1)
                for body in (write_row(one.item),)
            ],
        ),
        (
            "INSERT INTO part VALUES(?,?,?,?,?,?)",
            [
                (row, slot, n, version, body, seal(body, slot))
                for slot, n, record in (*parts, *calls)
                for body in (msgspec.json.encode(record),)
            ],
        ),
        (INSERT_EVENT, [(row, *event) for event in rows_of(_numbered(archive))]),
        (
            "INSERT INTO execution VALUES(?,?,?,?,?)",
            [
                (row, turn.sequence, version, body, seal(body))
                for turn in archive.executions
                for body in (msgspec.json.encode(turn.record),)
            ],
        ),
        (
            "INSERT INTO receipt VALUES(?,?,?,?)",
            [(row, one.submission_id, one.sequence, one.digest) for one in archive.receipts],
        ),
        (
            "INSERT OR IGNORE INTO content VALUES(?,?,?)",
            [(one.digest, one.text, seal(one.text.encode())) for one in archive.contents],
        ),
        (
            "INSERT INTO content_use VALUES(?,?)",
            [(row, one.digest) for one in archive.contents],
        ),
        (
            "INSERT OR REPLACE INTO state VALUES(?,?,?,?)",
            [
                (key, one.key, value, seal(value))
                for one in archive.states
                for value in (msgspec.json.encode(one.value),)
            ],
        ),
    ]


def backup(connection: sqlite3.Connection, target: Path) -> None:
    """See `CheckpointStore.backup`."""
    try:
        os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        raise ConfigError(f"{target} exists; a backup overwrites nothing") from None
    with told(target):
        copy = sqlite3.connect(target, isolation_level=None)
        try:
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, whole by itself
            copy.execute("UPDATE claim SET owner=NULL")
            copy.execute("DELETE FROM owner")
        except BaseException:
            target.unlink()
            raise
        finally:
            copy.close()


def _numbered(archive: Archive) -> Generator[tuple[int, Entry]]:
    """Yield the events of *archive*, encoded anew, each with its number."""
    texts = places((row.item for row in archive.items), 1)
    for row in archive.events:
        event = row.event
        stored, item = quote(event.msg, texts)
        entry = Entry(
            at_ms=event.recorded_at_ms,
            submission_id=event.submission_id,
            msg=event.msg,
            step_id=row.step_id,
            stream=row.stream,
            body=write_row(stored),
            item=item,
        )
        yield event.sequence, entry
