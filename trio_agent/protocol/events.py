"""Events: what a session tells. Every fact is durable before a reader sees it."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import attrs

from trio_agent.protocol.frontend import Block, Slot, Tone
from trio_agent.protocol.items import Attachment, Phase
from trio_agent.protocol.ops import Decision
from trio_agent.protocol.text import Json
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Record

Delivery: TypeAlias = Literal["turn", "steer", "queue"]
StepOutcome: TypeAlias = Literal["completed", "failed", "interrupted", "retrying"]
CallOutcome: TypeAlias = Literal["finished", "failed", "denied", "not_started", "unknown"]
TurnOutcome: TypeAlias = Literal["completed", "aborted", "failed"]
FinishReason: TypeAlias = Literal[
    "stop",
    "length",
    "refusal",
    "content_filter",
    "step_limit",
    "budget",
    "hook",
    "interrupted",
    "error",
]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class SessionContext(Record):
    """Labels of a session, for people and logs; never authorization."""

    tenant_id: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    workspace_id: str | None = None
    workspace_label: str | None = None
    origin_label: str | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ModelChanged(Record):
    """The route that the session asks from now on."""

    tag: ClassVar[str] = "model_changed"

    route: str
    model: str
    reasoning_effort: str | None = None
    model_context_window: int | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class SessionConfigured(Record):
    """The first event of an opening. ``recovered``: the one before did not end in order."""

    tag: ClassVar[str] = "session_configured"

    session_id: str
    context: SessionContext
    model: ModelChanged
    recovered: bool = False


@attrs.frozen(eq=False, repr=False)
class SessionHistory(Record):
    """What a frontend that starts now missed; has a number but no row in the journal."""

    tag: ClassVar[str] = "session_history"

    events: tuple[EventMsg, ...]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class SessionResumeRequested(Record):
    """A `ResumeSession` was granted: the frontend may open that session."""

    tag: ClassVar[str] = "session_resume_requested"

    session_id: str
    context: SessionContext


@attrs.frozen(kw_only=True, eq=False, repr=False)
class SubmissionAccepted(Record):
    """The op of this event's submission id is durable; ``digest`` tells it if it recurs."""

    tag: ClassVar[str] = "submission_accepted"

    delivery: Delivery | None = None
    digest: str = ""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class SubmissionRejected(Record):
    """The op of this event's submission id was refused and changed nothing."""

    tag: ClassVar[str] = "submission_rejected"

    code: str
    message: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class QueuedEntry(Record):
    """A message that waits, as a frontend shows it."""

    submission_id: str
    delivery: Delivery
    text: str


@attrs.frozen(eq=False, repr=False)
class QueueChanged(Record):
    """All messages that wait now, in the order in which they will enter."""

    tag: ClassVar[str] = "queue_changed"

    queued: tuple[QueuedEntry, ...]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TurnStarted(Record):
    """A turn began."""

    tag: ClassVar[str] = "turn_started"

    turn_id: str
    model_context_window: int | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class UserMessage(Record):
    """A message entered the context; ``delivery`` says how it really entered."""

    tag: ClassVar[str] = "user_message"

    turn_id: str
    text: str
    attachments: tuple[Attachment, ...] = ()
    delivery: Delivery = "turn"


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ModelStepStarted(Record):
    """A request is about to be sent. Every attempt has its own ``step_id``.

    Attempts of one step share the ``step_index`` and count up ``attempt`` from 1.
    ``request_digest`` names the exact request.
    """

    tag: ClassVar[str] = "model_step_started"

    turn_id: str
    step_id: str
    step_index: int
    attempt: int
    route: str
    request_digest: str
    started_at_ms: int


@attrs.frozen(kw_only=True, eq=False, repr=False)
class AgentMessageDelta(Record):
    """More text of an answer; replaced by the step's `AgentMessage` when it is complete."""

    tag: ClassVar[str] = "agent_message_delta"

    turn_id: str
    step_id: str
    text: str
    phase: Literal["commentary", "final_answer"] = "final_answer"


@attrs.frozen(kw_only=True, eq=False, repr=False)
class AgentReasoningDelta(Record):
    """More text of a model's thoughts; replaced like `AgentMessageDelta`."""

    tag: ClassVar[str] = "agent_reasoning_delta"

    turn_id: str
    step_id: str
    text: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ContentPart(Record):
    """One piece of a complete answer."""

    phase: Phase
    text: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class AgentMessage(Record):
    """Everything readable that one completed step said, in order."""

    tag: ClassVar[str] = "agent_message"

    turn_id: str
    step_id: str
    content: tuple[ContentPart, ...]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class StreamMetrics(Record):
    """How one phase of a step arrived; times are the recorder's, never running backwards."""

    phase: Phase
    first_delta_at_ms: int
    last_delta_at_ms: int
    chunk_count: int
    utf8_bytes: int
    longest_gap_ms: int


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ModelStepCompleted(Record):
    """An attempt ended. ``retrying`` says that another follows after ``retry_in_ms``."""

    tag: ClassVar[str] = "model_step_completed"

    turn_id: str
    step_id: str
    step_index: int
    outcome: StepOutcome
    started_at_ms: int
    completed_at_ms: int
    finish_reason: FinishReason | None = None
    usage: TokenUsage | None = None
    stream_metrics: tuple[StreamMetrics, ...] = ()
    retry_in_ms: int | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ToolCallBegin(Record):
    """A call's handler is about to be entered; this was committed before it was."""

    tag: ClassVar[str] = "tool_call_begin"

    turn_id: str
    call_id: str
    name: str
    arguments: dict[str, Json]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ToolCallEnd(Record):
    """A call's one outcome. ``is_error`` is true for all but ``finished``."""

    tag: ClassVar[str] = "tool_call_end"

    turn_id: str
    call_id: str
    name: str
    output: str
    outcome: CallOutcome
    is_error: bool = False


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ToolProgress(Record):
    """What a running tool reports; has no row in the journal."""

    tag: ClassVar[str] = "tool_progress"

    turn_id: str
    call_id: str
    message: str
    fraction: float | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ExecApprovalRequest(Record):
    """A call waits for an `ExecApproval` of this ``id``."""

    tag: ClassVar[str] = "exec_approval_request"

    id: str
    turn_id: str
    call_id: str
    name: str
    arguments: dict[str, Json]
    summary: str = ""
    reason: str = ""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ApprovalResolved(Record):
    """That request is closed; None as decision means that its turn ended first."""

    tag: ClassVar[str] = "approval_resolved"

    id: str
    call_id: str
    decision: Decision | None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TokenCount(Record):
    """Usage of the session, the last response and the turn."""

    tag: ClassVar[str] = "token_count"

    total: TokenUsage
    last: TokenUsage | None = None
    turn: TokenUsage | None = None
    model_context_window: int | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Notice(Record):
    """A capability has something to say."""

    tag: ClassVar[str] = "notice"

    capability: str
    text: str
    tone: Tone = "neutral"
    block: Block | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Widget(Record):
    """A capability shows or replaces a small live element."""

    tag: ClassVar[str] = "widget"

    capability: str
    id: str
    text: str
    slot: Slot = "header"
    tone: Tone = "neutral"


@attrs.frozen(kw_only=True, eq=False, repr=False)
class RemoveWidget(Record):
    """A capability takes its element away."""

    tag: ClassVar[str] = "remove_widget"

    capability: str
    id: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TurnComplete(Record):
    """The turn ended well."""

    tag: ClassVar[str] = "turn_complete"

    turn_id: str
    finish_reason: FinishReason = "stop"


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TurnAborted(Record):
    """The turn was stopped (``aborted``) or could not go on (``failed``)."""

    tag: ClassVar[str] = "turn_aborted"

    turn_id: str
    reason: str
    outcome: Literal["aborted", "failed"] = "aborted"


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Error(Record):
    """Something failed; ``kind`` is the stable word of `trio_agent.errors`."""

    tag: ClassVar[str] = "error"

    kind: str
    message: str
    retryable: bool = False
    status: int | None = None
    retry_after: float | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Warning(Record):  # noqa: A001  # the wire's word; not exported at top level
    """Something a user should know; the session goes on. ``code`` is stable."""

    tag: ClassVar[str] = "warning"

    code: str
    message: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class HistoryGap(Record):
    """The events numbered ``first`` to ``last`` were pruned and cannot be read any more."""

    tag: ClassVar[str] = "history_gap"

    first: int
    last: int


EventMsg: TypeAlias = (
    SessionConfigured
    | SessionHistory
    | SessionResumeRequested
    | SubmissionAccepted
    | SubmissionRejected
    | QueueChanged
    | TurnStarted
    | UserMessage
    | ModelStepStarted
    | AgentMessageDelta
    | AgentReasoningDelta
    | AgentMessage
    | ModelStepCompleted
    | ToolCallBegin
    | ToolCallEnd
    | ToolProgress
    | ExecApprovalRequest
    | ApprovalResolved
    | ModelChanged
    | TokenCount
    | Notice
    | Widget
    | RemoveWidget
    | TurnComplete
    | TurnAborted
    | Error
    | Warning
    | HistoryGap
)

EVENT_TYPES: tuple[type[EventMsg], ...] = (
    SessionConfigured,
    SessionHistory,
    SessionResumeRequested,
    SubmissionAccepted,
    SubmissionRejected,
    QueueChanged,
    TurnStarted,
    UserMessage,
    ModelStepStarted,
    AgentMessageDelta,
    AgentReasoningDelta,
    AgentMessage,
    ModelStepCompleted,
    ToolCallBegin,
    ToolCallEnd,
    ToolProgress,
    ExecApprovalRequest,
    ApprovalResolved,
    ModelChanged,
    TokenCount,
    Notice,
    Widget,
    RemoveWidget,
    TurnComplete,
    TurnAborted,
    Error,
    Warning,
    HistoryGap,
)

TRANSIENT_TYPES = (SessionHistory, SessionResumeRequested, ToolProgress, Widget, RemoveWidget)
"""These take a number in the journal but leave no row: only a reader of now sees them."""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Event(Record):
    """One message with its place in the session's journal.

    ``submission_id`` names the op that caused it, if one did. ``sequence``
    starts at 1 and never repeats; order is by it, never by the clock.
    """

    sequence: int
    recorded_at_ms: int
    submission_id: str | None = None
    msg: EventMsg


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Draft(Record):
    """An event that has no number yet: what the engine hands to the store."""

    recorded_at_ms: int
    submission_id: str | None = None
    msg: EventMsg
