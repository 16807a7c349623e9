"""A save costs what it adds: counted in SQLite's own instructions and bytes, not in time."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import attrs
import pytest
import trio

from trio_agent.protocol.events import (
    AgentMessageDelta,
    Draft,
    Event,
    ModelStepCompleted,
    Notice,
    TokenCount,
    ToolCallEnd,
)
from trio_agent.protocol.items import AssistantItem, ToolOutputItem, UserItem
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state.checkpoint import Checkpoint, QueuedMessage
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.journal import SLICE_BYTES
from trio_agent.testing.store_parts import begin, draft, following, note, save_turns


class Counter:
    """Counts the instructions of one connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.count = 0
        connection.set_progress_handler(self.step, 10)

    def step(self) -> int:
        self.count += 1
        return 0

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


async def grown(store: SqliteCheckpoint, turns: int) -> Checkpoint:
    """Save *turns* turns, each with every kind of row that grows with a session."""
    checkpoint = await begin(store)
    for number in range(turns):
        step = f"p{number}"
        text = AgentMessageDelta(turn_id="t", step_id=step, text="x")
        failed = ModelStepCompleted(
            turn_id="t",
            step_id=step,
            step_index=0,
            outcome="failed",
            started_at_ms=1,
            completed_at_ms=1,
        )
        await store.append_events("s", [draft(text), draft(failed)])
        checkpoint = await save_turns(store, checkpoint, 1, first=number + 1)
    return checkpoint


@pytest.mark.parametrize("turns", [300])
async def test_instructions_stay_flat(tmp_path: Path, turns: int) -> None:
    """Mutant: without INDEXED BY, a completed step scanned the session's whole journal."""
    costs: list[int] = []
    for length in (10, turns):
        path = tmp_path / f"{length}.db"
        async with SqliteCheckpoint(path, synchronous="NORMAL") as store:
            checkpoint = await grown(store, length)
            counter = Counter(store._writer().connection)
            text = AgentMessageDelta(turn_id="t", step_id="new", text="x")
            done = ModelStepCompleted(
                turn_id="t",
                step_id="new",
                step_index=0,
                outcome="completed",
                started_at_ms=1,
                completed_at_ms=1,
            )
            count = TokenCount(total=TokenUsage(total_tokens=1))
            await store.append_events("s", [draft(text)])
            checkpoint = following(checkpoint, AssistantItem(text="x"))
            await store.save(
                checkpoint, checkpoint.context[-1:], events=[draft(done), draft(count)]
            )
            costs.append(counter.since())
    assert costs[1] <= costs[0] * 1.2


async def test_reading_costs_what_is_read(tmp_path: Path) -> None:
    """Pages, positions and the opening of a session whose context was replaced."""
    costs: dict[int, list[int]] = {}
    for length in (10, 300):
        path = tmp_path / f"{length}.db"
        async with SqliteCheckpoint(path, synchronous="NORMAL") as store:
            checkpoint = await grown(store, length)
            short = attrs.evolve(
                following(checkpoint), context=[UserItem(text="x")], context_epoch=1
            )
            await store.save(short)
            latest = (await store.event_page("s", limit=1)).latest_sequence
            await store.load("s")
            counter = Counter(store._readers[0])
            costs[length] = []
            reads: list[Callable[[], Awaitable[object]]] = [
                functools.partial(store.load, "s"),
                functools.partial(store.events_after, "s", latest - 5, 5),
                functools.partial(store.event_page, "s", limit=5),
                functools.partial(store.execution_page, "s", limit=5),
                functools.partial(store.receipt, "s", "s1"),
                functools.partial(store.session_summary, "s"),
            ]
            for read in reads:
                assert len(store._readers) == 1
                await read()
                costs[length].append(counter.since())
    for small, large in zip(costs[10], costs[300], strict=True):
        assert large <= small * 1.2 + 5


async def test_a_reader_far_behind_gets_no_more_than_it_can_hold(tmp_path: Path) -> None:
    """Long events come a few at a time, each once; one is always among them.

    Mutant: without the bound, a slice held as much as its 256 longest events.
    """
    async with SqliteCheckpoint(tmp_path / "s.db", synchronous="NORMAL") as store:
        await begin(store)
        for number in range(9):
            await store.append_events("s", [note(f"{number}" * (SLICE_BYTES * number // 4))])
        found: list[Event] = []
        position = 0
        while True:
            part = await store.events_after("s", position, 100)
            sizes = [
                len(event.msg.text) for event in part.events if isinstance(event.msg, Notice)
            ]
            assert sizes
            assert sum(sizes[:-1]) <= SLICE_BYTES
            found += part.events
            position = part.position
            if position == part.latest_sequence:
                break
        assert [event.sequence for event in found] == list(range(1, 10))


def size_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size


async def sized(path: Path, fill: Callable[[SqliteCheckpoint], object]) -> int:
    async with SqliteCheckpoint(path, synchronous="NORMAL") as store:
        await fill(store)  # type: ignore[misc]
    return size_of(path)


async def test_twice_the_turns_take_twice_the_bytes(tmp_path: Path) -> None:
    async def turns(store: SqliteCheckpoint, count: int) -> None:
        checkpoint = await begin(store)
        for number in range(count):
            item = UserItem(text="x" * 200, submission_id=f"{number}")
            checkpoint = following(checkpoint, item)
            await store.save(checkpoint, [item], events=[note("x" * 50)])

    half = await sized(tmp_path / "500.db", lambda store: turns(store, 500))
    whole = await sized(tmp_path / "1000.db", lambda store: turns(store, 1_000))
    assert whole <= 2.3 * half


async def test_a_long_prompt_is_stored_once(tmp_path: Path) -> None:
    prompt = "x" * 5_000_000

    async def sessions(store: SqliteCheckpoint) -> None:
        for number in range(5):
            checkpoint = await begin(store, f"s{number}")
            for _ in range(3):
                checkpoint = following(checkpoint, instructions_digest="d")
                await store.save(checkpoint, contents={"d": prompt})

    assert await sized(tmp_path / "s.db", sessions) < 6_000_000


async def test_a_text_told_twice_is_stored_once(tmp_path: Path) -> None:
    """Mutant: without quoting, the journal held every question, output and answer again."""

    async def turns(store: SqliteCheckpoint) -> None:
        checkpoint = await begin(store)
        for number in range(20):
            item = ToolOutputItem(call_id="c", output=f"{number}" * 20_000)
            checkpoint = following(checkpoint, item)
            end = ToolCallEnd(
                turn_id="t", call_id="c", name="n", output=item.output, outcome="finished"
            )
            await store.save(checkpoint, [item], events=[draft(end)])
        data = await store.export_session("s")
        await store.import_session(data, session_id="copy")

    texts = 2 * sum(20_000 * len(f"{number}") for number in range(20))
    assert await sized(tmp_path / "s.db", turns) < 1.2 * texts


async def test_a_long_queue_is_not_written_again(tmp_path: Path) -> None:
    """Neither are long texts that stand beside what changed."""
    path = tmp_path / "s.db"
    async with SqliteCheckpoint(path) as store:
        messages = tuple(
            QueuedMessage(owner="m", id=f"{n}", boundary="queue", text="x" * 500_000)
            for n in range(4)
        )
        checkpoint = attrs.evolve(
            Checkpoint.empty("s"), queue=messages, first_user_message="y" * 500_000
        )
        await store.save(checkpoint)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            for _ in range(10):
                checkpoint = following(checkpoint, UserItem(text="z"))
                event = Draft(recorded_at_ms=1, msg=note("z").msg)
                await store.save(checkpoint, events=[event])
        assert path.with_name("s.db-wal").stat().st_size < 500_000


async def test_a_save_is_one_hop(tmp_path: Path) -> None:
    """The unit of cost is the hop into a thread: a save of a known session takes one."""
    hops = 0

    async def counting(fn: Callable[..., object], /, *args: object, limiter: object) -> object:
        nonlocal hops
        del limiter
        hops += 1
        await trio.lowlevel.checkpoint()
        return fn(*args)

    store = SqliteCheckpoint(tmp_path / "s.db", run_sync=counting)  # type: ignore[arg-type]
    checkpoint = await begin(store)
    hops = 0
    await store.save(following(checkpoint), events=[note("x")])
    await store.append_events("s", [note("y")])
    assert hops == 2
    await store.aclose()
