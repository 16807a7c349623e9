"""Any legal sequence of changes, cut off anywhere, settles truthfully under both policies.

The machine draws changes for the phase that it is in, commits some of them together,
and dies at any moment: what was not committed is gone. Deliberate breakages that it
finds are listed in MUTANTS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import attrs
import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_agent.errors import InternalError
from trio_agent.protocol.events import (
    CallOutcome,
    Delivery,
    Event,
    EventMsg,
    FinishReason,
    ModelChanged,
    SessionConfigured,
    SessionContext,
    SubmissionAccepted,
    ToolCallEnd,
    TurnAborted,
    TurnComplete,
)
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    ReasoningItem,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.ops import Abort, Approved, ApprovedForSession, Denied
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state import changes as ch
from trio_agent.state.checkpoint import (
    Approval,
    Checkpoint,
    Effect,
    ExecutionRecord,
    QueuedMessage,
    ToolCall,
)
from trio_agent.state.execution import record_of
from trio_agent.state.machine import ALWAYS, TRANSITIONS, Phase, advance, phase_of
from trio_agent.state.narration import narrate
from trio_agent.state.recovery import Known, Recovery, close_turn, recover
from trio_agent.testing.invariants import JournalCheck, check_checkpoint

EFFECTS: tuple[Effect, ...] = get_args(Effect)
REPEATABLE = frozenset({"read_only", "idempotent"})
MODEL = ModelChanged(route="default", model="m")
OPENED = SessionConfigured(session_id="s", context=SessionContext(), model=MODEL)
SMALL = st.builds(TokenUsage, total_tokens=st.integers(0, 9), input_tokens=st.integers(0, 9))
TEXTS = st.sampled_from(["", " ", "one", "two 😀"])
CLOCK = st.integers(0, 50)
"""Readings of a clock that runs where it likes."""


def boundaries(items: Sequence[Item]) -> list[int]:
    """Return the lengths at which a history may be cut: where no call is open."""
    cuts: list[int] = []
    waiting: set[str] = set()
    for length, item in enumerate(items, start=1):
        if isinstance(item, ToolCallItem):
            waiting.add(item.call_id)
        elif isinstance(item, ToolOutputItem):
            waiting.discard(item.call_id)
        if not waiting:
            cuts.append(length)
    return cuts


class Session(RuleBasedStateMachine):
    """A session's memory, what is durable of it, and the world that its tools act on.

    A tool's name is its effect, so the journal alone tells which may run twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = self.durable = Checkpoint.empty("s")
        self.uncommitted: list[tuple[str | None, EventMsg]] = []
        self.records: list[ExecutionRecord] = []
        self.pending_records: list[ExecutionRecord] = []
        self.withdrawn: set[str] = set()
        self.pending_withdrawn: set[str] = set()
        self.outside = self.pending_outside = TokenUsage()
        self.check = JournalCheck(repeatable=REPEATABLE)
        self.ids = 0
        self.entered: dict[str, int] = {}
        self.effects: dict[str, Effect] = {}
        self.pending_begun: list[str] = []
        self.first: str | None = None
        self.told(
            None, SessionConfigured(session_id="s", context=SessionContext(), model=MODEL)
        )
        self.commit()

    # --- plumbing

    def fresh(self, kind: str) -> str:
        """Return an id that was never used, not even by a process that died."""
        self.ids += 1
        return f"{kind}{self.ids}"

    def told(self, submission_id: str | None, msg: EventMsg) -> None:
        self.uncommitted.append((submission_id, msg))

    def do(self, change: ch.Change) -> None:
        """Advance the memory by a legal change."""
        before = self.memory
        after = advance(before, change)
        self.uncommitted.extend(narrate(before, change, after))
        if isinstance(change, ch.TurnEnded):
            self.pending_records.append(record_of(before, change))
        if isinstance(change, ch.CallsBegan):
            self.pending_begun.extend(change.call_ids)
        assert 0 <= after.context_epoch - before.context_epoch <= 1
        self.memory = after

    def commit(self) -> None:
        """Make the memory durable; handlers of calls that have begun are entered now."""
        start = self.check.sequence
        events = [
            Event(sequence=start + n, recorded_at_ms=0, submission_id=submission_id, msg=msg)
            for n, (submission_id, msg) in enumerate(self.uncommitted, start=1)
        ]
        self.memory = attrs.evolve(self.memory, sequence=self.memory.sequence + 1)
        self.check.read(events)
        self.records.extend(self.pending_records)
        self.withdrawn |= self.pending_withdrawn
        self.outside += self.pending_outside
        for call_id in self.pending_begun:
            self.entered[call_id] = self.entered.get(call_id, 0) + 1
        self.durable = self.memory
        self.forget()
        self.check.settle(
            self.durable,
            self.records,
            withdrawn=self.withdrawn,
            usage_outside=self.outside,
        )

    def forget(self) -> None:
        self.uncommitted, self.pending_records, self.pending_begun = [], [], []
        self.pending_withdrawn = set()
        self.pending_outside = TokenUsage()

    def phase_is(self, *phases: Phase) -> bool:
        return phase_of(self.memory) in phases

    def calls(self, *statuses: str) -> list[ToolCall]:
        return [call for call in self.memory.pending_tools if call.status in statuses]

    # --- a process that lives

    @rule(data=st.data(), times=st.integers(1, 10))
    def work(self, data: st.DataObject, times: int) -> None:
        """Go on as an engine would, so that crashes meet turns in every phase."""
        for _ in range(times):
            self.proceed(data)
            check_checkpoint(self.memory)

    def proceed(self, data: st.DataObject) -> None:
        now_ms = data.draw(CLOCK)
        match phase_of(self.memory):
            case Phase.IDLE if not self.memory.queue:
                self.accept_message(data, "go")
            case Phase.IDLE:
                self.begin_turn(refused=False, now_ms=now_ms)
            case Phase.READY:
                self.begin_step(now_ms)
            case Phase.REQUESTING:
                effects = data.draw(st.lists(st.sampled_from(EFFECTS), min_size=1, max_size=4))
                gated = data.draw(st.sets(st.integers(0, 3), max_size=1))
                self.end_step_with_calls(effects, gated, now_ms)
            case Phase.EXECUTING if self.calls("begun"):
                self.end_call(data, "finished", adds=False)
            case Phase.EXECUTING if any(not call.waiting for call in self.calls("admitted")):
                self.begin_calls(data)
            case Phase.EXECUTING if self.calls("admitted"):
                self.decide(data, Approved())
            case Phase.EXECUTING:
                self.settle_batch()
            case Phase.COMPLETING:
                self.complete_turn(now_ms)

    @rule()
    def save(self) -> None:
        self.commit()

    @rule(data=st.data(), text=TEXTS)
    def accept_message(self, data: st.DataObject, text: str) -> None:
        kinds: list[Delivery] = ["queue"] if self.memory.turn_id is None else ["queue", "steer"]
        boundary = data.draw(st.sampled_from(kinds))
        submission_id = self.fresh("m")
        waiting = QueuedMessage(
            owner="messages",
            id=submission_id,
            boundary=boundary,
            text=text,
            turn_id=self.memory.turn_id if boundary == "steer" else None,
        )
        self.told(submission_id, SubmissionAccepted(delivery=boundary))
        self.do(ch.MessageQueued(message=waiting))

    @precondition(lambda self: self.memory.queue)
    @rule(data=st.data(), text=TEXTS)
    def edit_message(self, data: st.DataObject, text: str) -> None:
        old = data.draw(st.sampled_from(self.memory.queue))
        edit = self.fresh("e")
        self.told(edit, SubmissionAccepted(delivery=old.boundary))
        self.pending_withdrawn.add(old.id)
        self.do(ch.QueueEdited(submission_id=old.id, text=text, new_id=edit))

    @precondition(lambda self: self.memory.queue)
    @rule(data=st.data())
    def cancel_message(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.memory.queue))
        self.told(self.fresh("x"), SubmissionAccepted())
        self.pending_withdrawn.add(old.id)
        self.do(ch.QueueCancelled(submission_id=old.id))

    @precondition(lambda self: self.phase_is(Phase.IDLE) and self.memory.queue)
    @rule(refused=st.booleans(), now_ms=CLOCK)
    def begin_turn(self, refused: bool, now_ms: int) -> None:
        first = self.memory.queue[0]
        began = ch.TurnBegan(
            submission_id=first.id,
            turn_id=self.fresh("t"),
            started_at_ms=now_ms,
            text=None if refused else first.text,
            delivery=first.boundary,
        )
        self.do(began)
        if refused:  # in the same save
            self.do(
                ch.TurnEnded(outcome="aborted", finish_reason="hook", finished_at_ms=now_ms)
            )
            self.commit_ending()

    @precondition(
        lambda self: (
            self.phase_is(Phase.READY, Phase.COMPLETING)
            and any(one.boundary == "steer" for one in self.memory.queue)
        )
    )
    @rule()
    def join_steers(self) -> None:
        for waiting in [one for one in self.memory.queue if one.boundary == "steer"]:
            self.do(ch.SteerJoined(submission_id=waiting.id))
        assert self.phase_is(Phase.READY)

    @precondition(lambda self: self.phase_is(Phase.IDLE, Phase.READY, Phase.COMPLETING))
    @rule(data=st.data(), rewrites=st.booleans())
    def change_context(self, data: st.DataObject, rewrites: bool) -> None:
        hidden = UserItem(text="guidance", internal="x")
        if rewrites:
            cuts = [0, *boundaries(self.memory.context)]
            kept = self.memory.context.since(data.draw(st.sampled_from(cuts)))
            self.do(ch.ContextChanged(rewrite=tuple(kept), items=(hidden,)))
        else:
            self.do(ch.ContextChanged(items=(hidden,)))

    @precondition(lambda self: self.phase_is(Phase.READY))
    @rule(now_ms=CLOCK)
    def begin_step(self, now_ms: int) -> None:
        step_id = self.fresh("s")
        self.do(ch.StepBegan(step_id=step_id, started_at_ms=now_ms, route="default"))

    @precondition(lambda self: self.phase_is(Phase.REQUESTING))
    @rule(usage=st.none() | SMALL, goes_on=st.booleans(), now_ms=CLOCK)
    def end_step_with_text(self, usage: TokenUsage | None, goes_on: bool, now_ms: int) -> None:
        ended = ch.StepEnded(
            outcome="completed",
            completed_at_ms=now_ms,
            usage=usage,
            items=(ReasoningItem(text="hm"), AssistantItem(text="so")),
            completing=None if goes_on else "stop",
        )
        self.do(ended)

    @precondition(lambda self: self.phase_is(Phase.REQUESTING))
    @rule(
        effects=st.lists(st.sampled_from(EFFECTS), min_size=1, max_size=4),
        gated=st.sets(st.integers(0, 3)),
        now_ms=CLOCK,
    )
    def end_step_with_calls(self, effects: list[Effect], gated: set[int], now_ms: int) -> None:
        calls = tuple(
            ToolCall(
                call_id=self.fresh("c"),
                name=effect,
                arguments={"n": n},
                status="admitted",
                effect=effect,
            )
            for n, effect in enumerate(effects)
        )
        items: tuple[Item, ...] = tuple(
            ToolCallItem(call_id=call.call_id, name=call.name, arguments=call.arguments)
            for call in calls
        )
        self.do(
            ch.StepEnded(outcome="completed", completed_at_ms=now_ms, items=items, calls=calls)
        )
        for n, call in enumerate(calls):
            self.effects[call.call_id] = call.effect
            if n in gated:
                question = Approval(id=self.fresh("q"))
                self.do(ch.ApprovalAsked(call_id=call.call_id, approval=question))

    @precondition(lambda self: self.phase_is(Phase.REQUESTING))
    @rule(outcome=st.sampled_from(["failed", "interrupted", "retrying"]), now_ms=CLOCK)
    def end_step_in_vain(self, outcome: str, now_ms: int) -> None:
        self.do(ch.StepEnded(outcome=outcome, completed_at_ms=now_ms))  # type: ignore[arg-type]

    @precondition(lambda self: any(not call.waiting for call in self.calls("admitted")))
    @rule(data=st.data())
    def begin_calls(self, data: st.DataObject) -> None:
        able = [call.call_id for call in self.calls("admitted") if not call.waiting]
        chosen = data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True))
        self.do(ch.CallsBegan(call_ids=tuple(chosen)))
        self.commit()

    @precondition(lambda self: self.calls("begun"))
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["finished", "failed", "unknown"]),
        adds=st.booleans(),
    )
    def end_call(self, data: st.DataObject, outcome: CallOutcome, adds: bool) -> None:
        call = data.draw(st.sampled_from(self.calls("begun")))
        hidden = (UserItem(text="mind", internal="x"),) if adds else ()
        self.do(ch.CallEnded(call_id=call.call_id, outcome=outcome, output="o", hidden=hidden))

    @precondition(lambda self: any(call.waiting for call in self.memory.pending_tools))
    @rule(
        data=st.data(),
        decision=st.sampled_from(
            [Approved(), Approved(arguments={"edited": 1}), ApprovedForSession(), Denied()]
        ),
    )
    def decide(self, data: st.DataObject, decision: Approved) -> None:
        waiting = [call for call in self.memory.pending_tools if call.waiting]
        call = data.draw(st.sampled_from(waiting))
        self.do(ch.ApprovalDecided(call_id=call.call_id, decision=decision))
        if isinstance(decision, Denied):
            self.do(ch.CallEnded(call_id=call.call_id, outcome="denied", output="no"))

    @precondition(lambda self: any(call.waiting for call in self.memory.pending_tools))
    @rule(data=st.data(), now_ms=CLOCK)
    def abort(self, data: st.DataObject, now_ms: int) -> None:
        waiting = [call for call in self.memory.pending_tools if call.waiting]
        call = data.draw(st.sampled_from(waiting))
        self.do(ch.ApprovalDecided(call_id=call.call_id, decision=Abort()))
        self.close("aborted", "interrupted", now_ms)

    @precondition(
        lambda self: (
            self.memory.pending_tools
            and all(call.status == "ended" for call in self.memory.pending_tools)
        )
    )
    @rule()
    def settle_batch(self) -> None:
        self.do(ch.BatchSettled())

    @precondition(lambda self: self.phase_is(Phase.COMPLETING))
    @rule(goes_on=st.booleans())
    def continue_turn(self, goes_on: bool) -> None:
        """A stop hook makes the model go on, and wants to again at its next end."""
        change = ch.TurnContinued(prompt=UserItem(text="go on", internal="x"))
        active = self.memory.active_execution
        assert active is not None
        if not active.stop_hook_active:
            self.do(change)
        if goes_on and self.phase_is(Phase.READY):
            self.begin_step(0)
            self.end_step_with_text(None, goes_on=False, now_ms=0)
        if self.phase_is(Phase.COMPLETING):
            with pytest.raises(InternalError):
                advance(self.memory, change)

    @precondition(lambda self: self.phase_is(Phase.READY, Phase.COMPLETING))
    @rule(now_ms=CLOCK)
    def complete_turn(self, now_ms: int) -> None:
        ended = ch.TurnEnded(outcome="completed", finish_reason="stop", finished_at_ms=now_ms)
        self.do(ended)
        self.commit_ending()

    @precondition(lambda self: self.memory.turn_id is not None)
    @rule()
    def accept_interrupt(self) -> None:
        self.told(self.fresh("i"), SubmissionAccepted())
        self.do(ch.TurnInterrupted(reason="enough"))

    @precondition(lambda self: self.memory.turn_id is not None)
    @rule(
        ending=st.sampled_from([("aborted", "interrupted"), ("failed", "error")]),
        now_ms=CLOCK,
    )
    def interrupt(self, ending: tuple[str, FinishReason], now_ms: int) -> None:
        self.close(ending[0], ending[1], now_ms)

    def close(self, outcome: str, finish_reason: FinishReason, now_ms: int) -> None:
        changes = close_turn(
            self.memory,
            outcome=outcome,  # type: ignore[arg-type]
            finish_reason=finish_reason,
            reason="why",
            now_ms=now_ms,
        )
        for change in changes:
            self.do(change)
        assert self.phase_is(Phase.IDLE)
        self.commit_ending()

    def commit_ending(self) -> None:
        """The terminal event is the last of its save."""
        assert isinstance(self.uncommitted[-1][1], TurnComplete | TurnAborted)
        self.commit()

    @rule(
        change=st.sampled_from(
            [
                ch.RouteChanged(model=ModelChanged(route="other", model="m")),
                ch.MetadataReplaced(metadata={"a": 1}),
                ch.StateSaved(name="x", value=1),
                ch.StateSaved(name="x", value=None),
                ch.GrantAdded(key="k"),
                ch.ContentNamed(instructions_digest="i", tools_digest="t"),
            ]
        )
    )
    def change_a_fact(self, change: ch.Change) -> None:
        self.do(change)

    @rule(usage=SMALL)
    def count_usage(self, usage: TokenUsage) -> None:
        if self.memory.turn_id is None:
            self.pending_outside += usage
        self.do(ch.UsageCounted(usage=usage))

    @rule(data=st.data())
    def an_illegal_change_changes_nothing(self, data: st.DataObject) -> None:
        legal = TRANSITIONS[phase_of(self.memory)] | ALWAYS
        kind = data.draw(st.sampled_from([k for k in get_args(ch.Change) if k not in legal]))
        kept, length = attrs.evolve(self.memory), len(self.memory.context)
        with pytest.raises(InternalError):  # whatever it says
            advance(self.memory, kind(**dict.fromkeys(kind.__struct_fields__)))
        assert self.memory == kept
        assert len(self.memory.context) == length

    # --- a process that dies

    @rule(
        policy=st.sampled_from(Recovery),
        data=st.data(),
        work=st.integers(0, 12),
        saved=st.booleans(),
        now_ms=CLOCK,
        dies_again=st.booleans(),
    )
    def crash(  # one draw each
        self,
        policy: Recovery,
        data: st.DataObject,
        work: int,
        saved: bool,
        now_ms: int,
        dies_again: bool,
    ) -> None:
        self.work(data, work)
        if saved and self.uncommitted:
            self.commit()
        self.forget()
        before = self.memory = self.durable
        known = self.draw_known(data)
        changes = recover(before, policy, now_ms=now_ms, known=known)
        event(f"crashed while {phase_of(before).value}, {policy.value}, {len(changes)} changes")
        for change in changes:
            self.do(change)
        if dies_again:  # before the commit: the next opening finds the very same session
            self.forget()
            self.memory = self.durable
            again = recover(self.memory, policy, now_ms=now_ms, known=known)
            assert again == changes
            for change in again:
                self.do(change)
        self.check_recovered(before, policy)
        self.check_claims(before, known)
        settled = self.memory
        self.told(
            None, SessionConfigured(session_id="s", context=SessionContext(), model=MODEL)
        )
        self.uncommitted.insert(0, self.uncommitted.pop())
        self.commit()
        for other in Recovery if policy is Recovery.ABORT else (policy,):
            assert recover(settled, other, now_ms=now_ms + 1) == []

    def draw_known(self, data: st.DataObject) -> Known:
        known: dict[str, tuple[CallOutcome, str]] = {}
        for call in self.calls("begun"):
            if data.draw(st.booleans(), label=f"{call.call_id} is reconciled"):
                outcomes: list[CallOutcome] = ["finished", "failed", "not_started", "unknown"]
                known[call.call_id] = (data.draw(st.sampled_from(outcomes)), "found out")
        return known

    def check_recovered(self, before: Checkpoint, policy: Recovery) -> None:
        """What may differ from before is only what the crash cut off."""
        after = self.memory
        assert not [call for call in after.pending_tools if call.status == "begun"]
        assert after.active_model_step is None
        kept = [one.id for one in before.queue]
        assert [one.id for one in after.queue] == kept, "an accepted message was lost"
        active = before.active_execution
        if active is not None and active.interrupted is not None:
            assert phase_of(after) is Phase.IDLE, "an accepted interrupt was forgotten"
        elif policy is Recovery.RESUME:
            assert after.turn_id == before.turn_id
            assert len(after.context) == len(before.context)
        if phase_of(after) is Phase.IDLE and before.active_execution is not None:
            added = len(before.pending_tools)
            assert len(after.context) == len(before.context) + added + sum(
                len(call.hidden) for call in before.pending_tools
            )
        for old, new in zip(before.pending_tools, after.pending_tools, strict=False):
            if old.waiting and new.status != "ended":
                assert new == old, "a waiting question changed"
            if old.status == "ended":
                assert new == old, "a known outcome changed"

    def check_claims(self, before: Checkpoint, known: Known) -> None:
        """Of what was cut off nothing is claimed that nobody found out."""
        ends = [msg for _, msg in self.uncommitted if isinstance(msg, ToolCallEnd)]
        status = {call.call_id: call.status for call in before.pending_tools}
        for end in ends:
            if end.call_id in known and status[end.call_id] == "begun":
                assert (end.outcome, end.output) == known[end.call_id]
            elif status[end.call_id] == "admitted":
                assert end.outcome == "not_started"
            elif self.effects[end.call_id] == "read_only":
                assert end.outcome == "failed"
            else:
                assert end.outcome == "unknown"

    # --- what always holds

    @invariant()
    def the_checkpoint_is_sound(self) -> None:
        check_checkpoint(self.memory)
        check_checkpoint(self.durable)

    @invariant()
    def no_effect_happens_twice_unless_it_may(self) -> None:
        for call_id, times in self.entered.items():
            if self.effects[call_id] not in REPEATABLE:
                assert times == 1

    @invariant()
    def what_must_not_run_again_cannot_be_readmitted(self) -> None:
        for call in self.memory.pending_tools:
            if call.status != "begun" or call.effect not in REPEATABLE:
                with pytest.raises(InternalError):
                    advance(self.memory, ch.CallReadmitted(call_id=call.call_id))

    @invariant()
    def the_first_message_is_written_once(self) -> None:
        first = self.durable.first_user_message
        assert self.first is None or first == self.first
        self.first = first


TestSession = Session.TestCase
