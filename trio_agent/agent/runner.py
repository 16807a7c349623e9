"""The loop: one turn at a time, the oldest message first."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from trio_agent.agent.ending import run_turn_end
from trio_agent.agent.opening import Opening, describe, error_event, logger, parts_of
from trio_agent.agent.preparation import opening_parts
from trio_agent.agent.session import Part, applied, told
from trio_agent.agent.turn import Turn
from trio_agent.middleware.contexts import Effects
from trio_agent.protocol.events import (
    TurnOutcome,
)
from trio_agent.protocol.items import UserItem
from trio_agent.state.changes import TurnBegan, TurnEnded
from trio_agent.state.checkpoint import Checkpoint, QueuedMessage
from trio_agent.state.narration import approval_request

FRONTEND_GONE = "the frontend is gone"


class Runner:
    """Runs turns. Intake may begin one directly while this waits; see `begin_directly`."""

    def __init__(self, opening: Opening) -> None:
        self.opening = opening
        self.turn: Turn | None = None
        self.over = False
        self._preparing: tuple[str, trio.CancelScope] | None = None
        self._waiting = False
        self._ended = False
        self._woken = trio.Event()

    # --- from other tasks; none of these is a checkpoint

    def wake(self) -> None:
        """Say that the queue changed."""
        self._woken.set()

    def end(self) -> None:
        """Run no further turn, and abort the one that runs."""
        self._ended = True
        if self.turn is not None:
            self.interrupt(self.turn.turn_id, None, FRONTEND_GONE)
        if self._preparing is not None:
            self._preparing[1].cancel(reason=FRONTEND_GONE)
        self.wake()

    def interrupt(self, turn_id: str, cause: str | None, reason: str) -> None:
        """Abort the turn of that id, if it still runs."""
        if self.turn is not None and self.turn.turn_id == turn_id:
            self.turn.interrupt(reason, cause=cause)

    def unsettle(self, submission_id: str) -> None:
        """Say that a queued message was edited or taken back: hooks may be at work on it."""
        if self._preparing is not None and self._preparing[0] == submission_id:
            self._preparing[1].cancel(reason="the message was changed")
        self.wake()

    def may_begin_directly(self) -> bool:
        """Whether a message that arrives now can begin its turn in its accepting commit."""
        hooked = self.opening.stack.has("message_submit")
        return self._waiting and not self._ended and not hooked

    def begin_directly(self, turn: Turn) -> None:
        """Run *turn*, whose beginning has just been committed."""
        self.turn = turn
        self.wake()

    # --- the loop

    async def run(self) -> None:
        """Go on with the turn that a restart found, then run turns until the end."""
        try:
            await self._run()
        finally:
            self.over = True
            # Intake may have begun a turn just before this task was cancelled.
            if self.turn is not None:
                await self.turn.abandon()  # noqa: ASYNC102  # shields itself, bounded

    async def _run(self) -> None:
        await self._resume()
        while True:
            await self._wait()
            if self.turn is None:
                if self._ended:
                    return
                await self._begin_next()
            turn = self.turn
            if turn is None:
                continue
            if self._ended:
                turn.interrupt(FRONTEND_GONE)
            try:
                await turn.run()
            finally:
                self.turn = None
                self._remember(turn, turn.failure)
                self.opening.session.tail.ring()

    async def _resume(self) -> None:
        session = self.opening.session
        active = session.checkpoint.active_execution
        if active is None:
            return
        self.turn = Turn(self.opening, active.turn_id, active.submission_id)
        waiting = [call for call in session.checkpoint.pending_tools if call.waiting]
        if waiting:
            requests = [told(approval_request(session.checkpoint, call)) for call in waiting]
            await session.commit(*requests, cause=active.submission_id)

    async def _wait(self) -> None:
        """Wait until there is something to do; always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while self.turn is None and not self._ended and self._first() is None:
            self._woken = trio.Event()
            self._waiting = True
            try:
                await self._woken.wait()
            finally:
                self._waiting = False

    def _first(self) -> QueuedMessage | None:
        """Return the message whose turn is next."""
        queue = self.opening.session.checkpoint.queue
        return next((message for message in queue if message.boundary != "steer"), None)

    async def _begin_next(self) -> None:
        """Begin the turn of the oldest message, unless it changes or a hook refuses it."""
        message = self._first()
        if message is None:
            return
        turn = Turn(self.opening, self.opening.new_id(), message.id)
        effects, rejection = Effects(), None
        failure: Exception | None = None
        if self.opening.stack.has("message_submit"):
            scope = trio.CancelScope()
            self._preparing = (message.id, scope)
            try:
                with scope:
                    rejection = await self.opening.stack.message_submit(
                        self.opening.runtime,
                        turn.turn_id,
                        effects,
                        self.opening.session.checkpoint.states,
                        submission_id=message.id,
                        text=message.text,
                        delivery=message.boundary,
                    )
            except Exception as exc:
                logger.warning("a message_submit hook failed", exc_info=exc)
                failure = exc
            finally:
                self._preparing = None
            if scope.cancelled_caught:
                return
        refused = rejection is not None or failure is not None

        def begin(checkpoint: Checkpoint) -> Sequence[Part]:
            if message not in checkpoint.queue or checkpoint.active_execution is not None:
                return []  # edited or taken back meanwhile
            began = began_by(self.opening, turn, message, effects, refused=refused)
            if not refused:
                after = applied(checkpoint, began)
                return [*began, *opening_parts(turn, after)]
            return [*began, *self._refused(rejection, failure, message.id)]

        self._remember(turn, failure)
        if refused and self.opening.stack.has("turn_end"):
            outcome: TurnOutcome = "aborted" if failure is None else "failed"
            await run_turn_end(self.opening, turn.turn_id, outcome, effects)
        if await self.opening.session.transact(begin, cause=message.id) and not refused:
            self.turn = turn

    def _remember(self, turn: Turn, failure: Exception | None) -> None:
        """Keep why a turn failed for whoever waits for it here; the journal has the text."""
        if (followed := self.opening.followed.get(turn.submission_id)) is not None:
            followed.failure = failure

    def _refused(
        self, rejection: str | None, failure: Exception | None, cause: str
    ) -> list[Part]:
        """Return the end of a turn whose message a hook refused, or failed on."""
        end = TurnEnded(
            outcome="aborted" if failure is None else "failed",
            finish_reason="hook" if failure is None else "error",
            finished_at_ms=self.opening.now_ms(),
            reason=rejection or ("" if failure is None else describe(failure)),
        )
        return [end] if failure is None else [told(error_event(failure), cause), end]


def began_by(
    opening: Opening, turn: Turn, message: QueuedMessage, effects: Effects, *, refused: bool
) -> list[Part]:
    """Return the beginning of the turn of *message*; nothing of a refused one is kept."""
    hidden = tuple(item for item in effects.items if isinstance(item, UserItem))
    began = TurnBegan(
        submission_id=message.id,
        turn_id=turn.turn_id,
        started_at_ms=opening.now_ms(),
        text=None if refused else message.text,
        attachments=() if refused else message.attachments,
        hidden=() if refused else hidden,
        delivery="queue" if message.boundary == "queue" else "turn",
        context_window=opening.window(opening.route_of(opening.session.checkpoint)),
    )
    rest = attrs.evolve(effects, items=[], rewrite=None)
    return [began, *parts_of(rest, message.id)]
