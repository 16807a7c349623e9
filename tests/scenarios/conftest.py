"""A deadline for every story, in its own time: none may hang."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_agent.store.base import CheckpointStore
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.store.sqlite import SqliteCheckpoint

HERE = Path(__file__).parent
REAL_SECONDS, VIRTUAL_SECONDS = 300, 100_000


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Give every story its deadline; in virtual time a deadlock meets it at once."""
    for item in items:
        if not isinstance(item, pytest.Function) or HERE not in item.path.parents:
            continue
        if inspect.iscoroutinefunction(item.obj):
            virtual = "autojump_clock" in item.fixturenames
            item.obj = _limited(item.obj, VIRTUAL_SECONDS if virtual else REAL_SECONDS)


def _limited(story: Callable[..., Awaitable[None]], seconds: float) -> Callable[..., Any]:
    @functools.wraps(story)
    async def limited(**fixtures: Any) -> None:
        with trio.fail_after(seconds):
            await story(**fixtures)

    return limited


@pytest.fixture
async def store() -> AsyncGenerator[MemoryCheckpoint]:
    """Return a store that outlives the processes of a story."""
    yield MemoryCheckpoint()
    await trio.lowlevel.checkpoint()


class Shelf:
    """Where sessions lie between the openings of a story: in memory, or in a file.

    A file is closed and opened anew each time, as another process would.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._memory = MemoryCheckpoint()

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[CheckpointStore]:
        """Hold the store open for the length of the block."""
        await trio.lowlevel.checkpoint()
        if self.path is None:
            yield self._memory
        else:
            async with SqliteCheckpoint(self.path) as file:
                yield file
        await trio.lowlevel.checkpoint()


@pytest.fixture(params=["memory", "sqlite"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Shelf:
    """Return a place for sessions of each kind. With a file, time is real time."""
    return Shelf(tmp_path / "sessions.db" if request.param == "sqlite" else None)
