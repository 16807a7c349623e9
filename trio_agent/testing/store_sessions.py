"""The rules of a store about pages, lists and whole sessions; `check_store` runs them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio
import trio.testing

from trio_agent.protocol.events import (
    AgentMessageDelta,
    Event,
)
from trio_agent.protocol.items import (
    AssistantItem,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.state.checkpoint import (
    ActiveExecution,
    AgentRole,
    Checkpoint,
)
from trio_agent.store.base import CheckpointStore
from trio_agent.testing.store_parts import (
    begin,
    draft,
    following,
    impossible,
    journal_of,
    not_an_export,
    note,
    owned,
    save_turns,
    stale,
    unknown,
)


async def check_pages(store: CheckpointStore) -> None:
    """Pages of any size, walked to their end, hold everything once, newest first."""
    await save_turns(store, await begin(store), 7)
    events = list(reversed(await journal_of(store)))
    turns = [f"s{number}" for number in range(7, 0, -1)]
    for size in (1, 2, 3, 7, 8):
        found: list[Any] = []
        before: int | None = None
        while True:
            page = await store.event_page("s", before_sequence=before, limit=size)
            assert len(page.events) <= size
            found += page.events
            before = page.next_before_sequence
            if before is None:
                break
        assert found == events
        batches: list[int] = []
        while True:
            batch = await store.transcript_page("s", before_sequence=before, max_batches=size)
            batches += [one.sequence for one in batch.batches]
            assert all(len(one.items) == 2 for one in batch.batches)
            before = batch.next_before_sequence
            if before is None:
                break
        assert batches == [7, 6, 5, 4, 3, 2, 1]
        ended: list[str] = []
        while True:
            done = await store.execution_page("s", before_sequence=before, limit=size)
            ended += [record.submission_id for record in done.executions]
            before = done.next_before_sequence
            if before is None:
                break
        assert ended == turns
        at, forwards = 0, list[Event]()
        while True:
            part = await store.events_after("s", at, size)
            forwards += part.events
            at = part.position
            if at == part.latest_sequence:
                break
        assert forwards == events[::-1]


async def check_limits(store: CheckpointStore) -> None:
    """Impossible positions, page sizes, cursors and ids are refused by name."""
    await save_turns(store, await begin(store), 1)
    for bad in (0, -1):
        await impossible(store.event_page("s", limit=bad))
        await impossible(store.transcript_page("s", max_batches=bad))
        await impossible(store.execution_page("s", limit=bad))
        await impossible(store.events_after("s", 0, bad))
        await impossible(store.list_sessions(limit=bad))
        await impossible(store.search_sessions("x", limit=bad))
    for before in (-1, MAX_INTEGER + 1):
        await impossible(store.event_page("s", before_sequence=before))
        await impossible(store.transcript_page("s", before_sequence=before))
        await impossible(store.execution_page("s", before_sequence=before))
    for after in (-1, 2, MAX_INTEGER, MAX_INTEGER + 1):
        await impossible(store.events_after("s", after, 1))
    assert (await store.events_after("s", 1, 1)).events == ()
    assert (await store.event_page("s", before_sequence=0)).events == ()
    await impossible(store.prune("s", keep_events=-1))
    await impossible(store.list_sessions(cursor="no cursor"))
    await impossible(store.search_sessions(" "))
    for name in ("", "x" * 256, "é" * 128, "nul\0", "line\n", "\x7f", "half \ud800"):
        await impossible(store.claim(name, "me"))
        await impossible(store.load(name))
        await impossible(store.save(Checkpoint.empty(name)))
    names = [
        "../../x",
        "/abs",
        "a/b",
        "a\\b",
        ".",
        "NUL",
        "😀",
        "é",
        "e\u0301",
        "A",
        "a",
        "x" * 255,
    ]
    for number, name in enumerate(names):
        await store.save(Checkpoint(session_id=name, sequence=number))
    for number, name in enumerate(names):
        loaded = await store.load(name)
        assert loaded == Checkpoint(session_id=name, sequence=number), "names share no state"


async def check_prune(store: CheckpointStore) -> None:
    """Pruning leaves a gap that is told, the newest rows and everything else."""
    last = await save_turns(store, await begin(store), 5)
    assert await store.prune("s", keep_events=2) == 3
    assert await store.prune("s", keep_events=2) == 0
    part = await store.events_after("s", 0, 10)
    assert part.pruned_through == 3
    assert [event.sequence for event in part.events] == [4, 5]
    assert await store.prune("s", keep_events=0) == 2
    part = await store.events_after("s", 5, 10)
    assert (part.events, part.position, part.pruned_through) == ((), 5, 5)
    (event,) = await store.append_events("s", [note("next")])
    assert event.sequence == 6, "numbers are never given twice"
    assert await store.load("s") == last


async def check_contents(store: CheckpointStore) -> None:
    """A long text is stored under its digest and goes with its last session."""
    first = await begin(store, "s")
    second = await begin(store, "t")
    await store.save(following(first), contents={"d": "prompt", "e": "tools"})
    await store.save(following(second), contents={"d": "prompt"})
    await store.fork("s", 1, "f")
    assert await store.load_content("d") == "prompt"
    await store.delete_session("s")
    assert await store.load_content("e") == "tools"
    await store.delete_session("f")
    assert await store.load_content("e") is None
    assert await store.load_content("d") == "prompt"
    await store.delete_session("t")
    assert await store.load_content("d") is None


async def check_fork(store: CheckpointStore) -> None:
    """A fork has the context of any earlier save, and its parent does not notice."""
    base = attrs.evolve(
        Checkpoint.empty("s"), metadata={"m": 1}, model_route="r", grants=("g",)
    )
    await store.save(base)
    two = await save_turns(store, base, 2)
    compacted = attrs.evolve(
        following(two), context=[UserItem(text="summary")], context_epoch=1
    )
    await store.save(compacted)
    four = await save_turns(store, compacted, 1, first=3)
    for at, context in ((1, two.context[:2]), (2, list(two.context)), (4, list(four.context))):
        summary = await store.fork("s", at, f"f{at}")
        assert (summary.parent_session_id, summary.parent_sequence) == ("s", at)
        child = await store.load(f"f{at}")
        assert child is not None
        assert list(child.context) == context
        assert (child.sequence, child.grants, child.queue) == (0, (), ())
        assert (child.metadata, child.model_route) == ({"m": 1}, "r")
        assert await journal_of(store, f"f{at}") == []
        grown = following(child, UserItem(text="more"))
        await store.save(grown)
        assert await store.load(f"f{at}") == grown
    assert await store.load("s") == four
    await impossible(store.fork("s", 1, "s"))
    await impossible(store.fork("s", 1, "f1"))
    await unknown(store.fork("s", 5, "new"))
    called = following(four, ToolCallItem(call_id="c", name="t", arguments={}))
    await store.save(called)
    await impossible(store.fork("s", 5, "new"))
    answered = following(called, ToolOutputItem(call_id="c", output="o"))
    await store.save(answered)
    await store.fork("s", 6, "new")


async def check_rewind(store: CheckpointStore) -> None:
    """A rewind takes turns out of the context, in a new epoch; the past stays readable."""
    three = await save_turns(store, await begin(store), 3)
    back = await store.rewind("s", 2)
    assert list(back.context) == three.context[:2]
    assert (back.sequence, back.context_epoch) == (4, 1)
    assert await store.load("s") == back
    assert len(await journal_of(store)) == 3
    assert len((await store.transcript_page("s")).batches) == 3
    four = await save_turns(store, back, 1, first=4)
    assert await store.load("s") == four
    await impossible(store.rewind("s", 3))
    await impossible(store.rewind("s", 0))
    await store.rewind("s", 2)
    restored = await store.fork("s", 3, "before the rewind")
    child = await store.load(restored.session_id)
    assert child is not None
    assert child.context == three.context
    running = await store.load("s")
    assert running is not None
    execution = ActiveExecution(submission_id="x", turn_id="t", started_at_ms=1)
    await store.save(following(running, active_execution=execution))
    await impossible(store.rewind("s", 1))


async def check_delete(store: CheckpointStore) -> None:
    """Deletion takes subagents and scoped states along, never forks, strangers or globals."""
    await begin(store, "s")
    await store.save(Checkpoint(session_id="sub", role=AgentRole.subagent("s", "t")))
    await store.save(Checkpoint(session_id="sub of sub", role=AgentRole.subagent("sub", "t")))
    await store.fork("s", 0, "fork")
    await begin(store, "stranger")
    for scope in ("s", "sub", "stranger", "global"):
        await store.save_state(scope, "k", scope)
    lease = await store.claim("sub of sub", "me")
    await owned(store.delete_session("s"))
    assert await store.load("s") is not None
    await store.release(lease)
    assert await store.delete_session("s") is True
    for name in ("s", "sub", "sub of sub"):
        assert await store.load(name) is None
    assert await store.load("fork") is not None
    assert await store.load("stranger") is not None
    states = [
        await store.load_state(scope, "k") for scope in ("s", "sub", "stranger", "global")
    ]
    assert states == [None, None, "stranger", "global"]
    assert await store.delete_session("s") is False
    await stale(store.save(Checkpoint.empty("sub of sub"), lease=lease))
    reborn = await begin(store, "s")
    assert await store.load("s") == reborn


async def check_transfer(store: CheckpointStore) -> None:
    """An export holds everything, and nothing else is taken for one."""
    last = await save_turns(store, await begin(store), 3)
    await store.rename_session("s", "title")
    await store.save_state("s", "k", [1])
    await store.prune("s", keep_events=2)
    await store.append_events(
        "s", [draft(AgentMessageDelta(turn_id="t", step_id="p", text="half"))]
    )
    data = await store.export_session("s")
    assert await store.import_session(data, session_id="copy") == "copy"
    assert await store.load("copy") == attrs.evolve(last, session_id="copy")
    assert await journal_of(store, "copy") == await journal_of(store)
    assert await store.receipt("copy", "s1") == await store.receipt("s", "s1")
    assert await store.transcript_page("copy") == await store.transcript_page("s")
    assert await store.load_state("copy", "k") == [1]
    mine, copy = await store.session_summary("s"), await store.session_summary("copy")
    assert mine is not None
    assert copy is not None
    assert (copy.title, copy.sequence) == ("title", mine.sequence)
    await store.save(attrs.evolve(following(last), session_id="copy"))
    await impossible(store.import_session(data))
    for bad in (
        b"",
        b"{}",
        b"[]",
        b"\xff",
        data[:-1],
        data.replace(b'"added":1', b'"added":9'),
    ):
        await not_an_export(store.import_session(bad, session_id="new"))
    assert await store.load("new") is None
    await store.delete_session("s")
    assert await store.import_session(data) == "s"


async def check_catalog(store: CheckpointStore) -> None:
    """Lists are in order of change, page without repeats, and find by text."""
    for number in range(5):
        checkpoint = Checkpoint(session_id=f"s{number}", first_user_message=f"Straße {number}")
        added = [AssistantItem(text=f'said "{number}"\n')]
        await store.save(checkpoint, added)
    await store.save(Checkpoint(session_id="s1", sequence=1, first_user_message="Straße 1"))
    await store.rename_session("s3", "A title")
    expected = ["s3", "s1", "s4", "s2", "s0"]
    for size in (1, 2, 5, 6):
        found: list[str] = []
        cursor = None
        while True:
            page = await store.list_sessions(cursor=cursor, limit=size)
            found += [summary.session_id for summary in page.sessions]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert found == expected
    for text, ids in (
        ("a TITLE", ["s3"]),
        ("STRASSE", expected),
        ('said "2"\n', ["s2"]),
        ("nowhere", []),
    ):
        assert [one.session_id for one in await store.search_sessions(text)] == ids
    assert len(await store.search_sessions("Straße", limit=2)) == 2
    await store.rename_session("s3", None)
    summary = await store.session_summary("s3")
    assert summary is not None
    assert (summary.title, summary.first_user_message) == (None, "Straße 3")


async def check_state(store: CheckpointStore) -> None:
    """Values outside sessions: the last write wins, and only JSON enters."""
    for value in (1, "x", None, [1.5, {"k": None}], {"": "\x00😀"}):
        await store.save_state("scope", "key", value)
        assert await store.load_state("scope", "key") == value
    await impossible(store.save_state("scope", "key", float("inf")))
    await impossible(store.save_state("scope", "key", "\ud800"))
    assert await store.load_state("scope", "other") is None


async def check_cancellation(store: CheckpointStore) -> None:
    """A cancelled call did not happen, and every call is a checkpoint."""
    checkpoint = await begin(store)
    lease = await store.claim("s", "me")
    calls: Sequence[Callable[[], Awaitable[object]]] = [
        lambda: store.save(following(checkpoint), lease=lease, events=[note("x")]),
        lambda: store.append_events("s", [note("x")]),
        lambda: store.claim("t", "me"),
        lambda: store.rename_session("s", "x"),
        lambda: store.save_state("s", "k", 1),
        lambda: store.import_session(b"{}", session_id="t"),
        lambda: store.load("s"),
        lambda: store.events_after("s", 0, 1),
        store.list_sessions,
        store.verify,
    ]
    for call in calls:
        with trio.CancelScope() as scope:
            scope.cancel()
            await call()
        assert scope.cancelled_caught, "a call in a cancelled scope must raise Cancelled"
    assert await store.load("s") == checkpoint
    assert await journal_of(store) == []
    assert await store.load_state("s", "k") is None
    await store.release(await store.claim("t", "me"))
    with trio.testing.assert_checkpoints():
        await store.save(following(checkpoint), lease=lease)
    with trio.testing.assert_checkpoints():
        await store.append_events("s", [note("x")])
    with trio.testing.assert_checkpoints():
        await store.release(lease)


async def check_many(store: CheckpointStore) -> None:
    """Many sessions save at once; a stale one fails alone."""
    count, rounds = 24, 5

    async def run(number: int) -> None:
        checkpoint = await begin(store, f"s{number}")
        for turn in range(rounds):
            if number % 6 == 0:
                await stale(store.save(attrs.evolve(checkpoint, sequence=99)))
            checkpoint = await save_turns(store, checkpoint, 1, first=turn + 1)
            with trio.CancelScope() as scope:
                scope.cancel()
                await store.save(following(checkpoint))
        assert await store.load(f"s{number}") == checkpoint

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(run, number)
    for number in range(count):
        events = await journal_of(store, f"s{number}")
        assert [event.sequence for event in events] == list(range(1, rounds + 1))
