"""Readers of a session that is at work: many that join it, and some that hardly read."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path

import pytest
import trio

from tests.scenarios.children import DEEP
from tests.scenarios.story import configure, journal
from trio_agent import (
    Agent,
    Interrupt,
    SqliteCheckpoint,
    SubmissionRejectedError,
    create_agent,
    tool,
)
from trio_agent.agent.readers import TAIL_BYTES, Reader
from trio_agent.model.base import Emit, ModelCall, ModelOutput, ModelRequest
from trio_agent.protocol.events import (
    AgentReasoningDelta,
    Event,
    ModelStepCompleted,
    TurnComplete,
)
from trio_agent.protocol.items import AssistantItem
from trio_agent.store.journal import SLICE_BYTES

# --- many

STORED, LIVE, READERS, AT_ONCE = 1_000, 1_000, 50, 20


async def refused(agent: Agent) -> None:
    """Add one event: an interrupt of nothing is refused, and the refusal is told."""
    with pytest.raises(SubmissionRejectedError):
        await agent.submit(Interrupt("no such turn"))


async def grow(agent: Agent, count: int) -> None:
    """Let the journal grow by that many events, of which some are written together."""
    for _ in range(count // AT_ONCE):
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(refused, agent)


async def test_fifty_readers_join_at_different_moments_and_miss_nothing(
    tmp_path: Path,
) -> None:
    """Some begin at the first event, some in the middle, some with what comes next."""
    starts: list[int] = []
    heard: dict[int, list[Event]] = {}

    async def listen(reader: Reader, number: int) -> None:
        heard[number] = [event async for event in reader]

    async with SqliteCheckpoint(tmp_path / "s.db", synchronous="NORMAL") as store:
        async with create_agent(configure("demo", store)) as agent:
            await grow(agent, STORED)
    async with SqliteCheckpoint(tmp_path / "s.db", synchronous="NORMAL") as store:
        async with trio.open_nursery() as nursery:
            async with create_agent(configure("demo", store)) as agent:
                for number in range(READERS):
                    now = agent.snapshot().last_event_sequence
                    starts.append((0, now // 2, now)[number % 3])
                    reader = agent.subscribe(after=starts[-1])
                    nursery.start_soon(listen, reader, number)  # it outlives the session
                    await grow(agent, LIVE // READERS)
            # each of them ends by itself: the session is over
        rows = await journal(store)
    assert len(rows) >= STORED + LIVE
    for number, start in enumerate(starts):
        assert heard[number] == [event for event in rows if event.sequence > start], number


# --- one that does not read

LENGTH, STEPS = 5_000, 8 if DEEP else 2
DELTAS = 2_500 * STEPS
"""Streamed in one turn: in the deep profile 20,000 pieces and 100 MB."""

HELD = 4 * TAIL_BYTES + 4 * SLICE_BYTES
"""What the process may hold beyond what it held before. Two thirds of one step's pieces, a
twelfth of what is streamed in the deep profile."""


class Thinker:
    """Thinks at length, and asks for a tool each time, but for the last.

    It ends no step before the reader that keeps up has heard all of it: the pieces of a
    step leave the journal with its end.
    """

    def __init__(
        self,
        now_and_then: Callable[[], Awaitable[None]],
        all_heard: Callable[[int], Awaitable[None]],
    ) -> None:
        self.now_and_then = now_and_then
        self.all_heard = all_heard

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        step = sum(isinstance(item, AssistantItem) for item in request.items)
        for number in range(DELTAS // STEPS):
            await emit(f"{step}.{number:04} ".ljust(LENGTH, "x"), "reasoning")
            if number % 1_000 == 999:
                await self.now_and_then()
        await self.all_heard((step + 1) * (DELTAS // STEPS) * LENGTH)
        calls = [] if step == STEPS - 1 else [ModelCall(name="look", arguments="{}")]
        return ModelOutput.answer(f"thought {step}", *calls)


@pytest.fixture
def traced() -> Generator[None]:
    """Count what Python allocates, for the length of a test."""
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
async def test_a_reader_that_never_reads_costs_neither_memory_nor_the_turn(
    tmp_path: Path,
) -> None:
    """One keeps up, one reads an event now and then, one reads none before all is over.

    The first hears every piece. The others hear the whole of each step that they were too
    late for, and all of them hear the end.

    Mutants: a tail without its bound on bytes, a slice of the journal without one.
    """
    pieces = chunks = 0
    heard: list[int] = []
    lazy: list[Event] = []
    progress = trio.lowlevel.ParkingLot()

    async def all_heard(length: int) -> None:
        while pieces < length:
            await progress.park()

    async with SqliteCheckpoint(tmp_path / "s.db", synchronous="NORMAL") as store:

        async def now_and_then() -> None:
            event = await slow.next_event()
            assert event is not None
            lazy.append(event)

        @tool
        async def look() -> str:
            await now_and_then()
            return "seen"

        config = configure(Thinker(now_and_then, all_heard), store, tools=(look,))
        async with create_agent(config) as agent:
            begin = agent.snapshot().last_event_sequence
            never, slow, quick = (agent.subscribe(after=begin) for _ in range(3))

            async def keep_up() -> None:
                nonlocal pieces, chunks
                async for event in up_to_the_end(quick):
                    heard.append(event.sequence)
                    msg = event.msg
                    if isinstance(msg, AgentReasoningDelta):
                        pieces += len(msg.text)
                        progress.unpark_all()
                    elif isinstance(msg, ModelStepCompleted):
                        chunks += sum(one.chunk_count for one in msg.stream_metrics)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_up)
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                result = await agent.run("think")
                _, most = tracemalloc.get_traced_memory()
            late = [event async for event in up_to_the_end(never)]
            lazy += [event async for event in up_to_the_end(slow)]
        rows = [event for event in await journal(store) if event.sequence > begin]
    assert result.outcome == "completed"
    assert most - before < HELD
    assert (pieces, chunks) == (DELTAS * LENGTH, DELTAS)
    assert heard == list(range(begin + 1, heard[-1] + 1)), "it missed one, or heard one twice"
    assert late == rows[: len(late)]
    wholes = [event for event in lazy if not isinstance(event.msg, AgentReasoningDelta)]
    assert len(wholes) < len(lazy), "it was never in the middle of a step"
    assert wholes == rows[: len(wholes)]
    numbers = [event.sequence for event in lazy]
    assert numbers == sorted(set(numbers))


async def up_to_the_end(reader: Reader) -> AsyncGenerator[Event]:
    """Yield what *reader* hears, up to the end of the turn."""
    async for event in reader:
        yield event
        if isinstance(event.msg, TurnComplete):
            return
