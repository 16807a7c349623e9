"""The wire form as a JSON Schema, read off the records themselves."""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any, Final, Literal

import attrs

from trio_agent.protocol.events import EVENT_TYPES, Event, EventMsg
from trio_agent.protocol.items import Attachment
from trio_agent.protocol.ops import DECISION_TYPES, OP_TYPES, Decision, Op, Submission
from trio_agent.protocol.text import Json

_UNIONS: Final = {
    frozenset(OP_TYPES): "Op",
    frozenset(DECISION_TYPES): "Decision",
    frozenset(EVENT_TYPES): "EventMsg",
}

_PLAIN: Final[dict[Any, dict[str, Json]]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    types.NoneType: {"type": "null"},
    Any: {},
}


def json_schema() -> dict[str, Json]:
    """Return the JSON Schema (2020-12) of what crosses a wire: submissions and events.

    An instance is one `Submission` or one `Event`; ``$defs`` has every record by its
    class name, and the unions ``Op``, ``Decision`` and ``EventMsg``. Sizes are not
    part of it: they are limits in bytes, which JSON Schema cannot count.
    """
    found: dict[str, dict[str, Json]] = {}
    for union in (Op, Decision, EventMsg):
        _schema(union, found)
    for record in (Submission, Event, Attachment):
        _schema(record, found)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "trio_agent wire protocol",
        "anyOf": [{"$ref": "#/$defs/Submission"}, {"$ref": "#/$defs/Event"}],
        "$defs": dict(sorted(found.items())),
    }


def _schema(hint: Any, found: dict[str, dict[str, Json]]) -> dict[str, Json]:
    """Return the schema of *hint*; records and unions it needs go into *found*."""
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    if attrs.has(hint):
        if hint.__name__ not in found:
            found[hint.__name__] = {}  # it may hold itself
            found[hint.__name__] = _record(hint, found)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(members)}
    if origin is tuple:
        return {"type": "array", "items": _schema(members[0], found)}
    if origin is dict:
        return {"type": "object"}
    return _union(members, found)


def _union(members: tuple[Any, ...], found: dict[str, dict[str, Json]]) -> dict[str, Json]:
    solid = tuple(member for member in members if member is not types.NoneType)
    name = _UNIONS.get(frozenset(solid))
    if name is None:
        return {"anyOf": [_schema(member, found) for member in members]}
    if name not in found:
        found[name] = {}
        found[name] = {"oneOf": [_schema(member, found) for member in solid]}
    one: dict[str, Json] = {"$ref": f"#/$defs/{name}"}
    return one if len(solid) == len(members) else {"anyOf": [one, {"type": "null"}]}


def _record(cls: Any, found: dict[str, dict[str, Json]]) -> dict[str, Json]:
    hints = typing.get_type_hints(cls)
    properties: dict[str, Json] = {}
    required: list[str] = []
    if (tag := getattr(cls, "tag", None)) is not None:
        properties["type"] = {"const": tag}
        required.append("type")
    for field in attrs.fields(cls):
        properties[field.name] = _schema(hints[field.name], found)
        if field.default is attrs.NOTHING:
            required.append(field.name)
        elif field.default is None or isinstance(field.default, str | int | float):
            properties[field.name]["default"] = field.default
    return {
        "type": "object",
        "description": inspect.getdoc(cls) or "",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
