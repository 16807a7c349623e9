"""A provider on loopback: it speaks three wire formats, and fails on demand.

`WireServer` answers the n-th request with the n-th `Reply` of its script. The
formats `CHAT`, `RESPONSES` and `MESSAGES` write the events of one answer, and say
what a real server of that format would refuse in a request. Needs h11, which
httpx2 brings along.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeAlias

import attrs
import h11
import trio

from trio_agent.model.base import OutputReason
from trio_agent.model.wire import is_legal, list_member, member, text_member
from trio_agent.protocol.text import Json

End: TypeAlias = Literal["end", "drop", "reset", "stall", "linger"]
"""What follows the last chunk.

The stream's proper end; the connection closed without it; the connection reset;
silence; or an end that comes only when the client has gone.
"""


@attrs.frozen(kw_only=True)
class Reply:
    """How one request is answered.

    ``before`` fails before the status line: ``"stall"`` or ``"reset"``. Each
    chunk waits for the event at its place in ``holds``, if there is one.
    """

    chunks: Sequence[bytes] = ()
    status: int = 200
    headers: Mapping[str, str] = attrs.field(factory=dict[str, str])
    end: End = "end"
    before: Literal["", "stall", "reset"] = ""
    holds: Sequence[trio.Event] = ()

    @classmethod
    def failure(cls, status: int, body: object = None, **headers: str) -> Reply:
        """Return the reply with that *status*; underscores in header names are dashes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(
            status=status,
            chunks=(data,),
            headers={"content-type": "application/json", **named},
        )


@attrs.define
class Seen:
    """One request as it arrived, and how its connection ended."""

    path: str
    headers: dict[str, str]
    raw: bytes
    body: Any
    client_gone: bool = False


class WireServer:
    """Answers requests from a script; see `open_wire_server`.

    Attributes:
        seen: Every request, in order.
        open_connections: How many are open now.
        connections: How many there were in all.
        faults: What a strict server would have refused; see ``strict``.
    """

    def __init__(
        self,
        script: Sequence[Reply],
        *,
        strict: Callable[[Json], str | None] | None = None,
    ) -> None:
        self.seen: list[Seen] = []
        self.faults: list[str] = []
        self.open_connections = 0
        self.connections = 0
        self.port = 0
        self._script = list(script)
        self._strict = strict
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def url(self) -> str:
        """The address, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, *replies: Reply) -> None:
        """Append to the script."""
        self._script.extend(replies)

    async def wait_requests(self, count: int) -> None:
        """Wait until *count* requests have arrived in all. A checkpoint."""
        await trio.lowlevel.checkpoint()
        while len(self.seen) < count:
            await self._changed.park()

    async def wait_closed(self) -> None:
        """Wait until no connection is open. A checkpoint."""
        await trio.lowlevel.checkpoint()
        while self.open_connections:
            await self._changed.park()

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection until it ends."""
        self.open_connections += 1
        self.connections += 1
        try:
            async with stream:
                connection = h11.Connection(h11.SERVER)
                while await self._one(connection, stream):
                    connection.start_next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError):
            await trio.lowlevel.checkpoint()  # the client went away; that is its right
        finally:
            self.open_connections -= 1
            self._changed.unpark_all()

    async def _one(self, connection: h11.Connection, stream: trio.SocketStream) -> bool:
        """Answer one request; return whether another may follow."""
        seen = await _request(connection, stream)
        if seen is None:
            return False
        self.seen.append(seen)
        self._changed.unpark_all()
        reply = self._script.pop(0) if self._script else Reply.failure(400, "script over")
        if self._strict is not None and (fault := self._strict(seen.body)) is not None:
            self.faults.append(fault)
            reply = Reply.failure(400, {"error": {"message": fault}})
        if reply.before:
            if reply.before == "reset":
                _reset_on_close(stream)
            else:
                await _wait_gone(stream, seen)
            return False
        headers = {"content-type": "text/event-stream", **reply.headers}
        await stream.send_all(
            connection.send(
                h11.Response(status_code=reply.status, headers=list(headers.items()))
            )
        )
        for position, chunk in enumerate(reply.chunks):
            if position < len(reply.holds):
                await reply.holds[position].wait()
            await stream.send_all(connection.send(h11.Data(data=chunk)))
        if reply.end == "end":
            await stream.send_all(connection.send(h11.EndOfMessage()))
            return connection.our_state is h11.DONE
        if reply.end == "reset":
            _reset_on_close(stream)
        elif reply.end != "drop":
            await _wait_gone(stream, seen)
        return False


async def _request(connection: h11.Connection, stream: trio.SocketStream) -> Seen | None:
    """Read one request, or return None if the client has gone."""
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(65536))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            break
        else:
            await trio.lowlevel.checkpoint()
            return None
    await trio.lowlevel.checkpoint()
    assert head is not None
    raw = bytes(body)
    return Seen(
        head.target.decode(),
        {name.decode(): value.decode() for name, value in head.headers},
        raw,
        json.loads(raw.decode(), parse_constant=_no_constant),
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def _wait_gone(stream: trio.SocketStream, seen: Seen) -> None:
    try:
        await stream.receive_some(1)
    except trio.BrokenResourceError:
        await trio.lowlevel.checkpoint()
    seen.client_gone = True


def _reset_on_close(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@asynccontextmanager
async def open_wire_server(
    *script: Reply, strict: Callable[[Json], str | None] | None = None
) -> AsyncGenerator[WireServer]:
    """Serve *script* on a free port of loopback for the length of the block.

    Args:
        script: One reply a request.
        strict: Says what is wrong with a request's body; such a request gets 400.
    """
    server = WireServer(script, strict=strict)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, server.serve, 0)
        server.port = listeners[0].socket.getsockname()[1]
        try:
            yield server
        finally:
            nursery.cancel_scope.cancel(reason="the server is not needed any more")


# ---------------------------------------------------------------- the three formats


@attrs.frozen(kw_only=True)
class WireCall:
    """A tool call as a provider sends it: raw arguments, in pieces."""

    name: str
    arguments: str = "{}"
    call_id: str = "call_1"

    def pieces(self) -> list[str]:
        """Return the arguments in pieces of three characters."""
        return [self.arguments[i : i + 3] for i in range(0, len(self.arguments), 3)]


@attrs.frozen(kw_only=True)
class WireAnswer:
    """What a provider's stream says, independent of its format."""

    thoughts: Sequence[str] = ()
    texts: Sequence[str] = ()
    calls: Sequence[WireCall] = ()
    reason: OutputReason = "stop"
    seal: str = ""


@attrs.frozen(kw_only=True)
class WireFormat:
    """One provider's wire format: how it answers, and what it refuses."""

    name: str
    path: str
    events: Callable[[WireAnswer], list[bytes]]
    error: bytes
    """An event in a stream that says: overloaded."""
    request_fault: Callable[[Json], str | None]

    def reply(self, answer: WireAnswer, **more: Any) -> Reply:
        """Return *answer* as a reply, one event a chunk."""
        return Reply(chunks=self.events(answer), **more)


def sse(event: Json) -> bytes:
    """Return one server-sent event; named as its ``type``, if it has one."""
    name = text_member(event, "type")
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def _chat_events(answer: WireAnswer) -> list[bytes]:
    def chunk(delta: dict[str, Json], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return sse({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})

    finish = {"stop": "tool_calls" if answer.calls else "stop", "refusal": "stop"}
    said = "refusal" if answer.reason == "refusal" else "content"
    found = [chunk({"role": "assistant", "content": ""})]
    found += [chunk({"reasoning_content": text}) for text in answer.thoughts]
    found += [chunk({said: text}) for text in answer.texts]
    for number, call in enumerate(answer.calls):
        head = {"name": call.name, "arguments": ""}
        found.append(
            chunk({"tool_calls": [{"index": number, "id": call.call_id, "function": head}]})
        )
        found += [
            chunk({"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
            for piece in call.pieces()
        ]
    found.append(chunk({}, finish.get(answer.reason, answer.reason)))
    usage = {
        "prompt_tokens": 11,
        "completion_tokens": 7,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    return [*found, sse({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def _responses_events(answer: WireAnswer) -> list[bytes]:
    found: list[Json] = [{"type": "response.created", "response": {"id": "r"}}]
    output: list[Json] = []

    def item(start: dict[str, Json], deltas: list[Json], end: dict[str, Json]) -> None:
        index = len(output)
        found.append(
            {"type": "response.output_item.added", "output_index": index, "item": start}
        )
        found.extend({"output_index": index, **delta} for delta in deltas)
        found.append({"type": "response.output_item.done", "output_index": index, "item": end})
        output.append(end)

    if answer.thoughts or answer.seal:
        summary = [{"type": "summary_text", "text": text} for text in answer.thoughts]
        deltas: list[Json] = [
            {
                "type": "response.reasoning_summary_text.delta",
                "summary_index": index,
                "delta": text,
            }
            for index, text in enumerate(answer.thoughts)
        ]
        sealed = {"encrypted_content": answer.seal} if answer.seal else {}
        item(
            {"type": "reasoning", "id": "rs_1", "summary": []},
            deltas,
            {"type": "reasoning", "id": "rs_1", "status": "x", "summary": summary, **sealed},
        )
    if answer.texts:
        kind = "refusal" if answer.reason == "refusal" else "output_text"
        part = {"type": kind, "refusal" if kind == "refusal" else "text": "".join(answer.texts)}
        item(
            {"type": "message", "role": "assistant", "content": []},
            [{"type": f"response.{kind}.delta", "delta": text} for text in answer.texts],
            {"type": "message", "role": "assistant", "content": [part]},
        )
    for call in answer.calls:
        head = {"type": "function_call", "call_id": call.call_id, "name": call.name}
        item(
            {**head, "arguments": ""},
            [
                {"type": "response.function_call_arguments.delta", "delta": piece}
                for piece in call.pieces()
            ],
            {**head, "arguments": call.arguments},
        )
    details = {"length": "max_output_tokens", "content_filter": "content_filter"}
    cut = answer.reason in details
    status = "incomplete" if cut else "completed"
    response: dict[str, Json] = {
        "status": status,
        "output": output,
        "incomplete_details": {"reason": details[answer.reason]} if cut else None,
        "usage": {
            "input_tokens": 11,
            "output_tokens": 7,
            "total_tokens": 18,
            "input_tokens_details": {"cached_tokens": 5},
            "output_tokens_details": {"reasoning_tokens": 3},
        },
    }
    found.append({"type": f"response.{status}", "response": response})
    return [sse(event) for event in found]


def _messages_events(answer: WireAnswer) -> list[bytes]:
    usage = {
        "input_tokens": 6,
        "cache_read_input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "output_tokens": 1,
    }
    found: list[Json] = [
        {"type": "message_start", "message": {"usage": usage, "content": []}},
        {"type": "ping"},
    ]
    count = 0

    def block(start: dict[str, Json], deltas: list[Json]) -> None:
        nonlocal count
        found.append({"type": "content_block_start", "index": count, "content_block": start})
        found.extend(
            {"type": "content_block_delta", "index": count, "delta": delta} for delta in deltas
        )
        found.append({"type": "content_block_stop", "index": count})
        count += 1

    if answer.thoughts:
        deltas: list[Json] = [
            {"type": "thinking_delta", "thinking": text} for text in answer.thoughts
        ]
        if answer.seal:
            deltas.append({"type": "signature_delta", "signature": answer.seal})
        block({"type": "thinking", "thinking": "", "signature": ""}, deltas)
    elif answer.seal:
        block({"type": "redacted_thinking", "data": answer.seal}, [])
    if answer.texts:
        block(
            {"type": "text", "text": ""},
            [{"type": "text_delta", "text": text} for text in ("", *answer.texts)],
        )
    for call in answer.calls:
        block(
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}},
            [
                {"type": "input_json_delta", "partial_json": piece}
                for piece in ("", *call.pieces())
            ],
        )
    reason = {
        "stop": "tool_use" if answer.calls else "end_turn",
        "length": "max_tokens",
        "content_filter": "refusal",
    }.get(answer.reason, answer.reason)
    found += [
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason},
            "usage": {"output_tokens": 7},
        },
        {"type": "message_stop"},
    ]
    return [sse(event) for event in found]


# ---------------------------------------------------------------- what servers refuse


class _Calls:
    """Which calls are open while a history is read."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.owed: set[str] = set()

    def begin(self, call_id: str, name: str, arguments: Json) -> str | None:
        if not is_legal(call_id) or not is_legal(name):
            return f"illegal call id or name: {call_id!r} {name!r}"
        if call_id in self.seen:
            return f"call id {call_id} twice"
        if not isinstance(arguments, dict):
            return f"arguments of {name} are no object"
        self.seen.add(call_id)
        self.owed.add(call_id)
        return None

    def end(self, call_id: str) -> str | None:
        if call_id not in self.owed:
            return f"an output without a call: {call_id}"
        self.owed.remove(call_id)
        return None

    def between(self) -> str | None:
        return f"calls without outputs: {sorted(self.owed)}" if self.owed else None


def _object(text: Json) -> Json:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, TypeError):
        return None


def _blank(text: Json) -> bool:
    return not isinstance(text, str) or not text.strip()


def _chat_fault(body: Json) -> str | None:
    calls = _Calls()
    fault: str | None = None
    for message in list_member(body, "messages"):
        role = text_member(message, "role")
        content = member(message, "content")
        if role == "tool":
            fault = fault or calls.end(text_member(message, "tool_call_id"))
            continue
        fault = fault or calls.between()
        if role == "assistant":
            asked = list_member(message, "tool_calls")
            if content is None and not asked:
                fault = fault or "an assistant message without content and calls"
            if content is not None and _blank(content):
                fault = fault or "a blank assistant message"
            for call in asked:
                fault = fault or calls.begin(
                    text_member(call, "id"),
                    text_member(call, "function", "name"),
                    _object(member(call, "function", "arguments")),
                )
        elif isinstance(content, str) and _blank(content):
            fault = fault or f"a blank {role} message"
    return fault or calls.between()


def _responses_fault(body: Json) -> str | None:
    calls = _Calls()
    fault: str | None = None
    pending = False
    for item in list_member(body, "input"):
        kind = text_member(item, "type")
        if kind == "function_call_output":
            fault = fault or calls.end(text_member(item, "call_id"))
            continue
        if kind == "function_call":
            fault = fault or calls.begin(
                text_member(item, "call_id"),
                text_member(item, "name"),
                _object(member(item, "arguments")),
            )
        elif calls.owed:
            fault = fault or calls.between()
        if kind == "reasoning":
            pending = True
            if not text_member(item, "encrypted_content") or member(item, "id"):
                fault = fault or "reasoning that nobody can open"
            continue
        if kind == "message":
            if pending and text_member(item, "role") == "user":
                fault = fault or "reasoning without the item that follows it"
            for part in list_member(item, "content"):
                if "text" in part and _blank(member(part, "text")):
                    fault = fault or "a blank part"
        pending = False
    return fault or calls.between() or ("reasoning at the end" if pending else None)


def _messages_fault(body: Json) -> str | None:
    calls = _Calls()
    role = ""
    for message in list_member(body, "messages"):
        if text_member(message, "role") == role:
            return f"two {role} messages in a row"
        if not role and text_member(message, "role") != "user":
            return "the first message is not the user's"
        role = text_member(message, "role")
        blocks = list_member(message, "content")
        if not blocks:
            return "a message without content"
        owed = set(calls.owed)
        for block in blocks:
            kind = text_member(block, "type")
            fault: str | None = None
            if kind == "tool_result":
                fault = calls.end(text_member(block, "tool_use_id"))
            elif kind == "tool_use":
                fault = calls.begin(
                    text_member(block, "id"), text_member(block, "name"), member(block, "input")
                )
            elif kind == "text" and _blank(member(block, "text")):
                fault = "a blank text block"
            elif kind == "thinking" and not text_member(block, "signature"):
                fault = "thinking without a signature"
            elif owed & calls.owed:
                fault = calls.between()
            if fault is not None:
                return fault
        if owed & calls.owed:
            return calls.between()
        if text_member(blocks[-1], "type").endswith("thinking"):
            return "a message that ends in a thought"
    return calls.between()


CHAT: Final = WireFormat(
    name="openai-chat",
    path="/v1/chat/completions",
    events=_chat_events,
    error=sse({"error": {"message": "Overloaded", "type": "overloaded_error"}}),
    request_fault=_chat_fault,
)
RESPONSES: Final = WireFormat(
    name="openai-responses",
    path="/v1/responses",
    events=_responses_events,
    error=sse({"type": "error", "code": "server_error", "message": "Overloaded"}),
    request_fault=_responses_fault,
)
MESSAGES: Final = WireFormat(
    name="anthropic",
    path="/v1/messages",
    events=_messages_events,
    error=sse({"type": "error", "error": {"type": "overloaded_error", "message": "Busy"}}),
    request_fault=_messages_fault,
)
FORMATS: Final = (CHAT, RESPONSES, MESSAGES)
