"""A deadline for every story, in its own time: none may hang."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import trio

from trio_agent.store.memory import MemoryCheckpoint


@pytest.fixture
async def store() -> AsyncGenerator[MemoryCheckpoint]:
    """Return a store that outlives the processes of a story."""
    yield MemoryCheckpoint()
    await trio.lowlevel.checkpoint()
