"""Opening a session only to see how it starts."""

from __future__ import annotations

from typing import Any

from trio_agent import create_agent
from trio_agent.protocol.events import Event, EventMsg


async def opened(config: Any) -> list[Event]:
    """Open and leave a session; return what its reader got of the opening itself."""
    async with create_agent(config) as agent:
        last = agent.snapshot().last_event_sequence
        found: list[Event] = []
        while not found or found[-1].sequence < last:
            event = await agent.next_event()
            assert event is not None
            found.append(event)
        return found


def kinds_of(events: list[Event]) -> list[type[EventMsg]]:
    return [type(event.msg) for event in events]
