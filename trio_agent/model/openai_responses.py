"""OpenAI Responses: the format in which OpenAI's reasoning models are whole.

Nothing is kept on the server (``store`` is false), so reasoning comes back to it
encrypted, as a sealed part of the history, without the ids that a server without
memory could not resolve.
"""

from __future__ import annotations

import json  # arguments, which go out as text
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

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
    AnswerPart,
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
    Phase,
    ReasoningItem,
    Sealed,
)
from trio_agent.protocol.text import Json, replace_surrogates
from trio_agent.protocol.usage import TokenUsage

_FAMILY: Final = "openai-responses"

_Visible: TypeAlias = Literal["commentary", "final_answer"]

_REASONS: Final[Mapping[str, OutputReason]] = {
    "max_output_tokens": "length",
    "max_tokens": "length",
    "content_filter": "content_filter",
}
"""Why a response is incomplete."""


class OpenAIResponses(HttpModel):
    """A model behind ``/responses``.

    Args:
        model: The model's name.
        api_key: Default: ``OPENAI_API_KEY``. Only OpenAI's own server must have one;
            ``""`` sends none.
        base_url: Default: ``OPENAI_BASE_URL``, else OpenAI's own server.
        max_output_tokens: A limit for each answer.
        reasoning_summary: Asks for readable summaries of the reasoning (for example
            ``"auto"``), which not every account may have.
        extra: More members of the request.
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
        reasoning_summary: str | None = None,
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
            url=f"{access.url}/responses",
            headers=with_bearer(headers, access),
            secrets=(access.key,),
            transport=transport,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            request_timeout=request_timeout,
        )
        self.binding: Final = access.binding(_FAMILY, model)
        self._max_output_tokens = max_output_tokens
        self._reasoning_summary = reasoning_summary
        self._extra = dict(extra or {})

    def body(self, request: ModelRequest) -> dict[str, Json]:
        """See `HttpModel.body`."""
        body: dict[str, Json] = {
            "model": self.model,
            "input": response_input(request, self.binding),
            "include": ["reasoning.encrypted_content"],
            "store": False,
            "stream": True,
        }
        if request.instructions.strip():
            body["instructions"] = request.instructions
        if request.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "name": legal_name(tool.name),
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                    "strict": False,
                }
                for tool in request.tools
            ]
            body["tool_choice"] = "auto"
            body["parallel_tool_calls"] = True
        reasoning: dict[str, Json] = {}
        if request.reasoning_effort is not None:
            reasoning["effort"] = request.reasoning_effort
        if self._reasoning_summary is not None:
            reasoning["summary"] = self._reasoning_summary
        if reasoning:
            body["reasoning"] = reasoning
        if request.cache_key:
            body["prompt_cache_key"] = legal_call_id(request.cache_key)
        if self._max_output_tokens is not None:
            body["max_output_tokens"] = self._max_output_tokens
        return {**body, **self._extra}

    def reader(self, request: ModelRequest) -> ResponsesReader:
        """See `HttpModel.reader`."""
        return ResponsesReader(self.binding, original_names(request.tools))


def response_input(request: ModelRequest, binding: str) -> list[Json]:
    """Return the items of *request* as a server with that *binding* may see them."""
    items: list[Json] = []
    for turn in turns(request.items, binding):
        if isinstance(turn, Said):
            items.append(
                {
                    "type": "message",
                    "role": "user",
                    "content": [
                        {
                            "type": "input_image",
                            "image_url": f"data:{item.media_type};base64,{item.data}",
                        }
                        if isinstance(item, ImageItem)
                        else {"type": "input_text", "text": item.text}
                        for item in turn.items
                    ],
                }
            )
            continue
        items.extend(item for part in turn.parts for item in _part(part))
        items.extend(
            {
                "type": "function_call_output",
                "call_id": legal_call_id(output.call_id),
                "output": output.output,
            }
            for output in turn.outputs
        )
    return items


def _part(part: AnswerPart) -> tuple[Json, ...]:
    if isinstance(part, ReasoningItem):
        # What another model thought stays out: it is not this one's to go on from.
        return () if part.sealed is None else (part.sealed.data,)
    if isinstance(part, AssistantItem):
        message: dict[str, Json] = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": part.text}],
        }
        if part.sealed is not None:
            message["phase"] = part.phase
        return (message,)
    return (
        {
            "type": "function_call",
            "call_id": legal_call_id(part.call_id),
            "name": legal_name(part.name),
            "arguments": json.dumps(part.arguments, ensure_ascii=False, separators=(",", ":")),
        },
    )


class _Slot:
    """One output item while its pieces come in."""

    def __init__(self, item: Json) -> None:
        self.item = item
        self.halves = Halves()
        self.pieces: list[str] = []
        self.part: tuple[Json, Json] | None = None

    @property
    def phase(self) -> _Visible:
        return "commentary" if member(self.item, "phase") == "commentary" else "final_answer"


class ResponsesReader:
    """Reads one stream of response events: see `AnswerReader`."""

    def __init__(self, binding: str, names: Mapping[str, str]) -> None:
        self.done = False
        self._binding = binding
        self._names = names
        self._limit = OutputLimit()
        self._slots: dict[int, _Slot] = {}
        self._complete: dict[int, Json] = {}
        self._ids: dict[str, int] = {}
        self._reason: OutputReason = "stop"
        self._usage = TokenUsage()
        self._end_turn = True

    def feed(self, data: str) -> Sequence[Delta]:
        """See `AnswerReader.feed`."""
        if data == "[DONE]":
            return ()
        event = decode_event(data)
        match event.get("type"):
            case "response.output_text.delta" | "response.refusal.delta":
                slot = self._slot(event)
                return self._text(slot, event, slot.phase)
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                return self._thought(self._slot(event), event)
            case "response.function_call_arguments.delta":
                arguments = text_member(event, "delta")
                self._limit.add(arguments)
                self._slot(event).pieces.append(arguments)
            case "response.output_item.added":
                item = event.get("item")
                if member(item, "type") == "function_call":
                    self._limit.add_call()
                self._slots[self._place(event)] = _Slot(item)
            case "response.output_item.done":
                self._complete[self._place(event)] = event.get("item")
            case "response.completed" | "response.incomplete":
                self._end(event.get("response"))
            case "response.failed":
                raise event_refusal(_FAMILY, member(event, "response", "error"))
            case "error":
                raise event_refusal(_FAMILY, event)
            case None if event.get("error"):
                raise event_refusal(_FAMILY, event)
            case _:
                pass  # progress of things that other events tell better
        return ()

    def _place(self, event: dict[str, Json]) -> int:
        """Return the place of an event's item: its number, else the order of the ids."""
        index = event.get("output_index")
        if isinstance(index, int):
            return index
        item_id = text_member(event, "item_id") or text_member(event, "item", "id")
        return self._ids.setdefault(item_id, len(self._ids))

    def _slot(self, event: dict[str, Json]) -> _Slot:
        index = self._place(event)
        slot = self._slots.get(index)
        if slot is None:
            slot = self._slots[index] = _Slot({"type": "message"})
        return slot

    def _text(self, slot: _Slot, event: dict[str, Json], phase: Phase) -> Sequence[Delta]:
        text = event.get("delta")
        text = slot.halves.join(text) if isinstance(text, str) else ""
        if not text:
            return ()
        self._limit.add(text)
        slot.pieces.append(text)
        return ((text, phase),)

    def _thought(self, slot: _Slot, event: dict[str, Json]) -> Sequence[Delta]:
        """Take a piece of reasoning; a newline stands between its parts."""
        part = (event.get("type"), event.get("summary_index", event.get("content_index")))
        parted = slot.part is not None and slot.part != part
        slot.part = part
        found = self._text(slot, event, "reasoning")
        if parted:
            slot.pieces.insert(len(slot.pieces) - len(found), "\n")
            return (("\n", "reasoning"), *found)
        return found

    def _end(self, response: Json) -> None:
        self.done = True
        self._usage = _usage(member(response, "usage"))
        self._end_turn = member(response, "end_turn") is not False
        if member(response, "status") == "incomplete":
            cause = text_member(response, "incomplete_details", "reason")
            self._reason = _REASONS.get(cause, "length")
        # The last event repeats the items; it is asked only for those that it alone has.
        all_in_one = not self._slots and not self._complete
        for index, item in enumerate(list_member(response, "output")):
            place = self._ids.get(text_member(item, "id"), index)
            if all_in_one or place in self._slots:
                self._complete.setdefault(place, item)

    def finish(self) -> ModelOutput:
        """See `AnswerReader.finish`."""
        if not self.done:
            raise StreamInterruptedError
        self._limit = OutputLimit()  # counted anew: an answer may come without deltas
        items: list[OutputItem] = []
        refused = False
        for index in sorted({*self._slots, *self._complete}):
            slot = self._slots.get(index)
            item = self._complete.get(index)
            if not isinstance(item, dict):
                if slot is None:
                    continue
                item = _partial(slot)
            found, refusal = self._item(cast("dict[str, Json]", item))
            if not found and slot is not None and slot.pieces:
                found, _ = self._item(_partial(slot))  # what was emitted counts
            refused = refused or refusal
            items.extend(found)
        for item in items:
            if isinstance(item, ModelCall):
                self._limit.add_call()
                self._limit.add(item.arguments)
            else:
                self._limit.add(item.text)
        return ModelOutput(
            items=tuple(items),
            finish_reason="refusal" if refused and self._reason == "stop" else self._reason,
            usage=self._usage,
            end_turn=self._end_turn,
        )

    def _item(self, item: dict[str, Json]) -> tuple[list[OutputItem], bool]:
        """Return what one output item is to us, and whether it refuses."""
        match item.get("type"):
            case "message":
                return self._message(item)
            case "reasoning":
                return [self._reasoning(item)], False
            case "function_call":
                name = text_member(item, "name")
                nothing = "" if self._reason == "length" else "{}"
                call = ModelCall(
                    name=self._names.get(name, replace_surrogates(name)),
                    arguments=replace_surrogates(text_member(item, "arguments")) or nothing,
                    call_id=replace_surrogates(text_member(item, "call_id")),
                )
                return [call], False
            case _:
                return [], False  # an item of a tool that the server runs; none was offered

    def _message(self, item: dict[str, Json]) -> tuple[list[OutputItem], bool]:
        texts: list[str] = []
        refused = False
        for part in list_member(item, "content"):
            if member(part, "type") == "refusal":
                refused = True
                texts.append(text_member(part, "refusal"))
            else:
                texts.append(text_member(part, "text"))
        text = replace_surrogates("".join(texts))
        if not text:
            return [], refused
        phase: _Visible = "commentary" if item.get("phase") == "commentary" else "final_answer"
        sealed = Sealed(provider=self._binding, data=None) if item.get("phase") else None
        return [AssistantItem(text=text, phase=phase, sealed=sealed)], refused

    def _reasoning(self, item: dict[str, Json]) -> ReasoningItem:
        texts = [text_member(part, "text") for part in list_member(item, "summary")]
        texts = texts or [text_member(part, "text") for part in list_member(item, "content")]
        text = replace_surrogates("\n".join(filter(None, texts)))
        if not item.get("encrypted_content"):
            return ReasoningItem(text=text)
        kept: dict[str, Json] = {
            name: item[name]
            for name in ("type", "summary", "content", "encrypted_content")
            if item.get(name) is not None
        }
        kept.setdefault("summary", [])
        return ReasoningItem(
            text=text, sealed=Sealed(provider=self._binding, data=_whole(kept))
        )


def _partial(slot: _Slot) -> dict[str, Json]:
    """Return an item that never became complete, with what came of it."""
    known = slot.item
    item = dict(cast("dict[str, Json]", known)) if isinstance(known, dict) else {}
    text = "".join(slot.pieces)
    match item.get("type"):
        case "function_call":
            item["arguments"] = text
        case "reasoning":
            item["summary"] = [{"type": "summary_text", "text": text}]
            item.pop("encrypted_content", None)
        case _:
            item["content"] = [{"type": "output_text", "text": text}]
    return item


def _whole(value: Any) -> Json:
    """Return *value* with every half character replaced."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_whole(inner) for inner in list_member({"": value}, "")]
    if isinstance(value, dict):
        return {
            replace_surrogates(key): _whole(inner)
            for key, inner in cast("dict[str, Json]", value).items()
        }
    return value


def _usage(usage: Json) -> TokenUsage:
    given = token_count(usage, "input_tokens")
    made = token_count(usage, "output_tokens")
    return TokenUsage(
        input_tokens=given,
        cached_input_tokens=token_count(usage, "input_tokens_details", "cached_tokens"),
        cache_write_input_tokens=token_count(
            usage, "input_tokens_details", "cache_write_tokens"
        ),
        output_tokens=made,
        reasoning_output_tokens=token_count(usage, "output_tokens_details", "reasoning_tokens"),
        total_tokens=token_count(usage, "total_tokens") or given + made,
    )
