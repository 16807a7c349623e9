"""Reports of broken histories: after a crash, kill or interrupt a provider still takes them.

Every model here refuses what a real provider would refuse.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

import pytest
import trio
from trio.testing import MockClock

from tests.scenarios.conftest import Shelf
from tests.scenarios.story import (
    Strict,
    World,
    configure,
    executions,
    journal,
    messages,
    outputs,
    stored,
    until,
)
from trio_agent import (
    AgentConfig,
    ExecApproval,
    Interrupt,
    UserInput,
    create_agent,
)
from trio_agent.ambient import Ambient
from trio_agent.protocol import texts
from trio_agent.protocol.events import (
    AgentMessage,
    ApprovalResolved,
    ExecApprovalRequest,
    SessionConfigured,
    ToolCallBegin,
    ToolCallEnd,
    TurnAborted,
    TurnComplete,
    TurnStarted,
    UserMessage,
)
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.ops import Approved
from trio_agent.state.recovery import Recovery
from trio_agent.store.base import CheckpointStore
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import call, drop, text
from trio_agent.testing.mortal import MortalStore, ProcessDied

DEADLINE = 30


async def transcript(store: CheckpointStore) -> list[Item]:
    """Return everything that the transcript shows, oldest first."""
    page = await store.transcript_page("s", max_batches=100_000)
    return [item for batch in reversed(page.batches) for item in batch.items]


# --- an interrupt while several tools run


@pytest.mark.parametrize("reopened", [False, True])
async def test_an_interrupt_in_a_batch_leaves_one_result_a_call(
    shelf: Shelf, reopened: bool
) -> None:
    world = World()
    tools = (world.tool("slow", seconds=math.inf), world.tool("ok"))
    model = Strict([call("slow"), call("ok"), call("slow")], "going on")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store, tools=tools)) as agent:
                await agent.submit(UserInput(text="go"))
                end = await until(agent, ToolCallEnd)
                await world.wait_entered(3)
                await agent.submit(Interrupt(end.turn_id))
                await agent.wait_idle()
                if not reopened:
                    assert (await agent.run("continue")).text == "going on"
        async with shelf.opened() as store:
            async with create_agent(configure(model, store, tools=tools)) as agent:
                if reopened:
                    assert (await agent.run("continue")).text == "going on"
            history = await journal(store)
    assert not model.refusals
    request = model.requests[-1].items
    asked = [item.call_id for item in request if isinstance(item, ToolCallItem)]
    answered = [item.call_id for item in request if isinstance(item, ToolOutputItem)]
    assert asked == answered
    assert outputs(request) == [texts.INTERRUPTED, "ok is done", texts.INTERRUPTED]
    ends = Counter(event.msg.call_id for event in history if isinstance(event.msg, ToolCallEnd))
    assert ends == dict.fromkeys(asked, 1)
    (aborted,) = [event.msg for event in history if isinstance(event.msg, TurnAborted)]
    assert aborted.outcome == "aborted"


# --- a crash between a call and its result


@pytest.mark.parametrize("policy", list(Recovery))
async def test_wherever_a_batch_dies_nothing_runs_twice_and_history_is_settled_once(
    autojump_clock: MockClock,
    policy: Recovery,
) -> None:
    """Every death of two calls with a side effect, before and after each write."""
    seen: set[tuple[str, ...]] = set()
    for when in ("before", "after"):
        for dies_at in range(1, 40):
            if not await _batch_dies(policy, dies_at, when, seen):
                break
        else:
            raise AssertionError("the story never got to its end")
    assert ("finished", "unknown") in seen, "no death fell between the two results"
    assert ("unknown", "unknown") in seen


async def _batch_dies(
    policy: Recovery,
    dies_at: int,
    when: Literal["before", "after"],
    seen: set[tuple[str, ...]],
) -> bool:
    """Tell one story with one death in it; return whether the death came."""
    store, world = MemoryCheckpoint(), World()
    tools = (world.tool("one"), world.tool("two", seconds=1))
    model = Strict([call("one"), call("two")], "done", "and that", "is all", "there is")
    mortal = MortalStore(store, dies_at=dies_at, when=when)

    def config(store: CheckpointStore) -> AgentConfig:
        return configure(model, store, tools=tools, recovery=policy)

    try:
        async with create_agent(config(mortal)) as agent:
            await agent.run("go")
    except ProcessDied:
        pass
    died = mortal.dead
    await mortal.bury()
    entered = list(world.entered)
    async with create_agent(config(store)) as agent:
        await agent.wait_idle()
        await agent.run("what happened?")
    settled = await stored(store)
    for _ in range(2):
        async with create_agent(config(store)):
            pass
        assert await stored(store) == settled
    assert not model.refusals
    assert max(Counter(world.entered).values(), default=1) == 1
    begun = await messages(store, ToolCallBegin)
    assert set(world.entered) <= {begin.name for begin in begun}
    ends = {end.name: end for end in await messages(store, ToolCallEnd)}
    assert set(entered) <= set(ends)
    for name, end in ends.items():
        assert (end.outcome == "finished") <= (name in world.left)
    seen.add(tuple(ends[name].outcome for name in ("one", "two") if name in ends))
    return died


# --- a stream that breaks after a complete call


@pytest.mark.parametrize("again", [False, True])
async def test_no_call_of_a_broken_stream_was_ever_started(
    autojump_clock: MockClock, store: MemoryCheckpoint, again: bool
) -> None:
    """The rule is that no tool starts before the response is complete."""
    world = World()
    second = [call("counter"), text("and so")] if again else [text("done")]
    model = Strict([call("counter"), drop()], second, "done")
    config = configure(model, store, tools=(world.tool("counter"),))
    async with create_agent(config) as agent:
        result = await agent.run("go")
    assert result.outcome == "completed"
    assert not model.refusals
    pairs = outputs((await stored(store)).context)
    assert len(world.entered) == len(pairs) == int(again)


# --- nothing is stored twice


async def test_each_message_is_stored_once_however_often_a_session_is_opened(
    shelf: Shelf,
) -> None:
    model = Strict("one", "two", "three")
    before: list[Item] = []
    with trio.fail_after(DEADLINE):
        for n in range(3):
            async with shelf.opened() as store:
                async with create_agent(configure(model, store)) as agent:
                    await agent.run(f"question {n}")
                before = await transcript(store)
                assert len([item for item in before if isinstance(item, UserItem)]) == n + 1
                assert (
                    len([item for item in before if isinstance(item, AssistantItem)]) == n + 1
                )
        for _ in range(5):
            async with shelf.opened() as store:
                async with create_agent(configure(model, store)):
                    pass
                assert await transcript(store) == before
        async with shelf.opened() as store:
            told = await journal(store)
            asked = [e.submission_id for e in told if isinstance(e.msg, UserMessage)]
            said = [msg.step_id for msg in await messages(store, AgentMessage)]
    assert len(asked) == len(set(asked)) == 3
    assert len(said) == len(set(said)) == 3
    for n, request in enumerate(model.requests):
        questions = [item.text for item in request.items if isinstance(item, UserItem)]
        assert questions == [f"question {m}" for m in range(n + 1)]


# --- messages that wait while a turn is interrupted


@pytest.mark.parametrize("delivery", ["steer", "queue"])
@pytest.mark.parametrize("how", ["interrupt", "cancel"])
async def test_what_waits_during_an_interrupted_turn_runs_next_and_in_order(
    shelf: Shelf, delivery: Literal["steer", "queue"], how: str
) -> None:
    world = World()
    model = Strict([call("slow")], "to B", "to C")
    tools = (world.tool("slow", seconds=math.inf),)
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store, tools=tools)) as agent:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(agent.run, "A")
                    await world.wait_entered(1)
                    for name in "BC":
                        await agent.submit(UserInput(text=name, delivery=delivery), id=name)
                    turn_id = agent.snapshot().turn_id
                    assert turn_id is not None
                    if how == "interrupt":
                        await agent.submit(Interrupt(turn_id))
                    else:
                        nursery.cancel_scope.cancel()
                await until(agent, TurnComplete)
                await until(agent, TurnComplete)
                await agent.wait_idle()
            turns = await executions(store)
            told = [msg.text for msg in await messages(store, UserMessage)]
    assert [turn.outcome for turn in turns] == ["aborted", "completed", "completed"]
    assert [turn.submission_id for turn in turns[1:]] == ["B", "C"]
    assert told == ["A", "B", "C"]
    assert not model.refusals


# --- cancelled while waiting for an approval


@pytest.mark.parametrize("reopened", [False, True])
async def test_an_interrupt_closes_a_waiting_approval(shelf: Shelf, reopened: bool) -> None:
    world = World()
    tools = (world.tool("gated", needs_approval=True),)
    model = Strict([call("gated")], "never mind, then")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store, tools=tools)) as agent:
                await agent.submit(UserInput(text="go"))
                request = await until(agent, ExecApprovalRequest)
                await agent.submit(Interrupt(request.turn_id))
                await agent.wait_idle()
                assert not agent.snapshot().approvals
                if not reopened:
                    await agent.run("never mind")
        async with shelf.opened() as store:
            async with create_agent(configure(model, store, tools=tools)) as agent:
                if reopened:
                    await agent.run("never mind")
            resolved = await messages(store, ApprovalResolved)
            ends = await messages(store, ToolCallEnd)
            turns = await executions(store)
    assert [(one.id, one.decision) for one in resolved] == [(request.id, None)]
    assert [end.outcome for end in ends] == ["not_started"]
    assert [turn.outcome for turn in turns] == ["aborted", "completed"]
    assert outputs(model.requests[-1].items) == [texts.NOT_STARTED]
    assert not model.refusals
    assert not world.entered


@pytest.mark.parametrize("policy", list(Recovery))
async def test_a_waiting_approval_survives_a_kill_and_can_be_answered(
    shelf: Shelf, policy: Recovery
) -> None:
    world = World()
    tools = (world.tool("gated", needs_approval=True),)
    model = Strict([call("gated")], "done")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            mortal = MortalStore(store)
            with pytest.raises(ProcessDied):
                async with create_agent(configure(model, mortal, tools=tools)) as agent:
                    await agent.submit(UserInput(text="go"))
                    request = await until(agent, ExecApprovalRequest)
                    mortal.dead = True
                    raise ProcessDied
            await mortal.bury()
        async with shelf.opened() as store:
            config = configure(model, store, tools=tools, recovery=policy)
            async with create_agent(config) as agent:
                assert [one.id for one in agent.snapshot().approvals] == [request.id]
                assert not world.entered
                await agent.submit(ExecApproval(request.id, Approved()))
                await until(agent, TurnComplete)
    assert world.entered == ["gated"]
    assert not model.refusals


# --- clocks that stand still or run backwards


@pytest.mark.parametrize("clock", ["stands", "wavers"])
async def test_order_is_the_order_of_saving_whatever_the_clock_says(
    shelf: Shelf, clock: str
) -> None:
    readings = 0

    def now_ms() -> int:
        nonlocal readings
        readings += 1
        return 1_000 - (readings % 2 if clock == "wavers" else 0)

    world = World()
    tools = tuple(world.tool(f"t{n}") for n in range(5))
    model = Strict([call(f"t{n}") for n in range(5)], "one", "two", "three", "four", "five")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            config = configure(model, store, tools=tools, ambient=Ambient(now_ms=now_ms))
            async with create_agent(config) as agent:
                for n in range(4):
                    agent.submit_nowait(UserInput(text=f"m{n}", delivery="queue"))
                for _ in range(4):
                    await until(agent, TurnComplete)
            before = await journal(store)
        async with shelf.opened() as store:
            async with create_agent(configure(model, store, tools=tools)) as agent:
                await agent.run("m4")
            after = await journal(store)
    assert not model.refusals
    numbers = [event.sequence for event in after]
    assert numbers == sorted(set(numbers))
    assert after[: len(before)] == before
    entered = [e.msg.text for e in after if isinstance(e.msg, UserMessage)]
    assert entered == [f"m{n}" for n in range(5)]
    assert outputs(model.requests[1].items) == [f"t{n} is done" for n in range(5)]
    kinds = [e.msg for e in after if isinstance(e.msg, TurnStarted | TurnComplete)]
    assert [isinstance(msg, TurnStarted) for msg in kinds] == [True, False] * 5
    assert len([e for e in after if isinstance(e.msg, SessionConfigured)]) == 2
