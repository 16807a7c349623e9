"""`verify`: SQLite's own check of the file, and every invariant of ours."""

from __future__ import annotations

import sqlite3

from trio_agent.errors import AgentError
from trio_agent.store.archive import problem
from trio_agent.store.checksums import seal
from trio_agent.store.journal import content, require, snapshot
from trio_agent.store.transfer import archive_of


def verify(connection: sqlite3.Connection) -> tuple[str, ...]:
    """See `CheckpointStore.verify`."""
    problems: list[str] = []
    with snapshot(connection):
        for (word,) in connection.execute("PRAGMA integrity_check"):
            if word != "ok":
                problems.append(f"SQLite: {word}")
        problems += [
            f"SQLite: a row of {table} belongs to no row of {parent}"
            for table, _, parent, _ in connection.execute("PRAGMA foreign_key_check")
        ]
        keys = connection.execute("SELECT key FROM session ORDER BY id").fetchall()
        for (key,) in keys:
            problems += _session(connection, key)
        problems += _contents(connection)
    return tuple(problems)


def _session(connection: sqlite3.Connection, key: str) -> list[str]:
    name = f"session {key!r}"
    session = require(connection, key)
    count, last = connection.execute(
        "SELECT count(*), coalesce(max(n), 0) FROM item WHERE session=?", (session.id,)
    ).fetchone()
    if not count == last == session.items:
        return [f"{name} has {count} items up to number {last}, expected {session.items}"]
    try:
        found = problem(archive_of(connection, key))
    except AgentError as exc:
        return [str(exc)]
    return [] if found is None else [f"{name}: {found}"]


def _contents(connection: sqlite3.Connection) -> list[str]:
    problems: list[str] = []
    for (digest,) in connection.execute("SELECT digest FROM content").fetchall():
        try:
            content(connection, digest)
        except AgentError as exc:
            problems.append(str(exc))
    unused = connection.execute(
        "SELECT digest FROM content WHERE digest NOT IN (SELECT digest FROM content_use)"
    )
    problems += [f"content {digest!r} belongs to no session" for (digest,) in unused]
    problems += [
        f"state {key!r} of {scope!r} is damaged"
        for scope, key, value, check in connection.execute("SELECT * FROM state")
        if seal(value) != check
    ]
    return problems
