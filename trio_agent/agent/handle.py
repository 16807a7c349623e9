"""`Agent`: a running session as its user holds it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable

import attrs
import trio

from trio_agent.agent.inbox import AgentSender, over
from trio_agent.agent.intake import Intake
from trio_agent.agent.opening import Opening
from trio_agent.agent.readers import Reader, check_position
from trio_agent.errors import AgentError, BusyError, ConfigError, StoppedError, TurnError
from trio_agent.model.router import ModelChoice
from trio_agent.protocol.events import (
    AgentMessage,
    Event,
    ExecApprovalRequest,
    FinishReason,
    QueueChanged,
    QueuedEntry,
    SessionConfigured,
    TokenCount,
    TurnAborted,
    TurnComplete,
    TurnOutcome,
    TurnStarted,
)
from trio_agent.protocol.frontend import Contribution
from trio_agent.protocol.items import Attachment
from trio_agent.protocol.ops import CancelQueued, Interrupt, Op, UserInput
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Record
from trio_agent.state.intake import is_idle
from trio_agent.state.machine import Phase, phase_of
from trio_agent.state.narration import approval_request
from trio_agent.store.base import CheckpointStore, Receipt

OnEvent = Callable[[Event], Awaitable[None] | None]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Snapshot(Record):
    """Where a session stands: what a frontend needs when it starts."""

    phase: Phase
    turn_id: str | None
    step_index: int | None
    queued: tuple[QueuedEntry, ...]
    approvals: tuple[ExecApprovalRequest, ...]
    model_route: str | None
    total_usage: TokenUsage
    last_event_sequence: int


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TurnResult(Record):
    """How a turn ended. ``text`` is its final answer, as far as there is one.

    ``error`` is set if the turn failed; its ``__cause__`` is what a tool, hook or
    model raised.
    """

    turn_id: str
    outcome: TurnOutcome
    finish_reason: FinishReason
    text: str = ""
    usage: TokenUsage = TokenUsage()
    error: AgentError | None = None
    reason: str = ""

    def raise_for_failure(self) -> TurnResult:
        """Return itself if the turn completed.

        Raises:
            AgentError: `error` if the turn failed; a `TurnError` if it was aborted.
        """
        if self.error is not None:
            raise self.error
        if self.outcome != "completed":
            raise TurnError(f"the turn was {self.outcome}: {self.reason}")
        return self


@attrs.define(eq=False, repr=False)
class Agent:
    """A running session. Obtain one from `create_agent`; any task may use it."""

    _opening: Opening
    _intake: Intake
    _store: CheckpointStore
    session: SessionConfigured
    sender: AgentSender
    events: Reader
    frontend: tuple[Contribution, ...]
    _closed: bool = attrs.field(default=False, init=False)

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.session.session_id

    @property
    def model_route(self) -> str:
        """The route that the next turn asks."""
        return self._opening.session.checkpoint.model_route or self.session.model.route

    @property
    def model_choices(self) -> tuple[ModelChoice, ...]:
        """All routes, in the order of their registration."""
        return self._opening.router.choices()

    @property
    def tool_count(self) -> int:
        """How many tools the model is offered."""
        return len(self._opening.definitions)

    async def submit(
        self,
        op: Op,
        *,
        id: str | None = None,  # noqa: A002  # the API's word
        expect: str | None = None,
    ) -> Receipt:
        """See `AgentSender.submit`."""
        return await self.sender.submit(op, id=id, expect=expect)

    def submit_nowait(self, op: Op, *, id: str | None = None) -> str:  # noqa: A002
        """See `AgentSender.submit_nowait`."""
        return self.sender.submit_nowait(op, id=id)

    async def next_event(self) -> Event | None:
        """Return the next event of `events`, or None at the end of the session."""
        return await self.events.next_event()

    def subscribe(self, *, after: int) -> Reader:
        """Return another reader of every event numbered above *after*. Not a checkpoint.

        Raises:
            ConfigError: If *after* is negative, in the future or no whole number.
        """
        tail = self._opening.session.tail
        check_position(after, tail.last)
        return Reader(tail, self._store, self.session_id, after)

    def snapshot(self) -> Snapshot:
        """Return where the session stands. Not a checkpoint."""
        checkpoint = self._opening.session.checkpoint
        active = checkpoint.active_execution
        return Snapshot(
            phase=phase_of(checkpoint),
            turn_id=checkpoint.turn_id,
            step_index=None if active is None else active.next_model_step,
            queued=tuple(
                QueuedEntry(submission_id=one.id, delivery=one.boundary, text=one.text)
                for one in checkpoint.queue
            ),
            approvals=tuple(
                approval_request(checkpoint, call)
                for call in checkpoint.pending_tools
                if call.waiting
            ),
            model_route=checkpoint.model_route,
            total_usage=checkpoint.total_usage,
            last_event_sequence=self._opening.session.tail.last,
        )

    async def wait_idle(self) -> None:
        """Wait until no turn is active and none is about to start; a checkpoint.

        Raises:
            SessionBrokenError: If the session failed. StoppedError: If it ended first.
        """
        await trio.lowlevel.checkpoint()
        session = self._opening.session
        while True:
            if session.broken is not None:
                raise over(session.broken)
            if is_idle(session.checkpoint) and self._intake.runner.turn is None:
                return
            if session.tail.over:
                raise over(None)
            await session.tail.wait()

    async def run(
        self,
        text: str,
        *,
        attachments: tuple[Attachment, ...] = (),
        on_event: OnEvent | None = None,
    ) -> TurnResult:
        """Submit one message and wait for the end of its turn.

        A checkpoint. If it is cancelled, the message is taken back, or its turn
        interrupted; the session goes on.

        Args:
            text: The message; it waits its turn if another one runs.
            attachments: Files that come with it.
            on_event: Called, and awaited if it can be, with every event of the
                session from the acceptance of the message on.

        Raises:
            SubmissionRejectedError: If the message was refused.
            TurnError: If somebody took it back before its turn.
            ConfigError: If the turn waits for an approval and nobody is there to
                give it: no ``on_approval``, no *on_event*, no reader. The turn is
                interrupted.
            StoppedError: If the session ended first.
        """
        op = UserInput(text=text, attachments=attachments, delivery="queue")
        receipt = await self.submit(op)
        watch = _Watch(self, receipt)
        try:
            return await watch.run(on_event)
        finally:
            if watch.result is None:
                watch.give_up()

    def close(self) -> None:
        """Take no more submissions and end: a running turn is interrupted. Not a checkpoint.

        Leaving the block of `create_agent` waits for the last commit.
        """
        self._intake.inbox.close()
        self._closed = True
        self._opening.session.tail.ring()

    async def wait_closed(self) -> None:
        """Wait until `close` was called or the session is over."""
        await trio.lowlevel.checkpoint()
        tail = self._opening.session.tail
        while not self._closed and not tail.over:
            await tail.wait()


@attrs.define(eq=False, repr=False)
class _Watch:
    """Follows one message of `Agent.run` to the end of its turn."""

    agent: Agent
    receipt: Receipt
    submission_id: str = attrs.field(init=False)
    turn_id: str | None = attrs.field(default=None, init=False)
    result: TurnResult | None = attrs.field(default=None, init=False)
    _text: str = attrs.field(default="", init=False)
    _usage: TokenUsage = attrs.field(default=TokenUsage(), init=False)

    def __attrs_post_init__(self) -> None:
        self.submission_id = self.receipt.submission_id

    async def run(self, on_event: OnEvent | None) -> TurnResult:
        agent = self.agent
        async for event in agent.subscribe(after=self.receipt.sequence - 1):
            self._take(event)
            if on_event is not None:
                called = on_event(event)
                if isawaitable(called):
                    await called
            if self.result is not None:
                return self.result
            if isinstance(event.msg, ExecApprovalRequest):
                self._check_attended(event.msg, on_event)
            if isinstance(event.msg, QueueChanged) and self.turn_id is None:
                self._follow()
        raise StoppedError("the session ended before the turn")

    def _take(self, event: Event) -> None:
        msg = event.msg
        if isinstance(msg, TurnStarted) and event.submission_id == self.submission_id:
            self.turn_id = msg.turn_id
        if self.turn_id is None:
            return
        if isinstance(msg, AgentMessage) and msg.turn_id == self.turn_id:
            final = [part.text for part in msg.content if part.phase == "final_answer"]
            self._text = "".join(final) or self._text
        elif isinstance(msg, TokenCount) and msg.turn is not None:
            self._usage = msg.turn
        elif isinstance(msg, TurnComplete) and msg.turn_id == self.turn_id:
            self.result = self._ended("completed", msg.finish_reason)
        elif isinstance(msg, TurnAborted) and msg.turn_id == self.turn_id:
            self.result = self._aborted(msg)

    def _ended(self, outcome: TurnOutcome, reason: FinishReason) -> TurnResult:
        assert self.turn_id is not None
        return TurnResult(
            turn_id=self.turn_id,
            outcome=outcome,
            finish_reason=reason,
            text=self._text,
            usage=self._usage,
        )

    def _aborted(self, msg: TurnAborted) -> TurnResult:
        result = self._ended(
            msg.outcome, "interrupted" if msg.outcome == "aborted" else "error"
        )
        result = attrs.evolve(result, reason=msg.reason)
        failure = self.agent._intake.runner.failures.pop(msg.turn_id, None)  # noqa: SLF001
        if msg.outcome != "failed":
            return result
        if isinstance(failure, AgentError):
            error = failure
        else:
            error = TurnError(msg.reason)
            error.__cause__ = failure
        limit = error.kind == "step_limit"
        return attrs.evolve(
            result, error=error, finish_reason="step_limit" if limit else "error"
        )

    def _follow(self) -> None:
        """Take the new id of a message that was edited; say so if it was taken back."""
        intake = self.agent._intake  # noqa: SLF001
        while self.submission_id in intake.renamed:
            self.submission_id = intake.renamed.pop(self.submission_id)
        if self.submission_id in intake.withdrawn:
            intake.withdrawn.discard(self.submission_id)
            raise TurnError("the message was taken back before its turn")

    def _check_attended(self, msg: ExecApprovalRequest, on_event: OnEvent | None) -> None:
        agent = self.agent
        attended = (
            on_event is not None
            or agent._opening.config.on_approval is not None  # noqa: SLF001
            or agent.events.started
        )
        if msg.turn_id == self.turn_id and not attended:
            raise ConfigError(
                f"tool {msg.name!r} waits for an approval and nobody is there to give it: set"
                " AgentConfig(on_approval=...), read agent.events, or choose another policy"
            )

    def give_up(self) -> None:
        """Take the message back, or interrupt its turn. Not a checkpoint."""
        op: Op = (
            CancelQueued(self.submission_id)
            if self.turn_id is None
            else Interrupt(self.turn_id)
        )
        try:
            self.agent.submit_nowait(op)
        except (BusyError, StoppedError):
            pass  # it ends with the session, or somebody else is at it
