"""Many tasks write one file through two stores, some cut off: what was promised is stored.

The stores know nothing of each other, as two processes would not. Each writer saves on
what it last saw, so some are too late; each returned event must be in the journal, once,
under its number.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.properties.test_store_machine import MEMORY
from trio_agent import StaleSessionError
from trio_agent.protocol.events import (
    TRANSIENT_TYPES,
    AgentMessageDelta,
    Draft,
    Event,
    EventMsg,
    ModelStepCompleted,
    Notice,
    TokenCount,
    UserMessage,
)
from trio_agent.protocol.items import UserItem
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store import SqliteCheckpoint
from trio_agent.store.event_rows import PACK_BYTES

SESSIONS = ("a", "b")
LEAVES_AGAIN = (TokenCount, AgentMessageDelta, *TRANSIENT_TYPES)

sizes = st.sampled_from([0, 70, PACK_BYTES // 2, PACK_BYTES - 1, PACK_BYTES + 1])
messages: st.SearchStrategy[EventMsg] = st.one_of(
    st.builds(lambda size: Notice(capability="c", text="n" * size), sizes),
    st.builds(lambda size: UserMessage(turn_id="t", text="u" * size), sizes),
    st.builds(lambda n: TokenCount(total=TokenUsage(input_tokens=n)), st.integers(0, 9)),
    st.just(AgentMessageDelta(turn_id="t", step_id="p", text="d", phase="final_answer")),
    st.just(
        ModelStepCompleted(
            turn_id="t",
            step_id="p",
            step_index=0,
            outcome="completed",
            started_at_ms=1,
            completed_at_ms=2,
        )
    ),
)
drafts = st.lists(
    st.builds(
        Draft,
        recorded_at_ms=st.integers(0, 99),
        submission_id=st.sampled_from([None, "s"]),
        msg=messages,
    ),
    max_size=5,
)


@attrs.frozen
class Write:
    """One call of a writer: ``patience`` passes of the loop, then it is cancelled."""

    session_id: str
    appends: bool
    drafts: list[Draft]
    patience: int | None


writes = st.builds(
    Write,
    session_id=st.sampled_from(SESSIONS),
    appends=st.booleans(),
    drafts=drafts,
    patience=st.none() | st.integers(0, 20),
)
writers = st.lists(st.lists(writes, min_size=1, max_size=6), min_size=3, max_size=6)


async def later(fn: Callable[..., Any], *args: Any, limiter: object = None) -> Any:
    """Run a blocking call in place, after a while in which others do something."""
    del limiter  # it takes no time
    for _ in range(3):
        await trio.lowlevel.checkpoint()
    return fn(*args)


class Writing:
    """Two stores of one file, and every event that either has returned."""

    def __init__(self, path: Path) -> None:
        self.stores = [
            SqliteCheckpoint(path, synchronous="NORMAL", run_sync=later) for _ in range(2)
        ]
        self.promised: defaultdict[str, list[Event]] = defaultdict(list)

    async def run(self, programs: Sequence[Sequence[Write]], cuts: Sequence[int]) -> None:
        first, second = self.stores
        async with first, second:
            for session_id in SESSIONS:
                await first.save(Checkpoint(session_id=session_id))
            async with trio.open_nursery() as nursery:
                for n, program in enumerate(programs):
                    nursery.start_soon(self.write, self.stores[n % 2], program)
            for session_id in SESSIONS:
                await self.check(session_id, cuts)
            assert await first.verify() == ()

    async def write(self, store: SqliteCheckpoint, program: Sequence[Write]) -> None:
        for one in program:
            async with trio.open_nursery() as nursery:
                if one.patience is not None:
                    nursery.start_soon(cut_off, nursery.cancel_scope, one.patience)
                try:
                    await self.do(store, one)
                    event("done")
                except StaleSessionError:
                    event("too late")
                nursery.cancel_scope.cancel()

    async def do(self, store: SqliteCheckpoint, one: Write) -> None:
        if one.appends:
            events = await store.append_events(one.session_id, one.drafts)
        else:
            seen = await store.load(one.session_id)
            assert seen is not None
            item = UserItem(text="go")
            following = attrs.evolve(
                seen, sequence=seen.sequence + 1, context=seen.context.extended([item])
            )
            events = await store.save(following, [item], events=one.drafts)
        self.promised[one.session_id] += events

    async def check(self, session_id: str, cuts: Sequence[int]) -> None:
        first, second = self.stores
        journal = await journal_of(first, session_id, limit=1_000)
        rows = {event.sequence: event for event in journal}
        numbers = [event.sequence for event in self.promised[session_id]]
        assert len(set(numbers)) == len(numbers), "a number was given twice"
        for told in self.promised[session_id]:
            if told.sequence in rows or not isinstance(told.msg, LEAVES_AGAIN):
                assert rows[told.sequence] == told
        latest = max(numbers, default=0)  # others may have been cancelled behind it
        for cut in [min(cut, latest) for cut in cuts]:
            part = await journal_of(second, session_id, after=cut, limit=2)
            assert part == [event for event in journal if event.sequence > cut]
            page = await second.event_page(session_id, before_sequence=cut + 1, limit=1_000)
            assert list(reversed(page.events)) == [
                one for one in journal if one.sequence <= cut
            ]
        keep = min(cuts, default=0)
        await second.prune(session_id, keep_events=keep)
        kept = await journal_of(first, session_id, limit=1_000)
        assert kept == journal[max(0, len(journal) - keep) :]


async def cut_off(scope: trio.CancelScope, passes: int) -> None:
    """Cancel *scope* after so many passes of the loop."""
    for _ in range(passes):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def journal_of(
    store: SqliteCheckpoint, session_id: str, *, limit: int, after: int = 0
) -> list[Event]:
    """Return what is stored behind *after*, read by pages of *limit*."""
    found: list[Event] = []
    while True:
        page = await store.events_after(session_id, after, limit)
        found += page.events
        if page.position == page.latest_sequence:
            return found
        after = page.position


@given(writers, st.lists(st.integers(0, 30), max_size=4))
@settings(deadline=None)
def test_what_writers_were_promised_is_stored_once(
    programs: list[list[Write]], cuts: list[int]
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        writing = Writing(Path(directory, "sessions.db"))
        trio.run(writing.run, programs, cuts)
