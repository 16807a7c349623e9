"""Closing, dying and opening again: the same session, and nothing of it twice."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.scenarios.story import (
    Strict,
    World,
    configure,
    executions,
    journal,
    kinds,
    messages,
    stored,
    until,
)
from trio_agent import (
    CancelQueued,
    EditQueued,
    SubmissionRejectedError,
    UserInput,
    create_agent,
)
from trio_agent.ambient import Ambient
from trio_agent.protocol.events import (
    AgentMessage,
    ModelStepCompleted,
    ModelStepStarted,
    SessionConfigured,
    SubmissionAccepted,
    ToolCallBegin,
    TurnAborted,
    TurnComplete,
    TurnStarted,
    UserMessage,
)
from trio_agent.state.machine import Phase
from trio_agent.state.recovery import Recovery
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import call, stall
from trio_agent.testing.mortal import MortalStore, ProcessDied
from trio_agent.tools.base import ToolContext
from trio_agent.tools.function import tool

BOTH = pytest.mark.parametrize("policy", list(Recovery))


async def killed_at(
    store: MemoryCheckpoint,
    kind: type,
    model: Strict,
    *,
    settle: bool = True,
    **options: object,
) -> None:
    """Submit "go" and let the process die once *kind* was told."""
    mortal = MortalStore(store)
    with pytest.raises(ProcessDied):
        async with create_agent(configure(model, mortal, **options)) as agent:
            await agent.submit(UserInput(text="go"), id="message")
            await until(agent, kind)
            await trio.testing.wait_all_tasks_blocked()
            mortal.dead = True
            raise ProcessDied
    await mortal.bury()


async def test_a_lost_request_is_asked_again_as_the_same_step(store: MemoryCheckpoint) -> None:
    await killed_at(store, ModelStepStarted, Strict([stall()]))
    model = Strict("here I am")
    config = configure(model, store, recovery=Recovery.RESUME)
    async with create_agent(config) as agent:
        await agent.wait_idle()
    started = await messages(store, ModelStepStarted)
    assert [(one.step_index, one.attempt) for one in started] == [(0, 1), (0, 2)]
    assert len({one.step_id for one in started}) == 2
    assert len({one.turn_id for one in started}) == 1
    (record,) = await executions(store)
    assert (record.outcome, record.model_calls) == ("completed", 2)


async def test_a_lost_request_ends_its_turn_under_abort(store: MemoryCheckpoint) -> None:
    await killed_at(store, ModelStepStarted, Strict([stall()]))
    model = Strict("never asked")
    async with create_agent(configure(model, store)) as agent:
        assert agent.snapshot().phase is Phase.IDLE
        assert agent.session.recovered
    assert not model.requests
    assert [one.outcome for one in await executions(store)] == ["aborted"]


async def test_step_limits_count_over_restarts(store: MemoryCheckpoint) -> None:
    """Each process completes one step and dies in the tool that it asked for."""
    slow = (World().tool("slow", effect="read_only", seconds=9e9),)
    quick = (World().tool("slow", effect="read_only"),)
    await killed_at(store, ToolCallBegin, Strict([call("slow")]), tools=slow)
    for _ in range(2):
        mortal = MortalStore(store)
        model = Strict([call("slow")])
        gate = World()
        gated = (
            gate.tool("slow", effect="read_only", output="seen"),
            gate.tool("other", effect="read_only", seconds=9e9),
        )
        model = Strict([call("other")], [call("other")])
        config = configure(
            model, mortal, tools=gated, max_model_steps=4, recovery=Recovery.RESUME
        )
        with pytest.raises(ProcessDied):
            async with create_agent(config) as agent:
                await until(agent, ToolCallBegin, where=lambda begin: begin.name == "other")
                await trio.testing.wait_all_tasks_blocked()
                mortal.dead = True
                raise ProcessDied
        await mortal.bury()
    free = (*quick, World().tool("other", effect="read_only"))
    config = configure(
        Strict(*[[call("slow")]] * 9),
        store,
        tools=free,
        max_model_steps=4,
        recovery=Recovery.RESUME,
    )
    async with create_agent(config) as agent:
        await agent.wait_idle()
    (record,) = await executions(store)
    assert record.finish_reason == "step_limit"
    completed = await messages(store, ModelStepCompleted)
    assert [one.step_index for one in completed if one.outcome == "completed"] == [0, 1, 2, 3]


async def test_a_repeatable_call_runs_again_with_the_same_key(store: MemoryCheckpoint) -> None:
    keys: list[str] = []

    @tool(effect="idempotent")
    async def put(ctx: ToolContext) -> str:
        """Put something."""
        keys.append(ctx.idempotency_key)
        if len(keys) == 1:
            await trio.sleep(3_600)
        return "put"

    await killed_at(store, ToolCallBegin, Strict([call("put")]), tools=(put,))
    assert len(keys) == 1
    model = Strict("done")
    config = configure(model, store, tools=(put,), recovery=Recovery.RESUME)
    async with create_agent(config) as agent:
        await agent.wait_idle()
    assert keys == [keys[0]] * 2
    assert (await executions(store))[0].outcome == "completed"


async def test_a_retry_after_a_retry_keeps_the_key(store: MemoryCheckpoint) -> None:
    keys: list[str] = []

    @tool(effect="idempotent")
    async def put(ctx: ToolContext) -> str:
        """Put something."""
        keys.append(ctx.idempotency_key)
        await trio.sleep(3_600)
        return "never"

    await killed_at(store, ToolCallBegin, Strict([call("put")]), tools=(put,))
    for _ in range(3):
        mortal = MortalStore(store)
        config = configure(Strict(), mortal, tools=(put,), recovery=Recovery.RESUME)
        with pytest.raises(ProcessDied):
            async with create_agent(config) as agent:
                await until(agent, ToolCallBegin)
                await trio.testing.wait_all_tasks_blocked()
                mortal.dead = True
                raise ProcessDied
        await mortal.bury()
    assert keys == [keys[0]] * 4


@BOTH
async def test_opening_again_and_again_changes_nothing(
    store: MemoryCheckpoint, policy: Recovery
) -> None:
    world = World()
    tools = (world.tool("slow", seconds=9e9),)
    await killed_at(store, ToolCallBegin, Strict([call("slow")]), tools=tools)
    settled = None
    for _ in range(3):
        async with create_agent(
            configure(Strict("done"), store, tools=tools, recovery=policy)
        ) as agent:
            await agent.wait_idle()
        after = await stored(store)
        assert settled is None or after == settled, "another opening changed something"
        settled = after
    assert (await kinds(store)).count("ToolCallEnd") == 1
    assert world.entered == ["slow"]


async def test_a_receipt_outlives_its_process_and_its_turn(store: MemoryCheckpoint) -> None:
    async with create_agent(configure(Strict("hello"), store)) as agent:
        first = await agent.submit(UserInput(text="go"), id="m")
        again = await agent.submit(UserInput(text="go"), id="m")
        await agent.wait_idle()
        later = await agent.submit(UserInput(text="go"), id="m")
    model = Strict("never asked")
    async with create_agent(configure(model, store)) as agent:
        reopened = await agent.submit(UserInput(text="go"), id="m")
        with pytest.raises(SubmissionRejectedError) as conflict:
            await agent.submit(UserInput(text="something else"), id="m")
        await agent.wait_idle()
    assert conflict.value.code == "id_conflict"
    assert first.status == "accepted"
    assert [one.status for one in (again, later, reopened)] == ["duplicate"] * 3
    assert {one.sequence for one in (first, again, later, reopened)} == {first.sequence}
    assert len(await messages(store, SubmissionAccepted)) == 1
    assert len(await executions(store)) == 1
    assert not model.requests


async def test_a_refusal_leaves_no_receipt(store: MemoryCheckpoint) -> None:
    async with create_agent(configure(Strict("hello"), store)) as agent:
        for _ in range(2):
            with pytest.raises(SubmissionRejectedError) as stale:
                await agent.submit(UserInput(text="go"), id="m", expect="no such turn")
            assert stale.value.code == "stale_turn"
        receipt = await agent.submit(UserInput(text="go"), id="m", expect="idle")
        assert receipt.status == "accepted"
        await agent.wait_idle()


async def test_an_expectation_is_judged_where_it_is_committed(store: MemoryCheckpoint) -> None:
    """Of many that expect an idle session at the same moment one alone is accepted."""
    accepted: list[str] = []

    async with create_agent(configure(Strict([stall()]), store)) as agent:

        async def try_it(number: int) -> None:
            try:
                await agent.submit(UserInput(text=f"{number}"), expect="idle")
                accepted.append("accepted")
            except SubmissionRejectedError as exc:
                accepted.append(exc.code)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(try_it, number)
        assert sorted(accepted) == ["accepted", *["not_idle"] * 19]
        assert len(await messages(store, TurnStarted)) == 1
        turn_id = agent.snapshot().turn_id
        await agent.submit(UserInput(text="more", delivery="queue"), expect=turn_id)


async def test_the_queue_survives_with_its_order_its_edits_and_its_gaps(
    store: MemoryCheckpoint,
) -> None:
    mortal = MortalStore(store)
    with pytest.raises(ProcessDied):
        async with create_agent(configure(Strict([stall()]), mortal)) as agent:
            await agent.submit(UserInput(text="go"), id="0")
            await until(agent, TurnStarted)
            for number in "1234":
                op = UserInput(text=f"text {number}", delivery="queue")
                await agent.submit(op, id=number)
            await agent.submit(CancelQueued("2"))
            await agent.submit(EditQueued("3", "other text"), id="3 edited")
            mortal.dead = True
            raise ProcessDied
    await mortal.bury()
    async with create_agent(configure(Strict("a", "b", "c"), store)) as agent:
        await agent.wait_idle()
    said = [(one.text, one.delivery) for one in await messages(store, UserMessage)]
    assert said == [
        ("go", "turn"),
        ("text 1", "queue"),
        ("other text", "queue"),
        ("text 4", "queue"),
    ]
    assert [one.submission_id for one in await executions(store)] == ["0", "1", "3 edited", "4"]


async def test_a_turn_between_two_steps_goes_on_with_its_id_and_cursor(
    store: MemoryCheckpoint,
) -> None:
    """A hook before the request makes "between two steps" a durable place."""
    from trio_agent import Middleware
    from trio_agent.middleware.contexts import PreModelContext

    class Slow(Middleware):
        hold = True

        async def pre_model(self, ctx: PreModelContext) -> None:
            await trio.lowlevel.checkpoint()
            if ctx.step_index == 1 and self.hold:
                await trio.sleep_forever()

    class Quick(Slow):
        hold = False

        @property
        def name(self) -> str:
            return "slow"

    world = World()
    for policy in Recovery:
        session_id = policy.value
        options = {"tools": (world.tool("tool"),), "session_id": session_id}
        mortal = MortalStore(store)
        with pytest.raises(ProcessDied):
            config = configure(Strict([call("tool")]), mortal, middleware=(Slow(),), **options)
            async with create_agent(config) as agent:
                await agent.submit(UserInput(text="go"))
                await world.wait_entered(1)
                await trio.testing.wait_all_tasks_blocked()
                mortal.dead = True
                raise ProcessDied
        await mortal.bury()
        config = configure(
            Strict("done"), store, middleware=(Quick(),), recovery=policy, **options
        )
        async with create_agent(config) as agent:
            await agent.wait_idle()
        steps = await messages(store, ModelStepStarted, session_id)
        assert [one.step_index for one in steps] == [0, 1]
        assert len({one.turn_id for one in steps}) == 1
        (record,) = await executions(store, session_id)
        assert (record.outcome, record.model_calls, record.tool_calls) == ("completed", 2, 1)
        world.entered.clear()


@pytest.mark.parametrize("drift", [-3_600_000, 31_536_000_000])
async def test_a_wall_clock_that_jumps_changes_no_order_and_loses_nothing(
    store: MemoryCheckpoint, drift: int
) -> None:
    now = 1_700_000_000_000

    def jumping() -> int:
        nonlocal now
        now = max(0, now + drift)
        return now

    ambient = Ambient(now_ms=jumping)
    world = World()
    for number in range(3):
        model = Strict([call("tool"), call("tool")], f"answer {number}")
        config = configure(model, store, tools=(world.tool("tool"),), ambient=ambient)
        async with create_agent(config) as agent:
            assert (await agent.run(f"question {number}")).text == f"answer {number}"
    numbers = [event.sequence for event in await journal(store)]
    assert numbers == sorted(numbers)
    assert [one.text for one in await messages(store, UserMessage)] == [
        f"question {number}" for number in range(3)
    ]
    for record in await executions(store):
        assert record.elapsed_ms >= 0


async def test_every_opening_says_so_first(store: MemoryCheckpoint) -> None:
    for _ in range(2):
        async with create_agent(configure(Strict("hi"), store)) as agent:
            await agent.run("go")
            first = await agent.next_event()
            assert first is not None
            assert isinstance(first.msg, SessionConfigured)
            assert not first.msg.recovered
    told = await kinds(store)
    assert told[0] == "SessionConfigured"
    assert told.count("SessionConfigured") == 2


async def test_what_was_said_before_a_death_stays_said(store: MemoryCheckpoint) -> None:
    mortal = MortalStore(store)
    with pytest.raises(ProcessDied):
        async with create_agent(configure(Strict("an answer"), mortal)) as agent:
            await agent.run("go")
            mortal.dead = True
            raise ProcessDied
    await mortal.bury()
    async with create_agent(configure(Strict("another"), store)) as agent:
        await agent.run("and?")
    said = await messages(store, AgentMessage)
    assert [one.content[0].text for one in said] == ["an answer", "another"]
    assert not await messages(store, TurnAborted)
    assert len(await messages(store, TurnComplete)) == 2
