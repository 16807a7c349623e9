"""`Agent`: a running session as its user holds it."""

from __future__ import annotations

import attrs
import trio

from trio_agent.agent.inbox import AgentSender, Envelope, over
from trio_agent.agent.intake import Intake
from trio_agent.agent.opening import Opening
from trio_agent.agent.readers import Reader, check_position
from trio_agent.agent.watch import OnEvent, TurnResult, Watch
from trio_agent.model.router import ModelChoice
from trio_agent.protocol.events import (
    Event,
    ExecApprovalRequest,
    QueuedEntry,
    SessionConfigured,
)
from trio_agent.protocol.frontend import Contribution
from trio_agent.protocol.items import Attachment
from trio_agent.protocol.ops import Op, Submission, UserInput, validate_submission
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Record
from trio_agent.state.intake import is_idle
from trio_agent.state.machine import Phase, phase_of
from trio_agent.state.narration import approval_request, queue_entries
from trio_agent.store.base import Receipt


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


class Agent:
    """A running session. Obtain one from `create_agent`; any task may use it."""

    def __init__(
        self,
        opening: Opening,
        intake: Intake,
        session: SessionConfigured,
        events: Reader,
    ) -> None:
        self._opening = opening
        self._intake = intake
        self.session = session
        self.sender: AgentSender = opening.sender
        self.events = events
        self.frontend: tuple[Contribution, ...] = opening.stack.contributions()
        self._closed = False

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.session.session_id

    @property
    def model_route(self) -> str:
        """The route that the next turn asks."""
        checkpoint = self._opening.session.checkpoint
        return checkpoint.model_route or self._opening.router.default_route

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
        return Reader(tail, self._opening.store, self.session_id, after)

    def snapshot(self) -> Snapshot:
        """Return where the session stands. Not a checkpoint."""
        checkpoint = self._opening.session.checkpoint
        active = checkpoint.active_execution
        return Snapshot(
            phase=phase_of(checkpoint),
            turn_id=checkpoint.turn_id,
            step_index=None if active is None else active.next_model_step,
            queued=queue_entries(checkpoint),
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
        submission = Submission(self._opening.new_id(), op)
        validate_submission(submission)
        attended = (
            on_event is not None
            or self._opening.config.on_approval is not None
            or self.events.started
        )
        with Watch(self._opening, self.sender, submission.id, attended) as watch:
            receipt = await self.sender.send(Envelope(submission))
            return await watch.run(self.subscribe(after=receipt.sequence - 1), on_event)

    def close(self) -> None:
        """Take no more submissions and end: a running turn is interrupted. Not a checkpoint.

        Leaving the block of `create_agent` waits for the last commit.
        """
        self._opening.inbox.close()
        self._closed = True
        self._opening.session.tail.ring()

    async def wait_closed(self) -> None:
        """Wait until `close` was called or the session is over."""
        await trio.lowlevel.checkpoint()
        tail = self._opening.session.tail
        while not self._closed and not tail.over:
            await tail.wait()
