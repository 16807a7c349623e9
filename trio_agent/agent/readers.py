"""Readers of the journal by cursor: the live tail first, the store behind it.

The tail is a hint and the journal is the truth. A reader owns nothing but its
position, so a slow, dead or absent one costs nothing, loses nothing and breaks
nothing: whoever has fallen out of the tail reads pages from the store until it is
back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import trio

from trio_agent.errors import ConfigError, SessionBrokenError
from trio_agent.protocol.events import (
    AgentMessage,
    Event,
    EventMsg,
    HistoryGap,
    SessionHistory,
    ToolCallEnd,
    UserMessage,
)
from trio_agent.store.base import CheckpointStore

TAIL_EVENTS: Final = 1_024
TAIL_BYTES: Final = 1_048_576
"""What the tail keeps; one event larger than that is kept alone."""

PAGE: Final = 256


class Tail:
    """The newest events of a session, bounded, and the bell that rings for each write."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.over = False
        self.broken: BaseException | None = None
        self._events = deque[Event]()
        self._bytes = 0
        self._waiting = trio.lowlevel.ParkingLot()

    def publish(self, events: Sequence[Event]) -> None:
        """Add *events*, which are durable, and wake every reader. Not a checkpoint."""
        for event in events:
            self._events.append(event)
            self._bytes += _weight(event.msg)
            self.last = event.sequence
        while len(self._events) > 1 and (
            len(self._events) > TAIL_EVENTS or self._bytes > TAIL_BYTES
        ):
            self._bytes -= _weight(self._events.popleft().msg)
        self.ring()

    def end(self, broken: BaseException | None = None) -> None:
        """Say that nothing more will come. The first reason given stays."""
        if not self.over:
            self.over = True
            self.broken = broken
        self.ring()

    def ring(self) -> None:
        """Wake everybody who waits for a change."""
        self._waiting.unpark_all()

    async def wait(self) -> None:
        """Wait for the next change; always a checkpoint."""
        await self._waiting.park()

    def after(self, position: int) -> Event | None:
        """Return the first event above *position*, if the tail reaches back that far."""
        if not self._events or self._events[0].sequence > position + 1:
            return None
        place = position - self._events[0].sequence + 1
        # Numbers in the tail have no holes: every event passes through it.
        return self._events[place] if place < len(self._events) else None


def _weight(msg: EventMsg) -> int:
    """Return roughly how many bytes *msg* keeps alive."""
    match msg:
        case AgentMessage():
            texts = sum(len(part.text) for part in msg.content)
        case UserMessage():
            texts = len(msg.text)
        case ToolCallEnd():
            texts = len(msg.output)
        case SessionHistory():
            texts = sum(_weight(one) for one in msg.events)
        case _:
            texts = len(getattr(msg, "text", ""))
    return 512 + 2 * texts


class Reader:
    """An iterator over a session's events from one position on, in order, without gap.

    For one task at a time. It ends when the session does and everything was read.
    """

    def __init__(
        self,
        tail: Tail,
        store: CheckpointStore,
        session_id: str,
        position: int,
        preface: deque[Event] | None = None,
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        self._tail = tail
        self._store = store
        self._session_id = session_id
        self.position = position
        self._preface: deque[Event] = deque[Event]() if preface is None else preface
        self._skipped = skipped
        self.started = False
        self._page = deque[Event]()
        self._page_end = 0
        self._busy = False

    def __aiter__(self) -> Reader:
        """Return itself: there is only one position."""
        return self

    async def __anext__(self) -> Event:
        """Return the next event; a checkpoint. `Cancelled` leaves the position as it was.

        Raises:
            StopAsyncIteration: If the session is over and everything was read.
            SessionBrokenError: If the session failed and everything was read.
            BusyResourceError: If another task is waiting in this reader.
        """
        if self._busy:
            raise trio.BusyResourceError("another task is using this reader")
        self._busy = self.started = True
        try:
            await trio.lowlevel.checkpoint()
            while True:
                event = await self._next()
                if event is None:
                    break
                if event.sequence not in self._skipped:
                    return event
        finally:
            self._busy = False
        if self._tail.broken is not None:
            raise SessionBrokenError("the session failed") from self._tail.broken
        raise StopAsyncIteration

    async def next_event(self) -> Event | None:
        """Return the next event, or None at the end of the session."""
        try:
            return await self.__anext__()
        except StopAsyncIteration:
            return None

    async def _next(self) -> Event | None:
        if self._preface:
            event = self._preface.popleft()
            self.position = event.sequence
            return event
        while True:  # noqa: ASYNC913  # whoever comes round again has awaited
            if self._page:
                event = self._page.popleft()
                self.position = event.sequence
                return event
            self.position = max(self.position, self._page_end)
            live = self._tail.after(self.position)
            if live is not None:
                self.position = live.sequence
                return live
            if self.position < self._tail.last:
                gap = await self._read()
                if gap is not None:
                    return gap
            elif self._tail.over:
                return None
            else:
                await self._tail.wait()

    async def _read(self) -> Event | None:
        """Fetch the next page; return a `HistoryGap` if its beginning was pruned."""
        found = await self._store.events_after(self._session_id, self.position, PAGE)
        self._page = deque(found.events)
        self._page_end = found.position
        if found.pruned_through <= self.position:
            return None
        first, self.position = self.position + 1, found.pruned_through
        gap = HistoryGap(first=first, last=found.pruned_through)
        return Event(sequence=found.pruned_through, recorded_at_ms=0, msg=gap)


def check_position(after: int, last: int) -> None:
    """Check that a reader may start behind event number *after*.

    Raises:
        ConfigError: If it is no whole number from 0 to *last*.
    """
    if isinstance(after, bool) or not isinstance(after, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"a journal position is a whole number, not {after!r}")
    if not 0 <= after <= last:
        raise ConfigError(f"journal position {after} is outside of 0 to {last}")
