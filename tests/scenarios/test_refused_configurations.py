"""What can never work is refused when the session is opened, and leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.openings import kinds_of, opened
from tests.scenarios.story import SESSION, Strict, World, configure
from trio_agent import (
    CheckpointError,
    ConfigError,
    DuplicateError,
    Middleware,
    StoreVersionError,
    UnknownError,
    create_agent,
)
from trio_agent.middleware import RuntimeContext
from trio_agent.protocol.events import SessionHistory
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.tools.catalog import Catalog


async def test_an_unknown_model_is_refused(store: MemoryCheckpoint) -> None:
    for model in ("no such model", "nobody:x"):
        with pytest.raises(UnknownError):
            await opened(configure(model, store))
    for model in ("openai:", "anthropic: x"):
        with pytest.raises(ConfigError):
            await opened(configure(model, store))
    assert await store.load(SESSION) is None


@pytest.mark.parametrize("model", ["openai:x", "openai-chat:x", "anthropic:x"])
async def test_a_provider_whose_package_is_missing_says_what_to_install(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "key")
    with pytest.raises(ConfigError) as refused:
        await opened(configure(model))
    assert "pip install" in str(refused.value)


async def test_a_database_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    no_database = tmp_path / "text.db"
    write(no_database, "this is no database" * 1_000)
    for path, error in (
        (tmp_path, CheckpointError),
        (Path("/proc/nowhere/s.db"), CheckpointError),
        (no_database / "s.db", CheckpointError),
        (no_database, StoreVersionError),
    ):
        with pytest.raises(error) as refused:
            await opened(configure(Strict(), path))  # type: ignore[arg-type]
        assert str(path) in str(refused.value)


def write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")


async def test_a_path_opens_and_closes_its_store(tmp_path: Path) -> None:
    path: Any = tmp_path / "s.db"
    async with create_agent(configure(Strict("one"), path)) as agent:
        await agent.run("go")
    events = await opened(configure(Strict(), path))
    assert SessionHistory in kinds_of(events)


def with_everything(*args: int, **kwargs: int) -> str:
    return ""


def with_a_foreign_type(x: Catalog) -> str:
    return str(x)


async def in_pieces() -> AsyncGenerator[str]:  # noqa: ASYNC124, ASYNC900  # what is refused
    yield ""


@pytest.mark.parametrize(
    "unusable", [with_everything, with_a_foreign_type, in_pieces, 5, lambda: ""]
)
async def test_a_tool_with_an_unusable_signature_is_refused(
    store: MemoryCheckpoint, unusable: Any
) -> None:
    with pytest.raises(ConfigError):
        await opened(configure(Strict(), store, tools=(unusable,)))
    assert await store.load(SESSION) is None


async def test_a_tool_of_a_middleware_may_not_take_a_name_that_is_taken(
    store: MemoryCheckpoint,
) -> None:
    class Registers(Middleware):
        def register(self, catalog: Catalog, runtime: RuntimeContext) -> None:
            catalog.register(World().tool("x"))

    with pytest.raises(DuplicateError):
        config = configure(
            Strict(), store, tools=(World().tool("x"),), middleware=[Registers()]
        )
        await opened(config)
    assert await store.load(SESSION) is None


@pytest.mark.parametrize("limit", ["context_window", "max_model_steps", "max_parallel_tools"])
def test_a_limit_of_nothing_is_refused(limit: str) -> None:
    for bad in (0, -1, True):
        with pytest.raises(ConfigError):
            configure(Strict(), None, **{limit: bad})
