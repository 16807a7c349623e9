"""`SqliteCheckpoint`: the ledger behind trio's threads.

One connection writes, behind a limiter of one. Readers have connections of their
own, so none ever waits for a writer. Nothing is opened before its first use.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, cast

import msgspec
import trio

from trio_agent import ambient
from trio_agent.errors import (
    CheckpointError,
    ConfigError,
    SessionOwnedError,
    StaleSessionError,
)
from trio_agent.protocol.events import Draft, Event
from trio_agent.protocol.items import Item
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.protocol.text import Json, check_json
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord
from trio_agent.store import catalog, journal, ownership
from trio_agent.store.base import (
    EventPage,
    ExecutionPage,
    JournalSlice,
    Lease,
    Receipt,
    SessionPage,
    SessionSummary,
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
from trio_agent.store.commit import GroupCommit
from trio_agent.store.faults import BUSY_SECONDS, is_busy, told
from trio_agent.store.guarding import Guards
from trio_agent.store.ledger import Ledger, RebaseNeededError
from trio_agent.store.log_size import LogWatch
from trio_agent.store.ownership import Claims, Holder
from trio_agent.store.saving import Base, Job, prepare_append, prepare_save
from trio_agent.store.schema import Synchronous, connect, prepare
from trio_agent.store.threads import RunSync, in_thread

P = ParamSpec("P")
T = TypeVar("T")

READERS: Final = 2
"""Connections that read at the same time: one long read does not hold up the others. More
are slower, since their threads take Python's lock from each other at every row."""

KNOWN_SESSIONS: Final = 4_096
"""Sessions of which the last save is remembered; others cost one more read."""


class SqliteCheckpoint:
    """A `CheckpointStore` in one SQLite file, for any number of tasks and processes.

    Nothing happens before the first use: then the file and its directories are
    created, private to the user, or migrated. Use it as an async context manager,
    or call `aclose`, which also frees the sessions that it still holds. One
    object can be used in successive `trio.run` calls, not in two at once, and not
    in a child process after a fork.

    See `CheckpointStore` for what each method promises.

    Args:
        path: The file; it must be on a local disk.
        synchronous: ``"FULL"``: what was saved survives a power cut. ``"NORMAL"``:
            it survives the death of the process; the newest saves may be lost
            with the power, never in part.
        now_ms: The wall clock, for the times that a list shows; order never comes from it.
        run_sync: Runs blocking calls, `trio.to_thread.run_sync` by default; tests pass one
            that runs them in place.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        synchronous: Synchronous = "FULL",
        now_ms: Callable[[], int] = ambient.now_ms,
        run_sync: RunSync | None = None,
    ) -> None:
        if synchronous not in {"FULL", "NORMAL"}:
            raise ConfigError(f"synchronous must be 'FULL' or 'NORMAL', not {synchronous!r}")
        self._readers: list[sqlite3.Connection] = []
        self._ledger: Ledger | None = None
        self._claims = Claims(now_ms)
        self._path = Path(path).absolute()  # ":memory:" is a name like any other
        self._synchronous: Synchronous = synchronous
        self._now_ms = now_ms
        self._run_sync = run_sync or cast("RunSync", trio.to_thread.run_sync)
        self._write_limiter = trio.CapacityLimiter(1)
        self._read_limiter = trio.CapacityLimiter(READERS)
        self._opening = threading.Lock()
        self._prepared = False
        self._closed = False
        self._pid = os.getpid()
        self._bases: OrderedDict[str, Base] = OrderedDict()
        self._group = GroupCommit(self._write_jobs)
        self._guards = Guards(self._renew, self._held)
        self._log = LogWatch(self._path)

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    async def __aenter__(self) -> Self:
        await self._read(_nothing)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Free what this store still holds, and close its files. Idempotent.

        It closes even when cancelled: no thread of it outlives the call.
        """
        with trio.CancelScope(shield=True):
            await in_thread(self._run_sync, self._close, limiter=self._write_limiter)
        await trio.lowlevel.checkpoint()

    def _close(self) -> None:
        if self._claims.owner is not None and not self._closed:
            with suppress(CheckpointError):
                self._writing(self._claims.dismiss, ())
        self._closed = True
        self._close_files()

    def _close_files(self) -> None:
        self._claims.drop_all()
        while self._readers:
            self._readers.pop().close()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def __del__(self) -> None:
        """Close quietly: a store may be left without `aclose`."""
        if hasattr(self, "_claims"):
            self._close_files()

    # --- threads

    async def _read(
        self, fn: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **_: P.kwargs
    ) -> T:
        return await in_thread(
            self._run_sync, self._reading, fn, args, limiter=self._read_limiter
        )

    def _reading(self, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
        with told(self._path):
            self._ready()
            connection = self._reader()
            try:
                result = fn(connection, *args)
            except BaseException:
                # The traceback may keep a half-read cursor alive, and so an old snapshot.
                connection.close()
                raise
            self._readers.append(connection)
            if self._closed:
                self._close_files()
            return result

    def _reader(self) -> sqlite3.Connection:
        try:
            return self._readers.pop()
        except IndexError:
            return connect(self._path, self._synchronous, wait=BUSY_SECONDS)

    async def _write(
        self, fn: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **_: P.kwargs
    ) -> T:
        return await in_thread(
            self._run_sync, self._writing, fn, args, limiter=self._write_limiter
        )

    def _writing(self, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
        ledger = self._writer()
        try:
            with ledger.transaction() as connection:
                return fn(connection, *args)
        except CheckpointError as exc:
            self._doubt(exc)
            raise

    async def _write_jobs(self, jobs: Sequence[Job]) -> None:
        await in_thread(self._run_sync, self._committing, jobs, limiter=self._write_limiter)

    def _committing(self, jobs: Sequence[Job]) -> None:
        try:
            ledger = self._writer()
        except CheckpointError as exc:
            for job in jobs:
                job.error = exc
            return
        ledger.commit(jobs)
        self._log.look()
        for job in jobs:
            if job.error is not None:
                self._doubt(job.error)

    def _doubt(self, exc: Exception) -> None:
        """After a fault of the file or the disk, trust no connection that saw it."""
        cause = exc.__cause__
        if isinstance(cause, sqlite3.Error) and not is_busy(cause) and self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _writer(self) -> Ledger:
        with told(self._path):
            self._ready()
            if self._ledger is None:
                # no waiting inside SQLite: the ledger takes turns in a fairer way
                connection = connect(self._path, self._synchronous, wait=0)
                self._ledger = Ledger(connection, self._path, self._now_ms)
            return self._ledger

    def _ready(self) -> None:
        """Make the file ready, once."""
        if self._closed:
            raise CheckpointError(f"{self._path}: this store was closed; make a new one")
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"{self._path}: opened by process {self._pid}; make a new store after a fork"
            )
        with self._opening:
            if not self._prepared:
                prepare(self._path)
                self._prepared = True

    # --- ownership

    async def claim(self, session_id: str, owner: str, *, takeover: bool = False) -> Lease:
        """See `CheckpointStore.claim`.

        If the holder runs on another kernel or in another container, nobody can be
        asked whether it lives: the claim watches it for up to 15 s.
        """
        check_id(session_id)
        dead: Holder | None = None
        while True:
            found = await in_thread(
                self._run_sync,
                self._claiming,
                (session_id, owner, takeover, dead),
                limiter=self._write_limiter,
            )
            if isinstance(found, Lease):
                return found
            dead = await self._watched(found)

    def _claiming(self, args: tuple[Any, ...]) -> Lease | Holder:
        try:
            return self._writing(self._claims.take, args)
        except BaseException:
            self._claims.undo()
            raise

    async def _watched(self, found: Holder) -> Holder:
        """Return *found* once it has been still for long enough to be dead.

        Raises:
            SessionOwnedError: If it moves.
        """
        deadline = trio.current_time() + ownership.LEASE_SECONDS
        while trio.current_time() < deadline:
            await trio.sleep(ownership.CHECK_SECONDS)
            now = await self._read(ownership.holder, found.session_id)
            if now is None:
                break
            if now != found:
                raise now.refusal()
        return found  # noqa: ASYNC910

    async def release(self, lease: Lease) -> None:
        """See `CheckpointStore.release`."""
        self._bases.pop(lease.session_id, None)
        self._claims.drop(lease.session_id, lease.incarnation)
        await self._write(ownership.give_back, lease.session_id, lease.incarnation)

    async def guard(self, lease: Lease) -> None:
        """See `CheckpointStore.guard`."""
        await self._guards.watch(lease)
        found = await self._read(ownership.holder, lease.session_id)
        if found is None:
            raise SessionOwnedError(
                f"session {lease.session_id!r} is no longer held by {lease.owner}"
            )
        raise found.refusal()

    async def _renew(self) -> None:  # noqa: ASYNC910
        if self._claims.owner is not None:
            await self._write(self._claims.renew)

    async def _held(self) -> Mapping[str, int]:
        if self._claims.owner is None:
            return {}  # noqa: ASYNC910
        return await self._read(ownership.held, self._claims.owner)

    # --- writing

    async def load(self, session_id: str) -> Checkpoint | None:
        """See `CheckpointStore.load`."""
        check_id(session_id)
        self._bases.pop(session_id, None)
        loaded = await self._read(journal.load, session_id)
        if loaded is None:
            return None
        self._remember(session_id, loaded)
        return loaded.checkpoint

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
        key = checkpoint.session_id
        base = self._bases.get(key)
        check_save(checkpoint, None if base is None else base.checkpoint, execution)
        while True:
            if base is None or base.sequence != checkpoint.sequence - 1:
                base = await self._read(journal.base, key)
            if base is not None:
                if base.sequence != checkpoint.sequence - 1:
                    raise StaleSessionError(
                        f"session {key!r} is at save {base.sequence}; save"
                        f" {checkpoint.sequence} does not follow it"
                    )
                check_context(checkpoint, base.epoch, base.length)
            job = prepare_save(
                checkpoint,
                delta,
                base,
                lease=_own(lease, key),
                execution=execution,
                events=events,
                contents=contents,
            )
            await self._group.submit(job)
            if job.error is None:
                self._remember(key, job.after())
                return job.events()
            self._bases.pop(key, None)
            if not isinstance(job.error, RebaseNeededError):
                raise job.error
            base = None

    def _remember(self, key: str, base: Base) -> None:
        self._bases[key] = base
        self._bases.move_to_end(key)
        if len(self._bases) > KNOWN_SESSIONS:
            self._bases.popitem(last=False)

    async def append_events(
        self, session_id: str, events: Sequence[Draft], *, lease: Lease | None = None
    ) -> tuple[Event, ...]:
        """See `CheckpointStore.append_events`."""
        check_id(session_id)
        job = prepare_append(session_id, events, _own(lease, session_id))
        await self._group.submit(job)
        if job.error is not None:
            raise job.error
        base = self._bases.get(session_id)
        if base is not None and base.events == job.first - 1:
            self._bases[session_id] = base.grown(job)
        return job.events()

    # --- reading

    async def receipt(self, session_id: str, submission_id: str) -> Receipt | None:
        """See `CheckpointStore.receipt`."""
        check_id(session_id)
        return await self._read(journal.receipt, session_id, submission_id)

    async def events_after(self, session_id: str, after: int, limit: int) -> JournalSlice:
        """See `CheckpointStore.events_after`."""
        check_id(session_id)
        check_limit(limit)
        check_position(after, name="after")
        return await self._read(journal.events_after, session_id, after, limit)

    async def event_page(
        self, session_id: str, *, before_sequence: int | None = None, limit: int = 100
    ) -> EventPage:
        """See `CheckpointStore.event_page`."""
        before = _before(session_id, before_sequence)
        check_limit(limit)
        return await self._read(journal.event_page, session_id, before, limit)

    async def transcript_page(
        self, session_id: str, *, before_sequence: int | None = None, max_batches: int = 100
    ) -> TranscriptPage:
        """See `CheckpointStore.transcript_page`."""
        before = _before(session_id, before_sequence)
        check_limit(max_batches, name="max_batches")
        return await self._read(journal.transcript_page, session_id, before, max_batches)

    async def execution_page(
        self, session_id: str, *, before_sequence: int | None = None, limit: int = 100
    ) -> ExecutionPage:
        """See `CheckpointStore.execution_page`."""
        before = _before(session_id, before_sequence)
        check_limit(limit)
        return await self._read(journal.execution_page, session_id, before, limit)

    async def load_content(self, digest: str) -> str | None:
        """See `CheckpointStore.load_content`."""
        return await self._read(journal.content, digest)

    # --- the catalog

    async def list_sessions(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> SessionPage:
        """See `CheckpointStore.list_sessions`."""
        check_limit(limit)
        return await self._read(catalog.list_sessions, check_cursor(cursor), limit)

    async def session_summary(self, session_id: str) -> SessionSummary | None:
        """See `CheckpointStore.session_summary`."""
        check_id(session_id)
        return await self._read(catalog.summary, session_id)

    async def rename_session(self, session_id: str, title: str | None) -> None:
        """See `CheckpointStore.rename_session`."""
        check_id(session_id)
        await self._write(catalog.rename, session_id, title, self._now_ms())

    async def search_sessions(
        self, text: str, *, limit: int = 100
    ) -> tuple[SessionSummary, ...]:
        """See `CheckpointStore.search_sessions`."""
        check_limit(limit)
        if not text.strip():
            raise ConfigError("a search needs a text that is not blank")
        return await self._read(catalog.search, text, limit)

    # --- whole sessions

    async def delete_session(self, session_id: str) -> bool:
        """See `CheckpointStore.delete_session`."""
        check_id(session_id)
        return await self._write(catalog.delete, session_id)

    async def prune(self, session_id: str, *, keep_events: int) -> int:
        """See `CheckpointStore.prune`."""
        check_id(session_id)
        check_position(keep_events, name="keep_events")
        return await self._write(catalog.prune, session_id, keep_events)

    async def fork(
        self, parent_id: str, parent_sequence: int, session_id: str
    ) -> SessionSummary:
        """See `CheckpointStore.fork`."""
        check_id(session_id)
        check_id(parent_id)
        check_position(parent_sequence, name="parent_sequence")
        return await self._write(_fork, parent_id, parent_sequence, session_id, self._now_ms())

    async def rewind(self, session_id: str, turns: int) -> Checkpoint:
        """See `CheckpointStore.rewind`."""
        check_id(session_id)
        return await self._write(catalog.rewind, session_id, turns, self._now_ms())

    async def export_session(self, session_id: str) -> bytes:
        """See `CheckpointStore.export_session`."""
        check_id(session_id)
        return await self._read(_export, session_id)

    async def import_session(self, data: bytes, *, session_id: str | None = None) -> str:
        """See `CheckpointStore.import_session`."""
        if session_id is not None:
            check_id(session_id)
        return await self._write(_import, data, session_id)

    async def verify(self) -> tuple[str, ...]:
        """See `CheckpointStore.verify`."""
        return await self._read(_verify)

    async def backup(self, path: Path | str) -> None:
        """See `CheckpointStore.backup`. In the copy nobody holds a session.

        Raises:
            ConfigError: If *path* exists.
            CheckpointError: If it cannot be written; then nothing is left there.
        """
        target = Path(path)
        await self._read(_backup, target)

    async def load_state(self, scope: str, key: str) -> Json:
        """See `CheckpointStore.load_state`."""
        return await self._read(catalog.load_state, scope, key)

    async def save_state(self, scope: str, key: str, value: Json) -> None:
        """See `CheckpointStore.save_state`."""
        try:
            check_json([scope, key, value], name=f"state {key!r}")
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
        await self._write(catalog.save_state, scope, key, msgspec.json.encode(value))


def _nothing(_: sqlite3.Connection) -> None:
    """Open the file, and do nothing with it."""


def _own(lease: Lease | None, session_id: str) -> Lease | None:
    if lease is not None and lease.session_id != session_id:
        raise StaleSessionError(
            f"session {session_id!r}: the lease of {lease.owner} is for {lease.session_id!r}"
        )
    return lease


def _before(session_id: str, before: int | None) -> int:
    check_id(session_id)
    check_position(before, name="before_sequence")
    return MAX_INTEGER if before is None else before


# What copies whole sessions is loaded by who does, in the thread that does it.


def _fork(
    connection: sqlite3.Connection, parent_id: str, at: int, key: str, now_ms: int
) -> SessionSummary:
    from trio_agent.store.transfer import fork  # noqa: PLC0415

    return fork(connection, parent_id, at, key, now_ms)


def _export(connection: sqlite3.Connection, session_id: str) -> bytes:
    from trio_agent.store.transfer import export  # noqa: PLC0415

    return export(connection, session_id)


def _import(connection: sqlite3.Connection, data: bytes, session_id: str | None) -> str:
    from trio_agent.store.transfer import import_  # noqa: PLC0415

    return import_(connection, data, session_id)


def _verify(connection: sqlite3.Connection) -> tuple[str, ...]:
    from trio_agent.store.audit import verify  # noqa: PLC0415

    return verify(connection)


def _backup(connection: sqlite3.Connection, target: Path) -> None:
    from trio_agent.store.transfer import backup  # noqa: PLC0415

    backup(connection, target)
