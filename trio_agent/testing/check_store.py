"""`check_store`: what every `CheckpointStore` must do, as a test that any store can run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import attrs
import trio
import trio.testing

from trio_agent.errors import (
    AgentError,
    ConfigError,
    CorruptStoreError,
    ProtocolError,
    SessionOwnedError,
    StaleSessionError,
    UnknownError,
)
from trio_agent.protocol.events import (
    AgentMessageDelta,
    AgentReasoningDelta,
    Draft,
    Event,
    EventMsg,
    ModelStepCompleted,
    Notice,
    SessionContext,
    StreamMetrics,
    SubmissionAccepted,
    TokenCount,
    ToolProgress,
    TurnStarted,
)
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    Sealed,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state.checkpoint import (
    ActiveExecution,
    AgentRole,
    Checkpoint,
    ExecutionRecord,
    QueuedMessage,
    ToolCall,
)
from trio_agent.store.base import CheckpointStore, Lease
from trio_agent.testing.mortal import MortalStore, ProcessDied

Factory: TypeAlias = Callable[[], CheckpointStore]
Again: TypeAlias = Callable[[CheckpointStore], CheckpointStore]


async def check_store(factory: Factory, *, again: Again | None = None) -> None:
    """Check that a store keeps the contract of `CheckpointStore`.

    Runs for some seconds; call it from an async test::

        async def test_my_store(tmp_path):
            count = itertools.count()
            await check_store(
                lambda: MyStore(tmp_path / f"{next(count)}"),
                again=lambda store: MyStore(store.path),
            )

    Args:
        factory: Returns a new store over new, empty storage at each call. The check
            closes it.
        again: Opens the storage of a given store once more, as another process
            would, while the first is open or after it was closed. None if the
            storage cannot be shared or dies with its store.

    Raises:
        AssertionError: At the first rule that is broken; the traceback shows which.
    """
    for check in CHECKS:
        store = factory()
        try:
            await check(store)
            assert await store.verify() == (), "verify() must find nothing to complain about"
        finally:
            await store.aclose()
            await store.aclose()
    for dies_at in range(1, 8):
        await _check_crash(factory(), dies_at, "before", again)
        await _check_crash(factory(), dies_at, "after", again)
    if again is not None:
        for rival in RIVALS:
            store = factory()
            try:
                await rival(store, again)
            finally:
                await store.aclose()


# --- small parts to build sessions of


def draft(msg: EventMsg, *, at: int = 1, submission_id: str | None = None) -> Draft:
    """Return *msg* as a draft."""
    return Draft(recorded_at_ms=at, submission_id=submission_id, msg=msg)


def note(text: str) -> Draft:
    """Return a draft that only has a text."""
    return draft(Notice(capability="check", text=text))


def following(checkpoint: Checkpoint, *items: Item, **members: Any) -> Checkpoint:
    """Return the checkpoint after *checkpoint*, its context grown by *items*."""
    if items:
        members["context"] = checkpoint.context.extended(items)
    return attrs.evolve(checkpoint, sequence=checkpoint.sequence + 1, **members)


def finished(session_id: str, submission_id: str) -> ExecutionRecord:
    """Return the record of a turn that completed."""
    return ExecutionRecord(
        session_id=session_id,
        submission_id=submission_id,
        turn_id=f"turn of {submission_id}",
        started_at_ms=1,
        finished_at_ms=2,
        outcome="completed",
        finish_reason="stop",
    )


async def save_turns(
    store: CheckpointStore, checkpoint: Checkpoint, count: int, *, first: int = 1
) -> Checkpoint:
    """Save *count* whole turns, two items and one event each; return the last checkpoint."""
    for number in range(first, first + count):
        name = f"s{number}"
        added: list[Item] = [
            UserItem(text=f"question {number}", submission_id=name),
            AssistantItem(text=f"answer {number}"),
        ]
        checkpoint = following(checkpoint, *added)
        await store.save(
            checkpoint,
            added,
            execution=finished(checkpoint.session_id, name),
            events=[draft(SubmissionAccepted(digest=f"d{number}"), submission_id=name)],
        )
    return checkpoint


async def begin(store: CheckpointStore, session_id: str = "s") -> Checkpoint:
    """Save an empty session; return its checkpoint."""
    checkpoint = Checkpoint.empty(session_id)
    await store.save(checkpoint)
    return checkpoint


class _Refused:
    """``async with``-less `pytest.raises`: awaits a call and returns its error."""

    def __init__(self, *kinds: type[AgentError]) -> None:
        self.kinds = kinds

    async def of(self, call: Awaitable[object]) -> AgentError:
        try:
            result = await call
        except self.kinds as exc:
            return exc
        raise AssertionError(f"expected {self.kinds}, but it returned {result!r}")


stale = _Refused(StaleSessionError).of
owned = _Refused(SessionOwnedError).of
impossible = _Refused(ConfigError).of
unknown = _Refused(UnknownError).of
corrupt = _Refused(CorruptStoreError).of


async def journal_of(store: CheckpointStore, session_id: str = "s") -> list[Event]:
    """Return all events that have a row, oldest first."""
    return list((await store.events_after(session_id, 0, 10_000)).events)


# --- the checks


async def check_empty(store: CheckpointStore) -> None:
    """A new store holds nothing, and says so."""
    assert await store.load("s") is None
    assert await store.session_summary("s") is None
    assert await store.receipt("s", "x") is None
    assert await store.load_content("x") is None
    assert await store.load_state("s", "x") is None
    assert (await store.list_sessions()).sessions == ()
    assert await store.search_sessions("x") == ()
    assert await store.delete_session("s") is False
    await unknown(store.append_events("s", [note("x")]))
    await unknown(store.events_after("s", 0, 1))
    await unknown(store.event_page("s"))
    await unknown(store.transcript_page("s"))
    await unknown(store.execution_page("s"))
    await unknown(store.rename_session("s", "x"))
    await unknown(store.prune("s", keep_events=0))
    await unknown(store.fork("s", 0, "t"))
    await unknown(store.rewind("s", 1))
    await unknown(store.export_session("s"))


async def check_round_trip(store: CheckpointStore) -> None:
    """A checkpoint comes back as it was saved, every member of it, twice."""
    call = ToolCall(
        call_id="c",
        name="tool",
        arguments={"n": 2**53, "t": "\u2028 \x00 😀", "deep": [None, True, 0.5, {"": []}]},
        status="admitted",
    )
    items: list[Item] = [
        UserItem(text="", submission_id="s1"),
        AssistantItem(text="😀" * 2_000, sealed=Sealed(provider="p", data={"x": [1, None]})),
        ToolCallItem(call_id="c", name="tool", arguments=call.arguments),
    ]
    full = Checkpoint(
        session_id="s",
        sequence=7,
        session_context=SessionContext(user_name="Zoë"),
        metadata={"m": [1, {"x": None}]},
        role=AgentRole.subagent("parent", "turn"),
        first_user_message="first",
        model_route="route",
        context=items,
        context_epoch=3,
        total_usage=TokenUsage(input_tokens=5, total_tokens=MAX_INTEGER),
        last_usage=TokenUsage(output_tokens=1),
        queue=(QueuedMessage(owner="m", id="q", boundary="queue", text="long " * 1_000),),
        active_execution=ActiveExecution(submission_id="s1", turn_id="t", started_at_ms=1),
        pending_tools=(call,),
        grants=("g",),
        states={"tasks": {"open": ["a"]}},
        instructions_digest="d",
    )
    await store.save(full, items)
    assert await store.load("s") == full
    emptied = following(full, queue=(), pending_tools=(), active_execution=None, states={})
    await store.save(emptied)
    assert await store.load("s") == emptied


async def check_compare_and_set(store: CheckpointStore) -> None:
    """A save must follow the stored one exactly; a loser changes nothing at all."""
    winner = await begin(store)
    for sequence in (0, 2, 3):
        loser = attrs.evolve(winner, sequence=sequence, model_route="loser")
        added = [UserItem(text="lost")]
        await stale(
            store.save(
                loser,
                added,
                events=[draft(SubmissionAccepted(), submission_id="lost")],
                execution=finished("s", "lost"),
                contents={"lost": "lost"},
            )
        )
    assert await store.load("s") == winner
    assert await journal_of(store) == []
    assert await store.receipt("s", "lost") is None
    assert await store.load_content("lost") is None
    assert (await store.transcript_page("s")).batches == ()
    assert (await store.execution_page("s")).executions == ()
    await store.save(following(winner))
    await store.save(Checkpoint(session_id="late", sequence=41))
    assert await store.load("late") == Checkpoint(session_id="late", sequence=41)


async def check_atomic(store: CheckpointStore) -> None:
    """An impossible part of a save leaves the rest undone, too."""
    before = await begin(store)
    after = following(before, UserItem(text="x"))
    await impossible(
        store.save(after, [], events=[note("good"), draft(TurnStarted(turn_id="t"), at=-1)])
    )
    await impossible(store.save(after, [], execution=finished("other", "x")))
    await impossible(store.save(attrs.evolve(after, states={"x": float("nan")})))
    broken = attrs.evolve(after, pending_tools=(ToolCall(call_id="c", name="t", arguments={}),))
    await corrupt(store.save(broken, events=[note("good")]))
    assert await store.load("s") == before
    assert await journal_of(store) == []


async def check_context_rules(store: CheckpointStore) -> None:
    """Within an epoch the context grows; a higher epoch replaces it; none goes back."""
    first = following(Checkpoint(session_id="s", sequence=-1), UserItem(text="1"))
    await store.save(first)
    await corrupt(store.save(attrs.evolve(following(first), context=())))
    replaced = attrs.evolve(
        following(first), context=[UserItem(text="new"), *first.context], context_epoch=4
    )
    await store.save(replaced)
    assert await store.load("s") == replaced
    lower = attrs.evolve(following(replaced), context_epoch=3)
    await corrupt(store.save(lower))
    grown = following(replaced, UserItem(text="2"))
    await store.save(grown)
    assert await store.load("s") == grown


async def check_leases(store: CheckpointStore) -> None:
    """Only the newest lease writes; a live owner is named; giving back frees."""
    old = await store.claim("s", "first owner")
    refusal = await owned(store.claim("s", "second owner"))
    assert "first owner" in str(refusal), "the refusal must name the owner"
    checkpoint = Checkpoint.empty("s")
    await store.save(checkpoint, lease=old)
    new = await store.claim("s", "second owner", takeover=True)
    assert new.incarnation > old.incarnation
    await stale(store.save(following(checkpoint), lease=old))
    await stale(store.append_events("s", [note("x")], lease=old))
    await store.release(old)  # gone already: does nothing
    await owned(store.claim("s", "third owner"))
    await store.append_events("s", [note("x")], lease=new)
    await store.save(following(checkpoint), lease=new)
    other = await store.claim("t", "me")
    await stale(store.save(following(following(checkpoint)), lease=other))
    for call in (
        store.delete_session("s"),
        store.prune("s", keep_events=0),
        store.rewind("s", 1),
        store.fork("s", 1, "fork"),
    ):
        await owned(call)
    await store.fork("s", 0, "fork")
    await store.rename_session("s", "needs no lease")
    await store.release(new)
    last = await store.claim("s", "third owner")
    assert last.incarnation > new.incarnation
    await stale(store.save(following(following(checkpoint)), lease=new))
    await store.release(last)
    await store.release(last)


async def check_guard(store: CheckpointStore) -> None:
    """A guard ends with an error when the session is taken over, and only then."""
    mine, other = await store.claim("s", "me"), await store.claim("t", "me")
    ended: list[str] = []
    first = trio.Event()

    async def guard(lease: Lease) -> None:
        await owned(store.guard(lease))
        ended.append(lease.session_id)
        first.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(guard, mine)
        nursery.start_soon(guard, other)
        await trio.testing.wait_all_tasks_blocked()
        taken = await store.claim("s", "another", takeover=True)
        with trio.fail_after(30):
            await first.wait()
        assert ended == ["s"]
        nursery.cancel_scope.cancel()
    await owned(store.guard(mine))
    await store.release(taken)
    await store.release(other)


async def check_numbers(store: CheckpointStore) -> None:
    """Events are numbered from 1; transient ones leave no row, old token counts neither."""
    checkpoint = await begin(store)
    progress = ToolProgress(turn_id="t", call_id="c", message="m")
    counts = [draft(TokenCount(total=TokenUsage(total_tokens=n))) for n in range(3)]
    saved = await store.save(
        following(checkpoint), events=[note("1"), draft(progress), counts[0], counts[1]]
    )
    appended = await store.append_events("s", [counts[2], note("6"), draft(progress)])
    assert [event.sequence for event in (*saved, *appended)] == [1, 2, 3, 4, 5, 6, 7]
    assert [event.msg for event in saved] == [
        note("1").msg,
        progress,
        counts[0].msg,
        counts[1].msg,
    ]
    assert [event.sequence for event in await journal_of(store)] == [1, 5, 6]
    page = await store.event_page("s")
    assert page.latest_sequence == 7
    assert list(page.events) == list(reversed(await journal_of(store)))
    summary = await store.session_summary("s")
    assert summary is not None
    assert summary.latest_event_sequence == 7
    assert await store.append_events("s", []) == ()


async def check_deltas(store: CheckpointStore) -> None:
    """Deltas are joined, and give way to the metrics of their step once it completed."""
    checkpoint = await begin(store)

    def text(at: int, words: str, step: str = "p") -> Draft:
        return draft(AgentMessageDelta(turn_id="t", step_id=step, text=words), at=at)

    def thought(at: int, words: str) -> Draft:
        return draft(AgentReasoningDelta(turn_id="t", step_id="p", text=words), at=at)

    def done(outcome: Any, step: str = "p") -> Draft:
        return draft(
            ModelStepCompleted(
                turn_id="t",
                step_id=step,
                step_index=0,
                outcome=outcome,
                started_at_ms=1,
                completed_at_ms=99,
            )
        )

    flushed = await store.append_events(
        "s",
        [thought(10, "hm"), text(20, "a"), thought(12, "m"), text(25, "é"), text(26, "z", "q")],
    )
    assert [event.msg for event in flushed] == [
        thought(0, "hmm").msg,
        text(0, "aé").msg,
        text(0, "z", "q").msg,
    ]
    assert await journal_of(store) == list(flushed)
    await store.append_events("s", [text(24, "b"), note("between"), text(60, "c")])
    saved = await store.save(
        following(checkpoint), events=[text(61, "d"), done("completed"), done("failed", "q")]
    )
    metrics = (
        StreamMetrics(
            phase="reasoning",
            first_delta_at_ms=10,
            last_delta_at_ms=12,
            chunk_count=2,
            utf8_bytes=3,
            longest_gap_ms=2,
        ),
        StreamMetrics(
            phase="final_answer",
            first_delta_at_ms=20,
            last_delta_at_ms=61,
            chunk_count=5,
            utf8_bytes=6,
            longest_gap_ms=35,
        ),
    )
    completed = saved[1].msg
    assert isinstance(completed, ModelStepCompleted)
    assert completed.stream_metrics == metrics
    left = [event.msg for event in await journal_of(store)]
    failed = done("failed", "q").msg
    assert left == [text(0, "z", "q").msg, note("between").msg, completed, failed]
    slice_ = await store.events_after("s", 0, 1)
    assert slice_.pruned_through == 0, "replaced deltas are no gap"


async def check_receipts(store: CheckpointStore) -> None:
    """A receipt outlives its event and every rewind, and the first one stands."""
    checkpoint = await save_turns(store, await begin(store), 2)
    again = [draft(SubmissionAccepted(digest="other"), submission_id="s1")]
    await store.append_events("s", again)
    await impossible(store.append_events("s", [draft(SubmissionAccepted())]))
    await store.rewind("s", 2)
    await store.prune("s", keep_events=0)
    receipt = await store.receipt("s", "s1")
    assert receipt is not None
    assert (receipt.status, receipt.sequence, receipt.digest) == ("duplicate", 1, "d1")
    assert await store.receipt("s", "never") is None
    assert checkpoint.sequence == 2


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
        await _Refused(ProtocolError).of(store.import_session(bad, session_id="new"))
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


CHECKS: Sequence[Callable[[CheckpointStore], Awaitable[None]]] = (
    check_empty,
    check_round_trip,
    check_compare_and_set,
    check_atomic,
    check_context_rules,
    check_leases,
    check_guard,
    check_numbers,
    check_deltas,
    check_receipts,
    check_pages,
    check_limits,
    check_prune,
    check_contents,
    check_fork,
    check_rewind,
    check_delete,
    check_transfer,
    check_catalog,
    check_state,
    check_cancellation,
    check_many,
)
"""Each takes a new store and checks one rule."""


# --- crashes and rivals


async def _check_crash(
    store: CheckpointStore, dies_at: int, when: Any, again: Again | None
) -> None:
    """Whatever was acknowledged before a death is there after it, and the next one goes on."""
    mortal = MortalStore(store, dies_at=dies_at, when=when)
    acknowledged = -1
    checkpoint = Checkpoint(session_id="s", sequence=-1)
    lease = None
    try:
        lease = await mortal.claim("s", "mortal")
        for number in range(5):
            added = [UserItem(text=f"{number}", submission_id=f"s{number}")]
            checkpoint = following(checkpoint, *added)
            accepted = draft(SubmissionAccepted(), submission_id=f"s{number}")
            await mortal.save(checkpoint, added, lease=lease, events=[accepted])
            acknowledged = number
    except ProcessDied:
        pass
    await mortal.bury()
    reopened = store
    if again is not None:
        await store.aclose()
        reopened = again(store)
    try:
        found = await reopened.load("s")
        sequence = -1 if found is None else found.sequence
        happened = acknowledged + (when == "after" and 1 < dies_at <= 6)
        assert sequence == happened, f"save {happened} was the last, found {sequence}"
        for number in range(5):
            receipt = await reopened.receipt("s", f"s{number}")
            assert (receipt is not None) == (number <= happened)
        next_owner = await reopened.claim("s", "heir")
        if lease is not None and found is not None:
            await stale(reopened.save(following(found), lease=lease))
        await reopened.save(
            Checkpoint(session_id="s") if found is None else following(found), lease=next_owner
        )
        await reopened.release(next_owner)
        assert await reopened.verify() == ()
    finally:
        await reopened.aclose()


async def rival_saves(store: CheckpointStore, again: Again) -> None:
    """Of two openers that save the same number, one wins and the other is told."""
    other = again(store)
    try:
        checkpoint = await begin(store)
        for number in range(5):
            results: list[str] = []

            async with trio.open_nursery() as nursery:
                nursery.start_soon(_rival, store, checkpoint, "one", results)
                nursery.start_soon(_rival, other, checkpoint, "other", results)
            assert len(results) == 1, f"round {number}: {results} both won"
            loaded = await other.load("s")
            assert loaded is not None
            assert loaded.context[-1] == UserItem(text=results[0])
            assert await store.load("s") == loaded
            checkpoint = loaded
        assert len(await journal_of(other)) == 5
    finally:
        await other.aclose()


async def _rival(
    store: CheckpointStore, checkpoint: Checkpoint, name: str, winners: list[str]
) -> None:
    rival = following(checkpoint, UserItem(text=name))
    try:
        await store.save(rival, rival.context[-1:], events=[note(name)])
        winners.append(name)
    except StaleSessionError:
        pass


async def rival_owners(store: CheckpointStore, again: Again) -> None:
    """A second opener is refused, may take over, and the first one's guard ends."""
    other = again(store)
    try:
        mine = await store.claim("s", "the first")
        await store.save(Checkpoint.empty("s"), lease=mine)
        refusal = await owned(other.claim("s", "the second"))
        assert "the first" in str(refusal)
        await owned(other.delete_session("s"))
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(owned, store.guard(mine))
                await trio.testing.wait_all_tasks_blocked()
                theirs = await other.claim("s", "the second", takeover=True)
        await stale(store.save(Checkpoint(session_id="s", sequence=1), lease=mine))
        await other.save(Checkpoint(session_id="s", sequence=1), lease=theirs)
        await other.aclose()  # closing frees what it holds
        await store.release(await store.claim("s", "the first"))
    finally:
        await other.aclose()


RIVALS = (rival_saves, rival_owners)
"""Each opens the same storage twice."""
