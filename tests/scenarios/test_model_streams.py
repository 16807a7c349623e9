"""Every wire format over a real socket: what arrives, what breaks, and what is left behind.

Each test runs for all three formats against `trio_agent.testing.wire_server`.
"""

from __future__ import annotations

import gc
import logging
import ssl
import sys
from typing import Any

import attrs
import httpx2
import pytest
import trio

from trio_agent.errors import (
    AuthError,
    ConfigError,
    ContextOverflowError,
    ProviderError,
    StreamInterruptedError,
)
from trio_agent.model.anthropic import Anthropic
from trio_agent.model.base import ModelCall, ModelRequest, ToolDefinition
from trio_agent.model.http import Transport
from trio_agent.model.openai import OpenAIChat, OpenAIResponses
from trio_agent.model.router import ModelRouter
from trio_agent.protocol.items import AssistantItem, ReasoningItem, UserItem
from trio_agent.protocol.limits import MAX_ERROR_MESSAGE_BYTES, MAX_MODEL_OUTPUT_BYTES
from trio_agent.protocol.usage import TokenUsage
from trio_agent.testing.wire_server import (
    CHAT,
    FORMATS,
    MESSAGES,
    RESPONSES,
    Reply,
    WireAnswer,
    WireCall,
    WireFormat,
    open_wire_server,
)

KEY = "sk-test-0123456789abcdef"
HELLO = WireAnswer(texts=("Hel", "lo ", "🙂"))
RICH = WireAnswer(
    thoughts=("let me ", "see"),
    texts=("I will ", "look."),
    calls=(
        WireCall(name="weather", arguments='{"city": "Zürich"}', call_id="a"),
        WireCall(name="weather", arguments='{"city": "東京 🗼"}', call_id="b"),
    ),
    seal="c2VhbA==",
)
WEATHER = ToolDefinition(name="weather", description="w", parameters={"type": "object"})
REQUEST = ModelRequest(
    instructions="be kind", items=(UserItem(text="grüß dich 👋"),), tools=(WEATHER,)
)


CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
TRANSPORT = Transport(lambda: httpx2.AsyncClient(verify=CONTEXT))
"""Loads no certificates, which takes longer than a test."""


def make(form: Any, server: Any, **more: Any) -> Any:
    make_model = {CHAT.name: OpenAIChat, RESPONSES.name: OpenAIResponses}.get(
        form.name, Anthropic
    )
    base = server.url if form is MESSAGES else f"{server.url}/v1"
    return make_model(
        "m-1", **{"api_key": KEY, "base_url": base, "transport": TRANSPORT, **more}
    )


class Sink:
    def __init__(self) -> None:
        self.pieces: list[tuple[str, str]] = []
        self.calls = 0

    async def __call__(self, text: str, phase: str = "final_answer") -> None:
        await trio.lowlevel.checkpoint()
        self.calls += 1
        if text:
            self.pieces.append((text, phase))

    def text(self, phase: str = "final_answer") -> str:
        return "".join(text for text, of in self.pieces if of == phase)


@pytest.fixture(params=FORMATS, ids=lambda form: form.name)
def form(request: Any) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def environment(monkeypatch: Any) -> Any:
    """No proxy and no key from outside."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in (
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_BASE_URL",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def nothing_is_left_to_the_garbage_collector() -> Any:
    """A generator that was not left properly warns here, and warnings are errors."""
    yield
    gc.collect(1)


async def ask(form: Any, *script: Any, sink: Any = None, **more: Any) -> Any:
    """Answer one request; no connection may be in use after it."""
    with trio.fail_after(30):
        async with open_wire_server(*script) as server:
            model = make(form, server, **more)
            try:
                return await model.respond(REQUEST, sink or Sink())
            finally:
                with trio.CancelScope(shield=True):
                    await server.wait_closed()


async def fails(form: Any, error: Any, *script: Any, sink: Any = None, **more: Any) -> Any:
    """Fail once, and find the model as usable as before: on one and the same client."""
    with trio.fail_after(30):
        async with open_wire_server(*script) as server:
            model = make(form, server, **more)
            async with model.open():
                with pytest.raises(error) as caught:
                    await model.respond(REQUEST, sink or Sink())
                if type(caught.value) is not error:
                    raise caught.value
                server.add(form.reply(HELLO))
                again = await model.respond(REQUEST, Sink())
                assert again.items == (AssistantItem(text="Hello 🙂"),)
            await server.wait_closed()
    return caught.value


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


# ---------------------------------------------------------------- what breaks


@pytest.fixture
async def exchange(form: WireFormat) -> Any:
    """Ask again and again over one client; whatever failed, no connection stays in use."""
    async with open_wire_server() as server:
        model = make(form, server)
        async with model.open():

            async def ask_once(reply: Any) -> Any:
                server.add(reply)
                with trio.fail_after(30):
                    return await model.respond(REQUEST, Sink())

            yield ask_once
            assert (await ask_once(form.reply(HELLO))).items
        with trio.fail_after(30):
            await server.wait_closed()


async def test_an_early_end_is_never_an_answer(form: WireFormat, exchange: Any) -> None:
    """Cut after every event, by each of the three ways a connection can end."""
    events = form.events(RICH)
    complete = 0
    for count in range(len(events)):
        for end in ("end", "drop", "reset"):
            reply = Reply(chunks=events[:count], end=end)
            if form is CHAT and end == "end" and count >= len(events) - 2:
                # Servers that send no last mark: the answer was whole, and the end clean.
                assert len((await exchange(reply)).items) == 4
                complete += 1
            else:
                with pytest.raises(StreamInterruptedError) as caught:
                    await exchange(reply)
                assert caught.value.retryable
    assert complete == (2 if form is CHAT else 0)


async def test_an_error_event_fails_the_answer_wherever_it_comes(
    form: Any, exchange: Any
) -> None:
    events = form.events(RICH)
    for count in range(len(events) - 1):
        with pytest.raises(ProviderError) as caught:
            await exchange(Reply(chunks=[*events[:count], form.error]))
        assert caught.value.retryable
        assert caught.value.status in {500, 529}


SILENCE: dict[str, Any] = {
    "before the headers": lambda _: Reply(before="stall"),
    "before the first event": lambda _: Reply(end="stall"),
    "in the middle": lambda form: Reply(chunks=form.events(RICH)[:4], end="stall"),
    "within an event": lambda form: Reply(chunks=[form.events(RICH)[0][:9]], end="stall"),
    "within a call": lambda form: Reply(chunks=form.events(RICH)[:-4], end="stall"),
}


@pytest.mark.parametrize("where", SILENCE)
async def test_silence_is_cut_at_the_idle_limit(form: Any, where: Any) -> None:
    error = await fails(form, StreamInterruptedError, SILENCE[where](form), read_timeout=0.2)

    assert error.retryable


async def test_a_stream_that_never_ends_is_cut_at_the_whole_limit(form: WireFormat) -> None:
    async with open_wire_server() as server:
        model = make(form, server, request_timeout=0.3)

        async def slow(_text: str, _phase: str = "final_answer") -> None:
            await trio.sleep_forever()

        server.add(form.reply(HELLO, end="stall"), form.reply(HELLO))
        with trio.fail_after(30), pytest.raises(StreamInterruptedError):
            await model.respond(REQUEST, slow)
        await server.wait_closed()
        await model.respond(REQUEST, Sink())


@pytest.mark.parametrize("where", SILENCE)
async def test_cancelling_during_silence_closes_the_connection(form: Any, where: Any) -> None:
    with trio.fail_after(30):
        async with open_wire_server(SILENCE[where](form), form.reply(HELLO)) as server:
            model = make(form, server)
            async with model.open():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(model.respond, REQUEST, Sink())
                    await server.wait_requests(1)
                    nursery.cancel_scope.cancel()
                await server.wait_closed()
                assert await model.respond(REQUEST, Sink())
            await server.wait_closed()


async def test_leaving_while_text_is_passed_on_closes_the_connection(form: WireFormat) -> None:
    """Cancelled in `emit`, and an error of `emit`: that error leaves as it came."""

    class FullError(Exception):
        pass

    async def raises(_text: str, _phase: str = "final_answer") -> None:
        raise full

    async def waits(_text: str, _phase: str = "final_answer") -> None:
        reached.set()
        await trio.sleep_forever()

    full, reached = FullError(), trio.Event()
    with trio.fail_after(30):
        for end in ("end", "stall"):
            async with open_wire_server(*[form.reply(RICH, end=end)] * 2) as server:
                model = make(form, server)
                async with model.open():
                    with pytest.raises(FullError) as caught:
                        await model.respond(REQUEST, raises)
                    assert caught.value is full
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(model.respond, REQUEST, waits)
                        await reached.wait()
                        nursery.cancel_scope.cancel()
                await server.wait_closed()


async def test_a_reset_before_the_answer_may_be_tried_again(form: WireFormat) -> None:
    error = await fails(form, StreamInterruptedError, Reply(before="reset"))

    assert error.retryable


async def test_a_refused_connection_may_be_tried_again(form: WireFormat) -> None:
    async with open_wire_server() as server:
        model = make(form, server)
    with pytest.raises(ProviderError) as caught:
        await model.respond(REQUEST, Sink())

    assert caught.value.retryable
    assert caught.value.status is None


STATUSES = {
    400: False,
    404: False,
    408: True,
    409: True,
    429: True,
    500: True,
    503: True,
    529: True,
}


@pytest.mark.parametrize("status", STATUSES)
async def test_a_status_says_whether_to_try_again(form: Any, status: Any) -> None:
    body = {"error": {"message": "no such thing", "type": "x"}}
    plain = await fails(form, ProviderError, Reply.failure(status, body))
    timed = await fails(form, ProviderError, Reply.failure(status, body, retry_after="7"))
    dated = await fails(
        form,
        ProviderError,
        Reply.failure(
            status,
            body,
            date="Mon, 30 Nov 2026 10:00:00 GMT",
            retry_after="Mon, 30 Nov 2026 10:01:30 GMT",
        ),
    )

    for error in (plain, timed, dated):
        assert error.retryable is STATUSES[status]
        assert error.status == status
        assert "no such thing" in str(error)
    assert (plain.retry_after, timed.retry_after, dated.retry_after) == (None, 7.0, 90.0)


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_credentials_have_their_own_error(form: Any, status: Any) -> None:
    error = await fails(form, AuthError, Reply.failure(status, {"error": "bad key " + KEY}))

    assert error.status == status
    assert not error.retryable
    assert KEY not in str(error)


OVERFLOWS = [
    (400, {"error": {"code": "context_length_exceeded", "message": "x"}}),
    (400, {"error": {"message": "This model's maximum context length is 8192 tokens."}}),
    (
        400,
        {"type": "error", "error": {"message": "prompt is too long: 210000 tokens > 200000"}},
    ),
    (413, {"error": {"type": "request_too_large", "message": "Request exceeds the limit"}}),
    (400, {"error": {"type": "exceed_context_size_error", "message": "request (9) exceeds 8"}}),
    (400, "the input token count (9) exceeds the maximum number of tokens allowed (8)"),
    (422, {"detail": "input is too long for requested model"}),
]


@pytest.mark.parametrize(("status", "body"), OVERFLOWS)
async def test_an_overflow_is_one_whatever_its_words(form: Any, status: Any, body: Any) -> None:
    error = await fails(form, ContextOverflowError, Reply.failure(status, body))

    assert not error.retryable


async def test_an_overflow_inside_a_stream_is_one_too(form: WireFormat) -> None:
    from trio_agent.testing.wire_server import sse

    inner = {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}
    event = sse({"type": "error", "error": inner} if form is not CHAT else {"error": inner})
    await fails(form, ContextOverflowError, Reply(chunks=[event]))


NO_STREAM = {
    "a page": Reply(headers={"content-type": "text/html"}, chunks=[b"<html>\xff busy</html>"]),
    "another format": Reply(headers={"content-type": "application/json"}, chunks=[b"{}"]),
    "a page as an error": Reply.failure(404, b"<html>\xff nothing</html>"),
    "an error that calls itself a stream": Reply(status=404, chunks=[b"data: {}\n\n"]),
    "a redirection": Reply.failure(302, b"", location="http://127.0.0.1:9/"),
}


@pytest.mark.parametrize("kind", NO_STREAM)
async def test_what_is_no_stream_fails_at_once(form: Any, kind: Any) -> None:
    error = await fails(form, ProviderError, NO_STREAM[kind])

    assert not error.retryable


async def test_an_error_body_that_breaks_off_keeps_what_is_known(form: WireFormat) -> None:
    reply = attrs.evolve(Reply.failure(503, {"error": "x"}, retry_after="3"), end="drop")
    error = await fails(form, ProviderError, reply)

    assert (error.status, error.retry_after, error.retryable) == (503, 3.0, True)


@pytest.mark.parametrize("body", [b"x" * 1_000_000, "🙂".encode() * 20_000], ids=["x", "wide"])
async def test_an_error_message_is_short(form: Any, body: Any) -> None:
    error = await fails(form, ProviderError, Reply.failure(400, body))

    assert len(str(error).encode()) <= MAX_ERROR_MESSAGE_BYTES


@pytest.mark.parametrize("event", [b"data: {broken\n\n", b"data: [1]\n\n", b"data: \xff\n\n"])
async def test_an_event_that_is_no_json_object_breaks_the_stream(form: Any, event: Any) -> None:
    await fails(form, StreamInterruptedError, Reply(chunks=[form.events(RICH)[0], event]))


async def test_the_largest_answer_passes_and_a_larger_one_does_not(
    form: Any,
) -> None:
    piece = "y" * 1_048_576
    whole = WireAnswer(texts=(piece,) * (MAX_MODEL_OUTPUT_BYTES // len(piece)))
    output = await ask(form, form.reply(whole))
    error = await fails(
        form, ProviderError, form.reply(attrs.evolve(whole, texts=(*whole.texts, "y")))
    )

    assert len(output.items[0].text) == MAX_MODEL_OUTPUT_BYTES
    assert not error.retryable


async def test_more_calls_than_allowed_are_refused(form: WireFormat) -> None:
    def calls(count: int) -> WireAnswer:
        return WireAnswer(
            calls=tuple(WireCall(name="t", call_id=f"c{n}") for n in range(count))
        )

    output = await ask(form, form.reply(calls(128)))
    error = await fails(form, ProviderError, form.reply(calls(129)))

    assert len(output.items) == 128
    assert not error.retryable


# ---------------------------------------------------------------- keys


async def test_the_key_is_in_the_header_and_nowhere_else(form: Any, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_wire_server(
        Reply.failure(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}),
        Reply.failure(500, f"authorization: Bearer {KEY} x-api-key: {KEY}".encode()),
        form.reply(HELLO),
    ) as server:
        model = make(form, server)
        shown = [repr(model), repr(vars(ModelRouter("a", model)))]
        for _ in range(2):
            with pytest.raises(ProviderError) as caught:
                await model.respond(REQUEST, Sink())
            shown += [str(caught.value), repr(caught.value)]
        await model.respond(REQUEST, Sink())

    assert [name for name, value in server.seen[0].headers.items() if KEY in value] == [
        "x-api-key" if form is MESSAGES else "authorization"
    ]
    assert all(KEY not in text for text in [*shown, caplog.text])
    assert all(KEY.encode() not in seen.raw for seen in server.seen)


async def test_a_server_of_ones_own_needs_no_key(form: WireFormat) -> None:
    async with open_wire_server(form.reply(HELLO)) as server:
        await make(form, server, api_key=None, transport=None).respond(REQUEST, Sink())

    assert not {"authorization", "x-api-key"} & set(server.seen[0].headers)


async def test_importing_an_adapter_does_not_import_httpx2() -> None:
    code = (
        "import sys, trio_agent.model.openai, trio_agent.model.anthropic;"
        "sys.exit('httpx2' in sys.modules)"
    )
    await trio.run_process([sys.executable, "-c", code])


async def test_a_missing_package_is_named(form: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    async with open_wire_server() as server:
        with pytest.raises(ConfigError) as caught:
            make(form, server)

    assert "pip install" in str(caught.value)
