"""Threads get their turn; a loop gives way while there is somebody to give way to."""

from __future__ import annotations

import threading
import time

import pytest
import trio

from trio_agent.store import threads
from trio_agent.store.threads import in_thread


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the loop slept; it gives way at once."""
    slept: list[float] = []
    real = time.sleep

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        real(seconds)

    monkeypatch.setattr(threads, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(time, "sleep", sleep)
    return slept


async def test_nobody_naps_between_the_end_of_a_thread_and_the_turn_of_its_task(
    naps: list[float],
) -> None:
    """Mutant: the loop gave way until the task ran; each commit took a tenth longer."""
    limiter = trio.CapacityLimiter(1)
    for _ in range(20):
        at_the_end = await in_thread(
            trio.to_thread.run_sync, lambda: len(naps), limiter=limiter
        )
        assert len(naps) == at_the_end


async def test_a_busy_loop_gives_way_until_the_thread_has_ended(naps: list[float]) -> None:
    limiter = trio.CapacityLimiter(1)
    go_on = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: in_thread(trio.to_thread.run_sync, go_on.wait, limiter=limiter)
        )
        while len(naps) < 3:  # noqa: ASYNC110  # it is the loop that must be busy
            await trio.lowlevel.checkpoint()
        go_on.set()
    before = len(naps)
    for _ in range(20):
        await trio.lowlevel.checkpoint()
    assert len(naps) == before


async def test_a_call_that_never_had_a_thread_is_not_waited_for(naps: list[float]) -> None:
    limiter = trio.CapacityLimiter(1)
    async with limiter:
        with trio.move_on_after(0):
            await in_thread(trio.to_thread.run_sync, max, 1, 2, limiter=limiter)
    naps.clear()
    for _ in range(20):
        await trio.lowlevel.checkpoint()
    assert naps == []
