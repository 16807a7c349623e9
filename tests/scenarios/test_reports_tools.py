"""Reports about tools: failing ones, missing ones, huge outputs, and tools that would not stop.

Every model here refuses what a real provider would refuse.
"""

from __future__ import annotations

import logging
import math
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.scenarios.conftest import Shelf
from tests.scenarios.story import (
    SESSION,
    Strict,
    World,
    configure,
    executions,
    journal,
    messages,
    outcomes,
    outputs,
    stored,
    until,
)
from trio_agent import (
    AgentRole,
    Approved,
    ContextOverflowError,
    ExecApproval,
    Interrupt,
    StepLimitError,
    ToolContext,
    UserInput,
    create_agent,
    tool,
)
from trio_agent.protocol import texts
from trio_agent.protocol.events import (
    AgentMessage,
    Error,
    ExecApprovalRequest,
    ToolCallBegin,
    ToolCallEnd,
    TurnAborted,
    Warning,  # noqa: A004
)
from trio_agent.protocol.limits import MAX_TOOL_OUTPUT_BYTES
from trio_agent.protocol.text import CUT_NOTICE
from trio_agent.store.base import CheckpointStore
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import ScriptEntry, call, stall, stop, text
from trio_agent.testing.mortal import MortalStore, ProcessDied

DEADLINE = 30


# --- one of several fails


@pytest.mark.parametrize(
    ("seconds", "failing"),
    [((0, 0, 1), {1}), ((1, 0, 2), {1}), ((0, 1, 0), {1}), ((0, 0, 1), {0, 2})],
    ids=["in the middle", "first", "last", "two"],
)
async def test_a_failing_call_costs_its_siblings_nothing(
    autojump_clock: MockClock,
    store: MemoryCheckpoint,
    seconds: tuple[float, ...],
    failing: set[int],
) -> None:
    world = World()
    tools = [
        world.tool(
            f"t{n}", seconds=seconds[n], raises=ValueError("no net") if n in failing else None
        )
        for n in range(3)
    ]
    model = Strict([call("t0"), call("t1"), call("t2")], "all read")
    async with create_agent(configure(model, store, tools=tools)) as agent:
        result = await agent.run("go")
    assert result.text == "all read"
    told = outputs(model.requests[-1].items)
    assert len(told) == 3
    for n, output in enumerate(told):
        assert (output == f"t{n} is done") == (n not in failing)
        assert ("no net" in output) == (n in failing)
    assert not model.refusals


# --- tools that do not exist


async def test_a_call_to_no_tool_is_answered_and_the_others_run(shelf: Shelf) -> None:
    world = World()
    model = Strict([call("no_such_tool"), call("ok")], "I see")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            config = configure(model, store, tools=(world.tool("ok"),))
            async with create_agent(config) as agent:
                result = await agent.run("go")
            assert await outcomes(store) == {"no_such_tool": "failed", "ok": "finished"}
    assert result.outcome == "completed"
    missing, found = outputs(model.requests[-1].items)
    assert missing == texts.UNKNOWN_TOOL.format(name="no_such_tool", available="ok")
    assert found == "ok is done"
    assert not model.refusals


async def test_asking_for_no_tool_for_ever_ends_at_the_step_limit(shelf: Shelf) -> None:
    model = Strict(*[[call("no_such_tool")]] * 5, "now a text")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store, max_model_steps=5)) as agent:
                result = await agent.run("go")
                assert (result.outcome, result.finish_reason) == ("failed", "step_limit")
                assert isinstance(result.error, StepLimitError)
                assert len(model.requests) == 5
                (error,) = await messages(store, Error)
                assert error.kind == "step_limit"
                assert (await agent.run("again")).text == "now a text"
            assert (await executions(store))[0].finish_reason == "step_limit"
    assert not model.refusals


async def test_a_tool_that_was_removed_stops_no_session_from_opening(shelf: Shelf) -> None:
    model = Strict([call("old")], "used", [call("old")], "gone")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            config = configure(model, store, tools=(World().tool("old"),))
            async with create_agent(config) as agent:
                await agent.run("go")
        async with shelf.opened() as store:
            async with create_agent(configure(model, store)) as agent:
                result = await agent.run("again")
    assert result.text == "gone"
    unknown = texts.UNKNOWN_TOOL.format(name="old", available="none")
    assert outputs(model.requests[-1].items) == ["old is done", unknown]
    assert not model.refusals


async def test_a_tool_that_was_removed_while_its_call_waited_fails_that_call(
    autojump_clock: MockClock,
    store: MemoryCheckpoint,
) -> None:
    """The call was admitted by a process that had the tool; the next one has not."""
    world = World()
    tools = (world.tool("alone", needs_approval=True, exclusive=True), world.tool("after"))
    model = Strict([call("alone"), call("after")], "done")
    mortal = MortalStore(store)
    with pytest.raises(ProcessDied):
        async with create_agent(configure(model, mortal, tools=tools)) as agent:
            await agent.submit(UserInput(text="go"))
            await until(agent, ExecApprovalRequest)
            mortal.dead = True
            raise ProcessDied
    await mortal.bury()
    async with create_agent(configure(model, store)) as agent:
        (request,) = agent.snapshot().approvals
        await agent.submit(ExecApproval(request.id, Approved()))
        await agent.wait_idle()
    assert await outcomes(store) == {"alone": "failed", "after": "failed"}
    assert not world.entered
    assert not model.refusals


# --- arguments that were cut off


CUTS = {
    "cut": ('{"path": "a.txt", "content": "half', "length"),
    "whole, but a field is missing": ('{"path": "a.txt"}', "length"),
    "a list": ("[1, 2]", "stop"),
    "a text": ('"a.txt"', "stop"),
    "nothing": ("", "stop"),
    "twice the same key": ('{"path": "a", "path": "b", "content": ""}', "stop"),
    "no number": ('{"path": "a", "content": NaN}', "stop"),
    "half a character": ('{"path": "a", "content": "\\ud83d"}', "stop"),
}


@pytest.mark.parametrize("kind", CUTS)
async def test_bad_arguments_run_nothing_and_are_stored_as_something_valid(
    shelf: Shelf, kind: str
) -> None:
    raw, reason = CUTS[kind]
    written: list[str] = []

    @tool
    async def write_file(path: str, content: str) -> str:
        written.append(path)
        await trio.lowlevel.checkpoint()
        return content

    script: list[ScriptEntry] = [[call("write_file", raw), stop(reason)], "I see", "still here"]  # type: ignore[arg-type]
    model = Strict(*script)
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            config = configure(model, store, tools=(write_file,))
            async with create_agent(config) as agent:
                assert (await agent.run("write")).text == "I see"
        async with shelf.opened() as store:
            config = configure(model, store, tools=(write_file,))
            async with create_agent(config) as agent:
                assert (await agent.run("and now?")).text == "still here"
    assert not written
    assert not model.refusals
    (output,) = outputs(model.requests[-1].items)
    assert (output == texts.CUT_ARGUMENTS) == (reason == "length")


async def test_repeating_a_cut_call_is_bounded(store: MemoryCheckpoint) -> None:
    model = Strict(*[[call("write", '{"a": "'), stop("length")]] * 100)
    async with create_agent(configure(model, store, max_model_steps=4)) as agent:
        result = await agent.run("write")
    assert result.finish_reason == "step_limit"
    assert len(model.requests) == 4


# --- half characters


FAMILY = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"


@pytest.mark.parametrize("more", range(4))
async def test_a_long_output_of_emoji_is_cut_between_characters(
    shelf: Shelf, more: int
) -> None:
    emoji = "x" * more + "\N{GRINNING FACE}" * 20_000 + FAMILY * 10_000
    model = Strict([call("shout")], "ok", "and so on")
    ends: list[str] = []
    with trio.fail_after(DEADLINE):
        for _ in range(2):
            async with shelf.opened() as store:
                tools = (World().tool("shout", output=emoji),)
                async with create_agent(configure(model, store, tools=tools)) as agent:
                    assert (await agent.run("go")).outcome == "completed"
                ends = [end.output for end in await messages(store, ToolCallEnd)]
    (output,) = outputs(model.requests[-1].items)
    assert ends == [output]
    assert len(output.encode()) <= MAX_TOOL_OUTPUT_BYTES
    head, tail = output.split(CUT_NOTICE[0:4].strip())[0], output[-8:]
    assert set(head.strip()) <= {"x", "\N{GRINNING FACE}"}
    assert set(tail) <= set(FAMILY)
    assert not model.refusals


async def test_half_characters_from_anywhere_are_replaced_before_they_are_stored(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    # The log has the exception as it was raised; what runs tests in parallel cannot pass it on.
    caplog.set_level(logging.CRITICAL, logger="trio_agent")
    half = "half \ud83d of it"
    world = World()
    tools = (
        world.tool("says", output=half),
        world.tool("fails", raises=ValueError(half)),
    )
    model = Strict([text(half), call("says"), call("fails")], half, "fine")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store, tools=tools)) as agent:
                assert (await agent.run("go")).outcome == "completed"
        async with shelf.opened() as store:
            async with create_agent(configure(model, store, tools=tools)) as agent:
                assert (await agent.run("go on")).text == "fine"
            for event in await journal(store):
                repr(event).encode()
            said = await messages(store, AgentMessage)
    assert "half � of it" in said[0].content[0].text
    assert not model.refusals


# --- one huge output


async def test_a_huge_line_is_bounded_for_the_model_in_memory_and_in_the_store(
    shelf: Shelf,
) -> None:
    size = 24_000_000
    huge = "x" * size
    model = Strict([call("dump")], *["ok"] * 6)
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            tools = (World().tool("dump", output=huge),)
            config = configure(model, store, tools=tools, context_window=8_000)
            tracemalloc.start()
            try:
                async with create_agent(config) as agent:
                    for _ in range(6):
                        assert (await agent.run("go")).outcome == "completed"
                    peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        async with shelf.opened() as store:
            async with create_agent(configure(model, store)):
                pass
            (end,) = await messages(store, ToolCallEnd)
            assert len(await store.export_session(SESSION)) < 1_000_000
    (output,) = outputs(model.requests[-1].items)
    assert output == end.output
    assert len(output.encode()) <= MAX_TOOL_OUTPUT_BYTES
    missing = size - output.count("x")
    assert f"{missing:,}" in output or f"{missing + 1:,}" in output, "it says how much is gone"
    assert peak < 4 * size
    assert not model.refusals


async def test_what_fits_no_window_fails_typed_and_a_rewind_makes_the_session_usable(
    shelf: Shelf,
) -> None:
    # One output is a quarter of the window at most; six of them fit no more.
    model = Strict("hello", [call("dump")] * 6, "never", "usable")
    tools = (World().tool("dump", output="x" * 100_000),)
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            config = configure(model, store, tools=tools, context_window=8_000)
            async with create_agent(config) as agent:
                await agent.run("hi")
                for _ in range(2):
                    result = await agent.run("dump it")
                    assert result.outcome == "failed"
                    assert isinstance(result.error, ContextOverflowError)
            assert len(model.requests) == 2, "nothing was sent that cannot fit"
            await store.rewind(SESSION, 2)
            async with create_agent(config) as agent:
                assert (await agent.run("go on")).outcome == "completed"
            (error, _) = await messages(store, Error)
    assert error.kind == "context_overflow"
    assert not model.refusals


# --- cancelled runs whose tools went on


@pytest.mark.parametrize("names", [("tick",), ("tick", "tick")], ids=["one", "two"])
async def test_a_cancelled_run_stops_its_tools(
    autojump_clock: MockClock, store: MemoryCheckpoint, names: tuple[str, ...]
) -> None:
    lines: list[float] = []

    @tool(effect="read_only")
    async def tick() -> str:
        for _ in range(150):
            lines.append(trio.current_time())
            await trio.sleep(0.2)
        return "done"

    model = Strict([call(name) for name in names], "going on")
    async with create_agent(configure(model, store, tools=(tick,))) as agent:
        with trio.move_on_after(1) as scope:
            await agent.run("go")
        assert scope.cancelled_caught
        before = trio.current_time()
        await agent.wait_idle()
        assert trio.current_time() == before, "stopping takes no time"
        written = len(lines)
        await trio.sleep(3)
        assert len(lines) == written > 0
        assert (await agent.run("continue")).text == "going on"
    assert not model.refusals
    assert outputs(model.requests[-1].items) == [texts.READ_ONLY_INTERRUPTED] * len(names)
    assert [turn.outcome for turn in await executions(store)] == ["aborted", "completed"]


async def test_a_run_cancelled_while_it_waits_for_the_model_ends_at_once(
    autojump_clock: MockClock,
    store: MemoryCheckpoint,
) -> None:
    model = Strict([stall()], "going on")
    async with create_agent(configure(model, store)) as agent:
        with trio.move_on_after(1):
            await agent.run("go")
        await agent.wait_idle()
        assert trio.current_time() < 2
        assert (await agent.run("continue")).text == "going on"
    assert not model.refusals


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_blocking_function_is_waited_for_or_reported_as_abandoned(
    store: MemoryCheckpoint, stubborn: bool
) -> None:
    """Real time: a thread does not know any other. Its end is the test's to give."""
    entered, release, ended = threading.Event(), threading.Event(), threading.Event()

    @tool
    def block() -> str:
        entered.set()
        release.wait(DEADLINE)
        ended.set()
        return "done"

    model = Strict([call("block")], "going on")
    grace = 0.2 if stubborn else DEADLINE
    config = configure(model, store, tools=(block,), shutdown_grace=grace)
    with trio.fail_after(DEADLINE):
        try:
            async with create_agent(config) as agent:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(agent.run, "go")
                    await trio.to_thread.run_sync(entered.wait)
                    nursery.cancel_scope.cancel()
                if not stubborn:
                    release.set()
                await agent.wait_idle()
                assert ended.is_set() is not stubborn
                assert (await agent.run("continue")).text == "going on"
        finally:
            release.set()
        await trio.to_thread.run_sync(ended.wait)
    codes = [warning.code for warning in await messages(store, Warning)]
    assert ("abandoned_thread" in codes) is stubborn
    assert [turn.outcome for turn in await executions(store)] == ["aborted", "completed"]
    assert not model.refusals


# --- subagents


def delegate(
    store: CheckpointStore,
    names: dict[str, Any],
    *tools: Callable[..., Any],
    script: Callable[[], Strict],
) -> Any:
    """Return a tool that lets a session of its own do the work."""

    @tool(exclusive=False)
    async def ask_child(ctx: ToolContext, name: str) -> str:
        config = configure(
            script(),
            store,
            session_id=name,
            tools=tools,
            role=AgentRole.subagent(ctx.session_id, ctx.turn_id),
        )
        async with create_agent(config) as child:
            names[name] = child
            result = await child.run("work")
        return result.text

    return ask_child


@pytest.mark.parametrize("depth", [1, 2])
async def test_stopping_a_parent_stops_its_children_and_theirs(
    autojump_clock: MockClock, store: MemoryCheckpoint, depth: int
) -> None:
    lines: list[str] = []
    children: dict[str, Any] = {}

    @tool(exclusive=False)
    async def tick(ctx: ToolContext) -> str:
        while True:
            lines.append(ctx.session_id)
            await trio.sleep(0.2)

    ask = delegate(store, children, tick, script=lambda: Strict([call("tick")]))
    if depth == 2:
        leaf = [call("ask_child", {"name": "leaf"})]
        ask = delegate(store, children, ask, script=lambda: Strict(leaf))
    both = [call("ask_child", {"name": name}) for name in ("one", "two")]
    both = both[: 2 if depth == 1 else 1]
    model = Strict(both, "going on")
    async with create_agent(configure(model, store, tools=(ask,))) as agent:
        await agent.submit(UserInput(text="go"))
        begin = await until(agent, ToolCallBegin)
        await trio.sleep(2)
        assert len(lines) >= 10
        await agent.submit(Interrupt(begin.turn_id))
        await agent.wait_idle()
        written = len(lines)
        await trio.sleep(3)
        assert len(lines) == written
        assert (await agent.run("continue")).text == "going on"
    assert outputs(model.requests[-1].items) == [texts.INTERRUPTED] * len(both)
    for name in children:
        (turn,) = await executions(store, name)
        assert turn.outcome == "aborted"
        child = await stored(store, name)
        assert child.active_execution is None
        assert child.role.kind == "subagent"
        parent = {"one": SESSION, "two": SESSION, "leaf": "one"}[name]
        assert child.role.parent_session_id == parent
    assert not model.refusals


async def test_a_killed_parent_leaves_no_child_that_runs_or_starts_by_itself(
    autojump_clock: MockClock,
    store: MemoryCheckpoint,
) -> None:
    children: dict[str, Any] = {}
    world = World()
    slow = world.tool("slow", seconds=math.inf)
    mortal = MortalStore(store)
    ask = delegate(mortal, children, slow, script=lambda: Strict([call("slow")]))
    model = Strict([call("ask_child", {"name": "one"})], "going on")
    with pytest.raises(ProcessDied):
        async with create_agent(configure(model, mortal, tools=(ask,))) as agent:
            await agent.submit(UserInput(text="go"))
            await world.wait_entered(1)
            mortal.dead = True
            raise ProcessDied
    await mortal.bury()
    ask = delegate(store, children, slow, script=lambda: Strict([call("slow")]))
    async with create_agent(configure(model, store, tools=(ask,))) as agent:
        await agent.wait_idle()
        assert len(world.entered) == 1
        assert (await agent.run("continue")).text == "going on"
    assert len(world.entered) == 1
    assert outputs(model.requests[-1].items) == [texts.UNKNOWN_AFTER_RESTART]
    async with create_agent(configure(Strict(), store, session_id="one")) as child:
        await child.wait_idle()
        assert child.snapshot().turn_id is None
    (aborted,) = await messages(store, TurnAborted, "one")
    assert aborted.outcome == "aborted"
    assert not model.refusals
