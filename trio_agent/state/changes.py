"""What can happen to a session: one record a change, named in the past tense.

Changes live between two functions and are never stored or sent. So they are structs,
which msgspec makes without compiling any code: an eighth of what an attrs class costs
to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct

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
from trio_agent.state.checkpoint import Approval, QueuedMessage, ToolCall


class MessageQueued(Struct, frozen=True, kw_only=True):
    """A message was accepted and waits."""

    message: QueuedMessage


class QueueEdited(Struct, frozen=True, kw_only=True):
    """A waiting message has another text and, from now on, the id of the edit."""

    submission_id: str
    text: str
    new_id: str


class QueueCancelled(Struct, frozen=True, kw_only=True):
    """A waiting message was taken back, or refused by a hook before it could enter."""

    submission_id: str


class TurnBegan(Struct, frozen=True, kw_only=True):
    """A turn began. ``text`` is None if a hook refused the message: nothing of it is kept."""

    submission_id: str
    turn_id: str
    started_at_ms: int
    text: str | None
    attachments: tuple[Attachment, ...] = ()
    hidden: tuple[Item, ...] = ()
    delivery: Delivery = "turn"
    context_window: int | None = None


class SteerJoined(Struct, frozen=True, kw_only=True):
    """A waiting steer entered the context of its turn."""

    submission_id: str
    hidden: tuple[Item, ...] = ()


class ContextChanged(Struct, frozen=True, kw_only=True):
    """Hooks added to the context, or rewrote it (then it begins a new epoch)."""

    items: tuple[Item, ...] = ()
    rewrite: tuple[Item, ...] | None = None


class StepBegan(Struct, frozen=True, kw_only=True):
    """A model request is about to be sent."""

    step_id: str
    started_at_ms: int
    route: str
    request_digest: str = ""


class StepEnded(Struct, frozen=True, kw_only=True):
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


class CallsBegan(Struct, frozen=True, kw_only=True):
    """The handlers of these calls are about to be entered."""

    call_ids: tuple[str, ...]


class CallEnded(Struct, frozen=True, kw_only=True):
    """A call, begun or not, has its outcome; ``hidden`` goes behind the batch's outputs."""

    call_id: str
    outcome: CallOutcome
    output: str
    hidden: tuple[UserItem, ...] = ()


class CallReadmitted(Struct, frozen=True, kw_only=True):
    """A call that a crash cut off may run again, with the same key."""

    call_id: str


class ApprovalAsked(Struct, frozen=True, kw_only=True):
    """A call waits for a decision."""

    call_id: str
    approval: Approval


class ApprovalDecided(Struct, frozen=True, kw_only=True):
    """The decision is here; `Approved` may change the arguments."""

    call_id: str
    decision: Decision


class BatchSettled(Struct, frozen=True, kw_only=True):
    """All calls have ended: their outputs join the context in call order, then the hidden."""


class TurnContinued(Struct, frozen=True, kw_only=True):
    """A stop hook made the model go on; happens once a turn at most."""

    prompt: Item


class TurnInterrupted(Struct, frozen=True, kw_only=True):
    """Somebody asked for the end of the turn: from now on it can only be closed."""

    reason: str


class TurnEnded(Struct, frozen=True, kw_only=True):
    """The turn is over. Steers that still wait become messages of their own."""

    outcome: TurnOutcome
    finish_reason: FinishReason
    finished_at_ms: int
    reason: str = ""


class RouteChanged(Struct, frozen=True, kw_only=True):
    """Another route answers from now on; ``quiet`` where an opening's first event tells it."""

    model: ModelChanged
    quiet: bool = False


class MetadataReplaced(Struct, frozen=True, kw_only=True):
    """The session's metadata were replaced."""

    metadata: Mapping[str, Json]


class StateSaved(Struct, frozen=True, kw_only=True):
    """A middleware or tool has another durable state; None removes it."""

    name: str
    value: Json


class GrantAdded(Struct, frozen=True, kw_only=True):
    """An approval is remembered for the session."""

    key: str


class UsageCounted(Struct, frozen=True, kw_only=True):
    """Tokens were spent outside of model steps."""

    usage: TokenUsage


class ContentNamed(Struct, frozen=True, kw_only=True):
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
