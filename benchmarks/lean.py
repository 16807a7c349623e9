"""The loop of an agent as one would write it by hand for one purpose, and no more.

It asks the model, runs one tool after the other, keeps the history, hands its events to
whoever reads them and, if it has a database, commits twice a step. It has no recovery,
cancellation, approvals, limits, hooks or validation: what those cost is what an engine
takes longer than this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self

import trio

from benchmarks.workload import Raw
from trio_agent import ModelCall, ModelOutput, ModelRequest
from trio_agent.model.base import Model
from trio_agent.protocol.events import (
    AgentMessage,
    ContentPart,
    EventMsg,
    ModelStepCompleted,
    ModelStepStarted,
    ToolCallBegin,
    ToolCallEnd,
    TurnComplete,
    TurnStarted,
    UserMessage,
)
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    Phase,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.store.rows import write_row

HEAD = b"{}" * 200
"""About what a session's row holds; every commit rewrites it."""


class Database:
    """Commits of all sessions, one at a time, each in a thread, as the loop must not block."""

    def __init__(self, path: Path, *, sessions: int = 1) -> None:
        self._raw = Raw(path, sessions=sessions, any_thread=True)
        self._lock = trio.Lock()

    def preload(self, items: Sequence[Item]) -> None:
        self._raw.save([(0, HEAD, [write_row(item) for item in items], [])])

    async def commit(
        self, session: int, items: Sequence[Item], events: Sequence[EventMsg]
    ) -> None:
        save = (
            session,
            HEAD,
            [write_row(item) for item in items],
            [write_row(msg) for msg in events],
        )
        async with self._lock:
            await trio.to_thread.run_sync(self._raw.save, [save])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()


class Loop:
    """One session: `run` is its task, `ask` what its frontend calls."""

    def __init__(
        self,
        model: Model,
        tool: Callable[..., Awaitable[str]],
        database: Database | None = None,
        *,
        number: int = 0,
        history: Sequence[Item] = (),
    ) -> None:
        self.model = model
        self.tool = tool
        self.database = database
        self.number = number
        self.history = list(history)
        self._submit, self._inbox = trio.open_memory_channel[str](64)
        self._publish, self._events = trio.open_memory_channel[tuple[int, EventMsg]](math.inf)
        self._sequence = 0

    async def ask(self, text: str) -> None:
        """Send *text* and read every event until its turn is over."""
        await self._submit.send(text)
        async for _, msg in self._events:
            if isinstance(msg, TurnComplete):
                return

    def close(self) -> None:
        self._submit.close()

    async def run(self) -> None:
        async for text in self._inbox:
            await self._turn(text)

    async def _turn(self, text: str) -> None:
        turn = f"turn-{self._sequence}"
        await self._commit(
            [UserItem(text=text, submission_id=turn)],
            TurnStarted(turn_id=turn),
            UserMessage(turn_id=turn, text=text),
            _started(turn, 0),
        )
        step = 0
        while True:
            request = ModelRequest(
                instructions="", items=self.history, step_id=f"{turn}-{step}"
            )
            output = await self.model.respond(request, self._emit)
            completed = _completed(turn, step)
            calls = [item for item in output.items if isinstance(item, ModelCall)]
            if not calls:
                await self._answer(turn, output, completed)
                return
            step += 1
            await self._call(turn, calls, completed, _started(turn, step))

    async def _call(
        self,
        turn: str,
        calls: list[ModelCall],
        completed: ModelStepCompleted,
        following: ModelStepStarted,
    ) -> None:
        asked: list[Item] = []
        began: list[EventMsg] = [completed]
        for call in calls:
            arguments = json.loads(call.arguments)
            asked.append(
                ToolCallItem(call_id=call.call_id, name=call.name, arguments=arguments)
            )
            began.append(
                ToolCallBegin(
                    turn_id=turn, call_id=call.call_id, name=call.name, arguments=arguments
                )
            )
        await self._commit(asked, *began)
        given: list[Item] = []
        ended: list[EventMsg] = []
        for call in calls:
            output = await self.tool(**json.loads(call.arguments))
            given.append(ToolOutputItem(call_id=call.call_id, output=output))
            ended.append(
                ToolCallEnd(
                    turn_id=turn,
                    call_id=call.call_id,
                    name=call.name,
                    output=output,
                    outcome="finished",
                )
            )
        await self._commit(given, *ended, following)

    async def _answer(
        self, turn: str, output: ModelOutput, completed: ModelStepCompleted
    ) -> None:
        said = [item for item in output.items if isinstance(item, AssistantItem)]
        parts = tuple(ContentPart(phase=item.phase, text=item.text) for item in said)
        message = AgentMessage(turn_id=turn, step_id=completed.step_id, content=parts)
        await self._commit(said, message, completed, TurnComplete(turn_id=turn))

    async def _emit(self, text: str, phase: Phase = "final_answer") -> None:  # noqa: ARG002
        await trio.lowlevel.checkpoint()

    async def _commit(self, items: Sequence[Item], *events: EventMsg) -> None:
        if self.database is not None:
            await self.database.commit(self.number, items, events)
        self.history += items
        for msg in events:
            self._sequence += 1
            self._publish.send_nowait((self._sequence, msg))


def _started(turn: str, step: int) -> ModelStepStarted:
    return ModelStepStarted(
        turn_id=turn,
        step_id=f"{turn}-{step}",
        step_index=step,
        attempt=1,
        route="demo",
        request_digest="0" * 32,
        started_at_ms=1,
    )


def _completed(turn: str, step: int) -> ModelStepCompleted:
    return ModelStepCompleted(
        turn_id=turn,
        step_id=f"{turn}-{step}",
        step_index=step,
        outcome="completed",
        started_at_ms=1,
        completed_at_ms=2,
        finish_reason="stop",
    )
