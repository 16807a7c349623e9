"""Transcript items back into the events that a frontend missed; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol, assert_never

from trio_agent.protocol.events import (
    AgentMessage,
    ContentPart,
    EventMsg,
    ToolCallBegin,
    ToolCallEnd,
    UserMessage,
)
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    ReasoningItem,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)

UNKNOWN_TOOL_NAME: Final = "tool"
"""The name of a call whose begin lies on an older page."""

_NO_TURNS: Final[Mapping[str, str]] = MappingProxyType({})


class Batch(Protocol):
    """The transcript items of one save, under the checkpoint's sequence."""

    @property
    def sequence(self) -> int:
        """The sequence of the save that added them."""
        ...

    @property
    def items(self) -> Sequence[Item]:
        """What it added, in order."""
        ...


def replay_events(
    batches: Iterable[Batch], session_id: str, *, turn_ids: Mapping[str, str] = _NO_TURNS
) -> tuple[EventMsg, ...]:
    """Return the events that tell what *batches* hold.

    Visible user messages, answers (what one save holds of reasoning and text side by
    side is one message), and the begin and end of every call. Hidden items tell
    nothing. Turns and steps have ids made of their place,
    ``history-<sequence>-<index>``; an end has the name and turn of its begin.

    Args:
        batches: In the order in which they were saved. They may begin in the middle
            of a turn: an end without its begin is called `UNKNOWN_TOOL_NAME`.
        session_id: Whose they are. No id depends on it: replays of a session and of
            its fork are alike.
        turn_ids: The real turn of calls that still run or wait, by call id.
    """
    del session_id
    told: list[EventMsg] = []
    begins: dict[str, ToolCallBegin] = {}
    for batch in batches:
        said: list[ContentPart] = []
        said_id = ""
        for index, item in enumerate(batch.items):
            place = f"history-{batch.sequence}-{index}"
            if isinstance(item, AssistantItem | ReasoningItem):
                if item.text or isinstance(item, AssistantItem):
                    said_id = said_id or place
                    said.append(_part(item))
                continue
            if isinstance(item, UserItem) and item.internal is not None:
                continue
            if said:
                told.append(_message(said_id, said))
                said, said_id = [], ""
            match item:
                case UserItem():
                    if item.text or item.attachments:
                        message = UserMessage(
                            turn_id=place, text=item.text, attachments=item.attachments
                        )
                        told.append(message)
                case ToolCallItem():
                    begin = ToolCallBegin(
                        turn_id=turn_ids.get(item.call_id, place),
                        call_id=item.call_id,
                        name=item.name,
                        arguments=item.arguments,
                    )
                    begins[item.call_id] = begin
                    told.append(begin)
                case ToolOutputItem():
                    told.append(_end(item, begins.get(item.call_id), turn_ids, place))
                case _:
                    assert_never(item)
        if said:
            told.append(_message(said_id, said))
    return tuple(told)


def _part(item: AssistantItem | ReasoningItem) -> ContentPart:
    phase = item.phase if isinstance(item, AssistantItem) else "reasoning"
    return ContentPart(phase=phase, text=item.text)


def _message(place: str, said: list[ContentPart]) -> AgentMessage:
    return AgentMessage(turn_id=place, step_id=place, content=tuple(said))


def _end(
    item: ToolOutputItem,
    begin: ToolCallBegin | None,
    turn_ids: Mapping[str, str],
    place: str,
) -> ToolCallEnd:
    return ToolCallEnd(
        turn_id=turn_ids.get(item.call_id, place) if begin is None else begin.turn_id,
        call_id=item.call_id,
        name=UNKNOWN_TOOL_NAME if begin is None else begin.name,
        output=item.output,
        outcome="failed" if item.is_error else "finished",
        is_error=item.is_error,
    )
