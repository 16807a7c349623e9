"""`Catalog`: the tools of one session, each read once, in the order of their names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import msgspec
from msgspec import Struct

from trio_agent.errors import ConfigError, DuplicateError
from trio_agent.model.base import ToolDefinition
from trio_agent.protocol.text import Json, check_json, check_text
from trio_agent.state.checkpoint import Effect
from trio_agent.tools.base import (
    DescribedTool,
    GrantingTool,
    ReconcilingTool,
    SandboxedTool,
    Tool,
    ToolContext,
    ToolResult,
)
from trio_agent.tools.function import Describe, GrantKey, Reconcile, as_tool, check_policy
from trio_agent.tools.signature import check_tool_name, is_object

MAX_DESCRIPTION_BYTES = 65_536
"""A tool's description; every model request carries it."""

Check = Callable[[Mapping[str, Json]], None]


@runtime_checkable
class CheckedTool(Protocol):
    """A tool that can judge arguments before anybody is asked about the call."""

    def check(self, arguments: Mapping[str, Json]) -> None:
        """Raise `ToolError` if a call with *arguments* can only fail. Not a checkpoint."""
        ...


@runtime_checkable
class ThreadedTool(Tool, Protocol):
    """A tool whose calls run in a thread, which no cancellation can stop."""

    @property
    def threaded(self) -> bool:
        """Whether this one does."""
        ...

    async def call(
        self,
        arguments: Mapping[str, Json],
        ctx: ToolContext,
        *,
        abandon_on_cancel: bool = False,
    ) -> str | ToolResult:
        """Call it; with *abandon_on_cancel*, leave the thread to itself on cancellation."""
        ...


class Registered(Struct, frozen=True, kw_only=True):
    """A tool as it was when it was registered; nothing about it is asked again.

    Attributes:
        tool: Whom to call.
        owner: Who registered it: ``"config"`` or a middleware's name.
        definition: What the model sees.
        effect: What a call does to the world.
        exclusive: Whether a call runs alone in its batch.
        needs_approval: Whether a person may want to decide about a call.
        timeout: Seconds that one call may take, None for no limit.
        sandboxed: Whether it acts only inside the sandbox; False if it does not say.
        threaded: Whether calls run in a thread; then ``tool`` is a `ThreadedTool`.
        check: Judges arguments before the call, or None.
        describe: Says what a call would do, or None.
        grant_key: Equal for calls that one session approval covers, or None.
        reconcile: Finds out what became of a call after a crash, or None.
    """

    tool: Tool
    owner: str
    definition: ToolDefinition
    effect: Effect
    exclusive: bool
    needs_approval: bool
    timeout: float | None
    sandboxed: bool = False
    threaded: bool = False
    check: Check | None = None
    describe: Describe | None = None
    grant_key: GrantKey | None = None
    reconcile: Reconcile | None = None

    @property
    def name(self) -> str:
        """The name that the model calls."""
        return self.definition.name


class Catalog:
    """All tools of one session. Register first, then `freeze`, then use."""

    def __init__(self) -> None:
        self._tools: dict[str, Registered] = {}
        self._frozen = False

    def register(self, tool: object, *, owner: str = "config") -> Registered:
        """Add a tool, or a function, which is wrapped as by `tool`.

        Args:
            tool: The tool or function.
            owner: Who brings it: ``"config"`` or a middleware's name.

        Raises:
            DuplicateError: If its name is taken; names both owners.
            ConfigError: If it is no tool, if what it declares cannot be used, or if
                the catalog is frozen.
        """
        one = _read(as_tool(tool), owner)
        if self._frozen:
            raise ConfigError(
                f"tool {one.name!r} of {owner}: the session has started; tools are registered "
                "through AgentConfig or Middleware.register"
            )
        if (other := self._tools.get(one.name)) is not None:
            raise DuplicateError(
                f"two tools are called {one.name!r}: one of {other.owner}, one of {owner}; "
                'rename one with @tool(name="...")'
            )
        self._tools[one.name] = one
        return one

    def freeze(self) -> None:
        """Accept no more tools. May be called again."""
        self._frozen = True

    def get(self, name: str) -> Registered | None:
        """Return the tool of that name, or None."""
        return self._tools.get(name)

    def all(self) -> tuple[Registered, ...]:
        """Return every tool, ordered by name, whatever the order of registration."""
        return tuple(self._tools[name] for name in sorted(self._tools))

    def definitions(self) -> tuple[ToolDefinition, ...]:
        """Return what the model sees, ordered by name."""
        return tuple(one.definition for one in self.all())

    @property
    def revision(self) -> str:
        """A SHA-256 over names, descriptions and schemas: equal if and only if they are."""
        seen = [(one.name, one.description, one.parameters) for one in self.definitions()]
        return hashlib.sha256(msgspec.json.encode(seen, order="sorted")).hexdigest()

    def __len__(self) -> int:
        """Return how many tools there are."""
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        """Return whether a tool has that name."""
        return name in self._tools


def _read(tool: Tool, owner: str) -> Registered:
    definition = tool.definition
    if not isinstance(definition, ToolDefinition):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"tool {tool!r}: its definition is a {type(definition).__name__}, "
            "not a trio_agent.ToolDefinition"
        )
    _check_definition(definition)
    effect, timeout = tool.effect, tool.timeout
    check_policy(definition.name, effect=effect, timeout=timeout)
    for word in ("exclusive", "needs_approval"):
        if not isinstance(getattr(tool, word), bool):
            raise ConfigError(
                f"tool {definition.name!r}: {word} is {getattr(tool, word)!r}, not a bool"
            )
    return Registered(
        tool=tool,
        owner=owner,
        definition=definition,
        effect=effect,
        exclusive=tool.exclusive,
        needs_approval=tool.needs_approval,
        timeout=timeout,
        sandboxed=isinstance(tool, SandboxedTool) and tool.sandboxed,
        threaded=isinstance(tool, ThreadedTool) and tool.threaded,
        check=tool.check if isinstance(tool, CheckedTool) else None,
        describe=tool.describe if isinstance(tool, DescribedTool) else None,
        grant_key=tool.grant_key if isinstance(tool, GrantingTool) else None,
        reconcile=tool.reconcile if isinstance(tool, ReconcilingTool) else None,
    )


def _check_definition(definition: ToolDefinition) -> None:
    name = definition.name
    check_tool_name(name)
    _check_schema(name, definition.parameters)
    try:
        check_text(
            definition.description,
            name=f"tool {name!r}: description",
            limit=MAX_DESCRIPTION_BYTES,
        )
    except ValueError as exc:
        raise ConfigError(str(exc)) from None


def _check_schema(name: str, schema: Json) -> None:
    try:
        check_json(schema, name=f"tool {name!r}: parameters")
    except ValueError as exc:
        raise ConfigError(str(exc)) from None
    if not is_object(schema) or schema.get("type") != "object":
        raise ConfigError(
            f'tool {name!r}: parameters must be a JSON Schema with "type": "object" at its root'
        )
    if not isinstance(schema.get("properties", {}), Mapping):
        raise ConfigError(f"tool {name!r}: the schema's properties must be an object")
