"""Models for tests: one that follows a script, and two that judge what they are asked.

`ScriptedModel` answers the n-th request with the n-th entry of its script.
`StrictModel` stands for a real provider: it refuses what a provider would refuse.
`OwnParts` does what every adapter does before it sends anything: it leaves out
what another provider sealed, and replies in which nothing was said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, TypeAlias, cast

import attrs
import trio

from trio_agent.errors import InternalError, ProviderError, StreamInterruptedError
from trio_agent.model.base import (
    Emit,
    Model,
    ModelCall,
    ModelOutput,
    ModelRequest,
    OutputItem,
    OutputReason,
)
from trio_agent.model.wire import is_legal, legal_call_id, legal_name, own_items
from trio_agent.protocol.items import (
    AssistantItem,
    Phase,
    ReasoningItem,
    RequestItem,
    Sealed,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.text import Json, check_json, utf8_length
from trio_agent.protocol.usage import TokenUsage

SCRIPT_OVER_TEXT: Final = "The script is over."
"""What a `ScriptedModel` says once its script has run out."""

_PIECE: Final = 12


class _Answer:
    """What one request's steps have put together so far."""

    def __init__(self, request: int) -> None:
        self.request = request
        self.items: list[OutputItem] = []
        self.reason: OutputReason = "stop"
        self.usage = TokenUsage()
        self.end_turn = True
        self.calls = 0


Step: TypeAlias = Callable[[_Answer, Emit], Awaitable[None]]
"""One step of a script: made by `text`, `think`, `call`, `stop`, `drop` and the like."""

Answerer: TypeAlias = Callable[[ModelRequest, Emit], Awaitable[ModelOutput]]

ScriptEntry: TypeAlias = ModelOutput | str | Exception | Answerer | Sequence[Step]
"""How one request is answered.

A finished output; a text; an exception to raise; an async function of the request
and ``emit``; or a list of steps.
"""


async def _stream(emit: Emit, content: str, phase: Phase) -> None:
    """Emit *content* in pieces, as a network would bring it. A checkpoint."""
    await trio.lowlevel.checkpoint()
    for start in range(0, len(content), _PIECE):
        await emit(content[start : start + _PIECE], phase)


def text(content: str, *, commentary: bool = False, sealed: Sealed | None = None) -> Step:
    """Return the step that says *content*."""

    async def step(answer: _Answer, emit: Emit) -> None:
        phase: Literal["commentary", "final_answer"] = (
            "commentary" if commentary else "final_answer"
        )
        await _stream(emit, content, phase)
        answer.items.append(AssistantItem(text=content, phase=phase, sealed=sealed))

    return step


def think(content: str = "", *, sealed: Sealed | None = None) -> Step:
    """Return the step that thinks *content*, readable or only sealed."""

    async def step(answer: _Answer, emit: Emit) -> None:
        await _stream(emit, content, "reasoning")
        answer.items.append(ReasoningItem(text=content, sealed=sealed))

    return step


def call(
    name: str,
    arguments: dict[str, Json] | str | None = None,
    *,
    id: str | None = None,  # noqa: A002  # what every provider calls it
    sealed: Sealed | None = None,
) -> Step:
    """Return the step that asks for a tool.

    Args:
        name: The tool.
        arguments: An object, or raw text that goes out exactly as it is.
        id: The model's own id of the call; default: unique in the script.
        sealed: Data for this provider alone.
    """
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments or {})

    async def step(answer: _Answer, _emit: Emit) -> None:
        await trio.lowlevel.checkpoint()
        answer.calls += 1
        call_id = f"call_{answer.request}_{answer.calls}" if id is None else id
        answer.items.append(ModelCall(name=name, arguments=raw, call_id=call_id, sealed=sealed))

    return step


def stop(reason: OutputReason = "stop", *, end_turn: bool = True) -> Step:
    """Return the step that sets why the answer ended."""

    async def step(answer: _Answer, _emit: Emit) -> None:
        await trio.lowlevel.checkpoint()
        answer.reason, answer.end_turn = reason, end_turn

    return step


def usage(input_tokens: int = 0, output_tokens: int = 0, **details: int) -> Step:
    """Return the step that sets what the answer cost; *details* as in `TokenUsage`."""

    async def step(answer: _Answer, _emit: Emit) -> None:
        await trio.lowlevel.checkpoint()
        details.setdefault("total_tokens", input_tokens + output_tokens)
        answer.usage = TokenUsage(
            input_tokens=input_tokens, output_tokens=output_tokens, **details
        )

    return step


def drop() -> Step:
    """Return the step at which the connection ends with no end marker."""

    async def step(_answer: _Answer, _emit: Emit) -> None:
        await trio.lowlevel.checkpoint()
        raise StreamInterruptedError

    return step


def stall(seconds: float = math.inf) -> Step:
    """Return the step that stays open and silent, by default for ever."""

    async def step(_answer: _Answer, _emit: Emit) -> None:
        await trio.sleep(seconds)

    return step


def wait(event: trio.Event) -> Step:
    """Return the step that waits until a test sets *event*."""

    async def step(_answer: _Answer, _emit: Emit) -> None:
        await event.wait()

    return step


def fail(
    status: int,
    message: str = "the script says so",
    *,
    retryable: bool | None = None,
    retry_after: float | None = None,
) -> Step:
    """Return the step that fails as a provider does with that HTTP *status*."""
    if retryable is None:
        retryable = status in {408, 409, 429} or status >= 500

    async def step(_answer: _Answer, _emit: Emit) -> None:
        await trio.lowlevel.checkpoint()
        raise ProviderError(
            message, retryable=retryable, status=status, retry_after=retry_after
        )

    return step


class ScriptedModel:
    """Answers the n-th request with the n-th entry of its script, whoever asks.

    Text is streamed in small pieces. Every answer is a checkpoint.

    Args:
        script: One entry a request; see `ScriptEntry`.
        name: What frontends show.
        exhausted: What a request gets when the script is over: ``"answer"`` says
            `SCRIPT_OVER_TEXT`, ``"error"`` raises `InternalError`.

    Attributes:
        requests: Every request so far, also of attempts that failed.
    """

    def __init__(
        self,
        *script: ScriptEntry,
        name: str = "scripted",
        exhausted: Literal["answer", "error"] = "answer",
    ) -> None:
        self.requests: list[ModelRequest] = []
        self._script = script
        self._name = name
        self._exhausted = exhausted
        self._arrived = trio.lowlevel.ParkingLot()

    @property
    def name(self) -> str:
        """The name that frontends show."""
        return self._name

    async def wait_requests(self, count: int) -> None:
        """Wait until *count* requests have arrived in all. A checkpoint."""
        await trio.lowlevel.checkpoint()
        while len(self.requests) < count:
            await self._arrived.park()

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        """See `Model.respond`. A cancelled request has used up its entry."""
        index = len(self.requests)
        self.requests.append(request)
        self._arrived.unpark_all()
        await trio.lowlevel.checkpoint()
        if index >= len(self._script):
            if self._exhausted == "error":
                raise InternalError(f"the script has {index} entries; request {index + 1} came")
            return await self._say(SCRIPT_OVER_TEXT, emit)
        entry = self._script[index]
        if isinstance(entry, str):
            return await self._say(entry, emit)
        if isinstance(entry, Exception):
            raise entry
        if isinstance(entry, ModelOutput):
            for item in entry.items:
                if isinstance(item, ReasoningItem):
                    await _stream(emit, item.text, "reasoning")
                elif isinstance(item, AssistantItem):
                    await _stream(emit, item.text, item.phase)
            return entry
        if callable(entry):
            return await entry(request, emit)
        answer = _Answer(index)
        for step in entry:
            await step(answer, emit)
        return ModelOutput(
            items=tuple(answer.items),
            finish_reason=answer.reason,
            usage=answer.usage,
            end_turn=answer.end_turn,
        )

    @staticmethod
    async def _say(content: str, emit: Emit) -> ModelOutput:
        await _stream(emit, content, "final_answer")
        return ModelOutput.answer(content)


def history_fault(items: Sequence[RequestItem], *, provider: str | None = None) -> str | None:
    """Return what a real provider would refuse in *items*, or None.

    Args:
        items: The history of a request.
        provider: The binding of the provider's own sealed parts; with None, any
            sealed part is accepted.
    """
    try:
        _check_items(items, provider)
    except ValueError as exc:
        return str(exc)
    return None


def _check_items(items: Sequence[RequestItem], provider: str | None) -> None:
    """Walk *items* as answers followed by their outputs; raise `ValueError` at a fault."""
    seen: set[str] = set()
    owed: set[str] = set()
    answer: list[AssistantItem | ReasoningItem | ToolCallItem] = []
    for position, item in enumerate((*items, None)):
        if isinstance(item, (AssistantItem, ReasoningItem, ToolCallItem)):
            if owed:
                raise ValueError(f"item {position}: calls have no output: {sorted(owed)}")
            answer.append(item)
            continue
        if answer:
            owed = _check_answer(answer, provider, seen)
            answer = []
        if isinstance(item, ToolOutputItem):
            if item.call_id not in owed:
                raise ValueError(
                    f"item {position}: a second output, or one without call: {item.call_id!r}"
                )
            check_json(item.output, name=f"item {position}: the output")
            owed.discard(item.call_id)
        elif owed:
            raise ValueError(f"item {position}: calls have no output: {sorted(owed)}")
        elif isinstance(item, UserItem):
            utf8_length(item.text)


def _check_answer(
    answer: Sequence[AssistantItem | ReasoningItem | ToolCallItem],
    provider: str | None,
    seen: set[str],
) -> set[str]:
    """Check one answer; return the ids of its calls."""
    owed: set[str] = set()
    if all(isinstance(item, ReasoningItem) for item in answer):
        raise ValueError("a reply with neither text nor calls")
    for item in answer:
        if item.sealed is not None:
            if provider is not None and item.sealed.provider != provider:
                raise ValueError(f"a part that {item.sealed.provider!r} sealed")
            check_json(item.sealed.data, name="a sealed part")
        if isinstance(item, ToolCallItem):
            if item.call_id in seen:
                raise ValueError(f"two calls with the id {item.call_id!r}")
            if not is_legal(legal_name(item.name)) or not is_legal(legal_call_id(item.call_id)):
                raise ValueError(f"a call that no provider can name: {item!r}")
            arguments = cast("object", item.arguments)
            if not isinstance(arguments, dict):
                raise ValueError(f"arguments of {item.name} are no object")  # noqa: TRY004
            check_json(item.arguments, name=f"arguments of {item.name}")
            utf8_length(item.name)
            seen.add(item.call_id)
            owed.add(item.call_id)
        else:
            utf8_length(item.text)
            if isinstance(item, AssistantItem) and not item.text.strip():
                raise ValueError("a message without text")
    return owed


class StrictModel:
    """Refuses every request that a real provider would refuse; else asks *inner*.

    The rules: a call has exactly one output, the outputs of an answer follow it with
    nothing between, no output lacks its call; no message is blank, no reply has
    neither text nor calls; arguments are JSON objects; ids are unique; all text is
    Unicode; tools have names that differ also on the wire; parts that another
    provider sealed are refused if ``provider`` is given.

    Args:
        inner: Who answers what is acceptable.
        provider: The binding of the sealed parts that are the provider's own.

    Attributes:
        refusals: What was refused, in order. A test ends with ``not model.refusals``.
    """

    def __init__(self, inner: Model, *, provider: str | None = None) -> None:
        self.inner = inner
        self.refusals: list[str] = []
        self._provider = provider

    @property
    def name(self) -> str:
        """The name that frontends show."""
        return getattr(self.inner, "name", "strict")

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        """See `Model.respond`.

        Raises:
            ProviderError: With status 400, if a provider would refuse the request.
        """
        await trio.lowlevel.checkpoint()
        fault = history_fault(request.items, provider=self._provider)
        fault = fault or _tools_fault(request)
        if fault is not None:
            self.refusals.append(fault)
            raise ProviderError(f"refused: {fault}", status=400)
        return await self.inner.respond(request, emit)


def _tools_fault(request: ModelRequest) -> str | None:
    names = [legal_name(tool.name) for tool in request.tools]
    if len(set(names)) != len(names):
        return f"two tools with one name: {names}"
    try:
        utf8_length(request.instructions)
        for tool in request.tools:
            utf8_length(tool.description)
            check_json(dict(tool.parameters), name=f"parameters of {tool.name}")
            if tool.parameters.get("type") != "object":
                return f"parameters of {tool.name} are no object schema"
    except ValueError as exc:
        return str(exc)
    return None


class OwnParts:
    """Asks *inner* without what another provider sealed, as every adapter does.

    Put it around a `StrictModel` that has a ``provider`` to build, without a
    network, a provider that would refuse foreign parts and its adapter.
    """

    def __init__(self, inner: Model, *, provider: str) -> None:
        self.inner = inner
        self._provider = provider

    @property
    def name(self) -> str:
        """The name that frontends show."""
        return getattr(self.inner, "name", self._provider)

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        """See `Model.respond`."""
        items = own_items(request.items, self._provider)
        return await self.inner.respond(attrs.evolve(request, items=items), emit)
