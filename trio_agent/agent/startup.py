"""Start-up: validate, claim, load, recover, enter middlewares, and the first commit.

No nursery is open until the first commit is done, so whatever goes wrong before it
is a plain exception, and leaves the stored session as it was.
"""

from __future__ import annotations

import copy
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import attrs
import trio

from trio_agent.agent.ending import run_turn_end
from trio_agent.agent.first_commit import FirstCommit
from trio_agent.agent.inbox import AgentSender, Inbox, WeakSender
from trio_agent.agent.opening import Opening, logger, parts_of
from trio_agent.agent.readers import Reader
from trio_agent.agent.reconcile import reconcile
from trio_agent.agent.session import Part, Session, told
from trio_agent.config import AgentConfig
from trio_agent.errors import CheckpointError, ConfigError, StoppedError
from trio_agent.middleware.contexts import (
    Effects,
    FrontendUpdate,
    RuntimeContext,
    check_state,
)
from trio_agent.middleware.stack import MiddlewareStack
from trio_agent.model.named import as_router
from trio_agent.model.router import ModelRouter
from trio_agent.protocol.events import (
    SessionConfigured,
    Warning,  # noqa: A004  # the wire's word
)
from trio_agent.protocol.text import Json
from trio_agent.state.changes import (
    Change,
    StateSaved,
    TurnEnded,
)
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.state.recovery import recover
from trio_agent.store.base import CheckpointStore, Lease, TranscriptBatch
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.tools.catalog import Catalog

RECONCILE_SECONDS: Final = 10.0
MAX_EARLY_UPDATES: Final = 256
"""What middlewares may show before the session is durable."""


class Started:
    """A session that is open and durable, and not running yet."""

    def __init__(self, opening: Opening, configured: SessionConfigured, reader: Reader) -> None:
        self.opening = opening
        self.configured = configured
        self.reader = reader


class Opened:
    """How far an opening has come: what failed in it, as it was raised, or that it is done."""

    def __init__(self) -> None:
        self.done = False
        self.failure: BaseException | None = None

    def fail(self, exc: BaseException) -> None:
        """Note what went wrong, unless the opening is done or something did before."""
        if not self.done and self.failure is None:
            self.failure = exc


class _Show:
    """Where middlewares show things: a bounded buffer first, the journal afterwards."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.early = list[FrontendUpdate]()

    def __call__(self, update: FrontendUpdate) -> None:
        if self.session is not None:
            self.session.append(update, None)
        elif len(self.early) >= MAX_EARLY_UPDATES:
            raise StoppedError(f"over {MAX_EARLY_UPDATES} updates before the session started")
        else:
            self.early.append(update)

    def begin(self, session: Session, written: int) -> None:
        """Show all in the journal from now on; the first *written* stand there already."""
        self.session = session
        for update in self.early[written:]:
            session.append(update, None)
        self.early.clear()


def owner_label() -> str:
    """Return how this process is named to others."""
    return f"process {os.getpid()} on {socket.gethostname()}"


@asynccontextmanager
async def started(config: AgentConfig, opened: Opened) -> AsyncGenerator[Started]:
    """Open a session, hold what it needs for the length of the block, and let it go.

    Raises:
        ConfigError: If the configuration can never work.
        SessionOwnedError: If another live process has the session.
        CheckpointError: If the store fails, or what it holds does not fit.
    """
    router = as_router(config.model)
    if config.model_route is not None:
        router.resolve(config.model_route)
    stack = MiddlewareStack(config.middleware).with_messages()
    catalog = Catalog()
    for tool in config.tools:
        catalog.register(tool)
    async with AsyncExitStack() as exits:
        store = await exits.enter_async_context(_opened_store(config.checkpoints))
        lease = await exits.enter_async_context(_claimed(store, config))
        loaded = await store.load(config.session_id)
        checkpoint = loaded or attrs.evolve(
            Checkpoint.empty(config.session_id),
            session_context=config.session_context,
            metadata=dict(config.metadata or {}),
            role=config.role,
        )
        _check_queue(checkpoint, stack)
        show, inbox = _Show(), Inbox()
        session = Session(store, lease, config.ambient, checkpoint)
        exits.callback(inbox.refuse_rest, None)
        sender = AgentSender(inbox, inbox.send, config.ambient)
        route, warnings = _choose_route(config, router, loaded)
        runtime = _runtime(config, checkpoint, route, sender, show, session)
        stack.register(catalog, runtime)
        catalog.freeze()
        opening = Opening(
            config=config,
            router=router,
            stack=stack,
            catalog=catalog,
            runtime=runtime,
            session=session,
            store=store,
            inbox=inbox,
            sender=sender,
            instructions=stack.prompt(config.system_prompt, runtime),
            definitions=catalog.definitions(),
        )
        stack.contributions()
        await exits.enter_async_context(router.open())
        if config.sandbox is not None:
            await exits.enter_async_context(config.sandbox.session(config.session_id))
        known = await reconcile(opening, checkpoint)
        changes = recover(checkpoint, config.recovery, now_ms=opening.now_ms(), known=known)
        history = await _history(config, store, loaded)
        await exits.enter_async_context(stack.sessions(runtime, failed=opened.fail))
        try:
            hooked = await _turn_end_hooks(opening, changes)
            shown = tuple(show.early)
            first = FirstCommit(
                opening,
                new=loaded is None,
                route=route,
                changes=changes,
                batches=history,
                extra=[*hooked, *warnings, *(told(update) for update in shown)],
            )
            events = await first.commit()
        except BaseException as exc:
            opened.fail(exc)  # a middleware's nursery may wrap it on its way out
            raise
        show.begin(session, len(shown))
        opened.done = True
        reader = Reader(
            session.tail,
            store,
            config.session_id,
            events[-1].sequence,
            preface=deque(events),
            skipped=first.skipped(events),
        )
        yield Started(opening, first.configured, reader)


@asynccontextmanager
async def _opened_store(
    checkpoints: CheckpointStore | str | Path | None,
) -> AsyncGenerator[CheckpointStore]:
    if checkpoints is None:
        yield MemoryCheckpoint()
    elif isinstance(checkpoints, (str, Path)):
        from trio_agent.store.sqlite import SqliteCheckpoint  # noqa: PLC0415

        async with SqliteCheckpoint(checkpoints) as store:
            yield store
    else:
        yield checkpoints


@asynccontextmanager
async def _claimed(store: CheckpointStore, config: AgentConfig) -> AsyncGenerator[Lease]:
    lease = await store.claim(config.session_id, owner_label(), takeover=config.takeover)
    try:
        yield lease
    finally:
        # A lease that is not given back only costs the next opener a question.
        with trio.move_on_after(config.shutdown_grace, shield=True):
            try:
                await store.release(lease)
            except CheckpointError as exc:
                logger.warning("the lease was not given back", exc_info=exc)


def _check_queue(checkpoint: Checkpoint, stack: MiddlewareStack) -> None:
    for message in checkpoint.queue:
        if message.owner != stack.handler_name:
            raise CheckpointError(
                f"message {message.id!r} waits for the middleware {message.owner!r}, which is"
                f" not configured; {stack.handler_name!r} handles messages now"
            )


def _choose_route(
    config: AgentConfig, router: ModelRouter, loaded: Checkpoint | None
) -> tuple[str, list[Part]]:
    """Return the route to start on, and a warning if it is not the one that was saved."""
    if config.model_route is not None:
        return config.model_route, []
    if loaded is None or config.override_saved_model_route:
        return router.default_route, []
    saved = loaded.model_route
    if saved is not None and router.has(saved):
        return saved, []
    lost = "no route was saved" if saved is None else f"route {saved!r} is not registered"
    message = f"{lost}; the session goes on with {router.default_route!r}"
    warning = Warning(code="route_replaced", message=message)
    return router.default_route, [told(warning)]


def _runtime(
    config: AgentConfig,
    checkpoint: Checkpoint,
    route: str,
    sender: AgentSender,
    show: _Show,
    session: Session,
) -> RuntimeContext:
    async def save_state(name: str, value: Json) -> None:
        try:
            check_state(name, value)
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
        if show.session is None:
            raise StoppedError("a state can be saved only while the session runs")
        await session.commit(StateSaved(name=name, value=copy.deepcopy(value)))

    metadata = checkpoint.metadata if config.metadata is None else config.metadata
    return RuntimeContext(
        session_id=config.session_id,
        session_context=checkpoint.session_context,
        metadata=copy.deepcopy(dict(metadata)),
        role=checkpoint.role,
        model_route=route,
        sender=WeakSender(sender),
        show=show,
        states=copy.deepcopy(dict(checkpoint.states)),
        save_state=save_state,
        ambient=config.ambient,
    )


async def _history(
    config: AgentConfig, store: CheckpointStore, loaded: Checkpoint | None
) -> tuple[TranscriptBatch, ...]:
    if loaded is None or config.initial_replay_batches == 0:
        return ()
    page = await store.transcript_page(
        config.session_id, max_batches=config.initial_replay_batches
    )
    return tuple(reversed(page.batches))


async def _turn_end_hooks(opening: Opening, changes: Sequence[Change]) -> list[Part]:
    """Run the turn_end hooks of a turn that recovery ends; their failure is told."""
    ended = next((change for change in changes if isinstance(change, TurnEnded)), None)
    checkpoint = opening.session.checkpoint
    if ended is None or not opening.stack.has("turn_end"):
        return []
    effects = Effects()
    await run_turn_end(opening, checkpoint.turn_id or "", ended.outcome, effects)
    effects.items.clear()
    return parts_of(effects)
