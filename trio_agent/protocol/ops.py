"""Ops: what a frontend may ask of a session, and how a `Submission` is checked."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, TypeAlias, assert_never, get_args

import attrs
import msgspec

from trio_agent.errors import SubmissionRejectedError
from trio_agent.protocol import limits
from trio_agent.protocol.items import Attachment
from trio_agent.protocol.text import Json, check_json, check_text
from trio_agent.record import Record

REJECTION_CODES: Final = frozenset(
    {
        "invalid",
        "too_large",
        "busy",
        "not_idle",
        "stale_turn",
        "no_turn",
        "no_approval",
        "already_decided",
        "not_queued",
        "queue_full",
        "unknown_route",
        "unknown_session",
        "unknown_command",
        "id_conflict",
        "denied_by_hook",
    }
)
"""The stable codes of `SubmissionRejectedError`."""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Approved(Record):
    """Let one call run, perhaps with edited ``arguments``, perhaps with the network."""

    tag: ClassVar[str] = "approved"

    arguments: dict[str, Json] | None = None
    network: bool = False


@attrs.frozen(eq=False, repr=False)
class ApprovedForSession(Record):
    """Let the call run, and every later call that the same grant covers."""

    tag: ClassVar[str] = "approved_for_session"


@attrs.frozen(eq=False, repr=False)
class Denied(Record):
    """Do not run the call; the model reads ``rejection`` and the turn goes on."""

    tag: ClassVar[str] = "denied"

    rejection: str = ""


@attrs.frozen(eq=False, repr=False)
class Abort(Record):
    """Do not run the call, and end the turn."""

    tag: ClassVar[str] = "abort"


Decision: TypeAlias = Approved | ApprovedForSession | Denied | Abort


@attrs.frozen(kw_only=True, eq=False, repr=False)
class UserInput(Record):
    """A message. ``delivery`` says how it enters while a turn runs.

    ``"steer"`` joins the running turn at its next model request, ``"queue"``
    starts a turn of its own afterwards, None leaves the choice to the message
    handler. ``target_turn_id`` refuses the message unless that turn runs.
    """

    tag: ClassVar[str] = "user_input"

    text: str
    attachments: tuple[Attachment, ...] = ()
    delivery: Literal["steer", "queue"] | None = None
    target_turn_id: str | None = None


@attrs.frozen(eq=False, repr=False)
class EditQueued(Record):
    """Replace the text of a message that still waits in the queue; its place is kept."""

    tag: ClassVar[str] = "edit_queued"

    submission_id: str
    text: str


@attrs.frozen(eq=False, repr=False)
class CancelQueued(Record):
    """Take a message that still waits out of the queue."""

    tag: ClassVar[str] = "cancel_queued"

    submission_id: str


@attrs.frozen(eq=False, repr=False)
class Interrupt(Record):
    """End that turn, and only that one, as soon as everything in it has stopped."""

    tag: ClassVar[str] = "interrupt"

    turn_id: str


@attrs.frozen(eq=False, repr=False)
class ExecApproval(Record):
    """Answer the `ExecApprovalRequest` of that id."""

    tag: ClassVar[str] = "exec_approval"

    id: str
    decision: Decision


@attrs.frozen(eq=False, repr=False)
class SetModel(Record):
    """Use another route from the next turn on; refused while a turn runs."""

    tag: ClassVar[str] = "set_model"

    route: str


@attrs.frozen(eq=False, repr=False)
class ResumeSession(Record):
    """Ask the frontend to switch to another stored session (this one stays open)."""

    tag: ClassVar[str] = "resume_session"

    session_id: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class CapabilityCommand(Record):
    """Call a command that a middleware declared."""

    tag: ClassVar[str] = "capability_command"

    capability: str
    command: str
    arguments: str = ""
    input: str | None = None


Op: TypeAlias = (
    UserInput
    | EditQueued
    | CancelQueued
    | Interrupt
    | ExecApproval
    | SetModel
    | ResumeSession
    | CapabilityCommand
)

OP_TYPES: tuple[type[Op], ...] = (
    UserInput,
    EditQueued,
    CancelQueued,
    Interrupt,
    ExecApproval,
    SetModel,
    ResumeSession,
    CapabilityCommand,
)

DECISION_TYPES: tuple[type[Decision], ...] = (Approved, ApprovedForSession, Denied, Abort)


@attrs.frozen(eq=False, repr=False)
class Submission(Record):
    """One op with its id, which is also its idempotency key."""

    id: str
    op: Op


def validate_submission(submission: Submission) -> None:
    """Check sizes and forms; says nothing about whether the op fits the session's state.

    Raises:
        SubmissionRejectedError: Code ``too_large`` for a size, else ``invalid``.
    """
    try:
        _check_id("submission id", submission.id)
        _check_op(submission.op)
    except ValueError as exc:
        code = "too_large" if "are allowed" in str(exc) else "invalid"
        raise SubmissionRejectedError(code, str(exc)) from None


def _check_id(name: str, value: str) -> None:
    check_text(value, name=name, limit=limits.MAX_IDENTIFIER_BYTES, blank=False)


def _check_op(op: Op) -> None:
    match op:
        case UserInput():
            _check_user_input(op)
        case EditQueued():
            _check_id("submission_id", op.submission_id)
            check_text(op.text, name="text", limit=limits.MAX_USER_INPUT_BYTES, blank=False)
        case CancelQueued():
            _check_id("submission_id", op.submission_id)
        case Interrupt():
            _check_id("turn_id", op.turn_id)
        case ExecApproval():
            _check_id("approval id", op.id)
            _check_decision(op.decision)
        case SetModel():
            _check_id("route", op.route)
        case ResumeSession():
            check_session_id(op.session_id)
        case CapabilityCommand():
            check_text(
                op.capability, name="capability", limit=limits.MAX_NAME_BYTES, blank=False
            )
            check_text(op.command, name="command", limit=limits.MAX_NAME_BYTES, blank=False)
            size = limits.MAX_CAPABILITY_INPUT_BYTES
            check_text(op.arguments, name="arguments", limit=size)
            if op.input is not None:
                check_text(op.input, name="input", limit=size)
        case _:
            assert_never(op)


def _check_decision(decision: Decision) -> None:
    if not isinstance(decision, get_args(Decision)):  # what is no decision would approve
        raise ValueError(f"a decision must be one of ours, not {type(decision).__name__}")  # noqa: TRY004
    if isinstance(decision, Denied):
        size = limits.MAX_CAPABILITY_INPUT_BYTES
        check_text(decision.rejection, name="rejection", limit=size)
    elif isinstance(decision, Approved) and decision.arguments is not None:
        check_json(decision.arguments, name="arguments")
        size = len(msgspec.json.encode(decision.arguments))
        if size > limits.MAX_ARGUMENT_BYTES:
            most = f"{limits.MAX_ARGUMENT_BYTES:,}"
            raise ValueError(f"arguments have {size:,} bytes; at most {most} are allowed")


def _check_user_input(op: UserInput) -> None:
    check_text(op.text, name="text", limit=limits.MAX_USER_INPUT_BYTES)
    if not op.text.strip() and not op.attachments:
        raise ValueError("a message needs text that is not blank, or an attachment")
    if op.delivery not in {None, "steer", "queue"}:
        raise ValueError(f"delivery must be 'steer', 'queue' or None, not {op.delivery!r}")
    if op.target_turn_id is not None:
        _check_id("target_turn_id", op.target_turn_id)
    if len(op.attachments) > limits.MAX_ATTACHMENTS:
        count = len(op.attachments)
        raise ValueError(f"{count} attachments; at most {limits.MAX_ATTACHMENTS} are allowed")
    if len({attachment.id for attachment in op.attachments}) < len(op.attachments):
        raise ValueError("two attachments have one id")
    for item in op.attachments:
        _check_id("attachment id", item.id)
        size = limits.MAX_ATTACHMENT_NAME_BYTES
        check_text(item.name, name="attachment name", limit=size, blank=False)
        size = limits.MAX_MEDIA_TYPE_BYTES
        check_text(item.media_type, name="media type", limit=size, blank=False)
        if not 1 <= item.size <= limits.MAX_ATTACHMENT_BYTES:
            most = f"{limits.MAX_ATTACHMENT_BYTES:,}"
            raise ValueError(f"attachment of {item.size:,} bytes; 1 to {most} are allowed")


def check_session_id(session_id: str) -> None:
    """Check a session id: 1 to 255 bytes of UTF-8 without control characters.

    Ids are compared byte for byte and never used as a path, so
    ``"A"`` and ``"a"`` are two sessions and ``"../x"`` is just a name.

    Raises:
        ValueError: It says what is wrong.
    """
    check_text(session_id, name="session id", limit=limits.MAX_SESSION_ID_BYTES)
    if not session_id:
        raise ValueError("session id must not be empty")
    if not session_id.isprintable() and any(map(_is_control, session_id)):
        raise ValueError("session id must not hold control characters")


def _is_control(char: str) -> bool:
    return ord(char) < 32 or 127 <= ord(char) < 160
