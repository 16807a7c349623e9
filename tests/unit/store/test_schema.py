"""Connections to the file, as others open, close and hold it."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest

from trio_agent.store.schema import connect, prepare


def test_a_connection_waits_for_whoever_closes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one to close it empties the log, and lets nobody in meanwhile.

    Mutant: without waiting, an opener failed at once, and was told of a lock that had
    been held for seconds.
    """
    path = tmp_path / "s.db"
    prepare(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as last:
        last.execute("PRAGMA locking_mode=EXCLUSIVE")
        last.execute("BEGIN IMMEDIATE")
        last.execute("COMMIT")
        naps: list[float] = []

        def nap(seconds: float) -> None:
            naps.append(seconds)
            last.close()

        monkeypatch.setattr(time, "sleep", nap)
        with contextlib.closing(connect(path, "FULL", wait=0)) as connection:
            connection.execute("BEGIN IMMEDIATE")
    assert len(naps) == 1
