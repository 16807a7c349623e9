"""What an op means in the phase that the session is in: pure, so decision and state are one."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import msgspec
from msgspec import Struct

from trio_agent.protocol.codec import unstructure
from trio_agent.protocol.ops import (
    CancelQueued,
    EditQueued,
    ExecApproval,
    Interrupt,
    Op,
    ResumeSession,
    SetModel,
    Submission,
    UserInput,
)
from trio_agent.state.checkpoint import Checkpoint, ToolCall


class Refusal(Struct, frozen=True, kw_only=True):
    """The op is refused; ``code`` is one of `REJECTION_CODES`."""

    code: str
    message: str


Expectation: TypeAlias = str | None
"""What `submit(expect=...)` asks for: ``"idle"``, a turn id, or nothing."""


def digest_of(submission: Submission) -> str:
    """Return what recognises the same submission when it comes again under its id."""
    text = msgspec.json.encode(unstructure(submission.op), order="deterministic")
    return hashlib.sha256(text).hexdigest()[:16]


def is_idle(checkpoint: Checkpoint) -> bool:
    """Whether no turn is active and nothing waits that would start one."""
    return checkpoint.active_execution is None and not checkpoint.queue


def check_expectation(checkpoint: Checkpoint, expect: Expectation) -> Refusal | None:
    """Return why *expect* does not hold, or None if it does."""
    if expect is None:
        return None
    if expect == "idle":
        if is_idle(checkpoint):
            return None
        busy = checkpoint.turn_id or "a queued message"
        return Refusal(code="not_idle", message=f"the session is not idle: {busy} comes first")
    if expect == checkpoint.turn_id:
        return None
    running = checkpoint.turn_id or "none"
    return Refusal(code="stale_turn", message=f"turn {expect!r} is not running; {running} is")


def check_op(checkpoint: Checkpoint, op: Op) -> Refusal | None:
    """Return why *op* cannot be done now, or None.

    Messages and commands are judged further by the middlewares that own them.
    """
    match op:
        case Interrupt():
            return _check_turn(checkpoint, op.turn_id)
        case ExecApproval():
            return _check_approval(checkpoint, op)
        case EditQueued() | CancelQueued():
            if any(waiting.id == op.submission_id for waiting in checkpoint.queue):
                return None
            return Refusal(
                code="not_queued", message=f"message {op.submission_id!r} does not wait"
            )
        case SetModel() | ResumeSession():
            if checkpoint.active_execution is None:
                return None
            return Refusal(
                code="busy", message="a turn is running: interrupt it, or wait for its end"
            )
        case UserInput():
            return None
        case _:
            return None


def _check_turn(checkpoint: Checkpoint, turn_id: str) -> Refusal | None:
    if checkpoint.turn_id is None:
        return Refusal(code="no_turn", message="no turn is running")
    if checkpoint.turn_id != turn_id:
        message = f"turn {turn_id!r} is not running; {checkpoint.turn_id!r} is"
        return Refusal(code="stale_turn", message=message)
    return None


def find_approval(checkpoint: Checkpoint, approval_id: str) -> ToolCall | None:
    """Return the call that the request of that id is about, if it is in the open batch."""
    for call in checkpoint.pending_tools:
        if call.approval is not None and call.approval.id == approval_id:
            return call
    return None


def _check_approval(checkpoint: Checkpoint, op: ExecApproval) -> Refusal | None:
    call = find_approval(checkpoint, op.id)
    if call is None:
        return Refusal(code="no_approval", message=f"no request {op.id!r} waits for an answer")
    if not call.waiting:
        return Refusal(code="already_decided", message=f"request {op.id!r} is answered")
    return None
