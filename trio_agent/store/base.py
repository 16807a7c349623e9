"""`CheckpointStore`: the contract of durable storage, and the records it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from trio_agent.protocol.events import Draft, Event, SessionContext
from trio_agent.protocol.items import Item
from trio_agent.protocol.text import Json
from trio_agent.record import Record
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord, ExecutionStats


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Lease(Record):
    """The right to write one session. ``incarnation`` grows with every opening.

    Only the newest incarnation of a session can write; ``owner`` is a label for
    people, such as ``"pid 12 on host a"``.
    """

    session_id: str
    incarnation: int
    owner: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Receipt(Record):
    """What became of a submission. ``sequence`` numbers its `SubmissionAccepted`.

    ``status`` is ``"accepted"``, or ``"duplicate"`` when the same id had been
    accepted before: then nothing happened this time.
    """

    submission_id: str
    status: str
    sequence: int
    digest: str = ""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TranscriptBatch(Record):
    """The transcript items that one save added; ``sequence`` is the checkpoint's."""

    sequence: int
    items: tuple[Item, ...]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TranscriptPage(Record):
    """Batches, newest first; ``next_before_sequence`` continues towards the past."""

    batches: tuple[TranscriptBatch, ...]
    next_before_sequence: int | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class EventPage(Record):
    """Events, newest first. ``latest_sequence`` counts numbers that left no row, too."""

    events: tuple[Event, ...]
    latest_sequence: int
    next_before_sequence: int | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class JournalSlice(Record):
    """Events after a position, oldest first.

    ``position`` is where to go on: the last number that this slice covers, rows
    or not. ``pruned_through`` is the last number whose event was deleted on
    purpose, 0 if none: a reader that asks for less meets a gap.
    """

    events: tuple[Event, ...]
    position: int
    latest_sequence: int
    pruned_through: int = 0


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ExecutionPage(Record):
    """Finished turns, newest first."""

    executions: tuple[ExecutionRecord, ...]
    next_before_sequence: int | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class SessionSummary(Record):
    """One session as a list shows it; nothing of its context is read."""

    session_id: str
    sequence: int
    latest_event_sequence: int
    title: str | None
    first_user_message: str | None
    session_context: SessionContext
    execution_stats: ExecutionStats
    parent_session_id: str | None = None
    parent_sequence: int | None = None
    subagent: bool = False
    created_at_ms: int
    updated_at_ms: int


@attrs.frozen(kw_only=True, eq=False, repr=False)
class SessionPage(Record):
    """Sessions, most recently changed first; pass ``next_cursor`` to go on."""

    sessions: tuple[SessionSummary, ...]
    next_cursor: str | None = None


class CheckpointStore(Protocol):
    """Durable sessions.

    Every method is a checkpoint. A call that raises `trio.Cancelled` did not
    happen; a call that was under way when cancelled completes and returns.
    Everything one call writes is written in one transaction or not at all.
    Engine errors leave as `CheckpointError` or a subclass, the original as cause;
    impossible arguments (a limit of 0, a negative position) are `ConfigError`.

    A *lease* fences a save: with one, the store refuses with
    `StaleSessionError` unless the lease is the session's newest; without one a
    save is compare-and-set on the sequence alone.
    """

    async def claim(self, session_id: str, owner: str, *, takeover: bool = False) -> Lease:
        """Take the right to write a session, which need not exist yet.

        Raises:
            SessionOwnedError: If a live owner holds it and *takeover* is false.
        """
        ...

    async def release(self, lease: Lease) -> None:
        """Give a lease back, so that the next opener need not ask who lives.

        Never fails because the lease is gone already. In this process the session is free
        from the call on, also if it is cancelled or fails; others may have to wait until the
        store can tell them, or to take the session over.
        """
        ...

    async def guard(self, lease: Lease) -> None:
        """Keep *lease* alive until cancelled; return never.

        Raises:
            SessionOwnedError: As soon as somebody else took the session.
        """
        ...

    async def load(self, session_id: str) -> Checkpoint | None:
        """Return the newest checkpoint, validated, or None if there is no such session.

        Raises:
            CorruptStoreError: If what is stored is unreadable or contradicts itself.
        """
        ...

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
        """Replace the checkpoint, in one transaction with everything that belongs to it.

        *delta* joins the transcript, *execution* the finished turns, *events* the
        journal; *contents* (digest to text) is stored once for all sessions. A
        `SubmissionAccepted` among the events leaves a receipt.

        A session that does not exist yet may be saved at any sequence; afterwards
        the sequence must be exactly the stored one plus 1. Within one context epoch
        the context only grows; a higher epoch replaces it.

        Returns:
            The events with their numbers, transient ones included.

        Raises:
            StaleSessionError: If the sequence or the lease is not current.
            CorruptStoreError: If *checkpoint* breaks a rule of `validate_checkpoint`.
        """
        ...

    async def append_events(
        self, session_id: str, events: Sequence[Draft], *, lease: Lease | None = None
    ) -> tuple[Event, ...]:
        """Append to the journal of an existing session, leaving its checkpoint alone.

        Raises:
            StaleSessionError: If the lease is not current.
            UnknownError: If there is no such session.
        """
        ...

    async def receipt(self, session_id: str, submission_id: str) -> Receipt | None:
        """Return the receipt of a submission accepted earlier, with status ``"duplicate"``."""
        ...

    async def events_after(self, session_id: str, after: int, limit: int) -> JournalSlice:
        """Return at most *limit* events numbered above *after*, oldest first.

        Fewer, if they are long: ``position`` is where to go on, and it is the end only
        if it is ``latest_sequence``.

        Raises:
            ConfigError: If *after* is negative or beyond the newest number.
            UnknownError: If there is no such session.
        """
        ...

    async def event_page(
        self, session_id: str, *, before_sequence: int | None = None, limit: int = 100
    ) -> EventPage:
        """Return events below *before_sequence*, newest first."""
        ...

    async def transcript_page(
        self, session_id: str, *, before_sequence: int | None = None, max_batches: int = 100
    ) -> TranscriptPage:
        """Return transcript batches below *before_sequence*, newest first."""
        ...

    async def execution_page(
        self, session_id: str, *, before_sequence: int | None = None, limit: int = 100
    ) -> ExecutionPage:
        """Return finished turns that ended below checkpoint *before_sequence*, newest first."""
        ...

    async def load_content(self, digest: str) -> str | None:
        """Return a text that a save stored as content, or None."""
        ...

    async def list_sessions(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> SessionPage:
        """Return sessions by last change, newest first."""
        ...

    async def session_summary(self, session_id: str) -> SessionSummary | None:
        """Return one session's summary without reading its context."""
        ...

    async def rename_session(self, session_id: str, title: str | None) -> None:
        """Give a session a title, or None for its first message. Needs no lease."""
        ...

    async def search_sessions(
        self, text: str, *, limit: int = 100
    ) -> tuple[SessionSummary, ...]:
        """Return sessions whose title, first message or transcript holds *text*."""
        ...

    async def delete_session(self, session_id: str) -> bool:
        """Delete a session and its subagents' sessions; a user's forks stay. False if absent.

        Raises:
            SessionOwnedError: If a live owner holds one of them.
        """
        ...

    async def prune(self, session_id: str, *, keep_events: int) -> int:
        """Delete all but the newest *keep_events* journal rows; receipts stay.

        Returns how many.

        Raises:
            SessionOwnedError: If a live owner holds it.
        """
        ...

    async def fork(
        self, parent_id: str, parent_sequence: int, session_id: str
    ) -> SessionSummary:
        """Make a new session from the transcript of another up to a save, at sequence 0.

        Raises:
            UnknownError: If there is no such parent or save.
            ConfigError: If the new id exists, or a call is open at that save.
            SessionOwnedError: If it forks the live head of an owned session.
        """
        ...

    async def rewind(self, session_id: str, turns: int) -> Checkpoint:
        """Take the last *turns* turns out of the context (a new epoch); the journal stays.

        Raises:
            SessionOwnedError: If a live owner holds it.
            ConfigError: If it has fewer turns, or one is running.
        """
        ...

    async def export_session(self, session_id: str) -> bytes:
        """Return everything about a session as one JSON document."""
        ...

    async def import_session(self, data: bytes, *, session_id: str | None = None) -> str:
        """Store an exported session, under another id if given. Returns the id.

        Raises:
            ConfigError: If the id exists. ProtocolError: If *data* is not an export.
        """
        ...

    async def verify(self) -> tuple[str, ...]:
        """Check the whole store; returns one sentence a problem, none if it is sound."""
        ...

    async def backup(self, path: Path | str) -> None:
        """Write a whole copy while the store is in use."""
        ...

    async def load_state(self, scope: str, key: str) -> Json:
        """Return a value that `save_state` stored, or None."""
        ...

    async def save_state(self, scope: str, key: str, value: Json) -> None:
        """Store a JSON value outside any session; the last write wins."""
        ...

    async def aclose(self) -> None:
        """Close files. Idempotent; closes even when cancelled."""
        ...
