"""What a session's own tools, hooks and handlers get wrong costs a call or a turn, no more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_agent import (
    AgentConfig,
    MemoryCheckpoint,
    Middleware,
    SqliteCheckpoint,
    ToolContext,
    ToolError,
    create_agent,
    tool,
)
from trio_agent.middleware import MessageSubmitContext, RuntimeContext, TurnEndContext
from trio_agent.protocol.events import ExecApprovalRequest, Notice
from trio_agent.protocol.items import ToolCallItem, UserItem
from trio_agent.protocol.ops import ApprovedForSession
from trio_agent.state.checkpoint import ActiveExecution, Checkpoint, ToolCall
from trio_agent.state.item_log import ItemLog
from trio_agent.testing.models import ScriptedModel, call, text


class Bad(dict[str, Any]):
    """Is no JSON: a state of it cannot be saved."""


@pytest.mark.parametrize("raises", [True, False])
async def test_a_call_that_leaves_an_impossible_state_costs_the_state_alone(
    tmp_path: Path, raises: bool
) -> None:
    @tool
    async def keep(ctx: ToolContext, n: int) -> str:
        """Keep."""
        ctx.state["n"] = object() if n else 0
        if raises:
            raise ToolError("no")
        return "kept"

    script = [[call("keep", {"n": 0})], [call("keep", {"n": 1})], [text("done")]]
    async with SqliteCheckpoint(tmp_path / "s.db") as store:
        config = AgentConfig(
            model=ScriptedModel(*script), tools=[keep], checkpoints=store, session_id="s"
        )
        async with create_agent(config) as agent:
            assert (await agent.run("go")).text == "done"
        checkpoint = await store.load("s")
    assert checkpoint is not None
    assert checkpoint.states["tool:keep"] == {"n": 0}


async def test_an_approval_handler_that_decides_nothing_approves_nothing() -> None:
    entered: list[str] = []

    @tool(needs_approval=True)
    async def act() -> str:
        """Act."""
        entered.append("act")
        return "did"

    async def handler(request: ExecApprovalRequest) -> Any:
        await trio.lowlevel.checkpoint()

    config = AgentConfig(
        model=ScriptedModel([call("act", {})], [text("done")]), tools=[act], on_approval=handler
    )
    async with create_agent(config) as agent:
        result = await agent.run("go")
        assert result.outcome == "failed"
        assert (await agent.run("again")).text == "done"
    assert entered == []


async def test_a_grant_key_that_raises_covers_the_identical_call() -> None:
    def broken(arguments: Mapping[str, Any]) -> str:
        raise KeyError("path")

    entered: list[int] = []

    @tool(needs_approval=True, grant_key=broken)
    async def act(n: int) -> str:
        """Act."""
        entered.append(n)
        return "did"

    asked: list[Any] = []

    async def handler(request: ExecApprovalRequest) -> Any:
        asked.append(request.arguments["n"])
        await trio.lowlevel.checkpoint()
        return ApprovedForSession()

    script = [[call("act", {"n": n})] for n in (1, 1, 2)]
    config = AgentConfig(
        model=ScriptedModel(*script, [text("done")]), tools=[act], on_approval=handler
    )
    async with create_agent(config) as agent:
        assert (await agent.run("go")).text == "done"
    assert asked == [1, 2]
    assert entered == [1, 1, 2]


async def test_a_turn_goes_on_when_the_route_it_fell_back_to_is_gone() -> None:
    """The batch has ended and its outputs wait for the next step, which `gone` was to take."""
    store = MemoryCheckpoint()
    ended = ToolCall(
        call_id="c", name="act", arguments={}, status="ended", outcome="finished", output="did"
    )
    execution = ActiveExecution(
        submission_id="m", turn_id="t", started_at_ms=1, route="gone", next_model_step=1
    )
    left = Checkpoint(
        session_id="s",
        context=ItemLog(
            [UserItem(text="go"), ToolCallItem(call_id="c", name="act", arguments={})]
        ),
        pending_tools=(ended,),
        active_execution=execution,
    )
    await store.save(left)
    config = AgentConfig(model=ScriptedModel([text("done")]), checkpoints=store, session_id="s")
    async with create_agent(config) as agent:
        await agent.wait_idle()
    page = await store.execution_page("s", limit=9)
    assert [one.outcome for one in page.executions] == ["completed"]


class Refuses(Middleware):
    """Refuses every message; and its last hook never ends."""

    async def message_submit(self, ctx: MessageSubmitContext) -> None:
        """Refuse."""
        ctx.reject("no")

    async def turn_end(self, ctx: TurnEndContext) -> None:
        """Wait for nothing."""
        await trio.sleep_forever()


async def test_a_last_hook_that_never_ends_does_not_hold_a_refused_turn(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with trio.fail_after(100):
        config = AgentConfig(model=ScriptedModel(), middleware=[Refuses()])
        async with create_agent(config) as agent:
            assert (await agent.run("go")).outcome == "aborted"


class Held(MemoryCheckpoint):
    """Holds the first save until something has been shown meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.saving, self.shown = trio.Event(), trio.Event()

    async def save(self, *args: Any, **kwargs: Any) -> Any:
        """Save."""
        self.saving.set()
        await self.shown.wait()
        return await super().save(*args, **kwargs)


class Shows(Middleware):
    """Shows one thing before the first save and one while it is being written."""

    def __init__(self, store: Held) -> None:
        self.store = store

    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        """Run the task that shows them."""

        async def show() -> None:
            await self.store.saving.wait()
            ctx.show(Notice(capability=self.name, text="during"))
            self.store.shown.set()

        ctx.show(Notice(capability=self.name, text="before"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(show)
            yield


async def test_what_is_shown_while_the_session_is_made_durable_is_kept() -> None:
    store = Held()
    config = AgentConfig(
        model=ScriptedModel(), checkpoints=store, session_id="s", middleware=[Shows(store)]
    )
    async with create_agent(config):
        pass
    events = (await store.events_after("s", 0, 100)).events
    shown = [event.msg.text for event in events if isinstance(event.msg, Notice)]
    assert shown == ["before", "during"]


async def test_what_a_reset_state_shares_with_the_saved_one_is_nothing(
    tmp_path: Path,
) -> None:
    """A change deep inside of a state that was once reset is saved like any other."""

    @tool
    async def keep(ctx: ToolContext, n: int) -> str:
        """Keep."""
        if n == 1:
            ctx.state["bad"] = object()  # pyright: ignore[reportArgumentType]
        else:
            ctx.state.setdefault("all", []).append(n)
        return "kept"

    script = [[call("keep", {"n": n})] for n in (0, 1, 2)]
    async with SqliteCheckpoint(tmp_path / "s.db") as store:
        config = AgentConfig(
            model=ScriptedModel(*script, [text("done")]),
            tools=[keep],
            checkpoints=store,
            session_id="s",
        )
        async with create_agent(config) as agent:
            assert (await agent.run("go")).text == "done"
        checkpoint = await store.load("s")
    assert checkpoint is not None
    assert checkpoint.states["tool:keep"] == {"all": [0, 2]}
