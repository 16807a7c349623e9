from __future__ import annotations

import itertools

import attrs
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.protocol.events import (
    AgentMessage,
    ContentPart,
    ToolCallBegin,
    ToolCallEnd,
    UserMessage,
)
from trio_agent.protocol.items import (
    AssistantItem,
    Attachment,
    Item,
    ReasoningItem,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.replay import UNKNOWN_TOOL_NAME, replay_events
from trio_agent.testing import strategies


@attrs.frozen
class Batch:
    sequence: int
    items: tuple[Item, ...]


def replay(*items: Item, sequence: int = 7, **turn_ids: str) -> list[object]:
    return list(replay_events([Batch(sequence, items)], "session", turn_ids=turn_ids))


CALL = ToolCallItem(call_id="c", name="read", arguments={"path": "a"})
OUTPUT = ToolOutputItem(call_id="c", output="text")


def test_nothing_tells_nothing() -> None:
    assert replay_events([], "session") == ()


def test_a_message_is_told_with_its_attachments() -> None:
    file = Attachment(id="f", name="a.txt", media_type="text/plain", size=1)

    assert replay(UserItem(text="hi", attachments=(file,)), UserItem(text="")) == [
        UserMessage(turn_id="history-7-0", text="hi", attachments=(file,))
    ]


def test_hidden_items_tell_nothing_and_part_nothing() -> None:
    told = replay(
        UserItem(text="secret", internal="tasks"),
        AssistantItem(text="a"),
        UserItem(text="secret", internal="tasks"),
        AssistantItem(text="b"),
    )

    assert [type(event) for event in told] == [AgentMessage]
    assert "secret" not in repr(told)


def test_what_stands_side_by_side_is_one_answer_with_its_parts() -> None:
    told = replay(
        UserItem(text="hi"),
        ReasoningItem(text="hm"),
        AssistantItem(text="looking", phase="commentary"),
        AssistantItem(text="done"),
        CALL,
        ReasoningItem(text=""),
        AssistantItem(text="after"),
    )

    assert told[1:] == [
        AgentMessage(
            turn_id="history-7-1",
            step_id="history-7-1",
            content=(
                ContentPart(phase="reasoning", text="hm"),
                ContentPart(phase="commentary", text="looking"),
                ContentPart(phase="final_answer", text="done"),
            ),
        ),
        ToolCallBegin(turn_id="history-7-4", call_id="c", name="read", arguments={"path": "a"}),
        AgentMessage(
            turn_id="history-7-6",
            step_id="history-7-6",
            content=(ContentPart(phase="final_answer", text="after"),),
        ),
    ]


def test_thoughts_that_cannot_be_read_tell_nothing() -> None:
    assert replay(ReasoningItem()) == []


def test_answers_of_two_saves_are_two() -> None:
    batches = [Batch(1, (AssistantItem(text="a"),)), Batch(2, (AssistantItem(text="b"),))]

    assert len(replay_events(batches, "session")) == 2


def test_an_end_belongs_to_its_begin_even_across_saves() -> None:
    batches = [Batch(3, (UserItem(text="hi"), CALL)), Batch(4, (OUTPUT,))]

    assert replay_events(batches, "session")[1:] == (
        ToolCallBegin(turn_id="history-3-1", call_id="c", name="read", arguments={"path": "a"}),
        ToolCallEnd(
            turn_id="history-3-1", call_id="c", name="read", output="text", outcome="finished"
        ),
    )


def test_an_end_without_its_begin_has_a_place_of_its_own() -> None:
    failed = attrs.evolve(OUTPUT, is_error=True)

    assert replay(failed) == [
        ToolCallEnd(
            turn_id="history-7-0",
            call_id="c",
            name=UNKNOWN_TOOL_NAME,
            output="text",
            outcome="failed",
            is_error=True,
        )
    ]


def test_the_real_turn_wins_at_both_ends() -> None:
    for items in ((CALL, OUTPUT), (OUTPUT,)):
        for event in replay(*items, c="turn-1"):
            assert isinstance(event, ToolCallBegin | ToolCallEnd)
            assert event.turn_id == "turn-1"


@given(strategies.histories(max_size=4), st.lists(st.integers(0, 15), max_size=4))
def test_where_it_was_saved_changes_ids_but_not_calls_and_messages(
    items: tuple[Item, ...], cuts: list[int]
) -> None:
    edges = sorted({0, len(items), *(cut for cut in cuts if cut < len(items))})
    batches = [
        Batch(number, items[start:end])
        for number, (start, end) in enumerate(itertools.pairwise(edges), start=1)
    ]
    told = replay_events(batches, "session")

    begins = {event.call_id: event for event in told if isinstance(event, ToolCallBegin)}
    ends = [event for event in told if isinstance(event, ToolCallEnd)]
    calls = [item for item in items if isinstance(item, ToolCallItem)]
    outputs = [item for item in items if isinstance(item, ToolOutputItem)]
    users = [item for item in items if isinstance(item, UserItem) and item.internal is None]
    assert [event.call_id for event in ends] == [item.call_id for item in outputs]
    assert set(begins) == {item.call_id for item in calls}
    assert all(end.turn_id == begins[end.call_id].turn_id for end in ends)
    assert all(end.name == begins[end.call_id].name for end in ends)
    assert [event.text for event in told if isinstance(event, UserMessage)] == [
        item.text for item in users if item.text or item.attachments
    ]
    said = [part.text for one in told if isinstance(one, AgentMessage) for part in one.content]
    assert said == [
        item.text
        for item in items
        if isinstance(item, AssistantItem) or (isinstance(item, ReasoningItem) and item.text)
    ]
    assert told == replay_events(batches, "another session"), "pure, and the same for a fork"
