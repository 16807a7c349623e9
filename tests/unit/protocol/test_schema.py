from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it brings no types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent import protocol
from trio_agent.errors import ProtocolError
from trio_agent.protocol import codec, json_schema
from trio_agent.protocol.events import EVENT_TYPES
from trio_agent.protocol.ops import DECISION_TYPES, OP_TYPES
from trio_agent.testing import samples, strategies

SCHEMA = json_schema()
Validator = jsonschema.Draft202012Validator
WHOLE = Validator(SCHEMA)


def part(name: str) -> Any:
    return Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})


def test_the_schema_is_a_schema() -> None:
    Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


def test_every_record_of_the_wire_is_in_it() -> None:
    names = {cls.__name__ for cls in (*OP_TYPES, *DECISION_TYPES, *EVENT_TYPES)}

    assert names | {"Op", "Decision", "EventMsg", "Submission", "Event"} <= set(SCHEMA["$defs"])


def test_nothing_in_it_points_nowhere() -> None:
    text = json.dumps(SCHEMA)

    for piece in text.split('"#/$defs/')[1:]:
        assert piece.split('"')[0] in SCHEMA["$defs"]


@given(strategies.submissions() | strategies.events())
def test_every_real_encoding_is_valid(record: Any) -> None:
    WHOLE.validate(json.loads(codec.dumps(record)))


@pytest.mark.parametrize("op", samples.OPS, ids=lambda op: op.tag)
def test_each_op_is_valid_on_its_own(op: Any) -> None:
    value = json.loads(codec.dumps(op))

    part("Op").validate(value)
    part(type(op).__name__).validate(value)
    assert not part("EventMsg").is_valid(value)


def loads(value: Any) -> bool:
    try:
        codec.structure(value, protocol.Submission, name="submission")
    except ProtocolError:
        return False
    return True


PLAUSIBLE: list[Any] = [None, True, 5, "x", [], {}, "steer", {"type": "abort"}]


@given(op=strategies.ops(), data=st.data())
def test_the_schema_and_the_codec_agree(op: Any, data: st.DataObject) -> None:
    """Change one member of an op: both take it or both refuse it."""
    value = json.loads(codec.dumps(op))
    member = data.draw(st.sampled_from([*value, "surprise"]))
    if data.draw(st.booleans()):
        value.pop(member, None)
    else:
        value[member] = data.draw(st.sampled_from(PLAUSIBLE))
    whole = {"id": "s", "op": value}

    assert part("Submission").is_valid(whole) == loads(whole)


def test_the_facade_names_what_it_has() -> None:
    assert all(hasattr(protocol, name) for name in protocol.__all__)
    records = (*OP_TYPES, *DECISION_TYPES, *EVENT_TYPES, *protocol.ITEM_TYPES)
    assert {cls.__name__ for cls in records} <= set(protocol.__all__)
