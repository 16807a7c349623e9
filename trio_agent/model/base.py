"""`Model`: the contract of whoever answers, and the records it reads and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from trio_agent.protocol.items import AssistantItem, Phase, ReasoningItem, RequestItem, Sealed
from trio_agent.protocol.text import Json
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Record

OutputReason: TypeAlias = Literal["stop", "length", "refusal", "content_filter"]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ToolDefinition(Record):
    """A tool as a model sees it; ``parameters`` is a JSON Schema whose root is an object."""

    name: str
    description: str
    parameters: Mapping[str, Json]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ModelRequest(Record):
    """One question to a model.

    ``items`` is a valid history: every call has exactly one output, directly
    behind the output it belongs to. ``cache_key`` is stable for the session and
    tells nothing about it; ``context_epoch`` grows when earlier items changed.
    """

    instructions: str
    items: Sequence[RequestItem]
    tools: tuple[ToolDefinition, ...] = ()
    route: str = "default"
    reasoning_effort: str | None = None
    cache_key: str = ""
    context_epoch: int = 0
    step_id: str = ""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ModelCall(Record):
    """A model asks for a tool: its own id, the name and the arguments as it wrote them.

    ``arguments`` is raw JSON text, perhaps broken; the engine judges it.
    """

    name: str
    arguments: str
    call_id: str = ""
    sealed: Sealed | None = None


OutputItem: TypeAlias = ReasoningItem | AssistantItem | ModelCall


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ModelOutput(Record):
    """A complete answer. Returning it *is* the end of the stream.

    ``finish_reason`` says why the model stopped: ``"length"`` means that the
    last thing in ``items`` was cut off. ``end_turn=False`` means that it wants to
    go on although it asks for no tool.
    """

    items: tuple[OutputItem, ...] = ()
    finish_reason: OutputReason = "stop"
    usage: TokenUsage = TokenUsage()
    end_turn: bool = True

    @classmethod
    def answer(
        cls, text: str = "", *calls: ModelCall, usage: TokenUsage | None = None
    ) -> ModelOutput:
        """Return the output of a model that says *text* and asks for *calls*."""
        said: tuple[OutputItem, ...] = (AssistantItem(text=text),) if text else ()
        return cls(items=(*said, *calls), usage=usage or TokenUsage())


class Emit(Protocol):
    """Passes streamed text on. Awaiting it is what holds a fast model back."""

    async def __call__(self, text: str, phase: Phase = "final_answer") -> None:
        """Emit more *text*; a checkpoint. Empty text only says that the model is alive."""
        ...


class Model(Protocol):
    """Answers requests. One object may serve many sessions at the same time."""

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        """Answer *request*, passing text to *emit* as it comes.

        What was emitted must be part of what is returned, or nothing is returned.

        Raises:
            StreamInterruptedError: If the answer broke off; the engine asks again.
            ProviderError: For anything else; the engine retries if ``retryable``.
            ContextOverflowError: If the request is larger than the model's window.
        """
        ...


@runtime_checkable
class OpenableModel(Protocol):
    """A model that holds something open, such as connections, while sessions use it."""

    def open(self) -> AbstractAsyncContextManager[object]:
        """Return a context that is entered once a router, before its first request."""
        ...


@runtime_checkable
class NamedModel(Protocol):
    """A model that knows its provider's name for itself."""

    @property
    def name(self) -> str:
        """The name that frontends show."""
        ...
