"""What of a model's output a history may hold."""

from __future__ import annotations

import pytest

from trio_agent import AgentConfig, create_agent
from trio_agent.agent.model_step import normalise
from trio_agent.model.anthropic import anthropic_messages
from trio_agent.model.base import ModelOutput, ModelRequest
from trio_agent.protocol.items import AssistantItem, ReasoningItem, Sealed
from trio_agent.testing.models import ScriptedModel

BLOCK = {"type": "server_tool_use", "id": "s", "name": "web", "input": {"q": 1}}
SEALED = ReasoningItem(text="", sealed=Sealed(provider="p", data=BLOCK))


def paused() -> ModelOutput:
    return ModelOutput(items=(SEALED,), end_turn=False)


@pytest.mark.parametrize("end_turn", [True, False])
def test_sealed_parts_alone_are_kept_only_where_the_model_goes_on(end_turn: bool) -> None:
    answer = normalise(ModelOutput(items=(SEALED,), end_turn=end_turn), lambda: "c")
    assert answer.items == ([] if end_turn else [SEALED])


async def test_a_paused_answer_goes_back_to_the_provider_as_it_came() -> None:
    model = ScriptedModel(paused(), ModelOutput(items=(AssistantItem(text="found"),)))
    async with create_agent(AgentConfig(model=model)) as agent:
        assert (await agent.run("search")).text == "found"
    _, second = model.requests
    assert second.items[-1] == SEALED
    request = ModelRequest(instructions="", items=second.items)
    assert anthropic_messages(request, "p")[-1] == {"role": "assistant", "content": [BLOCK]}
