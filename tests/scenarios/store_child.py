"""Processes for the store's scenarios.

``python store_child.py`` reads lines from standard input, each a JSON list of
commands; it forks one process a command, which costs far less than an
interpreter, and tells when all of them have ended. A process prints one line for each
thing that it has done, so that the parent knows what was acknowledged before it kills.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from trio_agent import AgentConfig, create_agent, tool
from trio_agent.errors import AgentError
from trio_agent.protocol.events import Draft, Notice
from trio_agent.protocol.items import AssistantItem, Item, UserItem
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.schema import MIGRATIONS, prepare
from trio_agent.testing.models import ScriptedModel, ScriptEntry, StrictModel, call
from trio_agent.testing.store_parts import following


def tell(*words: object) -> None:
    """Print a line in one write, so that a kill leaves all of it or nothing."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def save(path: str, *names: str) -> None:
    """Save turn after turn in several sessions at once, until killed."""
    store = SqliteCheckpoint(path)
    tell("go")

    async def run(name: str) -> None:
        lease = await store.claim(name, "child", takeover=True)
        checkpoint = await store.load(name) or Checkpoint(session_id=name, sequence=-1)
        while True:
            number = checkpoint.sequence + 1
            added: list[Item] = [UserItem(text=f"{number}")]
            added.append(AssistantItem(text="a" * (number % 7) * 500))
            checkpoint = following(checkpoint, *added)
            event = Draft(recorded_at_ms=1, msg=Notice(capability="c", text=f"{number}"))
            await store.save(checkpoint, added, lease=lease, events=[event])
            tell("saved", name, number)

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(run, name)


async def turns(path: str, label: str, sessions: str, count: str) -> None:
    """Save *count* turns in each of *sessions* sessions, then end in order."""
    async with SqliteCheckpoint(path) as store:

        async def run(name: str) -> None:
            lease = await store.claim(name, label)
            checkpoint = Checkpoint(session_id=name, sequence=-1)
            for number in range(int(count)):
                added = [UserItem(text=f"{name} {number}")]
                checkpoint = following(checkpoint, *added)
                event = Draft(recorded_at_ms=1, msg=Notice(capability="c", text=name))
                await store.save(checkpoint, added, lease=lease, events=[event])
            await store.release(lease)

        async with trio.open_nursery() as nursery:
            for number in range(int(sessions)):
                nursery.start_soon(run, f"{label}-{number}")
    tell("done")


async def agents(path: str, label: str, sessions: str, count: str) -> None:
    """Run *count* turns in each of *sessions* sessions, every second one with a tool.

    Tells each turn as whoever called it heard of it.
    """

    @tool
    async def look(at: str) -> str:
        await trio.lowlevel.checkpoint()
        return f"looked at {at}"

    async with SqliteCheckpoint(path) as store:

        async def run(name: str) -> None:
            script: list[ScriptEntry] = []
            for number in range(int(count)):
                if number % 2:
                    script.append([call("look", {"at": f"{number}"})])
                script.append(f"answer {number}")
            model = StrictModel(ScriptedModel(*script))
            config = AgentConfig(model=model, checkpoints=store, session_id=name, tools=(look,))
            async with create_agent(config) as agent:
                for number in range(int(count)):
                    result = await agent.run(f"question {number}")
                    tell("turn", name, number, result.outcome)
            if model.refusals:
                tell("refused", name, *model.refusals)

        async with trio.open_nursery() as nursery:
            for number in range(int(sessions)):
                nursery.start_soon(run, f"{label}-{number}")
    tell("done")


async def visits(path: str, name: str, count: str) -> None:
    """Open the file, hold a session for a moment, and close the file, *count* times."""
    for _ in range(int(count)):
        store = SqliteCheckpoint(path)
        try:
            await store.release(await store.claim(name, "a visitor"))
        finally:
            await store.aclose()
    tell("done")


async def looks(path: str, name: str) -> None:
    """Tell at which save a session is."""
    async with SqliteCheckpoint(path) as store:
        checkpoint = await store.load(name)
        tell("sees", name, None if checkpoint is None else checkpoint.sequence)


async def migrate(path: str, *steps: str) -> None:
    """Bring the file to a made-up version."""
    tell("go")
    prepare(Path(path), migrations=(*MIGRATIONS, *steps))
    tell("done")


async def hold(path: str, name: str) -> None:
    """Claim a session, save once a line of standard input, and tell when it is lost."""
    async with SqliteCheckpoint(path) as store:
        lease = await store.claim(name, "the holder")
        checkpoint = await store.load(name) or Checkpoint(session_id=name, sequence=-1)
        async with trio.open_nursery() as nursery:

            async def guard() -> None:
                try:
                    await store.guard(lease)
                except AgentError as exc:
                    tell("lost", type(exc).__name__)

            nursery.start_soon(guard)
            tell("held")
            while await trio.to_thread.run_sync(sys.stdin.readline):
                checkpoint = following(checkpoint)
                try:
                    await store.save(checkpoint, lease=lease)
                    tell("saved", checkpoint.sequence)
                except AgentError as exc:
                    tell("refused", type(exc).__name__)
            nursery.cancel_scope.cancel()


COMMANDS: dict[str, Callable[..., Awaitable[None]]] = {
    "save": save,
    "turns": turns,
    "agents": agents,
    "looks": looks,
    "visits": visits,
    "migrate": migrate,
    "hold": hold,
}


def serve() -> None:
    """Fork a process for each command of a line, and wait for all of them."""
    for line in sys.stdin:
        for words in json.loads(line):
            if os.fork() == 0:
                run(words)
        while True:
            try:
                pid, status = os.wait()
            except ChildProcessError:
                break
            tell("exit", pid, os.waitstatus_to_exitcode(status))
        tell("all ended")


def run(words: list[str]) -> None:
    """Run one command in this process, and end it."""
    code = 0
    try:
        tell("pid", os.getpid())
        trio.run(COMMANDS[words[0]], *words[1:])
    except BaseException:  # noqa: ASYNC103  # the process ends here
        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
