"""One batch of tool calls: admission, consent, scheduling, outcomes.

Only the scheduler commits. Each call has a task that runs it and hands in what it
came to; endings that fall together, and the calls that may begin because of them,
go into one save. A call is committed as begun before its handler is entered.

Rules of scheduling:

* A call runs beside others unless it is exclusive; then it runs alone.
* An exclusive call that is not over blocks every call after it, also while it
  waits for a decision.
* A parallel call that waits for a decision blocks nobody.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import attrs
import msgspec
import trio

from trio_agent.agent.consent import (
    ABORTED,
    REASON,
    decision_parts,
    ruling_of,
    summary_of,
)
from trio_agent.agent.model_step import Answer
from trio_agent.agent.opening import describe, logger, parts_of
from trio_agent.agent.session import Part, applied
from trio_agent.errors import ConfigError, SandboxError, ToolError
from trio_agent.middleware.contexts import Effects, check_state
from trio_agent.protocol import texts
from trio_agent.protocol.events import (
    CallOutcome,
    ToolProgress,
    Warning,  # noqa: A004  # the wire's word
)
from trio_agent.protocol.items import Item, ToolCallItem, UserItem
from trio_agent.protocol.limits import (
    MAX_CAPABILITY_INPUT_BYTES,
    MAX_TOOL_OUTPUT_BYTES,
    MIN_TOOL_OUTPUT_BYTES,
)
from trio_agent.protocol.ops import Abort, ExecApproval, Submission, validate_submission
from trio_agent.protocol.text import Json, cut_end, cut_middle, replace_surrogates
from trio_agent.sandbox.policy import Permissions
from trio_agent.state.changes import ApprovalAsked, CallEnded, CallsBegan, StateSaved
from trio_agent.state.checkpoint import Approval, Checkpoint, ToolCall
from trio_agent.state.narration import approval_request
from trio_agent.state.recovery import Known
from trio_agent.tools.base import ToolContext, ToolResult
from trio_agent.tools.catalog import Registered, ThreadedTool

if TYPE_CHECKING:
    from trio_agent.agent.turn import Turn


class Admitted:
    """The calls of an answer after the hooks, and the ends of those that can only fail."""

    def __init__(
        self,
        calls: list[ToolCall] | None = None,
        ends: list[CallEnded] | None = None,
    ) -> None:
        self.calls = list[ToolCall]() if calls is None else calls
        self.ends = list[CallEnded]() if ends is None else ends


async def admission(turn: Turn, answer: Answer, effects: Effects) -> Admitted:
    """Run the pre_tool_use hooks on every call that could run, and judge its arguments.

    What hooks rewrote is written back into *answer*, so that history shows what ran.
    """
    opening = turn.opening
    admitted = Admitted()
    for call in answer.calls:
        fault, outcome = answer.faults.get(call.call_id), "failed"
        if fault is None and opening.stack.has("pre_tool_use"):
            turn.activity = "a pre_tool_use hook"
            states = opening.session.checkpoint.states
            call, denial = await opening.stack.pre_tool_use(  # noqa: PLW2901
                opening.runtime, turn.turn_id, effects, states, call
            )
            if denial is not None:
                fault, outcome = texts.DENIED_BY_HOOK.format(reason=denial), "denied"
        registered = opening.catalog.get(call.name)
        if registered is not None:
            call = attrs.evolve(  # noqa: PLW2901
                call, effect=registered.effect, exclusive=registered.exclusive
            )
        if fault is None:
            fault = _fault(registered, call, opening.catalog.definitions())
        admitted.calls.append(call)
        if fault is not None:
            end: CallOutcome = "denied" if outcome == "denied" else "failed"
            output = cut_middle(replace_surrogates(fault), MAX_TOOL_OUTPUT_BYTES)
            admitted.ends.append(CallEnded(call_id=call.call_id, outcome=end, output=output))
    by_id = {call.call_id: call for call in admitted.calls}
    answer.items = [_synced(item, by_id) for item in answer.items]
    return admitted


def _fault(
    registered: Registered | None, call: ToolCall, definitions: Sequence[object]
) -> str | None:
    if registered is None:
        names = ", ".join(getattr(one, "name", "") for one in definitions) or "none"
        return texts.UNKNOWN_TOOL.format(name=call.name, available=names)
    if registered.check is not None:
        try:
            registered.check(call.arguments)
        except ToolError as exc:
            return str(exc)
    return None


def _synced(item: Item, calls: Mapping[str, ToolCall]) -> Item:
    if isinstance(item, ToolCallItem) and calls[item.call_id].requested is not None:
        call = calls[item.call_id]
        return attrs.evolve(item, name=call.name, arguments=call.arguments, sealed=None)
    return item


class _End:
    def __init__(
        self,
        call: ToolCall,
        outcome: CallOutcome,
        output: str,
        effects: Effects,
    ) -> None:
        self.call = call
        self.outcome: CallOutcome = outcome
        self.output = output
        self.effects = effects


class Batch:
    """The calls of one answer, from their admission until all have ended."""

    def __init__(
        self,
        turn: Turn,
    ) -> None:
        self.turn = turn
        self._ends = list[_End]()
        self._entered = set[str]()
        self._running = set[str]()
        self._asking = set[str]()
        self._failure: Exception | None = None
        self._woken = trio.Event()
        # Hooks of calls that run side by side run one after another, each on the states
        # that the one before has left: or one's count would be lost in another's.
        self._hooks = trio.Lock()

    def wake(self) -> None:
        """Make the scheduler look again. Not a checkpoint."""
        self._woken.set()

    def running_tools(self) -> list[str]:
        """Return the names of the tools whose handlers run."""
        calls = self.turn.opening.session.checkpoint.pending_tools
        return [call.name for call in calls if call.call_id in self._running]

    def known(self) -> Known:
        """Return the outcomes that were handed in and are not committed yet."""
        return {end.call.call_id: (end.outcome, end.output) for end in self._ends}

    def leftovers(self) -> list[Part]:
        """Return the states that calls which ended have left, for the turn's last commit."""
        return [part for end in self._ends for part in self._state_parts(end.call.name)]

    # --- deciding, without awaiting

    def startable(self, checkpoint: Checkpoint) -> list[Part]:
        """Return the beginning of every call that may begin now."""
        opening = self.turn.opening
        room = opening.config.max_parallel_tools
        calls = checkpoint.pending_tools
        running = [call for call in calls if call.status == "begun"]
        room -= len(running)
        if any(call.exclusive for call in running):
            return []
        chosen: list[str] = []
        open_before = False  # an earlier call that is neither over nor waiting
        for call in calls:
            if room <= 0:
                break
            if call.status == "ended":
                continue
            if call.status == "begun":
                open_before = True
                continue
            gated = call.waiting or ruling_of(opening, checkpoint, call).ask
            if call.exclusive:
                if not gated and not open_before and not chosen and not running:
                    chosen.append(call.call_id)
                break
            if not gated:
                chosen.append(call.call_id)
                room -= 1
                open_before = True
        return [CallsBegan(call_ids=tuple(chosen))] if chosen else []

    # --- running

    async def run(self) -> None:
        """Run until every call has ended and the batch is settled.

        Raises:
            Exception: If a hook, an approval handler or a commit failed.
        """
        session = self.turn.opening.session
        async with trio.open_nursery() as nursery:
            while True:
                self._woken = trio.Event()
                if self._failure is not None:
                    nursery.cancel_scope.cancel(reason="a hook of the batch failed")
                    break
                await self._commit_ends()
                checkpoint = session.checkpoint
                if not checkpoint.pending_tools:
                    nursery.cancel_scope.cancel(reason="nobody needs to be asked any more")
                    break
                for call in checkpoint.pending_tools:
                    # Until its end is committed a call that has ended is "begun" still, so
                    # only what was ever entered tells whether to enter it.
                    if call.status == "begun" and call.call_id not in self._entered:
                        self._entered.add(call.call_id)
                        self._running.add(call.call_id)
                        name = f"tool {call.name} {call.call_id}"
                        nursery.start_soon(self._run_call, call, name=name)
                    elif call.status == "admitted" and call.call_id not in self._asking:
                        self._consider(nursery, checkpoint, call)
                await self._woken.wait()
        if self._failure is not None:
            await self._keep_ends()
            raise self._failure

    async def _commit_ends(self) -> None:
        """Commit what was handed in, with whatever may follow at once."""
        ends = list(self._ends)

        def settle(checkpoint: Checkpoint) -> Sequence[Part]:
            parts = self._end_parts(checkpoint, ends)
            after = applied(checkpoint, parts)
            return [*parts, *self.turn.batch_parts(after)]

        await self.turn.opening.session.transact(settle, cause=self.turn.submission_id)
        del self._ends[: len(ends)]

    async def _keep_ends(self) -> None:
        """Commit what was handed in before a hook failed: it really happened."""
        ends = list(self._ends)
        await self.turn.opening.session.transact(
            lambda checkpoint: self._end_parts(checkpoint, ends),
            cause=self.turn.submission_id,
        )
        del self._ends[: len(ends)]

    def _end_parts(self, checkpoint: Checkpoint, ends: Sequence[_End]) -> list[Part]:
        open_ids = {call.call_id for call in checkpoint.pending_tools if call.status == "begun"}
        parts: list[Part] = []
        for end in ends:
            if end.call.call_id not in open_ids:
                continue
            hidden = tuple(item for item in end.effects.items if isinstance(item, UserItem))
            if end.call.edited:
                text = texts.EDITED_ARGUMENTS.format(
                    name=end.call.name,
                    arguments=msgspec.json.encode(end.call.arguments).decode(),
                )
                hidden = (UserItem(text=text, internal="approval"), *hidden)
            parts.append(
                CallEnded(
                    call_id=end.call.call_id,
                    outcome=end.outcome,
                    output=end.output,
                    hidden=hidden,
                )
            )
            parts.extend(parts_of(attrs.evolve(end.effects, items=[])))
            parts.extend(self._state_parts(end.call.name))
        return parts

    def _state_parts(self, name: str) -> list[Part]:
        """Return the change of a tool's durable state, if there is one worth keeping."""
        opening = self.turn.opening
        if name not in opening.tool_states:
            return []
        key, value = f"tool:{name}", opening.tool_states[name]
        if value == (opening.session.checkpoint.states.get(key) or {}):
            return []
        return [StateSaved(name=key, value=copy.deepcopy(value))]

    def _fail(self, exc: Exception) -> None:
        self._failure = self._failure or exc
        self.wake()

    # --- consent

    def _consider(self, nursery: trio.Nursery, checkpoint: Checkpoint, call: ToolCall) -> None:
        """Ask about *call* if it needs consent and nobody was asked yet in this process."""
        if not call.waiting and not ruling_of(self.turn.opening, checkpoint, call).ask:
            return
        self._asking.add(call.call_id)
        nursery.start_soon(self._ask, call, name=f"consent {call.name} {call.call_id}")

    async def _ask(self, call: ToolCall) -> None:
        try:
            if not call.waiting and not await self._ask_about(call):
                return
            await self._answer_in_process(call.call_id)
        except Exception as exc:
            self._fail(exc)

    async def _ask_about(self, call: ToolCall) -> bool:
        """Let the hooks decide; return whether somebody else must."""
        opening, turn = self.turn.opening, self.turn
        reason = REASON.format(name=call.name, policy=opening.config.policy.value)
        effects = Effects()
        if not opening.stack.has("permission_request"):
            return await self._ruled(call, reason, effects, None, "")
        async with self._hooks:
            turn.activity = "a permission_request hook"
            verdict, rejection = await opening.stack.permission_request(
                opening.runtime, turn.turn_id, effects, self._states(), call, reason
            )
            effects.items = []
            return await self._ruled(call, reason, effects, verdict, rejection)

    async def _ruled(
        self,
        call: ToolCall,
        reason: str,
        effects: Effects,
        verdict: Literal["allow", "deny"] | None,
        rejection: str,
    ) -> bool:
        """Commit what the hooks decided, or the question; return whether it is one."""
        opening = self.turn.opening
        registered = opening.catalog.get(call.name)
        parts: list[Part] = parts_of(effects)
        if verdict == "deny":
            text = texts.DENIED_BY_HOOK.format(reason=rejection)
            parts.append(CallEnded(call_id=call.call_id, outcome="denied", output=text))
        else:
            summary = ""
            if registered is not None and verdict is None:
                ctx = self._context(registered, call, Permissions())
                summary = await summary_of(registered, call, ctx)
            approval = Approval(
                id=opening.new_id(),
                reason=reason,
                summary=summary,
                decided=verdict == "allow",
            )
            parts.append(ApprovalAsked(call_id=call.call_id, approval=approval))
        # What the hook built on is committed before it, or it would be overwritten later.
        ends = list(self._ends) if effects.states else []
        await opening.session.transact(
            lambda checkpoint: [*self._end_parts(checkpoint, ends), *parts],
            cause=self.turn.submission_id,
        )
        self.wake()
        return verdict is None

    def _states(self) -> dict[str, Json]:
        """Return the states that the next hook finds, also those not committed yet."""
        states = dict(self.turn.opening.session.checkpoint.states)
        for end in self._ends:
            states.update(end.effects.states)
        return states

    async def _answer_in_process(self, call_id: str) -> None:
        """Ask the configured handler; its answer is the same record as a frontend's."""
        opening, turn = self.turn.opening, self.turn
        handler = opening.config.on_approval
        if handler is None:
            return
        checkpoint = opening.session.checkpoint
        call = next((one for one in checkpoint.pending_tools if one.call_id == call_id), None)
        if call is None or not call.waiting:
            return
        request = approval_request(checkpoint, call)
        decision = await handler(request)
        validate_submission(Submission(request.id, ExecApproval(request.id, decision)))

        def answer(checkpoint: Checkpoint) -> Sequence[Part]:
            for one in checkpoint.pending_tools:
                if one.call_id == call_id and one.waiting:
                    return decision_parts(opening, one, decision)
            return []  # somebody else was faster

        events = await opening.session.transact(answer, cause=turn.submission_id)
        if events and isinstance(decision, Abort):
            turn.interrupt(ABORTED)
        self.wake()

    # --- one call

    def _context(
        self, registered: Registered, call: ToolCall, permissions: Permissions
    ) -> ToolContext:
        opening, turn = self.turn.opening, self.turn
        sandbox = opening.config.sandbox

        async def report(message: str, fraction: float | None) -> None:
            opening.session.append(
                ToolProgress(
                    turn_id=turn.turn_id,
                    call_id=call.call_id,
                    message=cut_end(replace_surrogates(message), MAX_CAPABILITY_INPUT_BYTES),
                    fraction=fraction,
                ),
                turn.submission_id,
            )
            await opening.session.wait_written()

        session_id = opening.runtime.session_id
        return ToolContext(
            session_id=session_id,
            turn_id=turn.turn_id,
            call_id=call.call_id,
            idempotency_key=idempotency_key(session_id, call.call_id),
            workspace=None if sandbox is None else sandbox.workspace,
            sandbox=None
            if sandbox is None
            else sandbox.bind(
                session_id=session_id, call_id=call.call_id, permissions=permissions
            ),
            state=opening.tool_state(registered.name),
            report=report,
        )

    def _bounded(self, output: str) -> str:
        """Return what the model reads of *output*: a small part of its window at most."""
        opening = self.turn.opening
        route = opening.route_of(opening.session.checkpoint)
        window = max(MIN_TOOL_OUTPUT_BYTES, opening.window(route))  # a byte a token: a quarter
        return cut_middle(replace_surrogates(output), min(MAX_TOOL_OUTPUT_BYTES, window))

    async def _run_call(self, call: ToolCall) -> None:
        """Run one call and hand in its end. Raises nothing but `Cancelled` and its kind."""
        effects = Effects()
        outcome, output = await self._execute(call)
        output = self._bounded(output)
        end = _End(call, outcome, output, effects)
        self._ends.append(end)  # from here on it is known, whatever a hook does
        opening = self.turn.opening
        if opening.stack.has("post_tool_use"):
            self._ends.remove(end)
            try:
                async with self._hooks:
                    output = await opening.stack.post_tool_use(
                        opening.runtime,
                        self.turn.turn_id,
                        effects,
                        self._states(),
                        call,
                        output,
                        outcome != "finished",
                    )
                    end.output = self._bounded(output)
            except Exception as exc:
                self._fail(exc)
            finally:
                self._ends.append(end)
        self._running.discard(call.call_id)
        self.wake()

    async def _execute(self, call: ToolCall) -> tuple[CallOutcome, str]:
        opening = self.turn.opening
        registered = opening.catalog.get(call.name)
        if registered is None:  # it was there when the call was admitted, before a restart
            names = ", ".join(one.name for one in opening.catalog.definitions()) or "none"
            return "failed", texts.UNKNOWN_TOOL.format(name=call.name, available=names)
        permissions = ruling_of(opening, opening.session.checkpoint, call).permissions
        seconds = float("inf") if registered.timeout is None else registered.timeout
        limit = trio.CancelScope(deadline=trio.current_time() + seconds)
        result: object = None
        try:
            ctx = self._context(registered, call, permissions)
            with limit:
                result = await self._enter(registered, call, ctx)
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
        try:
            check_state(call.name, ctx.state)
        except ValueError as exc:
            ctx.state.clear()
            ctx.state.update(opening.session.checkpoint.states.get(f"tool:{call.name}") or {})
            return "failed", f"the call ended, but its durable state was not kept: {exc}"
        if isinstance(result, ToolResult):
            return ("failed" if result.is_error else "finished"), result.output
        if isinstance(result, str):
            return "finished", result
        kind = type(result).__name__
        return "failed", f"the tool returned {kind}, not text; what it did is done"

    async def _enter(
        self, registered: Registered, call: ToolCall, ctx: ToolContext
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
                    grace = self.turn.opening.config.shutdown_grace
                    kept.deadline = trio.current_time() + grace
                    raise
        finally:
            if kept.cancelled_caught:
                self._abandoned(registered.name)
        if failure is not None:
            raise failure
        if result is None:
            raise ConfigError(f"tool {registered.name!r} returned nothing")
        return result

    def _abandoned(self, name: str) -> None:
        self.turn.opening.session.append(
            Warning(
                code="abandoned_thread",
                message=f"the thread of tool {name!r} did not stop in time; it runs on",
            ),
            self.turn.submission_id,
        )


def idempotency_key(session_id: str, call_id: str) -> str:
    """Return the key of a call: the same whenever it is entered, and no other call's."""
    return hashlib.sha256(f"{session_id}\0{call_id}".encode()).hexdigest()[:32]
