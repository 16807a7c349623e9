from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trio_agent.errors import ConfigError
from trio_agent.middleware.base import Middleware, PromptSection
from trio_agent.middleware.contexts import (
    CommandContext,
    Deliver,
    ModelRequestContext,
    PreModelContext,
    PreToolContext,
    RouteContext,
    Routing,
    RuntimeContext,
)
from trio_agent.middleware.messages import Messages
from trio_agent.protocol.events import EventMsg, Notice, ToolCallEnd
from trio_agent.protocol.frontend import Block, Command, Contribution
from trio_agent.protocol.items import ToolCallItem
from trio_agent.testing.middleware_check import check_middleware
from trio_agent.tools.catalog import Catalog

counter = itertools.count()


class Good(Middleware):
    """Uses everything it may."""

    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        async with trio.open_nursery() as nursery:
            await ctx.save_state(self.name, {"openings": 1})
            nursery.start_soon(trio.sleep_forever)
            yield
            nursery.cancel_scope.cancel()

    def register(self, catalog: Catalog, runtime: RuntimeContext) -> None:
        del runtime

        def word_count(text: str) -> str:
            """Count words."""
            return str(len(text.split()))

        catalog.register(word_count)

    def prompt_section(self, runtime: RuntimeContext) -> PromptSection:
        return PromptSection(title="Words", body=f"Session {runtime.session_id}.")

    def frontend(self) -> Contribution:
        commands = (Command(name="words", description="Count."),)
        return Contribution(capability=self.name, commands=commands)

    def render(self, event: EventMsg) -> Block | None:
        return Block(title=event.name) if isinstance(event, ToolCallEnd) else None

    async def pre_model(self, ctx: PreModelContext) -> None:
        await trio.lowlevel.checkpoint()
        ctx.state = {"steps": ctx.step_index}
        ctx.push("Hello?")
        ctx.rewrite("shorter", ctx.items[-1:])
        ctx.notice("shortened")

    async def pre_tool_use(self, ctx: PreToolContext) -> None:
        ctx.rewrite(arguments={})

    async def command(self, ctx: CommandContext) -> None:
        raise ConfigError(f"{ctx.command}: not now")


class OtherName(Good):
    @property
    def name(self) -> str:
        return f"name{next(counter)}"


class OtherPrompt(Good):
    def prompt_section(self, runtime: RuntimeContext) -> PromptSection:
        del runtime
        return PromptSection(title="Words", body=str(next(counter)))


class OtherTools(Good):
    def register(self, catalog: Catalog, runtime: RuntimeContext) -> None:
        if next(counter) % 2:
            super().register(catalog, runtime)


class ImpureRender(Good):
    def render(self, event: EventMsg) -> Block | None:
        del event
        return Block(title=str(next(counter)))


class ChangesEvent(Good):
    def render(self, event: EventMsg) -> Block | None:
        getattr(event, "arguments", {}).clear()
        return None


class Fickle(Messages):
    def route_message(self, ctx: RouteContext) -> Routing:
        del ctx
        return Deliver(boundary="queue" if next(counter) % 2 else "turn")


class SteersIntoNothing(Messages):
    def route_message(self, ctx: RouteContext) -> Routing:
        del ctx
        return Deliver(boundary="steer")


class SwallowsErrors(Good):
    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        del ctx
        try:
            yield
        except Exception:
            pass


class SwallowsCancelled(Good):
    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        del ctx
        try:
            yield
        except trio.Cancelled:  # noqa: ASYNC103
            pass


class ChangesCall(Good):
    async def pre_model(self, ctx: PreModelContext) -> None:
        ctx.effects.events.clear()


class WritesOthersState(Good):
    async def pre_model(self, ctx: PreModelContext) -> None:
        ctx.effects.states["foreign"] = 1


class SpeaksForOthers(Good):
    async def pre_model(self, ctx: PreModelContext) -> None:
        ctx.effects.events.append(Notice(capability="core", text="trust me"))


class SplitsCalls(Good):
    async def pre_model(self, ctx: PreModelContext) -> None:
        ctx.effects.items.append(ToolCallItem(call_id="c", name="x", arguments={}))


class Hangs(Good):
    async def model_request(self, ctx: ModelRequestContext) -> None:
        del ctx
        await trio.sleep_forever()


class CommandSpeaksForOthers(Good):
    async def command(self, ctx: CommandContext) -> None:
        ctx.effects.events.append(Notice(capability="core", text="trust me"))


@pytest.mark.parametrize("factory", [Middleware, Messages, Good])
async def test_a_good_middleware_passes(factory: Callable[[], Middleware]) -> None:
    await check_middleware(factory)


@pytest.mark.parametrize(
    "factory",
    [
        OtherName,
        OtherPrompt,
        OtherTools,
        ImpureRender,
        ChangesEvent,
        Fickle,
        SwallowsErrors,
        SwallowsCancelled,
        ChangesCall,
        WritesOthersState,
        SpeaksForOthers,
        CommandSpeaksForOthers,
    ],
)
async def test_each_broken_rule_is_found(factory: Callable[[], Middleware]) -> None:
    with pytest.raises(AssertionError):
        await check_middleware(factory)


@pytest.mark.parametrize("factory", [SteersIntoNothing, SplitsCalls])
async def test_what_the_stack_refuses_is_refused(factory: Callable[[], Middleware]) -> None:
    with pytest.raises(ConfigError):
        await check_middleware(factory)


async def test_one_middleware_for_all_sessions_is_found() -> None:
    only = Good()

    with pytest.raises(AssertionError):
        await check_middleware(lambda: only)


async def test_a_hook_that_hangs_is_found(autojump_clock: Any) -> None:
    del autojump_clock
    with pytest.raises(trio.TooSlowError):
        await check_middleware(Hangs)
