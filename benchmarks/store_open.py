"""Opening a long session against reading and decoding its rows; and what twice the turns cost.

usage: python -m benchmarks.store_open [items]
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import trio

from benchmarks.workload import median, report, rounded, steps, stored_bytes
from trio_agent.protocol.codec import decode_row
from trio_agent.protocol.items import UserItem
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import SqliteCheckpoint
from trio_agent.testing.store_parts import following

ROUNDS = 9


def read_raw(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT kind, body FROM item ORDER BY session, n").fetchall()
        return len([decode_row(kind, body) for kind, body in rows])


async def opened(path: Path) -> float:
    begun = time.perf_counter()
    async with SqliteCheckpoint(path) as store:
        await store.load("s")
    return time.perf_counter() - begun


async def measure(items: int) -> None:
    with tempfile.TemporaryDirectory(dir=".") as directory:
        path = Path(directory, "s.db")
        async with SqliteCheckpoint(path, synchronous="NORMAL") as store:
            for step in steps("s", items // 4, journal=True):
                await store.save(step.checkpoint, step.delta, events=step.events)
        ours: list[float] = []
        ratios: list[float] = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            read_raw(path)
            raw = time.perf_counter() - begun
            ours.append(await opened(path))
            ratios.append(ours[-1] / raw)
        report("store_open", items=items, of_raw=median(ratios), ms=rounded(median(ours) * 1e3))
        paths: list[Path] = []
        for turns in (500, 1_000):
            path = Path(directory, f"{turns}.db")
            async with SqliteCheckpoint(path, synchronous="NORMAL") as store:
                checkpoint = Checkpoint(session_id="s", sequence=-1)
                for number in range(turns):
                    item = UserItem(text="x" * 200, submission_id=f"{number}")
                    checkpoint = following(checkpoint, item)
                    await store.save(checkpoint, [item])
            paths.append(path)
        sizes = [stored_bytes(path) for path in paths]
        times = [[await opened(path) for path in paths] for _ in range(ROUNDS)]
        report(
            "store_doubled",
            size_ratio=rounded(sizes[1] / sizes[0]),
            opening_ratio=median([twice / once for once, twice in times]),
        )


if __name__ == "__main__":
    trio.run(measure, int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
