"""The rules of a store about saves, owners, contexts and journals; `check_store` runs them."""

from __future__ import annotations

from typing import Any

import attrs
import trio
import trio.testing

from trio_agent.protocol.events import (
    AgentMessage,
    AgentMessageDelta,
    AgentReasoningDelta,
    ContentPart,
    Draft,
    ModelStepCompleted,
    SessionContext,
    StreamMetrics,
    SubmissionAccepted,
    TokenCount,
    ToolCallEnd,
    ToolProgress,
    TurnStarted,
    UserMessage,
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
    ExecutionStats,
    QueuedMessage,
    ToolCall,
)
from trio_agent.store.base import CheckpointStore, Lease
from trio_agent.testing.store_parts import (
    begin,
    corrupt,
    draft,
    finished,
    following,
    impossible,
    journal_of,
    note,
    owned,
    save_turns,
    stale,
    unknown,
)


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
        execution_stats=ExecutionStats(run_count=2, usage=TokenUsage(total_tokens=7)),
        grants=("g",),
        states={"tasks": {"open": ["a"]}},
        instructions_digest="d",
    )
    await store.save(full, items)
    assert await store.load("s") == full
    emptied = following(full, queue=(), pending_tools=(), active_execution=None, states={})
    await store.save(emptied)
    assert await store.load("s") == emptied
    last = emptied
    for sizes in ((10,), (10, 20), (10, 20, 90_000), (20,), (90_000, 10), (), (5,)):
        queue = tuple(
            QueuedMessage(owner="m", id=f"{size}", boundary="queue", text="x" * size)
            for size in sizes
        )
        stats = ExecutionStats(run_count=len(sizes))
        last = following(last, queue=queue, execution_stats=stats)
        await store.save(last)
        assert await store.load("s") == last, "a queue of any size is kept, in order"


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
    """Only the newest lease writes; a live owner is named; giving back always frees."""
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
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.release(last)
    assert scope.cancelled_caught, "giving back must be a checkpoint"
    last = await store.claim("s", "whoever comes after a cancelled release")
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
    second = following(following(checkpoint))
    await store.save(second, events=[counts[0], note("9")])
    await store.save(following(second), events=[counts[1]])
    await store.append_events("s", [counts[2]])
    await store.append_events("s", [counts[0]])
    await store.save(following(following(second)), events=[note("13"), counts[1]])
    assert [event.sequence for event in await journal_of(store)] == [1, 6, 9, 13, 14]


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


async def check_told_twice(store: CheckpointStore) -> None:
    """An event that tells what an item tells stays whole, whatever becomes of either."""
    question, output, answer = (word * 40 for word in ("why? ", "found ", "so. "))
    added: list[Item] = [
        UserItem(text=question, submission_id="s1"),
        ToolCallItem(call_id="c", name="look", arguments={}),
        ToolOutputItem(call_id="c", output=output),
        AssistantItem(text=answer),
    ]
    part = ContentPart(phase="final_answer", text=answer)
    end = ToolCallEnd(turn_id="t", call_id="c", name="look", output=output, outcome="finished")
    drafts = [
        draft(UserMessage(turn_id="t", text=question)),
        draft(end),
        draft(AgentMessage(turn_id="t", step_id="p", content=(part,))),
        draft(AgentMessage(turn_id="t", step_id="p", content=(part, part))),
        draft(AgentMessage(turn_id="t", step_id="p", content=())),
        note(question),
    ]
    checkpoint = following(await begin(store), *added)
    told = await store.save(checkpoint, added, events=drafts, execution=finished("s", "s1"))
    assert [event.msg for event in told] == [one.msg for one in drafts]
    checkpoint = await save_turns(store, checkpoint, 1, first=2)
    latest = (await store.event_page("s", limit=1)).events
    assert await journal_of(store) == [*told, *latest]
    assert (await store.event_page("s")).events == (*latest, *reversed(told))
    name = await store.import_session(await store.export_session("s"), session_id="copy")
    assert await journal_of(store, name) == [*told, *latest]
    cut = await store.rewind("s", 2)
    assert len(cut.context) == 0
    assert await journal_of(store) == [*told, *latest]
    await store.prune("s", keep_events=5)
    assert await journal_of(store) == [*told[2:], *latest]
    assert await store.verify() == ()


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
