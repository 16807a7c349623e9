"""Golden requests: one long mixed history, as each provider gets it.

A changed byte is a decision.

``python tests/wire/test_requests.py`` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trio_agent.model.anthropic import Anthropic
from trio_agent.model.base import ModelRequest, ToolDefinition
from trio_agent.model.http import HttpModel
from trio_agent.model.openai import OpenAIChat, OpenAIResponses
from trio_agent.model.wire import encode
from trio_agent.protocol.items import (
    AssistantItem,
    ImageItem,
    ReasoningItem,
    Sealed,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.testing.wire_server import CHAT, MESSAGES, RESPONSES, WireFormat

FOLDER = Path(__file__).parent / "requests"

THINKING = {"type": "thinking", "thinking": "I need the weather.", "signature": "c2ln"}
REDACTED = {"type": "redacted_thinking", "data": "cmVk"}
ENCRYPTED = {"type": "reasoning", "summary": [], "encrypted_content": "ZW5j"}

HISTORY = (
    UserItem(text="Guidance that no user wrote.", internal="instructions"),
    UserItem(text="Wie ist das Wetter in Zürich und in 東京? 🗼"),
    # Answered by Anthropic, with two calls at once, one of which failed.
    ReasoningItem(
        text="I need the weather.", sealed=Sealed(provider="anthropic/claude-x", data=THINKING)
    ),
    ReasoningItem(sealed=Sealed(provider="anthropic/claude-x", data=REDACTED)),
    AssistantItem(text="I look it up.", phase="commentary"),
    ToolCallItem(
        call_id="6f1f0c3e-0000-4000-8000-000000000001",
        name="weather",
        arguments={"city": "Zürich", "days": 3, "exact": None, "at": [1.5, True]},
        provider_call_id="toolu_1",
    ),
    ToolCallItem(
        call_id="6f1f0c3e-0000-4000-8000-000000000002",
        name="weather",
        arguments={"city": "東京"},
        provider_call_id="toolu_1",
    ),
    ToolOutputItem(call_id="6f1f0c3e-0000-4000-8000-000000000001", output="18 °C\nsunny"),
    ToolOutputItem(
        call_id="6f1f0c3e-0000-4000-8000-000000000002", output="no such city", is_error=True
    ),
    AssistantItem(text="Zürich has 18 °C."),
    UserItem(text="And this?"),
    ImageItem(media_type="image/png", data="iVBORw0KGgo="),
    # Answered by OpenAI, after a switch in the middle of the session.
    ReasoningItem(
        text="A map.", sealed=Sealed(provider="openai-responses/gpt-x", data=ENCRYPTED)
    ),
    AssistantItem(
        text="Let me run something.",
        phase="commentary",
        sealed=Sealed(provider="openai-responses/gpt-x", data=None),
    ),
    ToolCallItem(call_id="own id: 3", name="run a command!", arguments={}),
    ToolOutputItem(call_id="own id: 3", output=""),
    # An answer in which nothing was said, then one of a server that shows its thoughts.
    UserItem(text="Go on."),
    ReasoningItem(text="Nothing to say."),
    UserItem(text=" \n"),
    UserItem(text="Please."),
    ReasoningItem(
        text="Now I speak.",
        sealed=Sealed(provider="openai-chat/gpt-y", data={"member": "reasoning_content"}),
    ),
    AssistantItem(text='Done: "quoted", \\ and \u2028.\t'),
    UserItem(text="Thanks."),
)

REQUEST = ModelRequest(
    instructions="You are a helpful assistant.",
    items=HISTORY,
    tools=(
        ToolDefinition(
            name="weather",
            description="Tells the weather.",
            parameters={
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        ),
        ToolDefinition(
            name="run a command!",
            description="Its name is not legal on any wire.",
            parameters={"type": "object", "properties": {}},
        ),
    ),
    reasoning_effort="high",
    cache_key="0123456789abcdef",
)

CASES: dict[str, tuple[HttpModel, WireFormat]] = {
    "openai_responses": (
        OpenAIResponses(
            "gpt-x",
            api_key="k",
            base_url="https://api.openai.com/v1",
            reasoning_summary="auto",
            max_output_tokens=9000,
        ),
        RESPONSES,
    ),
    "openai_chat": (
        OpenAIChat(
            "gpt-y", api_key="k", base_url="https://api.openai.com/v1", max_output_tokens=9000
        ),
        CHAT,
    ),
    "openai_chat_own_server": (
        OpenAIChat(
            "qwen",
            api_key="",
            base_url="http://127.0.0.1:8080/v1",
            max_output_tokens=9000,
            extra={"temperature": 0},
        ),
        CHAT,
    ),
    "anthropic": (
        Anthropic("claude-x", api_key="k", base_url="https://api.anthropic.com"),
        MESSAGES,
    ),
}


def shown(model: HttpModel) -> str:
    """Return the request as it is kept: what is sent, but indented."""
    body = json.loads(encode(model.body(REQUEST)).decode())
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_request_is_what_it_was(name: Any) -> None:
    model, _ = CASES[name]

    assert (FOLDER / f"{name}.json").read_text(encoding="utf-8") == shown(model)


@pytest.mark.parametrize("name", CASES)
def test_the_request_is_one_that_a_strict_server_takes(name: Any) -> None:
    model, form = CASES[name]

    assert form.request_fault(model.body(REQUEST)) is None


def test_every_kept_request_has_its_case() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(CASES)


if __name__ == "__main__":
    for case, (case_model, _) in CASES.items():
        (FOLDER / f"{case}.json").write_text(shown(case_model), encoding="utf-8")
