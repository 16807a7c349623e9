"""Readers of streams, without a network: what servers do, and what must not be joined."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import ProviderError, StreamInterruptedError
from trio_agent.model.anthropic import AnthropicReader
from trio_agent.model.base import ModelCall
from trio_agent.model.openai_chat import ChatReader
from trio_agent.model.openai_responses import ResponsesReader
from trio_agent.protocol.items import AssistantItem, ReasoningItem, Sealed
from trio_agent.protocol.usage import TokenUsage
from trio_agent.testing.wire_server import FORMATS, WireAnswer, WireCall

NAMES = {"a_b_0123456789ab": "a b"}
READERS = {
    "openai-chat": ChatReader,
    "openai-responses": ResponsesReader,
    "anthropic": AnthropicReader,
}


def read(reader: Any, *events: Any) -> Any:
    """Feed *events*; check that what was passed on is what is returned."""
    passed = {"reasoning": "", "commentary": "", "final_answer": ""}
    for event in events:
        for text, phase in reader.feed(event if isinstance(event, str) else json.dumps(event)):
            passed[phase] += text
    output = reader.finish()
    kept = {"reasoning": "", "commentary": "", "final_answer": ""}
    for item in output.items:
        if isinstance(item, ReasoningItem):
            kept["reasoning"] += item.text
        elif isinstance(item, AssistantItem):
            kept[item.phase] += item.text
    for phase, text in passed.items():
        assert text == kept[phase]
    return output


# ---------------------------------------------------------------- chat


def piece(
    index: Any = None, call_id: Any = None, name: Any = None, arguments: Any = None
) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    found = {"index": index, "id": call_id}
    return {
        **{key: value for key, value in found.items() if value is not None},
        "function": {key: value for key, value in function.items() if value is not None},
    }


def delta(finish: Any = None, **content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish}]}


def chat(*events: Any) -> Any:
    return read(ChatReader("p", NAMES), *events, "[DONE]")


BERLIN, ROME = '{"city": "Berlin"}', '{"city": "Rome"}'
HALF = len(BERLIN) // 2

NUMBERINGS = {
    "as it should be": [
        piece(0, "x", "w", ""),
        piece(0, arguments=BERLIN[:HALF]), piece(0, arguments=BERLIN[HALF:]),
        piece(1, "y", "w", ""),
        piece(1, arguments=ROME[:HALF]), piece(1, arguments=ROME[HALF:]),
    ],
    "pieces of both in turn": [
        piece(0, "x", "w", ""), piece(1, "y", "w", ""),
        piece(1, arguments=ROME[:HALF]), piece(0, arguments=BERLIN[:HALF]),
        piece(1, arguments=ROME[HALF:]), piece(0, arguments=BERLIN[HALF:]),
    ],
    "every number zero": [
        piece(0, "x", "w", BERLIN[:HALF]), piece(0, arguments=BERLIN[HALF:]),
        piece(0, "y", "w", ROME[:HALF]), piece(0, arguments=ROME[HALF:]),
    ],
    "every number zero, whole calls": [piece(0, "x", "w", BERLIN), piece(0, "y", "w", ROME)],
    "no numbers": [
        piece(None, "x", "w", BERLIN[:HALF]), piece(None, arguments=BERLIN[HALF:]),
        piece(None, "y", "w", ROME[:HALF]), piece(None, arguments=ROME[HALF:]),
    ],
    "no numbers, ids on every piece, in turn": [
        piece(None, "x", "w", BERLIN[:HALF]), piece(None, "y", "w", ROME[:HALF]),
        piece(None, "x", None, BERLIN[HALF:]), piece(None, "y", None, ROME[HALF:]),
    ],
    "numbers from one": [
        piece(1, "x", "w", BERLIN[:HALF]), piece(1, arguments=BERLIN[HALF:]),
        piece(2, "y", "w", ROME[:HALF]), piece(2, arguments=ROME[HALF:]),
    ],
    "a number for every piece": [
        piece(0, "x", "w", BERLIN[:HALF]), piece(1, arguments=BERLIN[HALF:]),
        piece(2, "y", "w", ROME[:HALF]), piece(3, arguments=ROME[HALF:]),
    ],
    "id and name on every piece": [
        piece(0, "x", "w", BERLIN[:HALF]), piece(0, "x", "w", BERLIN[HALF:]),
        piece(1, "y", "w", ROME[:HALF]), piece(1, "y", "w", ROME[HALF:]),
    ],
    "empty ids and names on later pieces": [
        piece(0, "x", "w", BERLIN[:HALF]), piece(0, "", "", BERLIN[HALF:]),
        piece(1, "y", "w", ROME[:HALF]), piece(1, "", "", ROME[HALF:]),
    ],
    "the name alone first": [
        piece(0, "x", "w"), piece(0, None, "w", BERLIN),
        piece(1, "y", "w"), piece(1, None, "w", ROME),
    ],
    "the id after the name": [
        piece(0, None, "w", ""), piece(0, "x", None, BERLIN),
        piece(1, None, "w", ""), piece(1, "y", None, ROME),
    ],
    "an empty piece at the end of each": [
        piece(0, "x", "w", BERLIN), piece(0, "x", "w", ""), piece(0, arguments=""),
        piece(1, "y", "w", ROME), piece(1, "y", "w", ""), piece(1, arguments=""),
    ],
}  # fmt: skip


@pytest.mark.parametrize("numbering", NUMBERINGS)
@pytest.mark.parametrize("together", [False, True], ids=["one event each", "one event"])
def test_calls_are_told_apart_however_pieces_are_numbered(
    numbering: Any, together: Any
) -> None:
    pieces = NUMBERINGS[numbering]
    events = [delta(tool_calls=pieces)] if together else [delta(tool_calls=[p]) for p in pieces]
    output = chat(*events, delta("tool_calls"))

    assert output.items == (
        ModelCall(name="w", arguments=BERLIN, call_id="x"),
        ModelCall(name="w", arguments=ROME, call_id="y"),
    )


NAMELESS = {
    "one id for all": [piece(0, "x", "w", BERLIN), piece(0, "x", "w", ROME)],
    "no ids": [piece(0, None, "w", BERLIN), piece(0, None, "w", ROME)],
    "no ids and no numbers": [piece(None, None, "w", BERLIN), piece(None, None, "w", ROME)],
    "empty ids": [piece(0, "", "w", BERLIN), piece(1, "", "w", ROME)],
    "one id, two tools": [piece(0, "x", "w", BERLIN), piece(0, "x", "v", ROME)],
}


@pytest.mark.parametrize("kind", NAMELESS)
def test_calls_without_ids_of_their_own_are_never_joined(kind: Any) -> None:
    output = chat(*(delta(tool_calls=[p]) for p in NAMELESS[kind]), delta("tool_calls"))

    assert [call.arguments for call in output.items] == [BERLIN, ROME]


@st.composite
def numbered(draw: Any) -> Any:
    """Parallel calls with ids of their own, cut and mixed in any honest way."""
    count = draw(st.integers(1, 5))
    arguments = [json.dumps({"n": n, "t": draw(st.text(max_size=8))}) for n in range(count)]
    pieces = []
    for n, raw in enumerate(arguments):
        cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=4)))
        parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        again = draw(st.booleans())
        pieces.append(
            [piece(n, f"id{n}", "w", parts[0])]
            + [piece(n, f"id{n}" if again else None, None, part) for part in parts[1:]]
        )
    mixed = []
    while any(pieces):
        mixed.append(draw(st.sampled_from([p for p in pieces if p])).pop(0))
    return arguments, mixed


@given(numbered())
def test_honest_pieces_may_come_in_any_order(case: Any) -> None:
    arguments, pieces = case
    output = chat(*(delta(tool_calls=[p]) for p in pieces), delta("tool_calls"))
    found = {call.call_id: call.arguments for call in output.items}

    assert found == {f"id{n}": raw for n, raw in enumerate(arguments)}


@given(
    st.lists(
        st.builds(
            piece,
            st.none() | st.integers(-1, 2),
            st.none() | st.sampled_from(["", "x", "y"]),
            st.none() | st.sampled_from(["", "w", "v"]),
            st.none() | st.sampled_from(["", "{", "}", BERLIN, ROME, '{"a"']),
        ),
        max_size=8,
    )
)
def test_two_whole_calls_are_never_joined_and_nothing_is_lost(pieces: Any) -> None:
    output = chat(delta(tool_calls=pieces), delta("tool_calls"))
    sent = "".join(p["function"].get("arguments", "") for p in pieces)
    kept = "".join(call.arguments for call in output.items if call.arguments != "{}")

    assert sorted(kept) == sorted(sent) or "{}" in sent
    begun = [p for p in pieces if p["function"].get("name") and p["function"].get("arguments")]
    whole = [p for p in begun if p["function"]["arguments"] in {BERLIN, ROME}]
    if whole == pieces:
        assert [c.arguments for c in output.items] == [
            p["function"]["arguments"] for p in pieces
        ]


def test_reasoning_is_read_under_its_usual_names_and_echoed_under_that_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        output = chat(delta(**{name: "hm"}), delta(content="so"), delta("stop"))
        seal = Sealed(provider="p", data={"member": name})
        assert output.items == (ReasoningItem(text="hm", sealed=seal), AssistantItem(text="so"))
    both = chat(delta(reasoning="hm", reasoning_content="hm"), delta("stop"))
    assert both.items[0].text == "hm"


def test_content_may_come_in_parts() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "thinking", "thinking": "!"},
        {"type": "text", "text": "so"},
    ]
    output = chat(delta(content=parts), delta("stop"))

    assert output.items == (ReasoningItem(text="hm!"), AssistantItem(text="so"))


def test_arguments_may_come_as_an_object() -> None:
    call = {"index": 0, "id": "x", "function": {"name": "w", "arguments": {"a": 1}}}
    output = chat(delta(tool_calls=[call]), delta("tool_calls"))

    assert json.loads(output.items[0].arguments) == {"a": 1}


REASONS = {
    "stop": "stop",
    "tool_calls": "stop",
    "eos": "stop",
    "length": "length",
    "max_tokens": "length",
    "content_filter": "content_filter",
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_is_understood_whatever_its_name(reason: Any) -> None:
    assert chat(delta(content="x"), delta(reason)).finish_reason == REASONS[reason]


@pytest.mark.parametrize("reason", [None, "", "error", "abort"])
def test_an_answer_without_a_reason_is_not_complete(reason: Any) -> None:
    with pytest.raises(StreamInterruptedError):
        chat(delta(content="x"), delta(reason))


def test_usage_is_read_where_servers_put_it() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 4}
    output = chat(delta("stop"), {"choices": [], "usage": usage})

    assert output.usage == TokenUsage(
        input_tokens=9, cached_input_tokens=4, output_tokens=2, total_tokens=11
    )
    with pytest.raises(ProviderError):
        chat(delta("stop"), {"usage": {"prompt_tokens": -1}})


# ---------------------------------------------------------------- responses


def responses(*events: Any) -> Any:
    return read(ResponsesReader("p", NAMES), *events)


def completed(*output: Any, status: Any = "completed", **more: Any) -> dict[str, Any]:
    return {
        "type": f"response.{status}",
        "response": {"status": status, "output": output, **more},
    }


def message(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "content": [{"type": "output_text", "text": text}], **more}


def test_an_answer_may_come_without_a_delta() -> None:
    call = {"type": "function_call", "call_id": "x", "name": "w", "arguments": "{}"}
    reader = ResponsesReader("p", NAMES)
    reader.feed(json.dumps(completed(message("a"), call)))

    assert reader.finish().items == (
        AssistantItem(text="a"),
        ModelCall(name="w", arguments="{}", call_id="x"),
    )


def test_items_without_numbers_are_told_apart_by_their_ids() -> None:
    """As llama.cpp sends them."""
    head = {"type": "function_call", "call_id": "c", "name": "w"}
    output = responses(
        {"type": "response.output_item.added", "item": {"type": "message", "id": "m"}},
        {"type": "response.output_text.delta", "item_id": "m", "delta": "hi"},
        {"type": "response.output_item.done", "item": message("hi", id="m")},
        {"type": "response.output_item.added", "item": {**head, "id": "f"}},
        {"type": "response.output_item.done", "item": {**head, "id": "f", "arguments": "{}"}},
        completed(message("hi", id="m"), {**head, "id": "f", "arguments": "{}"}),
    )

    assert output.items == (
        AssistantItem(text="hi"),
        ModelCall(name="w", arguments="{}", call_id="c"),
    )


def test_what_was_cut_off_is_kept_as_far_as_it_came() -> None:
    head = {"type": "function_call", "call_id": "c", "name": "w", "arguments": ""}
    output = responses(
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {"type": "reasoning"},
        },
        {"type": "response.reasoning_summary_text.delta", "output_index": 0, "delta": "hm"},
        {"type": "response.output_item.added", "output_index": 1, "item": {"type": "message"}},
        {"type": "response.output_text.delta", "output_index": 1, "delta": "half"},
        {"type": "response.output_item.added", "output_index": 2, "item": head},
        {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": '{"a'},
        completed(status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
    )

    assert output.finish_reason == "length"
    assert output.items == (
        ReasoningItem(text="hm"),
        AssistantItem(text="half"),
        ModelCall(name="w", arguments='{"a', call_id="c"),
    )


def test_commentary_and_the_answer_are_told_apart() -> None:
    output = responses(
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {"type": "message", "phase": "commentary"},
        },
        {"type": "response.output_text.delta", "output_index": 0, "delta": "first"},
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": message("first", phase="commentary"),
        },
        {"type": "response.output_item.added", "output_index": 1, "item": {"type": "message"}},
        {"type": "response.output_text.delta", "output_index": 1, "delta": "then"},
        {"type": "response.output_item.done", "output_index": 1, "item": message("then")},
        completed(),
    )

    assert [(item.text, item.phase) for item in output.items] == [
        ("first", "commentary"),
        ("then", "final_answer"),
    ]


def test_sealed_reasoning_loses_what_a_server_without_memory_cannot_resolve() -> None:
    item = {"type": "reasoning", "id": "rs", "status": "x", "encrypted_content": "e"}
    reader = ResponsesReader("p", NAMES)
    reader.feed(json.dumps(completed(item)))
    (thought,) = reader.finish().items

    assert thought.sealed == Sealed(
        provider="p", data={"type": "reasoning", "summary": [], "encrypted_content": "e"}
    )


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "message": "x"},
        {
            "type": "response.failed",
            "response": {"error": {"code": "server_error", "message": "x"}},
        },
        {"error": {"message": "x"}},
    ],
)
def test_a_failed_response_is_an_error(event: Any) -> None:
    with pytest.raises(ProviderError) as caught:
        responses(event)

    assert caught.value.retryable


# ---------------------------------------------------------------- anthropic


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": d} for d in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def anthropic(*events: Any, stop: Any = "end_turn", **usage: Any) -> Any:
    return read(
        AnthropicReader("p", NAMES),
        {"type": "message_start", "message": {"usage": {"input_tokens": 3}}},
        *events,
        {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": usage},
        {"type": "message_stop"},
    )


def test_thinking_keeps_its_signature_and_redacted_blocks_stay_whole() -> None:
    output = anthropic(
        *block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "hm"},
            {"type": "signature_delta", "signature": "s1"},
            {"type": "signature_delta", "signature": "s2"},
        ),
        *block(1, {"type": "redacted_thinking", "data": "zzz"}),
        *block(2, {"type": "text", "text": "so"}),
    )
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s1s2"}

    assert output.items == (
        ReasoningItem(text="hm", sealed=Sealed(provider="p", data=thinking)),
        ReasoningItem(
            sealed=Sealed(provider="p", data={"type": "redacted_thinking", "data": "zzz"})
        ),
        AssistantItem(text="so"),
    )


def test_thinking_without_a_signature_is_not_sealed() -> None:
    output = anthropic(
        *block(0, {"type": "thinking"}, {"type": "thinking_delta", "thinking": "hm"}),
        stop="max_tokens",
    )

    assert output.items == (ReasoningItem(text="hm"),)
    assert output.finish_reason == "length"


def test_a_paused_turn_wants_to_go_on() -> None:
    tool = {"type": "server_tool_use", "id": "s", "name": "web", "input": {}}
    output = anthropic(
        *block(0, tool, {"type": "input_json_delta", "partial_json": '{"q": 1}'}),
        stop="pause_turn",
    )

    assert not output.end_turn
    assert output.finish_reason == "stop"
    assert output.items[0].sealed.data == {**tool, "input": {"q": 1}}


STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_reason_is_understood(stop: Any) -> None:
    output = anthropic(*block(0, {"type": "text", "text": "x"}), stop=stop)

    assert output.finish_reason == STOPS[stop]
    assert output.end_turn


def test_all_input_is_counted_whether_cached_or_not() -> None:
    output = anthropic(
        cache_read_input_tokens=5, cache_creation_input_tokens=7, output_tokens=2
    )

    assert output.usage == TokenUsage(
        input_tokens=15,
        cached_input_tokens=5,
        cache_write_input_tokens=7,
        output_tokens=2,
        total_tokens=17,
    )


def test_input_of_a_call_may_come_whole_or_not_at_all() -> None:
    tool = {"type": "tool_use", "id": "x", "name": "w"}
    output = anthropic(*block(0, {**tool, "input": {"a": 1}}), *block(1, {**tool, "input": {}}))

    assert [json.loads(call.arguments) for call in output.items] == [{"a": 1}, {}]


@pytest.mark.parametrize(
    "events",
    [
        [
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": "x"},
            }
        ],
        block(0, {"type": "text", "text": ""}) * 2,
        [{"type": "content_block_start", "content_block": {"type": "text"}}],
    ],
)
def test_blocks_in_disorder_break_the_stream(events: Any) -> None:
    with pytest.raises(StreamInterruptedError):
        anthropic(*events)


# ---------------------------------------------------------------- all three


pieces = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4)
answers = st.builds(
    WireAnswer,
    thoughts=pieces,
    texts=pieces,
    calls=st.lists(
        st.builds(
            WireCall,
            name=st.sampled_from(["w", "a_b_0123456789ab"]),
            arguments=st.dictionaries(st.text(max_size=5), st.text(), max_size=2).map(
                json.dumps
            ),
        ),
        max_size=3,
    ).map(
        lambda calls: [
            WireCall(name=call.name, arguments=call.arguments, call_id=f"c{n}")
            for n, call in enumerate(calls)
        ]
    ),
    seal=st.sampled_from(["", "c2VhbA=="]),
    reason=st.sampled_from(["stop", "length", "refusal"]),
)


def data_of(event: bytes) -> str:
    return next(
        line.removeprefix("data: ")
        for line in event.decode().split("\n")
        if line.startswith("data: ")
    )


@given(answers, st.sampled_from(FORMATS))
def test_every_answer_arrives_as_it_was_meant_and_no_part_of_it_is_an_answer(
    answer: Any, form: Any
) -> None:
    """Mutants that this finds: a lost or doubled delta, names not mapped back, calls joined,
    an answer without its last event taken as whole."""
    events = [data_of(event) for event in form.events(answer)]
    output = read(READERS[form.name]("p", NAMES), *events)

    said = [item.text for item in output.items if isinstance(item, AssistantItem)]
    calls = [item for item in output.items if isinstance(item, ModelCall)]
    assert said == (["".join(answer.texts)] if answer.texts else [])
    assert [(call.name, call.arguments, call.call_id) for call in calls] == [
        (NAMES.get(call.name, call.name), call.arguments, call.call_id) for call in answer.calls
    ]
    told = answer.texts or form.name == "anthropic" or answer.reason != "refusal"
    assert output.finish_reason == (answer.reason if told else "stop")
    last = -3 if form.name == "openai-chat" else -1
    with pytest.raises(StreamInterruptedError):
        read(READERS[form.name]("p", NAMES), *events[:last])
