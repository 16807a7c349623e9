"""The machine that ships with the library, over the real engine and a real SQLite file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio
from hypothesis import settings

from trio_agent import SqliteCheckpoint
from trio_agent.store.base import CheckpointStore
from trio_agent.testing import AgentMachine


async def in_place(
    sync_fn: Callable[..., Any], /, *args: Any, limiter: trio.CapacityLimiter
) -> Any:
    """Run in this thread, so that schedules are the same each time."""
    await trio.lowlevel.checkpoint()
    return sync_fn(*args)


class OverSqlite(AgentMachine):
    def make_store(self) -> CheckpointStore:
        self.directory = tempfile.TemporaryDirectory()
        path = Path(self.directory.name) / "db"
        return SqliteCheckpoint(path, synchronous="NORMAL", run_sync=in_place)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            trio.run(self.store.aclose)
            self.directory.cleanup()


class OverMemory(AgentMachine):
    pass


TestOverSqlite = OverSqlite.TestCase
TestOverMemory = OverMemory.TestCase

# Ten minutes in the deep profile, not hours.
MOST = 2_000
TestOverSqlite.settings = settings(max_examples=min(MOST, settings().max_examples))
TestOverMemory.settings = settings(max_examples=min(MOST, settings().max_examples))
