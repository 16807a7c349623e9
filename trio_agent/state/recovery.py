"""How a turn is closed truthfully: by a restart, an interrupt, or a failure.

`recover` settles a session whose process died, `close_turn` one whose turn is over
while the process lives. Both are the same few rules about what is known of a call:

=====================  ==================  =======================================
the call was           its effect          its outcome
=====================  ==================  =======================================
admitted, not begun    any                 ``not_started``
begun                  read_only           ``failed``: it changed nothing
begun                  any other           ``unknown``
ended                  any                 what it was
=====================  ==================  =======================================

Under `Recovery.RESUME` a begun call that is ``read_only`` or ``idempotent`` is
readmitted instead, and a lost model request is asked again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, TypeAlias

from trio_agent.protocol import texts
from trio_agent.protocol.events import CallOutcome, FinishReason, TurnOutcome
from trio_agent.state.changes import (
    BatchSettled,
    CallEnded,
    CallReadmitted,
    Change,
    StepEnded,
    TurnEnded,
)
from trio_agent.state.checkpoint import Checkpoint, ToolCall
from trio_agent.state.machine import Phase, phase_of

INTERRUPTED_BY_RESTART: Final = "interrupted by restart"

Known: TypeAlias = Mapping[str, tuple[CallOutcome, str]]
"""What tools found out about calls that had begun: outcome and output by call id."""


class Recovery(enum.Enum):
    """What an opening does with a turn that was cut off in a model request or a tool."""

    ABORT = "abort"
    """It is closed; every call gets the outcome that is known of it."""
    RESUME = "resume"
    """It goes on: what is safe runs again, and the model is asked again."""


def uncertain(checkpoint: Checkpoint) -> tuple[ToolCall, ...]:
    """Return the calls that had begun and of which no end is known."""
    return tuple(call for call in checkpoint.pending_tools if call.status == "begun")


def recover(
    checkpoint: Checkpoint, policy: Recovery, *, now_ms: int, known: Known | None = None
) -> list[Change]:
    """Return the changes that settle a session whose last process died.

    None are needed for a session that is idle, that waits for approvals, or that
    stood between two steps: it just goes on. A turn whose interruption was accepted is
    closed, whatever the policy. Settling twice changes nothing more.
    """
    known = known or {}
    active = checkpoint.active_execution
    if active is not None and active.interrupted is not None:
        return close_turn(
            checkpoint,
            outcome="aborted",
            finish_reason="interrupted",
            reason=active.interrupted,
            now_ms=now_ms,
            known=known,
            restarted=True,
        )
    match phase_of(checkpoint):
        case Phase.IDLE | Phase.READY | Phase.COMPLETING:
            return []
        case Phase.REQUESTING:
            lost = StepEnded(outcome="interrupted", completed_at_ms=now_ms)
            return [lost] if policy is Recovery.RESUME else [lost, _aborted(now_ms)]
        case Phase.EXECUTING if policy is Recovery.RESUME:
            return _resume_batch(checkpoint, known)
        case Phase.EXECUTING:
            return _abort_batch(checkpoint, now_ms, known)


def _aborted(now_ms: int) -> TurnEnded:
    return TurnEnded(
        outcome="aborted",
        finish_reason="interrupted",
        finished_at_ms=now_ms,
        reason=INTERRUPTED_BY_RESTART,
    )


def _abort_batch(checkpoint: Checkpoint, now_ms: int, known: Known) -> list[Change]:
    calls = checkpoint.pending_tools
    if all(call.status == "ended" for call in calls):
        return []
    open_question = any(call.waiting for call in calls)
    answered = any(
        call.status == "admitted" and call.approval is not None and call.approval.decided
        for call in calls
    )
    if open_question and not answered and not uncertain(checkpoint):
        return []
    return [*_close_calls(checkpoint, known, restarted=True), BatchSettled(), _aborted(now_ms)]


def _resume_batch(checkpoint: Checkpoint, known: Known) -> list[Change]:
    changes: list[Change] = []
    for call in uncertain(checkpoint):
        if call.call_id in known:
            changes.append(_ended(call, *known[call.call_id]))
        elif call.effect in {"read_only", "idempotent"}:
            changes.append(CallReadmitted(call_id=call.call_id))
        else:
            changes.append(_ended(call, *outcome_of(call, restarted=True)))
    return changes


def close_turn(
    checkpoint: Checkpoint,
    *,
    outcome: TurnOutcome,
    finish_reason: FinishReason,
    reason: str,
    now_ms: int,
    step_outcome: StepEnded | None = None,
    known: Known | None = None,
    restarted: bool = False,
) -> list[Change]:
    """Return the changes that end the running turn from wherever it stands.

    Args:
        checkpoint: A session; without a running turn nothing is returned.
        outcome: How the turn ends.
        finish_reason: Why, in one word.
        reason: Why, for people.
        now_ms: The wall clock.
        step_outcome: How a running model step ends; default: interrupted.
        known: Outcomes of begun calls that ended and were not committed yet.
        restarted: Whether the process that ran the turn has died.
    """
    if checkpoint.active_execution is None:
        return []
    changes: list[Change] = []
    if checkpoint.active_model_step is not None:
        changes.append(step_outcome or StepEnded(outcome="interrupted", completed_at_ms=now_ms))
    if checkpoint.pending_tools:
        changes.extend(_close_calls(checkpoint, known or {}, restarted=restarted))
        changes.append(BatchSettled())
    changes.append(
        TurnEnded(
            outcome=outcome, finish_reason=finish_reason, finished_at_ms=now_ms, reason=reason
        )
    )
    return changes


def _close_calls(checkpoint: Checkpoint, known: Known, *, restarted: bool) -> list[Change]:
    return [
        _ended(call, *known[call.call_id])
        if call.status == "begun" and call.call_id in known
        else _ended(call, *outcome_of(call, restarted=restarted))
        for call in checkpoint.pending_tools
        if call.status != "ended"
    ]


def outcome_of(call: ToolCall, *, restarted: bool) -> tuple[CallOutcome, str]:
    """Return what is known, and said, of a call that was cut off."""
    if call.status == "admitted":
        return "not_started", texts.NOT_STARTED
    if call.effect == "read_only":
        text = texts.READ_ONLY_AFTER_RESTART if restarted else texts.READ_ONLY_INTERRUPTED
        return "failed", text
    return "unknown", texts.UNKNOWN_AFTER_RESTART if restarted else texts.INTERRUPTED


def _ended(call: ToolCall, outcome: CallOutcome, output: str) -> CallEnded:
    return CallEnded(call_id=call.call_id, outcome=outcome, output=output)
