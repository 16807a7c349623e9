"""`Tool`: the contract of what a model may call, and what a running call can use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import attrs
import trio

from trio_agent.errors import ToolError
from trio_agent.model.base import ToolDefinition
from trio_agent.protocol.events import CallOutcome
from trio_agent.protocol.text import Json
from trio_agent.record import Record, Shown
from trio_agent.state.checkpoint import Effect

if TYPE_CHECKING:
    from trio_agent.sandbox.base import BoundSandbox


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ToolResult(Record):
    """What a call came to. An error result is one that the model should read as a failure."""

    output: str
    is_error: bool = False


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Reconciled(Record):
    """What a tool found out, after a crash, about a call that had begun.

    ``outcome`` is ``"finished"``, ``"failed"``, ``"not_started"`` or
    ``"unknown"``; ``output`` is what the model reads for the first two.
    """

    outcome: CallOutcome
    output: str = ""


Report: TypeAlias = Callable[[str, float | None], Awaitable[None]]


@attrs.define(kw_only=True, eq=False, repr=False)
class ToolContext(Shown):
    """What one call can use. Valid only while the call runs.

    Attributes:
        session_id: The session.
        turn_id: The turn.
        call_id: This call; never used again in the session.
        idempotency_key: The same for every time this call is entered, and for no
            other call of any session: pass it to services that recognise repeats.
        workspace: The sandbox's directory, or None without a sandbox.
        sandbox: The sandbox with this call's permissions, or None.
        state: This tool's durable state in this session: JSON values, at most
            64 KiB. What a call changes in it is committed with the call's outcome.
    """

    session_id: str
    turn_id: str
    call_id: str
    idempotency_key: str
    workspace: Path | None = None
    sandbox: BoundSandbox | None = None
    state: dict[str, Json] = attrs.field(factory=dict[str, Json])
    _report: Report | None = attrs.field(default=None, alias="report")

    async def report(self, message: str, fraction: float | None = None) -> None:
        """Tell readers how far this call is. A checkpoint; never slowed by a reader.

        Args:
            message: One line.
            fraction: Between 0 and 1, if known.
        """
        if self._report is None:
            await trio.lowlevel.checkpoint()
        else:
            await self._report(message, fraction)

    def require_sandbox(self) -> BoundSandbox:
        """Return the sandbox.

        Raises:
            ToolError: If the session has none.
        """
        if self.sandbox is None:
            raise ToolError("this session has no sandbox: AgentConfig(sandbox=...) gives one")
        return self.sandbox


class Tool(Protocol):
    """Something a model may call.

    ``effect`` decides what a restart may do with a call that had begun: an
    ``undeclared`` or ``destructive`` one is never entered again; a ``read_only``
    one may be; an ``idempotent`` one may be, with the same key. ``exclusive``
    calls run alone. ``timeout`` is in seconds, None for no limit.
    """

    @property
    def definition(self) -> ToolDefinition:
        """What the model sees."""
        ...

    @property
    def effect(self) -> Effect:
        """What a call does to the world."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether a call runs alone in its batch."""
        ...

    @property
    def needs_approval(self) -> bool:
        """Whether a call changes something that a person may want to decide about."""
        ...

    @property
    def timeout(self) -> float | None:
        """Seconds that one call may take."""
        ...

    async def call(self, arguments: Mapping[str, Json], ctx: ToolContext) -> str | ToolResult:
        """Do it.

        Raises:
            ToolError: For a failure that the model should read. Any other
                `Exception` is logged, and the model reads its type and message.
        """
        ...


@runtime_checkable
class SandboxedTool(Protocol):
    """A tool that says whether it acts only inside the sandbox; others count as outside."""

    @property
    def sandboxed(self) -> bool:
        """Whether everything a call changes lies inside the sandbox."""
        ...


@runtime_checkable
class ReconcilingTool(Protocol):
    """A tool that can find out after a crash what became of a call."""

    @property
    def reconcile(
        self,
    ) -> Callable[[Mapping[str, Json], ToolContext], Awaitable[Reconciled]] | None:
        """Asked before the session goes on; must be safe to repeat; 10 s at most."""
        ...


@runtime_checkable
class DescribedTool(Protocol):
    """A tool that can say what one call would do, for the person who decides."""

    async def describe(self, arguments: Mapping[str, Json], ctx: ToolContext) -> str:
        """Return the exact command or diff; *ctx* may read but not change anything."""
        ...


@runtime_checkable
class GrantingTool(Protocol):
    """A tool whose session approvals cover more than the identical call."""

    def grant_key(self, arguments: Mapping[str, Json]) -> str:
        """Return a text that is equal for all calls that one approval covers."""
        ...
