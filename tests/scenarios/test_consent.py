"""Approvals: one question a call, durable, answered once, by whoever has the session."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
import trio.testing

from tests.scenarios.story import (
    Strict,
    World,
    configure,
    executions,
    messages,
    outcomes,
    outputs,
    stored,
    until,
)
from trio_agent import (
    Abort,
    Approved,
    ApprovedForSession,
    ConfigError,
    Denied,
    ExecApproval,
    Interrupt,
    SubmissionRejectedError,
    UserInput,
    create_agent,
    tool,
)
from trio_agent.protocol import texts
from trio_agent.protocol.events import (
    ApprovalResolved,
    ExecApprovalRequest,
    ToolCallBegin,
    ToolCallEnd,
    TurnAborted,
    TurnComplete,
)
from trio_agent.protocol.ops import Decision
from trio_agent.sandbox.policy import ApprovalPolicy
from trio_agent.state.recovery import Recovery
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import call
from trio_agent.testing.mortal import MortalStore, ProcessDied


async def test_a_call_is_entered_once_however_answers_and_ends_fall_together() -> None:
    for _ in range(30):
        world = World()
        gated_tool = world.tool("gated", needs_approval=True, exclusive=True)
        fast = world.tool("fast")

        async def agree(request: ExecApprovalRequest) -> Decision:
            return Approved()

        names = ["fast", "gated", "fast", "gated", "fast"]
        model = Strict([call(name) for name in names], "done")
        config = configure(model, tools=(gated_tool, fast), on_approval=agree)
        async with create_agent(config) as agent:
            await agent.run("go")
        assert Counter(world.entered) == Counter(names)


@pytest.mark.parametrize(
    ("decision", "outcome", "entered"),
    [
        (Approved(), "finished", 1),
        (ApprovedForSession(), "finished", 1),
        (Denied("not today"), "denied", 0),
        (Denied(), "denied", 0),
    ],
)
async def test_an_answer_decides_about_the_call(
    store: MemoryCheckpoint, decision: Decision, outcome: str, entered: int
) -> None:
    world = World()
    model = Strict([call("gated")], "done")
    config = configure(model, store, tools=(world.tool("gated", needs_approval=True),))
    async with create_agent(config) as agent:
        await agent.submit(UserInput(text="go"))
        request = await until(agent, ExecApprovalRequest)
        assert not world.entered
        await agent.submit(ExecApproval(request.id, decision))
        await until(agent, TurnComplete)
    assert await outcomes(store) == {"gated": outcome}
    assert len(world.entered) == entered
    resolved = await messages(store, ApprovalResolved)
    assert resolved == [
        ApprovalResolved(id=request.id, call_id=request.call_id, decision=decision)
    ]
    if decision == Denied("not today"):
        text = texts.DENIED_WITH_REASON.format(reason="not today")
        assert outputs(model.requests[-1].items) == [text]


async def test_abort_runs_nothing_and_ends_the_turn(store: MemoryCheckpoint) -> None:
    world = World()
    model = Strict([call("gated")], "never asked")
    config = configure(model, store, tools=(world.tool("gated", needs_approval=True),))
    async with create_agent(config) as agent:
        await agent.submit(UserInput(text="go"))
        request = await until(agent, ExecApprovalRequest)
        await agent.submit(ExecApproval(request.id, Abort()))
        await until(agent, TurnAborted)
    assert not world.entered
    assert len(model.requests) == 1
    assert outputs((await stored(store)).context) == [texts.ABORTED_BY_USER]


async def test_edited_arguments_are_what_runs_and_what_readers_see(
    store: MemoryCheckpoint,
) -> None:
    ran: list[int] = []

    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        ran.append(amount)
        return f"paid {amount}"

    model = Strict([call("pay", {"amount": 1_000})], "done")
    async with create_agent(configure(model, store, tools=(pay,))) as agent:
        await agent.submit(UserInput(text="go"))
        request = await until(agent, ExecApprovalRequest)
        assert request.arguments == {"amount": 1_000}
        await agent.submit(ExecApproval(request.id, Approved(arguments={"amount": 1})))
        await until(agent, TurnComplete)
    assert ran == [1]
    (begin,) = await messages(store, ToolCallBegin)
    assert begin.arguments == {"amount": 1}


async def test_an_approval_for_the_session_covers_the_identical_call_only(
    store: MemoryCheckpoint,
) -> None:
    ran: list[int] = []

    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        ran.append(amount)
        return "paid"

    def asks(*amounts: int) -> list[object]:
        return [call("pay", {"amount": amount}) for amount in amounts]

    model = Strict(asks(1), asks(1), "done", asks(1, 2), "done")  # type: ignore[arg-type]
    async with create_agent(configure(model, store, tools=(pay,))) as agent:
        await agent.submit(UserInput(text="go"))
        request = await until(agent, ExecApprovalRequest)
        await agent.submit(ExecApproval(request.id, ApprovedForSession()))
        await until(agent, TurnComplete)
    assert ran == [1, 1]
    async with create_agent(configure(model, store, tools=(pay,))) as agent:
        await agent.submit(UserInput(text="again"))
        request = await until(agent, ExecApprovalRequest)
        assert request.arguments == {"amount": 2}, "the grant was forgotten, or covers too much"
        await agent.submit(ExecApproval(request.id, Denied()))
        await until(agent, TurnComplete)
    assert ran == [1, 1, 1]


async def test_gated_calls_of_one_batch_are_asked_and_answered_apart_while_others_run(
    store: MemoryCheckpoint,
) -> None:
    world = World()
    tools = (
        world.tool("one", needs_approval=True),
        world.tool("two", needs_approval=True),
        world.tool("free"),
    )
    model = Strict([call("one"), call("free"), call("two")], "done")
    async with create_agent(configure(model, store, tools=tools)) as agent:
        await agent.submit(UserInput(text="go"))
        asked = [await until(agent, ExecApprovalRequest) for _ in range(2)]
        await world.wait_entered(1)
        assert world.entered == ["free"]
        by_name = {request.name: request for request in asked}
        await agent.submit(ExecApproval(by_name["two"].id, Denied()))
        await until(agent, ToolCallEnd, where=lambda end: end.name == "two")
        assert [waiting.name for waiting in agent.snapshot().approvals] == ["one"]
        await agent.submit(ExecApproval(by_name["one"].id, Approved()))
        await until(agent, TurnComplete)
    assert await outcomes(store) == {"one": "finished", "free": "finished", "two": "denied"}
    assert outputs(model.requests[-1].items) == ["one is done", "free is done", texts.DENIED]


async def test_a_gated_exclusive_call_blocks_the_calls_after_it(
    store: MemoryCheckpoint, autojump_clock: trio.testing.MockClock
) -> None:
    world = World()
    tools = (
        world.tool("alone", needs_approval=True, exclusive=True),
        world.tool("before"),
        world.tool("after"),
    )
    model = Strict([call("before"), call("alone"), call("after")], "done")
    async with create_agent(configure(model, store, tools=tools)) as agent:
        await agent.submit(UserInput(text="go"))
        request = await until(agent, ExecApprovalRequest)
        await until(agent, ToolCallEnd)
        await trio.sleep(100)
        assert world.entered == ["before"]
        await agent.submit(ExecApproval(request.id, Approved()))
        await until(agent, TurnComplete)
    assert world.entered == ["before", "alone", "after"]


@pytest.mark.parametrize("policy", list(Recovery))
async def test_a_question_keeps_its_id_over_any_number_of_restarts(
    store: MemoryCheckpoint, policy: Recovery
) -> None:
    world = World()
    model = Strict([call("gated")], "done")
    asked: list[ExecApprovalRequest] = []
    for _ in range(4):
        mortal = MortalStore(store)
        tools = (world.tool("gated", needs_approval=True),)
        with pytest.raises(ProcessDied):
            async with create_agent(
                configure(model, mortal, tools=tools, recovery=policy)
            ) as agent:
                if not asked:
                    await agent.submit(UserInput(text="go"))
                asked.append(await until(agent, ExecApprovalRequest))
                assert [one.id for one in agent.snapshot().approvals] == [asked[0].id]
                mortal.dead = True
                raise ProcessDied
        await mortal.bury()
    assert asked == [asked[0]] * 4
    tools = (world.tool("gated", needs_approval=True),)
    async with create_agent(configure(model, store, tools=tools, recovery=policy)) as agent:
        await agent.submit(ExecApproval(asked[0].id, Approved()))
        await until(agent, TurnComplete)
    assert world.entered == ["gated"]
    assert len(await executions(store)) == 1


@pytest.mark.parametrize("first", ["interrupt", "approve"])
async def test_an_interrupt_and_an_approval_that_race_have_one_outcome(
    store: MemoryCheckpoint, first: str
) -> None:
    world = World()
    model = Strict([call("gated")], "done")
    config = configure(model, store, tools=(world.tool("gated", needs_approval=True),))
    async with create_agent(config) as agent:
        await agent.submit(UserInput(text="go"))
        request = await until(agent, ExecApprovalRequest)
        interrupt, approval = Interrupt(request.turn_id), ExecApproval(request.id, Approved())
        one, two = (interrupt, approval) if first == "interrupt" else (approval, interrupt)
        agent.submit_nowait(one)
        agent.submit_nowait(two)
        await agent.wait_idle()
        with pytest.raises(SubmissionRejectedError) as late:
            await agent.submit(ExecApproval(request.id, Approved()))
        assert late.value.code == "no_approval"
    resolved = await messages(store, ApprovalResolved)
    assert len(resolved) == 1
    (end,) = await messages(store, ToolCallEnd)
    if resolved[0].decision is None:
        assert not world.entered
        assert end.outcome == "not_started"
    else:
        assert end.outcome in {"finished", "unknown", "not_started"}
        assert (end.outcome == "not_started") <= (not world.entered)
    assert len(await executions(store)) == 1


async def test_an_answer_counts_once(
    store: MemoryCheckpoint, autojump_clock: trio.testing.MockClock
) -> None:
    world = World()
    model = Strict([call("gated")], "done")
    config = configure(
        model, store, tools=(world.tool("gated", needs_approval=True, seconds=5),)
    )
    async with create_agent(config) as agent:
        await agent.submit(UserInput(text="go"))
        request = await until(agent, ExecApprovalRequest)
        await agent.submit(ExecApproval(request.id, Approved()))
        with pytest.raises(SubmissionRejectedError) as again:
            await agent.submit(ExecApproval(request.id, Denied()))
        assert again.value.code == "already_decided"
        with pytest.raises(SubmissionRejectedError) as unknown:
            await agent.submit(ExecApproval("no such question", Approved()))
        assert unknown.value.code == "no_approval"
        await until(agent, TurnComplete)
    assert await outcomes(store) == {"gated": "finished"}


async def test_a_turn_that_nobody_can_answer_raises_instead_of_hanging() -> None:
    model = Strict([call("gated")], "done")
    config = configure(model, tools=(World().tool("gated", needs_approval=True),))
    async with create_agent(config) as agent:
        with pytest.raises(ConfigError):
            await agent.run("go")
        await agent.wait_idle()


@pytest.mark.parametrize("policy", [ApprovalPolicy.ALLOW, ApprovalPolicy.ALLOW_NETWORK])
async def test_allowing_never_waves_a_call_outside_of_the_sandbox_through(
    store: MemoryCheckpoint, policy: ApprovalPolicy
) -> None:
    world = World()
    model = Strict([call("gated")], "done")
    config = configure(
        model, store, tools=(world.tool("gated", needs_approval=True),), approval=policy
    )
    async with create_agent(config) as agent:
        await agent.submit(UserInput(text="go"))
        await until(agent, ExecApprovalRequest)
        assert not world.entered
    config = configure(
        Strict([call("gated")], "done"),
        tools=(world.tool("gated", needs_approval=True),),
        approval=ApprovalPolicy.FULL_ACCESS,
    )
    async with create_agent(config) as agent:
        await agent.run("go")
    assert world.entered == ["gated"]


async def test_a_failing_handler_fails_the_turn_and_runs_nothing(
    store: MemoryCheckpoint,
) -> None:
    async def broken(request: ExecApprovalRequest) -> Decision:
        raise ValueError("a bug in the handler")

    world = World()
    config = configure(
        Strict([call("gated")], "done"),
        store,
        tools=(world.tool("gated", needs_approval=True),),
        on_approval=broken,
    )
    async with create_agent(config) as agent:
        result = await agent.run("go")
    assert result.outcome == "failed"
    assert isinstance(result.error, Exception)
    assert isinstance(result.error.__cause__, ValueError)
    assert not world.entered
