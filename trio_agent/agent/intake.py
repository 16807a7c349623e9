"""The task that reads the inbox: every op is decided here, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, assert_never

import outcome

from trio_agent.agent.consent import ABORTED, decision_parts
from trio_agent.agent.inbox import Envelope, over
from trio_agent.agent.opening import Opening, describe, logger, parts_of
from trio_agent.agent.preparation import opening_parts
from trio_agent.agent.runner import Runner, began_by
from trio_agent.agent.session import Part, applied, told
from trio_agent.agent.turn import Turn
from trio_agent.errors import SubmissionRejectedError, UnknownError
from trio_agent.middleware.contexts import Effects, Refuse, RouteContext
from trio_agent.protocol.events import (
    SessionResumeRequested,
    SubmissionAccepted,
    SubmissionRejected,
    Warning,  # noqa: A004  # the wire's word
)
from trio_agent.protocol.limits import MAX_QUEUED_MESSAGES
from trio_agent.protocol.ops import (
    Abort,
    CancelQueued,
    CapabilityCommand,
    EditQueued,
    ExecApproval,
    Interrupt,
    ResumeSession,
    SetModel,
    Submission,
    UserInput,
)
from trio_agent.state.changes import (
    MessageQueued,
    QueueCancelled,
    QueueEdited,
    RouteChanged,
    TurnInterrupted,
)
from trio_agent.state.checkpoint import Checkpoint, QueuedMessage
from trio_agent.state.intake import (
    Refusal,
    check_expectation,
    check_op,
    digest_of,
    find_approval,
    is_idle,
)
from trio_agent.store.base import Receipt, SessionSummary

INTERRUPTED: Final = "interrupted"


class Intake:
    """Decides submissions: refuses them, or commits what they mean and acts on it."""

    def __init__(self, opening: Opening, runner: Runner) -> None:
        self.opening = opening
        self.runner = runner

    async def run(self) -> None:
        """Take in ops until every sender is closed, then end the session."""
        session = self.opening.session
        try:
            async for envelope in self.opening.inbox.receive:
                if envelope.take():
                    await self._take(envelope)
        finally:
            self.opening.inbox.refuse_rest(session.broken)
        self.runner.end()

    async def _take(self, envelope: Envelope) -> None:
        try:
            result = await self._decide(envelope)
        except BaseException as exc:
            # Cancelled means that nothing was accepted; it is no failure of the session.
            failure = self.opening.session.broken
            if failure is None and isinstance(exc, Exception):
                failure = exc
            envelope.answer(outcome.Error(over(failure)))
            raise
        if isinstance(result, Refusal):
            error = SubmissionRejectedError(result.code, result.message)
            envelope.answer(outcome.Error(error))
        else:
            envelope.answer(outcome.Value(result))

    async def _decide(self, envelope: Envelope) -> Receipt | Refusal:
        submission, session = envelope.submission, self.opening.session
        digest = digest_of(submission)
        if envelope.named:
            earlier = await self.opening.store.receipt(
                session.checkpoint.session_id, submission.id
            )
            if earlier is not None and earlier.digest == digest:
                return earlier
            if earlier is not None:
                conflict = f"submission id {submission.id!r} was used for another op"
                return await self._refuse(
                    submission, Refusal(code="id_conflict", message=conflict)
                )
        acceptance = _Acceptance(self, submission, digest, envelope.expect)
        try:
            acceptance.target = await self._target(submission)
        except UnknownError as exc:
            return await self._refuse(
                submission, Refusal(code="unknown_session", message=str(exc))
            )
        events = await session.transact(acceptance.parts, cause=submission.id)
        if isinstance(events, Refusal):
            return await self._refuse(submission, events)
        accepted = next(event for event in events if isinstance(event.msg, SubmissionAccepted))
        receipt = Receipt(
            submission_id=submission.id,
            status="accepted",
            sequence=accepted.sequence,
            digest=digest,
        )
        if acceptance.turn is not None and self.runner.over:
            # The runner was cancelled while this turn's beginning was being written.
            await acceptance.turn.abandon()
        self._act(submission, acceptance)
        return receipt

    async def _refuse(self, submission: Submission, refusal: Refusal) -> Refusal:
        rejected = SubmissionRejected(code=refusal.code, message=refusal.message)
        await self.opening.session.commit(told(rejected), cause=submission.id)
        return refusal

    async def _target(self, submission: Submission) -> SessionSummary | None:
        if not isinstance(submission.op, ResumeSession):
            return None
        summary = await self.opening.store.session_summary(submission.op.session_id)
        if summary is None:
            raise UnknownError(f"no session is called {submission.op.session_id!r}")
        return summary

    def _act(self, submission: Submission, acceptance: _Acceptance) -> None:
        """Do what an accepted op asks for, beyond what its commit changed."""
        op = submission.op
        match op:
            case UserInput():
                if acceptance.turn is not None:
                    self.runner.begin_directly(acceptance.turn)
                self.runner.wake()
            case EditQueued():
                if (followed := self.opening.followed.pop(op.submission_id, None)) is not None:
                    followed.submission_id = submission.id
                    self.opening.followed[submission.id] = followed
                self.runner.unsettle(op.submission_id)
            case CancelQueued():
                if (followed := self.opening.followed.get(op.submission_id)) is not None:
                    followed.withdrawn = True
                self.runner.unsettle(op.submission_id)
            case Interrupt():
                self.runner.interrupt(op.turn_id, submission.id, INTERRUPTED)
            case ExecApproval():
                turn = self.runner.turn
                if turn is not None:
                    turn.wake()
                    if isinstance(op.decision, Abort):
                        self.runner.interrupt(turn.turn_id, submission.id, ABORTED)
            case CapabilityCommand():
                name = f"command {op.capability} {op.command}"
                self.opening.start_aside(self._command, op, submission.id, name=name)
            case SetModel() | ResumeSession():
                pass
            case _:
                assert_never(op)

    async def _command(self, op: CapabilityCommand, cause: str) -> None:
        """Run a command; its failure is told, and costs the session nothing."""
        opening, session = self.opening, self.opening.session
        effects = Effects()
        try:
            turn_id = session.checkpoint.turn_id or ""
            states = session.checkpoint.states
            await opening.stack.command(opening.runtime, turn_id, effects, states, op)
        except Exception as exc:
            logger.warning("command %s of %r failed", op.command, op.capability, exc_info=exc)
            warning = Warning(code="command_failed", message=describe(exc))
            effects.events.append(warning)
        effects.items.clear()
        if effects:
            await session.commit(*parts_of(effects, cause), cause=cause)


class _Acceptance:
    """Works out, inside the session's lock, what accepting a submission commits."""

    def __init__(
        self,
        intake: Intake,
        submission: Submission,
        digest: str,
        expect: str | None,
    ) -> None:
        self.intake = intake
        self.submission = submission
        self.digest = digest
        self.expect = expect
        self.target: SessionSummary | None = None
        self.turn: Turn | None = None

    def parts(self, checkpoint: Checkpoint) -> Sequence[Part] | Refusal:
        op = self.submission.op
        self.turn = None
        refusal = check_expectation(checkpoint, self.expect) or check_op(checkpoint, op)
        if refusal is not None:
            return refusal
        accepted = told(SubmissionAccepted(digest=self.digest))
        match op:
            case UserInput():
                return self._message(checkpoint, op)
            case EditQueued():
                edited = QueueEdited(
                    submission_id=op.submission_id, text=op.text, new_id=self.submission.id
                )
                return [accepted, edited]
            case CancelQueued():
                return [accepted, QueueCancelled(submission_id=op.submission_id)]
            case Interrupt():
                return [accepted, TurnInterrupted(reason=INTERRUPTED)]
            case ExecApproval():
                call = find_approval(checkpoint, op.id)
                assert call is not None
                parts = decision_parts(self.intake.opening, call, op.decision)
                return [accepted, *parts]
            case SetModel():
                return self._set_model(op)
            case ResumeSession():
                assert self.target is not None
                requested = SessionResumeRequested(
                    session_id=op.session_id, context=self.target.session_context
                )
                return [accepted, told(requested)]
            case CapabilityCommand():
                return self._command(checkpoint, op)
            case _:
                assert_never(op)

    def _set_model(self, op: SetModel) -> Sequence[Part] | Refusal:
        try:
            changed = self.intake.opening.model_changed(op.route)
        except UnknownError as exc:
            return Refusal(code="unknown_route", message=str(exc))
        return [told(SubmissionAccepted(digest=self.digest)), RouteChanged(model=changed)]

    def _command(
        self, checkpoint: Checkpoint, op: CapabilityCommand
    ) -> Sequence[Part] | Refusal:
        try:
            needs_idle = self.intake.opening.stack.command_requires_idle(op)
        except UnknownError as exc:
            return Refusal(code="unknown_command", message=str(exc))
        if needs_idle and not is_idle(checkpoint):
            message = f"command {op.command!r} needs an idle session"
            return Refusal(code="busy", message=message)
        return [told(SubmissionAccepted(digest=self.digest))]

    def _message(self, checkpoint: Checkpoint, op: UserInput) -> Sequence[Part] | Refusal:
        opening, runner = self.intake.opening, self.intake.runner
        handler = opening.stack.handler_name
        own = [message for message in checkpoint.queue if message.owner == handler]
        arrived = RouteContext(
            submission_id=self.submission.id,
            op=op,
            active_turn_id=checkpoint.turn_id,
            queue=own,
        )
        try:
            routing = opening.stack.route_message(arrived)
        except Exception as exc:
            logger.exception("middleware %r failed to route a message", handler)
            return Refusal(code="denied_by_hook", message=describe(exc))
        if isinstance(routing, Refuse):
            return Refusal(code=routing.code, message=routing.message)
        if len(checkpoint.queue) >= MAX_QUEUED_MESSAGES:
            full = f"{MAX_QUEUED_MESSAGES} messages wait already"
            return Refusal(code="queue_full", message=full)
        steer = routing.boundary == "steer"
        message = QueuedMessage(
            owner=handler,
            id=self.submission.id,
            boundary=routing.boundary,
            text=op.text,
            turn_id=checkpoint.turn_id if steer else None,
            attachments=op.attachments,
        )
        accepted = told(SubmissionAccepted(delivery=routing.boundary, digest=self.digest))
        if is_idle(checkpoint) and runner.may_begin_directly():
            self.turn = Turn(opening, opening.new_id(), self.submission.id)
            began = began_by(opening, self.turn, message, Effects(), refused=False)
            after = applied(checkpoint, began)
            return [accepted, *began, *opening_parts(self.turn, after)]
        return [accepted, MessageQueued(message=message)]
