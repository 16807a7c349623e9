"""Every statement about sessions as wholes: lists, search, titles, deletion, the past."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

import msgspec

from trio_agent.errors import ConfigError, CorruptStoreError, ProtocolError
from trio_agent.protocol import codec
from trio_agent.protocol.codec import CODEC_VERSION
from trio_agent.protocol.events import SessionContext
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.protocol.text import Json
from trio_agent.state.checkpoint import Checkpoint, ExecutionStats
from trio_agent.store.base import SessionPage, SessionSummary
from trio_agent.store.checksums import seal, session_sum
from trio_agent.store.event_rows import SELECT_EVENTS, Members
from trio_agent.store.history import cut_for_rewind, readable
from trio_agent.store.journal import (
    SessionRow,
    checkpoint_of,
    executions,
    find,
    load_row,
    require,
    row_of,
)
from trio_agent.store.ownership import require_free
from trio_agent.store.rows import read_row, write_head

_SUMMARY: Final = (
    "SELECT key, sequence, event_sequence, title, first_user_message, context, stats, parent,"
    " parent_sequence, subagent, created_at_ms, updated_at_ms, changed"
    " FROM session JOIN label ON label.session=session.id"
)

_HOLDS: Final = (
    " WHERE holds(title) OR holds(first_user_message) OR EXISTS(SELECT 1 FROM item"
    " WHERE item.session=session.id AND shown AND item_holds(kind, item.version, item.body))"
)


def _listed(row: tuple[Any, ...]) -> SessionSummary:
    """Return one line of a list; damage in one session must not hide the others.

    What cannot be read is left empty here. Opening that session tells what is wrong.
    """
    try:
        return _summary(row)
    except CorruptStoreError:
        empty = (*row[:5], b"{}", b"{}", *row[7:])
        return _summary(empty)


def _summary(row: tuple[Any, ...]) -> SessionSummary:
    (key, sequence, events, title, first, context, stats, parent, at, subagent) = row[:10]
    try:
        labels = codec.structure(
            msgspec.json.decode(context), SessionContext, name="session context"
        )
        sums = codec.structure(msgspec.json.decode(stats), ExecutionStats, name="statistics")
    except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise CorruptStoreError(f"session {key!r}: its labels are damaged ({exc})") from exc
    return SessionSummary(
        session_id=key,
        sequence=sequence,
        latest_event_sequence=events,
        title=title,
        first_user_message=first,
        session_context=labels,
        execution_stats=sums,
        parent_session_id=parent,
        parent_sequence=at,
        subagent=bool(subagent),
        created_at_ms=row[10],
        updated_at_ms=row[11],
    )


def list_sessions(connection: sqlite3.Connection, before: int, limit: int) -> SessionPage:
    """See `CheckpointStore.list_sessions`."""
    rows = connection.execute(
        _SUMMARY + " WHERE changed<? ORDER BY changed DESC LIMIT ?", (before, limit + 1)
    ).fetchall()
    return SessionPage(
        sessions=tuple(map(_listed, rows[:limit])),
        next_cursor=str(rows[limit - 1][12]) if len(rows) > limit else None,
    )


def summary(connection: sqlite3.Connection, key: str) -> SessionSummary | None:
    """See `CheckpointStore.session_summary`."""
    row = connection.execute(_SUMMARY + " WHERE key=?", (key,)).fetchone()
    return None if row is None else _summary(row)


def search(connection: sqlite3.Connection, text: str, limit: int) -> tuple[SessionSummary, ...]:
    """See `CheckpointStore.search_sessions`; reads every shown item that it must."""
    folded = text.casefold()

    def holds(told: str | None) -> bool:
        return told is not None and folded in told.casefold()

    def item_holds(kind: str, version: int, body: bytes) -> bool:
        try:
            return holds(readable(read_row(kind, version, body)))  # type: ignore[arg-type]
        except ProtocolError:
            return False  # opening that session tells what is wrong

    connection.create_function("holds", 1, holds, deterministic=True)
    connection.create_function("item_holds", 3, item_holds, deterministic=True)
    rows = connection.execute(
        _SUMMARY + _HOLDS + " ORDER BY changed DESC LIMIT ?", (limit,)
    ).fetchall()
    return tuple(map(_listed, rows))


def touch(connection: sqlite3.Connection, row: int, now_ms: int) -> None:
    """Make a session the one that changed last."""
    connection.execute(
        "UPDATE session SET updated_at_ms=?, changed=(SELECT max(changed) FROM session)+1"
        " WHERE id=?",
        (now_ms, row),
    )


def rename(connection: sqlite3.Connection, key: str, title: str | None, now_ms: int) -> None:
    """See `CheckpointStore.rename_session`."""
    session = require(connection, key)
    connection.execute("UPDATE label SET title=? WHERE session=?", (title, session.id))
    touch(connection, session.id, now_ms)


def delete(connection: sqlite3.Connection, key: str) -> bool:
    """See `CheckpointStore.delete_session`."""
    session = find(connection, key)
    if session is None:
        require_free(connection, key)
        return False
    doomed: list[tuple[int, str]] = list(
        connection.execute(
            "WITH RECURSIVE doomed(id, key) AS (VALUES(?,?) UNION"
            " SELECT session.id, session.key FROM doomed"
            " JOIN label ON label.parent=doomed.key AND subagent"
            " JOIN session ON session.id=label.session) SELECT id, key FROM doomed",
            (session.id, session.key),
        )
    )
    for _, name in doomed:
        require_free(connection, name)
    for row, name in doomed:
        connection.execute("DELETE FROM claim WHERE key=?", (name,))
        connection.execute("DELETE FROM state WHERE scope=?", (name,))
        connection.execute("DELETE FROM session WHERE id=?", (row,))
    connection.execute(
        "DELETE FROM content WHERE digest NOT IN (SELECT digest FROM content_use)"
    )
    return True


def prune(connection: sqlite3.Connection, key: str, keep: int) -> int:
    """See `CheckpointStore.prune`."""
    session = require(connection, key)
    require_free(connection, key)
    through = gone = 0
    straddling: Members | None = None
    rows = connection.execute(SELECT_EVENTS + " ORDER BY sequence DESC", (session.id,))
    for row in rows:
        found = row_of(session, row)
        numbers = found.told(session.token_sequence)[::-1]
        doomed = numbers[keep:]
        keep = max(0, keep - len(numbers))
        if doomed and not gone:
            through = doomed[0]
            straddling = found if row[0] > through else None
        gone += len(doomed)
    if straddling is not None:
        connection.execute(
            "UPDATE event SET body=?, sum=? WHERE session=? AND sequence=?",
            (*straddling.after(through), session.id, straddling.row[0]),
        )
    if gone:
        connection.execute(
            "DELETE FROM event WHERE session=? AND sequence<=?", (session.id, through)
        )
        connection.execute(
            "UPDATE session SET pruned_through=? WHERE id=?", (through, session.id)
        )
    return gone


def rewind(connection: sqlite3.Connection, key: str, turns: int, now_ms: int) -> Checkpoint:
    """See `CheckpointStore.rewind`."""
    session = require(connection, key)
    require_free(connection, key)
    before = checkpoint_of(load_row(connection, session))
    done = executions(connection, session, MAX_INTEGER, -1)
    after = cut_for_rewind(before, [record.submission_id for _, record in done], turns)
    _cut(connection, session, after)
    touch(connection, session.id, now_ms)
    return after


def _cut(connection: sqlite3.Connection, session: SessionRow, after: Checkpoint) -> None:
    """Close the rows behind the cut, and write the new numbers."""
    length, epoch = len(after.context), after.context_epoch
    connection.execute(
        "UPDATE item SET until=? WHERE session=? AND n IN (SELECT n FROM item WHERE session=?"
        " AND n>=? AND since IS NOT NULL AND until IS NULL ORDER BY n LIMIT -1 OFFSET ?)",
        (epoch, session.id, session.id, session.start, length),
    )
    connection.execute(
        "INSERT INTO epoch VALUES(?,?,?,?)", (session.id, epoch, after.sequence, session.start)
    )
    head = write_head(after)
    stats, small = connection.execute(
        "SELECT stats, small FROM session WHERE id=?", (session.id,)
    ).fetchone()
    connection.execute(
        "UPDATE session SET sequence=?, epoch=?, length=?, version=?, head=?, sum=? WHERE id=?",
        (
            after.sequence,
            epoch,
            length,
            CODEC_VERSION,
            head,
            session_sum(head, stats, small, (after.sequence, epoch, length)),
            session.id,
        ),
    )


def load_state(connection: sqlite3.Connection, scope: str, key: str) -> Json:
    """See `CheckpointStore.load_state`."""
    found = connection.execute(
        "SELECT value, sum FROM state WHERE scope=? AND key=?", (scope, key)
    ).fetchone()
    if found is None:
        return None
    value, check = found
    if seal(value) != check:
        raise CorruptStoreError(f"state {key!r} of {scope!r} is damaged; restore a backup")
    return msgspec.json.decode(value)


def save_state(connection: sqlite3.Connection, scope: str, key: str, value: bytes) -> None:
    """See `CheckpointStore.save_state`."""
    connection.execute(
        "INSERT OR REPLACE INTO state VALUES(?,?,?,?)", (scope, key, value, seal(value))
    )


def require_new(connection: sqlite3.Connection, key: str) -> None:
    """Refuse an id that is taken.

    Raises:
        ConfigError: If there is such a session.
        SessionOwnedError: If a live owner is about to make it.
    """
    if find(connection, key) is not None:
        raise ConfigError(f"session {key!r} exists already")
    require_free(connection, key)
