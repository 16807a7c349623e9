"""Who counts as alive: asked of the kernel, or told by a counter, never by a clock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from trio_agent.errors import SessionOwnedError
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.ownership import LEASE_SECONDS, Process, start_time

T = TypeVar("T")


async def in_place(fn: Callable[..., T], /, *args: Any, limiter: object) -> T:
    del limiter
    await trio.lowlevel.checkpoint()
    return fn(*args)


def test_this_process_lives() -> None:
    assert Process.this().lives() is True


def test_a_pid_that_was_given_to_another_process_is_dead() -> None:
    assert replace(Process.this(), started="1").lives() is False


def test_an_ended_process_is_dead_even_before_it_is_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as child:
        mine = replace(Process.this(), pid=child.pid, started=start_time(child.pid) or "1")
        assert child.stdout is not None
        child.stdout.read()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert mine.lives() is False, "a zombie holds nothing"
        child.wait()
        assert mine.lives() is False


def test_a_process_of_another_kernel_cannot_be_asked() -> None:
    assert replace(Process.this(), boot="another boot").lives() is None
    assert replace(Process.this(), started="").lives() is None


def foreign(path: Path) -> SqliteCheckpoint:
    return SqliteCheckpoint(path, run_sync=in_place)


async def move_to_another_machine(store: SqliteCheckpoint) -> None:
    """Make the holder of everything look as if it ran elsewhere."""
    with store._ledger.transaction() as connection:  # type: ignore[union-attr]
        connection.execute("UPDATE owner SET boot='elsewhere', host='elsewhere'")
    await trio.lowlevel.checkpoint()


def test_a_silent_owner_elsewhere_is_replaced_after_its_lease(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s.db"
        async with foreign(path) as silent, foreign(path) as heir:
            await silent.claim("s", "the silent one")
            await move_to_another_machine(silent)
            begun = trio.current_time()
            lease = await heir.claim("s", "the heir")
            assert trio.current_time() - begun >= LEASE_SECONDS
            with pytest.raises(SessionOwnedError):
                await silent.claim("s", "the silent one")
            await heir.release(lease)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_an_owner_elsewhere_that_renews_is_never_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s.db"
        async with foreign(path) as alive, foreign(path) as challenger:
            lease = await alive.claim("s", "the living one")
            await move_to_another_machine(alive)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(alive.guard, lease)
                for _ in range(3):
                    with pytest.raises(SessionOwnedError) as caught:
                        await challenger.claim("s", "the challenger")
                    assert "the living one" in str(caught.value)
                    assert "elsewhere" in str(caught.value)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_an_owner_elsewhere_that_gives_back_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s.db"
        async with foreign(path) as first, foreign(path) as second:
            lease = await first.claim("s", "first")
            await move_to_another_machine(first)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(second.claim, "s", "second")
                await trio.testing.wait_all_tasks_blocked()
                begun = trio.current_time()
                await first.release(lease)
            assert trio.current_time() - begun < LEASE_SECONDS / 2

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_one_task_renews_for_all_and_another_goes_on_when_it_ends(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s.db"
        async with foreign(path) as store, foreign(path) as rival:
            leases = [await store.claim(f"s{number}", "me") for number in range(3)]
            lost: list[str] = []

            async def guard(number: int, scope: trio.CancelScope) -> None:
                with scope:
                    try:
                        await store.guard(leases[number])
                    except SessionOwnedError:
                        lost.append(f"s{number}")

            scopes = [trio.CancelScope() for _ in leases]
            async with trio.open_nursery() as nursery:
                for number, scope in enumerate(scopes):
                    nursery.start_soon(guard, number, scope)
                await trio.sleep(10)
                (before,) = renewals(store)
                assert 1 <= before <= 3, "one counter, not one a session"
                for scope in scopes[:2]:
                    scope.cancel()
                await trio.sleep(20)
                (after,) = renewals(store)
                assert after > before
                await rival.claim("s2", "rival", takeover=True)
                await trio.sleep(2)
                assert lost == ["s2"]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def renewals(store: SqliteCheckpoint) -> list[int]:
    rows = store._writer().connection.execute("SELECT renewals FROM owner ORDER BY id LIMIT 1")
    return [count for (count,) in rows]
