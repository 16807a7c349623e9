"""What each change tells, and in which order."""

from __future__ import annotations

import attrs
import pytest
from msgspec.structs import replace

from trio_agent.errors import InternalError
from trio_agent.protocol import events as ev
from trio_agent.protocol.items import (
    AssistantItem,
    Attachment,
    ReasoningItem,
    ToolCallItem,
    UserItem,
)
from trio_agent.protocol.ops import Approved
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state import changes as ch
from trio_agent.state.checkpoint import Approval, Checkpoint, QueuedMessage, ToolCall
from trio_agent.state.machine import advance
from trio_agent.state.narration import approval_request, narrate


def tell(
    checkpoint: Checkpoint, change: ch.Change
) -> tuple[list[tuple[str | None, ev.EventMsg]], Checkpoint]:
    after = advance(checkpoint, change)
    return narrate(checkpoint, change, after), after


def message(message_id: str, boundary: ev.Delivery = "queue") -> QueuedMessage:
    turn_id = "t" if boundary == "steer" else None
    return QueuedMessage(
        owner="messages", id=message_id, boundary=boundary, text="text", turn_id=turn_id
    )


def entry(message_id: str, boundary: ev.Delivery = "queue") -> ev.QueuedEntry:
    return ev.QueuedEntry(submission_id=message_id, delivery=boundary, text="text")


PAPER = Attachment(id="f", name="paper.pdf", media_type="application/pdf", size=9)
BEGAN = ch.TurnBegan(
    submission_id="m",
    turn_id="t",
    started_at_ms=5,
    text="hi",
    attachments=(PAPER,),
    delivery="queue",
    context_window=1000,
)
IDLE = attrs.evolve(Checkpoint.empty("s"), queue=(message("m"), message("n")))
READY = advance(IDLE, BEGAN)
STEP = ch.StepBegan(step_id="st", started_at_ms=6, route="r", request_digest="d")
REQUESTING = advance(READY, STEP)
CALLS = (
    ToolCall(call_id="a", name="x", arguments={"n": 1}, status="admitted"),
    ToolCall(call_id="b", name="y", arguments={}, status="admitted", approval=Approval(id="q")),
)
ASKED = ch.StepEnded(
    outcome="completed",
    completed_at_ms=7,
    items=tuple(
        ToolCallItem(call_id=c.call_id, name=c.name, arguments=c.arguments) for c in CALLS
    ),
    calls=CALLS,
)
EXECUTING = advance(REQUESTING, ASKED)


def test_a_turn_tells_its_queue_its_start_and_its_message_under_the_messages_id() -> None:
    told, _ = tell(IDLE, BEGAN)
    assert told == [
        (None, ev.QueueChanged((entry("n"),))),
        ("m", ev.TurnStarted(turn_id="t", model_context_window=1000)),
        ("m", ev.UserMessage(turn_id="t", text="hi", attachments=(PAPER,), delivery="queue")),
    ]


def test_a_refused_message_is_not_told() -> None:
    told, _ = tell(IDLE, replace(BEGAN, text=None, attachments=()))
    assert [type(msg) for _, msg in told] == [ev.QueueChanged, ev.TurnStarted]


def test_the_queue_is_told_whole_after_every_change_of_it() -> None:
    told, after = tell(IDLE, ch.MessageQueued(message=message("o")))
    assert told == [(None, ev.QueueChanged((entry("m"), entry("n"), entry("o"))))]
    told, after = tell(after, ch.QueueCancelled(submission_id="m"))
    assert told == [(None, ev.QueueChanged((entry("n"), entry("o"))))]
    told, after = tell(after, ch.QueueEdited(submission_id="n", text="text", new_id="e"))
    assert told == [(None, ev.QueueChanged((entry("e"), entry("o"))))]


def test_a_steer_is_told_as_a_message_of_its_turn() -> None:
    waiting = attrs.evolve(READY, queue=(message("s", "steer"),))
    told, _ = tell(waiting, ch.SteerJoined(submission_id="s"))
    assert told == [
        (None, ev.QueueChanged(())),
        ("s", ev.UserMessage(turn_id="t", text="text", delivery="steer")),
    ]


def test_a_step_tells_its_start_and_end_with_one_id() -> None:
    told, requesting = tell(READY, STEP)
    assert told == [
        (
            None,
            ev.ModelStepStarted(
                turn_id="t",
                step_id="st",
                step_index=0,
                attempt=1,
                route="r",
                request_digest="d",
                started_at_ms=6,
            ),
        )
    ]
    usage = TokenUsage(total_tokens=3)
    answered = ch.StepEnded(
        outcome="completed",
        completed_at_ms=1,
        finish_reason="stop",
        usage=usage,
        items=(
            ReasoningItem(text="hm"),
            ReasoningItem(),
            AssistantItem(text="first", phase="commentary"),
            AssistantItem(text="then"),
        ),
        completing="stop",
    )
    told, _ = tell(requesting, answered)
    assert told == [
        (
            None,
            ev.ModelStepCompleted(
                turn_id="t",
                step_id="st",
                step_index=0,
                outcome="completed",
                started_at_ms=6,
                completed_at_ms=6,
                finish_reason="stop",
                usage=usage,
            ),
        ),
        (
            None,
            ev.AgentMessage(
                turn_id="t",
                step_id="st",
                content=(
                    ev.ContentPart(phase="reasoning", text="hm"),
                    ev.ContentPart(phase="commentary", text="first"),
                    ev.ContentPart(phase="final_answer", text="then"),
                ),
            ),
        ),
        (None, ev.TokenCount(total=usage, last=usage, turn=usage)),
    ]


def test_a_step_that_says_nothing_tells_its_end_alone() -> None:
    retry = ch.StepEnded(outcome="retrying", completed_at_ms=9, retry_in_ms=200)
    told, _ = tell(REQUESTING, retry)
    ((_, completed),) = told
    assert isinstance(completed, ev.ModelStepCompleted)
    assert (completed.outcome, completed.retry_in_ms) == ("retrying", 200)
    assert [type(msg) for _, msg in tell(REQUESTING, ASKED)[0]] == [ev.ModelStepCompleted]


def test_a_call_tells_its_begin_with_what_runs_and_its_end() -> None:
    told, begun = tell(EXECUTING, ch.CallsBegan(call_ids=("a",)))
    assert told == [
        (None, ev.ToolCallBegin(turn_id="t", call_id="a", name="x", arguments={"n": 1}))
    ]
    told, _ = tell(begun, ch.CallEnded(call_id="a", outcome="finished", output="o"))
    assert told == [
        (
            None,
            ev.ToolCallEnd(turn_id="t", call_id="a", name="x", output="o", outcome="finished"),
        )
    ]


def test_an_approval_is_asked_and_resolved_under_one_id() -> None:
    bare = attrs.evolve(EXECUTING, pending_tools=(CALLS[0],))
    question = Approval(id="q2", reason="why", summary="what")
    told, asked = tell(bare, ch.ApprovalAsked(call_id="a", approval=question))
    request = ev.ExecApprovalRequest(
        id="q2",
        turn_id="t",
        call_id="a",
        name="x",
        arguments={"n": 1},
        summary="what",
        reason="why",
    )
    assert told == [(None, request)]
    assert approval_request(asked, asked.pending_tools[0]) == request
    decision = Approved(arguments={"n": 2})
    told, decided = tell(asked, ch.ApprovalDecided(call_id="a", decision=decision))
    assert told == [(None, ev.ApprovalResolved(id="q2", call_id="a", decision=decision))]
    told, _ = tell(decided, ch.CallsBegan(call_ids=("a",)))
    ((_, begin),) = told
    assert isinstance(begin, ev.ToolCallBegin)
    assert begin.arguments == {"n": 2}


def test_a_question_whose_call_ends_first_is_closed_without_a_decision() -> None:
    told, _ = tell(EXECUTING, ch.CallEnded(call_id="b", outcome="not_started", output="o"))
    assert told[0] == (None, ev.ApprovalResolved(id="q", call_id="b", decision=None))
    assert [type(msg) for _, msg in told] == [ev.ApprovalResolved, ev.ToolCallEnd]
    decided = advance(EXECUTING, ch.ApprovalDecided(call_id="b", decision=Approved()))
    told, _ = tell(decided, ch.CallEnded(call_id="b", outcome="not_started", output="o"))
    assert [type(msg) for _, msg in told] == [ev.ToolCallEnd]


@pytest.mark.parametrize("outcome", ["completed", "aborted", "failed"])
def test_the_terminal_event_of_a_turn_comes_last(outcome: ev.TurnOutcome) -> None:
    waiting = attrs.evolve(READY, queue=(message("s", "steer"),))
    ended = ch.TurnEnded(
        outcome=outcome, finish_reason="stop", finished_at_ms=9, reason="because"
    )
    told, _ = tell(waiting, ended)
    assert told[0] == (None, ev.QueueChanged((entry("s"),)))
    terminal: ev.EventMsg = (
        ev.TurnComplete(turn_id="t", finish_reason="stop")
        if outcome == "completed"
        else ev.TurnAborted(turn_id="t", reason="because", outcome=outcome)
    )
    assert told[1:] == [(None, terminal)]


def test_changes_that_readers_need_not_know_tell_nothing() -> None:
    silent: list[ch.Change] = [
        ch.MetadataReplaced(metadata={}),
        ch.StateSaved(name="x", value=1),
        ch.GrantAdded(key="k"),
        ch.UsageCounted(usage=TokenUsage()),
        ch.ContentNamed(instructions_digest="i", tools_digest="t"),
        ch.ContextChanged(items=(UserItem(text="x", internal="y"),)),
    ]
    silent.append(ch.TurnInterrupted(reason="enough"))
    silent.append(ch.RouteChanged(model=ev.ModelChanged(route="r", model="m"), quiet=True))
    for change in silent:
        assert tell(READY, change)[0] == []


def test_a_route_is_told_as_it_is() -> None:
    model = ev.ModelChanged(route="other", model="m")
    assert tell(READY, ch.RouteChanged(model=model))[0] == [(None, model)]


def test_nothing_is_made_up_about_what_is_not_there() -> None:
    with pytest.raises(InternalError):
        approval_request(EXECUTING, CALLS[0])
    idle = Checkpoint.empty("s")
    for change in (STEP, ASKED, ch.CallsBegan(call_ids=("a",))):
        with pytest.raises(InternalError):
            narrate(idle, change, idle)
