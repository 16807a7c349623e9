"""Both stores keep the contract, to the letter of `check_store`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from trio_agent.store import MemoryCheckpoint, SqliteCheckpoint
from trio_agent.testing.store_check import check_store


async def test_memory() -> None:
    await check_store(MemoryCheckpoint)


async def test_sqlite(tmp_path: Path) -> None:
    count = itertools.count()

    def again(store: Any) -> SqliteCheckpoint:
        return SqliteCheckpoint(store.path)

    await check_store(lambda: SqliteCheckpoint(tmp_path / f"{next(count)}.db"), again=again)
