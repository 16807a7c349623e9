"""What a process no longer holds it can take again, also if the file could not be told."""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing

from trio_agent.errors import CheckpointError, SessionOwnedError
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.ownership import RENEW_SECONDS, held_here
from trio_agent.testing.store_parts import begin

T = TypeVar("T")


async def in_place(fn: Callable[..., T], /, *args: Any, limiter: object) -> T:
    del limiter
    await trio.lowlevel.checkpoint()
    return fn(*args)


@contextlib.contextmanager
def unwritable() -> Iterator[None]:
    """Let every write to a file fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def owned(store: SqliteCheckpoint) -> list[str]:
    """Return the sessions that the file calls held."""
    rows = store._writer().connection.execute(
        "SELECT key FROM claim WHERE owner IS NOT NULL ORDER BY key"
    )
    return [key for (key,) in rows]


async def test_a_session_is_left_although_the_file_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with SqliteCheckpoint(path) as store, SqliteCheckpoint(path) as other:
        left, kept = await store.claim("left", "me"), await store.claim("kept", "me")
        with unwritable(), pytest.raises(CheckpointError):
            await store.release(left)
        assert owned(other) == ["kept", "left"]
        with pytest.raises(SessionOwnedError):
            await other.claim("kept", "me, elsewhere")
        again = await other.claim("left", "me, elsewhere")
        with pytest.raises(SessionOwnedError):
            await store.claim("left", "me")
        with pytest.raises(SessionOwnedError):
            await other.claim("kept", "a refusal elsewhere changes nothing")
        await store.release(left)  # is no longer its to give back
        assert owned(other) == ["kept", "left"]
        await other.release(again)
        await store.release(kept)
        assert owned(other) == []


async def test_a_claim_of_another_file_is_another_claim(tmp_path: Path) -> None:
    async with (
        SqliteCheckpoint(tmp_path / "a.db") as one,
        SqliteCheckpoint(tmp_path / "b.db") as two,
    ):
        kept, left = await one.claim("s", "me"), await two.claim("s", "me")
        assert kept == left
        with unwritable(), pytest.raises(CheckpointError):
            await two.release(left)
        await two.claim("s", "me, again")
        async with SqliteCheckpoint(one.path) as other:
            with pytest.raises(SessionOwnedError):
                await other.claim("s", "me, elsewhere")


async def test_a_store_is_closed_although_the_file_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SqliteCheckpoint(path)
    await store.claim("s", "me")
    with unwritable():
        await store.aclose()
    async with SqliteCheckpoint(path) as heir:
        assert owned(heir) == ["s"]
        await heir.claim("s", "me, later")


async def test_a_store_frees_what_it_holds_also_after_a_fault(tmp_path: Path) -> None:
    """The connection that saw the fault is dropped; closing takes a new one."""
    path = tmp_path / "s.db"
    store = SqliteCheckpoint(path)
    await store.claim("s", "me")
    with unwritable(), pytest.raises(CheckpointError):
        await begin(store)
    await store.aclose()
    async with SqliteCheckpoint(path) as heir:
        assert owned(heir) == []


async def test_a_store_that_nobody_closed_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SqliteCheckpoint(path)
    await store.claim("s", "me")
    del store
    gc.collect()
    async with SqliteCheckpoint(path) as heir:
        await heir.claim("s", "me, later")


async def test_a_claim_that_failed_holds_nothing(tmp_path: Path) -> None:
    async with SqliteCheckpoint(tmp_path / "s.db") as store:
        lease = await store.claim("s", "me")
        held = set(held_here)
        for name in ("s", "new"):
            with unwritable(), pytest.raises(CheckpointError):
                await store.claim(name, "me, again", takeover=True)
            assert held_here == held
        with pytest.raises(SessionOwnedError):
            await store.claim("s", "me, again")
        await store.release(lease)
        await store.release(await store.claim("s", "me, again"))
        assert held_here < held


async def test_other_processes_are_told_as_soon_as_the_file_can_be(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock

    async with SqliteCheckpoint(tmp_path / "s.db", run_sync=in_place) as store:
        left, kept = await store.claim("left", "me"), await store.claim("kept", "me")
        with unwritable(), pytest.raises(CheckpointError):
            await store.release(left)
        with trio.move_on_after(2 * RENEW_SECONDS):
            await store.guard(kept)
        assert owned(store) == ["kept"]
