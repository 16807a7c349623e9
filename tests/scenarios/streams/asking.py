"""One request to each wire format over a real socket, answered or failing."""

from __future__ import annotations

import ssl
from typing import Any

import httpx2
import pytest
import trio

from trio_agent.model.anthropic import Anthropic
from trio_agent.model.base import ModelRequest, ToolDefinition
from trio_agent.model.http import Transport
from trio_agent.model.openai import OpenAIChat, OpenAIResponses
from trio_agent.protocol.items import AssistantItem, UserItem
from trio_agent.testing.wire_server import (
    CHAT,
    MESSAGES,
    RESPONSES,
    WireAnswer,
    WireCall,
    open_wire_server,
)

KEY = "sk-test-0123456789abcdef"
HELLO = WireAnswer(texts=("Hel", "lo ", "🙂"))
RICH = WireAnswer(
    thoughts=("let me ", "see"),
    texts=("I will ", "look."),
    calls=(
        WireCall(name="weather", arguments='{"city": "Zürich"}', call_id="a"),
        WireCall(name="weather", arguments='{"city": "東京 🗼"}', call_id="b"),
    ),
    seal="c2VhbA==",
)
WEATHER = ToolDefinition(name="weather", description="w", parameters={"type": "object"})
REQUEST = ModelRequest(
    instructions="be kind", items=(UserItem(text="grüß dich 👋"),), tools=(WEATHER,)
)


CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
TRANSPORT = Transport(lambda: httpx2.AsyncClient(verify=CONTEXT))
"""Loads no certificates, which takes longer than a test."""


def make(form: Any, server: Any, **more: Any) -> Any:
    make_model = {CHAT.name: OpenAIChat, RESPONSES.name: OpenAIResponses}.get(
        form.name, Anthropic
    )
    base = server.url if form is MESSAGES else f"{server.url}/v1"
    return make_model(
        "m-1", **{"api_key": KEY, "base_url": base, "transport": TRANSPORT, **more}
    )


class Sink:
    def __init__(self) -> None:
        self.pieces: list[tuple[str, str]] = []
        self.calls = 0

    async def __call__(self, text: str, phase: str = "final_answer") -> None:
        await trio.lowlevel.checkpoint()
        self.calls += 1
        if text:
            self.pieces.append((text, phase))

    def text(self, phase: str = "final_answer") -> str:
        return "".join(text for text, of in self.pieces if of == phase)


async def ask(form: Any, *script: Any, sink: Any = None, **more: Any) -> Any:
    """Answer one request; no connection may be in use after it."""
    with trio.fail_after(30):
        async with open_wire_server(*script) as server:
            model = make(form, server, **more)
            try:
                return await model.respond(REQUEST, sink or Sink())
            finally:
                with trio.CancelScope(shield=True):
                    await server.wait_closed()


async def fails(form: Any, error: Any, *script: Any, sink: Any = None, **more: Any) -> Any:
    """Fail once, and find the model as usable as before: on one and the same client."""
    with trio.fail_after(30):
        async with open_wire_server(*script) as server:
            model = make(form, server, **more)
            async with model.open():
                with pytest.raises(error) as caught:
                    await model.respond(REQUEST, sink or Sink())
                if type(caught.value) is not error:
                    raise caught.value
                server.add(form.reply(HELLO))
                again = await model.respond(REQUEST, Sink())
                assert again.items == (AssistantItem(text="Hello 🙂"),)
            await server.wait_closed()
    return caught.value
