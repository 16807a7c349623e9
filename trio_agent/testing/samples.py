"""One of every record, with every field set: for golden files, renderers and documentation."""

from __future__ import annotations

from typing import Final

from trio_agent.protocol import events, items, ops
from trio_agent.protocol.frontend import Block
from trio_agent.protocol.text import Json
from trio_agent.protocol.usage import TokenUsage

_USAGE: Final = TokenUsage(
    input_tokens=120,
    cached_input_tokens=100,
    cache_write_input_tokens=7,
    output_tokens=30,
    reasoning_output_tokens=12,
    total_tokens=150,
)
_ATTACHMENT: Final = items.Attachment(
    id="3c1b", name="plan.pdf", media_type="application/pdf", size=2_048
)
_CONTEXT: Final = events.SessionContext(
    tenant_id="tenant",
    user_id="user",
    user_name="Ada",
    workspace_id="space",
    workspace_label="Space",
    origin_label="cli",
)
_MODEL: Final = events.ModelChanged(
    route="fast", model="demo", reasoning_effort="low", model_context_window=272_000
)
_ARGUMENTS: Final[dict[str, Json]] = {
    "path": "notes/naïve 🎉.txt",
    "lines": [1, 2.5, None, True],
    "deep": {"empty": {}},
}
_SEALED: Final = items.Sealed(provider="openai-responses", data={"id": "rs_1", "summary": []})

OPS: Final[tuple[ops.Op, ...]] = (
    ops.UserInput(
        text="Hello, wörld 🎉",
        attachments=(_ATTACHMENT,),
        delivery="steer",
        target_turn_id="turn-1",
    ),
    ops.EditQueued("message-1", "better"),
    ops.CancelQueued("message-1"),
    ops.Interrupt("turn-1"),
    ops.ExecApproval("approval-1", ops.Approved(arguments=_ARGUMENTS, network=True)),
    ops.SetModel("fast"),
    ops.ResumeSession("session-2"),
    ops.CapabilityCommand(capability="tasks", command="list", arguments="--all", input="more"),
)
"""One of every op."""

DECISIONS: Final[tuple[ops.Decision, ...]] = (
    ops.Approved(arguments=_ARGUMENTS, network=True),
    ops.ApprovedForSession(),
    ops.Denied("not today"),
    ops.Abort(),
)
"""One of every answer to an approval request."""

ITEMS: Final[tuple[items.Item, ...]] = (
    items.UserItem(
        text="Hello, wörld 🎉",
        attachments=(_ATTACHMENT,),
        submission_id="message-1",
        internal="tasks",
    ),
    items.AssistantItem(text="Let me look.", phase="commentary", sealed=_SEALED),
    items.ReasoningItem(text="Which file?", sealed=_SEALED),
    items.ToolCallItem(
        call_id="call-1",
        name="read_file",
        arguments=_ARGUMENTS,
        provider_call_id="toolu_1",
        sealed=_SEALED,
    ),
    items.ToolOutputItem(call_id="call-1", output="no such file", is_error=True),
)
"""One of every transcript item; the call and the output belong together."""

EVENTS: Final[tuple[events.EventMsg, ...]] = (
    events.SessionConfigured(
        session_id="session-1", context=_CONTEXT, model=_MODEL, recovered=True
    ),
    events.SessionHistory(
        (
            events.UserMessage(turn_id="history-3-0", text="earlier"),
            events.ToolCallBegin(
                turn_id="history-4-0", call_id="call-0", name="read_file", arguments=_ARGUMENTS
            ),
        )
    ),
    events.SessionResumeRequested(session_id="session-2", context=_CONTEXT),
    events.SubmissionAccepted(delivery="queue", digest="9f86d081"),
    events.SubmissionRejected(code="stale_turn", message="no turn runs"),
    events.QueueChanged(
        (events.QueuedEntry(submission_id="message-1", delivery="steer", text="also this"),)
    ),
    events.TurnStarted(turn_id="turn-1", model_context_window=272_000),
    events.UserMessage(
        turn_id="turn-1", text="Hello, wörld 🎉", attachments=(_ATTACHMENT,), delivery="steer"
    ),
    events.ModelStepStarted(
        turn_id="turn-1",
        step_id="step-1",
        step_index=0,
        attempt=2,
        route="fast",
        request_digest="2c26b46b",
        started_at_ms=1_700_000_000_000,
    ),
    events.AgentMessageDelta(
        turn_id="turn-1", step_id="step-1", text="Let me", phase="commentary"
    ),
    events.AgentReasoningDelta(turn_id="turn-1", step_id="step-1", text="Which"),
    events.AgentMessage(
        turn_id="turn-1",
        step_id="step-1",
        content=(
            events.ContentPart(phase="reasoning", text="Which file?"),
            events.ContentPart(phase="commentary", text="Let me look."),
            events.ContentPart(phase="final_answer", text="Done 🎉"),
        ),
    ),
    events.ModelStepCompleted(
        turn_id="turn-1",
        step_id="step-1",
        step_index=0,
        outcome="completed",
        started_at_ms=1_700_000_000_000,
        completed_at_ms=1_700_000_000_900,
        finish_reason="stop",
        usage=_USAGE,
        stream_metrics=(
            events.StreamMetrics(
                phase="final_answer",
                first_delta_at_ms=1_700_000_000_100,
                last_delta_at_ms=1_700_000_000_800,
                chunk_count=9,
                utf8_bytes=204,
                longest_gap_ms=320,
            ),
        ),
        retry_in_ms=250,
    ),
    events.ToolCallBegin(
        turn_id="turn-1", call_id="call-1", name="read_file", arguments=_ARGUMENTS
    ),
    events.ToolCallEnd(
        turn_id="turn-1",
        call_id="call-1",
        name="read_file",
        output="no such file",
        outcome="failed",
        is_error=True,
    ),
    events.ToolProgress(turn_id="turn-1", call_id="call-1", message="half", fraction=0.5),
    events.ExecApprovalRequest(
        id="approval-1",
        turn_id="turn-1",
        call_id="call-1",
        name="run",
        arguments=_ARGUMENTS,
        summary="run `make`",
        reason="it changes files",
    ),
    events.ApprovalResolved(
        id="approval-1", call_id="call-1", decision=ops.Denied("not today")
    ),
    _MODEL,
    events.TokenCount(total=_USAGE, last=_USAGE, turn=_USAGE, model_context_window=272_000),
    events.Notice(
        capability="tasks",
        text="saved",
        tone="success",
        block=Block(
            id="block-1",
            title="a.txt",
            text="-a\n+b\n",
            tone="warning",
            format="unified_diff",
            state="pending",
        ),
    ),
    events.Widget(
        capability="tasks", id="count", text="3 open", slot="navigation", tone="error"
    ),
    events.RemoveWidget(capability="tasks", id="count"),
    events.TurnComplete(turn_id="turn-1", finish_reason="length"),
    events.TurnAborted(turn_id="turn-1", reason="interrupted", outcome="failed"),
    events.Error(
        kind="provider", message="overloaded", retryable=True, status=529, retry_after=1.5
    ),
    events.Warning(code="route_gone", message="the saved route is not registered"),
    events.HistoryGap(first=3, last=17),
)
"""One of every event message."""

SUBMISSION: Final = ops.Submission("message-1", OPS[0])
EVENT: Final = events.Event(
    sequence=42,
    recorded_at_ms=1_700_000_000_000,
    submission_id="message-1",
    msg=events.TurnStarted(turn_id="turn-1", model_context_window=272_000),
)
