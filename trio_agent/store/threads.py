"""Blocking work in trio's threads, which get their turn however busy the trio thread is.

CPython hands its lock over only to a thread that has waited for a whole switch
interval without being signalled. A trio loop with runnable tasks releases and takes
it back in every pass, so a worker thread may never get it: a commit then ends when
the load does. A real sleep lets it in.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

import trio

T = TypeVar("T")

PATIENCE_SECONDS: Final = 1e-3
"""How long a thread may take before a busy loop gives way; most need less."""

SHARE: Final = 0.1
"""The part of the time since then that the loop gives in each pass: the longer a thread
has waited, the more of its statements get through at once."""

LONGEST_NAP_SECONDS: Final = 2e-3


class RunSync(Protocol):
    """The shape of `trio.to_thread.run_sync`."""

    def __call__(
        self, sync_fn: Callable[..., T], /, *args: Any, limiter: trio.CapacityLimiter
    ) -> Awaitable[T]: ...


class _Offer(trio.abc.Instrument):
    """Sleeps a moment in each pass of a loop that never waits, while a thread has work."""

    def __init__(self) -> None:
        self.at_work: set[object] = set()
        self.since = 0.0

    def begin(self, work: object) -> None:
        """Count *work* from now on."""
        if not self.at_work:
            self.since = time.perf_counter()
        self.at_work.add(work)

    def before_io_wait(self, timeout: float) -> None:
        """See `trio.abc.Instrument`."""
        if timeout or not self.at_work:
            return
        waited = time.perf_counter() - self.since
        if waited > PATIENCE_SECONDS:
            time.sleep(min(waited * SHARE, LONGEST_NAP_SECONDS))


_offer: trio.lowlevel.RunVar[_Offer] = trio.lowlevel.RunVar("trio_agent_offer")


async def in_thread(  # noqa: ASYNC910
    run_sync: RunSync, fn: Callable[..., T], *args: Any, limiter: trio.CapacityLimiter
) -> T:
    """Return what *fn* returns in a thread of *run_sync*. A checkpoint.

    The loop gives way until *fn* has returned, not until its task runs again: there is
    nobody left to sleep for, and the task would wait for nothing.
    """
    try:
        offer = _offer.get()
    except LookupError:  # it stays for the run: adding one costs a third of a save
        offer = _Offer()
        _offer.set(offer)
        trio.lowlevel.add_instrument(offer)
    mark = object()
    offer.begin(mark)
    try:
        return await run_sync(_at_work, offer, mark, fn, args, limiter=limiter)
    finally:
        offer.at_work.discard(mark)  # it was cancelled before it had a thread


def _at_work(offer: _Offer, mark: object, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    try:
        return fn(*args)
    finally:
        offer.at_work.discard(mark)
