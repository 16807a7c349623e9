"""Reports about stores: locks, damage, two owners, and names that looked like paths."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.scenarios.story import (
    Strict,
    World,
    configure,
    executions,
    journal,
    messages,
    outputs,
    stored,
)
from trio_agent import (
    AgentConfig,
    CheckpointError,
    ConfigError,
    CorruptStoreError,
    SessionBrokenError,
    SessionOwnedError,
    SqliteCheckpoint,
    create_agent,
)
from trio_agent.protocol import texts
from trio_agent.protocol.events import UserMessage
from trio_agent.store.base import CheckpointStore
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import Step, call, stall

DEADLINE = 60


@contextlib.contextmanager
def foreign_lock(path: Path) -> Iterator[sqlite3.Connection]:
    """Hold the write lock of *path*, as another program might."""
    with contextlib.closing(
        sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    ) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


async def test_a_lock_that_is_given_back_costs_nothing_but_time(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    model = Strict("one", "two")
    with trio.fail_after(DEADLINE):
        async with SqliteCheckpoint(path) as store:
            async with create_agent(configure(model, store)) as agent:
                await agent.run("first")
                with foreign_lock(path) as lock:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(agent.run, "second")
                        await trio.sleep(1)  # the length of the lock is the case
                        lock.execute("ROLLBACK")
            turns = await executions(store)
    assert [turn.outcome for turn in turns] == ["completed", "completed"]


async def test_a_lock_held_too_long_is_an_error_and_never_a_success(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    model = Strict("one", "two", "three")
    with trio.fail_after(DEADLINE):
        async with SqliteCheckpoint(path) as store:
            with pytest.raises(SessionBrokenError) as broken:
                async with create_agent(configure(model, store)) as agent:
                    await agent.run("first")
                    before = await stored(store)
                    with foreign_lock(path):
                        await agent.run("second")
            assert isinstance(broken.value.__cause__, CheckpointError)
            assert await stored(store) == before, "something was half saved"
            async with create_agent(configure(model, store)) as agent:
                assert (await agent.run("third")).outcome == "completed"
            told = [msg.text for msg in await messages(store, UserMessage)]
    assert told == ["first", "third"]
    assert not model.refusals


# --- a damaged record

DAMAGED = {
    "a message in the middle": "UPDATE item SET body=:bad WHERE n=8 AND session=:s",
    "the first": "UPDATE item SET body=:bad WHERE n=1 AND session=:s",
    "the last": "UPDATE item SET body=:bad WHERE n=(SELECT max(n) FROM item) AND session=:s",
    "a tool's result": "UPDATE item SET body=:bad WHERE kind='tool_output' AND session=:s",
    "bookkeeping": "UPDATE session SET stats=:bad WHERE id=:s",
}


@pytest.mark.parametrize("what", DAMAGED)
async def test_a_damaged_record_is_never_a_shorter_history(tmp_path: Path, what: str) -> None:
    """Opening is refused, the damage stays as it is, and others open as ever."""
    path = tmp_path / "s.db"
    script = [f"answer {n}" for n in range(9)]
    tools = (World().tool("ok"),)
    async with SqliteCheckpoint(path) as store:
        model = Strict([call("ok")], *script, "ten")
        async with create_agent(configure(model, store, tools=tools)) as agent:
            for n in range(10):
                await agent.run(f"turn {n}")
        other = configure(Strict("one", "two"), store, session_id="other")
        async with create_agent(other) as agent:
            await agent.run("go")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        (row,) = connection.execute("SELECT id FROM session WHERE key='s'").fetchone()
        values = {"bad": b'{"role":"assi', "s": row}
        assert connection.execute(DAMAGED[what], values).rowcount == 1
        rows = "SELECT body FROM item WHERE session=?"
        damaged = connection.execute(rows, (row,)).fetchall()
        model = Strict("never")
        async with SqliteCheckpoint(path) as store:
            with pytest.raises(CorruptStoreError) as refused:
                async with create_agent(configure(model, store)) as agent:
                    await agent.run("go on")
            assert "'s'" in str(refused.value) or "s" in str(refused.value).split()
            async with create_agent(other_in(store)) as agent:
                assert (await agent.run("again")).outcome == "completed"
        assert connection.execute(rows, (row,)).fetchall() == damaged
    assert not model.requests


def other_in(store: CheckpointStore) -> AgentConfig:
    return configure(Strict("two"), store, session_id="other")


# --- two owners

HOLDER = """
import sys, trio
from trio_agent import AgentConfig, SqliteCheckpoint, UserInput, create_agent, tool
from trio_agent.testing.models import ScriptedModel, call

@tool
async def slow() -> str:
    print("entered", flush=True)
    await trio.sleep_forever()
    return ""

async def main():
    async with SqliteCheckpoint(sys.argv[1]) as store:
        model = ScriptedModel([call("slow")])
        config = AgentConfig(model=model, checkpoints=store, session_id="s", tools=[slow])
        async with create_agent(config) as agent:
            await agent.run("of the first")

trio.run(main)
"""


async def test_a_session_of_a_live_process_is_refused_and_of_a_dead_one_taken_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.db"
    tools = (World().tool("slow"),)
    model = Strict("of the second")
    with trio.fail_after(DEADLINE):
        first = await trio.lowlevel.open_process(
            [sys.executable, "-c", HOLDER, str(path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        try:
            assert first.stdout is not None
            assert await first.stdout.receive_some(), "it never entered its tool"
            async with SqliteCheckpoint(path) as store:
                before = await journal(store)
                with pytest.raises(SessionOwnedError) as refused:
                    async with create_agent(configure(model, store, tools=tools)) as agent:
                        await agent.run("never")
                assert str(first.pid) in str(refused.value), "it says who"
                assert await journal(store) == before
                first.send_signal(signal.SIGKILL)
                await first.wait()
                async with create_agent(configure(model, store, tools=tools)) as agent:
                    assert (await agent.run("mine")).text == "of the second"
                told = [msg.text for msg in await messages(store, UserMessage)]
                outcomes = [turn.outcome for turn in await executions(store)]
        finally:
            first.kill()
            with trio.move_on_after(DEADLINE, shield=True):
                await first.wait()
                if first.stdout is not None:
                    await first.stdout.aclose()
    assert told == ["of the first", "mine"]
    assert outcomes == ["aborted", "completed"]
    assert outputs(model.requests[-1].items) == [texts.UNKNOWN_AFTER_RESTART]
    assert not model.refusals


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_two_openings_of_one_process_do_not_mix_either(tmp_path: Path, kind: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store: CheckpointStore = MemoryCheckpoint()
        if kind == "sqlite":
            store = await stack.enter_async_context(SqliteCheckpoint(tmp_path / "s.db"))
        async with create_agent(configure(Strict("one", "two"), store)) as agent:
            await agent.run("first")
            with pytest.raises(SessionOwnedError):
                async with create_agent(configure(Strict(), store)):
                    raise AssertionError("two owners")
            assert (await agent.run("second")).text == "two"


async def test_whoever_loses_a_session_writes_nothing_more(tmp_path: Path) -> None:
    asked, lost = trio.Event(), list[BaseException]()

    async def hold(store: CheckpointStore) -> None:
        model = Strict([until_asked(asked), stall()])
        with pytest.raises(SessionBrokenError) as caught:
            async with create_agent(configure(model, store)) as agent:
                await agent.run("of the old owner")
        lost.append(caught.value)

    with trio.fail_after(DEADLINE):
        async with (
            SqliteCheckpoint(tmp_path / "s.db") as old,
            SqliteCheckpoint(tmp_path / "s.db") as new,
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hold, old)
                await asked.wait()
                config = configure(Strict("of the new owner"), new, takeover=True)
                async with create_agent(config) as taker:
                    assert (await taker.run("mine")).outcome == "completed"
                after = await journal(new)
            assert await journal(new) == after
            outcomes = [turn.outcome for turn in await executions(new)]
    assert isinstance(lost[0].__cause__, SessionOwnedError)
    assert outcomes == ["aborted", "completed"]


def until_asked(event: trio.Event) -> Step:
    async def step(answer: object, emit: object) -> None:
        await trio.lowlevel.checkpoint()
        event.set()

    return step


# --- names

NAMES = [
    "../../x",
    "/abs",
    "a/b",
    "a\\b",
    ".",
    "..",
    "NUL",
    "\N{GRINNING FACE}",
    unicodedata.normalize("NFC", "caf\u00e9"),
    unicodedata.normalize("NFD", "caf\u00e9"),
    "A",
    "a",
    " a",
    "x" * 255,
]


async def test_names_are_only_names_and_compared_byte_by_byte(tmp_path: Path) -> None:
    folder = tmp_path / "inner" / "store"
    folder.mkdir(parents=True)
    async with SqliteCheckpoint(folder / "s.db") as store:
        for n, name in enumerate(NAMES):
            config = configure(Strict(f"answer {n}"), store, session_id=name)
            async with create_agent(config) as agent:
                await agent.run(f"message {n}")
        for n, name in enumerate(NAMES):
            told = [msg.text for msg in await messages(store, UserMessage, name)]
            assert told == [f"message {n}"]
        listed = {one.session_id for one in (await store.list_sessions(limit=100)).sessions}
    assert listed == set(NAMES)
    assert all(path.startswith("inner/store/s.db") for path in files_in(tmp_path))


def files_in(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    "name", ["", "x" * 256, "\u00e9" * 128, "a\0b", "a\nb", "\x7f", "\ud83d"]
)
def test_impossible_names_are_refused_before_anything_is_opened(name: str) -> None:
    with pytest.raises(ConfigError):
        configure(Strict(), session_id=name)
