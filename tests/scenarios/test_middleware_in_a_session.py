"""The hooks of middlewares in real sessions: when each runs, and what it leaves."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from trio_agent import AgentConfig, create_agent
from trio_agent.middleware import (
    CommandContext,
    MessageSubmitContext,
    Middleware,
    ModelRequestContext,
    PermissionContext,
    PostToolContext,
    PreModelContext,
    PreToolContext,
    RuntimeContext,
    StopContext,
    TurnEndContext,
)
from trio_agent.model.base import ModelCall, ModelOutput
from trio_agent.protocol.events import Notice, Warning  # noqa: A004
from trio_agent.protocol.frontend import Command, Contribution
from trio_agent.protocol.items import AssistantItem, ToolCallItem, ToolOutputItem, UserItem
from trio_agent.protocol.ops import CapabilityCommand, Interrupt
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import ScriptedModel
from trio_agent.tools.function import tool

Act = Callable[[str, Any], None]
CALL = ModelOutput.answer("", ModelCall(name="echo", arguments='{"text":"one"}'))


@tool(needs_approval=True)
async def echo(text: str) -> str:
    """Say it again.

    Args:
        text: What to say.
    """
    await trio.lowlevel.checkpoint()
    return text


class Every(Middleware):
    """Overrides every hook of a turn, notes it, and then does what the test says."""

    def __init__(self, act: Act = lambda hook, ctx: None) -> None:
        self.log: list[str] = []
        self.act = act

    async def _hook(self, hook: str, ctx: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.log.append(hook)
        self.act(hook, ctx)

    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        await self._hook("enter", ctx)
        yield
        self.log.append("leave")

    def frontend(self) -> Contribution:
        return Contribution(
            capability=self.name, commands=(Command(name="do", description=""),)
        )

    async def message_submit(self, ctx: MessageSubmitContext) -> None:
        await self._hook("message_submit", ctx)

    async def pre_model(self, ctx: PreModelContext) -> None:
        await self._hook("pre_model", ctx)

    async def model_request(self, ctx: ModelRequestContext) -> None:
        await self._hook("model_request", ctx)

    async def pre_tool_use(self, ctx: PreToolContext) -> None:
        await self._hook("pre_tool_use", ctx)

    async def permission_request(self, ctx: PermissionContext) -> None:
        await self._hook("permission_request", ctx)
        if ctx.verdict is None:
            ctx.allow()

    async def post_tool_use(self, ctx: PostToolContext) -> None:
        await self._hook("post_tool_use", ctx)

    async def stop(self, ctx: StopContext) -> None:
        await self._hook("stop", ctx)

    async def turn_end(self, ctx: TurnEndContext) -> None:
        await self._hook("turn_end", ctx)

    async def command(self, ctx: CommandContext) -> None:
        await self._hook("command", ctx)


def on(hook: str, act: Callable[[Any], object]) -> Every:
    return Every(lambda now, ctx: now == hook and act(ctx))  # type: ignore[arg-type]


def configure(model: Any, *middleware: Middleware, **options: Any) -> AgentConfig:
    return AgentConfig(
        model=model, tools=[echo], middleware=middleware, session_id="s", **options
    )


async def test_a_turn_meets_the_hooks_in_the_order_of_the_guide() -> None:
    every = Every()
    async with create_agent(configure(ScriptedModel(CALL, "done"), every)) as agent:
        result = await agent.run("go")

    assert result.text == "done"
    assert every.log == [
        "enter",
        "message_submit",
        "pre_model",
        "model_request",
        "pre_tool_use",
        "permission_request",
        "post_tool_use",
        "pre_model",
        "model_request",
        "stop",
        "turn_end",
        "leave",
    ]


async def test_what_hooks_add_stands_where_a_provider_accepts_it(
    store: MemoryCheckpoint,
) -> None:
    def add(hook: str, ctx: Any) -> None:
        if hook in {"message_submit", "pre_tool_use", "post_tool_use"}:
            ctx.add_hidden(hook)

    model = ScriptedModel(CALL, "done")
    async with create_agent(configure(model, Every(add), checkpoints=store)) as agent:
        await agent.run("go")
    kept = await store.load("s")

    assert kept is not None
    told = [
        item.text if isinstance(item, UserItem | AssistantItem) else type(item).__name__
        for item in kept.context
    ]
    assert told == [
        "message_submit",
        "go",
        "pre_tool_use",
        "ToolCallItem",
        "ToolOutputItem",
        "post_tool_use",
        "done",
    ]
    page = await store.transcript_page("s")
    shown = [item for batch in page.batches for item in batch.items]
    assert not [item for item in shown if isinstance(item, UserItem) and item.internal]


async def test_a_state_is_there_again_at_the_next_opening(store: MemoryCheckpoint) -> None:
    def count(ctx: Any) -> None:
        ctx.state = (ctx.state or 0) + 1

    for _ in range(2):
        every = on("message_submit", count)
        config = configure(ScriptedModel("one"), every, checkpoints=store)
        async with create_agent(config) as agent:
            await agent.run("go")
    kept = await store.load("s")

    assert kept is not None
    assert kept.states["every"] == 2


async def test_a_rewritten_call_is_what_runs_and_what_history_shows(
    store: MemoryCheckpoint,
) -> None:
    every = on("pre_tool_use", lambda ctx: ctx.rewrite(arguments={"text": "two"}))
    config = configure(ScriptedModel(CALL, "done"), every, checkpoints=store)
    async with create_agent(config) as agent:
        await agent.run("go")
    kept = await store.load("s")

    assert kept is not None
    call = next(item for item in kept.context if isinstance(item, ToolCallItem))
    output = next(item for item in kept.context if isinstance(item, ToolOutputItem))
    assert (call.arguments, output.output) == ({"text": "two"}, "two")


@pytest.mark.parametrize("hook", ["pre_tool_use", "permission_request"])
async def test_a_denied_call_never_runs(hook: str, store: MemoryCheckpoint) -> None:
    every = on(hook, lambda ctx: ctx.deny("not today"))
    config = configure(ScriptedModel(CALL, "done"), every, checkpoints=store)
    async with create_agent(config) as agent:
        await agent.run("go")
    kept = await store.load("s")

    assert kept is not None
    output = next(item for item in kept.context if isinstance(item, ToolOutputItem))
    assert output.is_error
    assert "not today" in output.output
    assert "post_tool_use" not in every.log


async def test_a_request_that_a_hook_replaced_is_sent_and_never_stored(
    store: MemoryCheckpoint,
) -> None:
    def replace(ctx: ModelRequestContext) -> None:
        items = (*ctx.request.items, UserItem(text="only this once"))
        ctx.replace(attrs.evolve(ctx.request, items=items))

    model = ScriptedModel("done")
    config = configure(model, on("model_request", replace), checkpoints=store)
    async with create_agent(config) as agent:
        await agent.run("go")

    assert "only this once" in repr(model.requests[0].items)
    assert "only this once" not in repr(await store.load("s"))


async def test_a_stop_hook_makes_the_model_go_on_once() -> None:
    every = on("stop", lambda ctx: ctx.continue_with("and then?"))
    model = ScriptedModel("first", "second", "third")
    async with create_agent(configure(model, every)) as agent:
        result = await agent.run("go")

    assert result.text.endswith("second")
    assert every.log.count("stop") == 2


async def test_a_reason_to_stop_completes_the_turn_without_a_request() -> None:
    model = ScriptedModel("never")
    every = on("pre_model", lambda ctx: ctx.stop("enough"))
    async with create_agent(configure(model, every)) as agent:
        result = await agent.run("go")

    assert (result.outcome, result.finish_reason) == ("completed", "hook")
    assert not model.requests
    assert every.log.count("turn_end") == 1


@pytest.mark.parametrize(
    "hook",
    [
        "message_submit",
        "pre_model",
        "model_request",
        "pre_tool_use",
        "permission_request",
        "post_tool_use",
        "stop",
    ],
)
async def test_a_hook_that_raises_fails_its_turn_and_not_the_session(hook: str) -> None:
    failures = [KeyError("oops")]

    def fail_once(ctx: Any) -> None:
        del ctx
        if failures:
            raise failures.pop()

    every = on(hook, fail_once)
    model = ScriptedModel(CALL, "done", CALL, "done")
    async with create_agent(configure(model, every)) as agent:
        first = await agent.run("go")
        second = await agent.run("again")

    assert (first.outcome, second.outcome) == ("failed", "completed")
    assert every.log[-2:] == ["turn_end", "leave"]


async def test_a_turn_end_hook_that_raises_changes_nothing_about_the_turn() -> None:
    def fail(ctx: Any) -> None:
        raise KeyError(ctx.outcome)

    async with create_agent(configure(ScriptedModel("x"), on("turn_end", fail))) as agent:
        result = await agent.run("go")
        snapshot = agent.snapshot()

    assert result.outcome == "completed"
    assert snapshot.turn_id is None


async def test_a_command_that_raises_is_told_and_costs_nothing() -> None:
    def fail(ctx: Any) -> None:
        raise KeyError(ctx.command)

    op = CapabilityCommand(capability="every", command="do")
    async with create_agent(configure(ScriptedModel("x"), on("command", fail))) as agent:
        await agent.submit(op)
        async for event in agent.events:
            if isinstance(event.msg, Warning):
                break
        result = await agent.run("go")

    assert result.outcome == "completed"


@pytest.mark.parametrize("hook", ["pre_model", "model_request", "stop"])
async def test_an_interrupt_ends_a_hook_that_waits_and_keeps_nothing_of_it(
    hook: str, store: MemoryCheckpoint
) -> None:
    class Waits(Every):
        async def _hook(self, now: str, ctx: Any) -> None:
            if now == hook:
                if now != "model_request":
                    ctx.notice("half done")
                started.set()
                await trio.sleep_forever()
            await super()._hook(now, ctx)

    started = trio.Event()
    waits = Waits()
    config = configure(ScriptedModel("x"), waits, checkpoints=store)
    outcomes: list[str] = []
    async with create_agent(config) as agent, trio.open_nursery() as nursery:

        async def run() -> None:
            outcomes.append((await agent.run("go")).outcome)

        nursery.start_soon(run)
        await started.wait()
        turn_id = agent.snapshot().turn_id
        assert turn_id is not None
        await agent.submit(Interrupt(turn_id))

    assert outcomes == ["aborted"]
    assert waits.log.count("turn_end") == 1
    found = await store.events_after("s", 0, 1000)
    assert not [event for event in found.events if isinstance(event.msg, Notice)]


def test_the_example_of_the_guide_prints_what_it_says(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "middleware.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(code, encoding="utf-8")

    done = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )

    assert done.stdout == printed, done.stderr
