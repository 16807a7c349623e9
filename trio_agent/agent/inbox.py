"""The way into a session: senders, envelopes, and the receipt that comes back."""

from __future__ import annotations

import weakref
from typing import Self

import outcome
import trio

from trio_agent.ambient import Ambient
from trio_agent.errors import BusyError, SessionBrokenError, StoppedError
from trio_agent.protocol.limits import INBOX_CAPACITY
from trio_agent.protocol.ops import Op, Submission, validate_submission
from trio_agent.state.intake import Expectation
from trio_agent.store.base import Receipt


class Envelope:
    """A submission on its way, and the task that waits for its receipt."""

    def __init__(
        self,
        submission: Submission,
        expect: Expectation = None,
        named: bool = False,
    ) -> None:
        self.submission = submission
        self.expect = expect
        self.named = named
        self.taken = False
        self.withdrawn = False
        self._answer: outcome.Outcome[Receipt] | None = None
        self._task: trio.lowlevel.Task | None = None

    def take(self) -> bool:
        """Take it up; false if its sender was cancelled before. Not a checkpoint."""
        self.taken = not self.withdrawn
        return self.taken

    def answer(self, answer: outcome.Outcome[Receipt]) -> None:
        """Decide it, once, and wake its sender. Not a checkpoint."""
        if self._answer is None:
            self._answer = answer
            if self._task is not None:
                trio.lowlevel.reschedule(self._task, answer)
                self._task = None

    async def receipt(self) -> Receipt:
        """Wait for the decision.

        `Cancelled` means that it was not taken up and never will be; once it is
        taken up, this waits for the decision, cancelled or not.
        """
        if self._answer is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return self._answer.unwrap()
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            if self.taken:
                return trio.lowlevel.Abort.FAILED
            self.withdrawn = True
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        try:
            receipt: Receipt = await trio.lowlevel.wait_task_rescheduled(abort)
        except StoppedError as exc:
            stopped = exc
        else:
            return receipt
        # The session was cancelled, perhaps with this task: then that is what it sees.
        await trio.lowlevel.checkpoint_if_cancelled()
        raise stopped


class Inbox:
    """The queue between senders and intake, bounded in memory."""

    def __init__(self) -> None:
        self.send, self.receive = trio.open_memory_channel[Envelope](INBOX_CAPACITY)
        self._senders: weakref.WeakSet[trio.MemorySendChannel[Envelope]] = weakref.WeakSet()
        self._senders.add(self.send)

    def clone(
        self, channel: trio.MemorySendChannel[Envelope]
    ) -> trio.MemorySendChannel[Envelope]:
        """Return another sending end, which `close` closes with the rest."""
        other = channel.clone()
        self._senders.add(other)
        return other

    def close(self) -> None:
        """Close every sending end: what is queued is still taken in. Not a checkpoint."""
        for channel in list(self._senders):
            channel.close()

    def refuse_rest(self, reason: BaseException | None) -> None:
        """Answer everything that is still queued: the session is over. Not a checkpoint."""
        self.close()
        while True:
            try:
                envelope = self.receive.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                break
            if envelope.take():
                envelope.answer(outcome.Error(over(reason)))
        self.receive.close()


def over(reason: BaseException | None) -> StoppedError:
    """Return the error for an op that comes too late."""
    if reason is None:
        return StoppedError("the session is over")
    error = SessionBrokenError(f"the session failed: {reason}")
    error.__cause__ = reason
    return error


class AgentSender:
    """One way into a session. The session ends when the last of them is closed.

    Use `clone` to give other tasks their own, each in a ``with`` block.
    """

    def __init__(
        self,
        inbox: Inbox,
        channel: trio.MemorySendChannel[Envelope],
        ambient: Ambient,
    ) -> None:
        self._inbox = inbox
        self._channel = channel
        self._ambient = ambient

    async def submit(
        self,
        op: Op,
        *,
        id: str | None = None,  # noqa: A002  # the API's word
        expect: str | None = None,
    ) -> Receipt:
        """Submit *op* and return once the decision about it is durable.

        A checkpoint; any task may call it. `Cancelled` means that the op was not
        accepted and never will be: once the session has taken it up, this waits for
        the decision, cancelled or not.

        Args:
            op: What to do.
            id: Its idempotency key: the same id again, before or after a restart,
                returns the first receipt as ``"duplicate"`` and does nothing.
            expect: ``"idle"``, or the id of the turn that must be running; checked in
                the transaction that accepts the op.

        Raises:
            SubmissionRejectedError: If it was refused; nothing changed.
            StoppedError: If the session is over. SessionBrokenError: If it failed:
                whether the op was accepted is told by submitting its id again.
        """
        return await self.send(self._envelope(op, id, expect))

    async def send(self, envelope: Envelope) -> Receipt:
        """Send one envelope and wait for its receipt. See `submit`."""
        try:
            await self._channel.send(envelope)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise StoppedError("the session is over") from None
        return await envelope.receipt()

    def submit_nowait(self, op: Op, *, id: str | None = None) -> str:  # noqa: A002
        """Queue *op* in memory and return its id; nothing is promised yet.

        Whether it is accepted is told by a `SubmissionAccepted` or
        `SubmissionRejected` of that id. Not a checkpoint.

        Raises:
            SubmissionRejectedError: If it can never be accepted: too large, malformed.
            BusyError: If 64 ops wait already. StoppedError: If the session is over.
        """
        envelope = self._envelope(op, id, None)
        try:
            self._channel.send_nowait(envelope)
        except trio.WouldBlock:
            raise BusyError(
                f"{INBOX_CAPACITY} ops wait already: let the session take them in first"
            ) from None
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise StoppedError("the session is over") from None
        return envelope.submission.id

    def _envelope(self, op: Op, named: str | None, expect: Expectation) -> Envelope:
        submission = Submission(self._ambient.new_id() if named is None else named, op)
        validate_submission(submission)
        return Envelope(submission, expect, named is not None)

    def clone(self) -> AgentSender:
        """Return another sender for the same session.

        Raises:
            StoppedError: If this one is closed.
        """
        try:
            channel = self._inbox.clone(self._channel)
        except trio.ClosedResourceError:
            raise StoppedError("this sender is closed") from None
        return AgentSender(self._inbox, channel, self._ambient)

    def close(self) -> None:
        """Close this sender, not its clones. Not a checkpoint."""
        self._channel.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class WeakSender:
    """A sender that keeps no session open: what middlewares get."""

    def __init__(self, sender: AgentSender) -> None:
        self._sender = weakref.ref(sender)

    def submit_nowait(self, op: Op, *, id: str | None = None) -> str:  # noqa: A002
        """See `AgentSender.submit_nowait`."""
        sender = self._sender()
        if sender is None:
            raise StoppedError("the session is over")
        return sender.submit_nowait(op, id=id)
