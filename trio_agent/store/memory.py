"""`MemoryCheckpoint`: sessions in memory, and the model that every other store is held to.

Written to be obviously right: plain lists, one method after the other as the
contract has them. It forgets everything when the process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import trio
from msgspec import Struct, field

from trio_agent import ambient
from trio_agent.errors import (
    ConfigError,
    CorruptStoreError,
    SessionOwnedError,
    StaleSessionError,
    UnknownError,
)
from trio_agent.protocol.events import Draft, Event
from trio_agent.protocol.items import Item
from trio_agent.protocol.text import Json, check_json
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord
from trio_agent.store.base import (
    EventPage,
    ExecutionPage,
    JournalSlice,
    Lease,
    Receipt,
    SessionPage,
    SessionSummary,
    TranscriptBatch,
    TranscriptPage,
)
from trio_agent.store.bounds import (
    check_context,
    check_cursor,
    check_id,
    check_limit,
    check_position,
    check_save,
)
from trio_agent.store.history import (
    Epoch,
    FinishedTurn,
    cut_for_rewind,
    epoch_at,
    first_held,
    forked,
    past_at,
)
from trio_agent.store.numbering import arrange
from trio_agent.store.remembered import RememberedSession
from trio_agent.store.sqlite import SqliteCheckpoint


class _Claim(Struct, eq=False):
    lease: Lease
    held: bool
    since_ms: int
    lost: trio.Event = field(default_factory=trio.Event)


class MemoryCheckpoint:
    """A `CheckpointStore` that keeps everything in this process.

    Several sessions and tasks may use one; it can be used in successive
    `trio.run` calls. See `CheckpointStore` for what each method promises.

    Args:
        now_ms: The wall clock, for the times that a list shows; order never comes from it.
    """

    def __init__(self, *, now_ms: Callable[[], int] = ambient.now_ms) -> None:
        self._now_ms = now_ms
        self._sessions: dict[str, RememberedSession] = {}
        self._claims: dict[str, _Claim] = {}
        self._contents: dict[str, str] = {}
        self._states: dict[tuple[str, str], Json] = {}
        self._incarnations = 0
        self._changes = 0

    async def __aenter__(self) -> Self:
        await trio.lowlevel.checkpoint()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Do nothing: what is in memory stays until the store is forgotten."""
        await trio.lowlevel.checkpoint()

    # --- ownership

    async def claim(self, session_id: str, owner: str, *, takeover: bool = False) -> Lease:
        """See `CheckpointStore.claim`."""
        await trio.lowlevel.checkpoint()
        check_id(session_id)
        held = self._claims.get(session_id)
        if held is not None and held.held:
            if not takeover:
                raise self._owned(session_id)
            held.lost.set()
        self._incarnations += 1
        lease = Lease(session_id=session_id, incarnation=self._incarnations, owner=owner)
        self._claims[session_id] = _Claim(lease, held=True, since_ms=self._now_ms())
        return lease

    async def release(self, lease: Lease) -> None:
        """See `CheckpointStore.release`."""
        claim = self._claims.get(lease.session_id)
        if claim is not None and claim.lease.incarnation == lease.incarnation:
            claim.held = False
        await trio.lowlevel.checkpoint()

    async def guard(self, lease: Lease) -> None:
        """See `CheckpointStore.guard`."""
        await trio.lowlevel.checkpoint()
        claim = self._claims.get(lease.session_id)
        if claim is not None and claim.lease.incarnation == lease.incarnation:
            await claim.lost.wait()
        raise self._owned(lease.session_id)

    def _owned(self, session_id: str) -> SessionOwnedError:
        claim = self._claims.get(session_id)
        by = "nobody" if claim is None else f"{claim.lease.owner} since {claim.since_ms} ms"
        return SessionOwnedError(
            f"session {session_id!r} is held by {by}; close it there, or take it over"
        )

    def _check_free(self, session_id: str) -> None:
        claim = self._claims.get(session_id)
        if claim is not None and claim.held:
            raise self._owned(session_id)

    def _check_lease(self, session_id: str, lease: Lease | None) -> None:
        if lease is None:
            return
        claim = self._claims.get(session_id)
        current = claim is not None and claim.lease.incarnation == lease.incarnation
        if lease.session_id != session_id or not current:
            raise StaleSessionError(
                f"session {session_id!r}: the lease of {lease.owner} is no longer current"
            )

    # --- writing

    async def load(self, session_id: str) -> Checkpoint | None:
        """See `CheckpointStore.load`."""
        await trio.lowlevel.checkpoint()
        check_id(session_id)
        session = self._sessions.get(session_id)
        return None if session is None else session.checkpoint

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
        await trio.lowlevel.checkpoint()
        session = self._sessions.get(checkpoint.session_id)
        check_save(checkpoint, None if session is None else session.checkpoint, execution)
        entries = arrange(events)
        if session is not None:
            stored = session.checkpoint
            if checkpoint.sequence != stored.sequence + 1:
                raise StaleSessionError(
                    f"session {checkpoint.session_id!r} is at save {stored.sequence};"
                    f" save {checkpoint.sequence} does not follow it"
                )
            check_context(checkpoint, stored.context_epoch, len(stored.context))
        self._check_lease(checkpoint.session_id, lease)
        now = self._now_ms()
        if session is None:
            session = RememberedSession(
                checkpoint=checkpoint,
                created_at_ms=now,
                updated_at_ms=now,
                first_sequence=checkpoint.sequence,
                parent_session_id=checkpoint.role.parent_session_id,
            )
            self._sessions[checkpoint.session_id] = session
        session.add(checkpoint, delta)
        session.checkpoint = checkpoint
        self._touch(session, now)
        if execution is not None:
            turn = FinishedTurn(sequence=checkpoint.sequence, record=execution)
            session.executions.append(turn)
        self._contents |= contents or {}
        session.contents |= set(contents or ())
        return session.journal(entries)

    def _touch(self, session: RememberedSession, now: int) -> None:
        self._changes += 1
        session.changed = self._changes
        session.updated_at_ms = now

    async def append_events(
        self, session_id: str, events: Sequence[Draft], *, lease: Lease | None = None
    ) -> tuple[Event, ...]:
        """See `CheckpointStore.append_events`."""
        await trio.lowlevel.checkpoint()
        entries = arrange(events)
        session = self._session(session_id)
        self._check_lease(session_id, lease)
        return session.journal(entries)

    # --- reading

    def _session(self, session_id: str) -> RememberedSession:
        check_id(session_id)
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownError(f"there is no session {session_id!r}")
        return session

    async def receipt(self, session_id: str, submission_id: str) -> Receipt | None:
        """See `CheckpointStore.receipt`."""
        await trio.lowlevel.checkpoint()
        check_id(session_id)
        session = self._sessions.get(session_id)
        return None if session is None else session.receipts.get(submission_id)

    async def events_after(self, session_id: str, after: int, limit: int) -> JournalSlice:
        """See `CheckpointStore.events_after`."""
        await trio.lowlevel.checkpoint()
        check_limit(limit)
        check_position(after, name="after")
        session = self._session(session_id)
        latest = session.event_sequence
        if after > latest:
            raise ConfigError(
                f"session {session_id!r}: position {after} is beyond the newest event {latest}"
            )
        start = session.place(after + 1)
        found = [row.event for row in session.events[start : start + limit + 1]]
        events, more = tuple(found[:limit]), len(found) > limit
        return JournalSlice(
            events=events,
            position=events[-1].sequence if more else latest,
            latest_sequence=latest,
            pruned_through=session.pruned_through,
        )

    async def event_page(
        self, session_id: str, *, before_sequence: int | None = None, limit: int = 100
    ) -> EventPage:
        """See `CheckpointStore.event_page`."""
        await trio.lowlevel.checkpoint()
        check_limit(limit)
        check_position(before_sequence, name="before_sequence")
        session = self._session(session_id)
        end = len(session.events)
        if before_sequence is not None:
            end = session.place(before_sequence)
        found = [row.event for row in session.events[max(0, end - limit - 1) : end]][::-1]
        events = tuple(found[:limit])
        return EventPage(
            events=events,
            latest_sequence=session.event_sequence,
            next_before_sequence=events[-1].sequence if len(found) > limit else None,
        )

    async def transcript_page(
        self, session_id: str, *, before_sequence: int | None = None, max_batches: int = 100
    ) -> TranscriptPage:
        """See `CheckpointStore.transcript_page`."""
        await trio.lowlevel.checkpoint()
        check_limit(max_batches, name="max_batches")
        check_position(before_sequence, name="before_sequence")
        session = self._session(session_id)
        found: dict[int, list[Item]] = {}
        for row in session.rows:
            if row.shown and (before_sequence is None or row.added < before_sequence):
                found.setdefault(row.added, []).append(row.item)
        batches = tuple(
            TranscriptBatch(sequence=sequence, items=tuple(items))
            for sequence, items in list(reversed(found.items()))[:max_batches]
        )
        more = len(found) > max_batches
        return TranscriptPage(
            batches=batches, next_before_sequence=batches[-1].sequence if more else None
        )

    async def execution_page(
        self, session_id: str, *, before_sequence: int | None = None, limit: int = 100
    ) -> ExecutionPage:
        """See `CheckpointStore.execution_page`."""
        await trio.lowlevel.checkpoint()
        check_limit(limit)
        check_position(before_sequence, name="before_sequence")
        session = self._session(session_id)
        found = [
            turn
            for turn in reversed(session.executions)
            if before_sequence is None or turn.sequence < before_sequence
        ]
        more = len(found) > limit
        return ExecutionPage(
            executions=tuple(turn.record for turn in found[:limit]),
            next_before_sequence=found[limit - 1].sequence if more else None,
        )

    async def load_content(self, digest: str) -> str | None:
        """See `CheckpointStore.load_content`."""
        await trio.lowlevel.checkpoint()
        return self._contents.get(digest)

    # --- the catalog

    async def list_sessions(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> SessionPage:
        """See `CheckpointStore.list_sessions`."""
        await trio.lowlevel.checkpoint()
        check_limit(limit)
        before = check_cursor(cursor)
        found = [one for one in self._newest_first() if one.changed < before]
        page = found[:limit]
        return SessionPage(
            sessions=tuple(session.summary() for session in page),
            next_cursor=str(page[-1].changed) if len(found) > limit else None,
        )

    def _newest_first(self) -> list[RememberedSession]:
        return sorted(self._sessions.values(), key=lambda one: one.changed, reverse=True)

    async def session_summary(self, session_id: str) -> SessionSummary | None:
        """See `CheckpointStore.session_summary`."""
        await trio.lowlevel.checkpoint()
        check_id(session_id)
        session = self._sessions.get(session_id)
        return None if session is None else session.summary()

    async def rename_session(self, session_id: str, title: str | None) -> None:
        """See `CheckpointStore.rename_session`."""
        await trio.lowlevel.checkpoint()
        session = self._session(session_id)
        session.title = title
        self._touch(session, self._now_ms())

    async def search_sessions(
        self, text: str, *, limit: int = 100
    ) -> tuple[SessionSummary, ...]:
        """See `CheckpointStore.search_sessions`."""
        await trio.lowlevel.checkpoint()
        check_limit(limit)
        if not text.strip():
            raise ConfigError("a search needs a text that is not blank")
        folded = text.casefold()
        found = [session for session in self._newest_first() if session.holds(folded)]
        return tuple(session.summary() for session in found[:limit])

    # --- whole sessions

    async def delete_session(self, session_id: str) -> bool:
        """See `CheckpointStore.delete_session`."""
        await trio.lowlevel.checkpoint()
        check_id(session_id)
        if session_id not in self._sessions:
            self._check_free(session_id)
            return False
        doomed = [session_id]
        for parent in doomed:
            doomed += [
                key
                for key, one in self._sessions.items()
                if one.checkpoint.role.kind == "subagent"
                and one.checkpoint.role.parent_session_id == parent
                and key not in doomed
            ]
        for key in doomed:
            self._check_free(key)
        for key in doomed:
            del self._sessions[key]
            self._claims.pop(key, None)
        self._states = {at: v for at, v in self._states.items() if at[0] not in doomed}
        used = set[str]().union(*(one.contents for one in self._sessions.values()))
        self._contents = {key: text for key, text in self._contents.items() if key in used}
        return True

    async def prune(self, session_id: str, *, keep_events: int) -> int:
        """See `CheckpointStore.prune`."""
        await trio.lowlevel.checkpoint()
        check_position(keep_events, name="keep_events")
        session = self._session(session_id)
        self._check_free(session_id)
        count = max(0, len(session.events) - keep_events)
        if count:
            session.pruned_through = session.events[count - 1].event.sequence
            del session.events[:count]
        return count

    async def fork(
        self, parent_id: str, parent_sequence: int, session_id: str
    ) -> SessionSummary:
        """See `CheckpointStore.fork`."""
        await trio.lowlevel.checkpoint()
        check_id(session_id)
        check_position(parent_sequence, name="parent_sequence")
        parent = self._session(parent_id)
        newest = parent.checkpoint.sequence
        if not parent.first_sequence <= parent_sequence <= newest:
            raise UnknownError(f"session {parent_id!r} has no save {parent_sequence}")
        if session_id in self._sessions:
            raise ConfigError(f"session {session_id!r} exists already")
        live = parent_sequence == newest
        if live:
            self._check_free(parent_id)
        self._check_free(session_id)
        epoch = epoch_at(parent.epochs, parent_sequence).epoch
        rows = past_at(parent.rows, epoch, parent_sequence)
        context = [row.item for row in rows if row.since is not None]
        checkpoint = forked(parent.checkpoint, context, epoch, session_id, live=live)
        now = self._now_ms()
        child = RememberedSession(
            checkpoint=checkpoint,
            created_at_ms=now,
            updated_at_ms=now,
            first_sequence=0,
            parent_session_id=parent_id,
            parent_sequence=parent_sequence,
            rows=rows,
            epochs=[Epoch(epoch, 0, first_held(rows))],
            contents=set(parent.contents),
        )
        self._sessions[session_id] = child
        self._touch(child, now)
        return child.summary()

    async def rewind(self, session_id: str, turns: int) -> Checkpoint:
        """See `CheckpointStore.rewind`."""
        await trio.lowlevel.checkpoint()
        session = self._session(session_id)
        self._check_free(session_id)
        finished = [turn.record.submission_id for turn in session.executions]
        checkpoint = cut_for_rewind(session.checkpoint, finished, turns)
        session.close(len(checkpoint.context), checkpoint.context_epoch)
        start = session.epochs[-1].start
        session.epochs.append(Epoch(checkpoint.context_epoch, checkpoint.sequence, start))
        session.checkpoint = checkpoint
        self._touch(session, self._now_ms())
        return checkpoint

    async def export_session(self, session_id: str) -> bytes:
        """See `CheckpointStore.export_session`."""
        await trio.lowlevel.checkpoint()
        return self._packed(self._session(session_id))

    def _packed(self, session: RememberedSession) -> bytes:
        from trio_agent.store.packing import pack  # noqa: PLC0415

        return pack(session, self._contents, self._states)

    async def import_session(self, data: bytes, *, session_id: str | None = None) -> str:
        """See `CheckpointStore.import_session`."""
        await trio.lowlevel.checkpoint()
        from trio_agent.store.archive import read_archive  # noqa: PLC0415
        from trio_agent.store.packing import remembered  # noqa: PLC0415

        archive = read_archive(data, session_id)
        key = archive.head.session_id
        check_id(key)
        if key in self._sessions:
            raise ConfigError(f"session {key!r} exists already")
        self._check_free(key)
        session = remembered(archive)
        self._sessions[key] = session
        self._touch(session, archive.updated_at_ms)
        self._contents |= {content.digest: content.text for content in archive.contents}
        self._states |= {(key, state.key): state.value for state in archive.states}
        return key

    async def verify(self) -> tuple[str, ...]:
        """See `CheckpointStore.verify`."""
        await trio.lowlevel.checkpoint()
        from trio_agent.store.archive import read_archive  # noqa: PLC0415

        problems: list[str] = []
        for key, session in sorted(self._sessions.items()):
            try:
                read_archive(self._packed(session))
            except (ConfigError, CorruptStoreError) as exc:
                problems.append(f"session {key!r}: {exc}")
            epoch = session.checkpoint.context_epoch
            if [r.item for r in session.rows if r.held_in(epoch)] != list(
                session.checkpoint.context
            ):
                problems.append(f"session {key!r}: its rows tell another context")
        return tuple(problems)

    async def backup(self, path: Path | str) -> None:
        """Write everything into a new file that `SqliteCheckpoint` opens.

        Raises:
            ConfigError: If *path* exists.
            CheckpointError: If it cannot be written.
        """
        if Path(path).exists():  # noqa: ASYNC240  # what follows opens it in a thread
            raise ConfigError(f"{path} exists; a backup overwrites nothing")
        sessions = [self._packed(session) for session in self._newest_first()]
        states = dict(self._states)
        async with SqliteCheckpoint(path, now_ms=self._now_ms) as copy:
            for packed in reversed(sessions):
                await copy.import_session(packed)
            for (scope, key), value in states.items():
                await copy.save_state(scope, key, value)

    async def load_state(self, scope: str, key: str) -> Json:
        """See `CheckpointStore.load_state`."""
        await trio.lowlevel.checkpoint()
        return self._states.get((scope, key))

    async def save_state(self, scope: str, key: str, value: Json) -> None:
        """See `CheckpointStore.save_state`."""
        await trio.lowlevel.checkpoint()
        try:
            check_json([scope, key, value], name=f"state {key!r}")
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
        self._states[scope, key] = value
