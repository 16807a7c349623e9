"""Routes, fallbacks, retries, and what a string may name."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import (
    AuthError,
    ConfigError,
    ContextOverflowError,
    DuplicateError,
    ProviderError,
    StreamInterruptedError,
    UnknownError,
)
from trio_agent.model.anthropic import Anthropic
from trio_agent.model.named import DEFAULT_ROUTE, as_router
from trio_agent.model.openai import OpenAIChat, OpenAIResponses
from trio_agent.model.retry import RETRY_AFTER_CAP_SECONDS, retry_delay
from trio_agent.model.router import ModelRouter
from trio_agent.protocol.limits import MAX_STREAM_RETRIES
from trio_agent.testing.models import ScriptedModel

errors = st.builds(
    ProviderError,
    st.just("x"),
    retryable=st.booleans(),
    retry_after=st.none() | st.floats(0, 1000),
) | st.builds(StreamInterruptedError)


@given(errors, st.integers(1, 8), st.text())
def test_a_wait_is_bounded_honours_the_provider_and_repeats_itself(
    error: Any, attempt: Any, step: Any
) -> None:
    delay = retry_delay(error, attempt, step)
    asked = error.retry_after or 0.0
    if not error.retryable or attempt > MAX_STREAM_RETRIES or asked > RETRY_AFTER_CAP_SECONDS:
        assert delay is None
        return

    assert delay is not None
    assert delay >= asked
    assert 0.16 <= delay <= max(asked, 3.84)
    assert delay == retry_delay(error, attempt, step)


def test_waits_grow_and_differ_between_steps() -> None:
    error = StreamInterruptedError()
    waits: list[Any] = [
        retry_delay(error, attempt, "s") for attempt in range(1, MAX_STREAM_RETRIES + 1)
    ]
    others = {retry_delay(error, 1, f"s{n}") for n in range(20)}

    assert waits == sorted(waits)
    assert len(others) == 20


def router() -> ModelRouter:
    made = ModelRouter("a", ScriptedModel(name="m-a"), group="g", reasoning_effort="low")
    made.register("b", ScriptedModel(name="m-b"), group="g", reasoning_effort="high")
    made.register("c", ScriptedModel(), context_window=9)
    return made


def test_a_fallback_goes_on_only_with_errors_that_another_route_may_not_have() -> None:
    routes = router()
    routes.fallback("a", "b", "c")
    down = ProviderError("x", retryable=True)

    assert routes.next_route("a", down, frozenset({"a"})) == "b"
    assert routes.next_route("a", down, frozenset({"a", "b"})) == "c"
    assert routes.next_route("a", down, frozenset({"a", "b", "c"})) is None
    assert routes.next_route("a", AuthError("x"), frozenset({"a"})) == "b"
    assert routes.next_route("a", ProviderError("x", status=400), frozenset({"a"})) is None
    assert routes.next_route("a", ContextOverflowError("x"), frozenset({"a"})) is None
    assert routes.next_route("b", down, frozenset({"b"})) is None
    assert routes.next_route("b", down, frozenset({"a", "b"})) == "c"
    assert routes.next_route("c", down, frozenset({"a", "b", "c"})) is None
    routes.fallback("b", "c", on=lambda error: error.status == 400)
    assert routes.next_route("b", ProviderError("x", status=400), frozenset({"b"})) == "c"
    assert routes.next_route("b", down, frozenset({"b"})) is None


def test_a_fallback_names_routes_that_exist_and_differ() -> None:
    with pytest.raises(UnknownError):
        router().fallback("a", "nowhere")
    for others in ((), ("a",), ("b", "b")):
        with pytest.raises(ConfigError):
            router().fallback("a", *others)


def test_a_route_is_found_by_name_or_by_its_siblings_effort_and_never_guessed() -> None:
    routes = router()

    assert routes.resolve("a").model == "m-a"
    assert routes.resolve("a", "high").route == "b"
    assert routes.resolve("c").context_window == 9
    assert [choice.route for choice in routes.choices()] == ["a", "b", "c"]
    for route, effort in (("x", None), ("a", "medium"), ("c", "high")):
        with pytest.raises(UnknownError):
            routes.resolve(route, effort)
    with pytest.raises(UnknownError):
        routes.model("x")


@pytest.mark.parametrize(
    ("route", "more", "error"),
    [
        ("a", {}, DuplicateError),
        (" ", {}, ConfigError),
        ("n", {"group": ""}, ConfigError),
        ("n", {"context_window": 0}, ConfigError),
        ("\ud83d", {}, ConfigError),
    ],
)
def test_a_bad_route_is_refused(route: Any, more: Any, error: Any) -> None:
    with pytest.raises(error):
        router().register(route, ScriptedModel(), **more)


async def test_what_models_hold_open_is_opened_once_and_closed_with_the_last() -> None:
    log: list[str] = []

    class Open(ScriptedModel):
        @asynccontextmanager
        async def open(self) -> Any:
            log.append("open")
            try:
                yield
            finally:
                log.append("close")

    shared = Open()
    routes = ModelRouter("a", shared)
    routes.register("b", shared)
    async with trio.open_nursery() as nursery:
        for _ in range(3):

            async def use() -> None:
                async with routes.open():
                    await trio.testing.wait_all_tasks_blocked()

            nursery.start_soon(use)
    async with routes.open():
        pass

    assert log == ["open", "close"] * 2


async def test_a_model_that_does_not_open_leaves_the_router_as_it_was() -> None:
    class Broken(ScriptedModel):
        broken = True

        @asynccontextmanager
        async def open(self) -> Any:
            if self.broken:
                raise OSError
            yield

    model = Broken()
    routes = ModelRouter("a", model)
    with pytest.raises(OSError):  # the model's own
        async with routes.open():
            pass
    model.broken = False
    async with routes.open():
        pass


def test_a_string_names_a_model(monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    for text, kind in (
        ("openai:gpt", OpenAIResponses),
        ("openai-chat:org/model:tag", OpenAIChat),
        ("anthropic:claude", Anthropic),
    ):
        routes = as_router(text)
        model = routes.model(DEFAULT_ROUTE)
        assert type(model) is kind
        assert routes.resolve(DEFAULT_ROUTE).model == text.partition(":")[2]
    assert as_router("demo").choices()
    routes = router()
    assert as_router(routes) is routes
    single = ScriptedModel()
    assert as_router(single).model(DEFAULT_ROUTE) is single


@pytest.mark.parametrize("text", ["", "demo:", "gpt", "openapi:gpt", "OpenAI:gpt"])
def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(text: Any) -> None:
    with pytest.raises(UnknownError) as caught:
        as_router(text)

    assert "openai-chat:" in str(caught.value)


@pytest.mark.parametrize("text", ["openai", "openai:", "anthropic: ", "openai: gpt"])
def test_a_malformed_name_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError):
        as_router(text)
    with pytest.raises(ConfigError):
        as_router(cast("Any", 42))


@pytest.mark.parametrize("text", ["openai:m", "openai-chat:m", "anthropic:m"])
def test_a_missing_key_is_named_except_for_other_servers(text: Any, monkeypatch: Any) -> None:
    for name in ("OPENAI", "ANTHROPIC"):
        monkeypatch.delenv(f"{name}_API_KEY", raising=False)
        monkeypatch.delenv(f"{name}_BASE_URL", raising=False)
    with pytest.raises(ConfigError) as caught:
        as_router(text)
    assert "_API_KEY" in str(caught.value)
    for name in ("OPENAI", "ANTHROPIC"):
        monkeypatch.setenv(f"{name}_BASE_URL", "http://localhost:8080/v1")
    assert as_router(text).choices()


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("http://example.com/v1", "k"),
        ("https://me:secret@example.com/v1", "k"),
        ("https://example.com/v1?key=secret", "k"),
        ("https://example.com/v1#secret", "k"),
        ("example.com/v1", "k"),
        ("ftp://example.com", ""),
        ("https:///v1", ""),
        ("https://example.com", "two words"),
        ("https://example.com", "line\nbreak"),
        ("https://example.com", "schlüssel"),
    ],
)
def test_an_address_or_key_that_could_leak_is_refused(url: Any, key: Any) -> None:
    for model in (OpenAIChat, OpenAIResponses, Anthropic):
        with pytest.raises(ConfigError) as caught:
            model("m", api_key=key, base_url=url)
        assert "secret" not in str(caught.value)
        assert key not in str(caught.value) or len(key) < 2


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("http://127.0.0.1:8080/v1/", "k"),
        ("http://[::1]:8080", "k"),
        ("http://localhost", "k"),
        ("http://ollama:11434/v1", ""),
        ("https://example.com/v1", "k"),
    ],
)
def test_safe_addresses_are_taken(url: Any, key: Any) -> None:
    for model in (OpenAIChat, OpenAIResponses, Anthropic):
        model("m", api_key=key, base_url=url)


def test_limits_that_could_not_work_are_refused() -> None:
    for limit in ("connect_timeout", "read_timeout", "request_timeout"):
        with pytest.raises(ConfigError):
            OpenAIChat("m", api_key="k", **cast("Any", {limit: 0}))
    with pytest.raises(ConfigError):
        OpenAIChat(" ", api_key="k")
    with pytest.raises(ConfigError):
        Anthropic("m", api_key="k", max_output_tokens=0)
