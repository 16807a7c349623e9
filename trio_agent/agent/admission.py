"""Admitting the calls of an answer: what hooks make of them, and which can only fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_agent.agent.model_step import Answer
from trio_agent.agent.opening import Opening
from trio_agent.agent.tool_call import bounded, unknown_tool
from trio_agent.errors import ToolError
from trio_agent.middleware.contexts import Effects
from trio_agent.protocol import texts
from trio_agent.protocol.events import CallOutcome
from trio_agent.protocol.items import Item, ToolCallItem
from trio_agent.state.changes import CallEnded
from trio_agent.state.checkpoint import ToolCall

if TYPE_CHECKING:
    from trio_agent.agent.turn import Turn


class Admitted:
    """An answer after the hooks: its items and calls, and the ends of those that can only fail.

    ``items`` show what runs: what hooks rewrote is written back into them.
    """

    def __init__(self, items: list[Item], calls: list[ToolCall], ends: list[CallEnded]) -> None:
        self.items = items
        self.calls = calls
        self.ends = ends


async def admit(turn: Turn, answer: Answer, effects: Effects) -> Admitted:
    """Run the pre_tool_use hooks on every call that could run, and judge its arguments."""
    opening = turn.opening
    admitted = Admitted([], [], [])
    for asked in answer.calls:
        call = asked
        outcome: CallOutcome = "failed"
        fault = answer.faults.get(call.call_id)
        if fault is None and call.name not in opening.catalog:
            fault = unknown_tool(opening.catalog, call.name)
        if fault is None and opening.stack.has("pre_tool_use"):
            turn.activity = "a pre_tool_use hook"
            states = opening.session.checkpoint.states
            call, denial = await opening.stack.pre_tool_use(
                opening.runtime, turn.turn_id, effects, states, call
            )
            if denial is not None:
                fault = texts.DENIED_BY_HOOK.format(reason=denial)
                outcome = "denied"
        registered = opening.catalog.get(call.name)
        if registered is not None:
            call = attrs.evolve(call, effect=registered.effect, exclusive=registered.exclusive)
        if fault is None:
            fault = _fault(opening, call)
        admitted.calls.append(call)
        if fault is not None:
            end = CallEnded(
                call_id=call.call_id, outcome=outcome, output=bounded(opening, fault)
            )
            admitted.ends.append(end)
    by_id = {call.call_id: call for call in admitted.calls}
    admitted.items.extend(_synced(item, by_id) for item in answer.items)
    return admitted


def _fault(opening: Opening, call: ToolCall) -> str | None:
    """Return why *call* can only fail, or None."""
    registered = opening.catalog.get(call.name)
    if registered is None:
        return unknown_tool(opening.catalog, call.name)
    if registered.check is not None:
        try:
            registered.check(call.arguments)
        except ToolError as exc:
            return str(exc)
    return None


def _synced(item: Item, calls: dict[str, ToolCall]) -> Item:
    if isinstance(item, ToolCallItem) and calls[item.call_id].requested is not None:
        call = calls[item.call_id]
        return attrs.evolve(item, name=call.name, arguments=call.arguments, sealed=None)
    return item
