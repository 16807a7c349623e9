"""Which exception leaves `create_agent`, row by row, and what is on disk afterwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from tests.scenarios.story import Strict, World, configure, executions, messages, stored, until
from trio_agent import (
    CheckpointError,
    ConfigError,
    DuplicateError,
    Interrupt,
    Middleware,
    SessionBrokenError,
    StoppedError,
    UnknownError,
    UserInput,
    create_agent,
    run_agent,
)
from trio_agent.middleware.contexts import RuntimeContext
from trio_agent.protocol.events import ToolCallBegin, TurnAborted, TurnComplete, TurnStarted
from trio_agent.state.machine import Phase, phase_of
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import call, stall


class Watcher(Middleware):
    """Keeps a background task, which may fail after a second."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.log: list[str] = []

    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        self.log.append("entered")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch)
            try:
                yield
            finally:
                self.log.append("left")
                nursery.cancel_scope.cancel(reason="the session is over")

    async def watch(self) -> None:
        await trio.sleep(1)
        if self.error is not None:
            raise self.error
        await trio.sleep_forever()


class FailsToStart(Middleware):
    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        await trio.lowlevel.checkpoint()
        if self.name:
            raise KeyError("cannot start")
        yield


class Doubtful(MemoryCheckpoint):
    """Fails at its n-th save, after it happened: nobody knows what is on disk."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.fails_at, self.saves = fails_at, 0

    async def save(self, *args: Any, **kwargs: Any) -> Any:
        self.saves += 1
        events = await super().save(*args, **kwargs)
        if self.saves == self.fails_at:
            raise CheckpointError("disk I/O error")
        return events


def hanging() -> Strict:
    return Strict([stall()])


async def endings(store: MemoryCheckpoint) -> list[tuple[str, str]]:
    """Return how turns ended, and check that nothing is under way on disk."""
    assert phase_of(await stored(store)) is Phase.IDLE
    return [(one.outcome, one.reason) for one in await messages(store, TurnAborted)]


async def test_what_the_block_raises_leaves_as_the_same_object(store: MemoryCheckpoint) -> None:
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with create_agent(configure(hanging(), store)) as agent:
            await agent.submit(UserInput(text="go"))
            await until(agent, TurnStarted)
            raise mine
    assert caught.value is mine
    assert await endings(store) == [("aborted", "cancelled")]


async def test_the_blocks_own_group_leaves_as_the_same_object(store: MemoryCheckpoint) -> None:
    mine = ExceptionGroup("mine", [KeyError("a"), ValueError("b")])
    with pytest.raises(ExceptionGroup) as caught:
        async with create_agent(configure(hanging(), store, middleware=(Watcher(),))):
            raise mine
    assert caught.value is mine


@pytest.mark.parametrize("fails_at", [2, 3])
async def test_a_failed_write_breaks_the_session_and_nothing_is_written_after_it(
    fails_at: int,
) -> None:
    store = Doubtful(fails_at)
    model = Strict([call("tool")], "done")
    with pytest.raises(SessionBrokenError) as caught:
        async with create_agent(
            configure(model, store, tools=(World().tool("tool"),))
        ) as agent:
            with pytest.raises(SessionBrokenError):
                await agent.run("go")
            await trio.sleep_forever()
    assert str(caught.value.__cause__) == "disk I/O error"
    assert store.saves == fails_at, "something was written from memory that cannot be trusted"
    async with create_agent(configure(Strict(), store)):
        pass
    await endings(store)


async def test_a_crash_of_a_middlewares_task_breaks_the_session(
    store: MemoryCheckpoint, autojump_clock: trio.testing.MockClock
) -> None:
    bug = ValueError("bug")
    with pytest.raises(SessionBrokenError) as caught:
        config = configure(hanging(), store, middleware=(Watcher(bug),))
        async with create_agent(config) as agent:
            await agent.submit(UserInput(text="go"))
            await trio.sleep_forever()
    assert caught.value.__cause__ is bug
    assert len(await endings(store)) == 1


async def test_our_failure_comes_before_what_the_block_raises_while_it_unwinds() -> None:
    with pytest.raises(SessionBrokenError) as caught:
        async with create_agent(configure(hanging(), Doubtful(2))) as agent:
            agent.submit_nowait(UserInput(text="go"))
            try:
                await trio.sleep_forever()
            finally:
                raise RuntimeError("cleanup")
    assert isinstance(caught.value.__cause__, CheckpointError)


async def test_an_outer_cancellation_is_caught_by_its_own_scope(
    store: MemoryCheckpoint, autojump_clock: trio.testing.MockClock
) -> None:
    with trio.move_on_after(10) as scope:
        async with create_agent(configure(hanging(), store)) as agent:
            await agent.submit(UserInput(text="go"))
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert await endings(store) == [("aborted", "cancelled")]
    (record,) = await executions(store)
    assert record.outcome == "aborted"


async def test_keyboard_interrupt_leaves_as_itself(store: MemoryCheckpoint) -> None:
    with pytest.raises(KeyboardInterrupt):
        async with create_agent(configure(hanging(), store, middleware=(Watcher(),))) as agent:
            await agent.submit(UserInput(text="go"))
            raise KeyboardInterrupt
    assert await endings(store) == [("aborted", "cancelled")]


async def test_a_failing_start_is_plain_and_leaves_earlier_middlewares_in_reverse(
    store: MemoryCheckpoint,
) -> None:
    first = Watcher()
    config = configure(hanging(), store, middleware=(first, FailsToStart()))
    with pytest.raises(KeyError, match="cannot start"):
        async with create_agent(config):
            raise AssertionError("never entered")
    assert first.log == ["entered", "left"]
    assert await store.load("s") is None, "a failed start left something"


async def test_leaving_the_block_interrupts_the_turn_and_keeps_the_session(
    store: MemoryCheckpoint,
) -> None:
    async with create_agent(configure(hanging(), store)) as agent:
        await agent.submit(UserInput(text="go"))
        await until(agent, TurnStarted)
    assert await endings(store) == [("aborted", "the frontend is gone")]
    with pytest.raises(StoppedError):
        agent.submit_nowait(UserInput(text="too late"))
    with pytest.raises(StoppedError):
        await agent.submit(UserInput(text="too late"))


async def test_leaving_ends_the_session_whatever_senders_are_open(
    store: MemoryCheckpoint,
) -> None:
    async with create_agent(configure(hanging(), store)) as agent:
        clone = agent.sender.clone()
    with pytest.raises(StoppedError):
        clone.submit_nowait(UserInput(text="too late"))


async def test_closing_the_last_sender_ends_the_session(
    store: MemoryCheckpoint, autojump_clock: trio.testing.MockClock
) -> None:
    async with create_agent(configure(hanging(), store)) as agent:
        await agent.submit(UserInput(text="go"))
        with trio.fail_after(10):
            with agent.sender:
                pass
            assert [event async for event in agent.events][-1].msg == TurnAborted(
                turn_id=agent.snapshot().turn_id or (await executions(store))[0].turn_id,
                reason="the frontend is gone",
            )


async def test_a_session_lives_in_a_callers_nursery_too(store: MemoryCheckpoint) -> None:
    async with trio.open_nursery() as nursery:
        agent = await nursery.start(run_agent, configure(Strict("hello"), store))
        assert (await agent.run("go")).text == "hello"
        agent.close()


async def test_a_callers_nursery_gets_start_failures_plain_and_later_ones_in_its_group(
    store: MemoryCheckpoint,
) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(KeyError, match="cannot start"):
            config = configure(hanging(), store, middleware=(FailsToStart(),))
            await nursery.start(run_agent, config)
    with pytest.RaisesGroup(SessionBrokenError):
        async with trio.open_nursery() as nursery:
            agent = await nursery.start(run_agent, configure(hanging(), Doubtful(2)))
            agent.submit_nowait(UserInput(text="go"))


async def test_a_failing_model_ends_its_turn_and_not_the_session(
    store: MemoryCheckpoint,
) -> None:
    model = Strict(ZeroDivisionError("a bug"), "hello")
    async with create_agent(configure(model, store)) as agent:
        failed = await agent.run("one")
        assert failed.outcome == "failed"
        assert failed.error is not None
        assert isinstance(failed.error.__cause__, ZeroDivisionError)
        assert (await agent.run("two")).text == "hello"


async def test_the_tools_of_a_turn_are_gone_before_its_end_is_told(
    store: MemoryCheckpoint,
) -> None:
    world = World()
    config = configure(Strict([call("slow")]), store, tools=(world.tool("slow", seconds=99),))
    async with create_agent(config) as agent:
        await agent.submit(UserInput(text="go"))
        begin = await until(agent, ToolCallBegin)
        await world.wait_entered(1)
        root = trio.lowlevel.current_root_task()
        assert root is not None
        await agent.submit(Interrupt(begin.turn_id))
        await until(agent, TurnAborted)
        assert not [name for name in task_names(root) if name.startswith("tool ")]


def task_names(task: trio.lowlevel.Task) -> list[str]:
    names = [task.name]
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            names.extend(task_names(child))
    return names


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "no-such-provider:x"}, ConfigError),
        ({"session_id": ""}, ConfigError),
        ({"session_id": "x" * 256}, ConfigError),
        ({"session_id": "a\nb"}, ConfigError),
        ({"system_prompt": " \n"}, ConfigError),
        ({"context_window": 0}, ConfigError),
        ({"max_model_steps": 0}, ConfigError),
        ({"model_route": "no such route"}, UnknownError),
        ({"middleware": (Watcher(), Watcher())}, DuplicateError),
        ({"metadata": {"x": float("nan")}}, ConfigError),
        ({"metadata": {"x": "\ud83d"}}, ConfigError),
    ],
)
async def test_what_can_never_work_is_refused_before_anything_starts(
    store: MemoryCheckpoint, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        async with create_agent(configure(options.pop("model", Strict()), store, **options)):
            raise AssertionError("never entered")
    assert (await store.list_sessions()).sessions == ()


async def test_two_tools_of_one_name_are_refused(store: MemoryCheckpoint) -> None:
    world = World()
    with pytest.raises(DuplicateError):
        async with create_agent(
            configure(Strict(), store, tools=(world.tool("x"), world.tool("x")))
        ):
            raise AssertionError("never entered")


@pytest.mark.parametrize("name", ["../x", "A", "a", "é", "e\u0301", "x" * 255])
async def test_any_other_session_id_is_just_a_name(store: MemoryCheckpoint, name: str) -> None:
    async with create_agent(configure(Strict("hi"), store, session_id=name)) as agent:
        await agent.run("go")
    assert [one.session_id for one in (await store.list_sessions()).sessions] == [name]
    assert await messages(store, TurnComplete, name)
