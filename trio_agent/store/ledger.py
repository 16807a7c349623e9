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
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

from trio_agent.errors import (
    AgentError,
    CheckpointError,
    ConfigError,
    StaleSessionError,
    UnknownError,
)
from trio_agent.protocol.codec import CODEC_VERSION
from trio_agent.protocol.events import SubmissionAccepted
from trio_agent.store.faults import is_ours_alone, told
from trio_agent.store.numbering import Stream, settle
from trio_agent.store.rows import write_row
from trio_agent.store.saving import (
    CALLS,
    QUEUE,
    Base,
    Job,
    PartsChange,
    Save,
    event_sum,
    seal,
)
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
    "event": "INSERT INTO event VALUES(?,?,?,?,?,?,?,?,?,?,?)",
    "token_gone": "DELETE FROM event WHERE session=? AND sequence=? AND kind='token_count'",
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
            with self.transaction():
                self._apply(jobs)
        except (AgentError, ArithmeticError) as exc:
            if len(jobs) > 1 and is_ours_alone(exc.__cause__ or exc):
                for job in jobs:  # one of them cannot be written: let it fail alone
                    self.commit([job])
                return
            for job in jobs:
                job.error = _told(exc)

    def _apply(self, jobs: Sequence[Job]) -> None:
        for rows in self._rows.values():
            rows.clear()  # what a transaction that failed has left
        self._touched.clear()
        self._now = self.now_ms()
        newest = self.connection.execute(
            "SELECT id, changed FROM session ORDER BY changed DESC LIMIT 1"
        )
        self._newest, self._changed = newest.fetchone() or (0, 0)
        for job in jobs:
            try:
                if isinstance(job, Save):
                    self._save(job)
                else:
                    self._append(job)
            except (StaleSessionError, UnknownError, RebaseNeededError) as exc:
                job.error = exc
        self._flush()

    def _save(self, job: Save) -> None:
        checkpoint, base = job.checkpoint, job.base
        if base is None:
            self._create(job)
        else:
            self._advance(job, base)
        row, sequence, rows = job.row, checkpoint.sequence, self._rows
        if job.begins:
            if base is not None:
                self.connection.execute(
                    "UPDATE item SET until=? WHERE session=? AND n>=? AND n<?"
                    " AND since IS NOT NULL AND until IS NULL",
                    (checkpoint.context_epoch, row, base.start, job.start),
                )
            rows["epoch"].append((row, checkpoint.context_epoch, sequence, job.start))
        n = job.last - len(job.items)
        for shown, since, kind, body, check in job.items:
            n += 1
            rows["item"].append(
                (row, n, sequence, shown, since, kind, CODEC_VERSION, body, check)
            )
        self._parts(row, QUEUE, job.queue)
        self._parts(row, CALLS, job.calls)
        for slot, ordinal, body, check in job.parts:
            rows["part"].append((row, slot, ordinal, CODEC_VERSION, body, check))
        self._label(job)
        if job.execution is not None:
            rows["execution"].append(
                (row, sequence, CODEC_VERSION, job.execution, seal(job.execution))
            )
        for digest, text in job.contents.items():
            rows["content"].append((digest, text, seal(text.encode())))
            rows["content_use"].append((row, digest))
        self._journal(job, row, 0 if base is None else base.tokens)

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
                len(job.entries),
                job.token_offset,
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

    def _advance(self, job: Save, base: Base) -> None:
        """Compare and set."""
        checkpoint = job.checkpoint
        moved = self._newest != base.row
        values: list[Any] = [
            checkpoint.sequence,
            checkpoint.context_epoch,
            job.start,
            len(checkpoint.context),
            job.last,
            base.events + len(job.entries),
            job.token_sequence or base.tokens,
            CODEC_VERSION,
            job.head,
            job.stats,
            job.small,
            job.sum,
            self._now,
        ]
        if moved:
            values.append(self._changed + 1)
        values += (base.row, base.sequence, base.events)
        if job.lease is not None:
            values.append(job.lease)
        statement = _ADVANCE[moved, job.lease is not None]
        if self.connection.execute(statement, values).rowcount != 1:
            raise self._why_lost(job)
        if moved:
            self._changed += 1
            self._newest = base.row

    def _append(self, job: Job) -> None:
        before = 0
        if job.token_offset:
            found = self.connection.execute(
                "SELECT token_sequence FROM session WHERE key=?", (job.key,)
            ).fetchone()
            before = found[0] if found else 0
        values: list[Any] = [len(job.entries), job.token_offset, job.token_offset, job.key]
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
        job.first = events - len(job.entries) + 1
        self._journal(job, row, before)

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

    def _parts(self, row: int, slot: int, parts: PartsChange[Any]) -> None:
        if parts.wipe:
            self.connection.execute("DELETE FROM part WHERE session=? AND slot=?", (row, slot))
        for ordinal in parts.deleted:
            self._rows["part_gone"].append((row, slot, ordinal))

    def _label(self, job: Save) -> None:
        if job.base is None:
            role = job.checkpoint.role
            self.connection.execute(
                "INSERT INTO label(session, created_at_ms, parent, subagent,"
                " first_user_message, context, version, body, sum)"
                " SELECT id, updated_at_ms, ?,?,?,?,?,?,? FROM session WHERE id=?",
                (
                    role.parent_session_id,
                    role.kind == "subagent",
                    *(job.cold or ()),
                    job.row,
                ),
            )
        elif job.cold is not None:
            self.connection.execute(
                "UPDATE label SET first_user_message=?, context=?, version=?, body=?, sum=?"
                " WHERE session=?",
                (*job.cold, job.row),
            )

    def _journal(self, job: Job, row: int, token_before: int) -> None:
        if job.completes:
            for step_id in settle(job.entries, functools.partial(self._streams, row)):
                self._rows["delta_gone"].append((row, step_id))
        if job.token_offset:
            self._rows["token_gone"].append((row, token_before))
        events = self._rows["event"]
        for sequence, entry in enumerate(job.entries, job.first):
            msg, submission = entry.msg, entry.submission_id
            if isinstance(msg, SubmissionAccepted):
                self._rows["receipt"].append((row, submission, sequence, msg.digest))
            if not entry.row:
                continue
            kind, at_ms = msg.tag, entry.at_ms
            body = entry.body or write_row(msg)
            events.append(
                (
                    row,
                    sequence,
                    at_ms,
                    kind,
                    submission,
                    entry.step_id,
                    None if entry.stream is None else stream_text(entry.stream),
                    CODEC_VERSION,
                    body,
                    event_sum(kind, body, sequence, at_ms, submission, entry.item),
                    entry.item,
                )
            )
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


def stream_text(stream: Stream) -> str:
    """Return the text of a delta row's stream column."""
    parts = (stream.phase, stream.first_ms, stream.last_ms, stream.chunks, stream.size)
    return msgspec.json.encode((*parts, stream.gap_ms)).decode()


def read_stream(text: str) -> Stream:
    """Return what `stream_text` wrote."""
    return Stream(*msgspec.json.decode(text))


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
