"""OpenAI Chat Completions, as spoken by OpenAI and by nearly every other server.

The request is plain; what differs between servers is the stream. The reader
takes reasoning under either of its usual names, content as text or as parts, and
pieces of parallel calls however they are numbered: a call's id decides, then its
number, then whether it begins with a name. Arguments of two calls are never joined.
"""

from __future__ import annotations

import json  # arguments that a server sends as an object instead of text
from collections.abc import Mapping, Sequence
from typing import Final, cast

from trio_agent.errors import StreamInterruptedError
from trio_agent.model.base import (
    ModelCall,
    ModelOutput,
    ModelRequest,
    OutputItem,
    OutputReason,
)
from trio_agent.model.failure import event_refusal
from trio_agent.model.http import (
    CONNECT_SECONDS,
    READ_IDLE_SECONDS,
    REQUEST_SECONDS,
    Delta,
    HttpModel,
    Transport,
    decode_event,
)
from trio_agent.model.openai_access import openai_access, with_bearer
from trio_agent.model.wire import (
    Answered,
    Halves,
    OutputLimit,
    Said,
    legal_call_id,
    legal_name,
    list_member,
    member,
    original_names,
    text_member,
    token_count,
    turns,
)
from trio_agent.protocol.items import (
    AssistantItem,
    ImageItem,
    ReasoningItem,
    Sealed,
    ToolCallItem,
)
from trio_agent.protocol.text import Json, replace_surrogates
from trio_agent.protocol.usage import TokenUsage

_FAMILY: Final = "openai-chat"

_REASONING_MEMBERS: Final = ("reasoning_content", "reasoning")

_REASONS: Final[Mapping[str, OutputReason]] = {
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "content_filter": "content_filter",
    "safety": "content_filter",
    "refusal": "refusal",
}
"""Every other reason is an ordinary stop, whatever a server calls it."""

_BROKEN_OFF: Final = frozenset({"error", "abort", "cancelled", "network_error"})
"""Reasons by which a server says that it failed."""


class OpenAIChat(HttpModel):
    """A model behind ``/chat/completions``.

    Args:
        model: The model's name.
        api_key: Default: ``OPENAI_API_KEY``. Only OpenAI's own server must have one;
            ``""`` sends none.
        base_url: Default: ``OPENAI_BASE_URL``, else OpenAI's own server. It ends in
            ``/v1`` on most servers.
        max_output_tokens: A limit for each answer.
        extra: More members of the request, for what only this server knows.
        headers: More headers.
        transport: See `Transport`; default: one that all adapters share.
        connect_timeout: Seconds until a connection stands.
        read_timeout: Seconds of silence.
        request_timeout: Seconds for a whole answer.

    Raises:
        ConfigError: If a key is missing, the address is unsafe, a limit is not
            positive or httpx2 is not installed.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        max_output_tokens: int | None = None,
        extra: Mapping[str, Json] | None = None,
        headers: Mapping[str, str] | None = None,
        transport: Transport | None = None,
        connect_timeout: float = CONNECT_SECONDS,
        read_timeout: float = READ_IDLE_SECONDS,
        request_timeout: float = REQUEST_SECONDS,
    ) -> None:
        access = openai_access(api_key, base_url)
        super().__init__(
            label=_FAMILY,
            model=model,
            url=f"{access.url}/chat/completions",
            headers=with_bearer(headers, access),
            secrets=(access.key,),
            transport=transport,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            request_timeout=request_timeout,
        )
        self.binding: Final = access.binding(_FAMILY, model)
        self._first_party = access.first_party
        self._max_output_tokens = max_output_tokens
        self._extra = dict(extra or {})

    def body(self, request: ModelRequest) -> dict[str, Json]:
        """See `HttpModel.body`."""
        body: dict[str, Json] = {
            "model": self.model,
            "messages": chat_messages(request, self.binding),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": legal_name(tool.name),
                        "description": tool.description,
                        "parameters": dict(tool.parameters),
                    },
                }
                for tool in request.tools
            ]
        if request.reasoning_effort is not None:
            body["reasoning_effort"] = request.reasoning_effort
        if self._max_output_tokens is not None:
            # OpenAI refuses the old name on its newer models, others know no other.
            name = "max_completion_tokens" if self._first_party else "max_tokens"
            body[name] = self._max_output_tokens
        if self._first_party and request.cache_key:
            body["prompt_cache_key"] = legal_call_id(request.cache_key)
        return {**body, **self._extra}

    def reader(self, request: ModelRequest) -> ChatReader:
        """See `HttpModel.reader`."""
        return ChatReader(self.binding, original_names(request.tools))


def chat_messages(request: ModelRequest, binding: str) -> list[Json]:
    """Return the messages of *request* as a server with that *binding* may see them."""
    messages: list[Json] = []
    if request.instructions.strip():
        messages.append({"role": "system", "content": request.instructions})
    for turn in turns(request.items, binding):
        if isinstance(turn, Said):
            messages.append({"role": "user", "content": _said(turn)})
            continue
        messages.append(_assistant(turn))
        messages.extend(
            {
                "role": "tool",
                "tool_call_id": legal_call_id(output.call_id),
                "content": output.output,
            }
            for output in turn.outputs
        )
    return messages


def _said(turn: Said) -> Json:
    if not any(isinstance(item, ImageItem) for item in turn.items):
        return "\n\n".join(item.text for item in turn.items if not isinstance(item, ImageItem))
    return [
        {
            "type": "image_url",
            "image_url": {"url": f"data:{item.media_type};base64,{item.data}"},
        }
        if isinstance(item, ImageItem)
        else {"type": "text", "text": item.text}
        for item in turn.items
    ]


def _assistant(turn: Answered) -> Json:
    said = [part.text for part in turn.parts if isinstance(part, AssistantItem)]
    message: dict[str, Json] = {
        "role": "assistant",
        "content": "\n\n".join(said) if said else None,
    }
    # Models that think between calls forget why they called if they do not read
    # their thoughts again; a seal says that the server gave them under this name.
    for part in turn.parts:
        if isinstance(part, ReasoningItem) and part.sealed is not None and part.text:
            name = text_member(part.sealed.data, "member")
            if name in _REASONING_MEMBERS:
                message[name] = text_member(message, name) + part.text
    calls = [
        {
            "id": legal_call_id(part.call_id),
            "type": "function",
            "function": {
                "name": legal_name(part.name),
                "arguments": json.dumps(
                    part.arguments, ensure_ascii=False, separators=(",", ":")
                ),
            },
        }
        for part in turn.parts
        if isinstance(part, ToolCallItem)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


class _Call:
    """One call while its pieces come in."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.id = ""
        self.name = ""
        self.pieces: list[str] = []

    def is_complete(self) -> bool:
        """Return whether the arguments so far are an object, so no piece can follow."""
        text = "".join(self.pieces).strip()
        if not text.endswith("}"):
            return False
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return False
        return True


class ChatReader:
    """Reads one stream of chat chunks: see `AnswerReader`."""

    def __init__(self, binding: str, names: Mapping[str, str]) -> None:
        self.done = False
        self._binding = binding
        self._names = names
        self._limit = OutputLimit()
        self._halves = Halves()
        self._reasoning_halves = Halves()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._reasoning_member = ""
        self._calls: list[_Call] = []
        self._finish = ""
        self._refused = False
        self._usage = TokenUsage()

    def feed(self, data: str) -> Sequence[Delta]:
        """See `AnswerReader.feed`."""
        if data == "[DONE]":
            self.done = True
            return ()
        chunk = decode_event(data)
        if chunk.get("error"):
            raise event_refusal(_FAMILY, chunk)
        choices = list_member(chunk, "choices")
        usage = chunk.get("usage")
        if usage is not None:
            self._usage = _usage(usage)
        if not choices:
            return ()
        choice = choices[0]
        finish = member(choice, "finish_reason")
        if isinstance(finish, str) and finish:
            self._finish = finish
        delta = member(choice, "delta")
        return self._delta(cast("dict[str, Json]", delta)) if isinstance(delta, dict) else ()

    def _delta(self, delta: dict[str, Json]) -> Sequence[Delta]:
        found: list[Delta] = []
        for name in _REASONING_MEMBERS:
            thought = delta.get(name)
            if isinstance(thought, str) and thought:
                self._reasoning_member = self._reasoning_member or name
                if name == self._reasoning_member:  # some servers send both
                    self._think(thought, found)
        content = delta.get("content")
        if content:
            if isinstance(content, str):
                self._say(content, found)
            for part in list_member(delta, "content"):
                self._part(part, found)
        refusal = delta.get("refusal")
        if isinstance(refusal, str) and refusal:
            self._refused = True
            self._say(refusal, found)
        for piece in list_member(delta, "tool_calls"):
            self._piece(piece)
        return found

    def _part(self, part: Json, found: list[Delta]) -> None:
        """Take one part of content that came as a list."""
        if member(part, "type") == "thinking":
            thoughts = member(part, "thinking")
            if isinstance(thoughts, str):
                self._think(thoughts, found)
            for thought in list_member(part, "thinking"):
                self._think(text_member(thought, "text"), found)
        else:
            self._say(text_member(part, "text"), found)

    def _say(self, text: str, found: list[Delta]) -> None:
        text = self._halves.join(text)
        if text:
            self._limit.add(text)
            self._text.append(text)
            found.append((text, "final_answer"))

    def _think(self, text: str, found: list[Delta]) -> None:
        text = self._reasoning_halves.join(text)
        if text:
            self._limit.add(text)
            self._reasoning.append(text)
            found.append((text, "reasoning"))

    def _piece(self, piece: Json) -> None:
        """Add one piece of a call to the call that it belongs to."""
        number = member(piece, "index")
        number = number if isinstance(number, int) and not isinstance(number, bool) else None
        call_id = text_member(piece, "id")
        name = text_member(piece, "function", "name")
        arguments = member(piece, "function", "arguments")
        if arguments is not None and not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        call = self._candidate(number, call_id, name)
        if call is not None and (
            (name and call.name and name != call.name)
            or (name and arguments and call.is_complete())
        ):
            call = None
        if call is None:
            call = _Call(number)
            self._limit.add_call()
            self._limit.add(name)
            self._calls.append(call)
        call.id = call.id or call_id
        call.name = call.name or name
        if arguments:
            self._limit.add(arguments)
            call.pieces.append(arguments)

    def _candidate(self, number: int | None, call_id: str, name: str) -> _Call | None:
        """Return the call that a piece seems to continue, or None if it begins one."""
        newest_first = self._calls[::-1]
        if call_id:
            for call in newest_first:
                if call.id == call_id:
                    return call
        for call in newest_first:
            if number is None or call.number == number:
                return None if call_id and (call.id or call.is_complete()) else call
        # A number never seen, with nothing that begins a call: servers that count
        # wrongly in their later pieces mean the call that they began last.
        return newest_first[0] if newest_first and not call_id and not name else None

    def finish(self) -> ModelOutput:
        """See `AnswerReader.finish`."""
        if not self._finish or self._finish in _BROKEN_OFF:
            raise StreamInterruptedError
        items: list[OutputItem] = []
        if self._reasoning:
            sealed = (
                Sealed(provider=self._binding, data={"member": self._reasoning_member})
                if self._reasoning_member
                else None
            )
            items.append(ReasoningItem(text="".join(self._reasoning), sealed=sealed))
        if self._text:
            items.append(AssistantItem(text="".join(self._text)))
        reason: OutputReason = _REASONS.get(self._finish, "stop")
        nothing = "" if reason == "length" else "{}"
        items.extend(
            ModelCall(
                name=self._names.get(call.name, replace_surrogates(call.name)),
                arguments=replace_surrogates("".join(call.pieces)) or nothing,
                call_id=replace_surrogates(call.id),
            )
            for call in self._calls
        )
        return ModelOutput(
            items=tuple(items),
            finish_reason="refusal" if self._refused and reason == "stop" else reason,
            usage=self._usage,
        )


def _usage(usage: Json) -> TokenUsage:
    given = token_count(usage, "prompt_tokens")
    made = token_count(usage, "completion_tokens")
    return TokenUsage(
        input_tokens=given,
        cached_input_tokens=max(
            token_count(usage, "prompt_tokens_details", "cached_tokens"),
            token_count(usage, "cached_tokens"),
            token_count(usage, "prompt_cache_hit_tokens"),
        ),
        output_tokens=made,
        reasoning_output_tokens=token_count(
            usage, "completion_tokens_details", "reasoning_tokens"
        ),
        total_tokens=token_count(usage, "total_tokens") or given + made,
    )
