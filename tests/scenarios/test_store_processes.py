"""Many processes on one file: killed, stopped, racing, and waiting for each other."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import trio

from tests.scenarios.children import POINTS, Nursery, Tale, nursery
from trio_agent.errors import CheckpointError, SessionOwnedError
from trio_agent.protocol.items import UserItem
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.schema import MIGRATIONS, prepare
from trio_agent.testing.store_parts import begin, following

SLOW_STEPS = tuple(
    f"CREATE TABLE extra_{step}(n INTEGER PRIMARY KEY, text TEXT);"
    f"INSERT INTO extra_{step}(text) WITH RECURSIVE c(n) AS (VALUES(1) UNION ALL"
    " SELECT n+1 FROM c WHERE n<20000) SELECT 'row ' || n FROM c;"
    for step in (1, 2, 3)
)
"""Made-up migrations that take long enough to be killed in."""


@pytest.fixture(name="forking", scope="module")
def _forking() -> Iterator[Nursery]:
    with nursery() as one:
        yield one


@pytest.fixture(name="processes")
def _processes(forking: Nursery) -> Nursery:
    forking.tale = Tale()
    return forking


def test_saves(tmp_path: Path, processes: Nursery) -> None:
    """One file lives through all the kills, and every owner dies with its sessions held."""
    path = tmp_path / "s.db"
    names = ["a", "b", "c"]
    acknowledged = dict.fromkeys(names, -1)

    async def check() -> None:
        async with SqliteCheckpoint(path) as store:
            assert await store.verify() == ()
            for name in names:
                loaded = await store.load(name)
                stored = -1 if loaded is None else loaded.sequence
                assert acknowledged[name] <= stored <= acknowledged[name] + 1, name
                acknowledged[name] = stored
                await store.release(await store.claim(name, "heir"))
                if loaded is not None:
                    page = await store.events_after(name, 0, 100_000)
                    assert len(page.events) == stored + 1, name
                    assert len(loaded.context) == 2 * (stored + 1), name

    with processes.tale.on_failure(path):
        for seed in range(POINTS * 3 // 5):
            pause = random.Random(seed).uniform(0, 0.12)
            saved = seed % 2 == 0
            for line in processes.killed(pause, "save", str(path), *names, saved=saved):
                word, name, number = line.split()
                assert word == "saved"
                acknowledged[name] = max(acknowledged[name], int(number))
            trio.run(check)
            processes.tale.tell(f"seed {seed}: whole, with {acknowledged}")
        assert max(acknowledged.values()) > 0, "no kill came late enough to see a save"


def test_first_creation(tmp_path: Path, processes: Nursery) -> None:
    """A file whose creator died is created by the next one, or was whole already."""
    for seed in range(POINTS // 5):
        path = tmp_path / f"{seed}.db"
        pause = random.Random(seed).uniform(0, 0.02)

        async def check(path: Path = path) -> None:
            async with SqliteCheckpoint(path) as store:
                assert await store.verify() == ()
                await store.claim("a", "heir")

        with processes.tale.on_failure(path):
            processes.killed(pause, "save", str(path), "a")
            trio.run(check)


def test_migrations(tmp_path: Path, processes: Nursery) -> None:
    """A step that was killed is repeated; the file ends as a fresh one would."""
    fresh = tmp_path / "fresh.db"
    prepare(fresh, migrations=(*MIGRATIONS, *SLOW_STEPS))
    for seed in range(POINTS // 5):
        path = tmp_path / f"{seed}.db"
        prepare(path)
        pause = random.Random(seed).uniform(0, 0.08)
        with processes.tale.on_failure(path):
            processes.killed(pause, "migrate", str(path), *SLOW_STEPS)
            prepare(path, migrations=(*MIGRATIONS, *SLOW_STEPS))
            assert schema_of(path) == schema_of(fresh)


def test_eight_processes_eight_sessions_twenty_turns(
    tmp_path: Path, processes: Nursery
) -> None:
    """They create the file at the same moment, too; nothing fails and nothing is lost."""
    path = tmp_path / "new" / "s.db"
    commands = [("turns", str(path), f"p{number}", "8", "20") for number in range(8)]
    said = processes.together(*commands)
    assert said.count("done\n") == 8

    async def check() -> None:
        async with SqliteCheckpoint(path) as store:
            assert await store.verify() == ()
            sessions = (await store.list_sessions(limit=1_000)).sessions
            assert len(sessions) == 64
            for summary in sessions:
                loaded = await store.load(summary.session_id)
                assert loaded is not None
                texts = [item.text for item in loaded.context if isinstance(item, UserItem)]
                assert texts == [f"{summary.session_id} {number}" for number in range(20)]
                assert summary.latest_event_sequence == 20

    trio.run(check)


def test_processes_come_and_go(tmp_path: Path, processes: Nursery) -> None:
    """Whoever closes the file last empties its log; nobody who opens it then is refused."""
    path, visits = str(tmp_path / "s.db"), f"{POINTS * 2}"
    said = processes.together(*[("visits", path, f"p{number}", visits) for number in range(8)])
    assert said.count("done\n") == 8


async def test_two_stores_of_one_process_keep_what_they_save_from_visitors(
    tmp_path: Path, processes: Nursery
) -> None:
    """The second of them opens the file while the first one holds it.

    Mutant: a store that opened and closed the file by itself took the locks of the other
    one away. A visitor then believed to be alone and deleted the log that was being
    written: what was saved afterwards was nowhere.
    """
    path = str(tmp_path / "s.db")

    async def elsewhere(*command: str) -> list[str]:
        return await trio.to_thread.run_sync(processes.together, command)

    async with SqliteCheckpoint(path) as first:
        checkpoint = await begin(first)
        async with SqliteCheckpoint(path) as second:
            assert await second.load("s") == checkpoint
            await elsewhere("visits", path, "p", "1")
            for store in (first, second, first):
                checkpoint = following(checkpoint)
                await store.save(checkpoint)
            assert f"sees s {checkpoint.sequence}\n" in await elsewhere("looks", path, "s")


def test_two_migrate_at_once(tmp_path: Path, processes: Nursery) -> None:
    """Each step runs once, whoever runs it."""
    fresh, path = tmp_path / "fresh.db", tmp_path / "s.db"
    prepare(fresh, migrations=(*MIGRATIONS, *SLOW_STEPS))
    prepare(path)
    said = processes.together(*[("migrate", str(path), *SLOW_STEPS)] * 4)
    assert said.count("done\n") == 4
    assert schema_of(path) == schema_of(fresh)


class Holder:
    """A process that holds a session and saves when it is told to."""

    def __init__(self, path: Path, session_id: str) -> None:
        self.nursery = Nursery()
        self.nursery.write(json.dumps([["hold", str(path), session_id]]))
        word, pid = self.nursery.output.readline().split()
        assert word == "pid"
        self.pid = int(pid)
        assert self.hears() == "held"

    def hears(self) -> str:
        return self.nursery.output.readline().strip()

    def save(self) -> None:
        self.nursery.write("save")

    def close(self) -> None:
        self.nursery.close()


def test_a_dead_owner_needs_no_clean_up(tmp_path: Path) -> None:
    """While it lives the second opener is refused by name; once it is killed, it is not."""
    path = tmp_path / "s.db"
    holder = Holder(path, "s")
    holder.save()
    assert holder.hears() == "saved 0"

    async def refused() -> str:
        async with SqliteCheckpoint(path) as store:
            with pytest.raises(SessionOwnedError) as caught:
                await store.claim("s", "second")
            return str(caught.value)

    message = trio.run(refused)
    assert "the holder" in message
    assert str(holder.pid) in message
    os.kill(holder.pid, signal.SIGKILL)
    assert holder.hears().startswith("exit")

    async def granted() -> None:
        async with SqliteCheckpoint(path) as store:
            lease = await store.claim("s", "second")
            await store.save(Checkpoint(session_id="s", sequence=1), lease=lease)

    trio.run(granted)
    holder.close()


def test_a_stopped_owner_that_was_replaced_writes_nothing(tmp_path: Path) -> None:
    """SIGSTOP: it lives, so it must be taken over; SIGCONT: it learns that it lost."""
    path = tmp_path / "s.db"
    holder = Holder(path, "s")
    holder.save()
    assert holder.hears() == "saved 0"
    os.kill(holder.pid, signal.SIGSTOP)

    async def take() -> None:
        async with SqliteCheckpoint(path) as store:
            with pytest.raises(SessionOwnedError):
                await store.claim("s", "second")
            lease = await store.claim("s", "second", takeover=True)
            os.kill(holder.pid, signal.SIGCONT)
            holder.save()
            heard = {await trio.to_thread.run_sync(holder.hears) for _ in range(2)}
            assert heard == {"lost SessionOwnedError", "refused StaleSessionError"}
            await store.save(Checkpoint(session_id="s", sequence=1), lease=lease)
            assert (await store.load("s")) == Checkpoint(session_id="s", sequence=1)

    trio.run(take)
    holder.close()


@contextlib.contextmanager
def foreign_lock(path: Path) -> Generator[sqlite3.Connection]:
    """Hold the write lock of *path*, as another program might."""
    with contextlib.closing(
        sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    ) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


async def test_a_foreign_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with SqliteCheckpoint(path) as store:
        await store.save(Checkpoint.empty("s"))
        with foreign_lock(path) as lock:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.save, Checkpoint(session_id="s", sequence=1))
                # readers do not wait for writers, whoever these are
                assert await store.load("s") == Checkpoint.empty("s")
                async with SqliteCheckpoint(path) as other:
                    assert await other.load("s") == Checkpoint.empty("s")
                await trio.sleep(3)  # the length of the lock is the case
                lock.execute("ROLLBACK")
        assert await store.load("s") == Checkpoint(session_id="s", sequence=1)


async def test_a_lock_held_too_long_is_told_and_leaves_nothing_half_saved(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.db"
    async with SqliteCheckpoint(path) as store:
        await store.save(Checkpoint.empty("s"))
        with foreign_lock(path):
            with pytest.raises(CheckpointError) as caught:
                await store.save(Checkpoint(session_id="s", sequence=1))
            assert str(path) in str(caught.value)
            assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
        assert await store.load("s") == Checkpoint.empty("s")
        await store.save(Checkpoint(session_id="s", sequence=1))
        assert await store.verify() == ()


def schema_of(path: Path) -> object:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM extra_{step}").fetchone()
            for step in (1, 2, 3)
        ]
        version = connection.execute("PRAGMA user_version").fetchone()
        rows = connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name")
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return version, counts, rows.fetchall()
