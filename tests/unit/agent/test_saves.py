"""How many durable saves a turn costs: counted, because each is an fsync."""

from __future__ import annotations

from typing import Any

import pytest

from trio_agent import AgentConfig, MemoryCheckpoint, Middleware, create_agent, tool
from trio_agent.middleware import PreModelContext
from trio_agent.protocol.events import Event
from trio_agent.testing.models import ScriptedModel, call, text


class Counting(MemoryCheckpoint):
    """Counts what it is asked to write."""

    def __init__(self) -> None:
        super().__init__()
        self.saves = 0
        self.appends = 0

    async def save(self, *args: Any, **kwargs: Any) -> tuple[Event, ...]:
        self.saves += 1
        return await super().save(*args, **kwargs)

    async def append_events(self, *args: Any, **kwargs: Any) -> tuple[Event, ...]:
        self.appends += 1
        return await super().append_events(*args, **kwargs)


@tool(effect="read_only")
async def look(x: int) -> str:
    """Look."""
    return str(x)


async def saves_of(*script: Any, **config: Any) -> int:
    store = Counting()
    model = ScriptedModel(*script)
    options = AgentConfig(model=model, tools=[look], checkpoints=store, **config)
    async with create_agent(options) as agent:
        before = store.saves
        (await agent.run("go")).raise_for_failure()
        return store.saves - before


@pytest.mark.parametrize(
    ("script", "saves"),
    [
        ([[text("hi")]], 2),
        ([[call("look", {"x": 1})], [text("hi")]], 4),
        ([[call("look", {"x": 1})], [call("look", {"x": 2})], [text("hi")]], 6),
        ([[call("no_such_tool", {})], [text("hi")]], 3),
    ],
)
async def test_a_turn_costs_two_saves_and_two_more_for_each_step_with_a_tool(
    script: list[Any], saves: int
) -> None:
    assert await saves_of(*script) == saves


async def test_a_batch_that_ends_together_shares_its_saves() -> None:
    script = [[call("look", {"x": n}) for n in range(8)], [text("hi")]]
    assert await saves_of(*script) <= 4 + 7


class Watches(Middleware):
    """Stands before every request, so its commit cannot be merged away."""

    async def pre_model(self, ctx: PreModelContext) -> None:
        """Change nothing."""


async def test_a_hook_before_the_request_separates_the_commits_around_it() -> None:
    assert await saves_of([text("hi")], middleware=[Watches()]) == 3
