"""What hooks around a tool may change in a real session, and when that is durable."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.scenarios.hooked import Act, Hooked, raising
from tests.scenarios.story import (
    SESSION,
    Strict,
    World,
    configure,
    journal,
    messages,
    outcomes,
    outputs,
    stored,
    until,
)
from trio_agent import ExecApproval, UserInput, create_agent
from trio_agent.middleware import PostToolContext, PreToolContext
from trio_agent.protocol import texts
from trio_agent.protocol.events import (
    ApprovalResolved,
    ExecApprovalRequest,
    ModelStepCompleted,
    Notice,
    ToolCallBegin,
    ToolCallEnd,
    TurnComplete,
)
from trio_agent.protocol.items import AssistantItem, ToolCallItem, ToolOutputItem, UserItem
from trio_agent.protocol.limits import MAX_TOOL_OUTPUT_BYTES
from trio_agent.protocol.ops import Approved
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import call, text
from trio_agent.testing.mortal import MortalStore, ProcessDied


async def test_a_rewritten_call_must_be_one_that_could_have_been_asked_for(
    store: MemoryCheckpoint,
) -> None:
    world = World()
    names = {"a": "b", "b": "no_such_tool"}
    hooked = Hooked(pre_tool_use=lambda ctx: ctx.rewrite(name=names[ctx.call.name]))
    tools = (world.tool("a"), world.tool("b"))
    model = Strict([call("a"), call("b")], "done")
    config = configure(model, store, tools=tools, middleware=[hooked])
    async with create_agent(config) as agent:
        assert (await agent.run("go")).outcome == "completed"
    assert world.entered == ["b"]
    shown = [item.name for item in model.requests[1].items if isinstance(item, ToolCallItem)]
    assert shown == ["b", "no_such_tool"]
    assert await outcomes(store) == {"b": "finished", "no_such_tool": "failed"}
    assert not model.refusals


async def test_a_denial_before_a_call_is_final_and_its_first_reason_counts(
    store: MemoryCheckpoint,
) -> None:
    def deny(ctx: PreToolContext) -> None:
        ctx.add_hidden("do not try again")
        ctx.deny("first")

    world = World()
    middleware = [
        Hooked("one", pre_tool_use=deny),
        Hooked("two", pre_tool_use=lambda ctx: ctx.deny("second")),
        Hooked("three", post_tool_use=raising(AssertionError("it never ran"))),
    ]
    model = Strict([text("I try"), call("a"), call("a")], "done")
    config = configure(model, store, tools=(world.tool("a"),), middleware=middleware)
    async with create_agent(config) as agent:
        await agent.run("go")
    assert outputs(model.requests[1].items) == [texts.DENIED_BY_HOOK.format(reason="first")] * 2
    kinds = [type(item) for item in model.requests[1].items]
    answer = [AssistantItem, ToolCallItem, ToolCallItem, ToolOutputItem, ToolOutputItem]
    assert kinds == [UserItem, UserItem, UserItem, *answer], "hidden texts stand before it"
    assert not await messages(store, ToolCallBegin), "it never began"
    assert not world.entered
    assert not model.refusals


@pytest.mark.parametrize(
    ("acts", "outcome", "asked"),
    [
        (["allow"], "finished", False),
        (["deny"], "denied", False),
        (["allow", "deny"], "denied", False),
        (["deny", "allow"], "denied", False),
        ([], "finished", True),
    ],
)
async def test_a_hook_may_answer_instead_of_a_person(
    store: MemoryCheckpoint, acts: list[str], outcome: str, asked: bool
) -> None:
    decide: dict[str, Act] = {
        "allow": lambda ctx: ctx.allow(),
        "deny": lambda ctx: ctx.deny("no"),
    }
    middleware = [Hooked(f"m{n}", permission_request=decide[act]) for n, act in enumerate(acts)]

    async def agree(request: ExecApprovalRequest) -> Approved:
        await trio.lowlevel.checkpoint()
        return Approved()

    world = World()
    tools = (world.tool("gated", needs_approval=True), world.tool("free"))
    model = Strict([call("gated"), call("free")], "done")
    config = configure(model, store, tools=tools, middleware=middleware, on_approval=agree)
    async with create_agent(config) as agent:
        await agent.run("go")
    assert await outcomes(store) == {"gated": outcome, "free": "finished"}
    assert bool(await messages(store, ExecApprovalRequest)) is asked
    assert bool(await messages(store, ApprovalResolved)) is asked
    assert [one.log for one in middleware] == [[f"m{n}"] for n in range(len(acts))], "not once"
    if outcome == "denied":
        assert outputs(model.requests[1].items)[0] == texts.DENIED_BY_HOOK.format(reason="no")


async def test_hooks_are_not_asked_again_about_a_call_that_waits_through_a_restart(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    hooked = Hooked(permission_request=lambda ctx: None)
    world = World()
    tools = (world.tool("gated", needs_approval=True),)
    model = Strict([call("gated")], "done")
    mortal = MortalStore(store)
    with pytest.raises(ProcessDied):
        config = configure(model, mortal, tools=tools, middleware=[hooked])
        async with create_agent(config) as agent:
            await agent.submit(UserInput(text="go"))
            request = await until(agent, ExecApprovalRequest)
            mortal.dead = True
            raise ProcessDied
    await mortal.bury()
    async with create_agent(configure(model, store, tools=tools, middleware=[hooked])) as agent:
        await agent.submit(ExecApproval(request.id, Approved()))
        await until(agent, TurnComplete)
    assert hooked.log == ["hooked"]
    assert world.entered == ["gated"]


async def test_what_runs_after_a_tool_sees_its_end_and_may_replace_the_output(
    store: MemoryCheckpoint,
) -> None:
    seen: list[tuple[str, bool]] = []

    def act(ctx: PostToolContext) -> None:
        seen.append((ctx.call.name, ctx.is_error))
        if ctx.call.name == "good":
            ctx.replace_output("x" * 50_000)
        ctx.add_hidden(f"about {ctx.call.name}")
        ctx.notice(f"after {ctx.call.name}")
        ctx.state = [*(ctx.state or []), ctx.call.name]

    world = World()
    tools = (world.tool("good"), world.tool("bad", raises=ValueError("no")))
    model = Strict([call("good"), call("bad"), call("none")], "done")
    config = configure(model, store, tools=tools, middleware=[Hooked(post_tool_use=act)])
    async with create_agent(config) as agent:
        await agent.run("go")
    assert sorted(seen) == [("bad", True), ("good", False)], "an unknown tool has not run"
    items = model.requests[1].items
    replaced = outputs(items)[0]
    assert set(replaced[:100]) == {"x"}
    assert len(replaced.encode()) <= MAX_TOOL_OUTPUT_BYTES
    hidden = [item.text for item in items if isinstance(item, UserItem)]
    assert hidden == ["go", "about good", "about bad"], "in the order of the calls"
    kinds = [type(item) for item in items[-5:]]
    assert kinds == [ToolOutputItem] * 3 + [UserItem] * 2
    assert sorted((await stored(store)).states["hooked"]) == ["bad", "good"]
    told = [
        msg.text if isinstance(msg := event.msg, Notice) else msg.name
        for event in await journal(store)
        if isinstance(event.msg, Notice | ToolCallEnd)
    ]
    for name in ("good", "bad"):
        assert told.index(f"after {name}") == told.index(name) + 1
    assert not model.refusals


async def test_a_hook_that_fails_after_a_tool_loses_no_outcome(
    store: MemoryCheckpoint,
) -> None:
    """The calls really ended, whatever became of the turn."""
    world = World()
    tools = (world.tool("one"), world.tool("two"))
    model = Strict([call("one"), call("two")], "going on")

    def act(ctx: PostToolContext) -> None:
        if ctx.call.name == "two":
            raise ValueError("bug")

    config = configure(model, store, tools=tools, middleware=[Hooked(post_tool_use=act)])
    async with create_agent(config) as agent:
        assert (await agent.run("go")).outcome == "failed"
        assert (await agent.run("again")).outcome == "completed"
    assert await outcomes(store) == {"one": "finished", "two": "finished"}
    assert outputs(model.requests[-1].items) == ["one is done", "two is done"]
    assert not model.refusals


async def test_what_a_hook_did_is_durable_with_its_step_or_not_at_all(
    autojump_clock: MockClock,
) -> None:
    """Dies at every write of a turn: a state of pre_tool_use and its answer go together."""

    def act(ctx: PreToolContext) -> None:
        ctx.state = "saw it"
        ctx.notice("saw it")

    tools = (World().tool("ok"),)
    kept_both = kept_none = 0
    for dies_at in range(1, 12):
        store = MemoryCheckpoint()
        mortal = MortalStore(store, dies_at=dies_at)
        model = Strict([text("I ask"), call("ok")], "done")
        hooked = Hooked(pre_tool_use=act)
        config = configure(model, mortal, tools=tools, middleware=[hooked])
        try:
            async with create_agent(config) as agent:
                await agent.run("go")
        except ProcessDied:
            pass
        kept = await store.load(SESSION)
        if kept is None:
            continue
        asked = any(isinstance(item, AssistantItem) for item in kept.context)
        assert (kept.states.get("hooked") == "saw it") is asked
        assert len(await messages(store, Notice)) == asked
        steps = await messages(store, ModelStepCompleted)
        assert bool(steps) is asked
        kept_both += asked
        kept_none += not asked and bool(hooked.log)
    assert kept_both
    assert kept_none
