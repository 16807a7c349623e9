"""Many sessions saving into one store, each waiting for its save; a raw grouped loop beside it.

usage: python -m benchmarks.store_group [sessions,…]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

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

ROUNDS = 6
BURST_SAVES = 600
"""Saves of all sessions together in one round."""


async def measure(sessions: int) -> None:
    rounds = max(1, BURST_SAVES // sessions // SAVES_A_TURN) * SAVES_A_TURN
    turns = (ROUNDS + 1) * rounds // SAVES_A_TURN
    mine = [list(steps(f"s{n}", turns, journal=True)) for n in range(sessions)]
    with tempfile.TemporaryDirectory(dir=".") as directory:
        raw = Raw(Path(directory, "raw.db"), sessions=sessions)
        ratios: list[float] = []
        of_encoded: list[float] = []
        rates: list[float] = []
        latencies: list[float] = []
        async with SqliteCheckpoint(Path(directory, "ours.db")) as store:

            async def run(saves: list[Step]) -> None:
                for step in saves:
                    begun = time.perf_counter()
                    await store.save(step.checkpoint, step.delta, events=step.events)
                    latencies.append(time.perf_counter() - begun)

            for number in range(ROUNDS + 1):
                part = slice(number * rounds, (number + 1) * rounds)
                ours = theirs = encoding = 0.0
                for which in (0, 1) if number % 2 else (1, 0):
                    begun = time.perf_counter()
                    if which == 0:
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
                rates.append(sessions * rounds / ours)
        raw.close()
    report(
        "store_group",
        sessions=sessions,
        of_raw=median(ratios),
        of_raw_encoded_before=median(of_encoded),
        saves_per_s=median(rates),
        save_ms_p50=rounded(percentile(latencies, 0.5) * 1e3),
        save_ms_p99=rounded(percentile(latencies, 0.99) * 1e3),
    )


def _encoded(session: int, step: Step) -> tuple[int, bytes, list[bytes], list[bytes]]:
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
