"""Events that tell the text of an item again: the journal names the item instead.

What a user, a tool or a model said is told twice, to the model by an item and to
frontends by an event. One save adds both, and rows of items are never deleted, so
the event's row can leave the text to the item's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

from trio_agent.protocol.events import (
    AgentMessage,
    ContentPart,
    EventMsg,
    ToolCallEnd,
    UserMessage,
)
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
    of = _TEXT_OF.get(type(msg)) if texts else None
    n = None if of is None else texts.get(of(msg))
    return (msg, None) if n is None else (with_text(msg, ""), n)


def _only_part(msg: AgentMessage) -> str:
    return msg.content[0].text if len(msg.content) == 1 else ""


_TEXT_OF: Final[Mapping[type, Callable[[Any], str]]] = {
    UserMessage: attrgetter("text"),
    ToolCallEnd: attrgetter("output"),
    AgentMessage: _only_part,
}


def with_text(msg: EventMsg, text: str) -> EventMsg:
    """Return *msg* with *text* in the place that `quote` emptied.

    Member by member, which is twice as fast as `attrs.evolve`: every save comes here.

    Raises:
        TypeError: If it is no message that quotes.
    """
    match msg:
        case UserMessage():
            return UserMessage(
                turn_id=msg.turn_id,
                text=text,
                attachments=msg.attachments,
                delivery=msg.delivery,
            )
        case ToolCallEnd():
            return ToolCallEnd(
                turn_id=msg.turn_id,
                call_id=msg.call_id,
                name=msg.name,
                output=text,
                outcome=msg.outcome,
                is_error=msg.is_error,
            )
        case AgentMessage(content=(part,)):
            content = (ContentPart(phase=part.phase, text=text),)
            return AgentMessage(turn_id=msg.turn_id, step_id=msg.step_id, content=content)
        case _:
            raise TypeError(f"a {msg.tag} quotes nothing")
