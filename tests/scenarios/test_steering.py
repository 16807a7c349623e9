"""Messages that arrive while a turn runs: joining it, waiting, being changed or taken back."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

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
    Agent,
    CancelQueued,
    EditQueued,
    Interrupt,
    Messages,
    Middleware,
    SubmissionRejectedError,
    TurnError,
    TurnResult,
    UserInput,
    create_agent,
)
from trio_agent.middleware import (
    MessageSubmitContext,
    PostToolContext,
    PreModelContext,
    PreToolContext,
    StopContext,
)
from trio_agent.protocol.events import (
    Error,
    Event,
    ModelStepCompleted,
    QueueChanged,
    SubmissionAccepted,
    SubmissionRejected,
    TurnAborted,
    TurnComplete,
    TurnStarted,
    UserMessage,
)
from trio_agent.protocol.items import AssistantItem, ToolCallItem, ToolOutputItem, UserItem
from trio_agent.protocol.limits import MAX_PENDING_DEFAULT
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import call, fail, text, wait

DEADLINE = 30


def steer(words: str, **options: Any) -> UserInput:
    return UserInput(text=words, delivery="steer", **options)


def queue(words: str) -> UserInput:
    return UserInput(text=words, delivery="queue")


def said(items: Any) -> list[str]:
    """Return a history in short."""
    short = {ToolCallItem: "call", ToolOutputItem: "output"}
    return [
        item.text if isinstance(item, UserItem | AssistantItem) else short[type(item)]
        for item in items
    ]


async def running(agent: Agent) -> str:
    """Return the id of the running turn."""
    await trio.lowlevel.checkpoint()
    turn_id = agent.snapshot().turn_id
    assert turn_id is not None
    return turn_id


def waiting(agent: Agent) -> list[tuple[str, str]]:
    return [(one.delivery, one.text) for one in agent.snapshot().queued]


# --- joining the running turn


async def test_a_steer_joins_at_the_next_request_of_its_turn(shelf: Shelf) -> None:
    world, release = World(), trio.Event()
    model = Strict([wait(release), call("ok")], "done", "next")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            config = configure(model, store, tools=(world.tool("ok"),))
            async with create_agent(config) as agent:
                await agent.submit(UserInput(text="go"))
                receipts = [await agent.submit(steer(f"s{n}")) for n in range(2)]
                assert waiting(agent) == [("steer", "s0"), ("steer", "s1")]
                assert [one.text for one in (await stored(store)).queue] == ["s0", "s1"]
                release.set()
                await until(agent, TurnComplete)
                await agent.run("again")
            told = [e for e in await journal(store) if isinstance(e.msg, UserMessage)]
            turns = await executions(store)
    assert said(model.requests[1].items) == ["go", "call", "output", "s0", "s1"]
    assert [e.msg.delivery for e in told if isinstance(e.msg, UserMessage)] == [
        "turn",
        "steer",
        "steer",
        "turn",
    ]
    assert [e.submission_id for e in told][1:3] == [r.submission_id for r in receipts]
    assert len(turns) == 2
    assert not model.refusals


async def test_a_steer_that_comes_during_the_last_answer_keeps_the_turn_going(
    shelf: Shelf,
) -> None:
    release = trio.Event()
    model = Strict([text("nearly"), wait(release)], "now done")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store)) as agent:
                await agent.submit(UserInput(text="go"))
                await agent.submit(steer("one more thing"))
                release.set()
                await until(agent, TurnComplete)
                assert agent.snapshot().turn_id is None
            (turn,) = await executions(store)
    assert said(model.requests[1].items) == ["go", "nearly", "one more thing"]
    assert turn.model_calls == 2


async def test_a_steer_during_a_tool_batch_is_durable_at_once_and_joins_after_it(
    shelf: Shelf,
) -> None:
    release = trio.Event()

    async def slow() -> str:
        await release.wait()
        return "slowly"

    model = Strict([call("slow"), call("slow")], "done")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store, tools=(slow,))) as agent:
                await agent.submit(UserInput(text="go"))
                await agent.submit(steer("hurry"))
                assert [one.text for one in (await stored(store)).queue] == ["hurry"]
                release.set()
                await until(agent, TurnComplete)
    assert said(model.requests[1].items) == ["go", "call", "call", "output", "output", "hurry"]
    assert not model.refusals


async def test_a_steer_during_the_wait_before_a_retry_is_in_the_next_attempt(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    model = Strict([fail(503, retry_after=30.0)], "done")
    async with create_agent(configure(model, store)) as agent:
        await agent.submit(UserInput(text="go"))
        await until(agent, ModelStepCompleted)
        await agent.submit(steer("also this"))
        await until(agent, TurnComplete)
    assert said(model.requests[1].items) == ["go", "also this"]


HOOKS = ["message_submit", "pre_model", "pre_tool_use", "post_tool_use", "stop"]


class Held(Middleware):
    """Stops in one hook, the first time, until it is released."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.reached, self.release = trio.Event(), trio.Event()

    async def _hold(self, hook: str) -> None:
        await trio.lowlevel.checkpoint()
        if hook == self.hook and not self.reached.is_set():
            self.reached.set()
            await self.release.wait()

    async def message_submit(self, ctx: MessageSubmitContext) -> None:
        await self._hold("message_submit" if ctx.text == "go" else "")

    async def pre_model(self, ctx: PreModelContext) -> None:
        await self._hold("pre_model")

    async def pre_tool_use(self, ctx: PreToolContext) -> None:
        await self._hold("pre_tool_use")

    async def post_tool_use(self, ctx: PostToolContext) -> None:
        await self._hold("post_tool_use")

    async def stop(self, ctx: StopContext) -> None:
        await self._hold("stop")


@pytest.mark.parametrize("hook", HOOKS)
async def test_a_steer_during_a_hook_is_taken_in_and_never_lost(
    store: MemoryCheckpoint, autojump_clock: MockClock, hook: str
) -> None:
    held = Held(hook)
    model = Strict([call("ok")], "answer", "answer to the steer", "rest")
    tools = (World().tool("ok"),)
    async with create_agent(configure(model, store, tools=tools, middleware=[held])) as agent:
        agent.submit_nowait(UserInput(text="go"))
        await held.reached.wait()
        receipt = await agent.submit(UserInput(text="and this"))
        assert "and this" in [one.text for one in (await stored(store)).queue]
        held.release.set()
        await agent.wait_idle()
    entered = [e for e in await journal(store) if isinstance(e.msg, UserMessage)]
    assert [e.msg.text for e in entered if isinstance(e.msg, UserMessage)] == ["go", "and this"]
    assert entered[1].submission_id == receipt.submission_id
    assert "and this" in said(model.requests[-1].items)
    turns = await executions(store)
    assert len(turns) == (2 if hook == "message_submit" else 1)
    if hook == "pre_model":
        assert said(model.requests[0].items) == ["go", "and this"]
    assert not model.refusals


async def test_a_steer_that_a_hook_rejects_is_refused_and_the_turn_goes_on(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    class Rejects(Middleware):
        async def message_submit(self, ctx: MessageSubmitContext) -> None:
            await trio.lowlevel.checkpoint()
            if ctx.text == "secret":
                ctx.reject("no secrets")

    release = trio.Event()
    model = Strict([wait(release), text("one")], "two")
    async with create_agent(configure(model, store, middleware=[Rejects()])) as agent:
        await agent.submit(UserInput(text="go"))
        await until(agent, TurnStarted)
        receipt = await agent.submit(steer("secret"))
        await agent.submit(steer("fine"))
        release.set()
        await until(agent, TurnComplete)
    refused = [e for e in await journal(store) if isinstance(e.msg, SubmissionRejected)]
    assert [e.submission_id for e in refused] == [receipt.submission_id]
    assert "secret" not in repr(await stored(store))
    assert said(model.requests[-1].items) == ["go", "one", "fine"]


async def test_a_steer_whose_hook_raises_is_consumed_and_fails_one_turn_only(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    class Raises(Middleware):
        async def message_submit(self, ctx: MessageSubmitContext) -> None:
            await trio.lowlevel.checkpoint()
            if ctx.text == "poison":
                raise ValueError("a bug")

    release = trio.Event()
    model = Strict([wait(release), text("one")], "two")
    async with create_agent(configure(model, store, middleware=[Raises()])) as agent:
        await agent.submit(UserInput(text="go"))
        await until(agent, TurnStarted)
        await agent.submit(steer("poison"))
        release.set()
        await until(agent, TurnAborted)
        assert (await agent.run("again")).outcome == "completed"
    assert (await stored(store)).queue == ()
    assert [turn.outcome for turn in await executions(store)] == ["failed", "completed"]


# --- waiting for a turn of one's own


async def test_queued_messages_have_turns_of_their_own_in_order(shelf: Shelf) -> None:
    release = trio.Event()
    model = Strict([wait(release), text("a0")], "a1", "a2", "a3")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store)) as agent:
                await agent.submit(UserInput(text="m0"))
                for n in range(1, 4):
                    await agent.submit(queue(f"m{n}"), id=f"m{n}")
                release.set()
                await agent.wait_idle()
            accepted = await messages(store, SubmissionAccepted)
            turns = await executions(store)
            told = await messages(store, UserMessage)
            (last, *_) = reversed(await messages(store, QueueChanged))
    assert [one.delivery for one in accepted] == ["turn", "queue", "queue", "queue"]
    assert [turn.submission_id for turn in turns][1:] == ["m1", "m2", "m3"]
    assert [msg.delivery for msg in told] == ["turn", "queue", "queue", "queue"]
    assert last.queued == ()
    assert said(model.requests[-1].items) == ["m0", "a0", "m1", "a1", "m2", "a2", "m3"]


async def test_steers_and_queued_messages_keep_their_places_when_a_turn_is_interrupted(
    shelf: Shelf,
) -> None:
    """A steer whose turn ended without it becomes a queued message, where it stood."""
    model = Strict([wait(trio.Event())], "1", "2", "3", "4")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store)) as agent:
                await agent.submit(UserInput(text="go"))
                for op in (steer("s1"), queue("q1"), steer("s2"), queue("q2")):
                    await agent.submit(op)
                await agent.submit(Interrupt(await running(agent)))
                await agent.wait_idle()
            told = await messages(store, UserMessage)
    assert [msg.text for msg in told] == ["go", "s1", "q1", "s2", "q2"]
    assert [msg.delivery for msg in told][1:] == ["queue"] * 4


@pytest.mark.parametrize("default", ["steer", "queue"])
async def test_a_message_that_does_not_say_is_delivered_as_configured(
    store: MemoryCheckpoint, autojump_clock: MockClock, default: Literal["steer", "queue"]
) -> None:
    release = trio.Event()
    model = Strict([wait(release), text("one")], "two")
    messages_ = Messages(default_delivery=default)
    async with create_agent(configure(model, store, middleware=[messages_])) as agent:
        await agent.submit(UserInput(text="go"))
        await agent.submit(UserInput(text="and"))
        assert waiting(agent) == [(default, "and")]
        release.set()
        await agent.wait_idle()
    assert len(await executions(store)) == (1 if default == "steer" else 2)


async def test_at_most_so_many_wait_and_the_next_is_refused(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    model = Strict([wait(trio.Event())], *["ok"] * 100)
    async with create_agent(configure(model, store)) as agent:
        await agent.submit(UserInput(text="go"))
        for n in range(MAX_PENDING_DEFAULT):
            await agent.submit(queue(f"m{n}"))
        with pytest.raises(SubmissionRejectedError) as refused:
            await agent.submit(queue("one too many"))
        assert refused.value.code == "queue_full"
        await agent.submit(CancelQueued(agent.snapshot().queued[0].submission_id))
        await agent.submit(queue("there is room again"))
        await agent.submit(Interrupt(await running(agent)))
        await agent.wait_idle()
    assert len(await executions(store)) == MAX_PENDING_DEFAULT + 1


# --- naming a turn


async def test_a_message_for_a_turn_is_taken_by_that_turn_only(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    release = trio.Event()
    model = Strict([wait(release), text("one")], "two")
    async with create_agent(configure(model, store)) as agent:
        for target in ("no such turn", "another"):
            with pytest.raises(SubmissionRejectedError) as idle:
                await agent.submit(UserInput(text="x", target_turn_id=target))
            assert idle.value.code == "stale_turn"
        await agent.submit(UserInput(text="go"))
        turn_id = await running(agent)
        with pytest.raises(SubmissionRejectedError) as stale:
            await agent.submit(steer("x", target_turn_id="another"))
        assert stale.value.code == "stale_turn"
        await agent.submit(steer("for you", target_turn_id=turn_id))
        release.set()
        await until(agent, TurnComplete)
        with pytest.raises(SubmissionRejectedError) as late:
            await agent.submit(UserInput(text="x", target_turn_id=turn_id))
        assert late.value.code == "stale_turn"
    assert said((await stored(store)).context) == ["go", "one", "for you", "two"]
    rejected = [msg.code for msg in await messages(store, SubmissionRejected)]
    assert rejected == ["stale_turn"] * 4


# --- changing one's mind


async def test_an_edited_message_keeps_its_place_under_its_new_id(shelf: Shelf) -> None:
    model = Strict([wait(trio.Event())], "1", "2", "3")
    with trio.fail_after(DEADLINE):
        async with shelf.opened() as store:
            async with create_agent(configure(model, store)) as agent:
                await agent.submit(UserInput(text="go"))
                for name in ("a", "b", "c"):
                    await agent.submit(queue(name), id=name)
                await agent.submit(EditQueued("b", "better"), id="b2")
                with pytest.raises(SubmissionRejectedError) as gone:
                    await agent.submit(EditQueued("b", "again"))
                assert gone.value.code == "not_queued"
                await agent.submit(EditQueued("b2", "best"), id="b3")
                await agent.submit(CancelQueued("a"))
                with pytest.raises(SubmissionRejectedError) as twice:
                    await agent.submit(CancelQueued("a"))
                assert twice.value.code == "not_queued"
                await agent.submit(Interrupt(await running(agent)))
                await agent.wait_idle()
            told = await messages(store, UserMessage)
            turns = await executions(store)
    assert [msg.text for msg in told] == ["go", "best", "c"]
    assert [turn.submission_id for turn in turns][1:] == ["b3", "c"]


async def test_what_is_taken_back_or_edited_while_a_hook_looks_at_it_is_not_run_as_it_was(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    for op, expected in (
        (CancelQueued("m"), []),
        (EditQueued("m", "other"), ["other"]),
    ):
        store = MemoryCheckpoint()
        held = Held("message_submit")
        model = Strict("answer")
        async with create_agent(configure(model, store, middleware=[held])) as agent:
            await agent.submit(UserInput(text="go"), id="m")
            await held.reached.wait()
            await agent.submit(op)
            held.release.set()
            await agent.wait_idle()
        assert [msg.text for msg in await messages(store, UserMessage)] == expected
        assert len(await executions(store)) == len(expected)


async def test_run_follows_its_message_through_an_edit(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    release = trio.Event()
    model = Strict([wait(release), text("one")], "to the edited one")
    results: list[TurnResult] = []
    async with create_agent(configure(model, store)) as agent:
        await agent.submit(UserInput(text="go"))
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                results.append(await agent.run("first words"))

            nursery.start_soon(run)
            await until(agent, QueueChanged)
            (entry,) = agent.snapshot().queued
            for n in range(2):
                await agent.submit(EditQueued(entry.submission_id, f"edit {n}"), id=f"e{n}")
                (entry,) = agent.snapshot().queued
            release.set()
    assert [result.text for result in results] == ["to the edited one"]
    assert said(model.requests[-1].items)[-1] == "edit 1"
    assert (await executions(store))[-1].submission_id == "e1"


async def test_run_tells_why_an_edited_message_failed_however_late_it_reads(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    bug = ValueError("a bug")
    release, over = trio.Event(), trio.Event()
    model = Strict([wait(release), text("one")], bug)
    results: list[TurnResult] = []

    async def late(_: Event) -> None:
        await over.wait()

    async with create_agent(configure(model, store)) as agent:
        await agent.submit(UserInput(text="go"))
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                results.append(await agent.run("first words", on_event=late))

            nursery.start_soon(run)
            await until(agent, QueueChanged)
            (entry,) = agent.snapshot().queued
            await agent.submit(EditQueued(entry.submission_id, "other words"))
            release.set()
            await agent.wait_idle()
            over.set()
    assert results[0].error is not None
    assert results[0].error.__cause__ is bug


async def test_run_says_so_when_its_message_is_taken_back(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    release = trio.Event()
    model = Strict([wait(release), text("one")])
    async with create_agent(configure(model, store)) as agent:
        await agent.submit(UserInput(text="go"))
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                with pytest.raises(TurnError):
                    await agent.run("never mind")

            nursery.start_soon(run)
            await until(agent, QueueChanged)
            (entry,) = agent.snapshot().queued
            await agent.submit(CancelQueued(entry.submission_id))
        release.set()
        await agent.wait_idle()
    assert len(await executions(store)) == 1
    assert await messages(store, SubmissionRejected) == []  # nobody takes it back twice


async def test_a_run_that_is_cancelled_while_it_waits_takes_its_message_back(
    store: MemoryCheckpoint, autojump_clock: MockClock
) -> None:
    release = trio.Event()
    model = Strict([wait(release), text("one")])
    async with create_agent(configure(model, store)) as agent:
        await agent.submit(UserInput(text="go"))
        with trio.move_on_after(1):
            await agent.run("never mind")
        await wait_all_tasks_blocked()
        assert waiting(agent) == []
        release.set()
        await agent.wait_idle()
    assert [msg.text for msg in await messages(store, UserMessage)] == ["go"]
    assert not await messages(store, Error)
    assert len(await messages(store, TurnStarted)) == 1
    assert outputs((await stored(store)).context) == []
