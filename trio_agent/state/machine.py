"""The life of a turn as a table. Every transition lives in this file.

Rule 1: nothing outside this module makes one checkpoint from another, but for the
sequence number, which rises by one with every commit.

Rule 2: nothing in this module may await, read a clock or touch a store.

Rule 3: an illegal change raises and changes nothing.

A *phase* is not stored: it is read off the checkpoint, so it cannot disagree with
it. A batch of calls is in phase EXECUTING from the answer that asked for it until
all outcomes are known and joined the context together::

    IDLE ── TurnBegan ──► READY ── StepBegan ──► REQUESTING ── StepEnded ──► READY
                            ▲                                     │ calls      │ no calls
                            └────────── BatchSettled ── EXECUTING ◄            ▼
                            └────────── TurnContinued, SteerJoined ──── COMPLETING
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final, assert_never

import attrs

from trio_agent.errors import InternalError
from trio_agent.protocol.items import Item, ToolCallItem, ToolOutputItem, UserItem
from trio_agent.protocol.limits import MAX_SESSION_GRANTS
from trio_agent.protocol.ops import Approved
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state import execution
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
from trio_agent.state.checkpoint import (
    ActiveExecution,
    ActiveModelStep,
    Checkpoint,
    QueuedMessage,
    ToolCall,
)


class Phase(enum.Enum):
    """Where a session stands between two commits."""

    IDLE = "idle"
    READY = "ready"
    REQUESTING = "requesting"
    EXECUTING = "executing"
    COMPLETING = "completing"


ALWAYS: Final[frozenset[type[Change]]] = frozenset(
    {
        MessageQueued,
        QueueEdited,
        QueueCancelled,
        RouteChanged,
        MetadataReplaced,
        StateSaved,
        GrantAdded,
        UsageCounted,
        ContentNamed,
    }
)
"""Changes that are legal in every phase."""

TRANSITIONS: Final[dict[Phase, frozenset[type[Change]]]] = {
    Phase.IDLE: frozenset({TurnBegan, ContextChanged}),
    Phase.READY: frozenset(
        {StepBegan, SteerJoined, ContextChanged, TurnInterrupted, TurnEnded}
    ),
    Phase.REQUESTING: frozenset({StepEnded, TurnInterrupted}),
    Phase.EXECUTING: frozenset(
        {
            CallsBegan,
            CallEnded,
            CallReadmitted,
            ApprovalAsked,
            ApprovalDecided,
            BatchSettled,
            TurnInterrupted,
        }
    ),
    Phase.COMPLETING: frozenset(
        {TurnContinued, SteerJoined, ContextChanged, TurnInterrupted, TurnEnded}
    ),
}


def phase_of(checkpoint: Checkpoint) -> Phase:
    """Return the phase that *checkpoint* is in."""
    if checkpoint.active_execution is None:
        return Phase.IDLE
    if checkpoint.active_model_step is not None:
        return Phase.REQUESTING
    if checkpoint.pending_tools:
        return Phase.EXECUTING
    if checkpoint.active_execution.completing is not None:
        return Phase.COMPLETING
    return Phase.READY


def advance(checkpoint: Checkpoint, change: Change) -> Checkpoint:
    """Return *checkpoint* after *change*; the sequence number stays.

    Raises:
        InternalError: If *change* is not legal now.
    """
    phase = phase_of(checkpoint)
    if type(change) not in ALWAYS and type(change) not in TRANSITIONS[phase]:
        raise InternalError(f"{type(change).__name__} is not legal while {phase.value}")
    match change:
        case MessageQueued() | QueueEdited() | QueueCancelled():
            return attrs.evolve(checkpoint, queue=_queue_after(checkpoint, change))
        case TurnBegan():
            return _begin_turn(checkpoint, change)
        case SteerJoined():
            return _join(checkpoint, change)
        case ContextChanged():
            return _change_context(checkpoint, change)
        case StepBegan():
            return _begin_step(checkpoint, change)
        case StepEnded():
            return _end_step(checkpoint, change)
        case CallsBegan():
            return _begin_calls(checkpoint, change)
        case CallEnded():
            return _end_call(checkpoint, change)
        case CallReadmitted():
            return _with_call(checkpoint, change.call_id, _readmitted)
        case ApprovalAsked():
            return _ask(checkpoint, change)
        case ApprovalDecided():
            return _decide(checkpoint, change)
        case BatchSettled():
            return _settle(checkpoint)
        case TurnContinued():
            return _continue(checkpoint, change)
        case TurnInterrupted():
            active = _execution(checkpoint)
            active = attrs.evolve(active, interrupted=active.interrupted or change.reason)
            return attrs.evolve(checkpoint, active_execution=active)
        case TurnEnded():
            return _end_turn(checkpoint, change)
        case RouteChanged():
            return attrs.evolve(checkpoint, model_route=change.model.route)
        case MetadataReplaced():
            return attrs.evolve(checkpoint, metadata=change.metadata)
        case StateSaved():
            states = {**checkpoint.states, change.name: change.value}
            if change.value is None:
                del states[change.name]
            return attrs.evolve(checkpoint, states=states)
        case GrantAdded():
            return _grant(checkpoint, change)
        case UsageCounted():
            return _count(checkpoint, change.usage)
        case ContentNamed():
            return attrs.evolve(
                checkpoint,
                instructions_digest=change.instructions_digest,
                tools_digest=change.tools_digest,
            )
        case _:
            assert_never(change)


def _execution(checkpoint: Checkpoint) -> ActiveExecution:
    if checkpoint.active_execution is None:
        raise InternalError("no turn is active")
    return checkpoint.active_execution


# --- the queue


def _queue_after(
    checkpoint: Checkpoint, change: MessageQueued | QueueEdited | QueueCancelled
) -> tuple[QueuedMessage, ...]:
    queue = checkpoint.queue
    if isinstance(change, MessageQueued):
        if any(waiting.id == change.message.id for waiting in queue):
            raise InternalError(f"message {change.message.id!r} is queued already")
        if change.message.boundary == "steer" and not _is_steer_of(change.message, checkpoint):
            raise InternalError("a steer must name the running turn")
        return (*queue, change.message)
    place = _place(queue, change.submission_id)
    if isinstance(change, QueueCancelled):
        return (*queue[:place], *queue[place + 1 :])
    if any(waiting.id == change.new_id for waiting in (*queue[:place], *queue[place + 1 :])):
        raise InternalError(f"message {change.new_id!r} is queued already")
    edited = attrs.evolve(queue[place], id=change.new_id, text=change.text)
    return (*queue[:place], edited, *queue[place + 1 :])


def _is_steer_of(message: QueuedMessage, checkpoint: Checkpoint) -> bool:
    return (
        message.boundary == "steer"
        and message.turn_id is not None
        and message.turn_id == checkpoint.turn_id
    )


def _place(queue: tuple[QueuedMessage, ...], submission_id: str) -> int:
    for place, waiting in enumerate(queue):
        if waiting.id == submission_id:
            return place
    raise InternalError(f"message {submission_id!r} is not queued")


def _without(queue: tuple[QueuedMessage, ...], submission_id: str) -> tuple[QueuedMessage, ...]:
    return tuple(waiting for waiting in queue if waiting.id != submission_id)


# --- turns


def _begin_turn(checkpoint: Checkpoint, change: TurnBegan) -> Checkpoint:
    added: list[Item] = []
    first = checkpoint.first_user_message
    if change.text is not None:
        added = [
            *change.hidden,
            UserItem(
                text=change.text,
                attachments=change.attachments,
                submission_id=change.submission_id,
            ),
        ]
        if first is None and change.text.strip():
            first = change.text
    return attrs.evolve(
        checkpoint,
        queue=_without(checkpoint.queue, change.submission_id),
        context=checkpoint.context.extended(added),
        first_user_message=first,
        active_execution=ActiveExecution(
            submission_id=change.submission_id,
            turn_id=change.turn_id,
            started_at_ms=change.started_at_ms,
        ),
    )


def _join(checkpoint: Checkpoint, change: SteerJoined) -> Checkpoint:
    waiting = checkpoint.queue[_place(checkpoint.queue, change.submission_id)]
    if not _is_steer_of(waiting, checkpoint):
        raise InternalError(f"message {waiting.id!r} does not steer the running turn")
    item = UserItem(
        text=waiting.text, attachments=waiting.attachments, submission_id=waiting.id
    )
    return attrs.evolve(
        checkpoint,
        queue=_without(checkpoint.queue, change.submission_id),
        context=checkpoint.context.extended([*change.hidden, item]),
        active_execution=attrs.evolve(_execution(checkpoint), completing=None),
    )


def _continue(checkpoint: Checkpoint, change: TurnContinued) -> Checkpoint:
    active = _execution(checkpoint)
    if active.stop_hook_active:
        raise InternalError("a stop hook continued this turn already")
    return attrs.evolve(
        checkpoint,
        context=checkpoint.context.extended([change.prompt]),
        active_execution=attrs.evolve(active, completing=None, stop_hook_active=True),
    )


def _end_turn(checkpoint: Checkpoint, change: TurnEnded) -> Checkpoint:
    record = execution.record_of(checkpoint, change)
    queue = tuple(
        attrs.evolve(waiting, boundary="queue", turn_id=None)
        if waiting.boundary == "steer"
        else waiting
        for waiting in checkpoint.queue
    )
    return attrs.evolve(
        checkpoint,
        queue=queue,
        active_execution=None,
        execution_stats=execution.stats_with(checkpoint.execution_stats, record),
    )


# --- the context


def _change_context(checkpoint: Checkpoint, change: ContextChanged) -> Checkpoint:
    if change.rewrite is None:
        return attrs.evolve(checkpoint, context=checkpoint.context.extended(change.items))
    return attrs.evolve(
        checkpoint,
        context=[*change.rewrite, *change.items],
        context_epoch=checkpoint.context_epoch + 1,
    )


# --- model steps


def _begin_step(checkpoint: Checkpoint, change: StepBegan) -> Checkpoint:
    active = _execution(checkpoint)
    return attrs.evolve(
        checkpoint,
        active_execution=attrs.evolve(
            active, model_calls=active.model_calls + 1, attempts=active.attempts + 1
        ),
        active_model_step=ActiveModelStep(
            step_id=change.step_id,
            step_index=active.next_model_step,
            started_at_ms=change.started_at_ms,
            attempt=active.attempts + 1,
            route=change.route,
        ),
    )


def _end_step(checkpoint: Checkpoint, change: StepEnded) -> Checkpoint:
    if change.usage is not None:
        checkpoint = attrs.evolve(_count(checkpoint, change.usage), last_usage=change.usage)
    active = _execution(checkpoint)
    if change.outcome != "completed":
        if change.items or change.calls or change.completing:
            raise InternalError("only a completed step leaves anything behind")
        active = attrs.evolve(active, route=change.route or active.route)
        return attrs.evolve(checkpoint, active_model_step=None, active_execution=active)
    if change.completing is not None and change.calls:
        raise InternalError("a step with calls does not complete the turn")
    asked = [item.call_id for item in change.items if isinstance(item, ToolCallItem)]
    if asked != [call.call_id for call in change.calls]:
        raise InternalError("the calls of a step are not those of its items")
    return attrs.evolve(
        checkpoint,
        active_model_step=None,
        context=checkpoint.context.extended(change.items),
        pending_tools=change.calls,
        active_execution=attrs.evolve(
            active,
            next_model_step=active.next_model_step + 1,
            attempts=0,
            completing=change.completing,
        ),
    )


def _count(checkpoint: Checkpoint, usage: TokenUsage) -> Checkpoint:
    active = checkpoint.active_execution
    if active is not None:
        active = attrs.evolve(active, usage=active.usage + usage)
    return attrs.evolve(
        checkpoint, total_usage=checkpoint.total_usage + usage, active_execution=active
    )


# --- tool calls


def _with_call(
    checkpoint: Checkpoint, call_id: str, update: Callable[[ToolCall], ToolCall]
) -> Checkpoint:
    if all(call.call_id != call_id for call in checkpoint.pending_tools):
        raise InternalError(f"call {call_id!r} is not pending")
    calls = tuple(
        update(call) if call.call_id == call_id else call for call in checkpoint.pending_tools
    )
    return attrs.evolve(checkpoint, pending_tools=calls)


def _begin_calls(checkpoint: Checkpoint, change: CallsBegan) -> Checkpoint:
    def begun(call: ToolCall) -> ToolCall:
        if call.status != "admitted" or call.waiting:
            raise InternalError(f"call {call.call_id!r} cannot begin")
        return attrs.evolve(call, status="begun")

    for call_id in change.call_ids:
        checkpoint = _with_call(checkpoint, call_id, begun)
    return checkpoint


def _end_call(checkpoint: Checkpoint, change: CallEnded) -> Checkpoint:
    def ended(call: ToolCall) -> ToolCall:
        if call.status == "ended":
            raise InternalError(f"call {call.call_id!r} has an outcome already")
        if call.status == "admitted" and change.outcome in {"finished", "unknown"}:
            raise InternalError(f"call {call.call_id!r} did not begin")
        if call.status == "begun" and change.outcome == "denied":
            raise InternalError(f"call {call.call_id!r} began before it was denied")
        return attrs.evolve(
            call,
            status="ended",
            outcome=change.outcome,
            output=change.output,
            hidden=change.hidden,
        )

    checkpoint = _with_call(checkpoint, change.call_id, ended)
    active = _execution(checkpoint)
    failed = active.failed_tool_calls + (change.outcome != "finished")
    active = attrs.evolve(active, tool_calls=active.tool_calls + 1, failed_tool_calls=failed)
    return attrs.evolve(checkpoint, active_execution=active)


def _readmitted(call: ToolCall) -> ToolCall:
    if call.status != "begun" or call.effect not in {"read_only", "idempotent"}:
        raise InternalError(f"call {call.call_id!r} must not run again")
    return attrs.evolve(call, status="admitted")


def _ask(checkpoint: Checkpoint, change: ApprovalAsked) -> Checkpoint:
    def asked(call: ToolCall) -> ToolCall:
        if call.status != "admitted" or call.approval is not None:
            raise InternalError(f"call {call.call_id!r} cannot be asked about")
        return attrs.evolve(call, approval=change.approval)

    return _with_call(checkpoint, change.call_id, asked)


def _decide(checkpoint: Checkpoint, change: ApprovalDecided) -> Checkpoint:
    def decided(call: ToolCall) -> ToolCall:
        if not call.waiting or call.approval is None:
            raise InternalError(f"call {call.call_id!r} waits for no decision")
        call = attrs.evolve(call, approval=attrs.evolve(call.approval, decided=True))
        if isinstance(change.decision, Approved):
            call = attrs.evolve(call, network=change.decision.network)
            if change.decision.arguments is not None:
                original = call.arguments if call.requested is None else call.requested
                call = attrs.evolve(
                    call,
                    arguments=change.decision.arguments,
                    requested=original,
                    edited=True,
                )
        return call

    return _with_call(checkpoint, change.call_id, decided)


def _settle(checkpoint: Checkpoint) -> Checkpoint:
    outputs: list[Item] = []
    hidden: list[Item] = []
    for call in checkpoint.pending_tools:
        if call.status != "ended":
            raise InternalError(f"call {call.call_id!r} has no outcome yet")
        outputs.append(
            ToolOutputItem(
                call_id=call.call_id,
                output=call.output,
                is_error=call.outcome != "finished",
            )
        )
        hidden.extend(call.hidden)
    return attrs.evolve(
        checkpoint,
        pending_tools=(),
        context=checkpoint.context.extended([*outputs, *hidden]),
    )


def _grant(checkpoint: Checkpoint, change: GrantAdded) -> Checkpoint:
    if change.key in checkpoint.grants or len(checkpoint.grants) >= MAX_SESSION_GRANTS:
        return checkpoint
    return attrs.evolve(checkpoint, grants=(*checkpoint.grants, change.key))
