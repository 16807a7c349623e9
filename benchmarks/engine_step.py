"""What the engine adds to a model step, by the length of the history, without a disk and with.

A step asks a model that answers at once, and runs the one tool that it asks for. Without a
disk nothing waits, so there CPU time is measured, which other programs disturb less.

usage: python -m benchmarks.engine_step [items,…]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import trio

from benchmarks.lean import Database, Loop
from benchmarks.workload import ANSWER, OUTPUT, USER, median, report, rounded, steps
from trio_agent import AgentConfig, ModelCall, ModelOutput, create_agent, tool
from trio_agent.protocol.items import Item
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import MemoryCheckpoint, SqliteCheckpoint
from trio_agent.testing import ScriptedModel

ROUNDS = 9
STEPS = 20
"""Steps of the turn that is measured; its last answer asks for no tool."""


@tool(effect="read_only")
async def read_file(path: str) -> str:  # noqa: ARG001
    """Return the same text at once."""
    await trio.lowlevel.checkpoint()
    return OUTPUT


def script(calls: int) -> list[ModelOutput]:
    asks = [
        ModelOutput.answer(
            "", ModelCall(name="read_file", arguments=f'{{"path":"{n}.py"}}', call_id=f"c{n}")
        )
        for n in range(calls)
    ]
    return [*asks, ModelOutput.answer(ANSWER)]


def model() -> ScriptedModel:
    """Return a model for two turns: one to get warm, and the one that is measured."""
    return ScriptedModel(*script(1), *script(STEPS - 1))


def history(items: int) -> Checkpoint:
    """Return a session that has lived through as many *items*."""
    last = Checkpoint.empty("s")
    for step in steps("s", items // 4, journal=False):
        last = step.checkpoint
    return attrs.evolve(last, sequence=0)


def clock(*, durable: bool) -> float:
    return time.perf_counter() if durable else time.process_time()


class Contestants:
    """Fresh sessions with one history, and what each needs to be opened."""

    def __init__(self, checkpoint: Checkpoint, directory: Path) -> None:
        self.checkpoint = checkpoint
        self.items: list[Item] = list(checkpoint.context)
        self.directory = directory
        self._opened = 0

    async def prepare(self) -> None:
        async with SqliteCheckpoint(self.directory / "ours.db") as store:
            await store.save(self.checkpoint, self.items)

    async def ours(self, *, durable: bool) -> float:
        async with AsyncExitStack() as stack:
            store: MemoryCheckpoint | SqliteCheckpoint
            if durable:
                store = await stack.enter_async_context(SqliteCheckpoint(self._copy()))
            else:
                store = MemoryCheckpoint()
                await store.save(self.checkpoint, self.items)
            config = AgentConfig(
                model=model(),
                tools=[read_file],
                checkpoints=store,
                session_id="s",
                context_window=10**12,
                initial_replay_batches=0,
            )
            agent = await stack.enter_async_context(create_agent(config))
            await agent.run("Are you there?")
            begun = clock(durable=durable)
            (await agent.run(USER)).raise_for_failure()
            return clock(durable=durable) - begun

    async def lean(self, *, durable: bool) -> float:
        async with AsyncExitStack() as stack:
            database: Database | None = None
            if durable:
                database = stack.enter_context(Database(self._fresh()))
                database.preload(self.items)
            loop = Loop(model(), read_file, database, history=self.items)
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(loop.run)
            await loop.ask("Are you there?")
            begun = clock(durable=durable)
            await loop.ask(USER)
            took = clock(durable=durable) - begun
            loop.close()
        return took

    def _copy(self) -> Path:
        copy = self._fresh()
        shutil.copy(self.directory / "ours.db", copy)
        return copy

    def _fresh(self) -> Path:
        self._opened += 1
        return self.directory / f"{self._opened}.db"


async def measure(lengths: list[int]) -> None:
    times: dict[tuple[int, bool, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=".") as directory:
        contestants: list[Contestants] = []
        for length in lengths:
            place = Path(tempfile.mkdtemp(dir=directory))
            contestants.append(Contestants(history(length), place))
            await contestants[-1].prepare()
        for number in range(ROUNDS + 1):
            for length, one in zip(lengths, contestants, strict=True):
                for durable in (False, True):
                    for lean in (False, True) if number % 2 else (True, False):
                        took = await (one.lean if lean else one.ours)(durable=durable)
                        if number:  # the first round warms up
                            times.setdefault((length, durable, lean), []).append(took)
    for durable in (False, True):
        for length in lengths:
            ours, hand_written = times[length, durable, False], times[length, durable, True]
            shortest = times[lengths[0], durable, False]
            report(
                "engine_step",
                durable=durable,
                items=length,
                of_lean=_ratio(ours, hand_written),
                of_shortest=_ratio(ours, shortest),
                us=rounded(1e6 * median(ours) / STEPS),
                us_lean=rounded(1e6 * median(hand_written) / STEPS),
            )


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return median([one / other for one, other in zip(ours, theirs, strict=True)])


if __name__ == "__main__":
    trio.run(
        measure,
        [int(n) for n in (sys.argv[1] if len(sys.argv) > 1 else "0,400,10000").split(",")],
    )
