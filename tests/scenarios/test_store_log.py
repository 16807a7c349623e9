"""How long the write-ahead log gets, whoever reads, and what becomes of it afterwards."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Generator
from pathlib import Path

import pytest

from trio_agent.protocol.items import AssistantItem
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.log_size import WAL_BYTES, WARNING_BYTES
from trio_agent.testing.store_parts import begin, following, note

LONG = AssistantItem(text="x" * 1_000_000)


async def save(
    store: SqliteCheckpoint, checkpoint: Checkpoint, *items: AssistantItem
) -> Checkpoint:
    after = following(checkpoint, *items)
    await store.save(after, items, events=[note("saved")])
    return after


def log_size(store: SqliteCheckpoint) -> int:
    return store.path.with_name(f"{store.path.name}-wal").stat().st_size


async def test_it_is_emptied_behind_readers_of_ours_that_never_finish(tmp_path: Path) -> None:
    """A reader holds nothing between two pages."""
    async with SqliteCheckpoint(tmp_path / "s.db", synchronous="NORMAL") as store:
        checkpoint = await begin(store)
        largest = 0
        for number in range(30):
            checkpoint = await save(store, checkpoint, LONG)
            part = await store.events_after("s", number, 1)
            assert part.position == number + 1
            largest = max(largest, log_size(store))
        assert largest < WAL_BYTES / 2


@contextlib.contextmanager
def foreign_reader(path: Path) -> Generator[None]:
    """Look at one state of the file for the length of a block, as another program might."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        seen = connection.execute("SELECT sequence FROM session").fetchall()
        yield
        assert connection.execute("SELECT sequence FROM session").fetchall() == seen


async def test_it_shrinks_by_itself_once_a_foreign_reader_has_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves go on meanwhile, and the program's log says once why the file grows.

    Mutants: no limit, or one on other connections only; a warning with each save.
    """
    async with SqliteCheckpoint(tmp_path / "s.db", synchronous="NORMAL") as store:
        checkpoint = await begin(store)
        with caplog.at_level(logging.WARNING, "trio_agent.store"):
            with foreign_reader(store.path):
                while log_size(store) < WARNING_BYTES + WAL_BYTES:
                    checkpoint = await save(store, checkpoint, LONG)
            assert len(caplog.records) == 1
            assert str(store.path) in caplog.records[0].getMessage()
        for _ in range(2):
            checkpoint = await save(store, checkpoint)
        assert log_size(store) <= WAL_BYTES
        assert await store.load("s") == checkpoint
        assert await store.verify() == ()
