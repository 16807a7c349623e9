"""How a session starts: what is decided, in which order it is told, what a failure leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from tests.scenarios.openings import kinds_of, opened
from tests.scenarios.story import (
    SESSION,
    Strict,
    configure,
    executions,
    journal,
    messages,
    stored,
)
from trio_agent import (
    CheckpointError,
    Middleware,
    ModelRouter,
    SessionContext,
    StoppedError,
    create_agent,
)
from trio_agent.middleware import PromptSection, RuntimeContext, TurnEndContext
from trio_agent.middleware.contexts import Deliver, RouteContext, Routing
from trio_agent.protocol import texts
from trio_agent.protocol.events import (
    TRANSIENT_TYPES,
    Event,
    EventMsg,
    ModelStepCompleted,
    Notice,
    SessionConfigured,
    SessionHistory,
    TokenCount,
    ToolCallBegin,
    ToolCallEnd,
    TurnAborted,
    TurnComplete,
    UserMessage,
    Warning,  # noqa: A004
)
from trio_agent.protocol.items import ToolCallItem, UserItem
from trio_agent.state.checkpoint import (
    ActiveExecution,
    ActiveModelStep,
    Checkpoint,
    QueuedMessage,
    ToolCall,
)
from trio_agent.state.recovery import INTERRUPTED_BY_RESTART
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import text, usage
from trio_agent.testing.mortal import MortalStore, ProcessDied
from trio_agent.tools.catalog import Catalog

TURN = ActiveExecution(submission_id="m", turn_id="t", started_at_ms=1)


def queued(n: int, owner: str = "messages") -> QueuedMessage:
    return QueuedMessage(owner=owner, id=f"q{n}", boundary="queue", text=f"queued {n}")


def cut_off_in_tools(*queue: QueuedMessage) -> tuple[Checkpoint, list[Any]]:
    """Return a session whose process died while two tools ran, and what is in its history."""
    items: list[Any] = [
        UserItem(text="go", submission_id="m"),
        ToolCallItem(call_id="c1", name="one", arguments={}),
        ToolCallItem(call_id="c2", name="two", arguments={}),
    ]
    calls = tuple(ToolCall(call_id=i.call_id, name=i.name, arguments={}) for i in items[1:])
    checkpoint = attrs.evolve(
        Checkpoint.empty(SESSION),
        model_route="default",
        active_execution=attrs.evolve(TURN, model_calls=1, next_model_step=1),
        context=items,
        pending_tools=calls,
        queue=queue,
    )
    return checkpoint, items


def cut_off_in_a_request() -> tuple[Checkpoint, list[Any]]:
    items: list[Any] = [UserItem(text="go", submission_id="m")]
    checkpoint = attrs.evolve(
        Checkpoint.empty(SESSION),
        model_route="default",
        active_execution=attrs.evolve(TURN, model_calls=1, attempts=1),
        active_model_step=ActiveModelStep(step_id="step", step_index=0, started_at_ms=1),
        context=items,
    )
    return checkpoint, items


# --- a new session, and one that needs nothing


async def test_a_new_session_is_one_transaction_that_begins_with_its_configuration(
    store: MemoryCheckpoint,
) -> None:
    context = SessionContext(workspace_label="one")
    config = configure(Strict(), store, session_context=context, metadata={"a": [1]})
    events = await opened(config)
    kept = await stored(store)
    assert kinds_of(events) == [SessionConfigured]
    assert events[0].sequence == 1
    assert isinstance(events[0].msg, SessionConfigured)
    assert not events[0].msg.recovered
    assert (kept.sequence, kept.session_context, kept.metadata) == (0, context, {"a": [1]})
    assert kept.model_route == "default"


async def test_opening_what_needs_nothing_adds_one_event_and_changes_nothing(
    store: MemoryCheckpoint,
) -> None:
    await opened(configure(Strict(), store))
    before = await stored(store)
    for n in range(3):
        events = await opened(configure(Strict(), store))
        assert kinds_of(events) == [SessionConfigured]
        assert events[0].sequence == n + 2
        assert await stored(store) == before


async def test_what_was_used_last_is_told_at_the_end_of_the_opening(
    store: MemoryCheckpoint,
) -> None:
    async with create_agent(configure(Strict([text("a"), usage(3, 4)]), store)) as agent:
        await agent.run("go")
    events = await opened(configure(Strict(), store))
    assert kinds_of(events) == [SessionConfigured, SessionHistory, TokenCount]
    assert isinstance(events[-1].msg, TokenCount)
    assert events[-1].msg.total.total_tokens == 7


# --- routes


def router(*routes: str) -> ModelRouter:
    made = ModelRouter(routes[0], Strict())
    for route in routes[1:]:
        made.register(route, Strict())
    return made


@pytest.mark.parametrize(
    ("saved", "routes", "options", "chosen", "warned"),
    [
        ("old", ("new", "old"), {}, "old", False),
        ("old", ("new",), {}, "new", True),
        (None, ("new",), {}, "new", True),
        ("old", ("new", "old"), {"override_saved_model_route": True}, "new", False),
        ("old", ("new", "old", "third"), {"model_route": "third"}, "third", False),
        ("gone", ("new", "third"), {"model_route": "third"}, "third", False),
    ],
)
async def test_the_route_is_the_explicit_one_or_the_saved_one_or_the_default_with_a_warning(
    store: MemoryCheckpoint,
    saved: str | None,
    routes: tuple[str, ...],
    options: dict[str, Any],
    chosen: str,
    warned: bool,
) -> None:
    await store.save(attrs.evolve(Checkpoint.empty(SESSION), model_route=saved))
    events = await opened(configure(router(*routes), store, **options))
    configured = events[0].msg
    assert isinstance(configured, SessionConfigured)
    assert configured.model.route == chosen
    assert (await stored(store)).model_route == chosen
    codes = [event.msg.code for event in events if isinstance(event.msg, Warning)]
    assert codes == ["route_replaced"] * warned
    again = await opened(configure(router(*routes), store))
    assert not [event for event in again if isinstance(event.msg, Warning)]


# --- what is durable, and what replaces it


async def test_metadata_changes_only_by_an_explicit_and_different_mapping(
    store: MemoryCheckpoint,
) -> None:
    await opened(configure(Strict(), store, metadata={"a": 1}))
    for metadata in (None, {"a": 1}):
        before = await stored(store)
        await opened(configure(Strict(), store, metadata=metadata))
        assert await stored(store) == before
    await opened(configure(Strict(), store, metadata={}))
    assert (await stored(store)).metadata == {}


async def test_a_sessions_context_is_its_first_for_ever(store: MemoryCheckpoint) -> None:
    first = SessionContext(user_id="u")
    await opened(configure(Strict(), store, session_context=first))
    other = SessionContext(user_id="somebody else")
    (event,) = await opened(configure(Strict(), store, session_context=other))
    assert isinstance(event.msg, SessionConfigured)
    assert event.msg.context == (await stored(store)).session_context == first


# --- the queue


class Owner(Middleware):
    """A message handler of its own name."""

    def route_message(self, ctx: RouteContext) -> Routing:
        return Deliver(boundary="queue" if ctx.active_turn_id else "turn")


async def test_messages_of_a_handler_that_is_not_there_refuse_the_opening(
    store: MemoryCheckpoint,
) -> None:
    waiting = (queued(1, "owner"), queued(2, "owner"))
    before = attrs.evolve(Checkpoint.empty(SESSION), queue=waiting, model_route="default")
    await store.save(before)
    with pytest.raises(CheckpointError):
        await opened(configure(Strict(), store))
    assert await stored(store) == before
    assert await journal(store) == []
    model = Strict("one", "two")
    async with create_agent(configure(model, store, middleware=[Owner()])) as agent:
        await agent.wait_idle()
    told = [msg.text for msg in await messages(store, UserMessage)]
    assert told == ["queued 1", "queued 2"]


# --- recovery


@pytest.mark.parametrize("replay", [0, 100])
async def test_the_events_of_a_recovering_start_have_one_order_and_consecutive_numbers(
    store: MemoryCheckpoint, replay: int
) -> None:
    checkpoint, items = cut_off_in_tools(queued(1))
    await store.save(checkpoint, items)
    async with create_agent(
        configure(Strict("done"), store, initial_replay_batches=replay)
    ) as agent:
        live = [await agent.events.__anext__()]
        while not isinstance(live[-1].msg, TurnAborted):
            live.append(await agent.events.__anext__())
        await agent.wait_idle()
        every = await read_to(agent.subscribe(after=0), TurnComplete)
    opening = [event for event in every if event.sequence <= live[-1].sequence]
    rows = [event for event in opening if not isinstance(event.msg, TRANSIENT_TYPES)]
    ends = [ToolCallEnd, ToolCallEnd]
    assert kinds_of(rows) == [SessionConfigured, *ends, TurnAborted], "subscribe has every row"
    if replay:
        assert kinds_of(live) == [SessionConfigured, SessionHistory, TurnAborted]
        assert [event.sequence for event in live] == [1, 4, 5]
        history = live[1].msg
        assert isinstance(history, SessionHistory)
        told = [type(msg) for msg in history.events]
        assert told == [UserMessage, ToolCallBegin, ToolCallBegin, *ends]
        assert {getattr(msg, "turn_id", "t") for msg in history.events[1:]} == {"t"}
    else:
        assert kinds_of(live) == [SessionConfigured, *ends, TurnAborted]
        assert [event.sequence for event in live] == [1, 2, 3, 4]
    assert [event.submission_id for event in rows] == [None, "m", "m", "m"]
    configured, aborted = live[0].msg, live[-1].msg
    assert isinstance(configured, SessionConfigured)
    assert configured.recovered
    assert aborted == TurnAborted(turn_id="t", reason=INTERRUPTED_BY_RESTART)
    first, second = await executions(store)
    assert (first.outcome, first.tool_calls, first.failed_tool_calls) == ("aborted", 2, 2)
    assert second.submission_id == "q1"


async def read_to(reader: Any, last: type[EventMsg]) -> list[Event]:
    events: list[Event] = []
    while not events or not isinstance(events[-1].msg, last):
        events.append(await reader.__anext__())
    return events


async def test_a_lost_request_is_told_as_interrupted_before_the_turns_end(
    store: MemoryCheckpoint,
) -> None:
    checkpoint, items = cut_off_in_a_request()
    await store.save(checkpoint, items)
    model = Strict()
    events = await opened(configure(model, store))
    assert kinds_of(events) == [
        SessionConfigured,
        ModelStepCompleted,
        SessionHistory,
        TurnAborted,
    ]
    assert isinstance(events[1].msg, ModelStepCompleted)
    assert (events[1].msg.step_id, events[1].msg.outcome) == ("step", "interrupted")
    assert not model.requests, "it was asked again"


async def test_only_a_start_that_settled_something_says_recovered(
    store: MemoryCheckpoint,
) -> None:
    checkpoint, items = cut_off_in_tools()
    await store.save(checkpoint, items)
    flags = []
    for _ in range(3):
        configured = (await opened(configure(Strict(), store)))[0].msg
        assert isinstance(configured, SessionConfigured)
        flags.append(configured.recovered)
    assert flags == [True, False, False]


async def test_a_start_may_die_anywhere_and_the_next_one_comes_to_the_same(
    store: MemoryCheckpoint,
) -> None:
    settled: list[Checkpoint] = []
    for when in ("before", "after"):
        for dies_at in (1, 2, 3, 4):
            store = MemoryCheckpoint()
            checkpoint, items = cut_off_in_tools()
            await store.save(checkpoint, items)
            mortal = MortalStore(store, dies_at=dies_at, when=when)
            try:
                await opened(configure(Strict(), mortal))
            except ProcessDied:
                pass
            await mortal.bury()
            await opened(configure(Strict(), store))
            settled.append(await stored(store))
            ends = await messages(store, ToolCallEnd)
            assert [end.output for end in ends] == [texts.UNKNOWN_AFTER_RESTART] * 2
    plain = [
        attrs.evolve(
            one,
            execution_stats=attrs.evolve(one.execution_stats, elapsed_ms=0),
        )
        for one in settled
    ]
    assert all(one == plain[0] for one in plain)


class Ends(Middleware):
    """Sees the end of turns."""

    def __init__(self, error: Exception | None = None) -> None:
        self.outcomes: list[str] = []
        self.error = error

    async def turn_end(self, ctx: TurnEndContext) -> None:
        await trio.lowlevel.checkpoint()
        self.outcomes.append(ctx.outcome)
        ctx.notice("seen")
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_turn_end_hooks_see_the_turn_that_a_restart_closes(
    store: MemoryCheckpoint, error: Exception | None
) -> None:
    checkpoint, items = cut_off_in_tools()
    await store.save(checkpoint, items)
    ends = Ends(error)
    events = await opened(configure(Strict(), store, middleware=[ends]))
    assert ends.outcomes == ["aborted"]
    assert Notice in kinds_of(events)
    codes = [event.msg.code for event in events if isinstance(event.msg, Warning)]
    assert codes == ([] if error is None else ["turn_end_failed"])
    assert (await stored(store)).active_execution is None


# --- middlewares


class Shows(Middleware):
    """Shows things before the session is durable, then does what the test says."""

    def __init__(self, count: int = 0, name: str = "shows") -> None:
        self.count = count
        self._name = name
        self.log: list[str] = []
        self.on_entry: Callable[[], object] = lambda: None
        self.on_leaving: Callable[[], object] = lambda: None

    @property
    def name(self) -> str:
        return self._name

    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        await trio.lowlevel.checkpoint()
        for n in range(self.count):
            ctx.show(Notice(capability=self._name, text=str(n)))
        self.on_entry()
        self.log.append("entered")
        try:
            yield
        finally:
            self.log.append("left")
            self.on_leaving()


async def test_early_updates_follow_the_configuration_in_their_order(
    store: MemoryCheckpoint,
) -> None:
    first, second = Shows(2, "first"), Shows(254, "second")
    events = await opened(configure(Strict(), store, middleware=[first, second]))
    assert isinstance(events[0].msg, SessionConfigured)
    told = [(msg.capability, msg.text) for e in events if isinstance(msg := e.msg, Notice)]
    assert told == [
        *[("first", str(n)) for n in range(2)],
        *[("second", str(n)) for n in range(254)],
    ]


async def test_the_257th_early_update_fails_the_start_and_leaves_nothing(
    store: MemoryCheckpoint,
) -> None:
    with pytest.raises(StoppedError):
        await opened(configure(Strict(), store, middleware=[Shows(257)]))
    assert await store.load(SESSION) is None
    assert await opened(configure(Strict(), store, middleware=[Shows(256)]))


def raising(error: BaseException) -> Callable[[], object]:
    def act() -> object:
        raise error

    return act


async def test_a_failed_start_leaves_middlewares_in_reverse_and_keeps_both_errors(
    store: MemoryCheckpoint,
) -> None:
    checkpoint, items = cut_off_in_tools()
    await store.save(checkpoint, items)
    log: list[str] = []
    one, two, three = (Shows(name=name) for name in ("one", "two", "three"))
    for shows in (one, two):
        shows.log = log
    one.on_leaving = lambda: log.append("one")
    two.on_leaving = raising(KeyError("on leaving"))
    three.on_entry = raising(ValueError("on entry"))
    with pytest.raises(KeyError) as failed:
        await opened(configure(Strict(), store, middleware=[one, two, three]))
    assert isinstance(failed.value.__context__, ValueError)
    assert log == ["entered", "entered", "left", "left", "one"]
    assert await stored(store) == checkpoint
    assert await journal(store) == []
    assert len(await opened(configure(Strict(), store))) == 3, "it is free again"


class Unwilling(MemoryCheckpoint):
    """Refuses to save a session that was claimed."""

    unwilling = True

    async def save(self, checkpoint: Checkpoint, *args: Any, **options: Any) -> Any:
        if self.unwilling and options.get("lease") is not None:
            await trio.lowlevel.checkpoint()
            raise CheckpointError("no space left")
        return await super().save(checkpoint, *args, **options)


class Nursing(Middleware):
    """Holds a nursery open, as one with background tasks does."""

    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            yield
            nursery.cancel_scope.cancel()


async def test_a_first_commit_that_fails_is_raised_plainly_and_changes_nothing() -> None:
    store = Unwilling()
    checkpoint, items = cut_off_in_tools()
    await store.save(checkpoint, items)
    shows = Shows()
    with pytest.raises(CheckpointError, match="no space left"):
        await opened(configure(Strict(), store, middleware=[shows, Nursing()]))
    assert shows.log == ["entered", "left"]
    assert await stored(store) == checkpoint
    store.unwilling = False
    assert (await opened(configure(Strict(), store)))[0].sequence == 1


class Declares(Middleware):
    """Fails where it declares something."""

    def __init__(self, where: str) -> None:
        self.where = where

    def register(self, catalog: Catalog, runtime: RuntimeContext) -> None:
        if self.where == "register":
            raise KeyError(self.where)

    def prompt_section(self, runtime: RuntimeContext) -> PromptSection | None:
        if self.where == "prompt_section":
            raise KeyError(self.where)
        return None

    def frontend(self) -> None:
        if self.where == "frontend":
            raise KeyError(self.where)


@pytest.mark.parametrize("where", ["register", "prompt_section", "frontend"])
async def test_a_declaration_that_fails_fails_the_start_before_anything_is_entered(
    store: MemoryCheckpoint, where: str
) -> None:
    shows = Shows()
    with pytest.raises(KeyError):
        await opened(configure(Strict(), store, middleware=[shows, Declares(where)]))
    assert shows.log == []
    assert await store.load(SESSION) is None
