"""What SQLite and the system say, in our words: which error, which file, what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from trio_agent.errors import (
    CheckpointError,
    ConfigError,
    CorruptStoreError,
    ProtocolError,
    StoreVersionError,
)

BUSY_SECONDS: Final = 4.0
"""How long a write waits for another process's lock; below the default ``shutdown_grace``."""

_REMEDIES: Final[dict[int, tuple[type[CheckpointError], str]]] = {
    sqlite3.SQLITE_BUSY: (
        CheckpointError,
        f"another process held its write lock for over {BUSY_SECONDS:g} s; try again later",
    ),
    sqlite3.SQLITE_LOCKED: (CheckpointError, "another connection holds its lock; try again"),
    sqlite3.SQLITE_FULL: (
        CheckpointError,
        "there is no space left; free some, then open the session again",
    ),
    sqlite3.SQLITE_READONLY: (
        CheckpointError,
        "it cannot be written; give this user write permission to the file and its directory",
    ),
    sqlite3.SQLITE_PERM: (CheckpointError, "access is denied; check its permissions"),
    sqlite3.SQLITE_CANTOPEN: (
        CheckpointError,
        "it cannot be opened; check that it is a file in a directory that this user can write",
    ),
    sqlite3.SQLITE_IOERR: (
        CheckpointError,
        "the disk failed to read or write; check the disk, then open the session again",
    ),
    sqlite3.SQLITE_CORRUPT: (
        CorruptStoreError,
        "it is damaged; restore a backup, nothing was overwritten",
    ),
    sqlite3.SQLITE_NOTADB: (
        StoreVersionError,
        "it is not an SQLite database; choose another path, or restore a backup",
    ),
    sqlite3.SQLITE_TOOBIG: (CheckpointError, "a value is larger than SQLite stores"),
    sqlite3.SQLITE_CONSTRAINT: (
        CorruptStoreError,
        "its rows contradict what was to be written; run verify() and restore a backup",
    ),
}


@contextmanager
def told(path: Path) -> Generator[None]:
    """Turn errors of SQLite and of records read from *path* into ours, the original as cause.

    Raises:
        CheckpointError: Or the subclass that fits.
    """
    try:
        yield
    except sqlite3.Error as exc:
        cls, remedy = _REMEDIES.get(_code(exc), (CheckpointError, "SQLite failed"))
        if not _code(exc) and isinstance(exc, sqlite3.OperationalError):
            cls, remedy = _REMEDIES[sqlite3.SQLITE_CORRUPT]  # a text that is not UTF-8
        raise cls(f"{path}: {remedy}") from exc
    except OSError as exc:
        why = exc.strerror or "the system refused"
        raise CheckpointError(f"{path}: {why}; check the path and its permissions") from exc


def is_busy(exc: sqlite3.Error) -> bool:
    """Whether *exc* says that somebody else holds a lock."""
    return _code(exc) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def is_ours_alone(exc: BaseException) -> bool:
    """Whether *exc* comes from what one save wanted to write, not from the file or the disk."""
    if isinstance(exc, sqlite3.Error):
        return _code(exc) in {
            sqlite3.SQLITE_CONSTRAINT,
            sqlite3.SQLITE_TOOBIG,
            sqlite3.SQLITE_MISMATCH,
        } or isinstance(exc, sqlite3.ProgrammingError | sqlite3.InterfaceError)
    return isinstance(exc, OverflowError | CorruptStoreError | ConfigError | ProtocolError)


def _code(exc: sqlite3.Error) -> int:
    """Return the primary result code, 0 if the error is the driver's own."""
    code: int = getattr(exc, "sqlite_errorcode", 0)
    if code == sqlite3.SQLITE_IOERR_SHMSIZE:  # there was no space for the log's index
        return sqlite3.SQLITE_FULL
    return code & 0xFF
