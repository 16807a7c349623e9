"""Journal readers: how fast 1, 10 and 50 of them catch up by pages; a raw loop beside them.

The raw loop reads the same events, one a row, in pages of the same size, one reader after
the other on one connection, and decodes them into the same types. Afterwards as many
readers follow a journal while it is being written.

usage: python -m benchmarks.store_readers
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import trio

from benchmarks.workload import median, report, rounded
from trio_agent.agent.readers import PAGE
from trio_agent.protocol.codec import decode_row
from trio_agent.protocol.events import Event
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.rows import write_row
from trio_agent.testing.store_parts import note

EVENTS = 1_000
ROUNDS = 5


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


def read_raw(connection: sqlite3.Connection, until: int) -> None:
    """Do the same with sqlite3 alone."""
    position = 0
    seen = 0
    while position < until:
        rows = connection.execute(
            "SELECT sequence, at, kind, submission, body FROM event"
            " WHERE sequence>? ORDER BY sequence LIMIT ?",
            (position, PAGE),
        ).fetchall()
        for sequence, at, kind, submission, body in rows:
            msg = decode_row(kind, body)
            event = Event(
                sequence=sequence,
                recorded_at_ms=at,
                submission_id=submission,
                msg=msg,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            )
            seen += 1
            assert event.sequence == seen
        position = rows[-1][0]


def make_raw(path: Path, events: Sequence[Event]) -> sqlite3.Connection:
    """Return a database with a row for each of *events*."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(
        "CREATE TABLE event(sequence INTEGER PRIMARY KEY, at, kind, submission, body)"
    )
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO event VALUES(?,?,?,?,?)",
        [
            (one.sequence, one.recorded_at_ms, one.msg.tag, None, write_row(one.msg))
            for one in events
        ],
    )
    connection.execute("COMMIT")
    return connection


async def measure(readers: int) -> None:
    ratios: list[float] = []
    rates: list[float] = []
    with tempfile.TemporaryDirectory(dir=".") as directory:
        async with SqliteCheckpoint(Path(directory, "s.db")) as store:
            events = await store.save(Checkpoint.empty("s"), events=[note("x" * 200)] * EVENTS)
            with closing(make_raw(Path(directory, "raw.db"), events)) as connection:
                for number in range(ROUNDS):
                    ours = raw = 0.0
                    for which in (0, 1) if number % 2 else (1, 0):
                        begun = time.perf_counter()
                        if which == 0:
                            async with trio.open_nursery() as nursery:
                                for _ in range(readers):
                                    nursery.start_soon(read, store, EVENTS)
                            ours = time.perf_counter() - begun
                        else:
                            for _ in range(readers):
                                read_raw(connection, EVENTS)
                            raw = time.perf_counter() - begun
                    ratios.append(raw / ours)
                    rates.append(readers * EVENTS / ours)
            begun = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for _ in range(readers):
                    nursery.start_soon(read, store, 2 * EVENTS)
                for _ in range(EVENTS // 10):
                    await store.append_events("s", [note("y" * 200)] * 10)
                written = time.perf_counter() - begun
            followed = time.perf_counter() - begun
    report(
        "store_readers",
        readers=readers,
        of_raw=median(ratios),
        events_read_per_s=median(rates),
        events_followed_per_s=rounded(2 * EVENTS * readers / followed),
        events_written_per_s=rounded(EVENTS / written),
    )


def main() -> None:
    for readers in (1, 10, 50):
        trio.run(measure, readers)


if __name__ == "__main__":
    main()
