"""The file: its tables, its pragmas, and the numbered steps from any older form to this one.

Rules:

1.  A step runs in one transaction together with the change of ``user_version``, so
    a killed migration is repeated or was never begun.
2.  The version is read inside that transaction: of two processes that migrate at
    once, the second finds nothing left to do.
3.  A file is ours if its ``application_id`` says so, or if it is empty. Another
    program's file is refused before anything is written to it.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

from trio_agent.errors import CheckpointError, StoreVersionError
from trio_agent.store.faults import BUSY_SECONDS, is_busy
from trio_agent.store.log_size import WAL_BYTES

APPLICATION_ID: Final = 0x7472696F
"""``"trio"`` in ASCII; SQLite keeps it in the file's header."""

OLDEST_SQLITE: Final = (3, 38, 0)
"""``RETURNING``, window functions and ``unixepoch``; Python 3.11 ships with newer ones."""

MIGRATION_SECONDS: Final = 60.0
"""How long an opener waits for another process that creates or migrates the file."""

_making: Final = threading.Lock()
"""Held while a new file is made, so that no other store has it open meanwhile."""

T = TypeVar("T")
Synchronous: TypeAlias = Literal["FULL", "NORMAL"]

SCHEMA_1: Final = """
CREATE TABLE session(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    sequence INTEGER NOT NULL,
    first_sequence INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    start INTEGER NOT NULL,
    length INTEGER NOT NULL,
    items INTEGER NOT NULL,
    event_sequence INTEGER NOT NULL DEFAULT 0,
    token_sequence INTEGER NOT NULL DEFAULT 0,
    token_before INTEGER NOT NULL DEFAULT 0,
    pruned_through INTEGER NOT NULL DEFAULT 0,
    changed INTEGER NOT NULL,
    updated_at_ms INTEGER NOT NULL,
    version INTEGER NOT NULL,
    head BLOB NOT NULL,
    stats BLOB NOT NULL,
    small BLOB,
    sum INTEGER NOT NULL
);
CREATE UNIQUE INDEX session_changed ON session(changed);
CREATE TABLE label(
    session INTEGER PRIMARY KEY REFERENCES session(id) ON DELETE CASCADE,
    created_at_ms INTEGER NOT NULL,
    title TEXT,
    first_user_message TEXT,
    context BLOB NOT NULL,
    parent TEXT,
    parent_sequence INTEGER,
    subagent INTEGER NOT NULL,
    version INTEGER NOT NULL,
    body BLOB NOT NULL,
    sum INTEGER NOT NULL
);
CREATE INDEX label_parent ON label(parent) WHERE parent IS NOT NULL;
CREATE TABLE item(
    session INTEGER NOT NULL REFERENCES session(id) ON DELETE CASCADE,
    n INTEGER NOT NULL,
    added INTEGER NOT NULL,
    shown INTEGER NOT NULL,
    since INTEGER,
    until INTEGER,
    kind TEXT NOT NULL,
    version INTEGER NOT NULL,
    body BLOB NOT NULL,
    sum INTEGER NOT NULL,
    PRIMARY KEY(session, n)
);
CREATE TABLE epoch(
    session INTEGER NOT NULL REFERENCES session(id) ON DELETE CASCADE,
    epoch INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    start INTEGER NOT NULL,
    PRIMARY KEY(session, epoch)
);
CREATE TABLE part(
    session INTEGER NOT NULL REFERENCES session(id) ON DELETE CASCADE,
    slot INTEGER NOT NULL,
    ordinal INTEGER NOT NULL,
    version INTEGER NOT NULL,
    body BLOB NOT NULL,
    sum INTEGER NOT NULL,
    PRIMARY KEY(session, slot, ordinal)
) WITHOUT ROWID;
CREATE TABLE event(
    session INTEGER NOT NULL REFERENCES session(id) ON DELETE CASCADE,
    sequence INTEGER NOT NULL,
    at INTEGER NOT NULL,
    kind TEXT NOT NULL,
    submission TEXT,
    step TEXT,
    stream TEXT,
    version INTEGER NOT NULL,
    body BLOB NOT NULL,
    sum INTEGER NOT NULL,
    PRIMARY KEY(session, sequence)
);
CREATE INDEX event_step ON event(session, step) WHERE step IS NOT NULL;
CREATE TABLE execution(
    session INTEGER NOT NULL REFERENCES session(id) ON DELETE CASCADE,
    sequence INTEGER NOT NULL,
    version INTEGER NOT NULL,
    body BLOB NOT NULL,
    sum INTEGER NOT NULL,
    PRIMARY KEY(session, sequence)
);
CREATE TABLE receipt(
    session INTEGER NOT NULL REFERENCES session(id) ON DELETE CASCADE,
    submission TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY(session, submission)
);
CREATE TABLE content(
    digest TEXT PRIMARY KEY,
    text TEXT NOT NULL,
    sum INTEGER NOT NULL
);
CREATE TABLE content_use(
    session INTEGER NOT NULL REFERENCES session(id) ON DELETE CASCADE,
    digest TEXT NOT NULL REFERENCES content(digest),
    PRIMARY KEY(session, digest)
) WITHOUT ROWID;
CREATE INDEX content_use_digest ON content_use(digest);
CREATE TABLE state(
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    sum INTEGER NOT NULL,
    PRIMARY KEY(scope, key)
);
CREATE TABLE owner(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    host TEXT NOT NULL,
    boot TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started TEXT NOT NULL,
    since_ms INTEGER NOT NULL,
    renewals INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE claim(
    key TEXT PRIMARY KEY,
    incarnation INTEGER NOT NULL,
    owner INTEGER,
    name TEXT NOT NULL,
    since_ms INTEGER NOT NULL
);
CREATE INDEX claim_owner ON claim(owner) WHERE owner IS NOT NULL;
CREATE TABLE counter(name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO counter VALUES('incarnation', 0);
"""

SCHEMA_2: Final = """
ALTER TABLE session DROP COLUMN token_before;
ALTER TABLE event ADD COLUMN item INTEGER;
"""
"""A save names its own numbers; an event may leave its text to an item."""

SCHEMA_3: Final = ""
"""A row of ``event`` may hold several events, which an older library must not meet."""

MIGRATIONS: Final[tuple[str, ...]] = (SCHEMA_1, SCHEMA_2, SCHEMA_3)
"""Step *n* makes version *n* out of version *n* - 1; a released step never changes."""


def connect(path: Path, synchronous: Synchronous, *, wait: float) -> sqlite3.Connection:
    """Return a configured connection to *path*, which `prepare` has made ready.

    Args:
        path: The file.
        synchronous: ``"FULL"`` survives a power cut, ``"NORMAL"`` a killed process.
        wait: Seconds that SQLite itself waits for a lock.
    """
    connection = sqlite3.connect(
        path, timeout=wait, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    try:
        # it reads the file, which whoever closes it as the last one holds for a moment
        waited(lambda: connection.execute(f"PRAGMA synchronous={synchronous}"))
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(path: Path, *, migrations: Sequence[str] = MIGRATIONS) -> None:
    """Create *path* or bring it to the newest version, whoever else does the same now.

    Raises:
        StoreVersionError: If it is newer than this library, or another program's.
        CheckpointError: If it cannot be a store where it is.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        raise CheckpointError(f"SQLite {sqlite3.sqlite_version} is too old; {oldest} is needed")
    _make(path)
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        newest = len(migrations)
        version = waited(
            lambda: _version_now(connection, path, newest), seconds=MIGRATION_SECONDS
        )
        if version < newest:
            waited(
                lambda: connection.execute("PRAGMA auto_vacuum=INCREMENTAL"),
                seconds=MIGRATION_SECONDS,
            )
            _use_wal(connection, path)
            while _step(connection, path, migrations):
                pass
        else:
            _use_wal(connection, path)
    finally:
        connection.close()


def _make(path: Path) -> None:
    """Create an empty file that is private, if there is none.

    A file that exists is not even opened here: the system takes a process's locks on
    a file away when the process closes *any* descriptor of it. Another store of this
    process would then write into a log that other processes believe to be nobody's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.realpath(path)
    with _making:
        try:
            # SQLite gives its log files the mode of the file, so this makes all private
            made = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            # SQLite would find out when it is too late to say no
            effective = os.access in os.supports_effective_ids
            if not os.access(target, os.R_OK | os.W_OK, effective_ids=effective):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None
        else:
            os.close(made)


def _version_now(connection: sqlite3.Connection, path: Path, newest: int) -> int:
    """Return `_version` in one view: another process may be writing its parts right now."""
    connection.execute("BEGIN")
    try:
        return _version(connection, path, newest)
    finally:
        if connection.in_transaction:  # a disk without space has ended it
            connection.execute("ROLLBACK")


def _version(connection: sqlite3.Connection, path: Path, newest: int) -> int:
    """Return the file's version, 0 for an empty one, having refused what is not ours."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (objects,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if application != APPLICATION_ID and (application or version or objects):
        raise StoreVersionError(
            f"{path} is the database of another program; choose another path"
        )
    if version > newest:
        raise StoreVersionError(
            f"{path} has version {version}; this library reads versions up to {newest}:"
            " install a newer trio_agent"
        )
    return int(version)


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    (mode,) = waited(
        lambda: connection.execute("PRAGMA journal_mode=WAL").fetchone(),
        seconds=MIGRATION_SECONDS,
    )
    if mode != "wal":
        raise CheckpointError(
            f"{path}: SQLite cannot use a write-ahead log here (it says {mode!r}); network file"
            " systems have none, choose a path on a local disk"
        )


def _step(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> bool:
    """Run the next step, if there is one."""
    waited(lambda: connection.execute("BEGIN IMMEDIATE"), seconds=MIGRATION_SECONDS)
    try:
        version = _version(connection, path, len(migrations))
        if version < len(migrations):
            for statement in statements(migrations[version]):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={version + 1}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return version + 1 < len(migrations)


def statements(script: str) -> list[str]:
    """Split *script* into statements; `executescript` would commit by itself first."""
    found: list[str] = []
    rest = ""
    for piece in script.split(";")[:-1]:
        rest += piece + ";"
        if sqlite3.complete_statement(rest):
            found.append(rest)
            rest = ""
    assert not rest.strip(), rest
    return found


def waited(attempt: Callable[[], T], *, seconds: float = BUSY_SECONDS) -> T:
    """Return what *attempt* returns, trying again while another process holds a lock.

    SQLite's own waiting sleeps up to 0.1 s between two looks; under steady traffic
    somebody else gets the lock each time. Short random pauses give everyone a turn.
    """
    deadline = time.monotonic() + seconds
    pause = 0.0005
    while True:
        try:
            return attempt()
        except sqlite3.Error as exc:
            if not is_busy(exc) or time.monotonic() >= deadline:
                raise
        time.sleep(random.uniform(pause / 2, pause))  # noqa: S311  # no secret
        pause = min(pause * 1.5, 0.005)
