"""Every record survives its wire form and its row form; nothing else gets in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import ProtocolError, StoreVersionError, SubmissionRejectedError
from trio_agent.protocol import codec
from trio_agent.protocol.events import (
    EVENT_TYPES,
    Error,
    Event,
    EventMsg,
    ToolCallBegin,
    ToolProgress,
    TurnStarted,
)
from trio_agent.protocol.items import (
    ITEM_TYPES,
    AssistantItem,
    Item,
    ReasoningItem,
    Sealed,
    ToolCallItem,
    UserItem,
)
from trio_agent.protocol.ops import (
    Approved,
    ExecApproval,
    Op,
    Submission,
    UserInput,
    validate_submission,
)
from trio_agent.testing import strategies

LOADERS: dict[str, tuple[st.SearchStrategy[Any], Callable[[str | bytes], Any]]] = {
    "op": (strategies.ops(), codec.load_op),
    "submission": (strategies.submissions(), codec.load_submission),
    "event": (strategies.events(), codec.load_event),
}
with_each_form = pytest.mark.parametrize("form", LOADERS)
ROWS: st.SearchStrategy[EventMsg | Item] = strategies.messages() | strategies.items()


def by_class(*classes: type[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cls", classes, ids=lambda cls: cls.__name__)


@with_each_form
@given(data=st.data())
def test_the_wire_form_comes_back_equal(form: str, data: st.DataObject) -> None:
    strategy, load = LOADERS[form]
    record = data.draw(strategy)

    text = codec.dumps(record)

    assert load(text) == record
    assert load(text.decode()) == record


@by_class(*EVENT_TYPES, *ITEM_TYPES)
@given(data=st.data())
def test_the_row_form_comes_back_equal(cls: type[Any], data: st.DataObject) -> None:
    record = data.draw(strategies.records(cls))

    assert codec.decode_row(cls.tag, codec.encode_row(record)) == record


@with_each_form
@given(data=st.data())
def test_equal_records_have_equal_texts(form: str, data: st.DataObject) -> None:
    strategy, load = LOADERS[form]
    text = codec.dumps(data.draw(strategy))

    assert codec.dumps(load(text)) == text


@with_each_form
@given(data=st.data())
def test_a_cut_text_is_a_protocol_error(form: str, data: st.DataObject) -> None:
    strategy, load = LOADERS[form]
    text = codec.dumps(data.draw(strategy))
    cut = text[: data.draw(st.integers(0, len(text) - 1))]

    with pytest.raises(ProtocolError):
        load(cut)


def mutilate(data: st.DataObject, text: bytes) -> bytes:
    """Replace, insert or remove some bytes anywhere."""
    draw = data.draw
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 4)))
    return text[:start] + draw(st.binary(max_size=4)) + text[end:]


@with_each_form
@given(data=st.data())
def test_a_mutilated_text_is_a_protocol_error_or_a_record(
    form: str, data: st.DataObject
) -> None:
    strategy, load = LOADERS[form]
    text = mutilate(data, codec.dumps(data.draw(strategy)))

    try:
        record = load(text)
    except ProtocolError:
        return
    assert load(codec.dumps(record)) == record


@given(record=ROWS, data=st.data())
def test_a_mutilated_row_is_a_protocol_error_or_a_record(
    record: EventMsg | Item, data: st.DataObject
) -> None:
    body = mutilate(data, codec.encode_row(record))

    try:
        again = codec.decode_row(record.tag, body)
    except ProtocolError:
        return
    assert type(again) is type(record)


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_garbage_is_a_protocol_error(text: Any) -> None:
    for _, load in LOADERS.values():
        with pytest.raises(ProtocolError):
            load(text)


@given(strategies.json_values())
def test_any_other_json_is_a_protocol_error(value: Any) -> None:
    for _, load in LOADERS.values():
        with pytest.raises(ProtocolError):
            load(json.dumps(value))


# --- nothing is coerced, left out or added


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every typed member: not inside of free JSON."""
    found: list[tuple[Any, ...]] = [path] if path else []
    free = path and path[-1] in {"arguments", "data"}
    if isinstance(value, dict) and not free:
        for key, member in value.items():
            found += places(member, (*path, key))
    elif isinstance(value, list) and not free:
        for index, member in enumerate(value):
            found += places(member, (*path, index))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


WRONG: dict[type, list[Any]] = {
    str: [5, True, None, ["x"], {"x": 1}],
    bool: [0, 1, "true", None],
    int: ["5", True, 1.0, [5]],
    float: ["0.5", True, [0.5]],
    list: [{}, "x", 5, None],
    dict: [[], "x", 5],
}


@with_each_form
@given(data=st.data())
def test_no_member_takes_a_value_of_another_type(form: str, data: st.DataObject) -> None:
    strategy, load = LOADERS[form]
    whole = json.loads(codec.dumps(data.draw(strategy)))
    typed = [path for path in places(whole) if type(at(whole, path)) in WRONG]
    path = data.draw(st.sampled_from(typed))
    wrong = data.draw(st.sampled_from(WRONG[type(at(whole, path))]))
    at(whole, path[:-1])[path[-1]] = wrong

    try:
        record = load(json.dumps(whole))
    except ProtocolError:
        return
    assert wrong is None, "an optional member may be left out; nothing is coerced"
    assert json.loads(codec.dumps(record)) == whole


@with_each_form
@given(data=st.data())
def test_unknown_members_are_refused_at_any_depth(form: str, data: st.DataObject) -> None:
    strategy, load = LOADERS[form]
    whole = json.loads(codec.dumps(data.draw(strategy)))
    paths = [(), *places(whole)]
    records = [p for p in paths if isinstance(at(whole, p), dict) and p[-1:] != ("arguments",)]
    records = [p for p in records if p[-1:] != ("data",)]
    at(whole, data.draw(st.sampled_from(records)))["surprise"] = None

    with pytest.raises(ProtocolError):
        load(json.dumps(whole))


@with_each_form
@given(data=st.data())
def test_a_missing_tag_or_a_foreign_one_is_refused(form: str, data: st.DataObject) -> None:
    strategy, load = LOADERS[form]
    whole = json.loads(codec.dumps(data.draw(strategy)))
    tagged = [p for p in [(), *places(whole)] if p[-1:] == ("type",)]
    path = data.draw(st.sampled_from(tagged))
    holder = at(whole, path[:-1])
    tags: list[Any] = [None, "", "no_such_type", 5, [], "block"]
    if (tag := data.draw(st.sampled_from(tags))) is None:
        del holder["type"]
    else:
        holder["type"] = tag

    with pytest.raises(ProtocolError):
        load(json.dumps(whole))


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (codec.load_op, b'{"type":"user_input"}'),
        (codec.load_op, b'{"type":"interrupt","turn_id":5}'),
        (codec.load_op, b'{"type":"user_input","text":"x","delivery":"turn"}'),
        (codec.load_op, b'{"type":"user_input","text":"x","delivery":["steer"]}'),
        (codec.load_op, b'{"type":"set_model","route":"a","route":"b"}'),
        (codec.load_op, b'{"type":"set_model","route":"\\ud800"}'),
        (codec.load_op, b'{"type":"set_model","route":"\xff"}'),
        (codec.load_op, '{"type":"set_model","route":"x"}'.encode("utf-16")),
        (codec.load_op, b'\xef\xbb\xbf{"type":"set_model","route":"x"}'),
        (codec.load_op, b'{"type":"set_model","route":"x"}{}'),
        (codec.load_op, b"[" * 100_000),
        (codec.load_op, b"null"),
        (codec.load_op, b"[]"),
        (codec.load_op, b'"user_input"'),
        (codec.load_submission, b"0"),
        (codec.load_submission, b"[]"),
        (codec.load_submission, b"null"),
        (codec.load_submission, b'"s"'),
        (codec.load_event, b"0"),
        (codec.load_event, b"[]"),
        (codec.load_op, b"0"),
        (codec.load_submission, b'{"id":"s"}'),
        (codec.load_submission, b'{"id":"s","op":null}'),
        (codec.load_event, b'{"sequence":true,"recorded_at_ms":1,"msg":{"type":"x"}}'),
        (codec.load_event, b'{"sequence":1e3,"recorded_at_ms":1,"msg":{"type":"x"}}'),
    ],
)
def test_each_of_these_is_refused(load: Callable[[bytes], Any], text: bytes) -> None:
    with pytest.raises(ProtocolError):
        load(text)


def approval(arguments: str) -> str:
    return (
        '{"type":"exec_approval","id":"a","decision":{"type":"approved","arguments":'
        f"{arguments}}}}}"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x":NaN}',
        '{"x":Infinity}',
        '{"x":-Infinity}',
        '{"x":1e999}',
        '{"x":{"y":1,"y":1}}',
        '{"x":"\\udc00"}',
        '{"\\udc00":1}',
        '{"x":' + "9" * 400 + "}",
        '{"x":' + "9" * 5_000 + "}",
        '{"x":' + "[" * 200 + "]" * 200 + "}",
    ],
)
def test_free_json_is_still_strict(arguments: str) -> None:
    codec.load_op(approval('{"x":1.5}'))
    with pytest.raises(ProtocolError):
        codec.load_op(approval(arguments))


# --- what cannot be written is not written: msgspec would make NaN a null

BAD_VALUES = [
    float("nan"),
    float("inf"),
    -float("inf"),
    "\ud800",
    {"\udfff": 1},
    object(),
    {1: 2},
]


@pytest.mark.parametrize("bad", BAD_VALUES, ids=lambda bad: repr(bad)[:12])
def test_values_that_are_no_json_never_leave(bad: Any) -> None:
    sealed = Sealed(provider="p", data=[bad])
    rows: list[EventMsg | Item] = [
        ToolCallBegin(turn_id="t", call_id="c", name="n", arguments={"x": bad}),
        ToolCallItem(call_id="c", name="n", arguments={"x": [bad]}),
        ToolCallItem(call_id="c", name="n", arguments={}, sealed=sealed),
        AssistantItem(text="", sealed=sealed),
        ReasoningItem(sealed=sealed),
    ]
    for row in rows:
        with pytest.raises(ProtocolError):
            codec.encode_row(row)
    op = ExecApproval("a", Approved(arguments={"x": bad}))
    for record in (op, Submission("s", op)):
        with pytest.raises(ProtocolError):
            codec.dumps(record)
    with pytest.raises(SubmissionRejectedError):
        validate_submission(Submission("s", op))
    with pytest.raises(ProtocolError):
        codec.structure({"type": "approved", "arguments": bad}, Approved, name="decision")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_no_json_never_leave(number: float) -> None:
    rows: list[EventMsg] = [
        ToolProgress(turn_id="t", call_id="c", message="m", fraction=number),
        Error(kind="provider", message="m", retry_after=number),
    ]
    for row in rows:
        with pytest.raises(ProtocolError):
            codec.encode_row(row)
        with pytest.raises(ProtocolError):
            codec.dumps(Event(sequence=1, recorded_at_ms=1, msg=row))


def json_holders() -> list[tuple[str, str]]:
    """Return every field of a row that can hold a number that is not an integer."""
    found = []
    for cls in (*EVENT_TYPES, *ITEM_TYPES):
        for field in attrs.fields(cls):
            words = str(field.type)
            if any(word in words for word in ("float", "Json", "Any", "Sealed")):
                found.append((cls.__name__, field.name))
    return found


def test_every_row_field_that_can_hold_a_bad_number_is_checked() -> None:
    checked = {(cls.__name__, name) for cls, names in codec._LOOSE.items() for name in names}

    assert checked == set(json_holders())


@given(strategies.texts(), st.sampled_from(["\ud800", "\udfff", "\udc00\ud800"]))
def test_half_a_character_never_leaves(text: str, half: str) -> None:
    records: list[Op | EventMsg | Item] = [
        UserInput(text=text + half),
        UserItem(text=half + text),
        TurnStarted(turn_id=text + half),
    ]
    for record in records:
        with pytest.raises(ProtocolError):
            codec.dumps(record)
    for row in (UserItem(text=half + text), TurnStarted(turn_id=half)):
        with pytest.raises(ProtocolError):
            codec.encode_row(row)
    with pytest.raises(SubmissionRejectedError):
        validate_submission(Submission("s", UserInput(text=text + half)))


def test_an_unknown_kind_of_row_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        codec.decode_row("user_input", b"{}")


@given(strategies.submissions())
def test_the_strategies_make_valid_submissions(submission: Submission) -> None:
    validate_submission(submission)


def test_upcasters_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "CODEC_VERSION", 3)
    monkeypatch.setitem(codec.UPCASTERS, ("user", 1), lambda data: {**data, "one": True})
    monkeypatch.setitem(codec.UPCASTERS, ("user", 2), lambda data: {**data, "two": True})

    assert codec.upcast("user", 1, {}) == {"one": True, "two": True}
    assert codec.upcast("user", 2, {}) == {"two": True}
    assert codec.upcast("user", 3, {}) == {}
    assert codec.upcast("assistant", 1, {"x": 1}) == {"x": 1}


def test_a_row_of_an_older_version_is_brought_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a made-up version 1 a user's item has its text in `says`, in version 2 in `said`."""
    monkeypatch.setattr(codec, "CODEC_VERSION", 3)
    monkeypatch.setitem(codec.UPCASTERS, ("user", 1), lambda data: {"said": data["says"]})
    monkeypatch.setitem(codec.UPCASTERS, ("user", 2), lambda data: {"text": data["said"]})
    today = UserItem(text="x")

    assert codec.decode_row("user", b'{"says":"x"}', 1) == today
    assert codec.decode_row("user", b'{"said":"x"}', 2) == today
    assert codec.decode_row("user", codec.encode_row(today), 3) == today
    for damaged in (b'{"says":"x"}', b'{"said":5}', b'["said"]', b"{"):
        with pytest.raises(ProtocolError):
            codec.decode_row("user", damaged, 2)
    with pytest.raises(StoreVersionError):
        codec.decode_row("user", codec.encode_row(today), 4)


@given(record=ROWS)
def test_a_row_whose_shape_stayed_needs_no_upcaster(record: EventMsg | Item) -> None:
    body = codec.encode_row(record)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(codec, "CODEC_VERSION", 2)

        assert codec.decode_row(record.tag, body, 1) == record
