"""What an op means in the phase that the session is in: every code has its row."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.protocol.ops import (
    REJECTION_CODES,
    Approved,
    CancelQueued,
    CapabilityCommand,
    EditQueued,
    ExecApproval,
    Interrupt,
    Op,
    ResumeSession,
    SetModel,
    Submission,
    UserInput,
)
from trio_agent.state.checkpoint import (
    ActiveExecution,
    Approval,
    Checkpoint,
    QueuedMessage,
    ToolCall,
)
from trio_agent.state.intake import (
    check_expectation,
    check_op,
    digest_of,
    find_approval,
    is_idle,
)

IDLE = Checkpoint.empty("s")
MESSAGE = QueuedMessage(owner="messages", id="q", boundary="queue", text="x")
QUEUED = attrs.evolve(IDLE, queue=(MESSAGE,))
RUNNING = attrs.evolve(
    IDLE, active_execution=ActiveExecution(submission_id="m", turn_id="t", started_at_ms=0)
)
GATED = tuple(
    ToolCall(call_id=f"c{n}", name="x", arguments={}, status="admitted", approval=approval)
    for n, approval in enumerate((Approval(id="a"), Approval(id="b", decided=True), None))
)
ASKING = attrs.evolve(RUNNING, pending_tools=GATED)


@pytest.mark.parametrize(
    ("checkpoint", "op", "code"),
    [
        (IDLE, UserInput(text="x"), None),
        (RUNNING, UserInput(text="x"), None),
        (IDLE, CapabilityCommand(capability="x", command="y"), None),
        (IDLE, Interrupt("t"), "no_turn"),
        (RUNNING, Interrupt("other"), "stale_turn"),
        (RUNNING, Interrupt("t"), None),
        (IDLE, ExecApproval("a", Approved()), "no_approval"),
        (ASKING, ExecApproval("z", Approved()), "no_approval"),
        (ASKING, ExecApproval("b", Approved()), "already_decided"),
        (ASKING, ExecApproval("a", Approved()), None),
        (IDLE, EditQueued("q", "x"), "not_queued"),
        (QUEUED, EditQueued("q", "x"), None),
        (IDLE, CancelQueued("q"), "not_queued"),
        (QUEUED, CancelQueued("q"), None),
        (IDLE, SetModel("r"), None),
        (RUNNING, SetModel("r"), "busy"),
        (IDLE, ResumeSession("s"), None),
        (RUNNING, ResumeSession("s"), "busy"),
    ],
)
def test_each_op_is_taken_or_refused_with_its_code(
    checkpoint: Checkpoint, op: Op, code: str | None
) -> None:
    refusal = check_op(checkpoint, op)
    assert (None if refusal is None else refusal.code) == code
    assert code is None or code in REJECTION_CODES


@pytest.mark.parametrize(
    ("checkpoint", "expect", "code"),
    [
        (IDLE, None, None),
        (RUNNING, None, None),
        (IDLE, "idle", None),
        (QUEUED, "idle", "not_idle"),
        (RUNNING, "idle", "not_idle"),
        (ASKING, "idle", "not_idle"),
        (RUNNING, "t", None),
        (RUNNING, "other", "stale_turn"),
        (IDLE, "t", "stale_turn"),
    ],
)
def test_an_expectation_holds_or_is_refused(
    checkpoint: Checkpoint, expect: str | None, code: str | None
) -> None:
    refusal = check_expectation(checkpoint, expect)
    assert (None if refusal is None else refusal.code) == code


def test_a_session_with_queued_messages_is_not_idle() -> None:
    assert is_idle(IDLE)
    assert not is_idle(QUEUED)
    assert not is_idle(RUNNING)


def test_a_call_is_found_by_the_id_of_its_question() -> None:
    assert find_approval(ASKING, "a") == GATED[0]
    assert find_approval(ASKING, "z") is None


@given(st.text(), st.text())
def test_equal_ops_have_equal_digests_and_others_differ(one: str, two: str) -> None:
    def digest(text: str, submission_id: str = "id") -> str:
        return digest_of(Submission(submission_id, UserInput(text=text)))

    assert digest(one) == digest(one, "another id")
    assert (digest(one) == digest(two)) == (one == two)


def test_the_order_of_members_does_not_change_a_digest() -> None:
    def digest(*keys: str) -> str:
        arguments = dict.fromkeys(keys, 1)
        return digest_of(Submission("id", ExecApproval("a", Approved(arguments=arguments))))

    assert digest("a", "b") == digest("b", "a")
