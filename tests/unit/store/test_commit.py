"""Group commit: who shares a transaction, who fails alone, and what cancelling means."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import trio
import trio.testing

from trio_agent.errors import CheckpointError, CorruptStoreError, StaleSessionError
from trio_agent.protocol.events import AgentMessageDelta, ModelStepCompleted, Notice
from trio_agent.protocol.items import UserItem
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import SqliteCheckpoint
from trio_agent.testing.store_parts import begin, draft, following, journal_of, note

T = TypeVar("T")


class Gate:
    """A `run_sync` whose commits wait until the gate is opened; it counts them."""

    def __init__(self) -> None:
        self.open = trio.Event()
        self.commits: list[int] = []

    async def __call__(
        self, fn: Callable[..., T], /, *args: Any, limiter: trio.CapacityLimiter
    ) -> T:
        *_, work, (*of_work,) = args
        if work.__name__ == "_committing":
            self.commits.append(len(of_work[0]))
            await self.open.wait()
        return await trio.to_thread.run_sync(fn, *args, limiter=limiter)


async def opened(tmp_path: Path, sessions: int) -> tuple[SqliteCheckpoint, Gate]:
    """Return a store with that many sessions and its gate, closed."""
    gate = Gate()
    gate.open.set()
    store = SqliteCheckpoint(tmp_path / "s.db", run_sync=gate)
    for number in range(sessions):
        await begin(store, f"s{number}")
    gate.open = trio.Event()
    gate.commits.clear()
    return store, gate


def second(number: int) -> Checkpoint:
    return Checkpoint(session_id=f"s{number}", sequence=1)


async def stored(store: SqliteCheckpoint, number: int) -> Checkpoint:
    found = await store.load(f"s{number}")
    assert found is not None
    return found


async def test_what_waits_goes_in_one_transaction(tmp_path: Path) -> None:
    store, gate = await opened(tmp_path, 20)
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(store.save, second(number))
        await trio.testing.wait_all_tasks_blocked()
        gate.open.set()
    assert gate.commits == [1, 19]
    for number in range(20):
        assert await store.load(f"s{number}") == second(number)
    await store.aclose()


async def test_what_goes_together_is_one_transaction_for_sqlite_too(tmp_path: Path) -> None:
    """Mutant: two sessions were given one number, so that each was written alone."""
    store, gate = await opened(tmp_path, 20)
    statements: list[str] = []
    store._writer().connection.set_trace_callback(statements.append)
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(store.save, second(number))
        await trio.testing.wait_all_tasks_blocked()
        gate.open.set()
    assert statements.count("COMMIT") == 2
    listed = [one.session_id for one in (await store.list_sessions()).sessions]
    assert sorted(listed) == sorted(f"s{number}" for number in range(20))
    await store.aclose()


async def test_sessions_that_were_answered_together_come_back_together(tmp_path: Path) -> None:
    store, gate = await opened(tmp_path, 20)

    async def session(number: int) -> None:
        for sequence in range(1, 9):
            await store.save(Checkpoint(session_id=f"s{number}", sequence=sequence))

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(session, number)
        await trio.testing.wait_all_tasks_blocked()
        gate.open.set()
    assert len(gate.commits) == 9  # one a save, and one for the first, who led alone
    await store.aclose()


async def test_a_stale_save_fails_alone(tmp_path: Path) -> None:
    store, gate = await opened(tmp_path, 4)
    rival = SqliteCheckpoint(tmp_path / "s.db")
    await rival.save(second(2))
    await rival.aclose()
    lost: list[int] = []

    async def save(number: int) -> None:
        try:
            await store.save(second(number), events=[note("x")])
        except StaleSessionError:
            lost.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(save, number)
        await trio.testing.wait_all_tasks_blocked()
        gate.open.set()
    assert lost == [2]
    assert (await store.events_after("s2", 0, 9)).events == ()
    await store.aclose()


async def test_a_save_of_a_lost_lease_fails_alone(tmp_path: Path) -> None:
    store, gate = await opened(tmp_path, 4)
    leases = [await store.claim(f"s{number}", "me") for number in range(4)]
    await store.claim("s2", "another", takeover=True)
    lost: list[int] = []

    async def save(number: int) -> None:
        try:
            await store.save(second(number), lease=leases[number])
        except StaleSessionError:
            lost.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(save, number)
        await trio.testing.wait_all_tasks_blocked()
        gate.open.set()
    assert lost == [2]
    assert [(await stored(store, number)).sequence for number in range(4)] == [1, 1, 0, 1]
    await store.aclose()


async def test_deltas_that_wait_before_the_end_of_their_step_go_with_it(
    tmp_path: Path,
) -> None:
    """Mutant: saves went before appends, and the journal told the end first."""
    store, gate = await opened(tmp_path, 3)
    delta = draft(
        AgentMessageDelta(turn_id="t", step_id="step", text="x", phase="final_answer")
    )
    end = draft(
        ModelStepCompleted(
            turn_id="t",
            step_id="step",
            step_index=0,
            outcome="completed",
            started_at_ms=1,
            completed_at_ms=2,
        )
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.save, second(0))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(store.append_events, "s1", [delta, note("x")])
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(functools.partial(store.save, second(1), events=[end]))
        nursery.start_soon(store.save, second(2))
        await trio.testing.wait_all_tasks_blocked()
        gate.open.set()
    told = [event.msg.tag for event in await journal_of(store, "s1")]
    assert told == [Notice.tag, end.msg.tag]
    await store.aclose()


async def test_a_save_that_the_file_contradicts_fails_alone(tmp_path: Path) -> None:
    """A row of another's damage breaks one transaction; the others are written again."""
    store, gate = await opened(tmp_path, 5)
    with sqlite3.connect(tmp_path / "s.db") as connection:
        connection.execute(
            "INSERT INTO event SELECT id, 1, 0, 'x', NULL, NULL, NULL, 1, x'', 0, NULL"
            " FROM session WHERE key='s2'"
        )
    connection.close()
    failed: list[int] = []

    async def save(number: int) -> None:
        try:
            await store.save(second(number), events=[note("x")])
        except CorruptStoreError:
            failed.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(save, 4)
        await trio.testing.wait_all_tasks_blocked()
        for number in (2, 0, 1, 3):
            nursery.start_soon(save, number)
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        gate.open.set()
    assert gate.commits == [1, 4]
    assert failed == [2]
    assert await store.load("s2") == Checkpoint.empty("s2")
    assert await store.load("s3") == second(3)
    await store.aclose()


async def test_a_fault_of_the_disk_breaks_the_whole_batch(tmp_path: Path) -> None:
    """Nobody is told that he was saved."""
    store, gate = await opened(tmp_path, 5)
    writer = store._writer().connection
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count={pages + 2}")
    errors: list[Exception] = []

    async def save(number: int) -> None:
        with pytest.raises(CheckpointError) as caught:
            await store.save(second(number), events=[note("x" * 50_000)])
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.save, second(4))
        await trio.testing.wait_all_tasks_blocked()
        for number in range(4):
            nursery.start_soon(save, number)
        await trio.testing.wait_all_tasks_blocked()
        gate.open.set()
    assert gate.commits == [1, 4]
    assert len({id(error) for error in errors}) == 4, "one error object a task"
    for number in range(4):
        assert await store.load(f"s{number}") == Checkpoint.empty(f"s{number}")
        await store.save(second(number))
    await store.aclose()


async def test_cancelled_while_waiting_it_did_not_happen(tmp_path: Path) -> None:
    store, gate = await opened(tmp_path, 3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.save, second(0))
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            nursery.start_soon(store.save, second(1))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(cancel_soon, scope)  # noqa: ASYNC111  # it only cancels
            await store.save(second(2))
        assert scope.cancelled_caught
        gate.open.set()
    assert await store.load("s2") == Checkpoint.empty("s2")
    assert await store.load("s1") == second(1)
    await store.aclose()


async def cancel_soon(scope: trio.CancelScope) -> None:
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()


async def test_cancelled_once_taken_it_is_answered(tmp_path: Path) -> None:
    """Leader and followers alike: the call returns, because it happened."""
    store, gate = await opened(tmp_path, 3)
    returned: list[int] = []

    async def save(number: int) -> None:
        await store.save(second(number))
        returned.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(save, 0)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(save, 1)
        nursery.start_soon(save, 2)
        await trio.testing.wait_all_tasks_blocked()
        first, gate.open = gate.open, trio.Event()
        first.set()
        while gate.commits != [1, 2]:  # noqa: ASYNC110
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
        assert returned == [0]
        gate.open.set()
    assert sorted(returned) == [0, 1, 2]
    for number in range(3):
        assert await store.load(f"s{number}") == second(number)
    await store.aclose()


async def test_a_save_on_top_of_what_a_rival_made_anew(tmp_path: Path) -> None:
    """Same number, other session: what was worked out from the old one is worked out again."""
    store, gate = await opened(tmp_path, 1)
    gate.open.set()
    rival = SqliteCheckpoint(tmp_path / "s.db")
    assert await rival.delete_session("s0")
    anew = attrs.evolve(Checkpoint.empty("s0"), context=[UserItem(text="x")])
    await rival.save(anew)
    await rival.aclose()
    after = following(anew, UserItem(text="y"))
    await store.save(after)
    assert await store.load("s0") == after
    assert await store.verify() == ()
    await store.aclose()


async def test_a_save_after_an_append_of_another_store(tmp_path: Path) -> None:
    store, gate = await opened(tmp_path, 1)
    gate.open.set()
    rival = SqliteCheckpoint(tmp_path / "s.db")
    (theirs,) = await rival.append_events("s0", [note("theirs")])
    (mine,) = await store.save(second(0), events=[note("mine")])
    (after,) = await rival.append_events("s0", [note("after")])
    assert (theirs.sequence, mine.sequence, after.sequence) == (1, 2, 3)
    assert (await store.events_after("s0", 0, 9)).events == (theirs, mine, after)
    await rival.aclose()
    await store.aclose()


async def test_a_save_and_an_append_of_one_session_that_wait_together(tmp_path: Path) -> None:
    store, gate = await opened(tmp_path, 2)
    first = second(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.save, second(0))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(store.save, first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(store.append_events, "s1", [note("x")])
        await trio.testing.wait_all_tasks_blocked()
        gate.open.set()
    assert gate.commits == [1, 2]
    await store.save(following(first))
    assert await store.verify() == ()
    await store.aclose()


async def test_a_busy_loop_does_not_starve_a_commit(tmp_path: Path) -> None:
    """With a task that is always runnable a commit still ends, long before the load does."""
    async with SqliteCheckpoint(tmp_path / "s.db") as store:
        checkpoint = await begin(store)
        passes = 0
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:

                async def spin() -> None:
                    nonlocal passes
                    while True:
                        passes += 1
                        sum(range(500))
                        await trio.lowlevel.checkpoint()

                nursery.start_soon(spin)
                for _ in range(20):
                    checkpoint = following(checkpoint)
                    await store.save(checkpoint)
                nursery.cancel_scope.cancel()
        assert passes > 0
