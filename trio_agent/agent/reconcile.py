"""Asking tools, before a session goes on, what became of calls that a crash cut off."""

from __future__ import annotations

import copy
from typing import Final

import trio

from trio_agent.agent.opening import Opening, logger
from trio_agent.agent.tool_call import tool_context
from trio_agent.protocol import texts
from trio_agent.protocol.limits import MAX_TOOL_OUTPUT_BYTES
from trio_agent.protocol.text import cut_middle
from trio_agent.sandbox.policy import Permissions
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.state.recovery import Known, uncertain

RECONCILE_SECONDS: Final = 10.0


async def reconcile(opening: Opening, checkpoint: Checkpoint) -> Known:
    """Ask the tools that can tell what became of calls that a crash cut off."""
    known: dict[str, tuple[object, str]] = {}
    for call in uncertain(checkpoint):
        registered = opening.catalog.get(call.name)
        if registered is None or registered.effect not in {call.effect, "read_only"}:
            # What was safe to run again when the call began may not be so any more.
            known[call.call_id] = ("unknown", texts.UNKNOWN_AFTER_RESTART)
        if registered is None or registered.reconcile is None:
            continue
        outcome, output = "unknown", ""
        try:
            with trio.move_on_after(RECONCILE_SECONDS):
                state = copy.deepcopy(opening.tool_state(call.name))
                ctx = tool_context(
                    opening, checkpoint.turn_id or "", call, Permissions(), state=state
                )
                found = await registered.reconcile(copy.deepcopy(call.arguments), ctx)
                outcome, output = found.outcome, found.output
        except Exception as exc:
            logger.warning("tool %r could not reconcile a call", call.name, exc_info=exc)
        if outcome in {"finished", "failed", "not_started"}:
            known[call.call_id] = (outcome, cut_middle(output, MAX_TOOL_OUTPUT_BYTES))
    return known  # type: ignore[return-value]  # the outcomes were checked
