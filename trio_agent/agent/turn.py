"""One turn, from the message that began it to its last commit.

The loop reads the phase off the checkpoint and does what comes next, so a turn that
a restart finds in the middle goes on by the same code that would have run it through.
Commits are merged wherever nothing awaits between them: a step with one tool costs
two saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from trio_agent.agent import model_step
from trio_agent.agent.admission import admit
from trio_agent.agent.ending import Ending, failed, run_turn_end
from trio_agent.agent.opening import Opening, error_event, logger, parts_of
from trio_agent.agent.preparation import opening_parts, prepare
from trio_agent.agent.session import Part, applied, told
from trio_agent.agent.steering import steers_of, take_steers
from trio_agent.agent.tool_step import Batch
from trio_agent.errors import (
    CheckpointError,
    InternalError,
    ProviderError,
    SessionBrokenError,
)
from trio_agent.middleware.contexts import Effects
from trio_agent.model.base import ModelOutput, ModelRequest
from trio_agent.model.retry import retry_delay
from trio_agent.protocol.events import (
    FinishReason,
    Warning,  # noqa: A004  # the wire's word
)
from trio_agent.protocol.items import AssistantItem, UserItem
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state.changes import (
    BatchSettled,
    StepEnded,
    TurnContinued,
    TurnEnded,
)
from trio_agent.state.checkpoint import ActiveExecution, Checkpoint
from trio_agent.state.machine import Phase, phase_of
from trio_agent.state.recovery import close_turn


class Turn:
    """The mutable company of one running turn."""

    def __init__(self, opening: Opening, turn_id: str, submission_id: str) -> None:
        self.opening = opening
        self.turn_id = turn_id
        self.submission_id = submission_id
        self.scope = trio.CancelScope()
        self.activity: str = "starting"
        self.ended = trio.Event()
        self.failure: Exception | None = None
        self.request: ModelRequest | None = None
        """What the step that has begun asks."""
        self._route_attempts = 0
        self._tried = set[str]()
        self._batch: Batch | None = None
        self._interrupted: Ending | None = None
        self._hooks_ended = False
        self._spent: TokenUsage | None = None

    # --- from other tasks

    def interrupt(self, reason: str, *, cause: str | None = None) -> None:
        """Abort this turn and only this turn, and watch that it stops.

        The first reason given is recorded. Not a checkpoint.
        """
        if self._interrupted is None:
            self._interrupted = Ending("aborted", "interrupted", reason, cause)
            self.opening.start_aside(self._watch_end, name=f"watch {self.turn_id}")
        self.scope.cancel(reason=reason)

    def wake(self) -> None:
        """Say that a decision about one of its calls was committed."""
        if self._batch is not None:
            self._batch.wake()

    # --- the turn

    async def run(self) -> None:
        """Run the turn to its end; however that comes, leave a final record of it.

        Raises:
            Exception: Only if the session is broken; a failing turn is recorded.
        """
        session = self.opening.session
        ending = Ending("aborted", "interrupted", "cancelled")
        try:
            ending = await self._attempt() or ending
            await self.run_end_hooks(ending)
        finally:
            with trio.move_on_after(self.opening.config.shutdown_grace, shield=True):
                await self._finish(ending)
            self.ended.set()
        if session.broken is None and self.active() is not None:
            grace = f"shutdown_grace ({self.opening.config.shutdown_grace:g} s)"
            session.fail(CheckpointError(f"the end of the turn was not saved within {grace}"))
        if session.broken is not None:
            raise SessionBrokenError("the turn could not be ended") from session.broken

    async def _attempt(self) -> Ending | None:
        """Do the turn; return how it must be ended, or None if it has ended by itself."""
        try:
            with self.scope:
                await self._converse()
        except Exception as exc:
            if self.opening.session.broken is not None:
                raise
            logger.warning("turn %s failed", self.turn_id, exc_info=exc)
            # What goes wrong while an interrupt unwinds the turn is no reason of its own.
            ending = self._interrupted or failed(exc)
            self.failure = ending.failure
            return ending
        return self._interrupted

    async def abandon(self) -> None:
        """Record the end of a turn that was begun, and cancelled before it could run."""
        with trio.move_on_after(self.opening.config.shutdown_grace, shield=True):
            await self._finish(Ending("aborted", "interrupted", "cancelled"))
        self.ended.set()

    def active(self) -> ActiveExecution | None:
        """Return this turn as the checkpoint has it, or None once it has ended."""
        active = self.opening.session.checkpoint.active_execution
        return active if active is not None and active.turn_id == self.turn_id else None

    async def _finish(self, ending: Ending) -> None:
        """Commit the end of the turn, unless it was committed already or nothing can be."""
        session = self.opening.session
        if session.broken is not None or self.active() is None:
            return

        def close(checkpoint: Checkpoint) -> Sequence[Part]:
            now = self.opening.now_ms()
            failure = ending.failure
            step = StepEnded(
                outcome="interrupted" if failure is None else "failed",
                completed_at_ms=now,
                usage=self._spent,  # of an answer that came and was not committed
            )
            ended = [] if self._batch is None else self._batch.end_parts(checkpoint)
            changes = close_turn(
                applied(checkpoint, ended),
                outcome=ending.outcome,
                finish_reason=ending.finish_reason,
                reason=ending.reason,
                now_ms=now,
                step_outcome=step,
            )
            error = [] if failure is None else [told(error_event(failure), self.submission_id)]
            return [*ended, *changes[:-1], *error, changes[-1]]

        await session.transact(close, cause=ending.cause or self.submission_id)

    async def run_end_hooks(self, ending: Ending) -> None:
        """Run the turn_end hooks, once a turn, and commit what they changed."""
        session = self.opening.session
        if self._hooks_ended or not self.opening.stack.has("turn_end"):
            return
        if session.broken is not None or self.active() is None:
            return
        self._hooks_ended = True
        effects = Effects()
        self.activity = "a turn_end hook"
        if self._batch is not None:  # the states that these hooks build on
            await session.transact(self._batch.end_parts, cause=self.submission_id)
        await run_turn_end(self.opening, self.turn_id, ending.outcome, effects)
        effects.items.clear()
        if effects and session.broken is None:
            await session.commit(*parts_of(effects), cause=self.submission_id)

    async def _converse(self) -> None:
        """Do what comes next until the turn is over."""
        while (active := self.active()) is not None:
            match phase_of(self.opening.session.checkpoint):
                case Phase.READY:
                    await prepare(self)
                case Phase.REQUESTING:
                    await self._ask()
                case Phase.EXECUTING:
                    await self._run_batch()
                case Phase.COMPLETING:
                    await self._complete(active)
                case Phase.IDLE:
                    raise InternalError("a turn is active in an idle session")

    async def _watch_end(self) -> None:
        """Name, by an event, what does not let an interrupted turn end."""
        with trio.move_on_after(self.opening.config.shutdown_grace):
            await self.ended.wait()
        if not self.ended.is_set() and self.opening.session.broken is None:
            running = [] if self._batch is None else self._batch.running_tools()
            what = f"tool {', '.join(running)}" if running else self.activity
            stuck = f"the interrupted turn has not ended: {what} does not stop"
            warning = Warning(code="uncancellable", message=stuck)
            self.opening.session.append(warning, self.submission_id)

    # --- the model request

    async def _ask(self) -> None:
        request = self.request
        if request is None:
            raise InternalError("a model step began without a request")
        self.activity = f"the model of route {request.route!r}"
        self._route_attempts += 1
        try:
            output = await model_step.ask(
                self.opening, request, turn_id=self.turn_id, cause=self.submission_id
            )
        except ProviderError as exc:
            await self._retry(exc, request)
            return
        self._route_attempts = 0
        self._tried.clear()
        await self._accept(output, request.route)

    async def _retry(self, error: ProviderError, request: ModelRequest) -> None:
        """Wait and ask again, go to another route, or raise *error*."""
        delay = retry_delay(error, self._route_attempts, request.step_id)
        other: str | None = None
        if delay is None:
            self._tried.add(request.route)
            other = self.opening.router.next_route(request.route, error, frozenset(self._tried))
            if other is None:
                raise error
            self._route_attempts, delay = 0, 0.0
        ended = StepEnded(
            outcome="retrying",
            completed_at_ms=self.opening.now_ms(),
            retry_in_ms=round(delay * 1000),
            route=other,
        )
        parts: list[Part] = [told(error_event(error)), ended]
        if other is not None:
            moved = f"route {request.route!r} failed; going on with {other!r}"
            parts.append(told(Warning(code="fallback", message=moved)))
        await self.opening.session.commit(*parts, cause=self.submission_id)
        self.activity = "waiting to ask the model again"
        await trio.sleep(delay)

    async def _accept(self, output: ModelOutput, route: str) -> None:
        """Commit a complete answer, and all that can be committed with it."""
        opening, session = self.opening, self.opening.session
        if opening.config.usage_observer is not None:
            opening.config.usage_observer(route, output.usage)
        self._spent = output.usage if any_tokens(output) else None
        answer = model_step.normalise(output, opening.new_id)
        effects = Effects()
        admitted = await admit(self, answer, effects)
        finish: FinishReason = output.finish_reason
        on = not output.end_turn and not answer.calls
        ended = StepEnded(
            outcome="completed",
            completed_at_ms=opening.now_ms(),
            finish_reason=finish,
            usage=self._spent,
            items=(*effects.items, *admitted.items),
            calls=tuple(admitted.calls),
            completing=None if answer.calls or on else finish,
        )
        effects.items = []
        first: list[Part] = [*parts_of(effects)]
        if not answer.items and not on:
            empty = Warning(code="empty_reply", message="the model's reply had no content")
            first.append(told(empty))
        tokens = output.usage.input_tokens + output.usage.output_tokens
        unhooked = not (opening.stack.has("stop") or opening.stack.has("turn_end"))

        def accept(checkpoint: Checkpoint) -> Sequence[Part]:
            parts: list[Part] = [*first, ended, *admitted.ends]
            after = applied(checkpoint, parts)
            if tokens and len(after.context) == len(checkpoint.context) + len(ended.items):
                self.opening.meter.measured(after, max(0, tokens - opening.fixed_tokens))
            if phase_of(after) is Phase.EXECUTING:
                return [*parts, *self.batch_parts(after)]
            if unhooked and phase_of(after) is Phase.COMPLETING and self.may_end(after):
                return [*parts, self.completed(finish)]
            return [*parts, *opening_parts(self, after)]

        await session.transact(accept, cause=self.submission_id)
        self._spent = None

    # --- the tool batch

    def batch_parts(self, checkpoint: Checkpoint) -> list[Part]:
        """Return what can be committed at once about the open batch: the calls that may begin,
        or, if all have ended, its settling and the beginning of the next step.
        """
        if all(call.status == "ended" for call in checkpoint.pending_tools):
            settled: list[Part] = [BatchSettled()]
            return [*settled, *opening_parts(self, applied(checkpoint, settled))]
        if self._batch is None:
            self._batch = Batch(self)
        return self._batch.startable(checkpoint)

    async def _run_batch(self) -> None:
        if self._batch is None:
            self._batch = Batch(self)
        self.activity = "tools"
        try:
            await self._batch.run()
        finally:
            if self.active() is not None and not self.opening.session.checkpoint.pending_tools:
                self._batch = None

    # --- the end

    def may_end(self, checkpoint: Checkpoint) -> bool:
        """Whether nobody has spoken meanwhile who outranks the end of the turn.

        Once the turn_end hooks were told, a steer is too late and waits its turn.
        """
        active = checkpoint.active_execution
        if active is None or active.interrupted is not None:
            return False
        return self._hooks_ended or not steers_of(checkpoint)

    def completed(self, finish_reason: FinishReason, reason: str = "") -> TurnEnded:
        """Return the end of a turn that came to one."""
        return TurnEnded(
            outcome="completed",
            finish_reason=finish_reason,
            finished_at_ms=self.opening.now_ms(),
            reason=reason,
        )

    async def _complete(self, active: ActiveExecution) -> None:
        """Let steers in, ask the stop hooks, and end the turn if nobody objects."""
        session, stack = self.opening.session, self.opening.stack
        reason = active.completing
        if reason is None:
            raise InternalError("the turn is not completing")
        if steers_of(session.checkpoint):
            await take_steers(self)
            if phase_of(session.checkpoint) is not Phase.COMPLETING:
                return
        if stack.has("stop"):
            effects = Effects()
            self.activity = "a stop hook"
            prompt = await stack.stop(
                self.opening.runtime,
                self.turn_id,
                effects,
                session.checkpoint.states,
                text=_last_text(session.checkpoint),
                active=active.stop_hook_active,
            )
            if prompt is not None:
                item = UserItem(text=prompt, internal="stop_hook")
                await session.commit(
                    *parts_of(effects), TurnContinued(prompt=item), cause=self.submission_id
                )
                return
            if effects:
                await session.commit(*parts_of(effects), cause=self.submission_id)
        if not steers_of(session.checkpoint):
            await self.run_end_hooks(Ending("completed", reason))

        def end(checkpoint: Checkpoint) -> Sequence[Part]:
            return [self.completed(reason)] if self.may_end(checkpoint) else []

        await session.transact(end, cause=self.submission_id)


def any_tokens(output: ModelOutput) -> bool:
    """Whether a model reported any usage at all."""
    return any(attrs.astuple(output.usage))


def _last_text(checkpoint: Checkpoint) -> str:
    for item in reversed(checkpoint.context):
        if isinstance(item, AssistantItem) and item.phase == "final_answer":
            return item.text
        if isinstance(item, UserItem) and item.internal is None:
            break
    return ""
