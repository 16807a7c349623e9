"""Every wire format over a real socket: what arrives, and why it ended."""

from __future__ import annotations

from typing import Any

import attrs
import httpx2
import pytest
import trio

from tests.scenarios.streams.asking import CONTEXT, HELLO, REQUEST, RICH, Sink, ask, make
from trio_agent.model.base import ModelCall
from trio_agent.model.http import Transport
from trio_agent.model.router import ModelRouter
from trio_agent.protocol.items import AssistantItem, ReasoningItem
from trio_agent.protocol.usage import TokenUsage
from trio_agent.testing.wire_server import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Reply,
    WireAnswer,
    WireCall,
    WireFormat,
    open_wire_server,
)

# ---------------------------------------------------------------- what arrives


async def test_text_is_streamed_and_returned(form: WireFormat) -> None:
    sink = Sink()
    output = await ask(form, form.reply(HELLO), sink=sink)

    assert sink.calls > len(sink.pieces), "events without text are signs of life"
    assert output.items == (AssistantItem(text="Hello 🙂"),)
    assert output.finish_reason == "stop"
    assert output.end_turn
    assert sink.pieces == [(text, "final_answer") for text in HELLO.texts]
    assert output.usage == TokenUsage(
        input_tokens=11,
        cached_input_tokens=5,
        output_tokens=7,
        reasoning_output_tokens=0 if form is MESSAGES else 3,
        total_tokens=18,
    )


async def test_reasoning_text_and_several_calls_arrive_whole(form: WireFormat) -> None:
    sink = Sink()
    output = await ask(form, form.reply(RICH), sink=sink)
    thought, said, *calls = output.items
    between = "\n" if form is RESPONSES else ""

    assert isinstance(thought, ReasoningItem)
    assert thought.text == f"let me {between}see"
    assert thought.sealed is not None
    assert said == AssistantItem(text="I will look.")
    assert calls == [
        ModelCall(name="weather", arguments='{"city": "Zürich"}', call_id="a"),
        ModelCall(name="weather", arguments='{"city": "東京 🗼"}', call_id="b"),
    ]
    assert sink.text("reasoning") == thought.text
    assert sink.text() == said.text


def lines(separator: bytes) -> Any:
    def change(data: bytes) -> bytes:
        return data.replace(b"\n", separator)

    return change


CUTS: dict[str, Any] = {
    "byte by byte": lambda data: [data[i : i + 1] for i in range(len(data))],
    "all at once": lambda data: [data],
    "carriage returns": lambda data: [lines(b"\r")(data)],
    "both, cut between them": lambda data: (
        lines(b"\r\n")(data).replace(b"\r", b"\r\0").split(b"\0")
    ),
    "comments": lambda data: [b": hi\n\n:\n" + data.replace(b"\n\n", b"\n: x\n\n: y\n\n")],
    "other fields": lambda data: [data.replace(b"data:", b"id: 1\nretry: 5\nnoise: 2\ndata:")],
    "a byte order mark": lambda data: [b"\xef\xbb\xbf" + data],
    "no space behind the colon": lambda data: [data.replace(b"data: ", b"data:")],
}


@pytest.mark.parametrize("cut", CUTS)
async def test_framing_makes_no_difference(form: Any, cut: Any) -> None:
    data = b"".join(form.events(RICH))
    sink, plain = Sink(), Sink()
    with trio.fail_after(30):
        async with open_wire_server(Reply(chunks=CUTS[cut](data)), form.reply(RICH)) as server:
            model = make(form, server)
            output = await model.respond(REQUEST, sink)
            expected = await model.respond(REQUEST, plain)
            await server.wait_closed()

    assert output == expected
    assert sink.pieces == plain.pieces


async def test_a_byte_order_mark_costs_no_event(form: WireFormat) -> None:
    """The first line is then one that counts: no name stands before it."""
    events = form.events(HELLO)[0 if form is MESSAGES else 1 :]
    data = b"".join(event[event.index(b"data:") :] for event in events)
    output = await ask(form, Reply(chunks=[b"\xef\xbb\xbf" + data]))

    assert output.items == (AssistantItem(text="Hello 🙂"),)
    assert output.usage.input_tokens == 11


async def test_characters_cut_in_half_by_escapes_are_joined(form: WireFormat) -> None:
    data = b"".join(form.events(WireAnswer(texts=("aXX", "YYb", "XX", "c"))))
    data = data.replace(b"XX", rb"\ud83d").replace(b"YY", rb"\ude00")
    sink = Sink()
    output = await ask(form, Reply(chunks=[data]), sink=sink)

    assert output.items == (AssistantItem(text="a😀b\ufffdc"),)
    assert sink.text() == "a😀b\ufffdc"


async def test_a_complete_answer_waits_for_no_end_of_the_stream(
    form: WireFormat,
) -> None:
    output = await ask(form, form.reply(HELLO, end="linger"))

    assert output.items == (AssistantItem(text="Hello 🙂"),)


async def test_one_connection_serves_one_request_after_the_other(form: WireFormat) -> None:
    with trio.fail_after(30):
        async with open_wire_server(*[form.reply(HELLO)] * 3) as server:
            model = make(form, server)
            async with ModelRouter("default", model).open():
                for _ in range(3):
                    await model.respond(REQUEST, Sink())
                assert server.connections == 1
            await server.wait_closed()


async def test_all_models_of_a_router_share_one_client() -> None:
    made = []

    def client() -> Any:
        made.append(httpx2.AsyncClient(verify=CONTEXT))
        return made[-1]

    transport = Transport(client)
    async with open_wire_server(*[CHAT.reply(HELLO)] * 2, *[MESSAGES.reply(HELLO)]) as server:
        router = ModelRouter("a", make(CHAT, server, transport=transport))
        router.register("b", make(CHAT, server, transport=transport))
        router.register("c", make(MESSAGES, server, transport=transport))
        async with router.open(), router.open():
            for route in "abc":
                await router.model(route).respond(REQUEST, Sink())
            assert len(made) == 1
            assert server.connections == 1
        await server.wait_closed()
        assert made[0].is_closed
        async with router.open():
            assert len(made) == 2


# ---------------------------------------------------------------- why it ended


REASONS = {"length", "refusal", "content_filter"}


@pytest.mark.parametrize("reason", sorted(REASONS))
async def test_the_outcome_says_why_the_answer_ended(form: Any, reason: Any) -> None:
    output = await ask(form, form.reply(attrs.evolve(HELLO, reason=reason)))
    expected = "refusal" if (form, reason) == (MESSAGES, "content_filter") else reason

    assert output.finish_reason == expected
    assert output.items == (AssistantItem(text="Hello 🙂"),)


async def test_a_call_that_was_cut_off_stays_cut_and_says_so(form: WireFormat) -> None:
    raw = '{"path": "a.txt", "content": "half'
    answer = WireAnswer(calls=(WireCall(name="write", arguments=raw),), reason="length")
    output = await ask(form, form.reply(answer))

    assert output.finish_reason == "length"
    assert output.items == (ModelCall(name="write", arguments=raw, call_id="call_1"),)


@pytest.mark.parametrize(
    "answer", [WireAnswer(), WireAnswer(texts=(" \n",))], ids=["none", "blank"]
)
async def test_an_empty_answer_is_an_answer(form: Any, answer: Any) -> None:
    output = await ask(form, form.reply(answer))

    assert output.items == tuple(AssistantItem(text=text) for text in answer.texts)
