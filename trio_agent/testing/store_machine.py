"""`StoreMachine`: any store against the one in memory, operation by operation.

Needs Hypothesis (the extra ``testing``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import attrs
import trio
from hypothesis import event, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trio_agent.errors import AgentError
from trio_agent.protocol.events import (
    AgentMessage,
    AgentMessageDelta,
    AgentReasoningDelta,
    ApprovalResolved,
    ContentPart,
    Draft,
    EventMsg,
    ModelStepCompleted,
    Notice,
    SessionContext,
    SubmissionAccepted,
    TokenCount,
    ToolCallEnd,
    ToolProgress,
    UserMessage,
)
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    ReasoningItem,
    Sealed,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.ops import Approved
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state.checkpoint import (
    ActiveExecution,
    AgentRole,
    Approval,
    Checkpoint,
    ExecutionRecord,
    QueuedMessage,
    ToolCall,
)
from trio_agent.store.base import CheckpointStore, Lease, SessionPage, SessionSummary
from trio_agent.store.memory import MemoryCheckpoint

T = TypeVar("T")

NAMES = ("a", "A", "é", "e\u0301")
"""Session ids that differ by case or by Unicode form only."""

ids = st.sampled_from(["a", "a", "a", *NAMES])
"""Mostly one session, so that it gets a history."""

submissions = st.sampled_from(["s1", "s2", "s3", "s4"])
texts = (
    st.sampled_from(["", "hello", 'say "hi"\n', "naïve ☃ 😀"])
    | st.just(3_000).map("x".__mul__)  # Hypothesis keeps in memory how strategies read
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text("xy", max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
arguments = st.dictionaries(st.sampled_from(["path", "text"]), values, max_size=2)
sealed = st.none() | st.builds(Sealed, provider=st.just("p"), data=values)
times = st.integers(0, 1_000)


def _kw(cls: Callable[..., T], **members: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    return st.builds(cls, **members)


items: st.SearchStrategy[Item] = st.one_of(
    _kw(UserItem, text=texts, submission_id=st.none() | submissions),
    _kw(UserItem, text=texts, internal=st.just("guidance")),
    _kw(AssistantItem, text=texts, sealed=sealed),
    _kw(ReasoningItem, text=texts, sealed=sealed),
    _kw(ToolCallItem, call_id=st.sampled_from("12"), name=st.just("tool"), arguments=arguments),
    _kw(ToolOutputItem, call_id=st.sampled_from("12"), output=texts, is_error=st.booleans()),
)
steps = st.sampled_from(["p1", "p2"])
_step = {"turn_id": st.just("t"), "step_id": steps}
deltas: st.SearchStrategy[EventMsg] = st.one_of(
    _kw(
        AgentMessageDelta,
        **_step,
        text=texts,
        phase=st.sampled_from(["commentary", "final_answer"]),
    ),
    _kw(AgentReasoningDelta, **_step, text=texts),
)
completions: st.SearchStrategy[EventMsg] = _kw(
    ModelStepCompleted,
    **_step,
    step_index=st.just(0),
    outcome=st.sampled_from(["completed", "failed", "interrupted", "retrying"]),
    started_at_ms=times,
    completed_at_ms=times,
)
facts: st.SearchStrategy[EventMsg] = st.one_of(
    _kw(UserMessage, turn_id=st.just("t"), text=texts),
    _kw(
        AgentMessage,
        **_step,
        content=st.tuples(_kw(ContentPart, phase=st.just("commentary"), text=texts)),
    ),
    _kw(
        ToolCallEnd,
        turn_id=st.just("t"),
        call_id=st.just("1"),
        name=st.just("look"),
        output=texts,
        outcome=st.just("finished"),
    ),
    _kw(TokenCount, total=_kw(TokenUsage, total_tokens=times)),
    _kw(Notice, capability=st.just("c"), text=texts),
    _kw(ToolProgress, turn_id=st.just("t"), call_id=st.just("1"), message=texts),
    _kw(
        ApprovalResolved,
        id=st.just("i"),
        call_id=st.just("1"),
        decision=st.none() | _kw(Approved),
    ),
)
drafts = st.one_of(
    _kw(Draft, recorded_at_ms=times, msg=deltas),
    _kw(Draft, recorded_at_ms=times, msg=completions),
    _kw(Draft, recorded_at_ms=times, msg=facts, submission_id=st.none() | submissions),
    _kw(
        Draft,
        recorded_at_ms=times,
        submission_id=submissions,
        msg=_kw(SubmissionAccepted, digest=st.sampled_from(["d1", "d2"])),
    ),
)
journals = st.lists(drafts, max_size=6)
messages = _kw(
    QueuedMessage,
    owner=st.just("messages"),
    id=submissions,
    boundary=st.just("queue"),
    text=texts,
)
queues = st.lists(messages, max_size=4, unique_by=lambda one: one.id).map(tuple)
calls = st.lists(
    _kw(
        ToolCall,
        call_id=st.sampled_from("123"),
        name=st.just("tool"),
        arguments=arguments,
        status=st.sampled_from(["admitted", "begun", "ended"]),
        output=texts,
        approval=st.none() | _kw(Approval, id=st.just("i")),
    ),
    max_size=3,
    unique_by=lambda one: one.call_id,
).map(tuple)


@st.composite
def changes(draw: st.DrawFn, before: Checkpoint) -> tuple[Checkpoint, list[Item]]:
    """Return a checkpoint that may follow *before*, and what its transcript gains."""
    grown = draw(st.lists(items, max_size=3))
    members: dict[str, Any] = {}
    if draw(st.integers(0, 7)) == 0:
        kept = list(before.context)[draw(st.integers(0, len(before.context))) :]
        members |= {"context_epoch": before.context_epoch + 1, "context": [*grown, *kept]}
    else:
        members["context"] = before.context.extended(grown)
    delta = draw(
        st.sampled_from([grown, [], grown[1:], list(reversed(grown))])
        | st.lists(items, max_size=2)
    )
    if draw(st.booleans()):
        members["queue"] = draw(st.permutations(before.queue).map(tuple) | queues)
    if draw(st.booleans()):
        running = draw(st.booleans())
        members["active_execution"] = (
            ActiveExecution(submission_id="s1", turn_id="t", started_at_ms=1)
            if running
            else None
        )
        members["pending_tools"] = draw(calls) if running else ()
    if draw(st.integers(0, 3)) == 0:
        members["states"] = draw(st.dictionaries(st.just("tasks"), values))
        members["metadata"] = draw(st.dictionaries(st.just("m"), values))
        members["session_context"] = draw(_kw(SessionContext, user_name=st.none() | texts))
        members["total_usage"] = draw(_kw(TokenUsage, input_tokens=times, total_tokens=times))
        members["first_user_message"] = draw(st.none() | texts)
        members["grants"] = draw(st.just(()) | st.just(("g",)))
    return attrs.evolve(before, **members), delta


class StoreMachine(RuleBasedStateMachine):
    """Drives a store and `MemoryCheckpoint` with the same random operations.

    Subclass it, override `make_store`, and give its ``TestCase`` to your test runner::

        class MyStoreMachine(StoreMachine):
            def make_store(self):
                return MyStore()

        TestMyStore = MyStoreMachine.TestCase

    Every operation must have the same result in both, or the same class of error.
    Wall-clock times and cursors are the store's own business.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model: CheckpointStore = MemoryCheckpoint()
        self.store: CheckpointStore = self.make_store()
        self.leases: dict[str, tuple[Lease, Lease]] = {}
        self.known: dict[str, Checkpoint] = {}

    def make_store(self) -> CheckpointStore:
        """Return a new and empty store; override it."""
        return MemoryCheckpoint()

    def reopen(self, store: CheckpointStore) -> CheckpointStore:
        """Close *store* in order and open it again, if it survives that; override it."""
        return store

    def teardown(self) -> None:
        """Close both stores."""
        trio.run(self.store.aclose)

    # --- running an operation on both

    def both(self, operation: Callable[[CheckpointStore, int], Awaitable[Any]]) -> Any:
        """Run *operation* on the model and on the store; return the model's result or error."""

        async def outcome(store: CheckpointStore, which: int) -> Any:
            try:
                return await operation(store, which)
            except AgentError as exc:
                return exc

        async def main() -> tuple[Any, Any]:
            return await outcome(self.model, 0), await outcome(self.store, 1)

        expected, found = trio.run(main)
        if isinstance(expected, AgentError):
            event(f"refused: {type(expected).__name__}")
            assert type(found) is type(expected), f"expected {expected!r}, found {found!r}"
        else:
            assert told(found) == told(expected)
        return expected

    def lease(self, session_id: str, which: int) -> Lease | None:
        """Return the lease that was claimed last, if one was."""
        pair = self.leases.get(session_id)
        return None if pair is None else pair[which]

    # --- writing

    @initialize(session_id=ids, data=st.data())
    def first(self, session_id: str, data: st.DataObject) -> None:
        """Begin with one session."""
        self.save(session_id, 0, leased=False, new=[], data=data)

    @rule(
        session_id=ids,
        skip=st.sampled_from([0, 0, 0, 0, 0, 1, -1]),
        leased=st.booleans(),
        new=journals,
        data=st.data(),
    )
    def save(
        self, session_id: str, skip: int, leased: bool, new: list[Draft], data: st.DataObject
    ) -> None:
        """Save what may follow, or with *skip* something stale."""
        before = self.known.get(session_id)
        if before is None:
            before = Checkpoint(session_id=session_id, sequence=-1)
        checkpoint, delta = data.draw(changes(before), label="change")
        sequence = max(0, checkpoint.sequence + 1 + skip)
        checkpoint = attrs.evolve(checkpoint, sequence=sequence)
        execution = None
        if checkpoint.active_execution is None and data.draw(st.booleans()):
            execution = _finished(session_id, data.draw(submissions))
        contents = data.draw(
            st.none() | st.dictionaries(st.sampled_from("xy"), st.just("long"))
        )
        result = self.both(
            lambda store, which: store.save(
                checkpoint,
                delta,
                lease=self.lease(session_id, which) if leased else None,
                execution=execution,
                events=new,
                contents=contents,
            )
        )
        if not isinstance(result, AgentError):
            self.known[session_id] = checkpoint

    @rule(session_id=ids, submission_id=submissions, answer=texts)
    def turn(self, session_id: str, submission_id: str, answer: str) -> None:
        """Save a whole turn at once."""
        before = self.known.get(session_id) or Checkpoint(session_id=session_id, sequence=-1)
        asked = UserItem(text="go", submission_id=submission_id)
        grown: list[Item] = [asked, AssistantItem(text=answer)]
        checkpoint = attrs.evolve(
            before,
            sequence=before.sequence + 1,
            context=before.context.extended(grown),
            active_execution=None,
            pending_tools=(),
        )
        finished = _finished(session_id, submission_id)
        result = self.both(lambda store, _: store.save(checkpoint, grown, execution=finished))
        if not isinstance(result, AgentError):
            self.known[session_id] = checkpoint

    @rule(session_id=ids, parent=ids)
    def save_subagent(self, session_id: str, parent: str) -> None:
        """Begin the session of a subagent."""
        if session_id in self.known or session_id == parent:
            return
        role = AgentRole.subagent(parent, "t")
        checkpoint = Checkpoint(session_id=session_id, role=role)
        result = self.both(lambda store, _: store.save(checkpoint))
        if not isinstance(result, AgentError):
            self.known[session_id] = checkpoint

    @rule(session_id=ids, shrink=st.booleans())
    def save_impossible(self, session_id: str, shrink: bool) -> None:
        """Try to shorten a context, or to lower its epoch."""
        before = self.known.get(session_id)
        if before is None or not before.context or (not shrink and not before.context_epoch):
            return
        members: dict[str, Any] = {"sequence": before.sequence + 1}
        if shrink:
            members["context"] = before.context[:-1]
        else:
            members["context_epoch"] = before.context_epoch - 1
        result = self.both(lambda store, _: store.save(attrs.evolve(before, **members)))
        assert isinstance(result, AgentError)

    @rule(session_id=ids, new=journals, leased=st.booleans())
    def append(self, session_id: str, new: list[Draft], leased: bool) -> None:
        """Append to the journal."""
        self.both(
            lambda store, which: store.append_events(
                session_id, new, lease=self.lease(session_id, which) if leased else None
            )
        )

    # --- ownership

    @rule(session_id=ids, takeover=st.booleans())
    def claim(self, session_id: str, takeover: bool) -> None:
        """Claim a session; older leases are stale from then on."""
        pair: list[Any] = [None, None]

        async def claim(store: CheckpointStore, which: int) -> None:
            pair[which] = await store.claim(session_id, "me", takeover=takeover)

        if not isinstance(self.both(claim), AgentError):
            self.leases[session_id] = (pair[0], pair[1])

    @rule(session_id=ids)
    def release(self, session_id: str) -> None:
        """Give the newest lease back; it can still be used until somebody claims."""
        pair = self.leases.get(session_id)
        if pair is not None:
            self.both(lambda store, which: store.release(pair[which]))

    # --- whole sessions

    @rule(session_id=ids)
    def delete(self, session_id: str) -> None:
        """Delete a session and its subagents."""
        if self.both(lambda store, _: store.delete_session(session_id)) is True:
            for key in list(self.known):
                if trio.run(self.model.load, key) is None:
                    del self.known[key]

    @rule(session_id=ids, keep=st.integers(0, 8))
    def prune(self, session_id: str, keep: int) -> None:
        """Delete old events."""
        self.both(lambda store, _: store.prune(session_id, keep_events=keep))

    def unused(self, session_id: str) -> str:
        """Return an id that no session has yet, or *session_id* if all are taken."""
        return next((name for name in NAMES if name not in self.known), session_id)

    @rule(parent=ids, at=st.integers(0, 4), session_id=ids, fresh=st.booleans())
    def fork(self, parent: str, at: int, session_id: str, fresh: bool) -> None:
        """Fork at any save."""
        session_id = self.unused(session_id) if fresh else session_id
        newest = self.known.get(parent)
        at = at if newest is None else max(0, newest.sequence - at)
        result = self.both(lambda store, _: store.fork(parent, at, session_id))
        if not isinstance(result, AgentError):
            event("forked")
            self.relearn(session_id)

    @rule(session_id=ids, turns=st.integers(0, 2))
    def rewind(self, session_id: str, turns: int) -> None:
        """Take turns out of a context."""
        result = self.both(lambda store, _: store.rewind(session_id, turns))
        if not isinstance(result, AgentError):
            event("rewound")
            self.relearn(session_id)

    @rule(session_id=ids, under=st.none() | ids)
    def copy(self, session_id: str, under: str | None) -> None:
        """Export a session and import it again, perhaps under another id."""
        under = under and self.unused(under)

        async def copy(store: CheckpointStore, _: int) -> str:
            data = await store.export_session(session_id)
            return await store.import_session(data, session_id=under)

        result = self.both(copy)
        if not isinstance(result, AgentError):
            event("copied")
            self.relearn(result)

    def relearn(self, session_id: str) -> None:
        """Note what the model holds now."""
        checkpoint = trio.run(self.model.load, session_id)
        assert checkpoint is not None
        self.known[session_id] = checkpoint

    @rule()
    def restart(self) -> None:
        """Close and open again; whatever was not released is free then, or is not."""
        for session_id in self.leases:
            self.release(session_id)
        self.store = self.reopen(self.store)

    # --- reading

    @rule(session_id=ids, after=st.integers(-1, 12), limit=st.integers(0, 5))
    def catch_up(self, session_id: str, after: int, limit: int) -> None:
        """Read the journal forwards."""
        self.both(lambda store, _: store.events_after(session_id, after, limit))

    @rule(session_id=ids, before=st.none() | st.integers(-1, 12), limit=st.integers(0, 4))
    def pages(self, session_id: str, before: int | None, limit: int) -> None:
        """Read all kinds of pages."""
        self.both(
            lambda store, _: store.event_page(session_id, before_sequence=before, limit=limit)
        )
        self.both(
            lambda store, _: store.transcript_page(
                session_id, before_sequence=before, max_batches=limit
            )
        )
        self.both(
            lambda store, _: store.execution_page(
                session_id, before_sequence=before, limit=limit
            )
        )

    @rule(session_id=ids, submission_id=submissions)
    def receipt(self, session_id: str, submission_id: str) -> None:
        """Ask for a receipt."""
        self.both(lambda store, _: store.receipt(session_id, submission_id))

    @rule(digest=st.sampled_from("xyz"))
    def content(self, digest: str) -> None:
        """Read content."""
        self.both(lambda store, _: store.load_content(digest))

    @rule(limit=st.integers(1, 3))
    def walk(self, limit: int) -> None:
        """List all sessions, page by page."""

        async def walk(store: CheckpointStore, _: int) -> list[SessionSummary]:
            found: list[SessionSummary] = []
            cursor = None
            while True:
                page = await store.list_sessions(cursor=cursor, limit=limit)
                found += page.sessions
                cursor = page.next_cursor
                if cursor is None:
                    return found

        self.both(walk)

    @rule(session_id=ids, title=st.none() | texts)
    def rename(self, session_id: str, title: str | None) -> None:
        """Give a title."""
        self.both(lambda store, _: store.rename_session(session_id, title))

    @rule(text=st.sampled_from(["HELLO", "☃", "hi", "\n", "nothing has this", "É"]))
    def search(self, text: str) -> None:
        """Search."""
        self.both(lambda store, _: store.search_sessions(text))

    @rule(scope=ids, key=st.sampled_from("xy"), value=values)
    def state(self, scope: str, key: str, value: Any) -> None:
        """Store a value of a capability."""
        self.both(lambda store, _: store.save_state(scope, key, value))
        self.both(lambda store, _: store.load_state(scope, key))

    @invariant()
    def same(self) -> None:
        """Both hold the same checkpoints and summaries."""

        async def everything(store: CheckpointStore, _: int) -> list[Any]:
            return [(await store.load(key), await store.session_summary(key)) for key in NAMES]

        self.both(everything)

    @rule()
    def verify(self) -> None:
        """Both are sound."""
        problems = self.both(lambda store, _: store.verify())
        note(f"{problems}")
        assert problems == ()


def _finished(session_id: str, submission_id: str) -> ExecutionRecord:
    return ExecutionRecord(
        session_id=session_id,
        submission_id=submission_id,
        turn_id="t",
        started_at_ms=1,
        finished_at_ms=2,
        outcome="completed",
        finish_reason="stop",
    )


def told(value: Any) -> Any:
    """Return *value* without what every store may choose for itself."""
    match value:
        case SessionSummary():
            return attrs.evolve(value, created_at_ms=0, updated_at_ms=0)
        case SessionPage():
            return tuple(map(told, value.sessions))
        case list() | tuple():
            return [told(one) for one in cast("Sequence[Any]", value)]
        case _:
            return value
