"""What `StrictModel` refuses, rule by rule, and what `ScriptedModel` answers."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from trio_agent.errors import InternalError, ProviderError, StreamInterruptedError
from trio_agent.model.base import ModelCall, ModelOutput, ModelRequest, ToolDefinition
from trio_agent.protocol.items import (
    AssistantItem,
    ImageItem,
    ReasoningItem,
    Sealed,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.usage import TokenUsage
from trio_agent.testing import models
from trio_agent.testing.models import SCRIPT_OVER_TEXT, OwnParts, ScriptedModel, StrictModel

USER = UserItem(text="hi")
SAID = AssistantItem(text="ok")
THOUGHT = ReasoningItem(text="hm", sealed=Sealed(provider="a", data={"blob": "x"}))


def a_call(call_id: str = "c1", **arguments: object) -> ToolCallItem:
    return ToolCallItem(call_id=call_id, name="echo", arguments=dict(arguments))


def output(call_id: str = "c1") -> ToolOutputItem:
    return ToolOutputItem(call_id=call_id, output="done")


def request(*items: Any, **more: Any) -> ModelRequest:
    return ModelRequest(instructions="be kind", items=items, **more)


class Sink:
    def __init__(self) -> None:
        self.pieces: list[tuple[str, str]] = []

    async def __call__(self, text: str, phase: str = "final_answer") -> None:
        await trio.lowlevel.checkpoint()
        self.pieces.append((text, phase))

    def text(self, phase: str = "final_answer") -> str:
        return "".join(text for text, of in self.pieces if of == phase)


GOOD = {
    "empty": (),
    "a question": (USER,),
    "an answer": (USER, SAID, USER),
    "one call": (USER, a_call(), output()),
    "outputs in any order": (USER, SAID, a_call("a"), a_call("b"), output("b"), output("a")),
    "two batches": (USER, a_call("a"), output("a"), THOUGHT, a_call("b"), output("b"), SAID),
    "a picture": (USER, ImageItem(media_type="image/png", data="AA==")),
}

BAD = {
    "a call without output": (USER, a_call()),
    "a message between call and output": (a_call(), USER, output()),
    "an answer between call and output": (a_call(), output("c0"), SAID, output()),
    "an output without call": (USER, output()),
    "two outputs": (a_call(), output(), output()),
    "an output before its call": (output(), a_call()),
    "half of a batch": (a_call("a"), a_call("b"), output("a"), USER),
    "one id twice": (a_call(), output(), a_call(), output()),
    "a blank message": (USER, AssistantItem(text=" \n")),
    "an empty message": (USER, AssistantItem(text="")),
    "a reply that only thinks": (USER, THOUGHT, USER),
    "half a character": (UserItem(text="\ud83d"),),
    "half a character in arguments": (a_call(t="\ud83d"), output()),
    "not a number": (a_call(t=float("nan")), output()),
    "half a character in an output": (a_call(), ToolOutputItem(call_id="c1", output="\ud83d")),
}


@pytest.mark.parametrize("name", GOOD)
async def test_a_history_that_providers_take_is_passed_on(name: Any) -> None:
    inner = ScriptedModel("yes")
    strict = StrictModel(inner)
    await strict.respond(request(*GOOD[name]), Sink())

    assert not strict.refusals
    assert len(inner.requests) == 1


@pytest.mark.parametrize("name", BAD)
async def test_a_history_that_providers_refuse_is_refused(name: Any) -> None:
    inner = ScriptedModel("yes")
    strict = StrictModel(inner)
    with pytest.raises(ProviderError) as caught:
        await strict.respond(request(*BAD[name]), Sink())

    assert caught.value.status == 400
    assert not caught.value.retryable
    assert len(strict.refusals) == 1
    assert not inner.requests


async def test_foreign_sealed_parts_are_refused_and_own_parts_pass() -> None:
    inner = ScriptedModel("yes", "yes")
    history = request(USER, THOUGHT, SAID, USER)
    await StrictModel(inner, provider="a").respond(history, Sink())
    strict = StrictModel(inner, provider="b")
    with pytest.raises(ProviderError):
        await strict.respond(history, Sink())
    await OwnParts(strict, provider="b").respond(history, Sink())

    assert len(strict.refusals) == 1
    assert inner.requests[-1].items == (USER, ReasoningItem(text="hm"), SAID, USER)


async def test_tools_need_distinct_names_and_object_schemas() -> None:
    def tool(name: str, **schema: object) -> ToolDefinition:
        return ToolDefinition(
            name=name, description="", parameters={"type": "object", **schema}
        )

    for tools in ((tool("a"), tool("a")), (tool("a", type="string"),)):
        with pytest.raises(ProviderError):
            await StrictModel(ScriptedModel()).respond(request(USER, tools=tools), Sink())
    await StrictModel(ScriptedModel()).respond(
        request(USER, tools=(tool("a b"), tool("a_b"))), Sink()
    )


async def test_a_script_is_answered_entry_by_entry_and_streamed() -> None:
    async def answer(asked: ModelRequest, emit: Any) -> ModelOutput:
        await emit("by hand")
        return ModelOutput.answer("by hand")

    model = ScriptedModel(
        "a text that is longer than one piece",
        ModelOutput.answer("an output"),
        [
            models.think("hm"),
            models.text("so", commentary=True),
            models.call("echo", {"x": 1}),
            models.call("echo", "{broken", id="own"),
            models.usage(3, 4),
            models.stop("length"),
        ],
        answer,
        ProviderError("no"),
        [models.text("partly"), models.drop()],
        [models.fail(429, retry_after=3.0)],
    )
    sink = Sink()
    first = await model.respond(request(USER), sink)
    second = await model.respond(request(USER), sink)
    third = await model.respond(request(USER), sink)
    fourth = await model.respond(request(USER), sink)
    for error in (ProviderError, StreamInterruptedError, ProviderError):
        with pytest.raises(error):
            await model.respond(request(USER), sink)
    last = await model.respond(request(USER), sink)

    assert first == ModelOutput.answer("a text that is longer than one piece")
    assert second == ModelOutput.answer("an output")
    assert third == ModelOutput(
        items=(
            ReasoningItem(text="hm"),
            AssistantItem(text="so", phase="commentary"),
            ModelCall(name="echo", arguments='{"x": 1}', call_id="call_2_1"),
            ModelCall(name="echo", arguments="{broken", call_id="own"),
        ),
        usage=TokenUsage(input_tokens=3, output_tokens=4, total_tokens=7),
        finish_reason="length",
    )
    assert fourth == ModelOutput.answer("by hand")
    assert last == ModelOutput.answer(SCRIPT_OVER_TEXT)
    assert len(model.requests) == 8
    assert len(sink.pieces) > 8
    assert sink.text("reasoning") == "hm"
    assert sink.text("commentary") == "so"


async def test_an_exhausted_script_can_be_an_error() -> None:
    with pytest.raises(InternalError):
        await ScriptedModel(exhausted="error").respond(request(USER), Sink())


async def test_steps_can_wait_and_stall(autojump_clock: Any) -> None:
    gate = trio.Event()
    model = ScriptedModel([models.wait(gate), models.text("late")], [models.stall()])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.respond, request(USER), Sink())
        await model.wait_requests(1)
        gate.set()
    with trio.move_on_after(1e6) as scope:
        await model.respond(request(USER), Sink())

    assert scope.cancelled_caught
