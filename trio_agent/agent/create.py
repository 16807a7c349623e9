"""`create_agent` and `run_agent`: the life of a session from opening to last commit."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from trio_agent.agent.boundary import raise_for_caller, raise_for_opener
from trio_agent.agent.handle import Agent
from trio_agent.agent.intake import Intake
from trio_agent.agent.opening import Opening
from trio_agent.agent.runner import Runner
from trio_agent.agent.startup import Opened, started
from trio_agent.config import AgentConfig


@asynccontextmanager
async def create_agent(config: AgentConfig) -> AsyncGenerator[Agent]:
    """Open or resume a session and run it for the length of the block.

    A ``session_id`` that the store knows is resumed; if its last process died, what
    that left is settled first (`Recovery` says how). Leaving the block interrupts a
    running turn and waits for the last commit, at most ``shutdown_grace`` seconds.

    Entering and leaving are checkpoints. What the block raises leaves as it came,
    never inside a group. Cancelling around the block leaves the same durable record as
    an interrupt, if the grace suffices, and else what recovery makes of it.

    Args:
        config: What to open, and how.

    Yields:
        The running session.

    Raises:
        ConfigError: On entering, if the configuration can never work.
        SessionOwnedError: On entering, if another live process has the session.
        CheckpointError: On entering, if the store fails; nothing was changed.
        SessionBrokenError: On leaving, if the session failed while it ran;
            ``__cause__`` says why.
    """
    theirs: BaseException | None = None
    opened = Opened()
    try:
        async with started(config, opened) as start:
            opening = start.opening
            session = opening.session
            intake = Intake(opening, Runner(opening))
            agent = Agent(opening, intake, start.configured, start.reader)
            try:
                async with trio.open_nursery() as nursery:
                    _run(nursery, opening, intake)
                    try:
                        yield agent
                    except BaseException as exc:
                        theirs = exc
                        # Before the inbox closes: the turn is cancelled, not left alone.
                        nursery.cancel_scope.cancel(reason="the block raised")
                        raise
                    finally:
                        agent.close()
            finally:
                session.tail.end(session.broken)
    except BaseException as raised:  # noqa: ASYNC103  # always raises
        if not opened.done:
            raise_for_opener(raised, opened.failure)
        raise_for_caller(raised, theirs)


def _run(nursery: trio.Nursery, opening: Opening, intake: Intake) -> None:
    """Start the tasks of a session; the runner's end ends the others."""
    session, session_id = opening.session, opening.config.session_id
    scopes: list[trio.CancelScope] = []

    async def run() -> None:
        await intake.runner.run()
        # First of all: whoever waited behind the last commit would find the session over.
        for scope in scopes:
            scope.cancel(reason="the session is over")
        await session.commit()  # what was appended last
        session.tail.end()

    async def serve(serving: Callable[[], Awaitable[None]]) -> None:
        scope = trio.CancelScope()
        scopes.append(scope)
        with scope:
            await serving()

    async def asides() -> None:
        async with trio.open_nursery() as beside:
            opening.asides = beside
            try:
                await trio.sleep_forever()
            finally:
                opening.asides = None

    nursery.start_soon(serve, session.run_recorder, name=f"recorder {session_id}")
    nursery.start_soon(serve, session.run_guard, name=f"lease {session_id}")
    nursery.start_soon(serve, asides, name=f"commands {session_id}")
    nursery.start_soon(intake.run, name=f"intake {session_id}")
    nursery.start_soon(run, name=f"session {session_id}")


async def run_agent(
    config: AgentConfig, *, task_status: trio.TaskStatus[Agent] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a session in somebody else's nursery, until it is closed.

    Use it as ``agent = await nursery.start(run_agent, config)``. What goes wrong before
    the session is open is raised there, plainly; what goes wrong later is raised by
    the nursery.

    Args:
        config: What to open, and how.
        task_status: Given the running `Agent` once the session is durable.
    """
    async with create_agent(config) as agent:
        task_status.started(agent)
        await agent.wait_closed()
