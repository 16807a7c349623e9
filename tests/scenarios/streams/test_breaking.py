"""Every wire format over a real socket: what breaks, and what is left behind."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio

from tests.scenarios.streams.asking import HELLO, KEY, REQUEST, RICH, Sink, ask, fails, make
from trio_agent.errors import (
    AuthError,
    ContextOverflowError,
    ProviderError,
    StreamInterruptedError,
)
from trio_agent.protocol.limits import MAX_ERROR_MESSAGE_BYTES, MAX_MODEL_OUTPUT_BYTES
from trio_agent.testing.wire_server import (
    CHAT,
    Reply,
    WireAnswer,
    WireCall,
    WireFormat,
    open_wire_server,
)


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
