"""Every wire format: keys go where they belong, and what an adapter needs is named."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import trio

from tests.scenarios.streams.asking import HELLO, KEY, REQUEST, Sink, make
from trio_agent.errors import ConfigError, ProviderError
from trio_agent.model.router import ModelRouter
from trio_agent.testing.wire_server import MESSAGES, Reply, WireFormat, open_wire_server


async def test_the_key_is_in_the_header_and_nowhere_else(form: Any, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_wire_server(
        Reply.failure(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}),
        Reply.failure(500, f"authorization: Bearer {KEY} x-api-key: {KEY}".encode()),
        form.reply(HELLO),
    ) as server:
        model = make(form, server)
        shown = [repr(model), repr(vars(ModelRouter("a", model)))]
        for _ in range(2):
            with pytest.raises(ProviderError) as caught:
                await model.respond(REQUEST, Sink())
            shown += [str(caught.value), repr(caught.value)]
        await model.respond(REQUEST, Sink())

    assert [name for name, value in server.seen[0].headers.items() if KEY in value] == [
        "x-api-key" if form is MESSAGES else "authorization"
    ]
    assert all(KEY not in text for text in [*shown, caplog.text])
    assert all(KEY.encode() not in seen.raw for seen in server.seen)


async def test_a_server_of_ones_own_needs_no_key(form: WireFormat) -> None:
    async with open_wire_server(form.reply(HELLO)) as server:
        await make(form, server, api_key=None, transport=None).respond(REQUEST, Sink())

    assert not {"authorization", "x-api-key"} & set(server.seen[0].headers)


async def test_importing_an_adapter_does_not_import_httpx2() -> None:
    code = (
        "import sys, trio_agent.model.openai, trio_agent.model.anthropic;"
        "sys.exit('httpx2' in sys.modules)"
    )
    await trio.run_process([sys.executable, "-c", code])


async def test_a_missing_package_is_named(form: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    async with open_wire_server() as server:
        with pytest.raises(ConfigError) as caught:
            make(form, server)

    assert "pip install" in str(caught.value)
