"""The pure parts of the stores: joining, weaving, part rows, heads, schema scripts."""

from __future__ import annotations

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import ProtocolError, StoreVersionError
from trio_agent.protocol import codec
from trio_agent.protocol.events import AgentMessageDelta, Draft, ModelStepCompleted, Notice
from trio_agent.protocol.items import AssistantItem, UserItem
from trio_agent.protocol.text import Json
from trio_agent.state.checkpoint import Checkpoint, QueuedMessage, ToolCall
from trio_agent.store.history import weave
from trio_agent.store.numbering import Stream, arrange, metrics, settle
from trio_agent.store.rows import SMALL_BYTES, Head, read_part, write_small
from trio_agent.store.saving import Parts, change
from trio_agent.store.schema import MIGRATIONS, statements

letters = st.lists(st.sampled_from("abcdef"), max_size=6)
ITEMS = {letter: UserItem(text=letter) for letter in "abcdef"}


@given(letters, letters)
def test_weaving_keeps_both_orders(delta: list[str], tail: list[str]) -> None:
    rows = weave([ITEMS[one] for one in delta], [ITEMS[one] for one in tail])
    assert [item for item, shown, _ in rows if shown] == [ITEMS[one] for one in delta]
    assert [item for item, _, held in rows if held] == [ITEMS[one] for one in tail]
    assert all(shown or held for _, shown, held in rows)


@given(letters)
def test_weaving_stores_what_both_gained_once(grown: list[str]) -> None:
    added = [ITEMS[one] for one in grown]
    assert len(weave(added, added)) == len(added)


def message(name: str, text: str) -> QueuedMessage:
    return QueuedMessage(owner="m", id=name, boundary="queue", text=text)


queues = st.lists(
    st.builds(message, st.sampled_from("abcdef"), st.sampled_from(["", "x"])),
    unique_by=lambda one: one.id,
    max_size=6,
)


@given(st.lists(queues, max_size=5))
def test_part_rows_always_read_what_was_saved(states: list[list[QueuedMessage]]) -> None:
    """Applied to a table, the changes give the records in order, whatever came before."""
    table: dict[int, QueuedMessage] = {0: message("z", "left over")}
    parts: Parts[QueuedMessage] | None = None
    for state in states:
        step = change(parts, state, lambda one: one.id)
        if step.wipe:
            table.clear()
        for ordinal in step.deleted:
            del table[ordinal]
        table |= dict(step.written)
        parts = step.after
        assert [table[ordinal] for ordinal in sorted(table)] == state
        assert dict(parts.rows) == table


@given(queues, st.data())
def test_part_rows_cost_what_changed(queue: list[QueuedMessage], data: st.DataObject) -> None:
    before = change(None, queue, lambda one: one.id).after
    left = [one for one in queue if data.draw(st.booleans())]
    step = change(before, [*left, message("new", "x")], lambda one: one.id)
    assert [record.id for _, record in step.written] == ["new"]
    assert not step.wipe
    assert len(step.deleted) == len(queue) - len(left)


def delta(at: int, text: str) -> Draft:
    return Draft(recorded_at_ms=at, msg=AgentMessageDelta(turn_id="t", step_id="p", text=text))


def done() -> Draft:
    msg = ModelStepCompleted(
        turn_id="t",
        step_id="p",
        step_index=0,
        outcome="completed",
        started_at_ms=0,
        completed_at_ms=1,
    )
    return Draft(recorded_at_ms=1, msg=msg)


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["a", "é", ""])), min_size=1))
def test_metrics_never_run_backwards(chunks: list[tuple[int, str]]) -> None:
    entries = arrange([*(delta(at, text) for at, text in chunks), done()])
    assert settle(entries, lambda _: []) == ()
    completed = entries[-1].msg
    assert isinstance(completed, ModelStepCompleted)
    (found,) = completed.stream_metrics
    assert found.first_delta_at_ms == chunks[0][0]
    assert found.last_delta_at_ms == max(at for at, _ in chunks)
    assert found.chunk_count == len(chunks)
    assert found.utf8_bytes == sum(len(text.encode()) for _, text in chunks)
    assert 0 <= found.longest_gap_ms <= found.last_delta_at_ms
    assert [entry.row for entry in entries] == [False, True]


def test_a_fact_between_two_deltas_keeps_its_place() -> None:
    entries = arrange(
        [
            delta(1, "a"),
            delta(2, "b"),
            Draft(recorded_at_ms=3, msg=Notice(capability="c", text="x")),
            delta(4, "c"),
        ]
    )
    assert [getattr(entry.msg, "text", None) for entry in entries] == ["ab", "x", "c"]


def test_streams_of_several_rows_are_one() -> None:
    first, second = (
        Stream("commentary", 10, 20, 2, 5, 10),
        Stream("commentary", 15, 80, 2, 5, 3),
    )
    (found,) = metrics([first, second])
    assert (found.first_delta_at_ms, found.last_delta_at_ms) == (10, 80)
    assert (found.chunk_count, found.longest_gap_ms) == (4, 10)


def test_the_head_has_every_member_that_has_no_rows() -> None:
    names = {field.name for field in attrs.fields(Checkpoint)}
    rows = {"context", "queue", "pending_tools"}
    assert {field.name for field in attrs.fields(Head)} - {"queued", "pending"} == names - rows


@given(queues.map(tuple), st.integers(0, 2 * SMALL_BYTES))
def test_what_a_session_row_takes_in_is_small(
    queue: tuple[QueuedMessage, ...], size: int
) -> None:
    checkpoint = attrs.evolve(Checkpoint.empty("s"), queue=(*queue, message("z", "y" * size)))
    small = write_small(checkpoint)
    assert small is None or len(small) <= SMALL_BYTES
    assert size < SMALL_BYTES or small is None


def test_scripts_split_into_statements() -> None:
    trigger = "CREATE TRIGGER t AFTER INSERT ON a BEGIN SELECT 1; END;"
    script = f"CREATE TABLE a(x DEFAULT ';');{trigger}\n"
    assert len(statements(script)) == 2
    assert "".join(statements(MIGRATIONS[0])) == MIGRATIONS[0].rstrip()


def test_an_item_that_only_the_context_gained() -> None:
    ((_, shown, held),) = weave([], [AssistantItem(text="summary")])
    assert (shown, held) == (False, True)


def test_a_part_of_an_older_version_is_brought_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in a part untagged, such as hidden items, is read as it was written."""
    hidden = (UserItem(text="h", internal="guide"),)
    call = ToolCall(call_id="c", name="t", arguments={"x": 1}, hidden=hidden)
    body = msgspec.json.encode(call)
    monkeypatch.setattr(codec, "CODEC_VERSION", 2)

    assert read_part(ToolCall, 1, body) == call

    def renamed(data: dict[str, Json]) -> dict[str, Json]:
        return {**data, "name": data["tool"]}

    monkeypatch.setitem(codec.UPCASTERS, ("ToolCall", 1), renamed)
    assert read_part(ToolCall, 1, body.replace(b'"name":', b'"tool":')) == call
    with pytest.raises(ProtocolError):
        read_part(ToolCall, 1, body)
    with pytest.raises(StoreVersionError):
        read_part(ToolCall, 3, body)
