"""The one codec: strict in, compact out.

Two forms of every record. The *wire* form is a JSON object with a ``type``
member; cattrs reads it and names the path of every mistake. The *row* form
leaves the type to a column beside it; msgspec reads it, many at a time.

Nothing is coerced: ``5`` is never taken for ``"5"``, nor ``true`` for ``1``.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar, cast

import attrs
import cattrs
import cattrs.gen
import msgspec

from trio_agent.errors import ProtocolError, StoreVersionError
from trio_agent.protocol.events import (
    EVENT_TYPES,
    ApprovalResolved,
    Error,
    Event,
    EventMsg,
    ExecApprovalRequest,
    SessionHistory,
    ToolCallBegin,
    ToolProgress,
)
from trio_agent.protocol.items import (
    ITEM_TYPES,
    AssistantItem,
    Item,
    ReasoningItem,
    Sealed,
    ToolCallItem,
)
from trio_agent.protocol.ops import DECISION_TYPES, OP_TYPES, Decision, Op, Submission
from trio_agent.protocol.text import Json, check_json

CODEC_VERSION: Final = 1
"""Raised when a stored record changes shape; `UPCASTERS` brings older ones along."""

Upcaster: TypeAlias = Callable[[dict[str, Json]], dict[str, Json]]

UPCASTERS: dict[tuple[str, int], Upcaster] = {}
"""``(tag, version)`` to the function that turns such a record into ``version + 1``."""

T = TypeVar("T")


def upcast(tag: str, version: int, data: dict[str, Json]) -> dict[str, Json]:
    """Return *data*, written by *version*, in today's shape.

    Raises:
        ProtocolError: If an upcaster misses what *version* had.
    """
    while version < CODEC_VERSION:
        step = UPCASTERS.get((tag, version))
        try:
            data = data if step is None else step(data)
        except (LookupError, TypeError, ValueError) as exc:
            raise ProtocolError(f"{tag}: this is not its form {version}: {exc!r}") from None
        version += 1
    return data


def _strict(cls: type[T]) -> Callable[[Any, Any], T]:
    def structure(value: Any, _: Any) -> T:
        if type(value) is not cls and not (cls is float and type(value) is int):
            raise TypeError(f"expected {cls.__name__}, got {type(value).__name__}")
        return cast("T", value)

    return structure


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return cast("dict[str, Any]", value)


class _Converter(cattrs.Converter):
    """cattrs with every leniency taken out."""

    def __init__(self) -> None:
        super().__init__(forbid_extra_keys=True)
        for primitive in (str, int, bool, float):
            self.register_structure_hook(primitive, _strict(primitive))
        self.register_structure_hook_factory(_is_tuple, self._tuple)
        self.register_structure_hook_factory(_is_json_object, _object_hook)
        self.register_structure_hook_factory(attrs.has, self._plain)
        for cls in (*OP_TYPES, *DECISION_TYPES, *EVENT_TYPES, *ITEM_TYPES):
            self.register_structure_hook_factory(_is(cls), self._tagged)
            self.register_unstructure_hook_factory(_is(cls), self._untagged)
        for union in (Op, Decision, EventMsg, Item, Decision | None):
            self.register_structure_hook(union, self._union(union))

    def _tuple(self, cls: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
        (member, _) = typing.get_args(cls)

        def structure(value: Any, _: Any) -> tuple[Any, ...]:
            if not isinstance(value, (list, tuple)):
                raise TypeError(f"expected an array, got {type(value).__name__}")
            return tuple(self.structure(one, member) for one in cast("list[Any]", value))

        return structure

    def _plain(self, cls: Any) -> Callable[[Any, Any], Any]:
        inner = cattrs.gen.make_dict_structure_fn(cls, self, _cattrs_forbid_extra_keys=True)
        return lambda value, _: inner(_object(value), cls)

    def _tagged(self, cls: Any) -> Callable[[Any, Any], Any]:
        inner = cattrs.gen.make_dict_structure_fn(cls, self, _cattrs_forbid_extra_keys=True)

        def structure(value: Any, _: Any) -> Any:
            members = dict(_object(value))
            tag = members.pop("type", None)
            if tag != cls.tag:
                raise TypeError(f"expected type {cls.tag!r}, got {tag!r}")
            return inner(members, cls)

        return structure

    def _untagged(self, cls: Any) -> Callable[[Any], dict[str, Any]]:
        inner = cattrs.gen.make_dict_unstructure_fn(cls, self)

        def unstructure(value: Any) -> dict[str, Any]:
            return {"type": cls.tag, **inner(value)}

        return unstructure

    def _union(self, union: Any) -> Callable[[Any, Any], Any]:
        members = [cls for cls in typing.get_args(union) if cls is not types.NoneType]
        by_tag = {cls.tag: cls for cls in members}
        optional = len(members) < len(typing.get_args(union))

        def structure(value: Any, _: Any) -> Any:
            if value is None and optional:
                return None
            tag = _object(value).get("type")
            if not isinstance(tag, str) or tag not in by_tag:
                known = ", ".join(sorted(by_tag))
                raise TypeError(f"unknown type {tag!r}; one of: {known}")
            return self.structure(value, by_tag[tag])

        return structure


def _is(cls: type) -> Callable[[Any], bool]:
    return lambda other: other is cls


def _object_hook(_: Any) -> Callable[[Any, Any], dict[str, Any]]:
    return lambda value, _cls: _object(value)


def _is_tuple(cls: Any) -> bool:
    return typing.get_origin(cls) is tuple


def _is_json_object(cls: Any) -> bool:
    return typing.get_origin(cls) in {dict, Mapping} and typing.get_args(cls)[1] is Any


@functools.cache
def converter() -> cattrs.Converter:
    """Return the strict converter, built on first use."""
    return _Converter()


def structure(data: Json, cls: type[T], *, name: str) -> T:
    """Build a *cls* from JSON values.

    Raises:
        ProtocolError: It names every path that is wrong.
    """
    _check(data, name)
    return _structure(data, cls, name)


def _structure(data: Json, cls: type[T], name: str) -> T:
    try:
        return converter().structure(data, cls)
    except cattrs.BaseValidationError as exc:
        problems = "; ".join(cattrs.transform_error(exc, path=name))
        raise ProtocolError(problems) from None
    except (TypeError, ValueError, KeyError) as exc:
        raise ProtocolError(f"{name}: {exc}") from None


def _check(value: Json, name: str) -> None:
    try:
        check_json(value, name=name)
    except ValueError as exc:
        raise ProtocolError(str(exc)) from None


def unstructure(record: attrs.AttrsInstance) -> dict[str, Json]:
    """Return the wire form of *record* as JSON values."""
    return cast("dict[str, Json]", converter().unstructure(record))


def dumps(record: attrs.AttrsInstance) -> bytes:
    """Return the wire form of *record* as JSON text.

    Raises:
        ProtocolError: If it holds what JSON cannot: NaN, an infinity, half a character.
    """
    value = unstructure(record)
    _check(value, type(record).__name__)
    return msgspec.json.encode(value)


def parse_json(text: str | bytes, *, name: str) -> Json:
    """Parse strict JSON in UTF-8: no NaN, no duplicate keys, no half characters.

    Raises:
        ProtocolError: It says what is wrong.
    """
    import json  # noqa: PLC0415  # msgspec cannot see duplicate keys

    try:
        # Decoded here: `json` would guess other encodings and let halves pass.
        value = json.loads(
            text if isinstance(text, str) else text.decode(), object_pairs_hook=_no_duplicates
        )
        check_json(value, name=name)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{name}: {exc}") from None
    return value


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} occurs twice")
    return members


def load_submission(text: str | bytes) -> Submission:
    """Decode the wire form of a `Submission`.

    Raises:
        ProtocolError: For anything that is not exactly one.
    """
    return _structure(parse_json(text, name="submission"), Submission, "submission")


def load_op(text: str | bytes) -> Op:
    """Decode the wire form of an op.

    Raises:
        ProtocolError: For anything that is not exactly one.
    """
    return _structure(parse_json(text, name="op"), cast("type[Op]", Op), "op")


def load_event(text: str | bytes) -> Event:
    """Decode the wire form of an `Event`.

    Raises:
        ProtocolError: For anything that is not exactly one.
    """
    return _structure(parse_json(text, name="event"), Event, "event")


# --- rows: what the store keeps, one record each, its class named by a column beside it

ROW_TYPES: Final[Mapping[str, type[EventMsg | Item]]] = {
    cls.tag: cls for cls in (*EVENT_TYPES, *ITEM_TYPES)
}

_STRUCTURAL: Final[frozenset[type]] = frozenset({ApprovalResolved, SessionHistory})
"""Rows with a tagged union inside, which msgspec cannot tell apart."""

_LOOSE: Final[Mapping[type, tuple[str, ...]]] = {
    ToolCallBegin: ("arguments",),
    ExecApprovalRequest: ("arguments",),
    ToolProgress: ("fraction",),
    Error: ("retry_after",),
    ToolCallItem: ("arguments", "sealed"),
    AssistantItem: ("sealed",),
    ReasoningItem: ("sealed",),
}
"""Members that can hold a number: msgspec would write NaN and infinities as null."""

_CHECKED: Final = _STRUCTURAL.union(_LOOSE)
_encode: Final = msgspec.json.Encoder().encode


def encode_row(record: EventMsg | Item) -> bytes:
    """Return the row form of *record*; its ``tag`` goes into the column beside it.

    Raises:
        ProtocolError: If it holds what JSON cannot: NaN, an infinity, half a character.
    """
    try:
        return _encode(record) if type(record) not in _CHECKED else _checked(record)
    except UnicodeEncodeError:
        raise ProtocolError(f"{type(record).__name__} holds half a character") from None


def _checked(record: EventMsg | Item) -> bytes:
    cls = type(record)
    if cls in _STRUCTURAL:
        return dumps(record)
    for member in _LOOSE[cls]:
        value = getattr(record, member)
        _check(value.data if isinstance(value, Sealed) else value, cls.__name__)
    return _encode(record)


def decode_row(kind: str, body: bytes | str, version: int = CODEC_VERSION) -> EventMsg | Item:
    """Decode a row that `encode_row` wrote, perhaps with an older shape.

    The store keeps a checksum beside it; so this checks types and presence, and
    ignores members that it does not know.

    Args:
        kind: The record's ``tag``.
        body: What stands in the row.
        version: The `CODEC_VERSION` that wrote it; rows of an older one pass `UPCASTERS`.

    Raises:
        ProtocolError: For an unknown kind and for a damaged body.
        StoreVersionError: If a newer version of this library wrote it.
    """
    cls = ROW_TYPES.get(kind)
    if cls is None:
        raise ProtocolError(f"no record is called {kind!r}")
    if version != CODEC_VERSION:
        data = upcast(kind, version, decode_object(kind, body, version))
        body = msgspec.json.encode({"type": kind, **data})  # from here on it is today's
    if cls in _STRUCTURAL:
        return _structure(parse_json(body, name=kind), cls, kind)
    try:
        return _decoder(kind).decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        raise ProtocolError(f"{kind}: {exc}") from None


def decode_object(name: str, body: bytes | str, version: int) -> dict[str, Json]:
    """Decode what a row of any *version* up to today's holds, as it stands there.

    Raises:
        ProtocolError: If it is no JSON object.
        StoreVersionError: If a newer version of this library wrote it.
    """
    if version > CODEC_VERSION:
        raise StoreVersionError(
            f"a {name} was written in form {version}; this library reads forms up to"
            f" {CODEC_VERSION}: install a newer trio_agent"
        )
    data = parse_json(body, name=name)
    if not isinstance(data, dict):
        raise ProtocolError(f"{name}: expected an object")
    return cast("dict[str, Json]", data)


@functools.cache
def _decoder(kind: str) -> msgspec.json.Decoder[EventMsg | Item]:
    return msgspec.json.Decoder(ROW_TYPES[kind])
