"""A reader that fell far behind is served from the store, page by page, and misses nothing."""

from __future__ import annotations

import pytest
import trio

from tests.scenarios.story import Strict, configure, journal
from trio_agent import Interrupt, SubmissionRejectedError, UserInput, create_agent
from trio_agent.agent.readers import PAGE, TAIL_EVENTS
from trio_agent.protocol.events import SubmissionRejected, TurnComplete
from trio_agent.store.memory import MemoryCheckpoint

MANY = TAIL_EVENTS + 2 * PAGE


async def test_a_reader_behind_the_tail_gets_every_event_once_and_the_end(
    store: MemoryCheckpoint,
) -> None:
    async with create_agent(configure(Strict("hello"), store)) as agent:
        for _ in range(MANY):
            with pytest.raises(SubmissionRejectedError):
                await agent.submit(Interrupt("no such turn"))
        await agent.submit(UserInput(text="go"))
        await agent.wait_idle()
        late = agent.subscribe(after=0)
        other = []
        with trio.fail_after(20):
            heard = [await agent.events.__anext__() for _ in range(MANY + 1)]
            async for event in late:
                other.append(event)
                if isinstance(event.msg, TurnComplete):
                    break
    rows = await journal(store)
    assert heard == rows[: len(heard)]
    assert sum(isinstance(event.msg, SubmissionRejected) for event in heard) == MANY
    assert [one.sequence for one in other] == sorted({one.sequence for one in other})
    assert [one for one in rows if one in other] == rows[: rows.index(other[-1]) + 1]
