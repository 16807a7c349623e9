"""`Middleware`: the hook points, all no-ops; override what you need."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import attrs

from trio_agent.errors import ConfigError
from trio_agent.middleware.contexts import (
    CommandContext,
    MessageSubmitContext,
    ModelRequestContext,
    PermissionContext,
    PostToolContext,
    PreModelContext,
    PreToolContext,
    RouteContext,
    Routing,
    RuntimeContext,
    StopContext,
    TurnEndContext,
)
from trio_agent.protocol.events import EventMsg
from trio_agent.protocol.frontend import Block, Contribution
from trio_agent.protocol.limits import MAX_NAME_BYTES
from trio_agent.protocol.text import check_text
from trio_agent.record import Record
from trio_agent.tools.catalog import Catalog

HOOKS: Final = (
    "session",
    "register",
    "prompt_section",
    "frontend",
    "render",
    "route_message",
    "message_submit",
    "pre_model",
    "model_request",
    "pre_tool_use",
    "permission_request",
    "post_tool_use",
    "stop",
    "turn_end",
    "command",
)
"""Every hook of `Middleware`, in the order in which a session meets them."""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class PromptSection(Record):
    """A part of the instructions: a one-line title and a body, neither blank."""

    title: str
    body: str


class Middleware:
    """One optional capability of a session.

    Hooks run in the order in which middlewares were declared. A hook that raises
    fails the turn (see each), never the session; a background task that raises, in
    a nursery opened by `session`, breaks the session. A hook that is not overridden
    costs nothing: the engine merges the commits around it.
    """

    @property
    def name(self) -> str:
        """The unique name; default: the class name in snake case."""
        text = type(self).__name__
        return "".join(
            f"_{char.lower()}" if char.isupper() and index else char.lower()
            for index, char in enumerate(text)
        )

    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        """Surround one opening of a session; entered in order, left in reverse.

        Open a nursery here for background tasks. Raising on entry fails the
        opening, before anything was written.
        """
        del ctx
        yield

    def register(self, catalog: Catalog, runtime: RuntimeContext) -> None:
        """Add tools. Raising fails the opening."""

    def prompt_section(self, runtime: RuntimeContext) -> PromptSection | None:
        """Return this capability's part of the instructions, composed once an opening."""
        del runtime
        return None

    def frontend(self) -> Contribution | None:
        """Return the commands and references that a frontend may offer."""
        return None

    def render(self, event: EventMsg) -> Block | None:
        """Return how a frontend may show *event*; pure, the same live and in replay."""
        del event
        return None

    def route_message(self, ctx: RouteContext) -> Routing | None:
        """Say how a message enters. Exactly one middleware of a session overrides this.

        Not a coroutine: the decision and the state it is about are one.
        """
        del ctx
        return None

    async def message_submit(self, ctx: MessageSubmitContext) -> None:
        """Run before a message enters the context; raising records a failed turn."""

    async def pre_model(self, ctx: PreModelContext) -> None:
        """Run before each model request; what it changes is committed before the request."""

    async def model_request(self, ctx: ModelRequestContext) -> None:
        """Run on the request itself; what it changes is never stored."""

    async def pre_tool_use(self, ctx: PreToolContext) -> None:
        """Run for each call, in the model's order, before it is admitted."""

    async def permission_request(self, ctx: PermissionContext) -> None:
        """Run for each call that needs consent, before anybody is asked."""

    async def post_tool_use(self, ctx: PostToolContext) -> None:
        """Run for each call whose handler ran, as it ends, before its outcome is committed."""

    async def stop(self, ctx: StopContext) -> None:
        """Run when the model has ended the turn."""

    async def turn_end(self, ctx: TurnEndContext) -> None:
        """Run once a turn and process, before the turn's last commit; cannot change it."""

    async def command(self, ctx: CommandContext) -> None:
        """Run a command that `frontend` declared; `ConfigError` is shown to the user."""


def overrides(one: Middleware, hook: str) -> bool:
    """Return whether *one* has a hook of its own there."""
    return getattr(type(one), hook) is not getattr(Middleware, hook)


def checked_name(one: Middleware) -> str:
    """Return the name of *one*.

    Raises:
        ConfigError: If it is no middleware, or its name is not 1 to 256 bytes of text.
    """
    if not isinstance(one, Middleware):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{one!r} is not a Middleware; subclass trio_agent.Middleware")
    name = one.name
    try:
        check_text(name, name="middleware name", limit=MAX_NAME_BYTES, blank=False)
    except ValueError as exc:
        raise ConfigError(f"{type(one).__name__}: {exc}") from None
    return name
