"""`check_tool` believes honest tools and finds out the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trio_agent import ToolContext, tool
from trio_agent.testing import check_tool
from trio_agent.tools.base import Reconciled


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger"
    path.touch()
    return path


def holds(path: Path, text: str) -> bool:
    return text in path.read_text()


def lines(path: Path) -> Callable[[], int]:
    return lambda: len(path.read_text().splitlines())


def test_a_tool_that_recognises_its_key_is_idempotent(ledger: Path) -> None:
    @tool(effect="idempotent")
    async def put(text: str, ctx: ToolContext) -> str:
        entry = f"{ctx.idempotency_key} {text}\n"
        if not holds(ledger, entry):
            with ledger.open("a") as file:
                file.write(entry)
        return "put"

    crashes = check_tool(put, {"text": "x"}, world=lines(ledger))
    assert max(crash.entered.get("put", 0) for crash in crashes) == 2, "it never ran again"


def test_a_tool_that_only_says_so_is_found_out(ledger: Path) -> None:
    @tool(effect="idempotent")
    async def put(text: str) -> str:
        with ledger.open("a") as file:
            file.write(f"{text}\n")
        return "put"

    with pytest.raises(AssertionError, match="the effect is 2 where one call makes 1"):
        check_tool(put, {"text": "x"}, world=lines(ledger))


def test_a_reader_that_writes_is_found_out(ledger: Path) -> None:
    @tool(effect="read_only")
    async def look() -> str:
        with ledger.open("a") as file:
            file.write("looked\n")
        return "seen"

    with pytest.raises(AssertionError, match="a read_only tool changed the world"):
        check_tool(look, {}, world=lines(ledger))


def reconciling(ledger: Path, *, honest: bool) -> Any:
    async def find_out(arguments: Mapping[str, Any], ctx: ToolContext) -> Reconciled:
        if not honest or holds(ledger, ctx.idempotency_key):
            return Reconciled(outcome="finished", output="sent")
        return Reconciled(outcome="not_started")

    @tool(effect="destructive", reconcile=find_out)
    async def send(ctx: ToolContext) -> str:
        with ledger.open("a") as file:
            file.write(f"{ctx.idempotency_key}\n")
        return "sent"

    return send


def test_a_tool_that_finds_out_leaves_nothing_unknown(ledger: Path) -> None:
    crashes = check_tool(reconciling(ledger, honest=True), {}, world=lines(ledger))
    outcomes = {outcome for crash in crashes for outcome in crash.outcomes.values()}
    assert outcomes == {"finished", "not_started"}


def test_a_tool_that_finds_out_what_is_not_so_is_found_out(ledger: Path) -> None:
    with pytest.raises(AssertionError, match="reported as finished with an effect of 0"):
        check_tool(reconciling(ledger, honest=False), {}, world=lines(ledger))
