"""One tool call: what its handler is given, how it is entered, and what it came to."""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING

import trio

from trio_agent.agent.consent import ruling_of
from trio_agent.agent.opening import Opening, describe, logger
from trio_agent.errors import ConfigError, SandboxError, ToolError
from trio_agent.middleware.contexts import Effects, check_state
from trio_agent.protocol import texts
from trio_agent.protocol.events import (
    CallOutcome,
    ToolProgress,
    Warning,  # noqa: A004  # the wire's word
)
from trio_agent.protocol.limits import (
    MAX_CAPABILITY_INPUT_BYTES,
    MAX_TOOL_OUTPUT_BYTES,
    MIN_TOOL_OUTPUT_BYTES,
)
from trio_agent.protocol.text import Json, cut_end, cut_middle, replace_surrogates
from trio_agent.sandbox.policy import Permissions
from trio_agent.state.checkpoint import ToolCall
from trio_agent.tools.base import Report, ToolContext, ToolResult
from trio_agent.tools.catalog import Catalog, Registered, ThreadedTool

if TYPE_CHECKING:
    from trio_agent.agent.turn import Turn


class Ended:
    """What a call that was entered came to: its outcome, and all that goes into its commit."""

    def __init__(
        self, call: ToolCall, outcome: CallOutcome, output: str, state: dict[str, Json]
    ) -> None:
        self.call = call
        self.outcome: CallOutcome = outcome
        self.output = output
        self.state = state
        self.effects = Effects()


def unknown_tool(catalog: Catalog, name: str) -> str:
    """Return what the model reads when it calls a tool that there is not."""
    names = ", ".join(one.name for one in catalog.definitions()) or "none"
    return texts.UNKNOWN_TOOL.format(name=name, available=names)


def bounded(opening: Opening, output: str) -> str:
    """Return what the model reads of *output*: a small part of its window at most."""
    window = opening.window(opening.route_of(opening.session.checkpoint))
    room = max(MIN_TOOL_OUTPUT_BYTES, window)  # a byte a token: a quarter
    return cut_middle(replace_surrogates(output), min(MAX_TOOL_OUTPUT_BYTES, room))


def tool_context(
    opening: Opening,
    turn_id: str,
    call: ToolCall,
    permissions: Permissions,
    *,
    state: dict[str, Json],
    report: Report | None = None,
) -> ToolContext:
    """Return what *call* can use, with those permissions and that state."""
    session_id, sandbox = opening.runtime.session_id, opening.config.sandbox
    workspace = bound = None
    if sandbox is not None:
        workspace = sandbox.workspace
        bound = sandbox.bind(
            session_id=session_id, call_id=call.call_id, permissions=permissions
        )
    key = hashlib.sha256(f"{session_id}\0{call.call_id}".encode()).hexdigest()[:32]
    return ToolContext(
        session_id=session_id,
        turn_id=turn_id,
        call_id=call.call_id,
        idempotency_key=key,
        workspace=workspace,
        sandbox=bound,
        state=state,
        report=report,
    )


async def summary_of(opening: Opening, turn_id: str, call: ToolCall) -> str:
    """Return what *call* would do, as its tool tells it; bounded, empty if it cannot say."""
    registered = opening.catalog.get(call.name)
    if registered is None or registered.describe is None:
        return ""
    state = copy.deepcopy(opening.tool_state(call.name))
    try:
        ctx = tool_context(opening, turn_id, call, Permissions(), state=state)
        text = await registered.describe(copy.deepcopy(call.arguments), ctx)
    except Exception as exc:
        logger.warning("tool %r could not describe a call", call.name, exc_info=exc)
        return describe(exc)
    return cut_end(replace_surrogates(text), MAX_CAPABILITY_INPUT_BYTES)


async def run_call(turn: Turn, call: ToolCall) -> Ended:
    """Run one call to its end. Raises nothing but `Cancelled` and its kind."""
    opening = turn.opening
    registered = opening.catalog.get(call.name)
    state = opening.tool_state(call.name)
    outcome: CallOutcome = "failed"
    if registered is None:  # it was there when the call was admitted, before a restart
        output = unknown_tool(opening.catalog, call.name)
    else:
        outcome, output = await _outcome(turn, registered, call, state)
    try:
        check_state(call.name, state)
    except ValueError as exc:
        opening.reset_tool_state(call.name)
        outcome = "failed" if outcome == "finished" else outcome
        output = f"{output}\n\nThe call ended; its durable state was not kept: {exc}"
    kept = copy.deepcopy(state) if state else {}
    return Ended(call, outcome, bounded(opening, output), kept)


async def _outcome(
    turn: Turn, registered: Registered, call: ToolCall, state: dict[str, Json]
) -> tuple[CallOutcome, str]:
    opening = turn.opening

    async def report(message: str, fraction: float | None) -> None:
        text = cut_end(replace_surrogates(message), MAX_CAPABILITY_INPUT_BYTES)
        progress = ToolProgress(
            turn_id=turn.turn_id, call_id=call.call_id, message=text, fraction=fraction
        )
        opening.session.append(progress, turn.submission_id)
        await opening.session.wait_written()

    permissions = ruling_of(opening, opening.session.checkpoint, call).permissions
    seconds = float("inf") if registered.timeout is None else registered.timeout
    limit = trio.CancelScope(deadline=trio.current_time() + seconds)
    result: object = None
    try:
        ctx = tool_context(opening, turn.turn_id, call, permissions, state=state, report=report)
        with limit:
            result = await _enter(turn, registered, call, ctx)
    except ToolError as exc:
        return "failed", str(exc)
    except Exception as exc:
        if not isinstance(exc, SandboxError):
            logger.warning("tool %r failed", call.name, exc_info=exc)
        return "failed", describe(exc)
    if limit.cancelled_caught:
        if registered.effect == "read_only":
            return "failed", texts.READ_ONLY_TIMED_OUT.format(seconds=seconds)
        return "unknown", texts.TIMED_OUT.format(seconds=seconds)
    if isinstance(result, ToolResult):
        return ("failed" if result.is_error else "finished"), result.output
    if isinstance(result, str):
        return "finished", result
    kind = type(result).__name__
    return "failed", f"the tool returned {kind}, not text; what it did is done"


async def _enter(
    turn: Turn, registered: Registered, call: ToolCall, ctx: ToolContext
) -> str | ToolResult:
    """Enter the handler; one in a thread is waited for, and abandoned after the grace."""
    tool, arguments = registered.tool, copy.deepcopy(call.arguments)
    if not registered.threaded or not isinstance(tool, ThreadedTool):
        return await tool.call(arguments, ctx)
    kept = trio.CancelScope(shield=True)
    ended = trio.Event()
    result: str | ToolResult | None = None
    failure: Exception | None = None

    async def work() -> None:
        nonlocal result, failure
        with kept:
            try:
                result = await tool.call(arguments, ctx, abandon_on_cancel=True)
            except Exception as exc:
                failure = exc
        ended.set()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, name=f"thread of {registered.name}")
            try:
                await ended.wait()
            except trio.Cancelled:
                grace = turn.opening.config.shutdown_grace
                kept.deadline = trio.current_time() + grace
                raise
    finally:
        if kept.cancelled_caught:
            runs_on = f"the thread of tool {registered.name!r} did not stop in time; it runs on"
            abandoned = Warning(code="abandoned_thread", message=runs_on)
            turn.opening.session.append(abandoned, turn.submission_id)
    if failure is not None:
        raise failure
    if result is None:
        raise ConfigError(f"tool {registered.name!r} returned nothing")
    return result
