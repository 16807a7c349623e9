"""Whole sessions over the wire: what a provider does wrong, and what the session makes of it.

The servers are strict: a request that a real provider would refuse gets status 400
and is kept in ``server.faults``. Time is virtual, so waits and silences cost nothing.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest
import trio
from trio.testing import MockClock

from trio_agent import AgentConfig, Interrupt, SetModel, create_agent
from trio_agent.errors import AgentError, AuthError, ContextOverflowError, ProviderError
from trio_agent.model.anthropic import Anthropic
from trio_agent.model.http import Transport
from trio_agent.model.openai import OpenAIChat, OpenAIResponses
from trio_agent.model.retry import RETRY_AFTER_CAP_SECONDS
from trio_agent.model.router import ModelRouter
from trio_agent.protocol import texts
from trio_agent.protocol.events import (
    AgentReasoningDelta,
    ModelStepCompleted,
    ModelStepStarted,
    ToolCallEnd,
    TurnStarted,
)
from trio_agent.protocol.items import AssistantItem, ReasoningItem, ToolOutputItem
from trio_agent.protocol.limits import MAX_ERROR_MESSAGE_BYTES, MAX_STREAM_RETRIES
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.wire_server import (
    CHAT,
    FORMATS,
    MESSAGES,
    RESPONSES,
    Reply,
    WireAnswer,
    WireCall,
    WireFormat,
    WireServer,
    open_wire_server,
)
from trio_agent.tools.function import tool

KEY = "sk-session-0123456789abcdef"
HELLO = WireAnswer(texts=("Hel", "lo"))
CALL = WireAnswer(calls=(WireCall(name="count", arguments="{}"),))
THINK = WireAnswer(
    thoughts=("sealed thought",),
    texts=("I count.",),
    calls=(WireCall(name="count", arguments="{}"),),
    seal="c2VhbGVk",
)
KINDS = {CHAT.name: OpenAIChat, RESPONSES.name: OpenAIResponses, MESSAGES.name: Anthropic}


@pytest.fixture(params=FORMATS, ids=lambda form: form.name)
def form(request: Any) -> Any:
    return request.param


@pytest.fixture
def autojump_clock() -> MockClock:
    """Jump when nothing has moved for a while: sockets need a moment that is no time.

    Every test names it: pytest-trio runs by a clock only if the test itself asks for it.
    """
    return MockClock(autojump_threshold=0.02)


class Counter:
    """A tool that counts how often it really ran."""

    def __init__(self) -> None:
        self.runs = 0
        self.tool = tool(name="count")(self._run)

    async def _run(self) -> str:
        await trio.lowlevel.checkpoint()
        self.runs += 1
        return f"run {self.runs} 🙂"


def make(form: WireFormat, server: WireServer, model: str = "m") -> Any:
    base = server.url if form is MESSAGES else f"{server.url}/v1"
    transport = Transport(lambda: httpx2.AsyncClient(verify=False, trust_env=False))
    return KINDS[form.name](model, api_key=KEY, base_url=base, transport=transport)


@asynccontextmanager
async def session(
    form: WireFormat, *script: Reply, tools: Sequence[Any] = (), **options: Any
) -> AsyncGenerator[tuple[Any, WireServer, MemoryCheckpoint]]:
    """Open a session whose model is a strict server with that *script*."""
    store = MemoryCheckpoint()
    with trio.fail_after(100_000):
        async with open_wire_server(*script, strict=form.request_fault) as server:
            config = AgentConfig(
                model=make(form, server),
                checkpoints=store,
                session_id="s",
                tools=tools,
                **options,
            )
            async with create_agent(config) as agent:
                yield agent, server, store
            await server.wait_closed()
            assert not server.faults
            assert KEY not in repr(await journal(store))


async def journal(store: MemoryCheckpoint) -> list[Any]:
    found = await store.events_after("s", 0, 100_000)
    return [event.msg for event in found.events]


async def told(store: MemoryCheckpoint, kind: type[Any]) -> list[Any]:
    return [msg for msg in await journal(store) if isinstance(msg, kind)]


async def items(store: MemoryCheckpoint) -> list[Any]:
    checkpoint = await store.load("s")
    assert checkpoint is not None
    return list(checkpoint.context)


# ---------------------------------------------------------------- broken streams


@pytest.mark.parametrize("again", [HELLO, CALL], ids=["text", "the call again"])
async def test_a_call_of_a_broken_stream_never_runs(
    form: WireFormat, again: WireAnswer, autojump_clock: MockClock
) -> None:
    """No tool starts before the answer is complete, so runs and history agree."""
    counter = Counter()
    broken = Reply(chunks=form.events(CALL)[:-1], end="drop")
    if form is CHAT:
        broken = Reply(chunks=form.events(CALL)[:-3], end="drop")
    script = (broken, form.reply(again), form.reply(HELLO))
    async with session(form, *script, tools=[counter.tool]) as (agent, _, store):
        result = await agent.run("count")
    outputs = [item for item in await items(store) if isinstance(item, ToolOutputItem)]

    assert result.outcome == "completed"
    assert result.text == "Hello"
    assert counter.runs == len(outputs) == (1 if again is CALL else 0)
    steps = await told(store, ModelStepCompleted)
    assert steps[0].outcome == "retrying"


SILENCES: dict[str, Any] = {
    "after text": lambda form: Reply(chunks=form.events(HELLO)[:4], end="stall"),
    "before the first byte": lambda _: Reply(before="stall"),
    "within a call": lambda form: Reply(chunks=form.events(CALL)[:-4], end="stall"),
}


@pytest.mark.parametrize("where", SILENCES)
async def test_silence_is_a_failed_attempt_and_nothing_of_it_is_kept(
    form: WireFormat, where: str, autojump_clock: MockClock
) -> None:
    counter = Counter()
    script = (SILENCES[where](form), form.reply(HELLO))
    options: dict[str, Any] = {"tools": [counter.tool], "model_idle_timeout": 2.0}
    async with session(form, *script, **options) as (agent, _, store):
        before = trio.current_time()
        result = await agent.run("hi")
        elapsed = trio.current_time() - before

    assert result.text == "Hello"
    assert [item.text for item in await items(store)] == ["hi", "Hello"]
    assert counter.runs == 0
    assert 2.0 <= elapsed < 4.0


@pytest.mark.parametrize("where", SILENCES)
async def test_an_interrupt_during_silence_works_at_once(
    form: WireFormat, where: str, autojump_clock: MockClock
) -> None:
    script = (SILENCES[where](form), form.reply(HELLO))
    async with session(form, *script) as (agent, server, store):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.run, "hi")
            await server.wait_requests(1)
            started = await until(agent, TurnStarted)
            before = trio.current_time()
            await agent.submit(Interrupt(turn_id=started.turn_id))
            await agent.wait_idle()
            assert trio.current_time() - before < 1.0
        result = await agent.run("again")

    assert result.text == "Hello"
    assert [item.text for item in await items(store)] == ["hi", "again", "Hello"]


async def until(agent: Any, kind: type[Any]) -> Any:
    async for event in agent.events:
        if isinstance(event.msg, kind):
            return event.msg
    raise AssertionError


async def test_a_long_call_without_text_is_not_silence(
    form: WireFormat, autojump_clock: MockClock
) -> None:
    """Arguments are signs of life, although no text of them is shown."""
    counter = Counter()
    raw = '{"x": "' + "y" * 30 + '"}'
    answer = WireAnswer(calls=(WireCall(name="count", arguments=raw),))
    chunks = form.events(answer)
    async with session(form, tools=[counter.tool], model_idle_timeout=5.0) as (
        agent,
        server,
        store,
    ):
        gates = [trio.Event() for _ in chunks]
        server.add(Reply(chunks=chunks, holds=gates), form.reply(HELLO))
        async with trio.open_nursery() as nursery:

            async def trickle() -> None:
                for gate in gates:
                    await trio.sleep(3)
                    gate.set()

            nursery.start_soon(trickle)
            result = await agent.run("hi")

    assert result.text == "Hello"
    assert len(await told(store, ModelStepStarted)) == 2


# ---------------------------------------------------------------- empty and odd answers


EMPTY = {
    "nothing": WireAnswer(),
    "white space": WireAnswer(texts=(" \n",)),
    "thoughts alone": WireAnswer(thoughts=("hm",), seal="c2VhbA=="),
}


@pytest.mark.parametrize("kind", EMPTY)
async def test_an_empty_reply_is_told_and_never_sent_back(
    form: WireFormat, kind: str, autojump_clock: MockClock
) -> None:
    script = (form.reply(EMPTY[kind]), form.reply(HELLO))
    async with session(form, *script) as (agent, server, store):
        first = await agent.run("one")
        second = await agent.run("two")

    assert first.text == ""
    assert second.text == "Hello"
    assert "one" in server.seen[1].raw.decode()
    warnings = [
        msg for msg in await journal(store) if getattr(msg, "code", "") == "empty_reply"
    ]
    assert len(warnings) == 1


async def test_stopped_while_only_thinking_the_session_goes_on(
    form: WireFormat, autojump_clock: MockClock
) -> None:
    thinking = form.events(WireAnswer(thoughts=("hm", "hm"), texts=("x",)))[:5]
    script = (Reply(chunks=thinking, end="stall"), form.reply(HELLO))
    async with session(form, *script) as (agent, _, store):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.run, "one")
            started = await until(agent, TurnStarted)
            await until(agent, AgentReasoningDelta)
            await agent.submit(Interrupt(turn_id=started.turn_id))
        result = await agent.run("two")

    assert result.text == "Hello"
    assert [type(item) for item in await items(store)].count(AssistantItem) == 1


BAD_ARGUMENTS = {
    "cut by the limit": ('{"path": "a.txt", "content": "half', "length"),
    "cut but whole": ('{"path": "a.txt"}', "length"),
    "a list": ("[1]", "stop"),
    "a text": ('"x"', "stop"),
    "empty": ("", "stop"),
    "half a character": ('{"path": "a", "content": "\\ud83d"}', "stop"),
}


@pytest.mark.parametrize("kind", BAD_ARGUMENTS)
async def test_bad_arguments_run_nothing_and_spoil_nothing(
    form: WireFormat, kind: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    raw, reason = BAD_ARGUMENTS[kind]

    @tool
    async def write_file(path: str, content: str) -> str:
        """Write a file."""
        await trio.Path(tmp_path, path).write_text(content)
        return "written"

    answer: Any = WireAnswer(
        texts=("I write.",),
        calls=(WireCall(name="write_file", arguments=raw),),
        reason=reason,  # type: ignore[arg-type]
    )
    script = (form.reply(answer), form.reply(HELLO), form.reply(HELLO))
    async with session(form, *script, tools=[write_file]) as (agent, server, store):
        result = await agent.run("write")
        await agent.run("more")
    (end,) = await told(store, ToolCallEnd)

    assert result.text.endswith("Hello")
    assert end.is_error
    assert not os.listdir(tmp_path)  # noqa: PTH208  # the other form waits, says the linter
    assert len(server.seen) == 3
    for seen in server.seen:
        seen.raw.decode()
    if reason == "length":
        assert end.output == texts.CUT_ARGUMENTS


async def test_a_cut_answer_says_so_and_is_no_success(
    form: WireFormat, autojump_clock: MockClock
) -> None:
    for reason in ("length", "refusal"):
        answer = attrs.evolve(HELLO, reason=reason)
        async with session(form, form.reply(answer)) as (agent, _, _store):
            result = await agent.run("hi")
        assert result.finish_reason == reason


# ---------------------------------------------------------------- switching


@pytest.mark.parametrize("first", [RESPONSES, MESSAGES, CHAT], ids=lambda form: form.name)
@pytest.mark.parametrize("reopen", [False, True])
async def test_sealed_reasoning_is_never_sent_to_another_model_and_comes_back(
    first: WireFormat, reopen: bool, autojump_clock: MockClock
) -> None:
    """Model B is another provider, then the same provider's other model."""
    for second in (MESSAGES if first is RESPONSES else RESPONSES, first):
        counter, store = Counter(), MemoryCheckpoint()
        with trio.fail_after(1000):
            async with (
                open_wire_server(strict=first.request_fault) as a,
                open_wire_server(strict=second.request_fault) as b,
            ):
                a.add(first.reply(THINK), first.reply(HELLO), first.reply(HELLO))
                b.add(second.reply(HELLO))
                router = ModelRouter("a", make(first, a))
                router.register("b", make(second, b, "another"))
                config = AgentConfig(
                    model=router, checkpoints=store, session_id="s", tools=[counter.tool]
                )
                ops: list[tuple[str, str]] = [("a", "one"), ("b", "two"), ("a", "three")]
                while ops:
                    async with create_agent(config) as agent:
                        while ops:
                            route, text = ops.pop(0)
                            await agent.submit(SetModel(route=route))
                            result = await agent.run(text)
                            assert result.text.endswith("Hello")
                            if reopen:
                                break
        mark = b"sealed thought" if first is CHAT else b"c2VhbGVk"
        kept = [item for item in await items(store) if isinstance(item, ReasoningItem)]

        assert not [*a.faults, *b.faults]
        assert mark not in b.seen[0].raw
        assert b"I count." in b.seen[0].raw
        assert b"run 1" in b.seen[0].raw
        assert [mark in seen.raw for seen in a.seen] == [False, True, True]
        assert len(kept) == 1
        assert kept[0].sealed is not None


# ---------------------------------------------------------------- retries and fallbacks


def busy(status: int, **headers: str) -> Reply:
    return Reply.failure(status, {"error": {"message": "busy"}}, **headers)


@pytest.mark.parametrize("status", [429, 500, 503, 529])
async def test_retries_end_after_a_stated_number_of_growing_waits(
    form: WireFormat, status: int, autojump_clock: MockClock
) -> None:
    script = [busy(status)] * 20
    async with session(form, *script) as (agent, server, store):
        result = await agent.run("hi")
    steps = await told(store, ModelStepCompleted)
    waits = [step.retry_in_ms for step in steps if step.outcome == "retrying"]

    assert result.outcome == "failed"
    assert isinstance(result.error, ProviderError)
    assert result.error.status == status
    assert len(server.seen) == MAX_STREAM_RETRIES + 1
    assert waits == sorted(waits)
    assert len(set(waits)) == MAX_STREAM_RETRIES
    assert steps[-1].outcome == "failed"
    assert [msg.attempt for msg in await told(store, ModelStepStarted)] == [1, 2, 3, 4, 5, 6]


async def test_a_provider_is_never_asked_earlier_than_it_wants(
    form: WireFormat, autojump_clock: MockClock
) -> None:
    script = [busy(429, retry_after="30")] * 2
    async with session(form, *script, form.reply(HELLO)) as (agent, _, store):
        before = trio.current_time()
        result = await agent.run("hi")
        elapsed = trio.current_time() - before

    assert result.text == "Hello"
    assert elapsed >= 60.0
    assert [step.retry_in_ms for step in (await told(store, ModelStepCompleted))[:2]] == [
        30_000
    ] * 2


AT_ONCE = {
    "a wait beyond the cap": busy(429, retry_after=str(RETRY_AFTER_CAP_SECONDS + 1)),
    "a bad request": busy(400),
    "no such model": busy(404),
    "a bad key": busy(401),
    "too large": Reply.failure(400, {"error": {"code": "context_length_exceeded"}}),
    "a long message": Reply.failure(400, b"x" * 100_000),
}


@pytest.mark.parametrize("kind", AT_ONCE)
async def test_what_asking_again_cannot_mend_fails_at_once(
    form: WireFormat, kind: str, autojump_clock: MockClock
) -> None:
    async with session(form, AT_ONCE[kind], form.reply(HELLO)) as (agent, server, _):
        before = trio.current_time()
        failed = await agent.run("hi")
        assert trio.current_time() - before < 1.0
        assert len(server.seen) == 1
        result = await agent.run("again")

    assert failed.outcome == "failed"
    assert isinstance(failed.error, AgentError)
    assert len(str(failed.error).encode()) <= MAX_ERROR_MESSAGE_BYTES
    assert isinstance(failed.error, AuthError) == (kind == "a bad key")
    assert isinstance(failed.error, ContextOverflowError) == (kind == "too large")
    assert result.text == "Hello"


async def test_an_interrupt_during_a_wait_works_at_once(
    form: WireFormat, autojump_clock: MockClock
) -> None:
    script = (busy(429, retry_after="100"), form.reply(HELLO))
    async with session(form, *script) as (agent, server, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.run, "hi")
            started = await until(agent, TurnStarted)
            await until(agent, ModelStepCompleted)
            before = trio.current_time()
            await agent.submit(Interrupt(turn_id=started.turn_id))
            await agent.wait_idle()
            assert trio.current_time() - before < 1.0
        assert len(server.seen) == 1
        assert (await agent.run("again")).text == "Hello"


async def test_partial_text_of_a_failed_attempt_is_never_an_answer(
    form: WireFormat, autojump_clock: MockClock
) -> None:
    partly = Reply(
        chunks=form.events(WireAnswer(texts=("wrong ", "words ", "here")))[:5], end="drop"
    )
    async with session(form, partly, *[form.reply(HELLO)] * 2) as (agent, server, store):
        result = await agent.run("hi")
        await agent.run("more")

    assert result.text == "Hello"
    assert "wrong" not in repr(await items(store))
    assert b"wrong" not in server.seen[1].raw


async def test_a_fallback_goes_on_with_the_next_route(
    form: WireFormat, autojump_clock: MockClock
) -> None:
    with trio.fail_after(1000):
        async with (
            open_wire_server(*[busy(529)] * 9, strict=form.request_fault) as a,
            open_wire_server(*[busy(503)] * 6, strict=form.request_fault) as b,
            open_wire_server(CHAT.reply(HELLO), strict=CHAT.request_fault) as c,
        ):
            router = ModelRouter("a", make(form, a))
            router.register("b", make(form, b))
            router.register("c", make(CHAT, c))
            router.fallback("a", "b", "c")
            store = MemoryCheckpoint()
            config = AgentConfig(model=router, checkpoints=store, session_id="s")
            async with create_agent(config) as agent:
                result = await agent.run("hi")
    routes = [msg.route for msg in await told(store, ModelStepStarted)]

    assert result.text == "Hello"
    assert routes == ["a"] * 6 + ["b"] * 6 + ["c"]
