"""Hypothesis strategies for everything that crosses the wire or enters the transcript.

All that they make is valid: text without half characters, finite numbers, sizes
within the limits of `validate_submission`. Wrong input is made by breaking it.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

import attrs
from hypothesis import strategies as st

from trio_agent.protocol.events import EVENT_TYPES, Event, EventMsg, SessionHistory
from trio_agent.protocol.items import (
    ITEM_TYPES,
    Attachment,
    Item,
    ToolCallItem,
    ToolOutputItem,
)
from trio_agent.protocol.limits import MAX_ATTACHMENT_BYTES, MAX_INTEGER
from trio_agent.protocol.ops import (
    DECISION_TYPES,
    OP_TYPES,
    CapabilityCommand,
    Decision,
    EditQueued,
    Op,
    SetModel,
    Submission,
    UserInput,
)
from trio_agent.protocol.text import Json
from trio_agent.protocol.usage import TokenUsage

_FAMILIES = (
    "👨\u200d👩\u200d👧\u200d👦",
    "🏳️\u200d🌈",
    "👍🏽",
    "e\u0301",
    "🇪🇺",
    "\u2028",
    "\x00",
)


def texts(*, min_size: int = 0, max_size: int = 20) -> st.SearchStrategy[str]:
    """Return valid Unicode text, rich in characters that are long or joined.

    Args:
        min_size: Pieces at least; a piece is a character or a joined group of some.
        max_size: Pieces at most.
    """
    piece = st.characters(exclude_categories=["Cs"]) | st.sampled_from(_FAMILIES)
    return st.lists(piece, min_size=min_size, max_size=max_size).map("".join)


def names() -> st.SearchStrategy[str]:
    """Return text that is not blank and has no control character: names and ids."""
    letters = st.characters(exclude_categories=["Cs", "Cc"])
    return st.text(letters, min_size=1, max_size=12).filter(lambda text: bool(text.strip()))


def integers() -> st.SearchStrategy[int]:
    """Return integers that SQLite can keep, not below zero."""
    return st.integers(0, MAX_INTEGER)


def json_values() -> st.SearchStrategy[Json]:
    """Return JSON values of every type, nested a little."""
    return st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | texts(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(texts(max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    )


def json_objects() -> st.SearchStrategy[dict[str, Json]]:
    """Return JSON objects, such as the arguments of a call."""
    return st.dictionaries(texts(max_size=4), json_values(), max_size=3)


def usages() -> st.SearchStrategy[TokenUsage]:
    """Return token counts whose sums stay in range."""
    count = st.integers(0, 10**9)
    fields = {field.name: count for field in attrs.fields(TokenUsage)}
    return st.builds(TokenUsage, **fields)


def attachments() -> st.SearchStrategy[Attachment]:
    """Return attachments within their limits."""
    return st.builds(
        Attachment,
        id=names(),
        name=names(),
        media_type=st.sampled_from(["text/plain", "image/png"]),
        size=st.integers(1, MAX_ATTACHMENT_BYTES),
    )


def decisions() -> st.SearchStrategy[Decision]:
    """Return every kind of answer to an approval request."""
    return st.one_of([records(cls) for cls in DECISION_TYPES])


def ops() -> st.SearchStrategy[Op]:
    """Return every kind of op; each passes `validate_submission`."""
    return st.one_of([_op(cls) for cls in OP_TYPES])


def submissions() -> st.SearchStrategy[Submission]:
    """Return ops with ids."""
    return st.builds(Submission, names(), ops())


def items() -> st.SearchStrategy[Item]:
    """Return every kind of transcript item, each on its own."""
    return st.one_of([records(cls) for cls in ITEM_TYPES])


def messages() -> st.SearchStrategy[EventMsg]:
    """Return every kind of event message."""
    return st.one_of([records(cls) for cls in EVENT_TYPES])


def events() -> st.SearchStrategy[Event]:
    """Return messages with their place in a journal."""
    return st.builds(
        Event,
        sequence=st.integers(1, MAX_INTEGER),
        recorded_at_ms=integers(),
        submission_id=st.none() | names(),
        msg=messages(),
    )


@st.composite
def histories(draw: st.DrawFn, *, max_size: int = 12) -> tuple[Item, ...]:
    """Return transcript items in which every call has its output behind it.

    Args:
        draw: Given by Hypothesis.
        max_size: How many rounds at most: an item, or a batch of calls with outputs.
    """
    single = st.one_of(
        [records(cls) for cls in ITEM_TYPES if cls not in {ToolCallItem, ToolOutputItem}]
    )
    made: list[Item] = []
    calls = 0
    for _ in range(draw(st.integers(0, max_size))):
        batch = draw(st.integers(0, 3))
        if not batch:
            made.append(draw(single))
        ids = [f"call-{calls + number}" for number in range(batch)]
        calls += batch
        made.extend(attrs.evolve(draw(records(ToolCallItem)), call_id=one) for one in ids)
        made.extend(attrs.evolve(draw(records(ToolOutputItem)), call_id=one) for one in ids)
    return tuple(made)


def records(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Return records of *cls*, a class of `trio_agent.protocol`, every field drawn.

    Args:
        cls: The class.
    """
    return _records(cls.__module__, cls.__name__)


@functools.cache
def _records(module: str, name: str) -> st.SearchStrategy[Any]:
    # By name: a class of records is no key for a typed cache.
    cls = getattr(__import__(module, fromlist=[name]), name)
    if cls is TokenUsage:
        return usages()
    if cls is Attachment:
        return attachments()
    hints = typing.get_type_hints(cls)
    fields = {field.name: _values(field.name, hints[field.name]) for field in attrs.fields(cls)}
    return st.builds(cls, **fields)


def _values(name: str, hint: Any) -> st.SearchStrategy[Any]:
    if hint is str:
        return names() if name == "id" or name.endswith("_id") else texts()
    if hint in _PLAIN:
        return _PLAIN[hint]()
    if attrs.has(hint):
        return records(hint)
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(members)
    if origin is dict:
        return json_objects()
    if origin is tuple:
        return _tuples(members[0])
    return st.one_of([_values(name, member) for member in members])


def _tuples(member: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    if member == EventMsg:  # a history in a history says nothing new
        inner: st.SearchStrategy[Any] = st.deferred(
            lambda: st.one_of(
                [records(cls) for cls in EVENT_TYPES if cls is not SessionHistory]
            )
        )
    elif member is Attachment:
        unique = st.lists(attachments(), max_size=3, unique_by=lambda one: one.id)
        return unique.map(tuple)
    else:
        inner = _values("", member)
    return st.lists(inner, max_size=3).map(tuple)


_PLAIN: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
    bool: st.booleans,
    int: integers,
    float: lambda: st.floats(allow_nan=False, allow_infinity=False),
    types.NoneType: st.none,
    Any: json_values,
}


def _op(cls: type[Any]) -> st.SearchStrategy[Any]:
    if cls in {UserInput, EditQueued}:
        return records(cls).filter(lambda op: bool(op.text.strip()))
    if cls in {SetModel, CapabilityCommand}:  # texts that must not be blank
        return st.builds(cls, **{field.name: names() for field in attrs.fields(cls)})
    return records(cls)
