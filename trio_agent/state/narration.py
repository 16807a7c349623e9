"""What a change tells: the events that belong to it, for the live engine and recovery alike."""

from __future__ import annotations

from typing import TypeAlias, assert_never

from trio_agent.errors import InternalError
from trio_agent.protocol.events import (
    AgentMessage,
    ApprovalResolved,
    ContentPart,
    EventMsg,
    ExecApprovalRequest,
    ModelStepCompleted,
    ModelStepStarted,
    QueueChanged,
    QueuedEntry,
    TokenCount,
    ToolCallBegin,
    ToolCallEnd,
    TurnAborted,
    TurnComplete,
    TurnStarted,
    UserMessage,
)
from trio_agent.protocol.items import AssistantItem, Item, ReasoningItem
from trio_agent.state.changes import (
    ApprovalAsked,
    ApprovalDecided,
    BatchSettled,
    CallEnded,
    CallReadmitted,
    CallsBegan,
    Change,
    ContentNamed,
    ContextChanged,
    GrantAdded,
    MessageQueued,
    MetadataReplaced,
    QueueCancelled,
    QueueEdited,
    RouteChanged,
    StateSaved,
    SteerJoined,
    StepBegan,
    StepEnded,
    TurnBegan,
    TurnContinued,
    TurnEnded,
    TurnInterrupted,
    UsageCounted,
)
from trio_agent.state.checkpoint import ActiveExecution, Checkpoint, ToolCall

Told: TypeAlias = tuple[str | None, EventMsg]
"""A message and the submission that caused it; None where the committer knows better."""


def narrate(before: Checkpoint, change: Change, after: Checkpoint) -> list[Told]:
    """Return the messages of one change, in order; the terminal event of a turn comes last."""
    told: list[Told] = []
    if before.queue != after.queue:
        told.append((None, QueueChanged(queue_entries(after))))
    match change:
        case TurnBegan():
            started = TurnStarted(
                turn_id=change.turn_id, model_context_window=change.context_window
            )
            told.append((change.submission_id, started))
            if change.text is not None:
                message = UserMessage(
                    turn_id=change.turn_id,
                    text=change.text,
                    attachments=change.attachments,
                    delivery=change.delivery,
                )
                told.append((change.submission_id, message))
        case SteerJoined():
            told.append((change.submission_id, _steer(before, change)))
        case StepBegan():
            told.append((None, _step_started(after, change)))
        case StepEnded():
            told.extend((None, message) for message in _step_ended(before, change, after))
        case CallsBegan():
            for call_id in change.call_ids:
                call = _call(after, call_id)
                begin = ToolCallBegin(
                    turn_id=_turn(after).turn_id,
                    call_id=call_id,
                    name=call.name,
                    arguments=call.arguments,
                )
                told.append((None, begin))
        case CallEnded():
            told.extend((None, message) for message in _call_ended(before, change))
        case ApprovalAsked():
            if not change.approval.decided:  # else a hook has answered before anybody was asked
                told.append((None, approval_request(after, _call(after, change.call_id))))
        case ApprovalDecided():
            asked = _call(before, change.call_id).approval
            if asked is None:
                raise InternalError("a decision without a question")
            resolved = ApprovalResolved(
                id=asked.id, call_id=change.call_id, decision=change.decision
            )
            told.append((None, resolved))
        case RouteChanged():
            if not change.quiet:
                told.append((None, change.model))
        case TurnEnded():
            told.append((None, _turn_ended(before, change)))
        case (
            MessageQueued()
            | QueueEdited()
            | QueueCancelled()
            | ContextChanged()
            | CallReadmitted()
            | BatchSettled()
            | TurnContinued()
            | TurnInterrupted()
            | MetadataReplaced()
            | StateSaved()
            | GrantAdded()
            | UsageCounted()
            | ContentNamed()
        ):
            pass
        case _:
            assert_never(change)
    return told


def approval_request(checkpoint: Checkpoint, call: ToolCall) -> ExecApprovalRequest:
    """Return the question about *call*, as it was asked first and after every restart."""
    if call.approval is None:
        raise InternalError(f"call {call.call_id!r} was not asked about")
    return ExecApprovalRequest(
        id=call.approval.id,
        turn_id=_turn(checkpoint).turn_id,
        call_id=call.call_id,
        name=call.name,
        arguments=call.arguments,
        summary=call.approval.summary,
        reason=call.approval.reason,
    )


def _turn(checkpoint: Checkpoint) -> ActiveExecution:
    if checkpoint.active_execution is None:
        raise InternalError("no turn is active")
    return checkpoint.active_execution


def _call(checkpoint: Checkpoint, call_id: str) -> ToolCall:
    for call in checkpoint.pending_tools:
        if call.call_id == call_id:
            return call
    raise InternalError(f"call {call_id!r} is not pending")


def queue_entries(checkpoint: Checkpoint) -> tuple[QueuedEntry, ...]:
    """Return what waits, as frontends are told."""
    return tuple(
        QueuedEntry(submission_id=waiting.id, delivery=waiting.boundary, text=waiting.text)
        for waiting in checkpoint.queue
    )


def _steer(before: Checkpoint, change: SteerJoined) -> UserMessage:
    waiting = next(one for one in before.queue if one.id == change.submission_id)
    return UserMessage(
        turn_id=_turn(before).turn_id,
        text=waiting.text,
        attachments=waiting.attachments,
        delivery="steer",
    )


def _step_started(after: Checkpoint, change: StepBegan) -> ModelStepStarted:
    step = after.active_model_step
    if step is None:
        raise InternalError("no model step is active")
    return ModelStepStarted(
        turn_id=_turn(after).turn_id,
        step_id=step.step_id,
        step_index=step.step_index,
        attempt=step.attempt,
        route=step.route,
        request_digest=change.request_digest,
        started_at_ms=step.started_at_ms,
    )


def _step_ended(before: Checkpoint, change: StepEnded, after: Checkpoint) -> list[EventMsg]:
    step, turn_id = before.active_model_step, _turn(before).turn_id
    if step is None:
        raise InternalError("no model step is active")
    told: list[EventMsg] = [
        ModelStepCompleted(
            turn_id=turn_id,
            step_id=step.step_id,
            step_index=step.step_index,
            outcome=change.outcome,
            started_at_ms=step.started_at_ms,
            completed_at_ms=max(step.started_at_ms, change.completed_at_ms),
            finish_reason=change.finish_reason,
            usage=change.usage,
            retry_in_ms=change.retry_in_ms,
        )
    ]
    if content := content_of(change.items):
        told.append(AgentMessage(turn_id=turn_id, step_id=step.step_id, content=content))
    if change.usage is not None:
        count = TokenCount(
            total=after.total_usage, last=after.last_usage, turn=_turn(after).usage
        )
        told.append(count)
    return told


def content_of(items: tuple[Item, ...]) -> tuple[ContentPart, ...]:
    """Return what can be read of a model's output, in order."""
    parts: list[ContentPart] = []
    for item in items:
        if isinstance(item, ReasoningItem) and item.text:
            parts.append(ContentPart(phase="reasoning", text=item.text))
        elif isinstance(item, AssistantItem):
            parts.append(ContentPart(phase=item.phase, text=item.text))
    return tuple(parts)


def _call_ended(before: Checkpoint, change: CallEnded) -> list[EventMsg]:
    call = _call(before, change.call_id)
    told: list[EventMsg] = []
    if call.waiting and call.approval is not None:
        told.append(ApprovalResolved(id=call.approval.id, call_id=call.call_id, decision=None))
    told.append(
        ToolCallEnd(
            turn_id=_turn(before).turn_id,
            call_id=call.call_id,
            name=call.name,
            output=change.output,
            outcome=change.outcome,
            is_error=change.outcome != "finished",
        )
    )
    return told


def _turn_ended(before: Checkpoint, change: TurnEnded) -> EventMsg:
    turn_id = _turn(before).turn_id
    if change.outcome == "completed":
        return TurnComplete(turn_id=turn_id, finish_reason=change.finish_reason)
    return TurnAborted(turn_id=turn_id, reason=change.reason, outcome=change.outcome)
