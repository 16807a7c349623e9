"""Ten promises about senders, start-up and resuming, over a real file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from trio_agent import (
    AgentConfig,
    BusyError,
    Middleware,
    ModelRouter,
    ResumeSession,
    SessionBrokenError,
    SessionContext,
    SqliteCheckpoint,
    SubmissionRejectedError,
    UserInput,
    create_agent,
)
from trio_agent.errors import ProviderError
from trio_agent.middleware.contexts import RuntimeContext
from trio_agent.model.base import Emit, ModelOutput, ModelRequest
from trio_agent.protocol import texts
from trio_agent.protocol.events import (
    Event,
    SessionConfigured,
    SessionHistory,
    SessionResumeRequested,
    ToolCallBegin,
    ToolCallEnd,
)
from trio_agent.protocol.items import ToolCallItem, ToolOutputItem, UserItem
from trio_agent.protocol.limits import INBOX_CAPACITY, MAX_USER_INPUT_BYTES
from trio_agent.state.checkpoint import ActiveExecution, Checkpoint, ToolCall
from trio_agent.tools.catalog import Catalog


class Unexpected:
    """A model that nobody should ask."""

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        await trio.lowlevel.checkpoint()
        raise ProviderError("response was not expected")


class MetadataProbe(Middleware):
    """Remembers the metadata that it was registered with."""

    name = "metadata_probe"

    def __init__(self) -> None:
        self.observed: Mapping[str, Any] | None = None

    def register(self, catalog: Catalog, runtime: RuntimeContext) -> None:
        self.observed = runtime.metadata


def configure(store: SqliteCheckpoint, *routes: str, **options: Any) -> AgentConfig:
    default, *others = routes or ("test",)
    router = ModelRouter(default, Unexpected())
    for route in others:
        router.register(route, Unexpected())
    options.setdefault("session_id", "target")
    return AgentConfig(model=router, checkpoints=store, system_prompt="test prompt", **options)


async def opened(config: AgentConfig) -> tuple[SessionConfigured, Checkpoint]:
    """Open and leave a session; return its first event and what was saved of it."""
    store = config.checkpoints
    assert isinstance(store, SqliteCheckpoint)
    async with create_agent(config) as agent:
        event = await agent.next_event()
        saved = await store.load(config.session_id)
    assert event is not None
    assert isinstance(event.msg, SessionConfigured)
    assert saved is not None
    return event.msg, saved


async def test_sender_rejects_oversized_input_before_queueing(tmp_path: Path) -> None:
    async with aclosing(SqliteCheckpoint(tmp_path / "db")) as store:
        async with create_agent(configure(store)) as agent:
            before = agent.snapshot()
            too_long = UserInput(text="x" * (MAX_USER_INPUT_BYTES + 1))
            with pytest.raises(SubmissionRejectedError) as nowait:
                agent.submit_nowait(too_long)
            with pytest.raises(SubmissionRejectedError) as refused:
                await agent.submit(too_long)
            assert nowait.value.code == refused.value.code == "too_large"
            assert agent.snapshot() == before


async def test_sender_reports_a_full_live_queue_as_busy(tmp_path: Path) -> None:
    async with aclosing(SqliteCheckpoint(tmp_path / "db")) as store:
        async with create_agent(configure(store)) as agent:
            for n in range(INBOX_CAPACITY):
                agent.submit_nowait(UserInput(text=f"message {n}"))
            with pytest.raises(BusyError):
                agent.submit_nowait(UserInput(text="one too many"))


async def test_restart_falls_back_when_the_saved_model_route_was_removed(
    tmp_path: Path,
) -> None:
    async with aclosing(SqliteCheckpoint(tmp_path / "db")) as store:
        await opened(configure(store, "old"))
        configured, saved = await opened(configure(store, "new"))
        assert (configured.model.route, saved.model_route) == ("new", "new")


async def test_explicit_model_route_replaces_a_saved_route_that_is_still_registered(
    tmp_path: Path,
) -> None:
    async with aclosing(SqliteCheckpoint(tmp_path / "db")) as store:
        await opened(configure(store, "first", "second"))
        configured, saved = await opened(
            configure(store, "second", "first", override_saved_model_route=True)
        )
        assert (configured.model.route, saved.model_route) == ("second", "second")


async def test_new_agent_uses_its_configured_model_instead_of_global_state(
    tmp_path: Path,
) -> None:
    async with aclosing(SqliteCheckpoint(tmp_path / "db")) as store:
        await store.save_state("agent", "model_route", "other")
        configured, _ = await opened(configure(store, "default", "other", session_id="fresh"))
        assert configured.model.route == "default"


async def test_stale_save_does_not_leapfrog_winning_checkpoint(tmp_path: Path) -> None:
    async with aclosing(SqliteCheckpoint(tmp_path / "db")) as store:
        with pytest.raises(SessionBrokenError):
            async with create_agent(configure(store)) as agent:
                first = await store.load("target")
                assert first is not None
                item = UserItem(text="the winner was here")
                winner = attrs.evolve(first, sequence=first.sequence + 1, context=[item])
                await store.save(winner, [item])
                agent.submit_nowait(UserInput(text="lose the race"))
                async for _ in agent.events:
                    pass
        assert await store.load("target") == winner


async def test_resumed_agent_uses_the_durable_session_context(tmp_path: Path) -> None:
    durable = SessionContext(workspace_label="Project One", origin_label="cron")
    wrong = SessionContext(workspace_label="wrong workspace")
    async with aclosing(SqliteCheckpoint(tmp_path / "db")) as store:
        created, _ = await opened(configure(store, session_context=durable))
        restored, _ = await opened(configure(store, session_context=wrong))
        assert (created.context, restored.context) == (durable, durable)


async def test_resumed_agent_preserves_or_explicitly_replaces_durable_metadata(
    tmp_path: Path,
) -> None:
    durable = {"gateway.chat": {"workspace": "/srv/project"}}
    replacement = {"gateway.chat": {"workspace": "/srv/replacement"}}
    async with aclosing(SqliteCheckpoint(tmp_path / "db")) as store:
        observed = []
        for metadata in (durable, None, replacement):
            probe = MetadataProbe()
            await opened(configure(store, metadata=metadata, middleware=(probe,)))
            observed.append(probe.observed)
        assert observed == [durable, durable, replacement]
        saved = await store.load("target")
        assert saved is not None
        assert saved.metadata == replacement


async def test_resume_request_carries_the_target_session_context(tmp_path: Path) -> None:
    context = SessionContext(
        workspace_id="workspace-two", workspace_label="Project Two", origin_label="cron"
    )
    async with aclosing(SqliteCheckpoint(tmp_path / "db")) as store:
        target = attrs.evolve(
            Checkpoint.empty("target"),
            session_context=context,
            model_route="foreign-workspace-route",
        )
        await store.save(target)
        async with create_agent(configure(store, session_id="current")) as agent:
            submission_id = agent.submit_nowait(ResumeSession("target"))
            told: list[Event] = []
            async for event in agent.events:
                told.append(event)
                if isinstance(event.msg, SessionResumeRequested):
                    break
        assert told[-1].submission_id == submission_id
        assert told[-1].msg == SessionResumeRequested(session_id="target", context=context)
        assert await store.load("target") == target


async def test_restart_closes_uncertain_tool_calls_without_replaying_them(
    tmp_path: Path,
) -> None:
    arguments = {"path": "note.txt", "content": "hello"}
    call = ToolCall(call_id="call-1", name="write_file", arguments=arguments)
    item = ToolCallItem(call_id="call-1", name="write_file", arguments=arguments)
    target = attrs.evolve(
        Checkpoint.empty("target"),
        active_execution=ActiveExecution(
            submission_id="message-1", turn_id="turn-1", started_at_ms=0
        ),
        context=[item],
        pending_tools=(call,),
    )

    async def write_file(path: str, content: str) -> str:
        raise AssertionError("a call that had begun was entered again")

    async with aclosing(SqliteCheckpoint(tmp_path / "db")) as store:
        await store.save(target, [item])
        async with create_agent(configure(store, tools=(write_file,))) as agent:
            first, second = await agent.next_event(), await agent.next_event()
            recovered = await store.load("target")
        assert first is not None
        assert isinstance(first.msg, SessionConfigured)
        assert second is not None
        assert isinstance(second.msg, SessionHistory)
        assert second.msg.events == (
            ToolCallBegin(
                turn_id="turn-1", call_id="call-1", name="write_file", arguments=arguments
            ),
            ToolCallEnd(
                turn_id="turn-1",
                call_id="call-1",
                name="write_file",
                output=texts.UNKNOWN_AFTER_RESTART,
                outcome="unknown",
                is_error=True,
            ),
        )
        assert recovered is not None
        assert recovered.active_execution is None
        assert recovered.pending_tools == ()
        assert recovered.context[-1] == ToolOutputItem(
            call_id="call-1", output=texts.UNKNOWN_AFTER_RESTART, is_error=True
        )
