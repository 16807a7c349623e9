"""What each hook may change in a real session, when that is durable, and how often it runs.

``test_middleware_in_a_session.py`` has the guide's order and its example; here are
the effects one by one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.scenarios.hooked import Act, Hooked, events_of, raising, transcript
from tests.scenarios.story import (
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
    CapabilityCommand,
    ConfigError,
    Interrupt,
    Middleware,
    SubmissionRejectedError,
    TokenUsage,
    UserInput,
    create_agent,
)
from trio_agent.middleware import (
    CommandContext,
    MessageSubmitContext,
    PreModelContext,
    PromptSection,
    RuntimeContext,
    StopContext,
    TurnEndContext,
)
from trio_agent.protocol.events import (
    Error,
    ModelStepStarted,
    Notice,
    TurnAborted,
    TurnComplete,
    TurnStarted,
    UserMessage,
    Warning,  # noqa: A004
)
from trio_agent.protocol.frontend import Contribution
from trio_agent.protocol.items import Attachment, UserItem
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import call, stall, text
from trio_agent.tools.catalog import Catalog

# --- message_submit


async def test_a_rejected_message_is_a_recorded_turn_and_nothing_of_it_is_kept(
    store: MemoryCheckpoint,
) -> None:
    def reject(ctx: MessageSubmitContext) -> None:
        if ctx.text == "the secret":
            ctx.notice("refused one")
            ctx.add_hidden("never to be seen")
            ctx.reject("no secrets")
            ctx.reject("a second reason")

    model = Strict("fine")
    paper = Attachment(id="paper", name="p", media_type="text/plain", size=1)
    ends: list[str] = []
    hooked = Hooked(message_submit=reject, turn_end=lambda ctx: ends.append(ctx.outcome))
    async with create_agent(configure(model, store, middleware=[hooked])) as agent:
        result = await agent.run("the secret", attachments=(paper,))
        assert (result.outcome, result.reason) == ("aborted", "no secrets")
        after = agent.snapshot().last_event_sequence
        kept = await stored(store)
        assert (await agent.run("a question")).text == "fine"
    for words in ("secret ", "the secret", "paper", "never to be seen"):
        assert words not in repr(kept)
        assert words not in repr(await transcript(store))
    rows = [event for event in await journal(store) if event.sequence <= after]
    assert events_of(rows, TurnStarted, UserMessage, Notice, TurnAborted) == [
        "TurnStarted",
        "Notice",
        "TurnAborted",
    ]
    first, _ = await executions(store)
    assert (first.outcome, first.finish_reason, first.model_calls) == ("aborted", "hook", 0)


async def test_a_message_whose_hook_raises_never_comes_back(store: MemoryCheckpoint) -> None:
    config = configure(
        Strict("fine"), store, middleware=[Hooked(message_submit=raising(ValueError("bug")))]
    )
    for _ in range(2):
        async with create_agent(config) as agent:
            await agent.wait_idle()
            result = await agent.run("poison")
            assert (result.outcome, result.finish_reason) == ("failed", "error")
    async with create_agent(configure(Strict("fine"), store)) as agent:
        await agent.wait_idle()
        await agent.run("go")
    outcomes_ = [turn.outcome for turn in await executions(store)]
    assert outcomes_ == ["failed", "failed", "completed"]
    assert [msg.text for msg in await messages(store, UserMessage)] == ["go"]
    (error, _) = await messages(store, Error)
    assert "bug" in error.message


async def test_only_the_first_rejection_runs_and_later_hooks_do_not() -> None:
    log: list[str] = []
    one = Hooked("one", log, message_submit=lambda ctx: ctx.reject("no"))
    two = Hooked("two", log, message_submit=lambda ctx: None)
    async with create_agent(configure(Strict(), middleware=[one, two])) as agent:
        await agent.run("go")
    assert log == ["one"]


# --- pre_model


async def test_what_pre_model_hooks_do_is_committed_before_the_request(
    store: MemoryCheckpoint,
) -> None:
    def act(ctx: PreModelContext) -> None:
        if ctx.step_index == 0:
            ctx.push("shown")
            ctx.add_hidden("hidden")
            ctx.notice("told")
            ctx.record_usage(TokenUsage(input_tokens=5, total_tokens=5))
            ctx.state = {"seen": len(ctx.items)}

    async def look(request: Any, emit: Any) -> Any:
        kept = await stored(store)
        assert kept.states["hooked"] == {"seen": 3}
        assert kept.total_usage.total_tokens == 5
        assert list(kept.context) == list(request.items)
        return await Strict("done").respond(request, emit)

    model = Strict(look)
    config = configure(model, store, middleware=[Hooked(pre_model=act)])
    async with create_agent(config) as agent:
        result = await agent.run("go")
    assert result.outcome == "completed"
    read = [item.text for item in model.requests[0].items]
    assert read == ["go", "shown", "hidden"]
    assert [item.text for item in await transcript(store)] == ["go", "shown", "done"]
    told = events_of(await journal(store), Notice, ModelStepStarted)
    assert told == ["Notice", "ModelStepStarted"]
    (turn,) = await executions(store)
    assert (turn.model_calls, turn.usage.total_tokens) == (1, 5)


async def test_a_rewrite_is_a_new_epoch_and_leaves_the_transcript(
    store: MemoryCheckpoint,
) -> None:
    def act(ctx: PreModelContext) -> None:
        if len(ctx.items) == 3:
            ctx.rewrite("too long", [UserItem(text="in short"), ctx.items[-1]])
            ctx.rewrite("still too long", ctx.items[-1:])

    model = Strict("one", "two")
    config = configure(model, store, middleware=[Hooked(pre_model=act)])
    async with create_agent(config) as agent:
        await agent.run("first")
        await agent.run("second")
    kept = await stored(store)
    assert kept.context_epoch == 1, "two rewrites of one pass are one epoch"
    assert [item.text for item in model.requests[1].items] == ["second"]
    assert [item.text for item in await transcript(store)] == ["first", "one", "second", "two"]


async def test_what_earlier_hooks_did_is_kept_when_a_later_one_raises(
    store: MemoryCheckpoint,
) -> None:
    def pay(ctx: PreModelContext) -> None:
        ctx.add_hidden("paid for")
        ctx.record_usage(TokenUsage(total_tokens=1))
        ctx.notice("paid")

    def act(ctx: PreModelContext) -> None:
        ctx.notice("half way")
        raise ValueError("bug")

    model = Strict("never")
    middleware = [Hooked("one", pre_model=pay), Hooked("two", pre_model=act)]
    async with create_agent(configure(model, store, middleware=middleware)) as agent:
        result = await agent.run("go")
    assert result.outcome == "failed"
    kept = await stored(store)
    assert [item.text for item in kept.context if isinstance(item, UserItem)] == [
        "go",
        "paid for",
    ]
    assert kept.total_usage.total_tokens == 1
    assert [msg.text for msg in await messages(store, Notice)] == ["paid", "half way"]
    (turn,) = await executions(store)
    assert (turn.outcome, turn.model_calls, turn.usage.total_tokens) == ("failed", 0, 1)


async def test_a_stop_before_the_request_keeps_what_was_done_and_says_why(
    store: MemoryCheckpoint,
) -> None:
    def act(ctx: PreModelContext) -> None:
        ctx.add_hidden("kept")
        ctx.stop("the budget is spent")

    log: list[str] = []
    one = Hooked("one", log, pre_model=act)
    two = Hooked("two", log, pre_model=lambda ctx: ctx.stop("another reason"))
    model = Strict("never")
    async with create_agent(configure(model, store, middleware=[one, two])) as agent:
        result = await agent.run("go")
    assert (result.outcome, result.finish_reason) == ("completed", "hook")
    assert log == ["one", "two"], "later hooks still run"
    (warning,) = await messages(store, Warning)
    assert (warning.code, warning.message) == ("stopped_by_hook", "the budget is spent")
    assert "kept" in repr((await stored(store)).context)
    assert not model.requests


async def test_a_message_that_arrives_before_a_stop_outranks_it(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    """The steer was accepted for this turn, so the turn takes it in and hooks look again."""
    reached, release = trio.Event(), trio.Event()

    class Stops(Middleware):
        def __init__(self) -> None:
            self.passes = 0

        async def pre_model(self, ctx: PreModelContext) -> None:
            self.passes += 1
            if self.passes == 1:
                reached.set()
                await release.wait()
                ctx.stop("enough")

    stops, model = Stops(), Strict("answer")
    async with create_agent(configure(model, store, middleware=[stops])) as agent:
        await agent.submit(UserInput(text="go"))
        await reached.wait()
        await agent.submit(UserInput(text="wait", delivery="steer"))
        release.set()
        await agent.wait_idle()
    assert [msg.delivery for msg in await messages(store, UserMessage)] == ["turn", "steer"]
    assert len(await executions(store)) == 1
    assert stops.passes == 2
    assert len(model.requests) == 1


# --- stop and turn_end


async def test_a_turn_goes_on_once_however_often_hooks_ask(store: MemoryCheckpoint) -> None:
    active: list[bool] = []
    texts_: list[str] = []

    def act(ctx: StopContext) -> None:
        active.append(ctx.active)
        texts_.append(ctx.text)
        ctx.state = (ctx.state or 0) + 1
        ctx.continue_with("go on")

    model = Strict("one", "two", "three")
    config = configure(model, store, middleware=[Hooked(stop=act)])
    async with create_agent(config) as agent:
        assert (await agent.run("go")).text == "two"
    assert active == [False, True]
    assert texts_ == ["one", "two"]
    assert (await stored(store)).states["hooked"] == 2
    assert [item.text for item in await transcript(store)] == ["go", "one", "two"]
    assert [item.text for item in model.requests[1].items] == ["go", "one", "go on"]
    assert len(await executions(store)) == 1


async def test_two_hooks_that_ask_to_go_on_fail_the_turn() -> None:
    middleware = [Hooked(name, stop=lambda ctx: ctx.continue_with("on")) for name in "ab"]
    async with create_agent(configure(Strict("x"), middleware=middleware)) as agent:
        result = await agent.run("go")
    assert result.outcome == "failed"
    assert isinstance(result.error, Exception)
    assert isinstance(result.error, ConfigError) or isinstance(
        result.error.__cause__, ConfigError
    )


@pytest.mark.parametrize("outcome", ["completed", "failed", "aborted"])
async def test_the_end_of_a_turn_is_seen_once_before_it_is_told(
    store: MemoryCheckpoint, autojump_clock: MockClock, outcome: str
) -> None:
    seen: list[tuple[str, int]] = []

    def act(ctx: TurnEndContext) -> None:
        seen.append((ctx.outcome, len(ctx.queue)))
        ctx.notice("it ends")
        ctx.state = "ended"
        raise ValueError("bug")

    script: dict[str, Any] = {
        "completed": "fine",
        "failed": ZeroDivisionError("bug"),
        "aborted": [stall()],
    }
    config = configure(Strict(script[outcome]), store, middleware=[Hooked(turn_end=act)])
    async with create_agent(config) as agent:
        await agent.submit(UserInput(text="go"))
        if outcome == "aborted":
            started = await until(agent, ModelStepStarted)
            await agent.submit(Interrupt(started.turn_id))
        await agent.wait_idle()
    assert seen == [(outcome, 0)]
    assert [turn.outcome for turn in await executions(store)] == [outcome]
    told = events_of(await journal(store), Notice, TurnComplete, TurnAborted)
    assert told[0] == "Notice"
    assert len(told) == 2
    assert (await stored(store)).states["hooked"] == "ended"
    codes = [warning.code for warning in await messages(store, Warning)]
    assert codes == ["turn_end_failed"]


# --- commands


async def test_a_command_has_its_words_its_state_and_a_voice(store: MemoryCheckpoint) -> None:
    def act(ctx: CommandContext) -> None:
        ctx.state = [ctx.command, ctx.arguments, ctx.input, ctx.turn_id]
        ctx.notice("done")
        ctx.add_hidden("commands add nothing to the context")

    config = configure(Strict(), store, middleware=[Hooked(command=act)])
    async with create_agent(config) as agent:
        op = CapabilityCommand(capability="hooked", command="do", arguments="a b", input="c")
        receipt = await agent.submit(op)
        await until(agent, Notice)
        again = await agent.submit(op, id=receipt.submission_id)
        assert again.status == "accepted" or again.sequence == receipt.sequence
    kept = await stored(store)
    assert kept.states["hooked"] == ["do", "a b", "c", ""]
    assert list(kept.context) == []
    (event,) = [event for event in await journal(store) if isinstance(event.msg, Notice)]
    assert event.submission_id == receipt.submission_id


async def test_a_command_that_needs_idle_is_refused_during_a_turn_and_others_run_beside_it(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    hooked = Hooked(command=lambda ctx: ctx.notice(ctx.command))
    async with create_agent(
        configure(Strict([stall(100), text("x")]), store, middleware=[hooked])
    ) as agent:
        await agent.submit(UserInput(text="go"))
        with pytest.raises(SubmissionRejectedError) as busy:
            await agent.submit(CapabilityCommand(capability="hooked", command="idle"))
        assert busy.value.code == "busy"
        await agent.submit(CapabilityCommand(capability="hooked", command="do"))
        assert (await until(agent, Notice)).text == "do"
        assert agent.snapshot().turn_id is not None
        for op in (
            CapabilityCommand(capability="hooked", command="dance"),
            CapabilityCommand(capability="nobody", command="do"),
        ):
            with pytest.raises(SubmissionRejectedError) as unknown:
                await agent.submit(op)
            assert unknown.value.code == "unknown_command"
        await agent.wait_idle()
        await agent.submit(CapabilityCommand(capability="hooked", command="idle"))
        assert (await until(agent, Notice)).text == "idle"


# --- all of them


async def test_hooks_run_in_the_order_of_declaration() -> None:
    log: list[str] = []

    def logs(hook: str, name: str) -> Act:
        return lambda ctx: log.append(f"{hook} {name}")

    hooks = ["message_submit", "pre_model", "pre_tool_use", "post_tool_use", "stop", "turn_end"]
    middleware = [Hooked(n, [], **{hook: logs(hook, n) for hook in hooks}) for n in "ab"]
    config = configure(
        Strict([call("ok")], "done"), tools=(World().tool("ok"),), middleware=middleware
    )
    async with create_agent(config) as agent:
        await agent.run("go")
    pairs = list(zip(log[::2], log[1::2], strict=True))
    assert all(
        (first[:-1], first[-1], second[-1]) == (second[:-1], "a", "b")
        for first, second in pairs
    )
    assert [first[:-2] for first, _ in pairs] == [
        "message_submit",
        "pre_model",
        "pre_tool_use",
        "post_tool_use",
        "pre_model",
        "stop",
        "turn_end",
    ]


async def test_what_is_declared_is_asked_for_once_an_opening(store: MemoryCheckpoint) -> None:
    log: list[str] = []

    class Declares(Middleware):
        def register(self, catalog: Catalog, runtime: RuntimeContext) -> None:
            log.append("register")

        def prompt_section(self, runtime: RuntimeContext) -> PromptSection:
            log.append("prompt_section")
            return PromptSection(title="Rules", body="Be kind.")

        def frontend(self) -> Contribution:
            log.append("frontend")
            return Contribution(capability=self.name)

        @asynccontextmanager
        async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
            await trio.lowlevel.checkpoint()
            log.append("session")
            yield

    model = Strict("one", "two", "three")
    for n in range(2):
        async with create_agent(configure(model, store, middleware=[Declares()])) as agent:
            await agent.run("go")
            assert [one.capability for one in agent.frontend] == ["declares"]
            await agent.run("again")
        assert sorted(log) == sorted(
            ["register", "prompt_section", "frontend", "session"] * (n + 1)
        )
    assert all("## Rules\n\nBe kind." in one.instructions for one in model.requests)
