"""Small parts that checks of a store are built of: sessions, turns, and expected refusals."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import attrs

from trio_agent.errors import (
    AgentError,
    ConfigError,
    CorruptStoreError,
    ProtocolError,
    SessionOwnedError,
    StaleSessionError,
    UnknownError,
)
from trio_agent.protocol.events import (
    Draft,
    Event,
    EventMsg,
    Notice,
    SubmissionAccepted,
)
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    UserItem,
)
from trio_agent.state.checkpoint import (
    Checkpoint,
    ExecutionRecord,
)
from trio_agent.store.base import CheckpointStore


def draft(msg: EventMsg, *, at: int = 1, submission_id: str | None = None) -> Draft:
    """Return *msg* as a draft."""
    return Draft(recorded_at_ms=at, submission_id=submission_id, msg=msg)


def note(text: str) -> Draft:
    """Return a draft that only has a text."""
    return draft(Notice(capability="check", text=text))


def following(checkpoint: Checkpoint, *items: Item, **members: Any) -> Checkpoint:
    """Return the checkpoint after *checkpoint*, its context grown by *items*."""
    if items:
        members["context"] = checkpoint.context.extended(items)
    return attrs.evolve(checkpoint, sequence=checkpoint.sequence + 1, **members)


def finished(session_id: str, submission_id: str) -> ExecutionRecord:
    """Return the record of a turn that completed."""
    return ExecutionRecord(
        session_id=session_id,
        submission_id=submission_id,
        turn_id=f"turn of {submission_id}",
        started_at_ms=1,
        finished_at_ms=2,
        outcome="completed",
        finish_reason="stop",
    )


async def save_turns(
    store: CheckpointStore, checkpoint: Checkpoint, count: int, *, first: int = 1
) -> Checkpoint:
    """Save *count* whole turns, two items and one event each; return the last checkpoint."""
    for number in range(first, first + count):
        name = f"s{number}"
        added: list[Item] = [
            UserItem(text=f"question {number}", submission_id=name),
            AssistantItem(text=f"answer {number}"),
        ]
        checkpoint = following(checkpoint, *added)
        await store.save(
            checkpoint,
            added,
            execution=finished(checkpoint.session_id, name),
            events=[draft(SubmissionAccepted(digest=f"d{number}"), submission_id=name)],
        )
    return checkpoint


async def begin(store: CheckpointStore, session_id: str = "s") -> Checkpoint:
    """Save an empty session; return its checkpoint."""
    checkpoint = Checkpoint.empty(session_id)
    await store.save(checkpoint)
    return checkpoint


class _Refused:
    """``async with``-less `pytest.raises`: awaits a call and returns its error."""

    def __init__(self, *kinds: type[AgentError]) -> None:
        self.kinds = kinds

    async def of(self, call: Awaitable[object]) -> AgentError:
        try:
            result = await call
        except self.kinds as exc:
            return exc
        raise AssertionError(f"expected {self.kinds}, but it returned {result!r}")


stale = _Refused(StaleSessionError).of
owned = _Refused(SessionOwnedError).of
impossible = _Refused(ConfigError).of
unknown = _Refused(UnknownError).of
corrupt = _Refused(CorruptStoreError).of
not_an_export = _Refused(ProtocolError).of


async def journal_of(store: CheckpointStore, session_id: str = "s") -> list[Event]:
    """Return all events that have a row, oldest first."""
    return list((await store.events_after(session_id, 0, 10_000)).events)
