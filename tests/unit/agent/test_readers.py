"""Readers by cursor: every event once, in order, from any position, at any pace."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from trio_agent import Checkpoint, ConfigError, MemoryCheckpoint, SessionBrokenError
from trio_agent.agent import readers
from trio_agent.agent.readers import Reader, Tail, check_position
from trio_agent.protocol.events import Draft, HistoryGap, Notice, Widget


def draft(text: str) -> Draft:
    return Draft(recorded_at_ms=0, msg=Notice(capability="c", text=text))


def transient(text: str) -> Draft:
    return Draft(recorded_at_ms=0, msg=Widget(capability="c", id="w", text=text))


async def journal() -> tuple[MemoryCheckpoint, Tail]:
    store = MemoryCheckpoint()
    await store.save(Checkpoint.empty("s"))
    return store, Tail()


async def write(store: MemoryCheckpoint, tail: Tail, *drafts: Draft) -> None:
    tail.publish(await store.append_events("s", drafts))


@given(data=st.data())
def test_readers_at_any_pace_see_every_fact_once_in_order(data: st.DataObject) -> None:
    """The tail is small, writes and reads interleave, and some events leave no row."""
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12), label="writes")
    starts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4), label="readers")
    pauses = data.draw(st.lists(st.integers(0, 30), min_size=4, max_size=4), label="pauses")

    async def main() -> None:
        store, tail = await journal()
        seen: list[list[int]] = [[] for _ in starts]
        facts: list[int] = []

        async def read(place: int) -> None:
            reader = Reader(tail, store, "s", 0)
            await trio.sleep(starts[place])
            async for event in reader:
                seen[place].append(event.sequence)
                if len(seen[place]) % 7 == 0:
                    await trio.sleep(pauses[place % len(pauses)])

        async with trio.open_nursery() as nursery:
            for place in range(len(starts)):
                nursery.start_soon(read, place)
            for size in sizes:
                kinds = data.draw(
                    st.lists(st.booleans(), min_size=size, max_size=size), label="rows"
                )
                drafts = [
                    draft(f"{n}") if row else transient("w") for n, row in enumerate(kinds)
                ]
                first = tail.last + 1
                await write(store, tail, *drafts)
                facts += [first + n for n, row in enumerate(kinds) if row]
                await trio.sleep(1)
            tail.end()
        for numbers in seen:
            assert numbers == sorted(set(numbers))
            assert set(facts) <= set(numbers) <= set(range(1, tail.last + 1))

    small = readers.TAIL_EVENTS
    try:
        readers.TAIL_EVENTS = 5  # type: ignore[misc]  # a tail that readers fall out of
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        readers.TAIL_EVENTS = small  # type: ignore[misc]


async def test_the_tail_is_bounded_in_bytes() -> None:
    store, tail = await journal()
    for _ in range(64):
        await write(store, tail, draft("x" * 60_000))
    assert tail._bytes <= readers.TAIL_BYTES
    reader = Reader(tail, store, "s", 0)
    assert [(await reader.__anext__()).sequence for _ in range(64)] == list(range(1, 65))


async def test_pruned_events_are_an_explicit_gap() -> None:
    store, tail = await journal()
    await write(store, tail, *(draft(f"{n}") for n in range(10)))
    await store.prune("s", keep_events=3)
    reader = Reader(Tail(last=10), store, "s", 2)
    gap = await reader.__anext__()
    assert gap.msg == HistoryGap(first=3, last=7)
    assert [(await reader.__anext__()).sequence for _ in range(3)] == [8, 9, 10]


@pytest.mark.parametrize("position", [-1, 11, 1.5, "3", None, True])
def test_an_impossible_position_is_a_clear_error(position: Any) -> None:
    with pytest.raises(ConfigError):
        check_position(position, 10)


async def test_a_cancelled_read_loses_nothing() -> None:
    store, tail = await journal()
    reader = Reader(tail, store, "s", 0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await reader.__anext__()
    await write(store, tail, draft("a"))
    assert (await reader.__anext__()).sequence == 1


async def test_a_reader_is_for_one_task_at_a_time() -> None:
    store, tail = await journal()
    reader = Reader(tail, store, "s", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.next_event)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await reader.next_event()
        tail.end()


async def test_a_broken_session_ends_its_readers_with_the_cause() -> None:
    store, tail = await journal()
    await write(store, tail, draft("a"))
    cause = OSError("disk")
    tail.end(cause)
    reader = Reader(tail, store, "s", 0)
    assert (await reader.__anext__()).sequence == 1
    with pytest.raises(SessionBrokenError) as caught:
        await reader.__anext__()
    assert caught.value.__cause__ is cause


async def test_a_preface_comes_first_and_skipped_numbers_do_not() -> None:
    store, tail = await journal()
    await write(store, tail, transient("history"), draft("a"), draft("b"))
    events = [await Reader(tail, store, "s", n).__anext__() for n in range(3)]
    reader = Reader(tail, store, "s", 3, deque(events), frozenset({2}))
    assert (await reader.__anext__()).sequence == 1
    assert (await reader.__anext__()).sequence == 3


async def test_reading_is_a_checkpoint() -> None:
    store, tail = await journal()
    await write(store, tail, draft("a"))
    with trio.testing.assert_checkpoints():
        await Reader(tail, store, "s", 0).next_event()
