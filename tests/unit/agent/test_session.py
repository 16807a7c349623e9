"""The funnel: advance, write, swap, publish; and what a failure leaves."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from trio_agent import Checkpoint, InternalError, MemoryCheckpoint, SessionBrokenError
from trio_agent.agent.session import MAX_PENDING_DELTAS, Session, told
from trio_agent.ambient import Ambient
from trio_agent.protocol.events import AgentMessageDelta, Event, Notice
from trio_agent.state.changes import StateSaved, StepBegan
from trio_agent.store.base import Lease


class Broken(MemoryCheckpoint):
    """Fails every save from the second on."""

    saves = 0

    async def save(self, *args: Any, **kwargs: Any) -> tuple[Event, ...]:
        self.saves += 1
        if self.saves > 1:
            raise OSError("disk")
        return await super().save(*args, **kwargs)


class Slow(MemoryCheckpoint):
    """Takes a second for every save, and writes at its end."""

    async def save(self, *args: Any, **kwargs: Any) -> tuple[Event, ...]:
        await trio.sleep(1)
        return await super().save(*args, **kwargs)


async def session_on(store: MemoryCheckpoint) -> Session:
    lease: Lease = await store.claim("s", "me")
    session = Session(store, lease, Ambient(), Checkpoint.empty("s"))
    await session.transact(lambda _: [told(notice("open")), saved(0)], first=True)
    return session


def notice(text: str) -> Notice:
    return Notice(capability="c", text=text)


def saved(value: int) -> StateSaved:
    return StateSaved(name="n", value=value)


async def test_what_is_visible_is_durable_and_numbered_by_one_more() -> None:
    store = MemoryCheckpoint()
    session = await session_on(store)
    await session.commit(saved(1), told(notice("a")))
    assert session.checkpoint == await store.load("s")
    assert session.checkpoint.sequence == 1
    assert session.tail.last == (await store.event_page("s")).latest_sequence


async def test_commits_of_many_tasks_take_effect_one_at_a_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    session = await session_on(Slow())
    async with trio.open_nursery() as nursery:
        for value in range(5):
            nursery.start_soon(session.commit, saved(value + 1))
    assert session.checkpoint.sequence == 5


async def test_a_cancelled_commit_did_not_happen(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = Slow()
    session = await session_on(store)
    before = session.checkpoint
    with trio.move_on_after(0.5):
        await session.commit(saved(1), told(notice("never")))
    assert session.checkpoint is before
    assert await store.load("s") == before
    await session.commit(saved(2))
    assert session.checkpoint.states == {"n": 2}


async def test_nothing_is_computed_from_memory_after_a_failed_write() -> None:
    session = await session_on(Broken())
    with pytest.raises(OSError, match="disk"):
        await session.commit(saved(1))
    with pytest.raises(SessionBrokenError) as caught:
        await session.commit(saved(2))
    assert isinstance(caught.value.__cause__, OSError)
    assert session.checkpoint.states == {"n": 0}


async def test_an_illegal_change_breaks_the_session_and_writes_nothing() -> None:
    store = MemoryCheckpoint()
    session = await session_on(store)
    before = await store.load("s")
    with pytest.raises(InternalError):
        await session.commit(saved(1), StepBegan(step_id="x", started_at_ms=0, route="r"))
    assert await store.load("s") == before
    assert isinstance(session.broken, InternalError)


async def test_appended_events_go_with_the_next_commit_in_order() -> None:
    store = MemoryCheckpoint()
    session = await session_on(store)
    session.append(notice("first"), None)
    await session.commit(saved(1), told(notice("second")))
    page = await store.event_page("s")
    texts = [event.msg.text for event in page.events if isinstance(event.msg, Notice)]
    assert texts == ["second", "first", "open"]


async def test_a_model_runs_at_most_so_far_ahead_of_the_disk() -> None:
    session = await session_on(MemoryCheckpoint())

    async def stream() -> None:
        for _ in range(MAX_PENDING_DELTAS * 3):
            session.append(AgentMessageDelta(turn_id="t", step_id="x", text="y"), None)
            await session.wait_written()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream)
        await trio.testing.wait_all_tasks_blocked()
        assert len(session._pending) == MAX_PENDING_DELTAS + 1
        nursery.start_soon(session.run_recorder)
        await trio.testing.wait_all_tasks_blocked()
        assert not session._pending
        nursery.cancel_scope.cancel()
