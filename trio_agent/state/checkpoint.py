"""`Checkpoint`: everything a session is, between two commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import attrs

from trio_agent.errors import CorruptStoreError
from trio_agent.protocol.events import (
    CallOutcome,
    Delivery,
    FinishReason,
    SessionContext,
    TurnOutcome,
)
from trio_agent.protocol.items import Attachment, UserItem
from trio_agent.protocol.limits import MAX_QUEUED_MESSAGES
from trio_agent.protocol.text import Json
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Record
from trio_agent.state.item_log import ItemLog, as_log

CHECKPOINT_VERSION: Final = 1

Effect: TypeAlias = Literal["undeclared", "read_only", "idempotent", "destructive"]
"""What running a call does to the world, in MCP's words; decides what a restart may do."""

CallStatus: TypeAlias = Literal["admitted", "begun", "ended"]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class QueuedMessage(Record):
    """A message that waits for its place in the context.

    ``owner`` is the middleware that routed it, ``id`` its submission.
    A ``steer`` names the turn that it joins; ``turn`` and ``queue`` start one.
    """

    owner: str
    id: str
    boundary: Delivery
    text: str
    turn_id: str | None = None
    attachments: tuple[Attachment, ...] = ()


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Approval(Record):
    """A question about one call. ``decided`` is set by the commit that received the answer."""

    id: str
    reason: str = ""
    summary: str = ""
    decided: bool = False


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ToolCall(Record):
    """One call of the open batch and its durable life.

    ``arguments`` are what runs; ``requested`` is what the model asked where hooks
    or an approval changed it. A call without more detail counts as begun: nobody
    can say that it was not.
    """

    call_id: str
    name: str
    arguments: dict[str, Json]
    requested: dict[str, Json] | None = None
    status: CallStatus = "begun"
    outcome: CallOutcome | None = None
    output: str = ""
    effect: Effect = "undeclared"
    exclusive: bool = True
    approval: Approval | None = None
    network: bool = False
    edited: bool = False
    hidden: tuple[UserItem, ...] = ()

    @property
    def waiting(self) -> bool:
        """Whether this call waits for somebody's decision."""
        return (
            self.status == "admitted"
            and self.approval is not None
            and not self.approval.decided
        )


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ActiveModelStep(Record):
    """The request that is out now."""

    step_id: str
    step_index: int
    started_at_ms: int
    attempt: int = 1
    route: str = ""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ActiveExecution(Record):
    """The running turn and its counters.

    ``next_model_step`` is the number of completed steps, ``attempts`` how often
    the next one was tried. ``completing`` is set when the model has ended the turn
    and only stop hooks stand before its end; ``stop_hook_active`` when one of them
    has already made it go on. ``interrupted`` is the reason for which somebody has
    asked for its end.
    """

    submission_id: str
    turn_id: str
    started_at_ms: int
    model_calls: int = 0
    tool_calls: int = 0
    failed_tool_calls: int = 0
    usage: TokenUsage = TokenUsage()
    next_model_step: int = 0
    attempts: int = 0
    route: str | None = None
    completing: FinishReason | None = None
    stop_hook_active: bool = False
    interrupted: str | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ExecutionRecord(Record):
    """A turn that is over."""

    session_id: str
    submission_id: str
    turn_id: str
    started_at_ms: int
    finished_at_ms: int
    outcome: TurnOutcome
    finish_reason: FinishReason
    model_calls: int = 0
    tool_calls: int = 0
    failed_tool_calls: int = 0
    usage: TokenUsage = TokenUsage()

    @property
    def elapsed_ms(self) -> int:
        """Return how long it took by the wall clock, never below zero."""
        return self.finished_at_ms - self.started_at_ms


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ExecutionStats(Record):
    """Sums over all finished turns of a session."""

    run_count: int = 0
    failed_run_count: int = 0
    aborted_run_count: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    failed_tool_calls: int = 0
    elapsed_ms: int = 0
    usage: TokenUsage = TokenUsage()


@attrs.frozen(kw_only=True, eq=False, repr=False)
class AgentRole(Record):
    """Whether a session is somebody's own, or works for a turn of another session."""

    kind: Literal["main", "subagent"] = "main"
    parent_session_id: str | None = None
    parent_turn_id: str | None = None

    @classmethod
    def main(cls) -> AgentRole:
        """Return the role of a session that a user opened."""
        return cls()

    @classmethod
    def subagent(cls, parent_session_id: str, parent_turn_id: str) -> AgentRole:
        """Return the role of a session that a tool or middleware opened for a turn."""
        return cls(
            kind="subagent", parent_session_id=parent_session_id, parent_turn_id=parent_turn_id
        )


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Checkpoint(Record):
    """The durable unit: one session between two commits.

    The head (everything but ``context``, ``queue`` and ``pending_tools``) is
    small; those three grow and the store keeps them as rows. ``states`` is the durable state of
    middlewares and tools by name. ``grants`` are remembered approvals.
    ``instructions_digest`` and ``tools_digest`` name stored content.
    """

    version: int = CHECKPOINT_VERSION
    session_id: str
    sequence: int = 0
    session_context: SessionContext = SessionContext()
    metadata: Mapping[str, Json] = attrs.field(factory=dict[str, Json])
    role: AgentRole = AgentRole()
    first_user_message: str | None = None
    model_route: str | None = None
    context: ItemLog = attrs.field(factory=ItemLog, converter=as_log)
    context_epoch: int = 0
    total_usage: TokenUsage = TokenUsage()
    last_usage: TokenUsage | None = None
    queue: tuple[QueuedMessage, ...] = ()
    active_execution: ActiveExecution | None = None
    active_model_step: ActiveModelStep | None = None
    pending_tools: tuple[ToolCall, ...] = ()
    execution_stats: ExecutionStats = ExecutionStats()
    grants: tuple[str, ...] = ()
    states: Mapping[str, Json] = attrs.field(factory=dict[str, Json])
    instructions_digest: str | None = None
    tools_digest: str | None = None

    @classmethod
    def empty(cls, session_id: str) -> Checkpoint:
        """Return the checkpoint of a session that has done nothing yet, at sequence 0."""
        return cls(session_id=session_id)

    @property
    def turn_id(self) -> str | None:
        """The running turn, if one runs."""
        return None if self.active_execution is None else self.active_execution.turn_id


def validate_checkpoint(checkpoint: Checkpoint) -> None:
    """Check what must hold of every durable checkpoint, before each save and after each load.

    Raises:
        CorruptStoreError: It names the first rule that does not hold.
    """
    problem = _problem(checkpoint)
    if problem is not None:
        raise CorruptStoreError(f"session {checkpoint.session_id!r}: {problem}")


def _problem(checkpoint: Checkpoint) -> str | None:
    if checkpoint.version != CHECKPOINT_VERSION:
        return f"checkpoint version {checkpoint.version}, expected {CHECKPOINT_VERSION}"
    if checkpoint.sequence < 0 or checkpoint.context_epoch < 0:
        return "a counter is negative"
    return (
        _problem_of_the_turn(checkpoint)
        or (_problem_of_calls(checkpoint.pending_tools) if checkpoint.pending_tools else None)
        or (_problem_of_the_queue(checkpoint) if checkpoint.queue else None)
    )


def _problem_of_the_turn(checkpoint: Checkpoint) -> str | None:
    execution, step = checkpoint.active_execution, checkpoint.active_model_step
    if execution is None:
        if step is not None:
            return "a model step is active without a turn"
        if checkpoint.pending_tools:
            return "tool calls are pending without a turn"
        return None
    if not execution.turn_id.strip() or not execution.submission_id.strip():
        return "the active turn has a blank id"
    if execution.failed_tool_calls > execution.tool_calls:
        return "more failed tool calls than tool calls"
    if step is not None and not step.step_id.strip():
        return "the active model step has a blank id"
    if execution.completing is not None and (step or checkpoint.pending_tools):
        return "a completing turn has a model step or tool calls"
    if step is not None and checkpoint.pending_tools:
        return "a model step is active while tool calls are pending"
    return None


def _problem_of_calls(calls: Sequence[ToolCall]) -> str | None:
    if len({call.call_id for call in calls}) < len(calls):
        return "two pending calls have one id"
    if any((call.status == "ended") != (call.outcome is not None) for call in calls):
        return "a call has an outcome and no end, or an end and no outcome"
    return None


def _problem_of_the_queue(checkpoint: Checkpoint) -> str | None:
    queue = checkpoint.queue
    if len(queue) > MAX_QUEUED_MESSAGES:
        return f"{len(queue)} queued messages; at most {MAX_QUEUED_MESSAGES}"
    turn = checkpoint.turn_id
    for message in queue:
        if message.boundary == "steer" and (turn is None or message.turn_id != turn):
            return "a steer waits for a turn that does not run"
    if len({(message.owner, message.id) for message in queue}) < len(queue):
        return "two queued messages have one id"
    return None
