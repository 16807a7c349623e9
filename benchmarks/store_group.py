"""Many sessions saving into one store, each waiting for its save; a raw grouped loop beside it.

`Lean` is the least that trio allows: the raw loop's transaction in a thread, one for all
tasks that wait. It checks, compares, numbers and returns nothing, so what it is slower
than the raw loop is the price of tasks and of the thread.

usage: python -m benchmarks.store_group [sessions,…]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TypeAlias

import trio

from benchmarks.workload import (
    SAVES_A_TURN,
    Raw,
    Step,
    median,
    percentile,
    report,
    rounded,
    steps,
)
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.rows import write_head, write_row

Encoded: TypeAlias = tuple[int, bytes, list[bytes], list[bytes]]
"""Session, head, items and events."""

ROUNDS = 6
BURST_SAVES = 600
"""Saves of all sessions together in one round."""


class Lean:
    """Tasks that encode, park, and are woken once one of them has written for all."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self._waiting: list[Encoded] = []
        self._tasks: list[trio.lowlevel.Task] = []

    async def save(self, number: int, step: Step, together: int) -> None:
        """Write *step*; the last of *together* callers writes for all of them."""
        self._waiting.append(_encoded(number, step))
        if len(self._waiting) < together:
            self._tasks.append(trio.lowlevel.current_task())
            await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
            return
        batch, self._waiting = self._waiting, []
        tasks, self._tasks = self._tasks, []
        await trio.to_thread.run_sync(self.raw.save, batch)
        for task in tasks:
            trio.lowlevel.reschedule(task)


async def measure(sessions: int) -> None:
    rounds = max(1, BURST_SAVES // sessions // SAVES_A_TURN) * SAVES_A_TURN
    turns = (ROUNDS + 1) * rounds // SAVES_A_TURN
    mine = [list(steps(f"s{n}", turns, journal=True)) for n in range(sessions)]
    with tempfile.TemporaryDirectory(dir=".") as directory:
        raw = Raw(Path(directory, "raw.db"), sessions=sessions)
        lean = Lean(Raw(Path(directory, "lean.db"), sessions=sessions, any_thread=True))
        ratios: list[float] = []
        of_encoded: list[float] = []
        of_lean: list[float] = []
        rates: list[float] = []
        latencies: list[float] = []
        async with SqliteCheckpoint(Path(directory, "ours.db")) as store:

            async def run(saves: list[Step]) -> None:
                for step in saves:
                    begun = time.perf_counter()
                    await store.save(step.checkpoint, step.delta, events=step.events)
                    latencies.append(time.perf_counter() - begun)

            async def run_lean(number: int, saves: list[Step]) -> None:
                for step in saves:
                    await lean.save(number, step, sessions)

            for number in range(ROUNDS + 1):
                part = slice(number * rounds, (number + 1) * rounds)
                ours = theirs = encoding = least = 0.0
                for which in (0, 1, 2) if number % 2 else (2, 1, 0):
                    begun = time.perf_counter()
                    if which == 2:
                        async with trio.open_nursery() as nursery:
                            for n, saves in enumerate(mine):
                                nursery.start_soon(run_lean, n, saves[part])
                        least = time.perf_counter() - begun
                    elif which == 0:
                        async with trio.open_nursery() as nursery:
                            for saves in mine:
                                nursery.start_soon(run, saves[part])
                        ours = time.perf_counter() - begun
                    else:
                        for together in zip(*(saves[part] for saves in mine), strict=True):
                            turned = time.perf_counter()
                            rows = [_encoded(n, step) for n, step in enumerate(together)]
                            encoding += time.perf_counter() - turned
                            raw.save(rows)
                        theirs = time.perf_counter() - begun
                if number == 0:
                    latencies.clear()  # the first round creates the sessions
                    continue
                ratios.append(theirs / ours)
                of_encoded.append((theirs - encoding) / ours)
                of_lean.append(theirs / least)
                rates.append(sessions * rounds / ours)
        raw.close()
        lean.raw.close()
    report(
        "store_group",
        sessions=sessions,
        of_raw=median(ratios),
        of_raw_encoded_before=median(of_encoded),
        lean_of_raw=median(of_lean),
        saves_per_s=median(rates),
        save_ms_p50=rounded(percentile(latencies, 0.5) * 1e3),
        save_ms_p99=rounded(percentile(latencies, 0.99) * 1e3),
    )


def _encoded(session: int, step: Step) -> Encoded:
    return (
        session,
        write_head(step.checkpoint),
        [write_row(item) for item in step.delta],
        [write_row(draft.msg) for draft in step.events],
    )


def main() -> None:
    counts = sys.argv[1] if len(sys.argv) > 1 else "1,8,64,512"
    for count in counts.split(","):
        trio.run(measure, int(count))


if __name__ == "__main__":
    main()
