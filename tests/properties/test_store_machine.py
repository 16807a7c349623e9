"""SQLite against memory, operation by operation.

The deterministic rules of both are in `check_store`; this finds what nobody thought of.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import trio
from hypothesis import settings

from trio_agent.store import SqliteCheckpoint
from trio_agent.testing.store_machine import StoreMachine

T = TypeVar("T")

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Nothing here is about the disk, so the files need not be on one."""


async def in_place(fn: Callable[..., Any], *args: Any, limiter: object = None) -> Any:
    """Run a blocking call here and now, so that the schedule is the same each time."""
    del limiter  # one task at a time has no need of it
    await trio.lowlevel.checkpoint()
    return fn(*args)


class SqliteMachine(StoreMachine):
    def make_store(self) -> SqliteCheckpoint:
        self.directory = tempfile.TemporaryDirectory(dir=MEMORY)
        return self.opened()

    def opened(self) -> SqliteCheckpoint:
        path = Path(self.directory.name, "sessions.db")
        return SqliteCheckpoint(path, synchronous="NORMAL", run_sync=in_place)

    def reopen(self, store: Any) -> SqliteCheckpoint:
        trio.run(store.aclose)
        return self.opened()

    def teardown(self) -> None:
        super().teardown()
        self.directory.cleanup()


TestSqlite = SqliteMachine.TestCase
TestSqlite.settings = settings(stateful_step_count=20)
