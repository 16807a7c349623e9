"""What must hold of every session, whatever happened to it: checks over stored facts.

They read a checkpoint and a journal, never the engine, so they can judge any store
at any moment: after a crash, between two saves, at the end of a property run.
`tests/properties/INVARIANTS.md` numbers the rules and says which check holds each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import attrs

from trio_agent.protocol.events import (
    AgentMessageDelta,
    AgentReasoningDelta,
    ApprovalResolved,
    Event,
    ExecApprovalRequest,
    HistoryGap,
    ModelStepCompleted,
    ModelStepStarted,
    QueueChanged,
    SessionConfigured,
    SubmissionAccepted,
    SubmissionRejected,
    ToolCallBegin,
    ToolCallEnd,
    TurnAborted,
    TurnComplete,
    TurnStarted,
    UserMessage,
)
from trio_agent.protocol.items import ToolCallItem, ToolOutputItem
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord, validate_checkpoint
from trio_agent.state.context import check_pairing
from trio_agent.state.machine import Phase, phase_of


def check_checkpoint(checkpoint: Checkpoint) -> None:
    """Check that *checkpoint* is one that a session may have at a durable moment.

    Raises:
        AssertionError: It names the rule.
        CorruptStoreError: If it breaks a rule of `validate_checkpoint`.
        ConfigError: If a call and its output are not paired.
    """
    validate_checkpoint(checkpoint)
    executing = phase_of(checkpoint) is Phase.EXECUTING
    check_pairing(checkpoint.context, open_calls=executing)
    answered = [i.call_id for i in checkpoint.context if isinstance(i, ToolOutputItem)]
    asked = [i.call_id for i in checkpoint.context if isinstance(i, ToolCallItem)]
    assert answered == asked[: len(answered)], "outputs are not in the order of their calls"
    open_calls = asked[len(answered) :]
    pending = [call.call_id for call in checkpoint.pending_tools]
    assert open_calls == pending, f"open calls {open_calls}, pending {pending}"
    if pending:
        tail = list(checkpoint.context)[-len(pending) :]
        assert all(isinstance(item, ToolCallItem) for item in tail), "an item behind open calls"
    execution = checkpoint.active_execution
    if execution is not None:
        assert execution.model_calls >= execution.next_model_step


@attrs.define(kw_only=True)
class _Turn:
    submission_id: str | None
    steps: dict[str, ModelStepStarted] = attrs.field(factory=dict[str, ModelStepStarted])
    completed: int = 0
    attempts: int = 0
    model_calls: int = 0
    ended_calls: int = 0
    failed_calls: int = 0
    messages: int = 0


@attrs.define
class JournalCheck:
    """Reads a journal from its first event and raises `AssertionError` at the first lie.

    ``repeatable`` names the tools that recovery may enter again for one call;
    ``steers_join`` says that no turn may complete over a steer, which holds where no
    hook runs at the end of a turn.
    Feed it with `read`, then ask `settle` whether it agrees with the checkpoint.
    """

    repeatable: Collection[str] = ()
    steers_join: bool = False
    sequence: int = 0
    openings: int = 0
    turn_id: str | None = None
    turns: dict[str, _Turn] = attrs.field(factory=dict[str, _Turn])
    outcomes: dict[str, str] = attrs.field(factory=dict[str, str])
    begun: Counter[str] = attrs.field(factory=Counter[str])
    ended: dict[str, ToolCallEnd] = attrs.field(factory=dict[str, ToolCallEnd])
    names: dict[str, str] = attrs.field(factory=dict[str, str])
    steps: set[str] = attrs.field(factory=set[str])
    open_step: ModelStepStarted | None = None
    accepted: dict[str, SubmissionAccepted] = attrs.field(factory=dict[str, SubmissionAccepted])
    refused: set[str] = attrs.field(factory=set[str])
    delivered: list[str] = attrs.field(factory=list[str])
    queue: list[tuple[str, str]] = attrs.field(factory=list[tuple[str, str]])
    missed: set[str] = attrs.field(factory=set[str])
    before: list[tuple[str, str]] = attrs.field(factory=list[tuple[str, str]])
    questions: dict[str, ExecApprovalRequest] = attrs.field(
        factory=dict[str, ExecApprovalRequest]
    )
    resolved: dict[str, ApprovalResolved] = attrs.field(factory=dict[str, ApprovalResolved])

    def read(self, events: Sequence[Event]) -> None:
        """Read more of the journal.

        Raises:
            AssertionError: If an event contradicts what came before it.
        """
        for event in events:
            assert event.sequence > self.sequence, "event numbers do not grow"
            if not self.sequence:
                assert isinstance(event.msg, SessionConfigured | HistoryGap), event
            self.sequence = event.sequence
            self._read(event)

    def _read(self, event: Event) -> None:
        msg = event.msg
        match msg:
            case SessionConfigured():
                self.openings += 1
            case SubmissionAccepted():
                assert event.submission_id is not None
                assert event.submission_id not in self.accepted, "accepted twice"
                self.accepted[event.submission_id] = msg
            case SubmissionRejected():
                assert event.submission_id is not None
                self.refused.add(event.submission_id)
            case QueueChanged():
                self._read_queue([(one.submission_id, one.delivery) for one in msg.queued])
            case TurnStarted():
                self._start_turn(event.submission_id, msg.turn_id)
            case UserMessage():
                assert msg.turn_id == self.turn_id
                assert event.submission_id not in self.delivered, "delivered twice"
                self.delivered.append(event.submission_id or "")
                self.turns[msg.turn_id].messages += 1
            case ModelStepStarted():
                self._start_step(msg)
            case ModelStepCompleted():
                self._end_step(msg)
            case AgentMessageDelta() | AgentReasoningDelta():
                assert self.open_step is not None, "a delta outside of a step"
                assert msg.step_id == self.open_step.step_id, "a delta of another step"
            case ToolCallBegin():
                assert msg.turn_id == self.turn_id
                assert msg.call_id not in self.ended, "begun after its end"
                self.begun[msg.call_id] += 1
                self.names[msg.call_id] = msg.name
                again = self.begun[msg.call_id] > 1
                assert not again or msg.name in self.repeatable, f"{msg.name} begun twice"
            case ToolCallEnd():
                self._end_call(msg)
            case ExecApprovalRequest():
                assert msg.id not in self.resolved, "asked again after its answer"
                assert self.questions.setdefault(msg.id, msg) == msg, "another question"
            case ApprovalResolved():
                assert msg.id in self.questions, "an answer to no question"
                assert msg.id not in self.resolved, "answered twice"
                self.resolved[msg.id] = msg
            case TurnComplete() | TurnAborted():
                self._end_turn(msg)
            case _:
                pass

    def _read_queue(self, queue: list[tuple[str, str]]) -> None:
        """Check that waiting messages keep their order; new ones stand at the end, or
        where one vanished (an edit).
        """
        old, new = [name for name, _ in self.queue], [name for name, _ in queue]
        kept = [name for name in old if name in new]
        assert kept == [name for name in new if name in old], "the queue was reordered"
        fresh = [name for name in new if name not in old]
        assert len(fresh) <= 1, "two messages entered the queue in one change"
        if fresh and new[-1] != fresh[0]:
            assert new == [name if name in new else fresh[0] for name in old]
        steers = {name for name, delivery in self.queue if delivery == "steer"}
        self.missed = {name for name, delivery in queue if delivery != "steer"} & steers
        self.before, self.queue = self.queue, queue

    def _start_turn(self, submission_id: str | None, turn_id: str) -> None:
        assert self.turn_id is None, "two turns at a time"
        assert turn_id not in self.turns, "a turn id was used again"
        first = next((name for name, delivery in self.before if delivery != "steer"), None)
        if submission_id in [name for name, _ in self.before]:
            assert submission_id == first, "a message overtook another"
        self.turn_id = turn_id
        self.turns[turn_id] = _Turn(submission_id=submission_id)

    def _start_step(self, msg: ModelStepStarted) -> None:
        assert msg.turn_id == self.turn_id
        assert self.open_step is None, "two requests at a time"
        assert msg.step_id not in self.steps, "a step id was used again"
        turn = self.turns[msg.turn_id]
        assert msg.step_index == turn.completed, "a step index was skipped or asked again"
        turn.attempts += 1
        turn.model_calls += 1
        assert msg.attempt == turn.attempts, "attempts do not count up"
        self.steps.add(msg.step_id)
        self.open_step = msg

    def _end_step(self, msg: ModelStepCompleted) -> None:
        started = self.open_step
        assert started is not None, "the end of a step that did not start"
        assert (msg.turn_id, msg.step_id) == (started.turn_id, started.step_id)
        assert msg.completed_at_ms >= msg.started_at_ms
        turn = self.turns[msg.turn_id]
        if msg.outcome == "completed":
            turn.completed += 1
            turn.attempts = 0
        self.open_step = None

    def _end_call(self, msg: ToolCallEnd) -> None:
        assert msg.turn_id == self.turn_id
        assert msg.call_id not in self.ended, "a call ended twice"
        assert msg.is_error == (msg.outcome != "finished")
        if msg.outcome in {"finished", "unknown"}:
            assert self.begun[msg.call_id], f"{msg.outcome} without a begin"
        if msg.outcome == "denied":
            assert not self.begun[msg.call_id], "denied after its begin"
        self.ended[msg.call_id] = msg
        turn = self.turns[msg.turn_id]
        turn.ended_calls += 1
        turn.failed_calls += msg.is_error

    def _end_turn(self, msg: TurnComplete | TurnAborted) -> None:
        assert msg.turn_id == self.turn_id, "the end of a turn that does not run"
        assert self.open_step is None, "the turn ended before its request"
        open_calls = [call_id for call_id in self.begun if call_id not in self.ended]
        assert not open_calls, f"the turn ended before its calls {open_calls}"
        unanswered = [name for name in self.questions if name not in self.resolved]
        assert not unanswered, f"the turn ended before its questions {unanswered}"
        self.outcomes[msg.turn_id] = (
            "completed" if isinstance(msg, TurnComplete) else msg.outcome
        )
        self.turn_id = None

    def settle(
        self,
        checkpoint: Checkpoint,
        executions: Sequence[ExecutionRecord],
        *,
        withdrawn: Collection[str] = (),
        usage_outside: TokenUsage | None = None,
    ) -> None:
        """Check that journal, checkpoint and finished turns tell one story.

        Args:
            checkpoint: The newest.
            executions: All finished turns, oldest first.
            withdrawn: Messages that were cancelled, or replaced by an edit.
            usage_outside: Tokens that were counted while no turn ran.

        Raises:
            AssertionError: If they disagree.
        """
        active = checkpoint.active_execution
        assert self.turn_id == checkpoint.turn_id
        self._settle_turns(checkpoint, executions, usage_outside or TokenUsage())
        step = checkpoint.active_model_step
        told = None if self.open_step is None else self.open_step.step_id
        assert told == (None if step is None else step.step_id), "which request is out"
        if active is not None:
            turn = self.turns[active.turn_id]
            assert active.next_model_step == turn.completed
            assert active.model_calls == turn.model_calls
            assert active.tool_calls == turn.ended_calls
            assert active.failed_tool_calls == turn.failed_calls
        for call in checkpoint.pending_tools:
            assert (call.call_id in self.ended) == (call.status == "ended")
            assert call.status != "begun" or self.begun[call.call_id]
            if call.waiting and call.approval is not None:
                assert call.approval.id in self.questions, "a question that nobody heard"
                assert call.approval.id not in self.resolved
        assert self.queue == [(one.id, one.boundary) for one in checkpoint.queue]
        self._settle_messages(checkpoint, withdrawn)

    def _settle_turns(
        self,
        checkpoint: Checkpoint,
        executions: Sequence[ExecutionRecord],
        usage: TokenUsage,
    ) -> None:
        finished = [turn_id for turn_id in self.turns if turn_id in self.outcomes]
        assert [record.turn_id for record in executions] == finished
        for record in executions:
            turn = self.turns[record.turn_id]
            assert record.outcome == self.outcomes[record.turn_id]
            assert record.started_at_ms <= record.finished_at_ms
            assert record.failed_tool_calls <= record.tool_calls == turn.ended_calls
            assert record.failed_tool_calls == turn.failed_calls
            assert record.model_calls == turn.model_calls
            usage += record.usage
        stats = checkpoint.execution_stats
        outcomes = Counter(record.outcome for record in executions)
        assert stats.run_count == len(executions)
        assert stats.failed_run_count == outcomes["failed"]
        assert stats.aborted_run_count == outcomes["aborted"]
        assert stats.tool_calls == sum(record.tool_calls for record in executions)
        assert stats.model_calls == sum(record.model_calls for record in executions)
        assert stats.elapsed_ms == sum(record.elapsed_ms for record in executions)
        if checkpoint.active_execution is not None:
            usage += checkpoint.active_execution.usage
        assert checkpoint.total_usage == usage

    def _settle_messages(self, checkpoint: Checkpoint, withdrawn: Collection[str]) -> None:
        """Check that every accepted message is in one place: never lost, never twice."""
        waiting = {one.id for one in checkpoint.queue}
        refused_turns = {
            turn.submission_id for turn in self.turns.values() if not turn.messages
        }
        delivered = set(self.delivered)
        assert not delivered & waiting, "delivered, and waiting still"
        for submission_id, receipt in self.accepted.items():
            if receipt.delivery is None or submission_id in self.refused:
                continue
            places = (
                (submission_id in delivered)
                + (submission_id in waiting)
                + (submission_id in refused_turns)
                + (submission_id in withdrawn)
            )
            assert places == 1, f"message {submission_id} is in {places} places"
