"""Every row of the transition table: legal changes do what they say, others change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import attrs
import pytest
from msgspec.structs import replace

from trio_agent.errors import CorruptStoreError, InternalError
from trio_agent.protocol.events import ModelChanged
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.limits import MAX_QUEUED_MESSAGES, MAX_SESSION_GRANTS
from trio_agent.protocol.ops import Approved, ApprovedForSession, Denied
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state import changes as ch
from trio_agent.state.checkpoint import (
    ActiveExecution,
    ActiveModelStep,
    Approval,
    Checkpoint,
    ExecutionStats,
    QueuedMessage,
    ToolCall,
    validate_checkpoint,
)
from trio_agent.state.machine import ALWAYS, TRANSITIONS, Phase, advance, phase_of


def run(checkpoint: Checkpoint, *changes: ch.Change) -> Checkpoint:
    for change in changes:
        checkpoint = advance(checkpoint, change)
        validate_checkpoint(checkpoint)
    return checkpoint


def began(
    turn_id: str = "t", submission_id: str = "m", text: str | None = "hi"
) -> ch.TurnBegan:
    return ch.TurnBegan(
        submission_id=submission_id, turn_id=turn_id, started_at_ms=5, text=text
    )


def step(step_id: str = "s") -> ch.StepBegan:
    return ch.StepBegan(step_id=step_id, started_at_ms=6, route="default")


def asks(*calls: ToolCall) -> ch.StepEnded:
    items = tuple(
        ToolCallItem(call_id=call.call_id, name=call.name, arguments=call.arguments)
        for call in calls
    )
    return ch.StepEnded(outcome="completed", completed_at_ms=7, items=items, calls=calls)


def says(text: str = "yes") -> ch.StepEnded:
    return ch.StepEnded(
        outcome="completed",
        completed_at_ms=7,
        items=(AssistantItem(text=text),),
        completing="stop",
    )


def tool_call(call_id: str = "c", **fields: Any) -> ToolCall:
    merged = {"name": "x", "arguments": {}, "status": "admitted", **fields}
    return ToolCall(call_id=call_id, **merged)


def queued(
    message_id: str, boundary: str = "queue", turn_id: str | None = None
) -> QueuedMessage:
    return QueuedMessage(
        owner="messages",
        id=message_id,
        boundary=boundary,  # type: ignore[arg-type]
        text=f"text of {message_id}",
        turn_id=turn_id,
    )


ENDED = ch.TurnEnded(outcome="completed", finish_reason="stop", finished_at_ms=9)
EMPTY = Checkpoint.empty("session")
IN_PHASE: dict[Phase, Checkpoint] = {
    Phase.IDLE: EMPTY,
    Phase.READY: run(EMPTY, began()),
    Phase.REQUESTING: run(EMPTY, began(), step()),
    Phase.EXECUTING: run(EMPTY, began(), step(), asks(tool_call())),
    Phase.COMPLETING: run(EMPTY, began(), step(), says()),
}

STEER = queued("steer", "steer", "t")
"""Joins the turn of every checkpoint above."""

EXAMPLES: dict[type[ch.Change], ch.Change] = {
    ch.MessageQueued: ch.MessageQueued(message=queued("m2")),
    ch.QueueEdited: ch.QueueEdited(submission_id="q", text="new", new_id="e"),
    ch.QueueCancelled: ch.QueueCancelled(submission_id="q"),
    ch.TurnBegan: began("t2", "m2"),
    ch.SteerJoined: ch.SteerJoined(submission_id="steer"),
    ch.ContextChanged: ch.ContextChanged(items=(UserItem(text="hidden", internal="x"),)),
    ch.StepBegan: step("s2"),
    ch.StepEnded: says(),
    ch.CallsBegan: ch.CallsBegan(call_ids=("c",)),
    ch.CallEnded: ch.CallEnded(call_id="c", outcome="failed", output="no"),
    ch.CallReadmitted: ch.CallReadmitted(call_id="c"),
    ch.ApprovalAsked: ch.ApprovalAsked(call_id="c", approval=Approval(id="a")),
    ch.ApprovalDecided: ch.ApprovalDecided(call_id="c", decision=Denied()),
    ch.BatchSettled: ch.BatchSettled(),
    ch.TurnContinued: ch.TurnContinued(prompt=UserItem(text="go on", internal="x")),
    ch.TurnInterrupted: ch.TurnInterrupted(reason="enough"),
    ch.TurnEnded: ENDED,
    ch.RouteChanged: ch.RouteChanged(model=ModelChanged(route="other", model="m")),
    ch.MetadataReplaced: ch.MetadataReplaced(metadata={"a": 1}),
    ch.StateSaved: ch.StateSaved(name="x", value=[1]),
    ch.GrantAdded: ch.GrantAdded(key="k"),
    ch.UsageCounted: ch.UsageCounted(usage=TokenUsage(total_tokens=3)),
    ch.ContentNamed: ch.ContentNamed(instructions_digest="i", tools_digest="t"),
}


def ready_for(phase: Phase, change: type[ch.Change]) -> Checkpoint:
    """Return a checkpoint of *phase* that has what *change* needs besides its phase."""
    checkpoint = IN_PHASE[phase]
    if change in {ch.QueueEdited, ch.QueueCancelled}:
        checkpoint = attrs.evolve(checkpoint, queue=(queued("q"),))
    if change is ch.SteerJoined and checkpoint.active_execution is not None:
        checkpoint = attrs.evolve(checkpoint, queue=(STEER,))
    if phase is Phase.EXECUTING:
        prepare: dict[type[ch.Change], ToolCall] = {
            ch.CallReadmitted: tool_call(status="begun", effect="idempotent"),
            ch.ApprovalDecided: tool_call(approval=Approval(id="a")),
            ch.BatchSettled: tool_call(status="ended", outcome="finished", output="ok"),
        }
        if change in prepare:
            checkpoint = attrs.evolve(checkpoint, pending_tools=(prepare[change],))
    return checkpoint


def test_the_examples_cover_every_change() -> None:
    assert set(EXAMPLES) == set(get_args(ch.Change))
    assert set().union(*TRANSITIONS.values()) | ALWAYS == set(EXAMPLES)
    assert all(phase_of(checkpoint) is phase for phase, checkpoint in IN_PHASE.items())


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("kind", list(EXAMPLES), ids=lambda kind: kind.__name__)
def test_each_change_is_legal_in_exactly_the_phases_of_the_table(
    phase: Phase, kind: type[ch.Change]
) -> None:
    before = ready_for(phase, kind)
    kept = attrs.evolve(before)
    if kind in TRANSITIONS[phase] or kind in ALWAYS:
        after = advance(before, EXAMPLES[kind])
        validate_checkpoint(after)
        assert after != before
        assert after.sequence == before.sequence
    else:
        with pytest.raises(InternalError):
            advance(before, EXAMPLES[kind])
    assert before == kept


def refused(checkpoint: Checkpoint, change: ch.Change) -> None:
    kept, length = attrs.evolve(checkpoint), len(checkpoint.context)
    with pytest.raises(InternalError):
        advance(checkpoint, change)
    assert checkpoint == kept
    assert len(checkpoint.context) == length


# --- the queue


def test_a_message_keeps_its_place_when_it_is_edited_and_takes_the_edits_id() -> None:
    checkpoint = attrs.evolve(EMPTY, queue=(queued("a"), queued("b"), queued("c")))
    after = run(checkpoint, ch.QueueEdited(submission_id="b", text="other", new_id="e"))
    assert after.queue == (
        queued("a"),
        attrs.evolve(queued("b"), id="e", text="other"),
        queued("c"),
    )
    assert run(after, ch.QueueCancelled(submission_id="a")).queue == after.queue[1:]


@pytest.mark.parametrize(
    "change",
    [
        ch.MessageQueued(message=queued("a")),
        ch.MessageQueued(message=queued("s", "steer", "t")),
        ch.MessageQueued(message=queued("s", "steer")),
        ch.QueueEdited(submission_id="none", text="x", new_id="e"),
        ch.QueueEdited(submission_id="a", text="x", new_id="b"),
        ch.QueueCancelled(submission_id="none"),
    ],
)
def test_the_queue_of_an_idle_session_refuses(change: ch.Change) -> None:
    refused(attrs.evolve(EMPTY, queue=(queued("a"), queued("b"))), change)


def test_a_steer_must_name_the_running_turn() -> None:
    running = IN_PHASE[Phase.READY]
    assert run(running, ch.MessageQueued(message=STEER)).queue == (STEER,)
    refused(running, ch.MessageQueued(message=queued("s", "steer", "another")))
    refused(running, ch.MessageQueued(message=queued("s", "steer")))


@pytest.mark.parametrize("waiting", [queued("q"), queued("q", "turn")])
def test_only_a_steer_of_the_running_turn_joins_it(waiting: QueuedMessage) -> None:
    checkpoint = attrs.evolve(IN_PHASE[Phase.READY], queue=(waiting,))
    refused(checkpoint, ch.SteerJoined(submission_id="q"))


def test_steers_that_missed_their_turn_become_messages_of_their_own_in_place() -> None:
    waiting = (queued("a"), STEER, queued("b"))
    after = run(attrs.evolve(IN_PHASE[Phase.READY], queue=waiting), ENDED)
    assert after.queue == (
        queued("a"),
        queued("steer").__class__(
            owner="messages", id="steer", boundary="queue", text=STEER.text
        ),
        queued("b"),
    )


# --- turns


def test_a_turn_takes_its_message_out_of_the_queue_and_into_the_context() -> None:
    hidden = UserItem(text="guidance", internal="x")
    checkpoint = attrs.evolve(EMPTY, queue=(queued("m"), queued("n")))
    change = replace(began(), hidden=(hidden,))
    after = run(checkpoint, change)
    assert list(after.context) == [hidden, UserItem(text="hi", submission_id="m")]
    assert after.queue == (queued("n"),)
    assert after.first_user_message == "hi"
    assert after.active_execution == ActiveExecution(
        submission_id="m", turn_id="t", started_at_ms=5
    )


def test_nothing_of_a_refused_message_is_kept() -> None:
    after = run(attrs.evolve(EMPTY, queue=(queued("m"),)), began(text=None))
    assert list(after.context) == []
    assert after.queue == ()
    assert after.first_user_message is None


def test_the_first_user_message_is_written_once_and_never_blank() -> None:
    after = run(EMPTY, began(text=" \n"), ENDED)
    assert after.first_user_message is None
    after = run(after, began("t2", "m2", "first"), ENDED, began("t3", "m3", "second"))
    assert after.first_user_message == "first"


def test_a_turn_leaves_its_sums_and_never_a_negative_duration() -> None:
    usage = TokenUsage(input_tokens=2, total_tokens=2)
    answered = replace(says(), usage=usage)
    after = run(EMPTY, began(), step(), answered, replace(ENDED, finished_at_ms=1))
    assert after.execution_stats == ExecutionStats(run_count=1, model_calls=1, usage=usage)
    assert after.total_usage == after.last_usage == usage
    failed = replace(ENDED, outcome="failed", finish_reason="error", finished_at_ms=25)
    after = run(after, began("t2", "m2"), failed)
    assert after.execution_stats.failed_run_count == 1
    assert after.execution_stats.elapsed_ms == 20


def test_a_stop_hook_continues_a_turn_once() -> None:
    prompt = UserItem(text="more", internal="x")
    after = run(IN_PHASE[Phase.COMPLETING], ch.TurnContinued(prompt=prompt))
    assert phase_of(after) is Phase.READY
    assert after.context[-1] == prompt
    refused(run(after, step("s2"), says()), ch.TurnContinued(prompt=prompt))


def test_a_steer_takes_a_completing_turn_back_to_the_model() -> None:
    waiting = attrs.evolve(IN_PHASE[Phase.COMPLETING], queue=(STEER,))
    after = run(waiting, ch.SteerJoined(submission_id="steer"))
    assert phase_of(after) is Phase.READY
    assert after.context[-1] == UserItem(text=STEER.text, submission_id="steer")


def test_the_first_interrupt_counts_and_ends_nothing_by_itself() -> None:
    for phase in (Phase.READY, Phase.REQUESTING, Phase.EXECUTING, Phase.COMPLETING):
        first, second = (ch.TurnInterrupted(reason=reason) for reason in ("one", "two"))
        after = run(IN_PHASE[phase], first, second)
        assert phase_of(after) is phase
        assert after.active_execution is not None
        assert after.active_execution.interrupted == "one"


def test_a_rewrite_begins_a_new_epoch_and_additions_do_not() -> None:
    summary, added = UserItem(text="so far", internal="x"), UserItem(text="more", internal="x")
    ready = IN_PHASE[Phase.READY]
    assert run(ready, ch.ContextChanged(items=(added,))).context_epoch == 0
    after = run(ready, ch.ContextChanged(rewrite=(summary,), items=(added,)))
    assert after.context_epoch == 1
    assert list(after.context) == [summary, added]


# --- model steps


def test_attempts_share_a_step_index_and_count_up() -> None:
    lost = ch.StepEnded(outcome="retrying", completed_at_ms=7, retry_in_ms=200, route="spare")
    after = run(EMPTY, began(), step("s1"), lost, step("s2"))
    assert after.active_model_step == ActiveModelStep(
        step_id="s2", step_index=0, started_at_ms=6, attempt=2, route="default"
    )
    assert after.active_execution is not None
    assert after.active_execution.route == "spare"
    after = run(after, says(), ch.TurnContinued(prompt=UserItem(text="x")), step("s3"))
    assert after.active_model_step is not None
    assert (after.active_model_step.step_index, after.active_model_step.attempt) == (1, 1)
    assert after.active_execution is not None
    assert after.active_execution.model_calls == 3


@pytest.mark.parametrize(
    "change",
    [
        replace(says(), outcome="failed"),
        replace(asks(tool_call()), outcome="interrupted"),
        replace(asks(tool_call()), completing="stop"),
        replace(asks(tool_call()), items=()),
        replace(asks(tool_call()), calls=()),
    ],
)
def test_a_step_leaves_nothing_contradictory(change: ch.Change) -> None:
    refused(IN_PHASE[Phase.REQUESTING], change)


def test_a_step_without_calls_that_does_not_complete_lets_the_model_go_on() -> None:
    after = run(IN_PHASE[Phase.REQUESTING], replace(says(), completing=None))
    assert phase_of(after) is Phase.READY
    assert after.active_execution is not None
    assert after.active_execution.next_model_step == 1


# --- tool calls


def test_outputs_enter_the_context_together_in_call_order() -> None:
    after = run(EMPTY, began(), step(), asks(tool_call("a"), tool_call("b"), tool_call("c")))
    before = len(after.context)
    hidden = UserItem(text="mind", internal="x")
    after = run(
        after,
        ch.CallsBegan(call_ids=("a", "b")),
        ch.CallEnded(call_id="b", outcome="finished", output="B", hidden=(hidden,)),
        ch.CallEnded(call_id="c", outcome="denied", output="C"),
    )
    assert len(after.context) == before
    refused(after, ch.BatchSettled())
    after = run(
        after,
        ch.CallEnded(call_id="a", outcome="unknown", output="A"),
        ch.BatchSettled(),
    )
    assert after.context.since(before) == [
        ToolOutputItem(call_id="a", output="A", is_error=True),
        ToolOutputItem(call_id="b", output="B"),
        ToolOutputItem(call_id="c", output="C", is_error=True),
        hidden,
    ]
    assert after.active_execution is not None
    counted = after.active_execution
    assert (counted.tool_calls, counted.failed_tool_calls) == (3, 2)


def executing(call: ToolCall) -> Checkpoint:
    return attrs.evolve(IN_PHASE[Phase.EXECUTING], pending_tools=(call,))


ALLOWED_ENDINGS = {
    "admitted": {"failed", "denied", "not_started"},
    "begun": {"finished", "failed", "not_started", "unknown"},
    "ended": set[str](),
}


@pytest.mark.parametrize("status", list(ALLOWED_ENDINGS))
@pytest.mark.parametrize("outcome", ["finished", "failed", "denied", "not_started", "unknown"])
def test_a_call_ends_once_and_only_as_its_life_allows(status: str, outcome: str) -> None:
    was: dict[str, Any] = {"status": status, "outcome": "failed" if status == "ended" else None}
    change = ch.CallEnded(call_id="c", outcome=outcome, output="o")  # type: ignore[arg-type]
    checkpoint = executing(tool_call(**was))
    if outcome in ALLOWED_ENDINGS[status]:
        ended = run(checkpoint, change).pending_tools[0]
        assert (ended.status, ended.outcome, ended.output) == ("ended", outcome, "o")
    else:
        refused(checkpoint, change)


@pytest.mark.parametrize("status", ["admitted", "begun", "ended"])
@pytest.mark.parametrize("effect", ["undeclared", "read_only", "idempotent", "destructive"])
def test_only_a_begun_call_that_is_safe_to_repeat_is_readmitted(
    status: str, effect: str
) -> None:
    checkpoint = executing(tool_call(status=status, effect=effect))
    change = ch.CallReadmitted(call_id="c")
    if status == "begun" and effect in {"read_only", "idempotent"}:
        assert run(checkpoint, change).pending_tools[0].status == "admitted"
    else:
        refused(checkpoint, change)


@pytest.mark.parametrize(
    ("call", "change"),
    [
        (tool_call(status="begun"), ch.CallsBegan(call_ids=("c",))),
        (tool_call(approval=Approval(id="a")), ch.CallsBegan(call_ids=("c",))),
        (tool_call(), ch.CallsBegan(call_ids=("c", "c"))),
        (tool_call(), ch.CallsBegan(call_ids=("none",))),
        (tool_call(), ch.CallEnded(call_id="none", outcome="failed", output="")),
        (tool_call(), ch.ApprovalDecided(call_id="c", decision=Approved())),
        (
            tool_call(approval=Approval(id="a", decided=True)),
            ch.ApprovalDecided(call_id="c", decision=Approved()),
        ),
        (
            tool_call(approval=Approval(id="a")),
            ch.ApprovalAsked(call_id="c", approval=Approval(id="b")),
        ),
        (tool_call(status="begun"), ch.ApprovalAsked(call_id="c", approval=Approval(id="b"))),
    ],
)
def test_a_call_refuses(call: ToolCall, change: ch.Change) -> None:
    refused(executing(call), change)


def test_an_approval_may_change_the_arguments_and_keeps_what_was_asked() -> None:
    call = tool_call(arguments={"n": 1}, approval=Approval(id="a"))
    decision = Approved(arguments={"n": 2}, network=True)
    after = run(executing(call), ch.ApprovalDecided(call_id="c", decision=decision))
    changed = after.pending_tools[0]
    assert changed.arguments == {"n": 2}
    assert changed.requested == {"n": 1}
    assert changed.network
    assert not changed.waiting
    assert run(after, ch.CallsBegan(call_ids=("c",))).pending_tools[0].status == "begun"


def test_an_approval_after_a_hooks_change_keeps_what_the_model_asked() -> None:
    call = tool_call(arguments={"n": 2}, requested={"n": 1}, approval=Approval(id="a"))
    decision = Approved(arguments={"n": 3})
    after = run(executing(call), ch.ApprovalDecided(call_id="c", decision=decision))
    assert after.pending_tools[0].requested == {"n": 1}


def test_an_approval_for_the_session_leaves_the_arguments() -> None:
    call = tool_call(arguments={"n": 1}, approval=Approval(id="a"))
    change = ch.ApprovalDecided(call_id="c", decision=ApprovedForSession())
    after = run(executing(call), change)
    assert after.pending_tools[0].arguments == {"n": 1}
    assert after.pending_tools[0].approval == Approval(id="a", decided=True)


# --- the rest


def test_states_and_grants_and_metadata() -> None:
    after = run(EMPTY, ch.StateSaved(name="x", value=1), ch.StateSaved(name="y", value={}))
    assert run(after, ch.StateSaved(name="x", value=None)).states == {"y": {}}
    assert run(EMPTY, ch.StateSaved(name="never", value=None)).states == {}
    after = run(EMPTY, ch.GrantAdded(key="a"), ch.GrantAdded(key="a"), ch.GrantAdded(key="b"))
    assert after.grants == ("a", "b")
    full = attrs.evolve(EMPTY, grants=tuple(str(n) for n in range(MAX_SESSION_GRANTS)))
    assert run(full, ch.GrantAdded(key="one more")) == full
    assert run(EMPTY, ch.MetadataReplaced(metadata={"a": 1})).metadata == {"a": 1}


def test_usage_that_overflows_changes_nothing() -> None:
    rich = attrs.evolve(EMPTY, total_usage=TokenUsage(total_tokens=2**63 - 1))
    refused(rich, ch.UsageCounted(usage=TokenUsage(total_tokens=1)))
    refused(rich, ch.UsageCounted(usage=TokenUsage(total_tokens=-1, input_tokens=-1)))


BROKEN: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "version": lambda c: attrs.evolve(c, version=2),
    "sequence": lambda c: attrs.evolve(c, sequence=-1),
    "epoch": lambda c: attrs.evolve(c, context_epoch=-1),
    "step without turn": lambda c: attrs.evolve(
        c, active_model_step=ActiveModelStep(step_id="s", step_index=0, started_at_ms=0)
    ),
    "calls without turn": lambda c: attrs.evolve(c, pending_tools=(tool_call(),)),
    "steer without turn": lambda c: attrs.evolve(c, queue=(STEER,)),
    "long queue": lambda c: attrs.evolve(
        c, queue=tuple(queued(str(n)) for n in range(MAX_QUEUED_MESSAGES + 1))
    ),
    "one id twice": lambda c: attrs.evolve(c, queue=(queued("a"), queued("a"))),
}
BROKEN_TURN: dict[str, Callable[[ActiveExecution], ActiveExecution]] = {
    "blank turn": lambda e: attrs.evolve(e, turn_id=" "),
    "blank submission": lambda e: attrs.evolve(e, submission_id=""),
    "counters": lambda e: attrs.evolve(e, failed_tool_calls=1),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_contradictory_idle_checkpoint_is_refused(name: str) -> None:
    with pytest.raises(CorruptStoreError, match="session"):
        validate_checkpoint(BROKEN[name](EMPTY))


@pytest.mark.parametrize("name", list(BROKEN_TURN))
def test_a_contradictory_turn_is_refused(name: str) -> None:
    ready = IN_PHASE[Phase.READY]
    assert ready.active_execution is not None
    broken = BROKEN_TURN[name](ready.active_execution)
    with pytest.raises(CorruptStoreError):
        validate_checkpoint(attrs.evolve(ready, active_execution=broken))


def test_a_turn_that_does_two_things_at_once_is_refused() -> None:
    requesting, batch = IN_PHASE[Phase.REQUESTING], (tool_call(),)
    completing = IN_PHASE[Phase.COMPLETING]
    blank = ActiveModelStep(step_id="", step_index=0, started_at_ms=0)
    for broken in (
        attrs.evolve(requesting, pending_tools=batch),
        attrs.evolve(completing, pending_tools=batch),
        attrs.evolve(completing, active_model_step=requesting.active_model_step),
        attrs.evolve(requesting, active_model_step=blank),
        attrs.evolve(IN_PHASE[Phase.EXECUTING], pending_tools=(*batch, *batch)),
        attrs.evolve(requesting, queue=(queued("s", "steer", "another"),)),
    ):
        with pytest.raises(CorruptStoreError):
            validate_checkpoint(broken)


def test_versions_of_a_context_never_change_one_another() -> None:
    base = run(EMPTY, began())
    one = run(base, ch.ContextChanged(items=(UserItem(text="one"),)))
    two = run(base, ch.ContextChanged(items=(UserItem(text="two"),)))
    texts: list[list[Item]] = [list(c.context) for c in (base, one, two)]
    assert [len(items) for items in texts] == [1, 2, 2]
    assert texts[1][-1] == UserItem(text="one")
    assert texts[2][-1] == UserItem(text="two")
