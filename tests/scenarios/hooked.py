"""A middleware that does in each hook what a test says, and what tests of hooks look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from tests.scenarios.story import SESSION
from trio_agent import Middleware
from trio_agent.middleware import (
    CommandContext,
    MessageSubmitContext,
    PermissionContext,
    PostToolContext,
    PreModelContext,
    PreToolContext,
    StopContext,
    TurnEndContext,
)
from trio_agent.protocol.events import Event
from trio_agent.protocol.frontend import Command, Contribution
from trio_agent.store.base import CheckpointStore

Act = Callable[[Any], object]


class Hooked(Middleware):
    """Does in each hook what the test says, and notes what ran."""

    def __init__(self, name: str = "hooked", log: list[str] | None = None, **acts: Act) -> None:
        self._name = name
        self._acts = acts
        self.log = [] if log is None else log

    @property
    def name(self) -> str:
        return self._name

    async def _act(self, hook: str, ctx: Any) -> None:
        await trio.lowlevel.checkpoint()
        if hook in self._acts:
            self.log.append(self._name)
            self._acts[hook](ctx)

    def frontend(self) -> Contribution | None:
        if "command" not in self._acts:
            return None
        commands = (
            Command(name="do", description=""),
            Command(name="idle", description="", requires_idle=True),
        )
        return Contribution(capability=self._name, commands=commands)

    async def message_submit(self, ctx: MessageSubmitContext) -> None:
        await self._act("message_submit", ctx)

    async def pre_model(self, ctx: PreModelContext) -> None:
        await self._act("pre_model", ctx)

    async def pre_tool_use(self, ctx: PreToolContext) -> None:
        await self._act("pre_tool_use", ctx)

    async def permission_request(self, ctx: PermissionContext) -> None:
        await self._act("permission_request", ctx)

    async def post_tool_use(self, ctx: PostToolContext) -> None:
        await self._act("post_tool_use", ctx)

    async def stop(self, ctx: StopContext) -> None:
        await self._act("stop", ctx)

    async def turn_end(self, ctx: TurnEndContext) -> None:
        await self._act("turn_end", ctx)

    async def command(self, ctx: CommandContext) -> None:
        await self._act("command", ctx)


def raising(error: Exception) -> Act:
    def act(ctx: object) -> None:
        raise error

    return act


def events_of(events: list[Event], *kinds: type[Any]) -> list[str]:
    return [type(event.msg).__name__ for event in events if isinstance(event.msg, kinds)]


async def transcript(store: CheckpointStore) -> list[Any]:
    page = await store.transcript_page(SESSION, max_batches=1_000)
    return [item for batch in reversed(page.batches) for item in batch.items]
