"""What is under way when a session ends: nothing of it makes an end into a failure."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import trio

from trio_agent import (
    AgentConfig,
    CapabilityCommand,
    MemoryCheckpoint,
    Middleware,
    create_agent,
)
from trio_agent.middleware import CommandContext, RuntimeContext
from trio_agent.protocol.events import Notice, SubmissionAccepted
from trio_agent.protocol.frontend import Command, Contribution
from trio_agent.testing.models import ScriptedModel


class Shows(Middleware):
    """Shows something when it is told to, from a task of its own."""

    def __init__(self) -> None:
        self.now = trio.Event()
        self.runtime: RuntimeContext | None = None

    def show(self, text: str) -> None:
        """Show it."""
        assert self.runtime is not None
        self.runtime.show(Notice(capability=self.name, text=text))

    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        """Run the task."""
        self.runtime = ctx

        async def show() -> None:
            await self.now.wait()
            self.show("late")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(show)
            yield
            nursery.cancel_scope.cancel()


class LastWrite(MemoryCheckpoint):
    """Has something shown while the last events of a session are being written."""

    def __init__(self, shows: Shows) -> None:
        super().__init__()
        self.shows = shows
        self.armed = False

    async def append_events(self, *args: Any, **kwargs: Any) -> Any:
        """Append them."""
        if self.armed and not self.shows.now.is_set():
            self.shows.now.set()
            await trio.testing.wait_all_tasks_blocked()
        return await super().append_events(*args, **kwargs)


async def test_what_is_shown_during_the_last_write_does_not_break_the_end() -> None:
    shows = Shows()
    store = LastWrite(shows)
    config = AgentConfig(
        model=ScriptedModel(), checkpoints=store, session_id="s", middleware=[shows]
    )
    async with create_agent(config) as agent:
        await agent.wait_idle()
        store.armed = True
        shows.show("last")
    events = (await store.events_after("s", 0, 100)).events
    shown = [event.msg.text for event in events if isinstance(event.msg, Notice)]
    assert shown[:1] == ["last"]


class Commanded(Middleware):
    """Has a command."""

    def frontend(self) -> Contribution:
        """Declare it."""
        return Contribution(
            capability=self.name, commands=(Command(name="do", description=""),)
        )

    async def command(self, ctx: CommandContext) -> None:
        """Do nothing."""


class Unstoppable(MemoryCheckpoint):
    """Finishes a write whatever happens meanwhile, as a thread does."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = trio.Event()

    async def append_events(self, *args: Any, **kwargs: Any) -> Any:
        """Append them."""
        drafts = args[1]
        with trio.CancelScope(shield=True):
            if any(isinstance(draft.msg, SubmissionAccepted) for draft in drafts):
                self.writing.set()
                await trio.testing.wait_all_tasks_blocked()
            return await super().append_events(*args, **kwargs)


async def test_a_command_that_is_accepted_while_the_session_is_cancelled_is_no_failure() -> (
    None
):
    store = Unstoppable()
    commanded = Commanded()
    config = AgentConfig(model=ScriptedModel(), checkpoints=store, middleware=[commanded])
    with trio.CancelScope() as scope:
        async with create_agent(config) as agent:
            agent.submit_nowait(CapabilityCommand(capability=commanded.name, command="do"))
            await store.writing.wait()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
