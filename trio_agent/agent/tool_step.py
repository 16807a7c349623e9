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

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import attrs
import msgspec
import trio

from trio_agent.agent.consent import (
    ABORTED,
    REASON,
    decision_parts,
    ruling_of,
)
from trio_agent.agent.opening import parts_of
from trio_agent.agent.session import Part, applied
from trio_agent.agent.tool_call import Ended, bounded, run_call, summary_of
from trio_agent.middleware.contexts import Effects
from trio_agent.protocol import texts
from trio_agent.protocol.items import UserItem
from trio_agent.protocol.ops import Abort, ExecApproval, Submission, validate_submission
from trio_agent.protocol.text import Json
from trio_agent.state.changes import ApprovalAsked, CallEnded, CallsBegan, StateSaved
from trio_agent.state.checkpoint import Approval, Checkpoint, ToolCall
from trio_agent.state.intake import find_approval
from trio_agent.state.narration import approval_request

if TYPE_CHECKING:
    from trio_agent.agent.turn import Turn


class Batch:
    """The calls of one answer, from their admission until all have ended."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._ends = list[Ended]()
        self._entered = set[str]()
        self._running = set[str]()
        self._asked = set[str]()
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

    # --- deciding, without awaiting

    def startable(self, checkpoint: Checkpoint) -> list[Part]:
        """Return the beginning of every call that may begin now."""
        opening, calls = self.turn.opening, checkpoint.pending_tools
        running = [call for call in calls if call.status == "begun"]
        if any(call.exclusive for call in running):
            return []
        room = opening.config.max_parallel_tools - len(running)
        chosen: list[str] = []
        for call in calls:
            if len(chosen) >= room:
                break
            if call.status != "admitted":
                continue
            gated = call.waiting or ruling_of(opening, checkpoint, call).ask
            if call.exclusive:
                if not gated and not chosen and not running:
                    chosen.append(call.call_id)
                break
            if not gated:
                chosen.append(call.call_id)
        return [CallsBegan(call_ids=tuple(chosen))] if chosen else []

    def _must_ask(self, checkpoint: Checkpoint, call: ToolCall) -> bool:
        """Whether *call* needs consent and nobody was asked yet in this process."""
        if call.status != "admitted" or call.call_id in self._asked:
            return False
        return call.waiting or ruling_of(self.turn.opening, checkpoint, call).ask

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
                    elif self._must_ask(checkpoint, call):
                        self._asked.add(call.call_id)
                        name = f"consent {call.name} {call.call_id}"
                        nursery.start_soon(self._ask, call, name=name)
                await self._woken.wait()
        if self._failure is not None:
            raise self._failure

    async def _commit_ends(self) -> None:
        """Commit what was handed in, with whatever may follow at once."""

        def settle(checkpoint: Checkpoint) -> Sequence[Part]:
            parts = self.end_parts(checkpoint)
            return [*parts, *self.turn.batch_parts(applied(checkpoint, parts))]

        await self.turn.opening.session.transact(settle, cause=self.turn.submission_id)

    def _uncommitted(self, checkpoint: Checkpoint) -> list[Ended]:
        """Return the ends that were handed in and are not in *checkpoint*, in their order."""
        open_ids = {call.call_id for call in checkpoint.pending_tools if call.status == "begun"}
        return [end for end in self._ends if end.call.call_id in open_ids]

    def end_parts(self, checkpoint: Checkpoint) -> list[Part]:
        """Return the ends that were handed in and are not committed yet, with their effects."""
        states = dict(checkpoint.states)
        parts: list[Part] = []
        for end in self._uncommitted(checkpoint):
            call = end.call
            hidden = [item for item in end.effects.items if isinstance(item, UserItem)]
            if call.edited:
                arguments = msgspec.json.encode(call.arguments).decode()
                text = texts.EDITED_ARGUMENTS.format(name=call.name, arguments=arguments)
                hidden.insert(0, UserItem(text=text, internal="approval"))
            parts.append(
                CallEnded(
                    call_id=call.call_id,
                    outcome=end.outcome,
                    output=end.output,
                    hidden=tuple(hidden),
                )
            )
            parts.extend(parts_of(attrs.evolve(end.effects, items=[])))
            key = f"tool:{call.name}"
            if end.state != (states.get(key) or {}):
                states[key] = end.state
                parts.append(StateSaved(name=key, value=end.state))
        return parts

    def _fail(self, exc: Exception) -> None:
        self._failure = self._failure or exc
        self.wake()

    # --- consent

    async def _ask(self, call: ToolCall) -> None:
        """Have *call* decided about: by the hooks, the configured handler, or a frontend."""
        try:
            if call.waiting or await self._ask_hooks(call):
                await self._answer_in_process(call.call_id)
        except Exception as exc:
            self._fail(exc)

    async def _ask_hooks(self, call: ToolCall) -> bool:
        """Commit what the hooks decide, or the question; return whether it is one."""
        opening, turn = self.turn.opening, self.turn
        reason = REASON.format(name=call.name, policy=opening.config.policy.value)
        effects = Effects()
        verdict, rejection = None, ""
        hooked = opening.stack.has("permission_request")
        async with self._hooks if hooked else nullcontext():
            if hooked:
                turn.activity = "a permission_request hook"
                verdict, rejection = await opening.stack.permission_request(
                    opening.runtime, turn.turn_id, effects, self._states(), call, reason
                )
            parts: list[Part] = parts_of(effects)
            if verdict == "deny":
                text = texts.DENIED_BY_HOOK.format(reason=rejection)
                parts.append(CallEnded(call_id=call.call_id, outcome="denied", output=text))
            else:
                approval = Approval(
                    id=opening.new_id(),
                    reason=reason,
                    summary="" if verdict else await summary_of(opening, turn.turn_id, call),
                    decided=verdict == "allow",
                )
                parts.append(ApprovalAsked(call_id=call.call_id, approval=approval))
            # What the hooks built on is committed before it, or would overwrite it later.
            await opening.session.transact(
                lambda checkpoint: [*self.end_parts(checkpoint), *parts],
                cause=turn.submission_id,
            )
        self.wake()
        return verdict is None

    def _states(self) -> dict[str, Json]:
        """Return the states that the next hook finds, also those not committed yet."""
        checkpoint = self.turn.opening.session.checkpoint
        states = dict(checkpoint.states)
        for end in self._uncommitted(checkpoint):
            states.update(end.effects.states)
        return states

    async def _answer_in_process(self, call_id: str) -> None:
        """Ask the configured handler; its answer is the same record as a frontend's."""
        opening, turn = self.turn.opening, self.turn
        handler, checkpoint = opening.config.on_approval, opening.session.checkpoint
        asked = [call for call in checkpoint.pending_tools if call.call_id == call_id]
        if handler is None or not any(call.waiting for call in asked):
            return
        request = approval_request(checkpoint, asked[0])
        decision = await handler(request)
        validate_submission(Submission(request.id, ExecApproval(request.id, decision)))

        def answer(checkpoint: Checkpoint) -> Sequence[Part]:
            call = find_approval(checkpoint, request.id)
            if call is None or not call.waiting:
                return []  # somebody else was faster
            return decision_parts(opening, call, decision)

        events = await opening.session.transact(answer, cause=turn.submission_id)
        if events and isinstance(decision, Abort):
            turn.interrupt(ABORTED)
        self.wake()

    # --- one call

    async def _run_call(self, call: ToolCall) -> None:
        """Run one call and hand in its end. Raises nothing but `Cancelled` and its kind."""
        end = await run_call(self.turn, call)
        try:
            if self.turn.opening.stack.has("post_tool_use"):
                await self._post_tool_use(end)
        except Exception as exc:
            self._fail(exc)
        finally:
            # It is known from here on, whatever became of the hooks.
            self._ends.append(end)
            self._running.discard(call.call_id)
            self.wake()

    async def _post_tool_use(self, end: Ended) -> None:
        opening = self.turn.opening
        async with self._hooks:
            output = await opening.stack.post_tool_use(
                opening.runtime,
                self.turn.turn_id,
                end.effects,
                self._states(),
                end.call,
                end.output,
                end.outcome != "finished",
            )
            end.output = bounded(opening, output)
