"""Real deaths: lives of a session in child processes that a SIGKILL ends at a chosen moment.

Every life is a fork that opens the session on one SQLite file, so tools may be
closures. A life dies before or after its n-th write, or where a tool's handler is
entered or left. Nothing here runs in the parent but forking and reading reports.
POSIX only. Call it outside of `trio.run`.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import attrs
import trio

from trio_agent.agent.create import create_agent
from trio_agent.config import AgentConfig, ApprovalHandler
from trio_agent.errors import ConfigError
from trio_agent.model.base import Emit, Model, ModelCall, ModelOutput, ModelRequest
from trio_agent.protocol.events import CallOutcome, ToolCallEnd, TurnAborted, TurnComplete
from trio_agent.protocol.items import ToolCallItem
from trio_agent.protocol.ops import UserInput
from trio_agent.protocol.text import Json
from trio_agent.record import Record
from trio_agent.sandbox.policy import ApprovalPolicy
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.state.machine import Phase, phase_of
from trio_agent.state.recovery import Recovery
from trio_agent.store.sqlite import SqliteCheckpoint
from trio_agent.testing.invariants import JournalCheck, check_checkpoint
from trio_agent.testing.models import StrictModel
from trio_agent.testing.mortal import MortalStore
from trio_agent.tools.base import Tool, ToolContext, ToolResult
from trio_agent.tools.function import as_tool

SESSION: Final = "crash"
MESSAGE: Final = "message"

Place: TypeAlias = Literal["before write", "after write", "entered", "left"]


@attrs.frozen(kw_only=True)
class Moment:
    """Where a process dies: around its n-th write, or in the handler of ``tool``."""

    place: Place
    number: int = 0
    tool: str = ""

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.place} {self.number or self.tool}"


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Crash(Record):
    """One death, and what a restart made of it.

    Attributes:
        moment: Where the process died.
        policy: How the session was opened afterwards.
        phase: Where the session stood on disk; None if it did not exist.
        lives: What was durable of each call, by tool: ``admitted``, ``waiting`` for
            consent, ``begun`` or the outcome. Empty before the model's answer was durable.
        running: Whether the turn was under way, on disk.
        outcomes: How each call ended, by tool.
        entered: How often each tool's handler was entered, over all processes.
        keys: The idempotency keys that each handler was entered with.
        turn: How the turn ended; None if the message had not been accepted.
    """

    moment: Moment
    policy: Recovery
    phase: Phase | None
    lives: Mapping[str, str]
    running: bool
    outcomes: Mapping[str, CallOutcome]
    entered: Mapping[str, int]
    keys: Mapping[str, frozenset[str]]
    turn: str | None


def in_child(function: Callable[[], Any]) -> Any:
    """Run *function* in a forked process and return its result, which must be JSON.

    Returns:
        The result; None if the child was killed by SIGKILL.

    Raises:
        ConfigError: If this system cannot fork.
        AssertionError: If the child failed; it carries the child's traceback.
    """
    if not hasattr(os, "fork"):
        raise ConfigError("crash tests need os.fork, which this system does not have")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Idle threads of earlier event loops hold no lock that the child needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _be_child(function, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    kind, value = json.loads(data) if data else ("error", f"the child left with {status}")
    assert kind == "result", value
    return value


def _be_child(function: Callable[[], Any], writer: int) -> None:
    answer = ("error", "the child never ran")
    try:
        answer = ("result", function())
    except BaseException:  # noqa: ASYNC103  # a child must never return into its parent's code
        answer = ("error", traceback.format_exc())
    finally:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        os._exit(0)


async def _in_place(
    sync_fn: Callable[..., Any],
    /,
    *args: Any,
    limiter: trio.CapacityLimiter,  # noqa: ARG001  # one thread needs none
) -> Any:
    """Run *sync_fn* in this thread: the moments of death are the same, and reached sooner."""
    await trio.lowlevel.checkpoint()
    return sync_fn(*args)


def _store(directory: Path) -> SqliteCheckpoint:
    # A killed process takes nothing from the kernel: NORMAL is as good as FULL here.
    return SqliteCheckpoint(directory / "db", synchronous="NORMAL", run_sync=_in_place)


def die() -> None:
    """End this process as a power cut does: now, and without any handler."""
    os.kill(os.getpid(), signal.SIGKILL)


class KillStore(MortalStore):
    """A `MortalStore` whose death is that of the process."""

    writes: int

    def _before(self) -> Any:
        self.writes += 1
        if self.writes == self.dies_at and self.when == "before":
            die()
        return self.inner

    def _after(self) -> None:
        if self.writes == self.dies_at and self.when == "after":
            die()


class AsksOnce:
    """A model that asks for *calls* unless the history has them, and then says it is done."""

    def __init__(self, calls: Sequence[tuple[str, Mapping[str, Json]]]) -> None:
        self._calls = [
            ModelCall(name=name, arguments=json.dumps(dict(arguments)))
            for name, arguments in calls
        ]

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:  # noqa: ARG002
        """See `Model.respond`."""
        await trio.lowlevel.checkpoint()
        if any(isinstance(item, ToolCallItem) for item in request.items):
            return ModelOutput.answer("done")
        return ModelOutput.answer("", *self._calls)


_OPTIONAL: Final = (
    "sandboxed",
    "threaded",
    "check",
    "describe",
    "grant_key",
    "reconcile",
)


def traced(tool: object, trace: Path, moment: Moment | None) -> Tool:
    """Return *tool* so that each entry leaves a line in *trace*, and *moment* kills."""
    inner: Any = as_tool(tool)
    name: str = inner.definition.name

    async def call(
        _self: object, arguments: Mapping[str, Json], ctx: ToolContext, **options: Any
    ) -> str | ToolResult:
        with trace.open("a") as file:
            file.write(f"{name} {ctx.idempotency_key}\n")
        if moment == Moment(place="entered", tool=name):
            die()
        result: str | ToolResult = await inner.call(arguments, ctx, **options)
        if moment == Moment(place="left", tool=name):
            die()
        return result

    members: dict[str, Any] = {"call": call}
    for member in ("definition", "effect", "exclusive", "needs_approval", "timeout"):
        members[member] = getattr(inner, member)
    for member in _OPTIONAL:
        value = getattr(inner, member, None)
        if value is not None:
            members[member] = staticmethod(value) if callable(value) else value
    return cast("Tool", type("Traced", (), members)())


@attrs.frozen(kw_only=True)
class Story:
    """A turn in which a model asks for some calls at once; it can be lived and died in.

    Attributes:
        tools: The tools.
        calls: What the model asks for: names and arguments.
        on_approval: Who answers questions; default: the policy lets everything run.
    """

    tools: Sequence[object]
    calls: Sequence[tuple[str, Mapping[str, Json]]]
    on_approval: ApprovalHandler | None = None

    def moments(self) -> list[Moment]:
        """Return every moment at which a death can make a difference, in order.

        The writes are counted in a life that nothing disturbs.
        """
        with tempfile.TemporaryDirectory() as directory:
            writes: int = in_child(lambda: trio.run(self._count, Path(directory)))
        found: list[Moment] = []
        for number in range(1, writes + 1):
            found.append(Moment(place="before write", number=number))
            found.append(Moment(place="after write", number=number))
        for name in dict.fromkeys(name for name, _ in self.calls):
            found.append(Moment(place="entered", tool=name))
            found.append(Moment(place="left", tool=name))
        return found

    def crash(self, moment: Moment, policy: Recovery) -> Crash:
        """Live until *moment*, die, open again under *policy*, and go on until idle.

        The restart is checked besides: the history is one that a strict provider takes,
        the journal, the checkpoint and the finished turns agree, and a further
        opening changes nothing.

        Raises:
            AssertionError: If one of these does not hold.
        """
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            survived = in_child(lambda: trio.run(self._live, directory, moment))
            assert survived is None, f"nobody died {moment}"
            before, after = in_child(lambda: trio.run(self._reopen, directory, policy))
            _, again = in_child(lambda: trio.run(self._reopen, directory, policy))
            assert again == after, f"a second restart changed something ({moment})"
            return self._crash(moment, policy, before, after, directory)

    def _crash(
        self, moment: Moment, policy: Recovery, before: Any, after: Any, directory: Path
    ) -> Crash:
        entered: dict[str, int] = {}
        keys: dict[str, set[str]] = {}
        trace = directory / "trace"
        for line in trace.read_text().splitlines() if trace.exists() else []:
            name, _, key = line.partition(" ")
            entered[name] = entered.get(name, 0) + 1
            keys.setdefault(name, set()).add(key)
        return Crash(
            moment=moment,
            policy=policy,
            phase=None if before["phase"] is None else Phase(before["phase"]),
            lives=before["lives"],
            running=before["running"],
            outcomes=after["outcomes"],
            entered=entered,
            keys={name: frozenset(of_one) for name, of_one in keys.items()},
            turn=after["turn"],
        )

    # --- in the child

    def _config(
        self, store: Any, directory: Path, *, moment: Moment | None, policy: Recovery
    ) -> AgentConfig:
        model: Model = StrictModel(AsksOnce(self.calls))
        return AgentConfig(
            model=model,
            checkpoints=store,
            session_id=SESSION,
            tools=[traced(one, directory / "trace", moment) for one in self.tools],
            recovery=policy,
            approval=None if self.on_approval else ApprovalPolicy.FULL_ACCESS,
            on_approval=self.on_approval,
        )

    async def _live(self, directory: Path, moment: Moment | None) -> int:
        async with _store(directory) as inner:
            number = moment.number if moment is not None and moment.number else None
            after = moment is not None and moment.place == "after write"
            store = KillStore(inner, dies_at=number, when="after" if after else "before")
            config = self._config(store, directory, moment=moment, policy=Recovery.ABORT)
            async with create_agent(config) as agent:
                await agent.submit(UserInput(text="go"), id=MESSAGE)
                await agent.wait_idle()
            return store.writes

    async def _count(self, directory: Path) -> int:
        return await self._live(directory, None)

    async def _reopen(self, directory: Path, policy: Recovery) -> tuple[Any, Any]:
        """Open and go on until idle; report what was on disk before and what is after."""
        async with _store(directory) as store:
            before = await self._look(store)
            config = self._config(store, directory, moment=None, policy=policy)
            async with create_agent(config) as agent:
                await agent.wait_idle()
            assert isinstance(config.model, StrictModel)
            assert not config.model.refusals, config.model.refusals
            return before, await self._look(store)

    async def _look(self, store: SqliteCheckpoint) -> dict[str, Any]:
        """Report what is on disk, and check that it agrees with itself."""
        checkpoint = await store.load(SESSION)
        if checkpoint is None:
            return {
                "phase": None, "lives": {}, "running": False, "outcomes": {}, "turn": None
            }  # fmt: skip
        check_checkpoint(checkpoint)
        events = (await store.events_after(SESSION, 0, 100_000)).events
        page = await store.execution_page(SESSION, limit=1_000)
        effects = [as_tool(one) for one in self.tools]
        check = JournalCheck(
            repeatable={
                one.definition.name
                for one in effects
                if one.effect in {"read_only", "idempotent"}
            }
        )
        check.read(events)
        check.settle(checkpoint, list(reversed(page.executions)))
        ends = [event.msg for event in events if isinstance(event.msg, ToolCallEnd)]
        turn = None
        for event in events:
            if isinstance(event.msg, TurnComplete):
                turn = "completed"
            elif isinstance(event.msg, TurnAborted):
                turn = event.msg.outcome
        return {
            "phase": phase_of(checkpoint).value,
            "lives": _lives(checkpoint, ends),
            "running": checkpoint.active_execution is not None,
            "outcomes": {end.name: end.outcome for end in ends},
            "turn": turn,
        }


def _lives(checkpoint: Checkpoint, ends: Sequence[ToolCallEnd]) -> dict[str, str]:
    lives: dict[str, str] = {end.name: end.outcome for end in ends}
    for call in checkpoint.pending_tools:
        lives[call.name] = call.outcome or ("waiting" if call.waiting else call.status)
    return lives
