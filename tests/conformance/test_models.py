"""Every shipped model keeps the contract, and `check_model` notices one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from trio_agent.errors import ProviderError
from trio_agent.model.anthropic import Anthropic
from trio_agent.model.base import Emit, ModelCall, ModelOutput, ModelRequest
from trio_agent.model.demo import DemoModel
from trio_agent.model.openai import OpenAIChat, OpenAIResponses
from trio_agent.protocol.items import AssistantItem, Sealed
from trio_agent.protocol.usage import TokenUsage
from trio_agent.testing.model_check import check_model
from trio_agent.testing.models import OwnParts, ScriptedModel, StrictModel
from trio_agent.testing.wire_server import (
    FORMATS,
    MESSAGES,
    WireAnswer,
    WireFormat,
    open_wire_server,
)

MAKE: dict[str, Callable[..., Any]] = {
    "openai-chat": OpenAIChat,
    "openai-responses": OpenAIResponses,
    "anthropic": Anthropic,
}


async def test_the_demo_model() -> None:
    await check_model(DemoModel())


async def test_the_models_for_tests() -> None:
    model = StrictModel(ScriptedModel(), provider="p")
    await check_model(OwnParts(model, provider="p"))

    assert not model.refusals


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
async def test_the_adapters(form: WireFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    answer = WireAnswer(thoughts=("hm",), texts=("Hello", "!"), seal="c2VhbA==")
    async with open_wire_server(
        *[form.reply(answer)] * 12, strict=form.request_fault
    ) as server:
        base = server.url if form is MESSAGES else f"{server.url}/v1"
        await check_model(MAKE[form.name]("m", api_key="k", base_url=base))
        with trio.fail_after(10):
            await server.wait_closed()

    assert not server.faults


class Faulty:
    """Answers as a good model does, but for one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.busy = False

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        if self.fault == "no checkpoint":
            return ModelOutput()
        await trio.lowlevel.checkpoint()
        output = ModelOutput.answer("hello")
        if self.fault == "emits what it does not return":
            await emit("bye")
        elif self.fault == "returns a text":
            return "hello"  # type: ignore[return-value]
        elif self.fault == "changes its request":
            dict.update(request.tools[0].parameters, more=1)
        elif self.fault == "swallows errors":
            try:
                await emit("hello")
            except Exception:  # the fault
                return output
        elif self.fault == "wraps errors":
            try:
                await emit("hello")
            except Exception as exc:
                raise ProviderError("emit") from exc
        elif self.fault == "serves only one":
            if self.busy:
                raise ProviderError("busy")
            self.busy = True
            await trio.lowlevel.checkpoint()
            self.busy = False
        elif self.fault == "negative usage":
            return ModelOutput(usage=TokenUsage(input_tokens=-1))
        elif self.fault == "half a character":
            return ModelOutput.answer("\ud83d")
        elif self.fault == "seals what is no JSON":
            sealed = Sealed(provider="p", data={1, 2})
            return ModelOutput(items=(AssistantItem(text="x", sealed=sealed),))
        elif self.fault == "calls nothing":
            return ModelOutput(items=(ModelCall(name=" ", arguments="{}"),))
        else:
            await emit("hello")
        return output


FAULTS = [
    "no checkpoint",
    "emits what it does not return",
    "returns a text",
    "changes its request",
    "swallows errors",
    "wraps errors",
    "serves only one",
    "negative usage",
    "half a character",
    "seals what is no JSON",
    "calls nothing",
]


async def test_a_model_without_a_fault_passes() -> None:
    await check_model(Faulty(""))


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_model_with_a_fault_is_found_out(fault: str) -> None:
    """Each of these is a mutant of the good model above."""
    with pytest.RaisesGroup(Exception, allow_unwrapped=True, flatten_subgroups=True):
        await check_model(Faulty(fault))
