"""Several events in one row: what a reader, a prune and a newer count make of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.protocol.events import (
    AgentMessageDelta,
    Draft,
    Notice,
    TokenCount,
    TurnStarted,
    UserMessage,
)
from trio_agent.protocol.items import UserItem
from trio_agent.protocol.usage import TokenUsage
from trio_agent.store import MemoryCheckpoint, SqliteCheckpoint
from trio_agent.store.event_rows import PACK, PACK_BYTES, members, rows_of
from trio_agent.store.numbering import Entry
from trio_agent.store.rows import write_row
from trio_agent.testing.store_parts import begin, draft, following, journal_of, note

LONG = "a text that is long enough to be quoted from its item, and so it is told once"


def saves() -> list[list[Draft]]:
    """Return saves whose rows are of every form."""
    count = [draft(TokenCount(total=TokenUsage(total_tokens=n))) for n in range(3)]
    delta = AgentMessageDelta(turn_id="t", step_id="open", text="x", phase="final_answer")
    return [
        [note("1"), attrs.evolve(note("2"), recorded_at_ms=9), note("3")],
        [note("4"), count[0], note("6")],
        [draft(delta), note("8"), note("9"), draft(UserMessage(turn_id="t", text=LONG))],
        [],
        [note("11")],
        [draft(TurnStarted(turn_id="t"), submission_id="one"), note("13"), count[1], count[2]],
        [note("x" * PACK_BYTES), note("17"), note("18")],
    ]


async def fill(store: MemoryCheckpoint | SqliteCheckpoint) -> None:
    checkpoint = await begin(store)
    for drafts in saves():
        quoted = [
            UserItem(text=one.msg.text) for one in drafts if isinstance(one.msg, UserMessage)
        ]
        checkpoint = following(checkpoint, *quoted)
        await store.save(checkpoint, quoted, events=drafts)


async def reads(store: MemoryCheckpoint | SqliteCheckpoint) -> Sequence[object]:
    """Return what every page from every place tells."""
    latest = (await store.events_after("s", 0, 99)).latest_sequence
    return [
        page
        for limit in (1, 2, 3, 99)
        for place in range(latest + 1)
        for page in (
            await store.events_after("s", place, limit),
            await store.event_page("s", before_sequence=place, limit=limit),
        )
    ]


@pytest.mark.parametrize("keep", [None, *range(20)])
async def test_pages_and_prunes_do_not_see_the_rows(tmp_path: Path, keep: int | None) -> None:
    """Every page from every place, and what is left when any number is kept."""
    async with SqliteCheckpoint(tmp_path / "s.db") as store, MemoryCheckpoint() as model:
        await fill(store)
        await fill(model)
        if keep is not None:
            pruned = await store.prune("s", keep_events=keep)
            assert pruned == await model.prune("s", keep_events=keep)
        assert await reads(store) == await reads(model)
        assert await store.verify() == ()
        # it moves to another file with the same story
        await store.import_session(await store.export_session("s"), session_id="copy")
        assert await journal_of(store, "copy") == await journal_of(model)


async def test_what_one_save_adds_is_one_row(tmp_path: Path) -> None:
    """Mutant: each event had a row, and a save with its journal cost a fifth more."""
    path = tmp_path / "s.db"
    async with SqliteCheckpoint(path) as store:
        checkpoint = await begin(store)
        for _ in range(2):
            checkpoint = following(checkpoint)
            await store.save(checkpoint, events=[note("x"), note("y"), note("z")])
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT sequence, kind FROM event ORDER BY sequence")
        assert rows.fetchall() == [(3, PACK), (6, PACK)]


async def test_a_pack_fits_in_a_page(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with SqliteCheckpoint(path) as store:
        await begin(store)
        await store.append_events("s", [note("x" * (PACK_BYTES // 4))] * 9)
        await store.append_events("s", [note("x" * PACK_BYTES * 2), note("y")])
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT sequence FROM event ORDER BY sequence")
        assert [sequence for (sequence,) in rows] == [3, 6, 9, 10, 11]


entries = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.builds(
            lambda at, submission, text, step, item: Entry(
                at_ms=at,
                submission_id=submission,
                msg=(msg := Notice(capability="c", text=text)),
                step_id=step,
                body=write_row(msg),
                item=item,
            ),
            st.integers(0, 9),
            st.none() | st.just("m"),
            st.text(max_size=3) | st.just("x" * (PACK_BYTES // 2)),
            st.none() | st.just("step"),
            st.none() | st.integers(1, 9),
        ),
    ),
    max_size=9,
)


@given(entries)
def test_rows_hold_what_was_put_in(pairs: list[tuple[int, Entry]]) -> None:
    numbered: list[tuple[int, Entry]] = []
    for skip, entry in pairs:
        numbered.append((skip + (numbered[-1][0] if numbered else 0), entry))
    found: list[tuple[object, ...]] = []
    for sequence, at, kind, submission, step, stream, version, body, check, item in rows_of(
        numbered
    ):
        assert len(body) < PACK_BYTES + 1_000
        row = (sequence, at, kind, submission, version, body, check, item, step, stream)
        for number, one in members(row).numbered:
            told = (number, at + one.later, submission, one.kind, bytes(one.body), one.item)
            found.append((*told, step))
    assert found == [
        (
            number,
            entry.at_ms,
            entry.submission_id,
            entry.msg.tag,
            entry.body,
            entry.item,
            entry.step_id,
        )
        for number, entry in numbered
    ]
