"""Makes the file of the newest schema, as a released version leaves it behind.

usage: python -m tests.unit.store.released.make

It writes ``version_N.db.gz``, a file whose process was killed in the middle of a turn,
and ``version_N.json``, all that its users had been told. Run it whenever the newest
schema changes before that reaches ``main``, and never again for one that did: those
files stay as they are.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from trio_agent import AgentConfig, SqliteCheckpoint, create_agent, tool
from trio_agent.protocol.codec import unstructure
from trio_agent.protocol.events import AgentMessageDelta, Event, ModelStepCompleted
from trio_agent.protocol.items import UserItem
from trio_agent.state.checkpoint import AgentRole, Checkpoint, QueuedMessage
from trio_agent.store.schema import MIGRATIONS
from trio_agent.testing.crashes import in_child
from trio_agent.testing.models import ScriptedModel, call, text, think
from trio_agent.testing.store_parts import begin, draft, following, note, save_turns

HERE = Path(__file__).parent
CUT_OFF = "cut off"
"""The session whose process was killed while a tool ran."""


async def fill(store: SqliteCheckpoint) -> None:
    """Leave a row of every kind in *store*, then die."""
    talk = AgentConfig(
        model=ScriptedModel(
            [think("hm"), call("look", {"at": "the door"})], "It is open.", "You're welcome."
        ),
        checkpoints=store,
        session_id="talk",
        metadata={"project": ["door", 1]},
        tools=(look,),
    )
    async with create_agent(talk) as agent:
        await agent.run("Is the door open?")
        await agent.run("Thanks \N{GRINNING FACE}")
    await store.rename_session("talk", "The door")
    await store.fork("talk", (await at(store, "talk")) - 1, "fork of talk")
    long = await save_turns(store, await begin(store, "long"), 30)
    summary = [UserItem(text="what happened so far", internal="summary")]
    long = attrs.evolve(following(long), context=summary, context_epoch=1)
    await store.save(long, summary, contents={"d": "instructions " * 100})
    await store.prune("long", keep_events=5)
    await store.save_state("global", "k", {"v": [1, None, "x"]})
    await save_turns(store, await begin(store, "rewound"), 3)
    await store.rewind("rewound", 1)
    await begin(store, "gone")
    await store.delete_session("gone")
    message = QueuedMessage(owner="o", id="q", boundary="queue", text="waits " * 1_000)
    role = AgentRole.subagent("talk", "t")
    waiting = Checkpoint(session_id="waiting", role=role, queue=(message,), states={"m": [1]})
    await store.save(waiting, events=[note("of no step")])
    piece = AgentMessageDelta(turn_id="t", step_id="p", text="half an ans")
    failed = ModelStepCompleted(
        turn_id="t",
        step_id="p",
        step_index=0,
        outcome="failed",
        started_at_ms=1,
        completed_at_ms=2,
    )
    await store.append_events("waiting", [draft(piece), draft(failed)])
    cut = AgentConfig(
        model=ScriptedModel([text("I will.", commentary=True), call("die")]),
        checkpoints=store,
        session_id=CUT_OFF,
        tools=(die,),
    )
    async with create_agent(cut) as agent:
        await agent.run("Do it.")


@tool
async def look(at: str) -> str:
    """Look at something."""
    await trio.lowlevel.checkpoint()
    return f"{at} stands open"


@tool
async def die() -> str:
    """Die as a process does that somebody kills."""
    await trio.lowlevel.checkpoint()
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


async def at(store: SqliteCheckpoint, session_id: str) -> int:
    """Return at which save a session is."""
    checkpoint = await store.load(session_id)
    assert checkpoint is not None
    return checkpoint.sequence


async def facts(store: SqliteCheckpoint) -> dict[str, Any]:
    """Return what a user of *store* can read of it, as JSON values."""
    sessions: dict[str, Any] = {}
    for summary in (await store.list_sessions()).sessions:
        name = summary.session_id
        checkpoint = await store.load(name)
        assert checkpoint is not None
        sessions[name] = {
            "title": summary.title,
            "first": summary.first_user_message,
            "parent": [summary.parent_session_id, summary.parent_sequence, summary.subagent],
            "sequence": checkpoint.sequence,
            "epoch": checkpoint.context_epoch,
            "context": [unstructure(item) for item in checkpoint.context],
            "queue": [message.text for message in checkpoint.queue],
            "calls": [[call.name, call.status] for call in checkpoint.pending_tools],
            "turn": checkpoint.turn_id,
            "states": checkpoint.states,
            "metadata": checkpoint.metadata,
            "runs": checkpoint.execution_stats.run_count,
            "events": [unstructure(event) for event in await events(store, name)],
            "turns": [
                [turn.submission_id, turn.outcome]
                for turn in (await store.execution_page(name, limit=1_000)).executions
            ],
        }
    found = {
        "sessions": sessions,
        "state": await store.load_state("global", "k"),
        "content": await store.load_content("d"),
    }
    return json.loads(msgspec.json.encode(found))  # type: ignore[no-any-return]


async def events(store: SqliteCheckpoint, session_id: str) -> list[Event]:
    """Return all events of a session that have a row."""
    found: list[Event] = []
    position = 0
    while True:
        part = await store.events_after(session_id, position, 100)
        found += part.events
        position = part.position
        if position == part.latest_sequence:
            return found


def main() -> None:
    """Write both files of the newest version."""
    name = f"version_{len(MIGRATIONS)}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "s.db")

        async def live() -> None:
            async with SqliteCheckpoint(path) as store:
                await fill(store)

        async def tell() -> None:
            async with SqliteCheckpoint(path) as store:
                told = await facts(store)
            lines = json.dumps(told, ensure_ascii=False).replace('{"title"', '\n{"title"')
            (HERE / f"{name}.json").write_text(lines + "\n", encoding="utf-8")

        assert in_child(lambda: trio.run(live)) is None, "it was not killed"
        trio.run(tell)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        packed = gzip.compress(path.read_bytes(), mtime=0)
        (HERE / f"{name}.db.gz").write_bytes(packed)


if __name__ == "__main__":
    main()
