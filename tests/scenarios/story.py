"""What the stories share: a session over a memory store, tools that leave traces, readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import trio

from trio_agent import Agent, AgentConfig
from trio_agent.protocol.events import Event, EventMsg, ToolCallEnd
from trio_agent.protocol.items import Item, ToolOutputItem
from trio_agent.state.checkpoint import Checkpoint, Effect, ExecutionRecord
from trio_agent.store.base import CheckpointStore
from trio_agent.testing.models import ScriptedModel, ScriptEntry, StrictModel
from trio_agent.tools.function import FunctionTool, tool

M = TypeVar("M")
SESSION = "s"


class Strict(StrictModel):
    """A script that refuses to answer any history that a real provider would refuse."""

    def __init__(self, *script: ScriptEntry) -> None:
        self.scripted = ScriptedModel(*script)
        super().__init__(self.scripted)

    @property
    def requests(self) -> Sequence[Any]:
        """Every request that was acceptable."""
        return self.scripted.requests


def configure(model: Any, store: CheckpointStore | None = None, **options: Any) -> AgentConfig:
    """Return a configuration of the session that all stories are about."""
    options.setdefault("session_id", SESSION)
    return AgentConfig(model=model, checkpoints=store, **options)


async def until(agent: Agent, kind: type[M], *, where: Callable[[M], bool] | None = None) -> M:
    """Read the agent's own reader up to the next message of *kind*."""
    async for event in agent.events:
        msg: Any = event.msg
        if isinstance(msg, kind) and (where is None or where(msg)):
            return msg
    raise AssertionError(f"the session ended before {kind.__name__}")


async def journal(store: CheckpointStore, session_id: str = SESSION) -> list[Event]:
    """Return every event that the store has, oldest first."""
    events: list[Event] = []
    position = 0
    while True:
        found = await store.events_after(session_id, position, 1000)
        events.extend(found.events)
        position = found.position
        if position >= found.latest_sequence:
            return events


async def messages(store: CheckpointStore, kind: type[M], session_id: str = SESSION) -> list[M]:
    """Return the stored messages of one kind."""
    found: list[Any] = [event.msg for event in await journal(store, session_id)]
    return [msg for msg in found if isinstance(msg, kind)]


async def kinds(store: CheckpointStore, *but: type[EventMsg]) -> list[str]:
    """Return the names of all stored messages in order, without those of the kinds *but*."""
    events = await journal(store)
    return [type(event.msg).__name__ for event in events if not isinstance(event.msg, but)]


async def stored(store: CheckpointStore, session_id: str = SESSION) -> Checkpoint:
    """Return the newest checkpoint."""
    checkpoint = await store.load(session_id)
    assert checkpoint is not None
    return checkpoint


async def executions(
    store: CheckpointStore, session_id: str = SESSION
) -> list[ExecutionRecord]:
    """Return all finished turns, oldest first."""
    page = await store.execution_page(session_id, limit=1000)
    return list(reversed(page.executions))


async def outcomes(store: CheckpointStore) -> dict[str, str]:
    """Return the outcome of every ended call by its tool's name (with ``n``, if it has one)."""
    return {end.name: end.outcome for end in await messages(store, ToolCallEnd)}


def outputs(items: Sequence[Item]) -> list[str]:
    """Return the outputs in a history, in order."""
    return [item.output for item in items if isinstance(item, ToolOutputItem)]


@attrs.define
class World:
    """What tools did to it: one entry each time that a handler was really entered."""

    entered: list[str] = attrs.field(factory=list)
    left: list[str] = attrs.field(factory=list)
    keys: list[str] = attrs.field(factory=list)
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def enter(self, name: str) -> None:
        """Record an entry and wake who waits for one."""
        self.entered.append(name)
        self.changed.unpark_all()

    async def wait_entered(self, count: int) -> None:
        """Wait for the n-th entry in all."""
        while len(self.entered) < count:
            await self.changed.park()

    def tool(
        self,
        name: str,
        *,
        seconds: float = 0,
        raises: Exception | None = None,
        output: str | None = None,
        effect: Effect = "undeclared",
        needs_approval: bool = False,
        exclusive: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> FunctionTool[..., Any]:
        """Return a tool that takes its time, leaves a trace, and then answers or raises."""

        async def act() -> str:
            self.enter(name)
            await trio.sleep(seconds)
            if raises is not None:
                raise raises
            self.left.append(name)
            return f"{name} is done" if output is None else output

        return tool(
            name=name,
            effect=effect,
            needs_approval=needs_approval,
            exclusive=exclusive,
            timeout=timeout,
            **options,
        )(act)
