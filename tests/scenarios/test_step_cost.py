"""What a step does not do again for every step before it."""

from __future__ import annotations

from typing import Any

import trio

from trio_agent import AgentConfig, ModelCall, ModelOutput, create_agent, tool
from trio_agent.store import MemoryCheckpoint
from trio_agent.testing import ScriptedModel


@tool(effect="read_only")
async def look(what: str) -> str:
    await trio.lowlevel.checkpoint()
    return f"{what}!"


def asks(*names: str) -> ModelOutput:
    calls = [
        ModelCall(name="look", arguments=f'{{"what": "{name}"}}', call_id=name)
        for name in names
    ]
    return ModelOutput.answer("", *calls)


def storage(items: Any) -> list[Any]:
    """Return the list that *items* shares with its earlier versions."""
    shared: list[Any] = items._items
    return shared


async def test_turns_copy_no_history() -> None:
    """A step tries its changes out before it commits them; that must not cost the history."""
    model = ScriptedModel("hello", asks("a"), asks("b", "c"), "done", asks("d"), "well")
    config = AgentConfig(model=model, tools=[look], checkpoints=MemoryCheckpoint())
    async with create_agent(config) as agent:
        for text in ("hi", "look", "again"):
            (await agent.run(text)).raise_for_failure()

    lengths = [len(request.items) for request in model.requests]
    assert lengths == [1, 3, 5, 9, 11, 13]
    storages = [storage(request.items) for request in model.requests]
    assert all(one is storages[0] for one in storages)
