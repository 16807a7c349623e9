"""Anthropic Messages.

An answer is a list of blocks. Thinking comes back to the server as it was, with
its signature; thinking without one (cut off, or from another server) does not.
Marks for the prompt cache stand behind the instructions and behind the two
newest messages of the user's side, so each step reads what the one before wrote.
"""

from __future__ import annotations

import json  # input that a server sends whole instead of in pieces
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from trio_agent.errors import ConfigError, ProviderError, StreamInterruptedError
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
    Access,
    Delta,
    HttpModel,
    Transport,
    decode_event,
    require_httpx2,
)
from trio_agent.model.wire import (
    Answered,
    Halves,
    OutputLimit,
    Said,
    legal_call_id,
    legal_name,
    member,
    original_names,
    text_member,
    token_count,
    turns,
)
from trio_agent.protocol.items import AssistantItem, ImageItem, ReasoningItem, Sealed
from trio_agent.protocol.text import Json, replace_surrogates
from trio_agent.protocol.usage import TokenUsage

_FAMILY: Final = "anthropic"
_URL: Final = "https://api.anthropic.com"
_VERSION: Final = "2023-06-01"

MAX_TOKENS_DEFAULT: Final = 32_000
"""The most that every current model of Anthropic's may be asked for."""

CONTINUED_TEXT: Final = "(The conversation goes on.)"
"""What the model reads first if a history begins with its own words."""

_CACHED: Final[Mapping[str, Json]] = {"type": "ephemeral"}

_REASONS: Final[Mapping[str, OutputReason]] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}

_THOUGHTS: Final = frozenset({"thinking", "redacted_thinking"})


class Anthropic(HttpModel):
    """A model behind ``/v1/messages``.

    Args:
        model: The model's name.
        api_key: Default: ``ANTHROPIC_API_KEY``. Only Anthropic's own server must have
            one; ``""`` sends none.
        base_url: Default: ``ANTHROPIC_BASE_URL``, else Anthropic's own server; with or
            without ``/v1``.
        max_output_tokens: The limit for each answer that the format demands.
        extra: More members of the request.
        headers: More headers, such as ``anthropic-beta``.
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
        max_output_tokens: int = MAX_TOKENS_DEFAULT,
        extra: Mapping[str, Json] | None = None,
        headers: Mapping[str, str] | None = None,
        transport: Transport | None = None,
        connect_timeout: float = CONNECT_SECONDS,
        read_timeout: float = READ_IDLE_SECONDS,
        request_timeout: float = REQUEST_SECONDS,
    ) -> None:
        require_httpx2("anthropic")
        if max_output_tokens <= 0:
            raise ConfigError(f"max_output_tokens must be positive, not {max_output_tokens}")
        access = Access(
            api_key=api_key,
            base_url=base_url,
            key_variable="ANTHROPIC_API_KEY",
            url_variable="ANTHROPIC_BASE_URL",
            default_url=_URL,
        )
        super().__init__(
            label=_FAMILY,
            model=model,
            url=f"{access.url.removesuffix('/v1')}/v1/messages",
            headers={
                "anthropic-version": _VERSION,
                **(headers or {}),
                **({"x-api-key": access.key} if access.key else {}),
            },
            secrets=(access.key,),
            transport=transport,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            request_timeout=request_timeout,
        )
        self.binding: Final = access.binding(_FAMILY, model)
        self._max_output_tokens = max_output_tokens
        self._extra = dict(extra or {})

    def body(self, request: ModelRequest) -> dict[str, Json]:
        """See `HttpModel.body`."""
        body: dict[str, Json] = {
            "model": self.model,
            "max_tokens": self._max_output_tokens,
            "messages": anthropic_messages(request, self.binding),
            "stream": True,
        }
        if request.instructions.strip():
            body["system"] = [
                {"type": "text", "text": request.instructions, "cache_control": _CACHED}
            ]
        if request.tools:
            body["tools"] = [
                {
                    "name": legal_name(tool.name),
                    "description": tool.description,
                    "input_schema": dict(tool.parameters),
                }
                for tool in request.tools
            ]
        if request.reasoning_effort is not None:
            body["thinking"] = {"type": "adaptive"}
            body["output_config"] = {"effort": request.reasoning_effort}
        return {**body, **self._extra}

    def reader(self, request: ModelRequest) -> AnthropicReader:
        """See `HttpModel.reader`."""
        return AnthropicReader(self.binding, original_names(request.tools))


def _stands_alone(data: Json) -> bool:
    """Return whether a sealed block is content: the work of a tool that the server runs."""
    return member(data, "type") not in _THOUGHTS


def anthropic_messages(request: ModelRequest, binding: str) -> list[Json]:
    """Return the messages of *request* as a server with that *binding* may see them.

    Roles alternate, and the first is the user's.

    Raises:
        ProviderError: If there is nothing to send.
    """
    found: list[tuple[str, list[dict[str, Json]]]] = []

    def add(role: str, blocks: list[dict[str, Json]]) -> None:
        if found and found[-1][0] == role:
            found[-1][1].extend(blocks)
        else:
            found.append((role, blocks))

    for turn in turns(request.items, binding, stands_alone=_stands_alone):
        if isinstance(turn, Said):
            add("user", [_said(item) for item in turn.items])
            continue
        if not found:
            add("user", [{"type": "text", "text": CONTINUED_TEXT}])
        add("assistant", _answered(turn))
        if turn.outputs:
            add(
                "user",
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": legal_call_id(output.call_id),
                        **({"content": output.output} if output.output.strip() else {}),
                        **({"is_error": True} if output.is_error else {}),
                    }
                    for output in turn.outputs
                ],
            )
    if not found:
        raise ProviderError(f"{_FAMILY}: the request holds no message", status=400)
    if found[-1][0] == "assistant" and found[-1][1][-1].get("type") == "text":
        last = found[-1][1][-1]  # the server refuses an unfinished answer that ends in a space
        last["text"] = str(last["text"]).rstrip()
    users = [blocks for role, blocks in found if role == "user"]
    for blocks in users[-2:]:
        blocks[-1]["cache_control"] = _CACHED
    return [{"role": role, "content": blocks} for role, blocks in found]


def _said(item: Any) -> dict[str, Json]:
    if isinstance(item, ImageItem):
        return {
            "type": "image",
            "source": {"type": "base64", "media_type": item.media_type, "data": item.data},
        }
    return {"type": "text", "text": item.text}


def _answered(turn: Answered) -> list[dict[str, Json]]:
    blocks: list[dict[str, Json]] = []
    for part in turn.parts:
        if isinstance(part, ReasoningItem):
            if part.sealed is not None:
                blocks.append(cast("dict[str, Json]", part.sealed.data))
        elif isinstance(part, AssistantItem):
            blocks.append({"type": "text", "text": part.text})
        else:
            blocks.append(
                {
                    "type": "tool_use",
                    "id": legal_call_id(part.call_id),
                    "name": legal_name(part.name),
                    "input": part.arguments,
                }
            )
    return blocks


class _Block:
    """One content block while its pieces come in."""

    def __init__(self, start: dict[str, Json]) -> None:
        self.start = start
        self.kind = text_member(start, "type")
        self.halves = Halves()
        self.pieces: list[str] = []
        self.input: list[str] = []
        self.signature = text_member(start, "signature")

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class AnthropicReader:
    """Reads one stream of message events: see `AnswerReader`."""

    def __init__(self, binding: str, names: Mapping[str, str]) -> None:
        self.done = False
        self._binding = binding
        self._names = names
        self._limit = OutputLimit()
        self._blocks: dict[int, _Block] = {}
        self._open: _Block | None = None
        self._stop_reason = ""
        self._usage: dict[str, Json] = {}

    def feed(self, data: str) -> Sequence[Delta]:
        """See `AnswerReader.feed`."""
        event = decode_event(data)
        match event.get("type"):
            case "content_block_delta":
                return self._delta(event)
            case "content_block_start":
                return self._start(event)
            case "message_start":
                self._count(member(event, "message", "usage"))
            case "message_delta":
                self._count(event.get("usage"))
                self._stop_reason = text_member(event, "delta", "stop_reason")
            case "message_stop":
                self.done = True
            case "error":
                raise event_refusal(_FAMILY, event)
            case None if event.get("error"):
                raise event_refusal(_FAMILY, event)
            case _:
                pass  # a ping, the end of a block, or news that ask nothing of us
        return ()

    def _count(self, usage: Json) -> None:
        if isinstance(usage, dict):
            counts = cast("dict[str, Json]", usage)
            self._usage.update({k: v for k, v in counts.items() if v is not None})

    def _start(self, event: dict[str, Json]) -> Sequence[Delta]:
        start = event.get("content_block")
        index = event.get("index")
        block = _Block(cast("dict[str, Json]", start) if isinstance(start, dict) else {})
        if not isinstance(index, int) or index in self._blocks:
            raise StreamInterruptedError(f"{_FAMILY}: block {index!r} began twice")
        if block.kind == "tool_use":
            self._limit.add_call()
        self._blocks[index] = block
        if block.kind == "text":
            return self._text(block, text_member(start, "text"), "final_answer")
        if block.kind == "thinking":
            return self._text(block, text_member(start, "thinking"), "reasoning")
        return ()

    def _delta(self, event: dict[str, Json]) -> Sequence[Delta]:
        block = self._blocks.get(cast("int", event.get("index")))
        delta = event.get("delta")
        if block is None or not isinstance(delta, dict):
            raise StreamInterruptedError(f"{_FAMILY}: a delta of a block that never began")
        delta = cast("dict[str, Json]", delta)
        match delta.get("type"):
            case "text_delta":
                return self._text(block, delta.get("text"), "final_answer")
            case "thinking_delta":
                return self._text(block, delta.get("thinking"), "reasoning")
            case "input_json_delta":
                piece = text_member(delta, "partial_json")
                self._limit.add(piece)
                block.input.append(piece)
            case "signature_delta":
                block.signature += text_member(delta, "signature")
            case _:
                pass  # citations: the text they belong to says enough
        return ()

    def _text(self, block: _Block, text: Json, phase: Any) -> Sequence[Delta]:
        text = block.halves.join(text) if isinstance(text, str) else ""
        if not text:
            return ()
        self._limit.add(text)
        block.pieces.append(text)
        return ((text, phase),)

    def finish(self) -> ModelOutput:
        """See `AnswerReader.finish`."""
        if not self.done or not self._stop_reason:
            raise StreamInterruptedError
        reason: OutputReason = _REASONS.get(self._stop_reason, "stop")
        items: list[OutputItem] = []
        for index in sorted(self._blocks):
            items.extend(self._item(self._blocks[index], cut=reason == "length"))
        return ModelOutput(
            items=tuple(items),
            finish_reason=reason,
            usage=_usage(self._usage),
            end_turn=self._stop_reason != "pause_turn",
        )

    def _item(self, block: _Block, *, cut: bool) -> Sequence[OutputItem]:
        match block.kind:
            case "text":
                return (AssistantItem(text=block.text),) if block.text else ()
            case "thinking":
                sealed: Json = None
                if block.signature:
                    sealed = {
                        "type": "thinking",
                        "thinking": block.text,
                        "signature": replace_surrogates(block.signature),
                    }
                return self._thought(block.text, sealed)
            case "redacted_thinking":
                return self._thought("", block.start)
            case "tool_use":
                name = text_member(block.start, "name")
                arguments = replace_surrogates("".join(block.input))
                if not arguments.strip():
                    whole = block.start.get("input")
                    arguments = json.dumps(whole) if whole else "" if cut else "{}"
                return (
                    ModelCall(
                        name=self._names.get(name, replace_surrogates(name)),
                        arguments=arguments,
                        call_id=replace_surrogates(text_member(block.start, "id")),
                    ),
                )
            case _:
                return self._thought("", self._foreign(block))

    def _thought(self, text: str, data: Json) -> Sequence[OutputItem]:
        if data is None:
            return (ReasoningItem(text=text),) if text else ()
        return (ReasoningItem(text=text, sealed=Sealed(provider=self._binding, data=data)),)

    @staticmethod
    def _foreign(block: _Block) -> Json:
        """Return a block of a kind that is the server's own business, as it must go back."""
        if not block.input:
            return block.start
        try:
            return {**block.start, "input": json.loads("".join(block.input))}
        except (ValueError, RecursionError):
            return block.start


def _usage(usage: Json) -> TokenUsage:
    read = token_count(usage, "cache_read_input_tokens")
    written = token_count(usage, "cache_creation_input_tokens")
    fresh = token_count(usage, "input_tokens")
    made = token_count(usage, "output_tokens")
    given = fresh + read + written
    return TokenUsage(
        input_tokens=given,
        cached_input_tokens=read,
        cache_write_input_tokens=written,
        output_tokens=made,
        total_tokens=given + made,
    )
