"""Events that tell the text of an item again: the journal names the item instead.

What a user, a tool or a model said is told twice, to the model by an item and to
frontends by an event. One save adds both, and rows of items are never deleted, so
the event's row can leave the text to the item's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from trio_agent.protocol.events import AgentMessage, EventMsg, ToolCallEnd, UserMessage
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    ReasoningItem,
    ToolOutputItem,
    UserItem,
)

SHORTEST: Final = 64
"""Characters from which on a text is worth a second look-up."""


def places(items: Iterable[Item], first: int) -> dict[str, int]:
    """Return where the texts of *items* are, the first of which is number *first*."""
    return {
        text: n
        for n, item in enumerate(items, first)
        if (text := item_text(item)) is not None and len(text) >= SHORTEST
    }


def item_text(item: Item) -> str | None:
    """Return what an event may quote of *item*."""
    match item:
        case UserItem() | AssistantItem() | ReasoningItem():
            return item.text
        case ToolOutputItem():
            return item.output
        case _:
            return None


def quote(msg: EventMsg, texts: Mapping[str, int]) -> tuple[EventMsg, int | None]:
    """Return what the row of *msg* holds, and the number of the item that has the rest.

    *texts* are what `places` found.
    """
    match msg:
        case UserMessage():
            text = msg.text
        case ToolCallEnd():
            text = msg.output
        case AgentMessage(content=(part,)):
            text = part.text
        case _:
            return msg, None
    n = texts.get(text)
    return (msg, None) if n is None else (with_text(msg, ""), n)


def with_text(msg: EventMsg, text: str) -> EventMsg:
    """Return *msg* with *text* in the place that `quote` emptied.

    Raises:
        TypeError: If it is no message that quotes.
    """
    match msg:
        case UserMessage():
            return attrs.evolve(msg, text=text)
        case ToolCallEnd():
            return attrs.evolve(msg, output=text)
        case AgentMessage(content=(part,)):
            return attrs.evolve(msg, content=(attrs.evolve(part, text=text),))
        case _:
            raise TypeError(f"a {msg.tag} quotes nothing")
