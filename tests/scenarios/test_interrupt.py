"""An interrupt ends its turn, soon, whatever the turn is doing, and nothing else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import trio
import trio.testing

from tests.scenarios.hooked import Hooked
from tests.scenarios.story import (
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
    Abort,
    Interrupt,
    Middleware,
    SqliteCheckpoint,
    SubmissionRejectedError,
    UserInput,
    create_agent,
    tool,
)
from trio_agent.middleware.contexts import PostToolContext, PreModelContext, StopContext
from trio_agent.protocol import texts
from trio_agent.protocol.events import (
    Event,
    ExecApprovalRequest,
    ModelStepStarted,
    Notice,
    ToolCallBegin,
    TurnAborted,
    TurnComplete,
    TurnStarted,
    Warning,  # noqa: A004  # the wire's word
)
from trio_agent.protocol.ops import Decision
from trio_agent.state.checkpoint import Effect
from trio_agent.state.recovery import Recovery
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import call, fail, stall, text
from trio_agent.testing.mortal import MortalStore, ProcessDied


class Slow(Middleware):
    """Sleeps in the hook that it is told to."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.reached = trio.Event()

    async def pre_model(self, ctx: PreModelContext) -> None:
        await self.sleep("pre_model")

    async def stop(self, ctx: StopContext) -> None:
        await self.sleep("stop")

    async def sleep(self, hook: str) -> None:
        await trio.lowlevel.checkpoint()
        if hook == self.hook:
            self.hook = ""
            self.reached.set()
            await trio.sleep_forever()


async def interrupt(agent: object, turn_id: str) -> None:
    from trio_agent import Agent

    assert isinstance(agent, Agent)
    with trio.fail_after(5.1):
        await agent.submit(Interrupt(turn_id))
        await until(agent, TurnAborted)
        await agent.wait_idle()


async def check_goes_on(store: MemoryCheckpoint, agent: object) -> None:
    """The session takes the next message, and the history is one that a provider takes."""
    from trio_agent import Agent

    assert isinstance(agent, Agent)
    assert (await agent.run("and now?")).text == "fine"
    assert [one.outcome for one in await executions(store)] == ["aborted", "completed"]


@pytest.mark.parametrize("hook", ["pre_model", "stop"])
async def test_an_interrupt_ends_a_turn_in_a_hook(
    store: MemoryCheckpoint, hook: str, autojump_clock: trio.testing.MockClock
) -> None:
    slow = Slow(hook)
    model = Strict("fine") if hook == "pre_model" else Strict("a first answer", "fine")
    async with create_agent(configure(model, store, middleware=(slow,))) as agent:
        await agent.submit(UserInput(text="go"))
        started = await until(agent, TurnStarted)
        await slow.reached.wait()
        await interrupt(agent, started.turn_id)
        await check_goes_on(store, agent)


@pytest.mark.parametrize(
    "script",
    [[stall()], [text("half an ans"), stall()], [fail(429, retry_after=40)]],
    ids=["silent", "streaming", "waiting to retry"],
)
async def test_an_interrupt_ends_a_turn_at_the_model(
    store: MemoryCheckpoint, script: list[object], autojump_clock: trio.testing.MockClock
) -> None:
    model = Strict(script, "fine")  # type: ignore[arg-type]
    async with create_agent(configure(model, store)) as agent:
        await agent.submit(UserInput(text="go"))
        started = await until(agent, ModelStepStarted)
        await trio.sleep(1)
        await interrupt(agent, started.turn_id)
        await check_goes_on(store, agent)


@pytest.mark.parametrize("effect", ["undeclared", "read_only", "idempotent", "destructive"])
async def test_an_interrupt_says_of_a_call_what_is_known(
    store: MemoryCheckpoint, effect: Effect, autojump_clock: trio.testing.MockClock
) -> None:
    world = World()
    tools = (
        world.tool("slow", seconds=99, effect=effect),
        world.tool("quick", effect="read_only"),
        world.tool("last", exclusive=True),
    )
    model = Strict([call("slow"), call("quick"), call("last")], "fine")
    async with create_agent(configure(model, store, tools=tools)) as agent:
        await agent.submit(UserInput(text="go"))
        begin = await until(agent, ToolCallBegin)
        await trio.sleep(1)
        await interrupt(agent, begin.turn_id)
        await check_goes_on(store, agent)
    cut_off = "failed" if effect == "read_only" else "unknown"
    assert await outcomes(store) == {
        "slow": cut_off,
        "quick": "finished",
        "last": "not_started",
    }
    told = texts.READ_ONLY_INTERRUPTED if effect == "read_only" else texts.INTERRUPTED
    assert outputs((await stored(store)).context) == [told, "quick is done", texts.NOT_STARTED]
    assert world.left == ["quick"]


class SlowDisk(MemoryCheckpoint):
    """Takes a second for each save; once begun, it is not cancelled."""

    async def save(self, *args: Any, **kwargs: Any) -> tuple[Event, ...]:
        await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=True):
            await trio.sleep(1)
            return await super().save(*args, **kwargs)
        raise AssertionError("a shield lets nothing through")


async def test_what_ended_while_the_interrupt_was_written_keeps_its_result(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store, world = SlowDisk(), World()
    tools = (world.tool("quick", seconds=1.5), world.tool("slow", seconds=99))
    model = Strict([call("quick"), call("slow")], "fine")
    async with create_agent(configure(model, store, tools=tools)) as agent:
        await agent.submit(UserInput(text="go"))
        begin = await until(agent, ToolCallBegin)
        await trio.sleep(1)
        await agent.submit(Interrupt(begin.turn_id))  # until half a second after "quick"
        await agent.wait_idle()
    assert world.left == ["quick"]
    assert await outcomes(store) == {"quick": "finished", "slow": "unknown"}


async def test_what_a_hook_did_about_a_call_is_kept_with_it_when_the_turn_is_closed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def act(ctx: PostToolContext) -> None:
        ctx.state = {"seen": ctx.call.name}
        ctx.notice("a note")
        ctx.add_hidden("a hidden word")
        ctx.replace_output("seen by a hook")

    store, world, hooked = SlowDisk(), World(), Hooked(post_tool_use=act)
    tools = (world.tool("quick", seconds=1.5), world.tool("slow", seconds=99))
    model = Strict([call("quick"), call("slow")], "fine")
    async with create_agent(configure(model, store, tools=tools, middleware=[hooked])) as agent:
        await agent.submit(UserInput(text="go"))
        begin = await until(agent, ToolCallBegin)
        await trio.sleep(1)
        await agent.submit(Interrupt(begin.turn_id))
        await agent.wait_idle()
    checkpoint = await stored(store)
    assert checkpoint.states[hooked.name] == {"seen": "quick"}
    assert [notice.text for notice in await messages(store, Notice)] == ["a note"]
    assert "a hidden word" in [getattr(item, "text", "") for item in checkpoint.context]
    assert "seen by a hook" in outputs(list(checkpoint.context))


async def test_a_tool_that_catches_everything_is_stopped_all_the_same(
    store: MemoryCheckpoint, autojump_clock: trio.testing.MockClock
) -> None:
    @tool
    async def stubborn() -> str:
        """Go on whatever goes wrong."""
        while True:  # noqa: ASYNC913  # it is meant to be stubborn
            try:
                await trio.sleep(1)
                int("as so often")
            except Exception:
                continue

    model = Strict([call("stubborn")], "fine")
    async with create_agent(configure(model, store, tools=(stubborn,))) as agent:
        await agent.submit(UserInput(text="go"))
        begin = await until(agent, ToolCallBegin)
        await trio.sleep(10)
        await interrupt(agent, begin.turn_id)
        await check_goes_on(store, agent)


async def test_what_swallows_its_cancellation_is_named(
    store: MemoryCheckpoint, autojump_clock: trio.testing.MockClock
) -> None:
    @tool
    async def deaf() -> str:
        """Shield itself."""
        with trio.CancelScope(shield=True):
            await trio.sleep(60)
        return "done"

    model = Strict([call("deaf")], "fine")
    async with create_agent(configure(model, store, tools=(deaf,))) as agent:
        await agent.submit(UserInput(text="go"))
        begin = await until(agent, ToolCallBegin)
        await agent.submit(Interrupt(begin.turn_id))
        warning = await until(agent, Warning)
        assert warning.code == "uncancellable"
        assert "deaf" in warning.message
        await until(agent, TurnAborted)
        await check_goes_on(store, agent)


async def test_what_does_not_stop_is_named_also_after_an_abort_in_process(
    store: MemoryCheckpoint, autojump_clock: trio.testing.MockClock
) -> None:
    @tool
    async def deaf() -> str:
        """Shield itself."""
        with trio.CancelScope(shield=True):
            await trio.sleep(60)
        return "done"

    @tool(needs_approval=True)
    async def asking() -> str:
        """Never run."""
        raise AssertionError("it was not approved")

    async def refuse(_: ExecApprovalRequest) -> Decision:
        await trio.sleep(1)
        return Abort()

    model = Strict([call("deaf"), call("asking")], "fine")
    config = configure(model, store, tools=(deaf, asking), on_approval=refuse)
    async with create_agent(config) as agent:
        await agent.submit(UserInput(text="go"))
        warning = await until(agent, Warning)
        assert warning.code == "uncancellable"
        assert "deaf" in warning.message
        await until(agent, TurnAborted)
        await check_goes_on(store, agent)


async def test_a_thread_that_outlives_the_grace_is_reported_as_abandoned(
    store: MemoryCheckpoint,
) -> None:
    go_on = threading.Event()

    @tool
    def blocking() -> str:
        """Block a thread."""
        go_on.wait(30)
        return "done"

    model = Strict([call("blocking")], "fine")
    config = configure(model, store, tools=(blocking,), shutdown_grace=0.1)
    try:
        with trio.fail_after(20):
            async with create_agent(config) as agent:
                await agent.submit(UserInput(text="go"))
                begin = await until(agent, ToolCallBegin)
                await interrupt(agent, begin.turn_id)
                await check_goes_on(store, agent)
    finally:
        go_on.set()
    warnings = [warning.code for warning in await messages(store, Warning)]
    assert "abandoned_thread" in warnings
    assert await outcomes(store) == {"blocking": "unknown"}


async def test_only_the_turn_that_is_named_is_interrupted(store: MemoryCheckpoint) -> None:
    async with create_agent(configure(Strict([stall()]), store)) as agent:
        with pytest.raises(SubmissionRejectedError) as idle:
            await agent.submit(Interrupt("no such turn"))
        assert idle.value.code == "no_turn"
        await agent.submit(UserInput(text="go"))
        await until(agent, TurnStarted)
        before = (await stored(store)).sequence
        with pytest.raises(SubmissionRejectedError) as stale:
            await agent.submit(Interrupt("another turn"))
        assert stale.value.code == "stale_turn"
        assert (await stored(store)).sequence == before, "a refusal changed something"


async def test_the_ending_names_the_op_that_asked_for_it(store: MemoryCheckpoint) -> None:
    async with create_agent(configure(Strict([stall()]), store)) as agent:
        await agent.submit(UserInput(text="go"), id="message")
        started = await until(agent, TurnStarted)
        await agent.submit(Interrupt(started.turn_id), id="enough")
        await agent.wait_idle()
    by_kind: dict[type, Event] = {type(one.msg): one for one in await journal(store)}
    assert by_kind[TurnAborted].submission_id == "enough"
    assert by_kind[TurnStarted].submission_id == "message"


async def test_what_waits_runs_next_and_in_order(store: MemoryCheckpoint) -> None:
    model = Strict([stall()], "one", "two", "three")
    async with create_agent(configure(model, store)) as agent:
        await agent.submit(UserInput(text="go"), id="0")
        started = await until(agent, TurnStarted)
        await agent.submit(UserInput(text="steer", delivery="steer"), id="1")
        await agent.submit(UserInput(text="queue", delivery="queue"), id="2")
        await agent.submit(UserInput(text="steer again", delivery="steer"), id="3")
        await agent.submit(Interrupt(started.turn_id))
        await agent.wait_idle()
    ran = [one.submission_id for one in await executions(store)]
    assert ran == ["0", "1", "2", "3"]


@pytest.mark.parametrize("policy", list(Recovery))
@pytest.mark.parametrize("script", [[stall()], [call("slow")]], ids=["model", "tool"])
async def test_an_interrupt_that_was_accepted_survives_a_death(
    store: MemoryCheckpoint, policy: Recovery, script: list[object]
) -> None:
    world = World()
    for dies_after in range(2):
        mortal = MortalStore(store)
        tools = (world.tool("slow", seconds=9e9),)
        model = Strict(script, "fine")  # type: ignore[arg-type]
        with pytest.raises(ProcessDied):
            async with create_agent(configure(model, mortal, tools=tools)) as agent:
                await agent.submit(UserInput(text="go"))
                started = await until(agent, TurnStarted)
                await trio.testing.wait_all_tasks_blocked()
                # The write that accepts the interrupt is the last one, or the turn's end.
                mortal.dies_at, mortal.when = mortal.writes + 1 + dies_after, "after"
                agent.submit_nowait(Interrupt(started.turn_id))
                await trio.sleep_forever()
        await mortal.bury()
        config = configure(Strict("fine"), store, tools=tools, recovery=policy)
        async with create_agent(config) as agent:
            assert agent.snapshot().turn_id is None, "the turn went on"
    assert [one.outcome for one in await executions(store)] == ["aborted", "aborted"]


async def test_an_interrupt_over_a_real_file(store: MemoryCheckpoint, tmp_path: object) -> None:
    async with SqliteCheckpoint(f"{tmp_path}/db") as file:
        world = World()
        model = Strict([call("slow"), call("slow")], "fine")
        config = configure(model, file, tools=(world.tool("slow", seconds=99),))
        async with create_agent(config) as agent:
            await agent.submit(UserInput(text="go"))
            begin = await until(agent, ToolCallBegin)
            await world.wait_entered(2)
            await interrupt(agent, begin.turn_id)
            result = await agent.run("and now?")
        assert result.text == "fine"
        assert await messages(file, TurnComplete)
