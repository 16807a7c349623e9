"""Journal readers: how many events a second 1, 10 and 50 of them catch up with, by pages.

usage: python -m benchmarks.store_readers
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import trio

from benchmarks.workload import report, rounded
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import SqliteCheckpoint
from trio_agent.testing.store_parts import note

EVENTS = 1_000
PAGE = 100


async def read(store: SqliteCheckpoint, until: int) -> None:
    """Read every event once, in order, up to *until*."""
    position = 0
    seen = 0
    while position < until:
        part = await store.events_after("s", position, PAGE)
        for event in part.events:
            seen += 1
            assert event.sequence == seen
        position = part.position
        if not part.events:
            await trio.lowlevel.checkpoint()


async def measure(readers: int) -> None:
    with tempfile.TemporaryDirectory(dir=".") as directory:
        async with SqliteCheckpoint(Path(directory, "s.db")) as store:
            await store.save(Checkpoint.empty("s"), events=[note("x" * 200)] * EVENTS)
            begun = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for _ in range(readers):
                    nursery.start_soon(read, store, 2 * EVENTS)
                for _ in range(EVENTS // 10):
                    await store.append_events("s", [note("y" * 200)] * 10)
                written = time.perf_counter() - begun
            took = time.perf_counter() - begun
    report(
        "store_readers",
        readers=readers,
        events_read_per_s=rounded(2 * EVENTS * readers / took),
        events_written_per_s=rounded(EVENTS / written),
    )


def main() -> None:
    for readers in (1, 10, 50):
        trio.run(measure, readers)


if __name__ == "__main__":
    main()
