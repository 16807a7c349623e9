"""What one streamed event costs: our adapters against the official SDKs, in turns.

    python benchmarks/bench_model_stream.py [--rounds 15] [--events 2000] [--import-cost]

Needs ``openai`` and ``anthropic`` beside httpx2; they are no dependency of ours.
Both sides read the same bytes from the same in-memory transport of httpx2, so the
network costs nothing and what is left is framing, decoding and translation. Sides
take turns within a round, and the ratio is the median over rounds, because a shared
machine is slow for seconds at a time. Time is the process's own CPU time.

Two deliveries: ``one`` event a chunk, as a slow model sends them, and ``many``, as a
fast one does; layers that httpx2 adds to a chunk weigh on both sides of the first.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import trio

from trio_agent.model.anthropic import Anthropic
from trio_agent.model.base import ModelRequest
from trio_agent.model.http import Transport
from trio_agent.model.openai import OpenAIChat, OpenAIResponses
from trio_agent.protocol.items import UserItem
from trio_agent.testing.wire_server import CHAT, MESSAGES, RESPONSES, WireAnswer

REQUEST = ModelRequest(instructions="i", items=(UserItem(text="hi"),))

Side = Callable[[], Awaitable[None]]


class _Body(httpx2.AsyncByteStream):
    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            await trio.lowlevel.checkpoint()
            yield chunk


class _Canned(httpx2.AsyncBaseTransport):
    """Answers every request with the same stream."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(
            200, headers=headers, stream=_Body(self._chunks), request=request
        )


async def _ignore(text: str, phase: str = "final_answer") -> None:
    """Take a delta; what an engine does with it is measured elsewhere."""


def _ours(model: OpenAIChat | OpenAIResponses | Anthropic) -> Side:
    async def run() -> None:
        output = await model.respond(REQUEST, _ignore)
        assert output.items

    return run


def sides(chunks: dict[str, list[bytes]]) -> dict[str, tuple[Side, Side]]:
    """Return, by format, our side and the official SDK's."""
    anthropic: Any = importlib.import_module("anthropic")  # slow, and no dependency of ours
    openai: Any = importlib.import_module("openai")

    clients = {
        name: httpx2.AsyncClient(transport=_Canned(canned)) for name, canned in chunks.items()
    }

    def transport(name: str) -> Transport:
        return Transport(lambda: httpx2.AsyncClient(transport=_Canned(chunks[name])))

    def openai_client(name: str) -> Any:
        return openai.AsyncOpenAI(api_key="k", max_retries=0, http_client=clients[name])

    chat_client, responses_client = openai_client("chat"), openai_client("responses")
    messages_client = anthropic.AsyncAnthropic(
        api_key="k", max_retries=0, http_client=clients["messages"]
    )

    async def chat() -> None:
        text: list[str] = []
        stream = await chat_client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        async with stream:
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    text += [chunk.choices[0].delta.content]
        assert text

    async def responses() -> None:
        text: list[str] = []
        stream = await responses_client.responses.create(model="m", input="hi", stream=True)
        async with stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    text += [event.delta]
        assert text

    async def messages() -> None:
        text: list[str] = []
        stream = await messages_client.messages.create(
            model="m",
            max_tokens=9,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
        )
        async with stream:
            async for event in stream:
                if event.type == "content_block_delta" and event.delta.type == "text_delta":
                    text += [event.delta.text]
        assert text

    ours = (
        OpenAIChat("m", api_key="k", transport=transport("chat")),
        OpenAIResponses("m", api_key="k", transport=transport("responses")),
        Anthropic("m", api_key="k", transport=transport("messages")),
    )
    return {
        "chat": (_ours(ours[0]), chat),
        "responses": (_ours(ours[1]), responses),
        "messages": (_ours(ours[2]), messages),
    }


def streams(events: int, group: int) -> dict[str, list[bytes]]:
    """Return each format's stream of *events* deltas, *group* of them a chunk."""
    answer = WireAnswer(texts=[f"word{n} " for n in range(events)])
    found: dict[str, list[bytes]] = {}
    for name, form in (("chat", CHAT), ("responses", RESPONSES), ("messages", MESSAGES)):
        parts = form.events(answer)
        found[name] = [
            b"".join(parts[start : start + group]) for start in range(0, len(parts), group)
        ]
    return found


async def measure(side: Side, events: int) -> float:
    """Return the CPU microseconds of one event."""
    start = time.process_time()
    await side()
    return (time.process_time() - start) / events * 1e6


async def compare(rounds: int, events: int) -> None:
    print(f"{'format':10} {'delivery':8} {'ours µs':>8} {'SDK µs':>8} {'ratio':>6}")
    for delivery, group in (("one", 1), ("many", 50)):
        for name, (ours, theirs) in sides(streams(events, group)).items():
            await ours()
            await theirs()
            mine: list[float] = []
            official: list[float] = []
            for _ in range(rounds):
                mine.append(await measure(ours, events))
                official.append(await measure(theirs, events))
            ratio = statistics.median(b / a for a, b in zip(mine, official, strict=True))
            print(
                f"{name:10} {delivery:8} {statistics.median(mine):8.1f}"
                f" {statistics.median(official):8.1f} {ratio:6.1f}"
            )


def import_cost(rounds: int) -> None:
    """Print what importing the adapter adds to a process that has httpx2 and the core."""
    base = "import trio_agent, httpx2"
    best = dict.fromkeys((base, f"{base}, trio_agent.model.openai"), float("inf"))
    for _ in range(rounds):
        for code in best:
            before = os.times()
            subprocess.run([sys.executable, "-c", code], check=True)
            after = os.times()
            spent = after.children_user + after.children_system
            spent -= before.children_user + before.children_system
            best[code] = min(best[code], spent)
    without, with_ours = best.values()
    print(f"import trio_agent.model.openai: {(with_ours - without) * 1e3:.0f} ms CPU more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--import-cost", action="store_true")
    options = parser.parse_args()
    if options.import_cost:
        import_cost(options.rounds)
        return
    warnings.simplefilter("ignore", ResourceWarning)  # the SDKs leave generators open
    trio.run(compare, options.rounds, options.events)
    print(json.dumps({"rounds": options.rounds, "events": options.events}))


if __name__ == "__main__":
    main()
