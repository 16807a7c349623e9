"""Transcript items: what a model reads and writes, independent of any provider.

Order carries meaning: one model output is its reasoning, its messages and its
calls, in that order; the outputs of its calls follow in call order, and nothing
else may stand between a call and its output.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import attrs

from trio_agent.protocol.text import Json
from trio_agent.record import Record

Phase: TypeAlias = Literal["reasoning", "commentary", "final_answer"]
"""What a piece of model text is for."""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Attachment(Record):
    """A reference to a file that came with a message; the bytes live elsewhere."""

    id: str
    name: str
    media_type: str
    size: int


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Sealed(Record):
    """Data only its own provider can open: carried as it came, sent to nobody else.

    ``provider`` is the binding that the adapter checks before it sends the
    data back (for example ``"openai-responses"``); ``data`` is any JSON.
    """

    provider: str
    data: Json


@attrs.frozen(kw_only=True, eq=False, repr=False)
class UserItem(Record):
    """A user's message, or hidden guidance if ``internal`` names its kind."""

    tag: ClassVar[str] = "user"

    text: str
    attachments: tuple[Attachment, ...] = ()
    submission_id: str | None = None
    internal: str | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class AssistantItem(Record):
    """What a model said. ``sealed``: the provider's own form of it, if it needs it back."""

    tag: ClassVar[str] = "assistant"

    text: str
    phase: Literal["commentary", "final_answer"] = "final_answer"
    sealed: Sealed | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ReasoningItem(Record):
    """What a model thought: a readable ``text``, perhaps empty, and the sealed original."""

    tag: ClassVar[str] = "reasoning"

    text: str = ""
    sealed: Sealed | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ToolCallItem(Record):
    """A model asks for a tool. ``call_id`` is ours and unique in the session.

    ``provider_call_id`` is the model's own id, whatever it is; ``arguments`` is
    always an object (a call that gave none is answered with an error).
    """

    tag: ClassVar[str] = "tool_call"

    call_id: str
    name: str
    arguments: dict[str, Json]
    provider_call_id: str | None = None
    sealed: Sealed | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ToolOutputItem(Record):
    """What the model is told a call came to."""

    tag: ClassVar[str] = "tool_output"

    call_id: str
    output: str
    is_error: bool = False


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ImageItem(Record):
    """A picture for one request only: a hook may add it to a request, nothing stores it.

    ``data`` is base64 text.
    """

    tag: ClassVar[str] = "image"

    media_type: str
    data: str


Item: TypeAlias = UserItem | AssistantItem | ReasoningItem | ToolCallItem | ToolOutputItem

ITEM_TYPES: tuple[type[Item], ...] = (
    UserItem,
    AssistantItem,
    ReasoningItem,
    ToolCallItem,
    ToolOutputItem,
)

RequestItem: TypeAlias = Item | ImageItem
"""What a request may hold: every durable item, and pictures that never become durable."""
