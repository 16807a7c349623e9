"""`check_model`: what every `Model` must do, checked against one of yours."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import msgspec
import trio

from trio_agent.errors import InternalError
from trio_agent.model.base import (
    Model,
    ModelCall,
    ModelOutput,
    ModelRequest,
    OpenableModel,
    ToolDefinition,
)
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
from trio_agent.protocol.limits import MAX_MODEL_OUTPUT_BYTES, MAX_TOOL_CALLS
from trio_agent.protocol.text import check_json, utf8_length
from trio_agent.protocol.usage import TokenUsage

PATIENCE: Final = 120.0
"""Seconds that one answer may take before the check fails."""

PROMPTNESS: Final = 5.0
"""Seconds in which a cancelled request must have ended."""

_ECHO: Final = ToolDefinition(
    name="echo",
    description="Returns its text.",
    parameters={"type": "object", "properties": {"text": {"type": "string"}}},
)

_QUESTION: Final = UserItem(text="Say hello in one word.")

_LONG: Final[Sequence[RequestItem]] = (
    UserItem(text="Grüß dich 👋, say 你好"),
    ReasoningItem(text="thought", sealed=Sealed(provider="nobody's", data={"blob": "zzz"})),
    AssistantItem(text="你好"),
    UserItem(text="Echo a and b."),
    ToolCallItem(call_id="1c7e1c1e-0000-4000-8000-0000000000a1", name="echo", arguments={}),
    ToolCallItem(
        call_id="1c7e1c1e-0000-4000-8000-0000000000a2",
        name="no longer there",
        arguments={"text": "b 🙂", "deep": [{"x": None}]},
        provider_call_id="x" * 500,
    ),
    ToolOutputItem(call_id="1c7e1c1e-0000-4000-8000-0000000000a1", output=""),
    ToolOutputItem(call_id="1c7e1c1e-0000-4000-8000-0000000000a2", output="no", is_error=True),
    AssistantItem(text="Done."),
    UserItem(text="Thanks. Say bye in one word."),
)


class _Sink:
    """Takes what is emitted, and knows when nothing more may come."""

    def __init__(self) -> None:
        self.text: dict[Phase, str] = {"reasoning": "", "commentary": "", "final_answer": ""}
        self.called = trio.Event()
        self.closed = False

    async def __call__(self, text: str, phase: Phase = "final_answer") -> None:
        if self.closed:
            raise InternalError("the model emitted text after its answer")
        await trio.lowlevel.checkpoint()
        utf8_length(text)
        self.text[phase] += text
        self.called.set()


async def check_model(model: Model) -> None:
    """Ask *model* a few questions, and check that it keeps the contract of `Model`.

    It must answer a question and a long history, with tools it may call and calls
    of tools that are gone; return what it emitted; be a checkpoint; leave its
    request alone; end promptly when cancelled, and answer again; answer several
    requests at once; and pass an error of ``emit`` on as it came. What it says is
    its own affair. Up to eight requests are made.

    Raises:
        AssertionError: It says what the model did instead.
    """
    async with _opened(model):
        first = await _answer(model, _request(_QUESTION))
        await _answer(model, _request(*_LONG))
        await _follow_up(model, first)
        await _cancel(model)
        await _break(model)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(_answer, model, _request(_QUESTION))
    async with _opened(model):
        await _answer(model, _request(_QUESTION))


@asynccontextmanager
async def _opened(model: Model) -> AsyncGenerator[None]:
    """Open *model* as a router does, if it can be opened."""
    if not isinstance(model, OpenableModel):
        yield
        return
    async with model.open():
        yield


def _request(*items: RequestItem) -> ModelRequest:
    return ModelRequest(
        instructions="You are terse.",
        items=items,
        tools=(_ECHO,),
        cache_key="check-model",
        step_id="check",
    )


async def _answer(model: Model, request: ModelRequest) -> ModelOutput:
    """Return the answer to *request*, with all that can be said of any answer checked."""
    sink = _Sink()
    before = copy.deepcopy(attrs.asdict(request))
    with trio.move_on_after(PATIENCE) as scope:
        output = await model.respond(request, sink)
        sink.closed = True
        _check_output(output, sink)
        assert attrs.asdict(request) == before, "the model changed its request"
        return output
    assert scope.cancelled_caught
    raise AssertionError(f"the model did not answer within {PATIENCE:g} s")


def _check_output(output: object, sink: _Sink) -> None:
    assert isinstance(output, ModelOutput), f"respond returned {type(output).__name__}"
    returned: dict[Phase, str] = {"reasoning": "", "commentary": "", "final_answer": ""}
    calls: list[ModelCall] = []
    for item in output.items:
        if isinstance(item, ModelCall):
            utf8_length(item.arguments)
            assert item.name.strip(), "a call names no tool"
            calls.append(item)
        else:
            utf8_length(item.text)
            phase: Phase = "reasoning" if isinstance(item, ReasoningItem) else item.phase
            returned[phase] += item.text
        if item.sealed is not None:
            assert item.sealed.provider, "a sealed part is bound to nobody"
            check_json(item.sealed.data, name="a sealed part")
    for phase, text in sink.text.items():
        assert text in returned[phase], f"emitted {phase} text is not part of the answer"
    assert len(calls) <= MAX_TOOL_CALLS, f"{len(calls)} calls in one answer"
    assert len(msgspec.json.encode(output)) <= MAX_MODEL_OUTPUT_BYTES, "the answer is too large"
    total = TokenUsage() + output.usage  # checks the range of every part
    assert total == output.usage


async def _follow_up(model: Model, first: ModelOutput) -> None:
    """Give the model its own answer back, sealed parts included, and go on."""
    await trio.lowlevel.checkpoint()
    said = [
        item for item in first.items if isinstance(item, AssistantItem) and item.text.strip()
    ]
    if not said:
        return
    kept = [item for item in first.items if not isinstance(item, ModelCall)]
    await _answer(model, _request(_QUESTION, *kept, UserItem(text="Once more.")))


async def _cancel(model: Model) -> None:
    """Cancel a request before it began, and one that is under way."""
    sink = _Sink()
    with trio.move_on_after(PROMPTNESS) as limit:
        with trio.CancelScope() as scope:
            scope.cancel(reason="check_model cancels")
            await model.respond(_request(_QUESTION), sink)
        assert scope.cancelled_caught, "respond is no checkpoint: a cancelled request answered"
    assert not limit.cancelled_caught, "a cancelled request did not end"

    async def stop(text: str, phase: Phase = "final_answer") -> None:
        del text, phase
        inner.cancel(reason="check_model cancels")
        limit.deadline = trio.current_time() + PROMPTNESS
        await trio.lowlevel.checkpoint()

    with trio.move_on_after(PATIENCE) as limit:
        with trio.CancelScope() as inner:
            await model.respond(_request(_QUESTION), stop)
    assert not limit.cancelled_caught, "a request that was cancelled in emit did not end"


class _EmitError(Exception):
    """What `_break` raises in ``emit``."""


async def _break(model: Model) -> None:
    """Raise in ``emit``; a model that emits nothing has nothing to pass on."""
    await trio.lowlevel.checkpoint()
    error = _EmitError()
    raised = False

    async def fail(text: str, phase: Phase = "final_answer") -> None:
        nonlocal raised
        del text, phase
        await trio.lowlevel.checkpoint()
        raised = True
        raise error

    caught: Exception | None = None
    try:
        with trio.fail_after(PATIENCE):
            await model.respond(_request(_QUESTION), fail)
    except _EmitError as exc:
        caught = exc
    except Exception as exc:
        raise AssertionError(f"an error of emit became {exc!r}") from exc
    assert caught is (error if raised else None), "an error of emit was lost"
