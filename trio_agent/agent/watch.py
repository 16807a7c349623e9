"""`Agent.run`: following one message to the end of its turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Self

import attrs

from trio_agent.agent.inbox import AgentSender
from trio_agent.agent.opening import Followed, Opening
from trio_agent.agent.readers import Reader
from trio_agent.errors import AgentError, BusyError, ConfigError, StoppedError, TurnError
from trio_agent.protocol.events import (
    AgentMessage,
    Event,
    ExecApprovalRequest,
    FinishReason,
    QueueChanged,
    TokenCount,
    TurnAborted,
    TurnComplete,
    TurnOutcome,
    TurnStarted,
)
from trio_agent.protocol.ops import CancelQueued, Interrupt, Op
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Record

OnEvent = Callable[[Event], Awaitable[None] | None]


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


class Watch:
    """Follows one message; ``attended`` says whether anybody could answer an approval."""

    def __init__(
        self,
        opening: Opening,
        sender: AgentSender,
        submission_id: str,
        attended: bool,
    ) -> None:
        self.opening = opening
        self.sender = sender
        self.message = Followed(submission_id)
        self.attended = attended
        self.turn_id: str | None = None
        self.result: TurnResult | None = None
        self._accepted = False
        self._text = ""
        self._usage = TokenUsage()

    def __enter__(self) -> Self:
        """Have what happens to the message remembered from now on."""
        self.opening.followed[self.message.submission_id] = self.message
        return self

    def __exit__(self, *_: object) -> None:
        """Stop that; take a message back, or interrupt its turn, if its end was not seen."""
        del self.opening.followed[self.message.submission_id]
        if self.result is None and self._accepted and not self.message.withdrawn:
            self._give_up()

    async def run(self, events: Reader, on_event: OnEvent | None) -> TurnResult:
        """Read *events*, which begin with its acceptance, until the turn has ended."""
        self._accepted = True
        async for event in events:
            self._take(event)
            if on_event is not None:
                called = on_event(event)
                if isawaitable(called):
                    await called
            if self.result is not None:
                return self.result
            if isinstance(event.msg, ExecApprovalRequest):
                self._check_attended(event.msg)
            if isinstance(event.msg, QueueChanged) and self.message.withdrawn:
                raise TurnError("the message was taken back before its turn")
        raise StoppedError("the session ended before the turn")

    def _take(self, event: Event) -> None:
        msg = event.msg
        if isinstance(msg, TurnStarted) and event.submission_id == self.message.submission_id:
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
        if msg.outcome != "failed":
            return result
        failure = self.message.failure
        if isinstance(failure, AgentError):
            error = failure
        else:
            error = TurnError(msg.reason)
            error.__cause__ = failure
        limit = error.kind == "step_limit"
        return attrs.evolve(
            result, error=error, finish_reason="step_limit" if limit else "error"
        )

    def _check_attended(self, msg: ExecApprovalRequest) -> None:
        if msg.turn_id == self.turn_id and not self.attended:
            raise ConfigError(
                f"tool {msg.name!r} waits for an approval and nobody is there to give it: set"
                " AgentConfig(on_approval=...), read agent.events, or choose another policy"
            )

    def _give_up(self) -> None:
        """Take the message back, or interrupt its turn. Not a checkpoint."""
        op: Op = (
            CancelQueued(self.message.submission_id)
            if self.turn_id is None
            else Interrupt(self.turn_id)
        )
        try:
            self.sender.submit_nowait(op)
        except (BusyError, StoppedError):
            pass  # it ends with the session, or somebody else is at it
