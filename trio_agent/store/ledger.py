"""Every statement that a save or an append runs; synchronous, one transaction a batch.

Rules:

1.  The first statement of each job is its compare-and-set. It names everything that
    the job was worked out from, so what follows can rely on it; a job that loses
    writes nothing, and the others of its batch do not notice.
2.  Of what is stored, memory is trusted as far as the compare-and-set names it: nothing
    but a save, which raises the sequence, changes rows of items; nothing but an event,
    which raises its own sequence, changes the journal.
3.  Rows of all jobs are collected and written table by table. What must be read
    back (the deltas of a step) is written before.
4.  Saves of many sessions are compared and set by one call. If one of them loses, the
    transaction begins anew, one after the other: that tells which.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

from trio_agent.errors import (
    AgentError,
    CheckpointError,
    ConfigError,
    StaleSessionError,
    UnknownError,
)
from trio_agent.protocol.codec import CODEC_VERSION
from trio_agent.protocol.events import ModelStepCompleted
from trio_agent.store.checksums import seal
from trio_agent.store.event_rows import INSERT_EVENT, read_stream
from trio_agent.store.faults import is_ours_alone, told
from trio_agent.store.numbering import Stream, settle
from trio_agent.store.rows import write_row
from trio_agent.store.saving import CALLS, QUEUE, Base, Job, PartsChange, Save
from trio_agent.store.schema import waited

_SET: Final = (
    "UPDATE session SET sequence=?, epoch=?, start=?, length=?, items=?, event_sequence=?,"
    " token_sequence=?, version=?, head=?, stats=?, small=?, sum=?, updated_at_ms=?"
)
_WHERE: Final = " WHERE id=? AND sequence=? AND event_sequence=?"
_LEASED: Final = " AND ?=(SELECT incarnation FROM claim WHERE claim.key=session.key)"
_ADVANCE: Final = {
    (moved, leased): _SET
    + (", changed=?" if moved else "")
    + _WHERE
    + (_LEASED if leased else "")
    for moved in (False, True)
    for leased in (False, True)
}
_CREATE: Final = (
    "INSERT INTO session(key, sequence, first_sequence, epoch, start, length, items,"
    " event_sequence, token_sequence, changed, updated_at_ms, version, head, stats, small,"
    " sum) VALUES(?,?,?,?,1,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT(key) DO NOTHING RETURNING id"
)
_GROW: Final = (
    "UPDATE session SET event_sequence=event_sequence+?,"
    " token_sequence=CASE WHEN ?>0 THEN event_sequence+? ELSE token_sequence END WHERE key=?"
)
_GROWN: Final = " RETURNING id, event_sequence"
_APPEND: Final = {False: _GROW + _GROWN, True: _GROW + _LEASED + _GROWN}
_WRITES: Final = {
    "epoch": "INSERT INTO epoch VALUES(?,?,?,?)",
    "item": "INSERT INTO item VALUES(?,?,?,?,?,NULL,?,?,?,?)",
    "part_gone": "DELETE FROM part WHERE session=? AND slot=? AND ordinal=?",
    "part": "INSERT OR REPLACE INTO part VALUES(?,?,?,?,?,?)",
    "event": INSERT_EVENT,
    "delta_gone": "DELETE FROM event INDEXED BY event_step WHERE session=? AND step=?",
    "execution": "INSERT INTO execution VALUES(?,?,?,?,?)",
    "receipt": "INSERT OR IGNORE INTO receipt VALUES(?,?,?,?)",
    "content": "INSERT OR IGNORE INTO content VALUES(?,?,?)",
    "content_use": "INSERT OR IGNORE INTO content_use VALUES(?,?)",
}
"""In the order in which they run."""


_WIDE: Final = {
    name: [
        (count, one[: one.index("(")] + ",".join([one[one.index("(") :]] * count))
        for count in (64, 16, 4)
    ]
    for name in ("item", "event")
    for one in (_WRITES[name],)
}
"""The same for many rows at once. Each statement gives Python's lock away and must get it
back, from a trio thread that is busy when many sessions save: fewer are faster."""


class _LostError(Exception):
    """One of several saves lost, which one is not known."""


class RebaseNeededError(Exception):
    """A save was worked out from numbers that are no longer stored; work it out again."""


class Ledger:
    """The one writing connection of a store.

    Args:
        connection: Owned from here on; `close` it.
        path: For messages.
        now_ms: The wall clock, for the times that a list shows.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, now_ms: Callable[[], int]
    ) -> None:
        self.connection = connection
        self.path = path
        self.now_ms = now_ms
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in _WRITES}
        self._touched: set[int] = set()
        self._newest = 0
        self._changed = 0
        self._now = 0

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Hold the write lock for a block; commit at its end, roll back if it raises.

        Raises:
            CheckpointError: If the lock was not to be had, or SQLite failed.
        """
        connection = self.connection
        with told(self.path):
            waited(lambda: connection.execute("BEGIN IMMEDIATE"))
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def commit(self, jobs: Sequence[Job]) -> None:
        """Write *jobs* in one transaction; each gets its numbers or its error."""
        for job in jobs:
            job.error = None
        try:
            try:
                with self.transaction():
                    self._apply(jobs, self._together(jobs))
            except _LostError:
                with self.transaction():
                    self._apply(jobs, [])
        except (AgentError, ArithmeticError) as exc:
            if len(jobs) > 1 and is_ours_alone(exc.__cause__ or exc):
                for job in jobs:  # one of them cannot be written: let it fail alone
                    self.commit([job])
                return
            for job in jobs:
                job.error = _told(exc)

    def _together(self, jobs: Sequence[Job]) -> Sequence[tuple[Save, Base]]:
        """Return the saves among *jobs* that may go first, all at once."""
        appended = {job.key for job in jobs if not isinstance(job, Save)}
        together = [
            (job, job.base)
            for job in jobs
            if isinstance(job, Save) and job.base is not None and job.key not in appended
        ]
        return together if len(together) > 1 else ()

    def _apply(self, jobs: Sequence[Job], together: Sequence[tuple[Save, Base]]) -> None:
        for rows in self._rows.values():
            rows.clear()  # what a transaction that failed has left
        self._touched.clear()
        self._now = self.now_ms()
        newest = self.connection.execute(
            "SELECT id, changed FROM session ORDER BY changed DESC LIMIT 1"
        )
        self._newest, self._changed = newest.fetchone() or (0, 0)
        if together:
            self._advance_all(together)
        ahead = {id(job) for job, _ in together}
        for job in jobs:
            try:
                if not isinstance(job, Save):
                    self._append(job)
                    continue
                if job.base is None:
                    self._create(job)
                elif id(job) not in ahead:
                    self._advance(job, job.base)
                self._collect(job)
            except (StaleSessionError, UnknownError, RebaseNeededError) as exc:
                job.error = exc
        self._flush()

    def _collect(self, job: Save) -> None:
        """Collect the rows of a save that has won."""
        row, rows = job.row, self._rows
        if job.begins:
            checkpoint, base = job.checkpoint, job.base
            if base is not None:
                self.connection.execute(
                    "UPDATE item SET until=? WHERE session=? AND n>=? AND n<?"
                    " AND since IS NOT NULL AND until IS NULL",
                    (checkpoint.context_epoch, row, base.start, job.start),
                )
            rows["epoch"].append(
                (row, checkpoint.context_epoch, checkpoint.sequence, job.start)
            )
        rows["item"] += [(row, *item) for item in job.items]
        for slot, parts in ((QUEUE, job.queue), (CALLS, job.calls)):
            if parts.wipe or parts.deleted:
                self._clear(row, slot, parts)
        for slot, ordinal, body, check in job.parts:
            rows["part"].append((row, slot, ordinal, CODEC_VERSION, body, check))
        if job.cold is not None:
            self._label(job, job.cold)
        if job.execution is not None:
            rows["execution"].append(
                (
                    row,
                    job.checkpoint.sequence,
                    CODEC_VERSION,
                    job.execution,
                    seal(job.execution),
                )
            )
        for digest, text in job.contents.items():
            rows["content"].append((digest, text, seal(text.encode())))
            rows["content_use"].append((row, digest))
        self._journal(job, row)

    def _create(self, job: Save) -> None:
        """Insert the session's row."""
        if job.lease is not None and self._incarnation(job.key) != job.lease:
            raise _lost_lease(job)
        checkpoint = job.checkpoint
        self._changed += 1
        created = self.connection.execute(
            _CREATE,
            (
                job.key,
                checkpoint.sequence,
                checkpoint.sequence,
                checkpoint.context_epoch,
                len(checkpoint.context),
                len(job.items),
                job.last_event,
                job.token_sequence,
                self._changed,
                self._now,
                CODEC_VERSION,
                job.head,
                job.stats,
                job.small,
                job.sum,
            ),
        ).fetchone()
        if created is None:
            raise RebaseNeededError
        (job.row,) = created
        self._newest = job.row

    def _advance_all(self, saves: Sequence[tuple[Save, Base]]) -> None:
        """Compare and set several at once.

        Raises:
            _LostError: If any of them lost.
        """
        leased: dict[bool, list[Sequence[Any]]] = {False: [], True: []}
        for job, base in saves:
            self._changed += 1
            values = self._numbers(job, base, self._changed)
            leased[job.lease is not None].append(values)
            self._newest = job.row
        for with_lease, rows in leased.items():
            if rows:
                statement = _ADVANCE[True, with_lease]
                if self.connection.executemany(statement, rows).rowcount != len(rows):
                    raise _LostError

    def _advance(self, job: Save, base: Base) -> None:
        """Compare and set."""
        moved = () if self._newest == base.row else (self._changed + 1,)
        values = self._numbers(job, base, *moved)
        statement = _ADVANCE[bool(moved), job.lease is not None]
        if self.connection.execute(statement, values).rowcount != 1:
            raise self._why_lost(job)
        if moved:
            self._changed += 1
            self._newest = base.row

    def _numbers(self, job: Save, base: Base, *changed: int) -> tuple[Any, ...]:
        """Return what a statement of `_ADVANCE` asks for."""
        checkpoint = job.checkpoint
        return (
            checkpoint.sequence,
            checkpoint.context_epoch,
            job.start,
            len(checkpoint.context),
            job.last,
            job.last_event,
            job.token_sequence or base.tokens,
            CODEC_VERSION,
            job.head,
            job.stats,
            job.small,
            job.sum,
            self._now,
            *changed,
            base.row,
            base.sequence,
            base.events,
            *(() if job.lease is None else (job.lease,)),
        )

    def _append(self, job: Job) -> None:
        count, tokens = len(job.new.entries), job.new.token_offset
        values: list[Any] = [count, tokens, tokens, job.key]
        if job.lease is not None:
            values.append(job.lease)
        statement = _APPEND[job.lease is not None]
        stored = self.connection.execute(statement, values).fetchone()
        if stored is None:
            known = self.connection.execute("SELECT 1 FROM session WHERE key=?", (job.key,))
            if known.fetchone() is None:
                raise UnknownError(f"there is no session {job.key!r}")
            raise _lost_lease(job)
        row, events = stored
        job.first = events - count + 1
        self._journal(job, row)

    def _why_lost(self, job: Save) -> Exception:
        if job.lease is not None and self._incarnation(job.key) != job.lease:
            return _lost_lease(job)
        found = self.connection.execute("SELECT sequence FROM session WHERE key=?", (job.key,))
        stored = found.fetchone()
        if stored is not None and stored[0] != job.checkpoint.sequence - 1:
            return StaleSessionError(
                f"session {job.key!r} is at save {stored[0]}; save"
                f" {job.checkpoint.sequence} does not follow it"
            )
        return RebaseNeededError()

    def _incarnation(self, key: str) -> int | None:
        found = self.connection.execute("SELECT incarnation FROM claim WHERE key=?", (key,))
        claim = found.fetchone()
        return None if claim is None else claim[0]

    def _clear(self, row: int, slot: int, parts: PartsChange[Any]) -> None:
        if parts.wipe:
            self.connection.execute("DELETE FROM part WHERE session=? AND slot=?", (row, slot))
        for ordinal in parts.deleted:
            self._rows["part_gone"].append((row, slot, ordinal))

    def _label(self, job: Save, cold: tuple[Any, ...]) -> None:
        if job.base is None:
            role = job.checkpoint.role
            self.connection.execute(
                "INSERT INTO label(session, created_at_ms, parent, subagent,"
                " first_user_message, context, version, body, sum)"
                " SELECT id, updated_at_ms, ?,?,?,?,?,?,? FROM session WHERE id=?",
                (role.parent_session_id, role.kind == "subagent", *cold, job.row),
            )
        else:
            self.connection.execute(
                "UPDATE label SET first_user_message=?, context=?, version=?, body=?, sum=?"
                " WHERE session=?",
                (*cold, job.row),
            )

    def _journal(self, job: Job, row: int) -> None:
        new = job.new
        if new.completes:
            for step_id in settle(new.entries, functools.partial(self._streams, row)):
                self._rows["delta_gone"].append((row, step_id))
            for entry in new.entries:
                if isinstance(entry.msg, ModelStepCompleted):
                    entry.body = write_row(entry.msg)
        for place, submission, digest in new.receipts:
            self._rows["receipt"].append((row, submission, job.first + place, digest))
        events = new.rows(job.first) if job.event_rows is None else job.event_rows
        self._rows["event"] += [(row, *event) for event in events]
        self._touched.add(row)

    def _streams(self, row: int, step_id: str) -> list[Stream]:
        """Return the streams of a step that are in the journal already."""
        if row in self._touched:
            self._flush()
        found = self.connection.execute(
            "SELECT stream FROM event INDEXED BY event_step WHERE session=? AND step=?"
            " ORDER BY sequence",
            (row, step_id),
        )
        return [read_stream(text) for (text,) in found]

    def _flush(self) -> None:
        """Write the collected rows, table by table."""
        for name, statement in _WRITES.items():
            rows = self._rows[name]
            if not rows:
                continue
            at = 0
            if name in _WIDE:
                for count, wide in _WIDE[name]:
                    while len(rows) - at >= count:
                        values = list(chain.from_iterable(rows[at : at + count]))
                        self.connection.execute(wide, values)
                        at += count
            if at < len(rows):
                self.connection.executemany(statement, rows[at:])
            rows.clear()
        self._touched.clear()


def _lost_lease(job: Job) -> StaleSessionError:
    return StaleSessionError(
        f"session {job.key!r}: lease {job.lease} is no longer current; another opener took it"
    )


def _told(exc: Exception) -> Exception:
    """Return the error for one of several tasks: each adds a traceback to its own."""
    if isinstance(exc, ArithmeticError):
        refusal = ConfigError(f"a number is too large for the store: {exc}")
        refusal.__cause__ = exc
        return refusal
    if not isinstance(exc, CheckpointError):
        return exc
    copy = type(exc)(*exc.args)
    copy.__cause__ = exc.__cause__
    return copy
