"""What is known of a call that was cut off, and what follows from it, row by row."""

from __future__ import annotations

from typing import Literal

import attrs
import pytest

from trio_agent.protocol import texts
from trio_agent.protocol.events import CallOutcome
from trio_agent.protocol.items import AssistantItem, ToolCallItem, ToolOutputItem
from trio_agent.state import changes as ch
from trio_agent.state.checkpoint import (
    Approval,
    CallStatus,
    Checkpoint,
    Effect,
    ToolCall,
    validate_checkpoint,
)
from trio_agent.state.machine import Phase, advance, phase_of
from trio_agent.state.recovery import (
    INTERRUPTED_BY_RESTART,
    Known,
    Recovery,
    close_turn,
    recover,
    uncertain,
)

EFFECTS: tuple[Effect, ...] = ("undeclared", "read_only", "idempotent", "destructive")
BOTH = pytest.mark.parametrize("policy", list(Recovery))


def run(checkpoint: Checkpoint, *changes: ch.Change) -> Checkpoint:
    for change in changes:
        checkpoint = advance(checkpoint, change)
    validate_checkpoint(checkpoint)
    return checkpoint


READY = run(
    Checkpoint.empty("s"),
    ch.TurnBegan(submission_id="m", turn_id="t", started_at_ms=0, text="hi"),
)
REQUESTING = run(READY, ch.StepBegan(step_id="s", started_at_ms=1, route="default"))


def batch(*calls: ToolCall) -> Checkpoint:
    items = tuple(
        ToolCallItem(call_id=call.call_id, name=call.name, arguments=call.arguments)
        for call in calls
    )
    ended = ch.StepEnded(outcome="completed", completed_at_ms=2, items=items, calls=calls)
    return run(REQUESTING, ended)


def tool_call(
    call_id: str = "c",
    status: CallStatus = "admitted",
    effect: Effect = "undeclared",
    outcome: CallOutcome | None = None,
    approval: Approval | None = None,
) -> ToolCall:
    return ToolCall(
        call_id=call_id,
        name="x",
        arguments={},
        status=status,
        effect=effect,
        outcome=outcome,
        output="its own" if outcome else "",
        approval=approval,
    )


def recovered(
    checkpoint: Checkpoint, policy: Recovery, known: Known | None = None
) -> Checkpoint:
    after = run(checkpoint, *recover(checkpoint, policy, now_ms=9, known=known))
    assert recover(after, policy, now_ms=10) == []
    return after


def outputs(checkpoint: Checkpoint) -> dict[str, str]:
    return {
        item.call_id: item.output
        for item in checkpoint.context
        if isinstance(item, ToolOutputItem)
    }


@BOTH
def test_what_stood_between_two_steps_goes_on(policy: Recovery) -> None:
    completing = run(
        REQUESTING,
        ch.StepEnded(
            outcome="completed",
            completed_at_ms=2,
            items=(AssistantItem(text="done"),),
            completing="stop",
        ),
    )
    for checkpoint in (Checkpoint.empty("s"), READY, completing):
        assert recover(checkpoint, policy, now_ms=9) == []


def test_a_lost_request_closes_the_turn_or_is_asked_again() -> None:
    aborted = recovered(REQUESTING, Recovery.ABORT)
    assert phase_of(aborted) is Phase.IDLE
    assert aborted.execution_stats.aborted_run_count == 1
    resumed = recovered(REQUESTING, Recovery.RESUME)
    assert phase_of(resumed) is Phase.READY
    again = run(resumed, ch.StepBegan(step_id="s2", started_at_ms=9, route="default"))
    assert again.active_model_step is not None
    assert again.active_model_step.step_index == 0
    assert again.active_model_step.attempt == 2
    assert again.turn_id == "t"


ABORTED: dict[tuple[CallStatus, Effect], tuple[CallOutcome, str]] = {
    ("admitted", "undeclared"): ("not_started", texts.NOT_STARTED),
    ("admitted", "read_only"): ("not_started", texts.NOT_STARTED),
    ("admitted", "idempotent"): ("not_started", texts.NOT_STARTED),
    ("admitted", "destructive"): ("not_started", texts.NOT_STARTED),
    ("begun", "undeclared"): ("unknown", texts.UNKNOWN_AFTER_RESTART),
    ("begun", "read_only"): ("failed", texts.READ_ONLY_AFTER_RESTART),
    ("begun", "idempotent"): ("unknown", texts.UNKNOWN_AFTER_RESTART),
    ("begun", "destructive"): ("unknown", texts.UNKNOWN_AFTER_RESTART),
}


@pytest.mark.parametrize("status", ["admitted", "begun"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_abort_says_what_is_known_of_a_call_and_ends_the_turn(
    status: CallStatus, effect: Effect
) -> None:
    checkpoint = batch(tool_call(status=status, effect=effect))
    changes = recover(checkpoint, Recovery.ABORT, now_ms=9)
    outcome, text = ABORTED[status, effect]
    assert changes == [
        ch.CallEnded(call_id="c", outcome=outcome, output=text),
        ch.BatchSettled(),
        ch.TurnEnded(
            outcome="aborted",
            finish_reason="interrupted",
            finished_at_ms=9,
            reason=INTERRUPTED_BY_RESTART,
        ),
    ]
    after = recovered(checkpoint, Recovery.ABORT)
    assert outputs(after) == {"c": text}
    stats = after.execution_stats
    assert (stats.tool_calls, stats.failed_tool_calls, stats.aborted_run_count) == (1, 1, 1)


@pytest.mark.parametrize("status", ["admitted", "begun", "ended"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_resume_runs_again_what_is_safe_and_nothing_else(
    status: CallStatus, effect: Effect
) -> None:
    outcome: CallOutcome | None = "finished" if status == "ended" else None
    checkpoint = batch(tool_call(status=status, effect=effect, outcome=outcome))
    call = recovered(checkpoint, Recovery.RESUME).pending_tools[0]
    if status != "begun":
        assert call == checkpoint.pending_tools[0]
    elif effect in {"read_only", "idempotent"}:
        assert call == attrs.evolve(checkpoint.pending_tools[0], status="admitted")
    else:
        assert (call.status, call.outcome) == ("ended", "unknown")
        assert call.output == texts.UNKNOWN_AFTER_RESTART


def test_a_batch_whose_calls_had_all_ended_goes_on_under_both_policies() -> None:
    checkpoint = batch(tool_call("a", "ended", outcome="finished"))
    for policy in Recovery:
        assert recover(checkpoint, policy, now_ms=9) == []


def test_abort_keeps_the_results_that_are_known() -> None:
    checkpoint = batch(
        tool_call("a", "ended", outcome="finished"),
        tool_call("b", "begun"),
        tool_call("c", "begun", "idempotent"),
        tool_call("d"),
    )
    after = recovered(checkpoint, Recovery.ABORT, {"c": ("finished", "found out")})
    assert outputs(after) == {
        "a": "its own",
        "b": texts.UNKNOWN_AFTER_RESTART,
        "c": "found out",
        "d": texts.NOT_STARTED,
    }


@pytest.mark.parametrize("outcome", ["finished", "failed", "not_started", "unknown"])
@pytest.mark.parametrize("effect", EFFECTS)
@BOTH
def test_what_a_tool_found_out_is_the_outcome(
    policy: Recovery,
    effect: Effect,
    outcome: Literal["finished", "failed", "not_started", "unknown"],
) -> None:
    checkpoint = batch(tool_call(status="begun", effect=effect))
    changes = recover(checkpoint, policy, now_ms=9, known={"c": (outcome, "found out")})
    assert changes[0] == ch.CallEnded(call_id="c", outcome=outcome, output="found out")
    recovered(checkpoint, policy, {"c": (outcome, "found out")})


def test_what_is_said_of_calls_that_had_not_begun_is_ignored() -> None:
    checkpoint = batch(tool_call("a", "ended", outcome="failed"), tool_call("b"))
    known: Known = {"a": ("finished", "no"), "b": ("finished", "no"), "z": ("failed", "")}
    assert outputs(recovered(checkpoint, Recovery.ABORT, known)) == {
        "a": "its own",
        "b": texts.NOT_STARTED,
    }
    assert recover(checkpoint, Recovery.RESUME, now_ms=9, known=known) == []


@BOTH
def test_a_turn_whose_interrupt_was_accepted_is_closed_under_both_policies(
    policy: Recovery,
) -> None:
    begun = tool_call("a", "begun", "idempotent")
    for checkpoint in (READY, REQUESTING, batch(begun), batch(WAITING, tool_call("b"))):
        interrupted = run(checkpoint, ch.TurnInterrupted(reason="enough"))
        changes = recover(interrupted, policy, now_ms=9)
        assert changes[-1] == ch.TurnEnded(
            outcome="aborted", finish_reason="interrupted", finished_at_ms=9, reason="enough"
        )
        assert phase_of(recovered(interrupted, policy)) is Phase.IDLE
    after = recovered(run(batch(begun), ch.TurnInterrupted(reason="enough")), policy)
    assert outputs(after) == {"a": texts.UNKNOWN_AFTER_RESTART}


WAITING = tool_call("w", approval=Approval(id="q"))
DECIDED = tool_call("d", approval=Approval(id="r", decided=True))


@BOTH
def test_a_waiting_approval_waits_on_beside_calls_that_did_not_begin(policy: Recovery) -> None:
    checkpoint = batch(WAITING, tool_call("b"), tool_call("e", "ended", outcome="finished"))
    assert recover(checkpoint, policy, now_ms=9) == []


def test_an_uncertain_call_closes_the_turn_and_its_questions_under_abort() -> None:
    for other in (tool_call("b", "begun"), DECIDED):
        after = recovered(batch(WAITING, other), Recovery.ABORT)
        assert phase_of(after) is Phase.IDLE
        assert outputs(after)["w"] == texts.NOT_STARTED


def test_questions_wait_on_while_uncertain_calls_are_settled_under_resume() -> None:
    after = recovered(batch(WAITING, tool_call("b", "begun")), Recovery.RESUME)
    assert after.pending_tools[0] == WAITING
    assert after.pending_tools[1].outcome == "unknown"


def test_a_call_without_more_detail_counts_as_begun() -> None:
    bare = ToolCall(call_id="c", name="x", arguments={})
    assert uncertain(batch(bare)) == (bare,)


def closed(checkpoint: Checkpoint) -> Checkpoint:
    changes = close_turn(
        checkpoint, outcome="failed", finish_reason="error", reason="why", now_ms=9
    )
    after = run(checkpoint, *changes)
    assert phase_of(after) is Phase.IDLE
    assert (
        close_turn(after, outcome="failed", finish_reason="error", reason="why", now_ms=9) == []
    )
    return after


def test_a_turn_can_be_closed_from_wherever_it_stands() -> None:
    ended = tool_call("a", "ended", outcome="finished")
    for checkpoint in (READY, REQUESTING, batch(ended), batch(ended, WAITING)):
        assert closed(checkpoint).execution_stats.failed_run_count == 1
    after = closed(
        batch(
            ended,
            tool_call("b", "begun"),
            tool_call("c", "begun", "read_only"),
            tool_call("d"),
        )
    )
    assert outputs(after) == {
        "a": "its own",
        "b": texts.INTERRUPTED,
        "c": texts.READ_ONLY_INTERRUPTED,
        "d": texts.NOT_STARTED,
    }


def test_a_running_step_ends_as_its_caller_says() -> None:
    failed = ch.StepEnded(outcome="failed", completed_at_ms=8)
    changes = close_turn(
        REQUESTING,
        outcome="failed",
        finish_reason="error",
        reason="why",
        now_ms=9,
        step_outcome=failed,
    )
    assert changes[0] == failed
