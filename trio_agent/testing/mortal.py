"""`MortalStore`: a store whose process dies at a chosen write, before it or after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import trio

from trio_agent.errors import ConfigError
from trio_agent.protocol.events import Draft, Event
from trio_agent.protocol.items import Item
from trio_agent.protocol.text import Json
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord
from trio_agent.store.base import (
    CheckpointStore,
    EventPage,
    ExecutionPage,
    JournalSlice,
    Lease,
    Receipt,
    SessionPage,
    SessionSummary,
    TranscriptPage,
)


class ProcessDied(BaseException):
    """The process died here. Nothing may catch it: a dead process runs no handlers."""


class MortalStore:
    """Wraps a store, and dies at its n-th write.

    Every call after that raises `ProcessDied`, too: the dead write nothing. What
    they saved stays in the wrapped store, and so do their leases, until `bury`
    frees them as the kernel would.

    Args:
        inner: The store that survives.
        dies_at: Which write is the last, counted from 1; None never dies.
        when: ``"before"``: that write does not happen. ``"after"``: it happens, and
            nobody hears of it.

    Attributes:
        writes: How many writes were begun. A write is a `save`, an `append_events`, a `claim`,
            a `release`, or any other change.
        dead: Whether it died.
    """

    def __init__(
        self,
        inner: CheckpointStore,
        *,
        dies_at: int | None = None,
        when: Literal["before", "after"] = "before",
    ) -> None:
        if dies_at is not None and dies_at < 1:
            raise ConfigError(f"dies_at must be at least 1, not {dies_at}")
        self.inner = inner
        self.dies_at = dies_at
        self.when = when
        self.writes = 0
        self.dead = False
        self._leases: list[Lease] = []

    async def bury(self) -> None:
        """Free the sessions that the dead process held, so that others can open them."""
        self.dead = True
        leases, self._leases = self._leases, []
        for lease in leases:
            await self.inner.release(lease)
        await trio.lowlevel.checkpoint()

    def _live(self) -> CheckpointStore:
        if self.dead:
            raise ProcessDied
        return self.inner

    def _before(self) -> CheckpointStore:
        self._live()
        self.writes += 1
        if self.writes == self.dies_at and self.when == "before":
            self.dead = True
            raise ProcessDied
        return self.inner

    def _after(self) -> None:
        if self.dead or (self.writes == self.dies_at and self.when == "after"):
            self.dead = True
            raise ProcessDied

    async def claim(self, session_id: str, owner: str, *, takeover: bool = False) -> Lease:
        """See `CheckpointStore.claim`."""
        lease = await self._before().claim(session_id, owner, takeover=takeover)
        self._leases.append(lease)
        self._after()
        return lease

    async def release(self, lease: Lease) -> None:
        """See `CheckpointStore.release`."""
        await self._before().release(lease)
        if lease in self._leases:
            self._leases.remove(lease)
        self._after()

    async def guard(self, lease: Lease) -> None:
        """See `CheckpointStore.guard`."""
        await self._live().guard(lease)

    async def load(self, session_id: str) -> Checkpoint | None:
        """See `CheckpointStore.load`."""
        return await self._live().load(session_id)

    async def save(
        self,
        checkpoint: Checkpoint,
        delta: Sequence[Item] = (),
        *,
        lease: Lease | None = None,
        execution: ExecutionRecord | None = None,
        events: Sequence[Draft] = (),
        contents: Mapping[str, str] | None = None,
    ) -> tuple[Event, ...]:
        """See `CheckpointStore.save`."""
        saved = await self._before().save(
            checkpoint,
            delta,
            lease=lease,
            execution=execution,
            events=events,
            contents=contents,
        )
        self._after()
        return saved

    async def append_events(
        self, session_id: str, events: Sequence[Draft], *, lease: Lease | None = None
    ) -> tuple[Event, ...]:
        """See `CheckpointStore.append_events`."""
        appended = await self._before().append_events(session_id, events, lease=lease)
        self._after()
        return appended

    async def receipt(self, session_id: str, submission_id: str) -> Receipt | None:
        """See `CheckpointStore.receipt`."""
        return await self._live().receipt(session_id, submission_id)

    async def events_after(self, session_id: str, after: int, limit: int) -> JournalSlice:
        """See `CheckpointStore.events_after`."""
        return await self._live().events_after(session_id, after, limit)

    async def event_page(
        self, session_id: str, *, before_sequence: int | None = None, limit: int = 100
    ) -> EventPage:
        """See `CheckpointStore.event_page`."""
        return await self._live().event_page(
            session_id, before_sequence=before_sequence, limit=limit
        )

    async def transcript_page(
        self, session_id: str, *, before_sequence: int | None = None, max_batches: int = 100
    ) -> TranscriptPage:
        """See `CheckpointStore.transcript_page`."""
        return await self._live().transcript_page(
            session_id, before_sequence=before_sequence, max_batches=max_batches
        )

    async def execution_page(
        self, session_id: str, *, before_sequence: int | None = None, limit: int = 100
    ) -> ExecutionPage:
        """See `CheckpointStore.execution_page`."""
        return await self._live().execution_page(
            session_id, before_sequence=before_sequence, limit=limit
        )

    async def load_content(self, digest: str) -> str | None:
        """See `CheckpointStore.load_content`."""
        return await self._live().load_content(digest)

    async def list_sessions(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> SessionPage:
        """See `CheckpointStore.list_sessions`."""
        return await self._live().list_sessions(cursor=cursor, limit=limit)

    async def session_summary(self, session_id: str) -> SessionSummary | None:
        """See `CheckpointStore.session_summary`."""
        return await self._live().session_summary(session_id)

    async def rename_session(self, session_id: str, title: str | None) -> None:
        """See `CheckpointStore.rename_session`."""
        await self._before().rename_session(session_id, title)
        self._after()

    async def search_sessions(
        self, text: str, *, limit: int = 100
    ) -> tuple[SessionSummary, ...]:
        """See `CheckpointStore.search_sessions`."""
        return await self._live().search_sessions(text, limit=limit)

    async def delete_session(self, session_id: str) -> bool:
        """See `CheckpointStore.delete_session`."""
        deleted = await self._before().delete_session(session_id)
        self._after()
        return deleted

    async def prune(self, session_id: str, *, keep_events: int) -> int:
        """See `CheckpointStore.prune`."""
        pruned = await self._before().prune(session_id, keep_events=keep_events)
        self._after()
        return pruned

    async def fork(
        self, parent_id: str, parent_sequence: int, session_id: str
    ) -> SessionSummary:
        """See `CheckpointStore.fork`."""
        summary = await self._before().fork(parent_id, parent_sequence, session_id)
        self._after()
        return summary

    async def rewind(self, session_id: str, turns: int) -> Checkpoint:
        """See `CheckpointStore.rewind`."""
        rewound = await self._before().rewind(session_id, turns)
        self._after()
        return rewound

    async def export_session(self, session_id: str) -> bytes:
        """See `CheckpointStore.export_session`."""
        return await self._live().export_session(session_id)

    async def import_session(self, data: bytes, *, session_id: str | None = None) -> str:
        """See `CheckpointStore.import_session`."""
        imported = await self._before().import_session(data, session_id=session_id)
        self._after()
        return imported

    async def verify(self) -> tuple[str, ...]:
        """See `CheckpointStore.verify`."""
        return await self._live().verify()

    async def backup(self, path: Path | str) -> None:
        """See `CheckpointStore.backup`."""
        await self._live().backup(path)

    async def load_state(self, scope: str, key: str) -> Json:
        """See `CheckpointStore.load_state`."""
        return await self._live().load_state(scope, key)

    async def save_state(self, scope: str, key: str, value: Json) -> None:
        """See `CheckpointStore.save_state`."""
        await self._before().save_state(scope, key, value)
        self._after()

    async def aclose(self) -> None:
        """Close the wrapped store, unless the owner died: then others may still use it."""
        if self.dead:
            await trio.lowlevel.checkpoint()
        else:
            await self.inner.aclose()
