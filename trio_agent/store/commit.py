"""Group commit: what is waiting when the writer is free goes in one transaction.

Rules:

1.  There is no background task. A task whose turn it is leads: it takes all that
    is waiting, its own job included, and has it written. A lone task leads at once.
2.  Waiting jobs can be cancelled away, and then they did not happen. Taken ones
    cannot: their tasks wait until they are answered.
3.  A leader hands over to the oldest job that came meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

import outcome
import trio

from trio_agent.errors import InternalError
from trio_agent.store.saving import Job

PATIENCE_SECONDS: Final = 1e-3
"""How long a thread may take before a busy loop gives way; most need less."""

SHARE: Final = 0.1
"""The part of the time since then that the loop gives in each pass: the longer a thread
has waited, the more of its statements get through at once."""

LONGEST_NAP_SECONDS: Final = 2e-3


class GroupCommit:
    """Brings the jobs of many tasks to one writer.

    Args:
        write: Writes jobs in one transaction, and leaves an error in those that failed.
    """

    def __init__(self, write: Callable[[Sequence[Job]], Awaitable[None]]) -> None:
        self._write = write
        self._waiting: list[Job] = []
        self._busy = False
        self._crowded = False

    @trio.lowlevel.enable_ki_protection
    async def submit(self, job: Job) -> None:
        """Have *job* written, and return once it is, or has failed.

        Cancelled while it waits, it has not happened; afterwards it is answered.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._waiting.append(job)
        if self._busy and not await self._leads(job):
            return
        self._busy = True
        if self._crowded:
            # those who were answered together with the last leader come back in this same
            # pass of the loop or, as its order is random, in the next one: let them in,
            # or they wait for one more transaction
            await trio.lowlevel.cancel_shielded_checkpoint()
            await trio.lowlevel.cancel_shielded_checkpoint()
        batch, self._waiting = self._waiting, []
        self._crowded = len(batch) > 1
        for one in batch:
            one.taken = True
        try:
            with trio.CancelScope(shield=True):
                await self._write(batch)
        except BaseException as exc:
            for one in batch:  # nobody may take silence for success
                one.error = one.error or InternalError(f"the writer failed: {exc!r}")
            raise
        finally:
            for one in batch:
                if one is not job:
                    trio.lowlevel.reschedule(one.task, outcome.Value(False))
            if self._waiting:  # still busy: nobody may overtake the next leader
                trio.lowlevel.reschedule(self._waiting[0].task, outcome.Value(True))
            else:
                self._busy = False

    async def _leads(self, job: Job) -> bool:
        """Wait; True means that this task leads now, False that its job is answered."""
        job.task = trio.lowlevel.current_task()

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            if job.taken:
                return trio.lowlevel.Abort.FAILED
            self._waiting.remove(job)
            return trio.lowlevel.Abort.SUCCEEDED

        return bool(await trio.lowlevel.wait_task_rescheduled(abort))


class _Offer(trio.abc.Instrument):
    """Sleeps a moment in each pass of a loop that never waits, while a thread has work.

    CPython hands its lock over only to a thread that has waited for a whole switch
    interval without being signalled. A trio loop with runnable tasks releases and
    takes it back in every pass, so a worker thread may never get it: a commit then
    ends when the load does. A real sleep lets it in.
    """

    outstanding = 0
    since = 0.0

    def before_io_wait(self, timeout: float) -> None:
        if not self.outstanding or timeout:
            return
        waited = time.perf_counter() - self.since
        if waited > PATIENCE_SECONDS:
            time.sleep(min(waited * SHARE, LONGEST_NAP_SECONDS))  # noqa: ASYNC251


_offer: trio.lowlevel.RunVar[_Offer] = trio.lowlevel.RunVar("trio_agent_offer")


@contextmanager
def threads_let_in() -> Generator[None]:
    """Let worker threads make progress during a block, however busy the trio thread is.

    The instrument is added once a run and stays: adding it costs a third of a save.
    """
    try:
        offer = _offer.get()
    except LookupError:
        offer = _Offer()
        _offer.set(offer)
        trio.lowlevel.add_instrument(offer)
    if not offer.outstanding:
        offer.since = time.perf_counter()
    offer.outstanding += 1
    try:
        yield
    finally:
        offer.outstanding -= 1
