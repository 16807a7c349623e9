"""The rules that all wire formats share, and what they make of any history."""

from __future__ import annotations

import itertools
import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import ProviderError
from trio_agent.model import wire
from trio_agent.model.anthropic import Anthropic
from trio_agent.model.base import ModelRequest, ToolDefinition
from trio_agent.model.openai import OpenAIChat, OpenAIResponses
from trio_agent.protocol.items import (
    AssistantItem,
    ImageItem,
    ReasoningItem,
    Sealed,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.testing.models import history_fault
from trio_agent.testing.wire_server import CHAT, MESSAGES, RESPONSES

MODELS = (
    (OpenAIResponses("m", api_key="k"), RESPONSES),
    (OpenAIChat("m", api_key="k"), CHAT),
    (Anthropic("m", api_key="k"), MESSAGES),
)
BINDINGS = [model.binding for model, _ in MODELS]
PROVIDERS = [*BINDINGS, "another"]

names = st.text(max_size=80) | st.sampled_from(["read_file", "a b", "a_b", "ä" * 70])
texts = st.sampled_from(["", " \n", "hi", "grüß 🙂", "trailing "])


def mark_of(provider: str | None) -> str:
    """Return what only a thought of that provider holds: as its text, or in its seal."""
    return f"thought by {provider}"


def sealed_by(provider: str) -> Sealed:
    mark = mark_of(provider)
    thought = {"type": "thinking", "thinking": "x", "signature": mark}
    blob = {"type": "reasoning", "summary": [], "encrypted_content": mark}
    echo = {"member": "reasoning_content"}
    data = dict(zip(PROVIDERS, (blob, echo, thought, echo), strict=True))
    return Sealed(provider=provider, data=data[provider])


@st.composite
def thoughts(draw: Any) -> ReasoningItem:
    provider = draw(st.sampled_from([*PROVIDERS, None]))
    seal = None if provider is None else sealed_by(provider)
    return ReasoningItem(text=draw(texts | st.just(mark_of(provider))), sealed=seal)


@st.composite
def histories(draw: Any) -> tuple[Any, ...]:
    """Any history that an engine could hold, with the blanks that a model could say."""
    items: list[Any] = []
    for turn in range(draw(st.integers(0, 5))):
        picture = st.just(ImageItem(media_type="image/png", data="AA=="))
        message = st.builds(lambda text: UserItem(text=text), texts)
        items += draw(st.lists(message | picture, max_size=2))
        items += draw(st.lists(thoughts(), max_size=2))
        said = st.builds(lambda text: AssistantItem(text=text), texts)
        items += draw(st.lists(said, max_size=2))
        items += draw(st.lists(thoughts(), max_size=1))  # cut off while it went on thinking
        calls = [
            ToolCallItem(
                call_id=f"{turn}-{n}" + draw(st.sampled_from(["", "/ä", "x" * 90])),
                name=draw(names),
                arguments=draw(st.just({}) | st.dictionaries(texts, texts, max_size=2)),
                provider_call_id="same",
            )
            for n in range(draw(st.integers(0, 3)))
        ]
        items += calls
        items += [
            ToolOutputItem(
                call_id=call.call_id, output=draw(texts), is_error=draw(st.booleans())
            )
            for call in draw(st.permutations(calls))
        ]
    return tuple(items)


@given(histories(), texts)
def test_every_history_becomes_a_request_that_a_strict_server_takes(
    items: Any, instructions: Any
) -> None:
    """Mutants that this finds: blanks kept, lone reasoning kept, foreign seals sent, the
    provider's call ids sent, two user messages in a row."""
    for model, form in MODELS:
        request = ModelRequest(instructions=instructions, items=items)
        try:
            body = model.body(request)
        except ProviderError:
            assert form is MESSAGES
            assert not wire.turns(items, model.binding)
            continue
        raw = wire.encode(body)

        assert form.request_fault(json.loads(raw.decode())) is None
        assert b"same" not in raw
        for other in {*PROVIDERS, None} - {model.binding}:
            assert mark_of(other).encode() not in raw
        said = [isinstance(turn, wire.Said) for turn in wire.turns(items, model.binding)]
        assert (True, True) not in itertools.pairwise(said)


@pytest.mark.parametrize(("model", "form"), MODELS, ids=BINDINGS)
def test_an_answer_is_sent_without_the_thoughts_that_it_ends_in(model: Any, form: Any) -> None:
    """It was cut off while it went on thinking; servers refuse what nothing follows from."""
    mark = mark_of(model.binding)
    thought = ReasoningItem(text=mark, sealed=sealed_by(model.binding))
    call = ToolCallItem(call_id="c", name="f", arguments={})
    output = ToolOutputItem(call_id="c", output="x")
    for answer in ((AssistantItem(text="hi"), thought, thought), (call, thought, output)):
        request = ModelRequest(instructions="", items=(UserItem(text="go"), *answer))
        raw = wire.encode(model.body(request))

        assert form.request_fault(json.loads(raw)) is None
        assert mark.encode() not in raw
    request = ModelRequest(instructions="", items=(UserItem(text="go"), thought, call, output))
    assert mark.encode() in wire.encode(model.body(request))


@given(histories(), st.sampled_from(BINDINGS))
def test_own_items_lose_only_what_cannot_be_sent(items: Any, binding: Any) -> None:
    kept = wire.own_items(items, binding)

    assert history_fault(kept, provider=binding) is None
    assert wire.own_items(kept, binding) == kept
    assert [i for i in kept if isinstance(i, (ToolCallItem, ToolOutputItem, ImageItem))] == [
        i for i in items if isinstance(i, (ToolCallItem, ToolOutputItem, ImageItem))
    ]
    for kind in (AssistantItem, UserItem):
        assert [i.text for i in kept if isinstance(i, kind)] == [
            i.text for i in items if isinstance(i, kind) and i.text.strip()
        ]


@given(st.lists(names, unique=True, max_size=8))
def test_mapped_names_are_legal_distinct_and_lead_back(tools: Any) -> None:
    definitions = [
        ToolDefinition(name=name, description="", parameters={"type": "object"})
        for name in tools
    ]
    mapped = [wire.legal_name(name) for name in tools]
    back = wire.original_names(definitions)

    assert all(wire.is_legal(name) for name in mapped)
    assert len(set(mapped)) == len(tools)
    assert [back.get(name, name) for name in mapped] == tools
    assert wire.legal_name("read_file") == "read_file"


@given(st.text(), st.lists(st.integers(0, 12)))
def test_halves_of_characters_are_joined_wherever_a_text_is_cut(text: Any, cuts: Any) -> None:
    """Cut between any two UTF-16 units, as a server that counts those does."""
    data = text.encode("utf-16-le")
    units = [data[i : i + 2] for i in range(0, len(data), 2)]
    halves, found, position = wire.Halves(), [], 0
    for cut in [*cuts, len(units)]:
        piece = b"".join(units[position : position + cut])
        found.append(halves.join(piece.decode("utf-16-le", "surrogatepass")))
        position += cut

    assert "".join(found) == text


def test_a_half_that_stays_alone_is_replaced() -> None:
    halves = wire.Halves()

    assert halves.join("a\ud83d") == "a"
    assert halves.join("b") == "\ufffdb"
    assert halves.join("\ude00") == "\ufffd"


def test_a_request_is_strict_json_in_strict_utf8() -> None:
    assert wire.encode({"a": "\ud83d", "b": ["ü"]}) == '{"a":"\ufffd","b":["ü"]}'.encode()
    for value in (float("nan"), float("inf"), b"x", {1, 2}):
        with pytest.raises(ProviderError) as caught:
            wire.encode({"a": value})
        assert not caught.value.retryable


@pytest.mark.parametrize("bad", [-1, 2**63, -0.5e9, float(2**70), 0.5, float("inf")])
def test_a_count_of_tokens_that_no_answer_can_cost_is_refused(bad: Any) -> None:
    with pytest.raises(ProviderError):
        wire.token_count({"a": {"b": bad}}, "a", "b")


@pytest.mark.parametrize("missing", [None, "3", True, [], {}])
def test_a_count_of_tokens_that_is_none_counts_nothing(missing: Any) -> None:
    assert wire.token_count({"a": missing}, "a") == 0
    assert wire.token_count({"a": 3.0}, "a") == 3


def test_sealed_parts_come_back_when_the_session_returns_to_their_provider() -> None:
    items = (
        UserItem(text="a"),
        ReasoningItem(
            text="hm",
            sealed=Sealed(provider=BINDINGS[2], data={"type": "thinking", "signature": "x"}),
        ),
        AssistantItem(text="b"),
        UserItem(text="c"),
    )
    request = ModelRequest(instructions="", items=items)
    bodies = [wire.encode(model.body(request)).decode() for model, _ in MODELS]

    assert ["signature" in body for body in bodies] == [False, False, True]
    other = Anthropic("another-model", api_key="k")
    assert "signature" not in wire.encode(other.body(request)).decode()
    assert items[1].sealed is not None
    assert attrs.evolve(request).items == items
