"""The wire form of every record, byte for byte, as files that a reviewer can read.

A file that differs means that other programs have to change. If that is intended::

    WRITE_WIRE_FILES=1 python -m pytest tests/unit/protocol/test_wire_files.py

and say so in the changelog.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from trio_agent.errors import ProtocolError
from trio_agent.protocol import codec
from trio_agent.protocol.events import EVENT_TYPES, Event, EventMsg
from trio_agent.protocol.items import ITEM_TYPES, Item
from trio_agent.protocol.ops import DECISION_TYPES, OP_TYPES, Decision, ExecApproval
from trio_agent.testing import samples

FOLDER = Path(__file__).parents[2] / "wire"


def load_msg(text: bytes) -> EventMsg:
    return codec.load_event(b'{"sequence":1,"recorded_at_ms":1,"msg":' + text + b"}").msg


def load_decision(text: bytes) -> Decision:
    op = codec.load_op(b'{"type":"exec_approval","id":"a","decision":' + text + b"}")
    assert isinstance(op, ExecApproval)
    return op.decision


def load_item(text: bytes) -> Item:
    value: Any = codec.parse_json(text, name="item")
    return codec.structure(value, Item, name="item")  # type: ignore[arg-type]


FILES: dict[str, tuple[attrs.AttrsInstance, Callable[[bytes], Any]]] = {
    **{f"op_{one.tag}": (one, codec.load_op) for one in samples.OPS},
    **{f"decision_{one.tag}": (one, load_decision) for one in samples.DECISIONS},
    **{f"event_{one.tag}": (one, load_msg) for one in samples.EVENTS},
    **{f"item_{one.tag}": (one, load_item) for one in samples.ITEMS},
    "submission": (samples.SUBMISSION, codec.load_submission),
    "event": (samples.EVENT, codec.load_event),
}


def written(record: attrs.AttrsInstance) -> bytes:
    """Return the wire form laid out for people; members keep their order."""
    value = json.loads(codec.dumps(record))
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def compact(text: bytes) -> bytes:
    return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_the_record(name: str) -> None:
    record, load = FILES[name]
    path = FOLDER / f"{name}.json"
    if os.environ.get("WRITE_WIRE_FILES"):
        path.write_bytes(written(record))
    stored = path.read_bytes()

    assert stored == written(record)
    assert load(stored) == record
    assert compact(stored) == codec.dumps(record), "the order of members is part of the form"


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_noticed(name: str) -> None:
    record, load = FILES[name]
    stored = (FOLDER / f"{name}.json").read_bytes()
    meant = json.loads(stored)

    for place in range(len(stored)):
        changed = stored[:place] + bytes([stored[place] ^ 1]) + stored[place + 1 :]
        try:
            same = load(changed) == record
        except ProtocolError:
            continue
        assert not same or json.loads(changed) == meant, "only white space says nothing"


def test_every_record_has_a_file_and_every_file_a_record() -> None:
    tags = {(kind, cls.tag) for kind, classes in KINDS.items() for cls in classes}

    assert {f"{kind}_{tag}" for kind, tag in tags} | {"submission", "event"} == set(FILES)
    assert {path.stem for path in FOLDER.glob("*.json")} == set(FILES)


KINDS: dict[str, tuple[Any, ...]] = {
    "op": OP_TYPES,
    "decision": DECISION_TYPES,
    "event": EVENT_TYPES,
    "item": ITEM_TYPES,
}


def holds_default(record: Any) -> list[str]:
    return [
        f"{type(record).__name__}.{field.name}"
        for field in attrs.fields(type(record))
        if field.default is not attrs.NOTHING and getattr(record, field.name) == field.default
    ]


@pytest.mark.parametrize("name", FILES)
def test_the_sample_sets_every_field(name: str) -> None:
    record, _ = FILES[name]

    assert not holds_default(record), "a field that was forgotten in the file says nothing"


def test_a_wire_form_has_its_tag_first() -> None:
    for record, _ in FILES.values():
        tag = getattr(record, "tag", None)
        if tag is not None:
            assert next(iter(json.loads(codec.dumps(record)).items())) == ("type", tag)
    assert Event is type(samples.EVENT)
