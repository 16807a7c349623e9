"""Reports about models and readers: switches, hidden errors, readers that missed something.

What needs a wire (framing, retries, silence) is in ``test_model_sessions.py``; here
the session's side of it is told with scripts, on virtual time.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

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
    stored,
    until,
)
from trio_agent import (
    ConfigError,
    Interrupt,
    Middleware,
    ModelRouter,
    ProviderError,
    SessionBrokenError,
    SetModel,
    StreamInterruptedError,
    SubmissionRejectedError,
    UserInput,
    create_agent,
)
from trio_agent.agent.readers import TAIL_BYTES
from trio_agent.middleware import PreModelContext, RuntimeContext
from trio_agent.model.base import Emit, ModelOutput, ModelRequest
from trio_agent.protocol.events import (
    TRANSIENT_TYPES,
    AgentMessage,
    AgentMessageDelta,
    Error,
    Event,
    HistoryGap,
    ModelStepCompleted,
    ToolCallBegin,
    TurnAborted,
    TurnComplete,
    Warning,  # noqa: A004
)
from trio_agent.protocol.items import ReasoningItem, Sealed, UserItem
from trio_agent.protocol.limits import MAX_STREAM_RETRIES
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import (
    OwnParts,
    ScriptedModel,
    ScriptEntry,
    StrictModel,
    call,
    drop,
    fail,
    stall,
    stop,
    text,
    think,
)

DEADLINE = 60


# --- a stream that falls silent

SILENCES: dict[str, list[ScriptEntry]] = {
    "after a text": [[text("abc"), stall()]],
    "before anything": [[stall()]],
    "after half an answer": [[text("abc"), call("counter"), stall()]],
}


@pytest.mark.parametrize("where", SILENCES)
async def test_silence_ends_after_a_stated_number_of_attempts_and_leaves_nothing(
    store: MemoryCheckpoint, autojump_clock: MockClock, where: str
) -> None:
    world, (entry,) = World(), SILENCES[where]
    attempts = MAX_STREAM_RETRIES + 1
    model = Strict(*[entry] * attempts, "at last")
    tools = (world.tool("counter"),)
    config = configure(model, store, tools=tools, model_idle_timeout=2.0)
    async with create_agent(config) as agent:
        result = await agent.run("go")
        assert result.outcome == "failed"
        assert isinstance(result.error, StreamInterruptedError)
        assert len(model.requests) == attempts
        assert trio.current_time() < attempts * 2 + 10
        assert not [i for i in (await stored(store)).context if not isinstance(i, UserItem)]
        assert (await agent.run("again")).text == "at last"
    errors = await messages(store, Error)
    assert len(errors) == attempts
    assert all(error.retryable for error in errors)
    steps = [step.outcome for step in await messages(store, ModelStepCompleted)]
    assert steps == ["retrying"] * MAX_STREAM_RETRIES + ["failed", "completed"]
    assert not world.entered
    assert not model.refusals


@pytest.mark.parametrize("where", SILENCES)
async def test_an_interrupt_ends_silence_at_once(
    store: MemoryCheckpoint, autojump_clock: MockClock, where: str
) -> None:
    model = Strict(*SILENCES[where], "going on")
    async with create_agent(configure(model, store)) as agent:
        await agent.submit(UserInput(text="go"))
        await trio.sleep(10)
        turn_id = agent.snapshot().turn_id
        assert turn_id is not None
        before = trio.current_time()
        await agent.submit(Interrupt(turn_id))
        await agent.wait_idle()
        assert trio.current_time() - before < 1
        assert (await agent.run("next")).text == "going on"
    assert not model.refusals


# --- replies without content

EMPTY: dict[str, ScriptEntry] = {
    "no items": ModelOutput(),
    "no text": [text("")],
    "white space": [text(" \n")],
    "only thoughts": [think("hm"), stop()],
}


@pytest.mark.parametrize("kind", EMPTY)
async def test_an_empty_reply_is_reported_and_never_stored(shelf: Shelf, kind: str) -> None:
    model = Strict(EMPTY[kind], "still here", "and here")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store)) as agent:
                await agent.run("hello?")
                (warning,) = await messages(store, Warning)
                assert warning.code == "empty_reply"
                assert (await agent.run("and now?")).text == "still here"
        async with shelf.opened() as store:
            async with create_agent(configure(model, store)) as agent:
                assert (await agent.run("later")).text == "and here"
    assert not model.refusals
    asked = [item.text for item in model.requests[-1].items if isinstance(item, UserItem)]
    assert asked == ["hello?", "and now?", "later"]


# --- real errors, hidden in groups


class Refusing:
    """A model whose connection fails, as an adapter that maps nothing would let it."""

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        await trio.lowlevel.checkpoint()
        raise ConnectionError("the line is dead")


async def test_what_a_model_raised_is_the_cause_of_the_turns_error(shelf: Shelf) -> None:
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(Refusing(), store)) as agent:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(until, agent, TurnAborted)
                    result = await agent.run("go")
            (error,) = await messages(store, Error)
    assert result.outcome == "failed"
    assert isinstance(result.error, Exception)
    cause = result.error.__cause__
    assert isinstance(cause, ConnectionError)
    assert "the line is dead" in error.message
    assert "Cancelled" not in error.message
    with pytest.raises(type(result.error)):
        result.raise_for_failure()


class Failing(Middleware):
    """Fails in a hook, or in the background when it is told to."""

    def __init__(self, name: str = "failing", *, hook: bool = False) -> None:
        self._name = name
        self._hook = hook
        self.fail = trio.Event()

    @property
    def name(self) -> str:
        return self._name

    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._work)
            yield
            nursery.cancel_scope.cancel()

    async def _work(self) -> None:
        await self.fail.wait()
        raise ConnectionError(f"{self._name} lost its line")

    async def pre_model(self, ctx: PreModelContext) -> None:
        await trio.lowlevel.checkpoint()
        if self._hook:
            raise ConnectionError("lost in a hook")


async def test_what_a_hook_raised_is_the_cause_of_the_turns_error(shelf: Shelf) -> None:
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            config = configure(Strict("never"), store, middleware=[Failing(hook=True)])
            async with create_agent(config) as agent:
                result = await agent.run("go")
    assert isinstance(result.error, Exception)
    assert isinstance(result.error.__cause__, ConnectionError)


@pytest.mark.parametrize("count", [1, 2])
async def test_background_failures_are_all_shown_and_no_cancellation_with_them(
    store: MemoryCheckpoint, autojump_clock: MockClock, count: int
) -> None:
    failing = [Failing(f"m{n}") for n in range(count)]
    world = World()
    tools = (world.tool("slow", seconds=1_000),)
    config = configure(Strict([call("slow")]), store, tools=tools, middleware=failing)
    with pytest.raises(SessionBrokenError) as broken:
        async with create_agent(config) as agent:
            await agent.submit(UserInput(text="go"))
            await world.wait_entered(1)
            for one in failing:
                one.fail.set()
            await trio.sleep_forever()
    shown = list(leaves(broken.value.__cause__))
    assert {str(leaf) for leaf in shown} == {f"m{n} lost its line" for n in range(count)}
    assert all(isinstance(leaf, ConnectionError) for leaf in shown)
    (turn,) = await executions(store)
    assert turn.outcome == "aborted"


def leaves(exc: BaseException | None) -> list[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        return [leaf for one in exc.exceptions for leaf in leaves(one)]
    return [] if exc is None else [exc]


# --- another model in the middle of a session


def providers(
    a: list[ScriptEntry], b: list[ScriptEntry]
) -> tuple[ModelRouter, list[StrictModel]]:
    """Return two providers that refuse what the other one sealed, behind their adapters."""
    strict = [
        StrictModel(ScriptedModel(*script), provider=name)
        for name, script in (("A", a), ("B", b))
    ]
    router = ModelRouter("a", OwnParts(strict[0], provider="A"))
    router.register("b", OwnParts(strict[1], provider="B"))
    return router, strict


def asked(model: StrictModel, request: int = -1) -> str:
    assert isinstance(model.inner, ScriptedModel)
    return repr(model.inner.requests[request].items)


async def test_sealed_parts_stay_with_their_model_over_switches_and_openings(
    shelf: Shelf,
) -> None:
    thought = think("hm", sealed=Sealed(provider="A", data="blob of A"))
    a: list[ScriptEntry] = [[thought, call("ok")], "first", "third"]
    router, (model_a, model_b) = providers(a, ["second"])
    tools = (World().tool("ok"),)
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(router, store, tools=tools)) as agent:
                await agent.run("one")
                await agent.submit(SetModel("b"))
        async with shelf.opened() as store:
            async with create_agent(configure(router, store, tools=tools)) as agent:
                assert agent.model_route == "b"
                assert (await agent.run("two")).text == "second"
                assert "blob of A" not in asked(model_b)
                for kept in ("first", "ok is done"):
                    assert kept in asked(model_b)
                await agent.submit(SetModel("a"))
                assert (await agent.run("three")).text == "third"
            context = (await stored(store)).context
    assert "blob of A" in asked(model_a)
    assert any(isinstance(item, ReasoningItem) and item.sealed for item in context)
    assert not model_a.refusals + model_b.refusals


async def test_a_switch_during_a_tool_call_is_refused_and_works_after_the_turn(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    """The stated point is the end of the turn: until then a switch is refused."""
    thought = think(sealed=Sealed(provider="A", data="blob of A"))
    router, strict = providers([[thought, call("slow")], "first"], ["second"])
    tools = (World().tool("slow", seconds=5),)
    async with create_agent(configure(router, store, tools=tools)) as agent:
        await agent.submit(UserInput(text="one"))
        await until(agent, ToolCallBegin)
        with pytest.raises(SubmissionRejectedError) as refused:
            await agent.submit(SetModel("b"))
        assert refused.value.code == "busy"
        await until(agent, TurnComplete)
        await agent.submit(SetModel("b"))
        assert (await agent.run("two")).text == "second"
    assert not strict[0].refusals + strict[1].refusals


# --- retries


@pytest.mark.parametrize(
    ("entry", "tries", "seconds"),
    [
        ([fail(503)], 6, 0),
        ([fail(429, retry_after=1.0)], 6, 5),
        ([fail(429, retry_after=86_400.0)], 1, 0),
        ([fail(400)], 1, 0),
        (ProviderError("connection refused", retryable=True), 6, 0),
        ([drop()], 6, 0),
    ],
    ids=["503", "429", "429 for a day", "400", "refused", "dropped"],
)
async def test_retries_end_and_each_is_announced(
    store: MemoryCheckpoint,
    autojump_clock: MockClock,
    entry: ScriptEntry,
    tries: int,
    seconds: float,
) -> None:
    model = Strict(*[entry] * 100)
    async with create_agent(configure(model, store)) as agent:
        result = await agent.run("go")
        took = trio.current_time()
    assert result.outcome == "failed"
    assert isinstance(result.error, ProviderError)
    assert len(model.requests) == tries
    assert seconds <= took < 60
    steps = await messages(store, ModelStepCompleted)
    assert [step.outcome for step in steps] == ["retrying"] * (tries - 1) + ["failed"]
    waits = [step.retry_in_ms or 0 for step in steps[:-1]]
    assert waits == sorted(waits)
    assert len(set(waits)) == len(waits) or seconds
    assert all(wait >= seconds * 1000 / 5 for wait in waits)


async def test_an_interrupt_ends_a_wait_at_once(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    model = Strict([fail(429, retry_after=100.0)], "going on")
    async with create_agent(configure(model, store)) as agent:
        await agent.submit(UserInput(text="go"))
        step = await until(agent, ModelStepCompleted)
        before = trio.current_time()
        await agent.submit(Interrupt(step.turn_id))
        await agent.wait_idle()
        assert trio.current_time() - before < 1
        assert (await agent.run("next")).text == "going on"
    assert len(model.requests) == 2


# --- readers that come back


def listed(events: list[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event.msg, TRANSIENT_TYPES)]


@pytest.mark.parametrize("reopened", [False, True])
async def test_a_reader_that_comes_back_gets_what_it_missed_once_and_in_order(
    shelf: Shelf, reopened: bool
) -> None:
    model = Strict("one", "two", "three", "four")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store)) as agent:
                await agent.run("m0")
                seen = [await agent.events.__anext__() for _ in range(5)]
                position = seen[-1].sequence
                for n in range(1, 3):
                    await agent.run(f"m{n}")
                if not reopened:
                    await read_on(agent.subscribe(after=position), seen, agent.snapshot())
        if reopened:
            async with shelf.opened() as store:
                async with create_agent(configure(model, store)) as agent:
                    await agent.run("after the restart")
                    await read_on(agent.subscribe(after=position), seen, agent.snapshot())
        async with shelf.opened() as store:
            rows = await journal(store)
    numbers = [event.sequence for event in seen]
    assert numbers == sorted(set(numbers))
    kept = [event for event in rows if event.sequence <= numbers[-1]]
    lasting = [one for one in listed(seen) if not isinstance(one.msg, AgentMessageDelta)]
    assert lasting == kept
    said = [event.msg for event in seen if isinstance(event.msg, AgentMessage)]
    assert [part.text for msg in said for part in msg.content][:2] == ["one", "two"]


async def read_on(reader: object, seen: list[Event], snapshot: object) -> None:
    """Append everything up to now."""
    last = snapshot.last_event_sequence  # type: ignore[attr-defined]
    while seen[-1].sequence < last:
        seen.append(await reader.__anext__())  # type: ignore[attr-defined]


async def test_positions_that_cannot_be_are_clear_errors_and_old_ones_a_gap(
    shelf: Shelf,
) -> None:
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(Strict("one", "two"), store)) as agent:
                await agent.run("go")
                last = agent.snapshot().last_event_sequence
            await store.prune(SESSION, keep_events=3)
            async with create_agent(configure(Strict("two"), store)) as agent:
                for position in (-1, last + 1_000, "3", None, 1.0, True):
                    with pytest.raises(ConfigError):
                        agent.subscribe(after=position)  # type: ignore[arg-type]
                reader = agent.subscribe(after=0)
                gap = await reader.__anext__()
                assert isinstance(gap.msg, HistoryGap)
                assert gap.msg.first == 1
                following = await reader.__anext__()
                assert following.sequence > gap.msg.last
                await agent.run("again")
                async for event in reader:
                    if isinstance(event.msg, TurnComplete):
                        break


# --- a slow reader


DELTAS, SIZE = 2_000, 5_000
"""10 MB: forty times what the tail and a page may hold. The bound does not depend on it."""


async def test_readers_that_do_not_read_cost_nothing_and_miss_nothing(
    shelf: Shelf,
) -> None:
    """One never reads, one reads now and then, one keeps up."""
    limit = 8 * TAIL_BYTES

    async def flood(request: ModelRequest, emit: Emit) -> ModelOutput:
        for n in range(DELTAS):
            await emit(f"{n:>{SIZE}}")
        return ModelOutput.answer("over")

    heard: dict[str, list[int]] = {"slow": [], "fast": []}
    sizes = {"slow": 0, "fast": 0}

    async def read(name: Literal["slow", "fast"], agent: object) -> None:
        async for event in agent.subscribe(after=0):  # type: ignore[attr-defined]
            heard[name].append(event.sequence)
            if isinstance(event.msg, AgentMessageDelta):
                sizes[name] += len(event.msg.text)
            if isinstance(event.msg, TurnComplete):
                return
            if name == "slow" and len(heard[name]) == 50:
                await over.wait()

    over = trio.Event()
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(Strict(flood), store)) as agent:
                never = agent.subscribe(after=0)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read, "slow", agent)
                    nursery.start_soon(read, "fast", agent)
                    tracemalloc.start()
                    try:
                        await agent.run("go")
                        peak = tracemalloc.get_traced_memory()[1]
                    finally:
                        tracemalloc.stop()
                    over.set()
                assert (await never.__anext__()).sequence == 1
                async for event in never:
                    if isinstance(event.msg, TurnComplete):
                        break
    assert sizes["fast"] == DELTAS * SIZE
    for numbers in heard.values():
        assert numbers == sorted(set(numbers))
    if shelf.path is not None:
        assert peak < limit, "a store in memory keeps the journal itself"
