"""Many sessions in one process, each asking a model that takes 20 ms: how far from the floor.

The floor is the same number of hand-written loops without a database. Each turn asks twice
and runs one tool between, so waiting for the model alone takes five times 40 ms.

usage: python -m benchmarks.engine_sessions [sessions]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import attrs
import trio

from benchmarks.engine_step import read_file, script
from benchmarks.lean import Database, Loop
from benchmarks.workload import USER, median, report, rounded
from trio_agent import AgentConfig, ModelOutput, ModelRequest, create_agent
from trio_agent.model.base import Emit
from trio_agent.protocol.items import UserItem
from trio_agent.store import MemoryCheckpoint, SqliteCheckpoint

ROUNDS = 3
TURNS = 5
ANSWER_SECONDS = 0.02
ASKS, ANSWERS = script(1)


@attrs.frozen
class SlowModel:
    """Asks for a tool, and answers once it has the result."""

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:  # noqa: ARG002
        await trio.sleep(ANSWER_SECONDS)
        return ASKS if isinstance(request.items[-1], UserItem) else ANSWERS


async def ours(sessions: int, store: MemoryCheckpoint | SqliteCheckpoint) -> None:
    async def one(number: int) -> None:
        config = AgentConfig(
            model=SlowModel(), tools=[read_file], checkpoints=store, session_id=f"s{number}"
        )
        async with create_agent(config) as agent:
            for _ in range(TURNS):
                (await agent.run(USER)).raise_for_failure()

    async with trio.open_nursery() as nursery:
        for number in range(sessions):
            nursery.start_soon(one, number)


async def lean(sessions: int, database: Database | None) -> None:
    async def one(number: int) -> None:
        loop = Loop(SlowModel(), read_file, database, number=number)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.run)
            for _ in range(TURNS):
                await loop.ask(USER)
            loop.close()

    async with trio.open_nursery() as nursery:
        for number in range(sessions):
            nursery.start_soon(one, number)


async def measure(sessions: int) -> None:
    times: dict[str, list[float]] = {"memory": [], "sqlite": [], "lean": [], "lean sqlite": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=".") as directory:
            begun = time.perf_counter()
            await lean(sessions, None)
            times["lean"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            await ours(sessions, MemoryCheckpoint())
            times["memory"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            with Database(Path(directory, "lean.db"), sessions=sessions) as database:
                await lean(sessions, database)
            times["lean sqlite"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            async with SqliteCheckpoint(Path(directory, "ours.db")) as store:
                await ours(sessions, store)
            times["sqlite"].append(time.perf_counter() - begun)
    for durable, name in ((False, "memory"), (True, "sqlite")):
        beside = times["lean sqlite" if durable else "lean"]
        report(
            "engine_sessions",
            durable=durable,
            sessions=sessions,
            turns=TURNS,
            of_floor=_ratio(times[name], times["lean"]),
            of_lean=_ratio(times[name], beside),
            s=rounded(median(times[name])),
            s_floor=rounded(median(times["lean"])),
        )


def _ratio(one: list[float], other: list[float]) -> float:
    return median([mine / theirs for mine, theirs in zip(one, other, strict=True)])


if __name__ == "__main__":
    trio.run(measure, int(sys.argv[1]) if len(sys.argv) > 1 else 200)
