"""How long a commit takes while other tasks keep the trio thread busy without end.

usage: python -m benchmarks.store_busy
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import trio

from benchmarks.workload import percentile, report, rounded
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import SqliteCheckpoint
from trio_agent.testing.store_parts import following

COMMITS = 60
CUT_SECONDS = 5.0


def burn(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


async def measure(tasks: int, slice_us: int) -> None:
    latencies: list[float] = []
    with tempfile.TemporaryDirectory(dir=".") as directory:
        async with SqliteCheckpoint(Path(directory, "s.db")) as store:
            checkpoint = Checkpoint(session_id="s", sequence=-1)
            async with trio.open_nursery() as nursery:

                async def busy() -> None:
                    while True:
                        burn(slice_us / 1e6)
                        await trio.lowlevel.checkpoint()

                for _ in range(tasks):
                    nursery.start_soon(busy)
                for _ in range(COMMITS):
                    checkpoint = following(checkpoint)
                    begun = time.perf_counter()
                    await store.save(checkpoint)
                    latencies.append(time.perf_counter() - begun)
                nursery.cancel_scope.cancel()
    report(
        "store_busy",
        tasks=tasks,
        slice_us=slice_us,
        commit_ms_p50=rounded(percentile(latencies, 0.5) * 1e3),
        commit_ms_p99=rounded(percentile(latencies, 0.99) * 1e3),
    )


def main() -> None:
    for tasks, slice_us in ((0, 0), (1, 30), (10, 30), (1, 200), (100, 30)):
        trio.run(measure, tasks, slice_us)


if __name__ == "__main__":
    main()
