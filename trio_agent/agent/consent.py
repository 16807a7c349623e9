"""Pausing a call for a decision: who is asked, what is remembered, what an answer does."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from trio_agent.agent.opening import Opening, logger
from trio_agent.agent.session import Part
from trio_agent.protocol import texts
from trio_agent.protocol.ops import Abort, ApprovedForSession, Decision, Denied
from trio_agent.sandbox.approval import Ruling, rule
from trio_agent.state.changes import (
    ApprovalDecided,
    CallEnded,
    GrantAdded,
    TurnInterrupted,
)
from trio_agent.state.checkpoint import Checkpoint, ToolCall
from trio_agent.tools.catalog import Registered

ABORTED: Final = "ended by the user instead of an approval"
REASON: Final = "tool {name!r} needs approval under the policy {policy!r}"


def grant_key(registered: Registered, call: ToolCall) -> str:
    """Return what a session approval of *call* is remembered by.

    The identical call, unless the tool says which calls one approval covers.
    """
    covered: object = call.arguments
    if registered.grant_key is not None:
        try:
            covered = str(registered.grant_key(call.arguments))
        except Exception as exc:
            logger.warning("tool %r has no grant key for a call", call.name, exc_info=exc)
    text = msgspec.json.encode([call.name, covered], order="deterministic")
    return hashlib.sha256(text).hexdigest()


def ruling_of(opening: Opening, checkpoint: Checkpoint, call: ToolCall) -> Ruling:
    """Return whether *call* must be asked about, and what it may do."""
    registered = opening.catalog.get(call.name)
    if registered is None:
        return rule(opening.config.policy, needs_approval=False, sandboxed=True, granted=False)
    decided = call.approval is not None and call.approval.decided
    return rule(
        opening.config.policy,
        needs_approval=registered.needs_approval,
        sandboxed=registered.sandboxed,
        granted=decided
        or (registered.needs_approval and grant_key(registered, call) in checkpoint.grants),
        network=call.network,
    )


def decision_parts(opening: Opening, call: ToolCall, decision: Decision) -> list[Part]:
    """Return what an answer changes; a refused call has its outcome in the same commit."""
    parts: list[Part] = [ApprovalDecided(call_id=call.call_id, decision=decision)]
    if isinstance(decision, Denied):
        reason = decision.rejection.strip()
        text = texts.DENIED_WITH_REASON.format(reason=reason) if reason else texts.DENIED
        parts.append(CallEnded(call_id=call.call_id, outcome="denied", output=text))
    elif isinstance(decision, Abort):
        text = texts.ABORTED_BY_USER
        parts.append(CallEnded(call_id=call.call_id, outcome="denied", output=text))
        parts.append(TurnInterrupted(reason=ABORTED))
    elif isinstance(decision, ApprovedForSession):
        registered = opening.catalog.get(call.name)
        if registered is not None:
            parts.append(GrantAdded(key=grant_key(registered, call)))
    return parts
