"""Group commit: what is waiting when the writer is free goes in one transaction.

Rules:

1.  There is no background task. A task whose turn it is leads: it takes all that
    is waiting, its own job included, and has it written. A lone task leads at once.
2.  Waiting jobs can be cancelled away, and then they did not happen. Taken ones
    cannot: their tasks wait until they are answered.
3.  A leader hands over to the oldest job that came meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import outcome
import trio

from trio_agent.errors import InternalError
from trio_agent.store.saving import Job


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
