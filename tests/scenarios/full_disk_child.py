"""A turn with calls, on a disk with ever more space: ``python full_disk_child.py DIR``.

*DIR* is a small file system of its own. Prints one JSON line for each amount of space:
what the turn ended in, which of its calls ran, and what the same process finds
afterwards, with space again. A session is new or has a turn already; each opening has a
store of its own, or one store stays open.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sqlite3
import sys
import tempfile
from pathlib import Path

import trio

from trio_agent import AgentConfig, AgentError, create_agent, tool
from trio_agent.protocol.items import ToolCallItem
from trio_agent.store import SqliteCheckpoint
from trio_agent.testing.models import ScriptedModel, call

STEP_BYTES = 8_192
MOST_BYTES = 500_000
"""More than a new file and a turn take."""


def leave(disk: Path, free: int, before: bytes | None) -> Path:
    """Fill *disk* but for *free* bytes, beside a file that holds *before*; return its path."""
    for file in disk.iterdir():
        file.unlink()
    path = disk / "s.db"
    if before is not None:
        path.write_bytes(before)
    state = os.statvfs(disk)
    (disk / "filling").write_bytes(bytes(state.f_bavail * state.f_frsize - free))
    return path


def cause(exc: BaseException | None) -> str | None:
    """Return what SQLite called the failure that is behind *exc*."""
    while exc is not None and not isinstance(exc, sqlite3.Error):
        exc = exc.__cause__
    return None if exc is None else exc.sqlite_errorname


async def turn(store: Path | SqliteCheckpoint, name: str, ran: list[str]) -> str:
    """Run a turn that calls a tool twice, and say how it ended."""

    @tool(effect="destructive")
    async def note(text: str) -> str:
        await trio.lowlevel.checkpoint()
        ran.append(text)
        return text * 1_000

    calls = [call("note", {"text": f"{name} {number}"}) for number in range(2)]
    config = AgentConfig(
        model=ScriptedModel(calls[:1], calls[1:], "done"),
        checkpoints=store,
        session_id="s",
        tools=[note],
    )
    async with create_agent(config) as agent:
        return (await agent.run(f"go {name}")).outcome


async def try_with(
    disk: Path, free: int, before: bytes | None, *, stays_open: bool
) -> dict[str, object]:
    """Run a turn on a disk with *free* bytes; then give it space and run another."""
    path = leave(disk, free, before)
    ran: list[str] = []
    told: dict[str, object] = {"created": before is None, "free": free}
    async with contextlib.aclosing(SqliteCheckpoint(path)) as store:
        place = store if stays_open else path
        try:
            told["outcome"] = await turn(place, "first", ran)
        except AgentError as exc:
            told |= {"error": type(exc).__name__, "cause": cause(exc), "message": str(exc)}
        told["ran"] = list(ran)
        (disk / "filling").unlink()
        told["then"] = await turn(place, "second", ran)
        found = await store.load("s")
        assert found is not None
        told["saved"] = [
            item.arguments["text"] for item in found.context if isinstance(item, ToolCallItem)
        ]
        told["problems"] = await store.verify()
    return told


def main(disk: Path) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        path = Path(elsewhere, "s.db")
        trio.run(turn, path, "earlier", [])
        stored = path.read_bytes()
    for before, stays_open in itertools.product((None, stored), (False, True)):
        attempt = functools.partial(try_with, stays_open=stays_open)
        for free in range(0, MOST_BYTES, STEP_BYTES):
            sys.stdout.write(json.dumps(trio.run(attempt, disk, free, before)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
