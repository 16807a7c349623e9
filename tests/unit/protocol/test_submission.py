from __future__ import annotations

from typing import Any

import pytest

from trio_agent.errors import SubmissionRejectedError
from trio_agent.protocol import limits
from trio_agent.protocol.items import Attachment
from trio_agent.protocol.ops import (
    OP_TYPES,
    REJECTION_CODES,
    Abort,
    Approved,
    CancelQueued,
    CapabilityCommand,
    Denied,
    EditQueued,
    ExecApproval,
    Interrupt,
    Op,
    ResumeSession,
    SetModel,
    Submission,
    UserInput,
    check_session_id,
    validate_submission,
)


def code(op: Op, *, id: str = "s") -> str | None:  # noqa: A002
    try:
        validate_submission(Submission(id, op))
    except SubmissionRejectedError as exc:
        return exc.code if exc.code in REJECTION_CODES else f"no code: {exc.code}"
    return None


def of_size(size: int) -> str:
    """Return text of exactly *size* bytes, most of it two bytes a character."""
    return "é" * (size // 2) + "x" * (size % 2)


def file(**members: Any) -> Attachment:
    given = {"id": "f", "name": "a.txt", "media_type": "text/plain", "size": 1}
    return Attachment(**{**given, **members})


def files(count: int) -> tuple[Attachment, ...]:
    return tuple(file(id=f"f{number}") for number in range(count))


INPUT = limits.MAX_USER_INPUT_BYTES
ID = limits.MAX_IDENTIFIER_BYTES
NAME = limits.MAX_NAME_BYTES
SMALL = limits.MAX_CAPABILITY_INPUT_BYTES


@pytest.mark.parametrize(
    ("limit", "make"),
    [
        (INPUT, lambda text: UserInput(text=text)),
        (ID, lambda text: UserInput(text="x", target_turn_id=text)),
        (ID, lambda text: UserInput(text="x", attachments=(file(id=text),))),
        (
            limits.MAX_ATTACHMENT_NAME_BYTES,
            lambda text: UserInput(text="x", attachments=(file(name=text),)),
        ),
        (
            limits.MAX_MEDIA_TYPE_BYTES,
            lambda text: UserInput(text="x", attachments=(file(media_type=text),)),
        ),
        (INPUT, lambda text: EditQueued("m", text)),
        (ID, lambda text: EditQueued(text, "x")),
        (ID, CancelQueued),
        (ID, Interrupt),
        (ID, lambda text: ExecApproval(text, Abort())),
        (SMALL, lambda text: ExecApproval("a", Denied(text))),
        (ID, SetModel),
        (limits.MAX_SESSION_ID_BYTES, ResumeSession),
        (NAME, lambda text: CapabilityCommand(capability=text, command="c")),
        (NAME, lambda text: CapabilityCommand(capability="c", command=text)),
        (SMALL, lambda text: CapabilityCommand(capability="c", command="c", arguments=text)),
        (SMALL, lambda text: CapabilityCommand(capability="c", command="c", input=text)),
    ],
)
def test_each_limit_counts_bytes_exactly(limit: int, make: Any) -> None:
    assert code(make(of_size(limit))) is None
    assert code(make(of_size(limit + 1))) == "too_large"
    assert code(make("\ud800")) == "invalid"


def test_the_submission_id_has_a_limit_of_its_own() -> None:
    assert code(Interrupt("t"), id=of_size(ID)) is None
    assert code(Interrupt("t"), id=of_size(ID + 1)) == "too_large"
    assert code(Interrupt("t"), id=" ") == "invalid"


@pytest.mark.parametrize(
    "op",
    [
        UserInput(text=""),
        UserInput(text=" \n"),
        UserInput(text="x", target_turn_id=""),
        UserInput(text="x", delivery="turn"),  # type: ignore[arg-type]
        UserInput(text="x", attachments=(file(), file())),
        UserInput(text="x", attachments=(file(name=" "),)),
        EditQueued("m", ""),
        EditQueued("", "x"),
        CancelQueued(""),
        Interrupt(" "),
        ExecApproval("", Abort()),
        SetModel(""),
        ResumeSession(""),
        ResumeSession("a\x00b"),
        CapabilityCommand(capability="", command="c"),
        CapabilityCommand(capability="c", command=""),
        SetModel(5),  # type: ignore[arg-type]
    ],
)
def test_each_of_these_is_invalid(op: Op) -> None:
    assert code(op) == "invalid"


def test_attachments_may_stand_alone() -> None:
    assert code(UserInput(text="", attachments=(file(),))) is None


def test_attachments_are_counted_and_weighed() -> None:
    most = limits.MAX_ATTACHMENTS
    heavy = limits.MAX_ATTACHMENT_BYTES

    assert code(UserInput(text="x", attachments=files(most))) is None
    assert code(UserInput(text="x", attachments=files(most + 1))) == "too_large"
    assert code(UserInput(text="x", attachments=(file(size=heavy),))) is None
    assert code(UserInput(text="x", attachments=(file(size=heavy + 1),))) == "too_large"
    assert code(UserInput(text="x", attachments=(file(size=0),))) is not None


def test_edited_arguments_are_weighed() -> None:
    most = limits.MAX_ARGUMENT_BYTES
    room = most - len('{"x":""}')

    assert code(ExecApproval("a", Approved(arguments={"x": "y" * room}))) is None
    assert code(ExecApproval("a", Approved(arguments={"x": "y" * (room + 1)}))) == "too_large"


def test_every_op_is_judged() -> None:
    """A new op without a case would pass unchecked; `assert_never` raises instead."""
    assert len(OP_TYPES) == 8


@pytest.mark.parametrize("session_id", ["a", "../x", " ", "é" * 127, "A", "x" * 255, "a b/c"])
def test_a_session_id_is_any_short_text(session_id: str) -> None:
    check_session_id(session_id)


@pytest.mark.parametrize(
    "session_id",
    ["", "é" * 128, "x" * 256, "a\nb", "\x00", "\x7f", "\x85", "\x9f", "\ud800", 5],
)
def test_a_session_id_is_short_and_has_no_control_characters(session_id: Any) -> None:
    with pytest.raises(ValueError):
        check_session_id(session_id)
