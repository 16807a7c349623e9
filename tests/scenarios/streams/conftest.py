"""Each test here runs for all wire formats against `trio_agent.testing.wire_server`."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from trio_agent.testing.wire_server import FORMATS


@pytest.fixture(params=FORMATS, ids=lambda form: form.name)
def form(request: Any) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def environment(monkeypatch: Any) -> Any:
    """No proxy and no key from outside."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in (
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_BASE_URL",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def nothing_is_left_to_the_garbage_collector() -> Any:
    """A generator that was not left properly warns here, and warnings are errors."""
    yield
    gc.collect(1)
