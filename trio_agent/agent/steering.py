"""Taking in the messages that steer a running turn, at its next model request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from trio_agent.agent.opening import parts_of
from trio_agent.agent.session import Part, told
from trio_agent.middleware.contexts import Effects
from trio_agent.protocol.events import SubmissionRejected
from trio_agent.state.changes import QueueCancelled, SteerJoined
from trio_agent.state.checkpoint import Checkpoint, QueuedMessage

if TYPE_CHECKING:
    from trio_agent.agent.turn import Turn


def steers_of(checkpoint: Checkpoint) -> list[QueuedMessage]:
    """Return the messages that wait to join the running turn, in order."""
    return [waiting for waiting in checkpoint.queue if waiting.boundary == "steer"]


async def take_steers(turn: Turn) -> None:
    """Let every waiting steer join *turn*, or be refused by a hook, one after another.

    A message on which a hook fails is consumed, and fails this turn: it must not fail
    the next one, too.
    """
    session = turn.opening.session
    while steers := steers_of(session.checkpoint):
        message, effects = steers[0], Effects()
        rejection, failure = None, None
        if turn.opening.stack.has("message_submit"):
            turn.activity = "a message_submit hook"
            try:
                rejection = await turn.opening.stack.message_submit(
                    turn.opening.runtime,
                    turn.turn_id,
                    effects,
                    session.checkpoint.states,
                    submission_id=message.id,
                    text=message.text,
                    delivery="steer",
                )
            except Exception as exc:
                failure = exc
        if failure is not None:
            await session.transact(partial(_dropped, message), cause=message.id)
            raise failure
        join = partial(_joined, message, effects, rejection)
        await session.transact(join, cause=message.id)


def _waits(checkpoint: Checkpoint, message: QueuedMessage) -> bool:
    return any(waiting == message for waiting in checkpoint.queue)


def _dropped(message: QueuedMessage, checkpoint: Checkpoint) -> Sequence[Part]:
    if not _waits(checkpoint, message):
        return []
    return [QueueCancelled(submission_id=message.id)]


def _joined(
    message: QueuedMessage, effects: Effects, rejection: str | None, checkpoint: Checkpoint
) -> Sequence[Part]:
    if not _waits(checkpoint, message):
        return []  # edited or taken back while the hooks ran
    if rejection is not None:
        refused = SubmissionRejected(code="denied_by_hook", message=rejection)
        effects.items = []
        parts = parts_of(effects, message.id)
        return [*parts, QueueCancelled(submission_id=message.id), told(refused, message.id)]
    hidden, effects.items = tuple(effects.items), []
    joined = SteerJoined(submission_id=message.id, hidden=hidden)
    return [*parts_of(effects, message.id), joined]
