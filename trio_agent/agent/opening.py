"""What every part of one opening of a session works with."""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVarTuple, Unpack, cast

import msgspec
import trio

from trio_agent.agent.inbox import AgentSender, Inbox
from trio_agent.agent.meter import TokenMeter
from trio_agent.agent.session import Part, Session, told
from trio_agent.config import AgentConfig
from trio_agent.errors import AgentError, ProviderError
from trio_agent.middleware.contexts import Effects, RuntimeContext
from trio_agent.middleware.stack import MiddlewareStack
from trio_agent.model.base import ToolDefinition
from trio_agent.model.router import ModelRouter
from trio_agent.protocol.events import Error, ModelChanged
from trio_agent.protocol.limits import MAX_ERROR_MESSAGE_BYTES
from trio_agent.protocol.text import Json, cut_end, replace_surrogates
from trio_agent.state.changes import ContextChanged, StateSaved, UsageCounted
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.state.context import BYTES_PER_TOKEN
from trio_agent.store.base import CheckpointStore
from trio_agent.tools.catalog import Catalog

logger = logging.getLogger("trio_agent.agent")

Ts = TypeVarTuple("Ts")


class Followed:
    """A message whose end somebody in this process waits for, and what became of it.

    ``submission_id`` is its newest: an edit gives it another one.
    """

    def __init__(self, submission_id: str) -> None:
        self.submission_id = submission_id
        self.withdrawn = False
        self.failure: Exception | None = None


class Opening:
    """The parts of one opening, made by the start-up and used until the end."""

    def __init__(
        self,
        config: AgentConfig,
        router: ModelRouter,
        stack: MiddlewareStack,
        catalog: Catalog,
        runtime: RuntimeContext,
        session: Session,
        store: CheckpointStore,
        inbox: Inbox,
        sender: AgentSender,
        instructions: str,
        definitions: tuple[ToolDefinition, ...],
    ) -> None:
        self.config = config
        self.router = router
        self.stack = stack
        self.catalog = catalog
        self.runtime = runtime
        self.session = session
        self.store = store
        self.inbox = inbox
        self.sender = sender
        self.instructions = instructions
        self.definitions = definitions
        self.meter = TokenMeter()
        self._tool_states = dict[str, dict[str, Json]]()
        self.followed = dict[str, Followed]()
        """By their ids; each is gone when nobody waits any longer."""
        self.asides: trio.Nursery | None = None
        """Where commands and watches run; None before and after the session does."""

        tools = sum(len(msgspec.json.encode(definition)) for definition in definitions)
        self.fixed_tokens = (len(instructions.encode()) + tools) // BYTES_PER_TOKEN
        """The estimated size of the instructions and tools, which every request repeats."""

    def now_ms(self) -> int:
        """Return the wall clock."""
        return self.config.ambient.now_ms()

    def new_id(self) -> str:
        """Return a fresh id."""
        return self.config.ambient.new_id()

    def start_aside(
        self, work: Callable[[Unpack[Ts]], Awaitable[None]], *args: *Ts, name: str
    ) -> None:
        """Run a task beside the turns, until the session ends; none begins after that."""
        if self.asides is not None:
            self.asides.start_soon(work, *args, name=name)

    def window(self, route: str) -> int:
        """Return the context window of *route*, in tokens."""
        choice = self.router.resolve(route)
        return choice.context_window or self.config.context_window

    def route_of(self, checkpoint: Checkpoint) -> str:
        """Return the route that is asked next: a turn stays where a failing route has led it.

        A restart may find that it is registered no longer.
        """
        active = checkpoint.active_execution
        if active is not None and active.route is not None and self.router.has(active.route):
            return active.route
        return checkpoint.model_route or self.router.default_route

    def model_changed(self, route: str) -> ModelChanged:
        """Return *route* as frontends are told about it."""
        choice = self.router.resolve(route)
        return ModelChanged(
            route=route,
            model=choice.model,
            reasoning_effort=choice.reasoning_effort,
            model_context_window=self.window(route),
        )

    def tool_state(self, name: str) -> dict[str, Json]:
        """Return the one live copy of a tool's durable state in this session."""
        if name not in self._tool_states:
            self._tool_states[name] = {}
            self.reset_tool_state(name)
        return self._tool_states[name]

    def reset_tool_state(self, name: str) -> None:
        """Make that copy what was saved last."""
        saved: dict[str, Json] = self.session.checkpoint.states.get(f"tool:{name}") or {}
        self._tool_states[name].clear()
        self._tool_states[name].update(copy.deepcopy(saved))


def parts_of(effects: Effects, cause: str | None = None) -> list[Part]:
    """Return what hooks changed as parts of a commit: the context, states, usage, events."""
    parts: list[Part] = []
    if effects.items or effects.rewrite is not None:
        rewrite = None if effects.rewrite is None else tuple(effects.rewrite)
        parts.append(ContextChanged(items=tuple(effects.items), rewrite=rewrite))
    parts.extend(StateSaved(name=name, value=value) for name, value in effects.states.items())
    if effects.usage is not None:
        parts.append(UsageCounted(usage=effects.usage))
    parts.extend(told(msg, cause) for msg in effects.events)
    return parts


def error_event(exc: BaseException) -> Error:
    """Return *exc* as readers see it: its kind, and a bounded message."""
    provider = exc if isinstance(exc, ProviderError) else None
    return Error(
        kind=exc.kind if isinstance(exc, AgentError) else "turn",
        message=describe(exc),
        retryable=provider is not None and provider.retryable,
        status=None if provider is None else provider.status,
        retry_after=None if provider is None else provider.retry_after,
    )


def describe(exc: BaseException) -> str:
    """Return *exc* in at most 2 KiB; of a group, every leaf."""
    if isinstance(exc, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", exc)
        text = "; ".join(describe(one) for one in group.exceptions)
    elif isinstance(exc, AgentError):
        text = str(exc) or exc.kind
    else:
        text = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
    return cut_end(replace_surrogates(text), MAX_ERROR_MESSAGE_BYTES)
