"""What the disk, the system and other programs can do to the file: each is told by name."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio

from trio_agent.errors import CheckpointError, ConfigError, CorruptStoreError, StoreVersionError
from trio_agent.protocol.events import UserMessage
from trio_agent.protocol.items import AssistantItem, UserItem
from trio_agent.state.checkpoint import Checkpoint, QueuedMessage
from trio_agent.store import MemoryCheckpoint, SqliteCheckpoint
from trio_agent.store.schema import _use_wal
from trio_agent.testing.store_parts import begin, draft, following, note, save_turns


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Give up root's right to write everywhere."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


async def two_sessions(store: SqliteCheckpoint) -> Checkpoint:
    """Save ten turns of "s", with a long queue, and a bystander."""
    await begin(store, "bystander")
    checkpoint = await save_turns(store, await begin(store), 10)
    message = QueuedMessage(owner="m", id="q", boundary="queue", text="long " * 1_000)
    checkpoint = following(checkpoint, queue=(message,))
    await store.save(checkpoint, contents={"d": "prompt"})
    told = [UserItem(text=f"{number}" * 99) for number in range(2)]
    checkpoint = following(checkpoint, *told)
    drafts = [
        draft(UserMessage(turn_id="t", text=item.text), submission_id=f"m{number}")
        for number, item in enumerate(told)
    ]
    await store.save(checkpoint, told, events=drafts)
    checkpoint = following(checkpoint, UserItem(text="2" * 99))
    drafts = [draft(UserMessage(turn_id="t", text="2" * 99)), note("beside it")]
    await store.save(checkpoint, checkpoint.context[-1:], events=drafts)
    await store.save_state("s", "k", [1])
    return checkpoint


async def test_no_space_left(tmp_path: Path) -> None:
    """Earlier turns stay whole, others still open, and with space it goes on."""
    async with SqliteCheckpoint(tmp_path / "s.db") as store:
        checkpoint = await two_sessions(store)
        connection = store._writer().connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + 5}")
        with pytest.raises(CheckpointError) as caught:
            while True:
                after = following(checkpoint, AssistantItem(text="x" * 4_000))
                await store.save(after, after.context[-1:], events=[note("x" * 4_000)])
                checkpoint = after
        assert str(store.path) in str(caught.value)
        assert await store.load("s") == checkpoint
        assert await store.load("bystander") == Checkpoint.empty("bystander")
        assert await store.verify() == ()
        # the connection that saw the fault was dropped, and the limit with it
        await store.save(after, after.context[-1:])
        assert await store.load("s") == after


async def test_the_disk_fails_in_the_middle(tmp_path: Path) -> None:
    async with SqliteCheckpoint(tmp_path / "s.db") as store:
        checkpoint = await two_sessions(store)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        big = following(checkpoint, AssistantItem(text="x" * 3_000_000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limit[1]))
        try:
            with pytest.raises(CheckpointError) as caught:
                await store.save(big, big.context[-1:])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert str(store.path) in str(caught.value)
        assert await store.load("s") == checkpoint
        assert await store.verify() == ()
        await store.save(big, big.context[-1:])
        assert await store.load("s") == big


@pytest.mark.parametrize("what", ["file", "directory"])
async def test_read_only(tmp_path: Path, what: str) -> None:
    """It is told when the session is opened, before anything else can happen."""
    tmp_path.chmod(0o777)  # noqa: ASYNC240
    for parent in list(tmp_path.parents)[:3]:  # also the one of a parallel worker
        parent.chmod(0o755)
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    path = folder / "s.db"
    with unprivileged():
        async with SqliteCheckpoint(path) as store:
            await begin(store)
    (path if what == "file" else folder).chmod(0o444 if what == "file" else 0o555)
    with unprivileged():
        async with contextlib.aclosing(SqliteCheckpoint(path)) as store:
            with pytest.raises(CheckpointError) as caught:
                await store.claim("s", "me")
    assert str(path) in str(caught.value)
    folder.chmod(0o777)
    path.chmod(0o600)
    with unprivileged():
        async with SqliteCheckpoint(path) as store:
            assert await store.load("s") == Checkpoint.empty("s")


async def test_paths_that_cannot_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "s.db"):
        async with contextlib.aclosing(SqliteCheckpoint(path)) as store:
            with pytest.raises(CheckpointError) as caught:
                await store.load("s")
        assert str(path) in str(caught.value)


async def test_files_of_others_are_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no database at all, but long enough to have a header\n" * 10)
    foreign = tmp_path / "foreign.db"
    with contextlib.closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE theirs(x)")
    versioned = tmp_path / "versioned.db"
    with contextlib.closing(sqlite3.connect(versioned)) as connection:
        connection.execute("PRAGMA user_version=1")
    newer = tmp_path / "newer.db"
    async with SqliteCheckpoint(newer) as store:
        await begin(store)
    with contextlib.closing(sqlite3.connect(newer)) as connection:
        connection.execute("PRAGMA user_version=99")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for path in (text, foreign, versioned, newer):
        before = path.read_bytes()
        async with contextlib.aclosing(SqliteCheckpoint(path)) as store:
            with pytest.raises(StoreVersionError) as caught:
                await store.load("s")
        assert str(path) in str(caught.value)
        assert path.read_bytes() == before


def test_no_write_ahead_log_to_be_had(tmp_path: Path) -> None:
    """SQLite itself says so: a database in memory has none, as on a network disk."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        with pytest.raises(CheckpointError) as caught:
            _use_wal(connection, tmp_path)
    assert str(tmp_path) in str(caught.value)


DAMAGES = {
    "first item": "UPDATE item SET body=:bad WHERE n=1 AND session=:s",
    "item in the middle": "UPDATE item SET body=:bad WHERE n=8 AND session=:s",
    "last item": "UPDATE item SET body=:bad WHERE n=20 AND session=:s",
    "an item's kind": "UPDATE item SET kind='assistant' WHERE n=1 AND session=:s",
    "an item is gone": "DELETE FROM item WHERE n=8 AND session=:s",
    "head": "UPDATE session SET head=:bad WHERE id=:s",
    "statistics": "UPDATE session SET stats=:bad WHERE id=:s",
    "a number": "UPDATE session SET sequence=sequence-1 WHERE id=:s",
    "labels": "UPDATE label SET body=:bad WHERE session=:s",
    "labels are gone": "DELETE FROM label WHERE session=:s",
    "queued message": "UPDATE part SET body=:bad WHERE session=:s",
    "queued message is gone": "DELETE FROM part WHERE session=:s",
}
"""Damage that the opening of the session must notice."""

LATER_DAMAGES = {
    "event": "UPDATE event SET body=:bad WHERE sequence=4 AND session=:s",
    "an event's time": "UPDATE event SET at=at+1 WHERE sequence=4 AND session=:s",
    "an event's submission": "UPDATE event SET submission='x' WHERE sequence=4 AND session=:s",
    "the item that an event quotes": (
        "UPDATE event SET item=item-1 WHERE session=:s AND sequence=12"
    ),
    "no item that an event quotes": "UPDATE event SET item=99 WHERE session=:s AND item>1",
    "an event's kind": "UPDATE event SET kind=x'00' WHERE sequence=4 AND session=:s",
    "a pack of events": "UPDATE event SET body=:bad WHERE kind='pack' AND session=:s",
    "a pack's number": "UPDATE event SET sequence=99 WHERE kind='pack' AND session=:s",
    "a pack called an event": "UPDATE event SET kind='notice' WHERE kind='pack' AND session=:s",
    "finished turn": "UPDATE execution SET body=:bad WHERE sequence=4 AND session=:s",
    "content": "UPDATE content SET text='other'",
    "state": "UPDATE state SET value=:bad",
}
"""Damage that only its readers notice."""


@pytest.mark.parametrize("what", [*DAMAGES, *LATER_DAMAGES])
@pytest.mark.parametrize("bad", [b'{"role":"assi', b"\xff\x00", b"{}"])
async def test_damaged_rows(tmp_path: Path, what: str, bad: bytes) -> None:
    """Never a shorter history without a word, and nothing damaged is overwritten."""
    path = tmp_path / "s.db"
    async with SqliteCheckpoint(path) as store:
        checkpoint = await two_sessions(store)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        (row,) = connection.execute("SELECT id FROM session WHERE key='s'").fetchone()
        sql = {**DAMAGES, **LATER_DAMAGES}[what]
        values = {"bad": bad, "s": row}
        changed = connection.execute(sql, {k: v for k, v in values.items() if f":{k}" in sql})
        assert changed.rowcount > 0
        damaged = dump(connection)
        async with SqliteCheckpoint(path) as store:
            if what in DAMAGES:
                with pytest.raises(CorruptStoreError):
                    await store.load("s")
            else:
                assert await store.load("s") == checkpoint
                with pytest.raises(CorruptStoreError):
                    await store.events_after("s", 0, 100)
                    await store.execution_page("s")
                    await store.load_content("d")
                    await store.load_state("s", "k")
            assert await store.verify() != ()
            assert await store.load("bystander") == Checkpoint.empty("bystander")
            listed = (await store.list_sessions()).sessions
            assert "bystander" in {summary.session_id for summary in listed}
        assert dump(connection) == damaged


def dump(connection: sqlite3.Connection) -> list[object]:
    tables = ("session", "label", "item", "part", "event", "execution", "content", "state")
    return [connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables]


async def test_a_file_cut_in_half(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with SqliteCheckpoint(path) as store:
        await two_sessions(store)
    os.truncate(path, path.stat().st_size // 2)
    async with contextlib.aclosing(SqliteCheckpoint(path)) as store:
        with pytest.raises(CorruptStoreError):
            await store.load("s")
            await store.events_after("s", 0, 100)


async def test_copied_without_its_log_is_whole_and_older(tmp_path: Path) -> None:
    path, copy = tmp_path / "s.db", tmp_path / "copy.db"
    async with SqliteCheckpoint(path) as store:
        checkpoint = await two_sessions(store)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        await store.save(following(checkpoint))
        shutil.copy(path, copy)
    async with SqliteCheckpoint(copy) as store:
        assert await store.load("s") == checkpoint
        assert await store.verify() == ()


async def test_backup_while_in_use(tmp_path: Path) -> None:
    """A copy is whole, private, free of owners, and overwrites nothing."""
    for store in (SqliteCheckpoint(tmp_path / "s.db"), MemoryCheckpoint()):
        target = tmp_path / f"{type(store).__name__}.db"
        async with store:
            checkpoint = await begin(store)
            await store.claim("s", "me")
            await store.save_state("global", "k", 1)
            async with trio.open_nursery() as nursery:

                async def write(store: object = store, first: Checkpoint = checkpoint) -> None:
                    assert isinstance(store, SqliteCheckpoint | MemoryCheckpoint)
                    await save_turns(store, first, 30)

                nursery.start_soon(write)
                await store.backup(target)
            with pytest.raises(ConfigError):
                await store.backup(target)
        assert target.stat().st_mode & 0o777 == 0o600
        async with SqliteCheckpoint(target) as copy:
            assert await copy.verify() == ()
            loaded = await copy.load("s")
            assert loaded is not None
            assert len(loaded.context) == 2 * loaded.sequence
            assert await copy.load_state("global", "k") == 1
            await copy.claim("s", "another")


async def test_files_are_private_and_leave_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "s.db"
    async with SqliteCheckpoint(path) as store:
        await begin(store)
        for file in path.parent.iterdir():
            assert file.stat().st_mode & 0o077 == 0
    assert [file.name for file in path.parent.iterdir()] == ["s.db"]
    with pytest.raises(CheckpointError):
        await store.load("s")


async def test_one_object_serves_successive_runs(tmp_path: Path) -> None:
    store = SqliteCheckpoint(tmp_path / "s.db")

    def run(sequence: int) -> None:
        async def main() -> None:
            await store.save(Checkpoint(session_id="s", sequence=sequence))

        trio.run(main)

    for sequence in range(3):
        await trio.to_thread.run_sync(run, sequence)
    loaded = await store.load("s")
    assert loaded == attrs.evolve(Checkpoint.empty("s"), sequence=2)
    await store.aclose()
