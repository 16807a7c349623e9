"""Keeping leases alive: one task of a store renews and looks, for all sessions it guards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import trio
from msgspec import Struct, field

from trio_agent.errors import CheckpointError
from trio_agent.store.base import Lease
from trio_agent.store.ownership import CHECK_SECONDS, RENEW_SECONDS


class _Watch(Struct, eq=False):
    """A session that somebody guards."""

    lease: Lease
    lost: bool = False
    wake: trio.Event = field(default_factory=trio.Event)


class Guards:
    """The guarded sessions of one store.

    Whichever guard finds nobody at work does the work for all of them; when it
    ends, it wakes another one to go on.

    Args:
        renew: Raises the counter of this process.
        held: Returns the sessions that this process holds, and their incarnations.
    """

    def __init__(
        self,
        renew: Callable[[], Awaitable[None]],
        held: Callable[[], Awaitable[Mapping[str, int]]],
    ) -> None:
        self._renew = renew
        self._held = held
        self._watches: list[_Watch] = []
        self._working = False

    async def watch(self, lease: Lease) -> None:
        """Keep *lease* alive; return once it is lost."""
        await trio.lowlevel.checkpoint()
        watch = _Watch(lease)
        self._watches.append(watch)
        try:
            while not watch.lost:
                if self._working:
                    await watch.wake.wait()
                    watch.wake = trio.Event()
                else:
                    await self._work_until_lost(watch)
        finally:
            self._watches.remove(watch)
            if self._watches:
                self._watches[0].wake.set()

    async def _work_until_lost(self, watch: _Watch) -> None:  # noqa: ASYNC910
        self._working = True
        try:
            renewed = float("-inf")
            while True:
                # a failure here is no loss: a save will say what is wrong with the file
                if trio.current_time() >= renewed + RENEW_SECONDS:
                    with suppress(CheckpointError):
                        await self._renew()
                    renewed = trio.current_time()
                with suppress(CheckpointError):
                    self._tell(await self._held())
                if watch.lost:
                    break
                await trio.sleep(CHECK_SECONDS)
        finally:
            self._working = False

    def _tell(self, held: Mapping[str, int]) -> None:
        """Wake those whose session is no longer among *held*."""
        for watch in self._watches:
            if held.get(watch.lease.session_id) != watch.lease.incarnation:
                watch.lost = True
                watch.wake.set()
