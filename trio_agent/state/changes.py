"""What can happen to a session: one record a change, named in the past tense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from trio_agent.protocol.events import (
    CallOutcome,
    Delivery,
    FinishReason,
    ModelChanged,
    StepOutcome,
    TurnOutcome,
)
from trio_agent.protocol.items import Attachment, Item, UserItem
from trio_agent.protocol.ops import Decision
from trio_agent.protocol.text import Json
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Record
from trio_agent.state.checkpoint import Approval, QueuedMessage, ToolCall


@attrs.frozen(kw_only=True, eq=False, repr=False)
class MessageQueued(Record):
    """A message was accepted and waits."""

    message: QueuedMessage


@attrs.frozen(kw_only=True, eq=False, repr=False)
class QueueEdited(Record):
    """A waiting message has another text and, from now on, the id of the edit."""

    submission_id: str
    text: str
    new_id: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class QueueCancelled(Record):
    """A waiting message was taken back, or refused by a hook before it could enter."""

    submission_id: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TurnBegan(Record):
    """A turn began. ``text`` is None if a hook refused the message: nothing of it is kept."""

    submission_id: str
    turn_id: str
    started_at_ms: int
    text: str | None
    attachments: tuple[Attachment, ...] = ()
    hidden: tuple[Item, ...] = ()
    delivery: Delivery = "turn"
    context_window: int | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class SteerJoined(Record):
    """A waiting steer entered the context of its turn."""

    submission_id: str
    hidden: tuple[Item, ...] = ()


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ContextChanged(Record):
    """Hooks added to the context, or rewrote it (then it begins a new epoch)."""

    items: tuple[Item, ...] = ()
    rewrite: tuple[Item, ...] | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class StepBegan(Record):
    """A model request is about to be sent."""

    step_id: str
    started_at_ms: int
    route: str
    request_digest: str = ""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class StepEnded(Record):
    """A model request is over.

    ``completed``: ``items`` join the context, ``calls`` make the open batch. Without
    calls, ``completing`` says how the turn ends unless a stop hook objects; None
    means that the model goes on. ``route`` is where the next attempt goes.
    """

    outcome: StepOutcome
    completed_at_ms: int
    finish_reason: FinishReason | None = None
    usage: TokenUsage | None = None
    items: tuple[Item, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    completing: FinishReason | None = None
    retry_in_ms: int | None = None
    route: str | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class CallsBegan(Record):
    """The handlers of these calls are about to be entered."""

    call_ids: tuple[str, ...]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class CallEnded(Record):
    """A call, begun or not, has its outcome; ``hidden`` goes behind the batch's outputs."""

    call_id: str
    outcome: CallOutcome
    output: str
    hidden: tuple[UserItem, ...] = ()


@attrs.frozen(kw_only=True, eq=False, repr=False)
class CallReadmitted(Record):
    """A call that a crash cut off may run again, with the same key."""

    call_id: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ApprovalAsked(Record):
    """A call waits for a decision."""

    call_id: str
    approval: Approval


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ApprovalDecided(Record):
    """The decision is here; `Approved` may change the arguments."""

    call_id: str
    decision: Decision


@attrs.frozen(kw_only=True, eq=False, repr=False)
class BatchSettled(Record):
    """All calls have ended: their outputs join the context in call order, then the hidden."""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TurnContinued(Record):
    """A stop hook made the model go on; happens once a turn at most."""

    prompt: Item


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TurnInterrupted(Record):
    """Somebody asked for the end of the turn: from now on it can only be closed."""

    reason: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TurnEnded(Record):
    """The turn is over. Steers that still wait become messages of their own."""

    outcome: TurnOutcome
    finish_reason: FinishReason
    finished_at_ms: int
    reason: str = ""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class RouteChanged(Record):
    """Another route answers from now on; ``quiet`` where an opening's first event tells it."""

    model: ModelChanged
    quiet: bool = False


@attrs.frozen(kw_only=True, eq=False, repr=False)
class MetadataReplaced(Record):
    """The session's metadata were replaced."""

    metadata: Mapping[str, Json]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class StateSaved(Record):
    """A middleware or tool has another durable state; None removes it."""

    name: str
    value: Json


@attrs.frozen(kw_only=True, eq=False, repr=False)
class GrantAdded(Record):
    """An approval is remembered for the session."""

    key: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class UsageCounted(Record):
    """Tokens were spent outside of model steps."""

    usage: TokenUsage


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ContentNamed(Record):
    """The instructions or the tools are other ones than before."""

    instructions_digest: str
    tools_digest: str


Change: TypeAlias = (
    MessageQueued
    | QueueEdited
    | QueueCancelled
    | TurnBegan
    | SteerJoined
    | ContextChanged
    | StepBegan
    | StepEnded
    | CallsBegan
    | CallEnded
    | CallReadmitted
    | ApprovalAsked
    | ApprovalDecided
    | BatchSettled
    | TurnContinued
    | TurnInterrupted
    | TurnEnded
    | RouteChanged
    | MetadataReplaced
    | StateSaved
    | GrantAdded
    | UsageCounted
    | ContentNamed
)
