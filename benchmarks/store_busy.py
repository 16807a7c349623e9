"""How long a commit takes while other tasks keep the trio thread busy without end.

Between our commits, under the same load, a raw one runs in a thread as trio offers it,
with nothing that lets threads in. It may wait for as long as the load lasts; so the load
pauses for a commit that takes too long, and `raw_cut` tells how many did.

usage: python -m benchmarks.store_busy
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import trio

from benchmarks.workload import Raw, percentile, report, rounded
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.rows import write_head
from trio_agent.testing.store_parts import following

COMMITS = 60
RAW_COMMITS = 12
CUT_SECONDS = 0.5


def burn(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


async def measure(tasks: int, slice_us: int) -> None:
    ours: list[float] = []
    theirs: list[float] = []
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        raw = Raw(Path(directory, "raw.db"), any_thread=True)
        async with SqliteCheckpoint(Path(directory, "ours.db")) as store:
            checkpoint = Checkpoint(session_id="s", sequence=-1)

            async def busy() -> None:
                while True:
                    if time.perf_counter() > begun + CUT_SECONDS:
                        await trio.sleep(0.005)  # the raw commit has waited long enough
                    else:
                        burn(slice_us / 1e6)
                        await trio.lowlevel.checkpoint()

            async with trio.open_nursery() as nursery:
                for _ in range(tasks):
                    nursery.start_soon(busy)
                for number in range(COMMITS):
                    checkpoint = following(checkpoint)
                    begun = time.perf_counter()
                    await store.save(checkpoint)
                    ours.append(time.perf_counter() - begun)
                    if number % (COMMITS // RAW_COMMITS) == 0:
                        head = write_head(checkpoint)
                        begun = time.perf_counter()
                        await trio.to_thread.run_sync(raw.save, [(0, head, [], [])])
                        theirs.append(time.perf_counter() - begun)
                nursery.cancel_scope.cancel()
        raw.close()
    report(
        "store_busy",
        tasks=tasks,
        slice_us=slice_us,
        of_raw_p50=rounded(percentile(theirs, 0.5) / percentile(ours, 0.5)),
        commit_ms_p50=rounded(percentile(ours, 0.5) * 1e3),
        commit_ms_p99=rounded(percentile(ours, 0.99) * 1e3),
        raw_ms_p50=rounded(percentile(theirs, 0.5) * 1e3),
        raw_ms_max=rounded(max(theirs) * 1e3),
        raw_cut=sum(took > CUT_SECONDS for took in theirs),
        raw_commits=RAW_COMMITS,
    )


def main() -> None:
    for tasks, slice_us in ((0, 0), (1, 30), (10, 30), (1, 200), (100, 30)):
        trio.run(measure, tasks, slice_us)


if __name__ == "__main__":
    main()
