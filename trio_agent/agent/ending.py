"""How turns end: the record of it, and the hooks that hear of it."""

from __future__ import annotations

import trio

from trio_agent.agent.opening import Opening, describe, logger
from trio_agent.errors import StepLimitError
from trio_agent.middleware.contexts import Effects
from trio_agent.protocol.events import (
    FinishReason,
    TurnOutcome,
    Warning,  # noqa: A004  # the wire's word
)


class Ending:
    """How a turn ends, as far as this process has a say in it."""

    def __init__(
        self,
        outcome: TurnOutcome,
        finish_reason: FinishReason,
        reason: str = "",
        cause: str | None = None,
        failure: Exception | None = None,
    ) -> None:
        self.outcome: TurnOutcome = outcome
        self.finish_reason: FinishReason = finish_reason
        self.reason = reason
        self.cause = cause
        self.failure = failure


def failed(exc: Exception) -> Ending:
    """Return the ending of a turn in which *exc* was raised."""
    reason: FinishReason = "step_limit" if isinstance(exc, StepLimitError) else "error"
    return Ending("failed", reason, describe(exc), failure=exc)


async def run_turn_end(
    opening: Opening, turn_id: str, outcome: TurnOutcome, effects: Effects
) -> None:
    """Run the turn_end hooks of a turn, for as long as the grace lasts.

    A failure of theirs is told and changes nothing.
    """
    checkpoint = opening.session.checkpoint
    try:
        with trio.move_on_after(opening.config.shutdown_grace):
            await opening.stack.turn_end(
                opening.runtime,
                turn_id,
                effects,
                checkpoint.states,
                outcome=outcome,
                queue=checkpoint.queue,
            )
    except Exception as exc:
        logger.exception("a turn_end hook failed")
        effects.events.append(Warning(code="turn_end_failed", message=describe(exc)))
