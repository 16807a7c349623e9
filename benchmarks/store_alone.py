"""One session alone: time and bytes of a save as the session grows; a raw loop beside it.

usage: python -m benchmarks.store_alone [turns,…]
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from pathlib import Path

import msgspec
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
    stored_bytes,
    written_bytes,
)
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.rows import write_head, write_row

ROUNDS = 8
BURST = 10
"""Turns a contestant runs before the other one's turn comes."""


def encoded(step: Step) -> tuple[int, bytes, list[bytes], list[bytes]]:
    return (
        0,
        write_head(step.checkpoint),
        [write_row(item) for item in step.delta],
        [msgspec.json.encode(draft.msg) for draft in step.events],
    )


async def measure(turns: int, *, journal: bool) -> None:
    with tempfile.TemporaryDirectory(dir=".") as directory:
        ours, theirs = Path(directory, "ours.db"), Path(directory, "raw.db")
        store, raw = SqliteCheckpoint(ours), Raw(theirs)
        mine = list(steps("s", turns + ROUNDS * BURST, journal=journal))
        before = turns * SAVES_A_TURN
        raw.connection.execute("PRAGMA synchronous=OFF")
        for step in mine[:before]:
            raw.save([encoded(step)])
        raw.connection.execute("PRAGMA synchronous=FULL")
        quick = SqliteCheckpoint(ours, synchronous="NORMAL")
        for step in mine[:before]:
            await quick.save(step.checkpoint, step.delta, events=step.events)
        await quick.aclose()
        await store.load("s")
        start_size = (stored_bytes(ours), stored_bytes(theirs))
        ratios: list[float] = []
        latencies: list[float] = []
        written = [0, 0]
        at = before
        for number in range(ROUNDS):
            batch = mine[at : at + BURST * SAVES_A_TURN]
            at += len(batch)
            times = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                was = written_bytes()
                begun = time.perf_counter()
                if which == 0:
                    for step in batch:
                        one = time.perf_counter()
                        await store.save(step.checkpoint, step.delta, events=step.events)
                        latencies.append(time.perf_counter() - one)
                else:
                    for step in batch:
                        raw.save([encoded(step)])
                times[which] = time.perf_counter() - begun
                written[which] += written_bytes() - was
            ratios.append(times[1] / times[0])
        saves = ROUNDS * BURST * SAVES_A_TURN
        await store.aclose()
        raw.close()
        content = sum(sum(map(len, encoded(step)[2])) for step in mine[before:]) / saves
        report(
            "store_alone",
            turns=turns,
            journal=journal,
            of_raw=median(ratios),
            save_us_p50=rounded(percentile(latencies, 0.5) * 1e6),
            save_us_p99=rounded(percentile(latencies, 0.99) * 1e6),
            content_bytes_a_save=rounded(content),
            stored_bytes_a_save=rounded((stored_bytes(ours) - start_size[0]) / saves),
            stored_bytes_a_save_raw=rounded((stored_bytes(theirs) - start_size[1]) / saves),
            written_bytes_a_save=rounded(written[0] / saves),
            written_bytes_a_save_raw=rounded(written[1] / saves),
        )


def main() -> None:
    lengths = [int(n) for n in (sys.argv[1] if len(sys.argv) > 1 else "10,100,1000").split(",")]
    for turns in lengths:
        for journal in (False, True):
            trio.run(functools.partial(measure, turns, journal=journal))


if __name__ == "__main__":
    main()
