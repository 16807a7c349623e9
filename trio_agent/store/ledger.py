"""Every statement that a save or an append runs; synchronous, one transaction a batch.

Rules:

1.  The first statement of each job is its compare-and-set. It names everything that
    the job was worked out from, so what follows can rely on it; a job that loses
    writes nothing, and the others of its batch do not notice.
2.  Numbers come from the row that the compare-and-set returned, never from memory.
3.  Rows of all jobs are collected and written table by table. What must be read
    back (the deltas of a step) is written before.
"""

from __future__ import annotations

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
    event_salt,
    seal,
)
from trio_agent.store.schema import waited

_SET: Final = (
    "UPDATE session SET sequence=?, epoch=?, start=CASE WHEN ? THEN items+1 ELSE start END,"
    " length=?, items=items+?, event_sequence=event_sequence+?, token_before=token_sequence,"
    " token_sequence=CASE WHEN ?>0 THEN event_sequence+? ELSE token_sequence END,"
    " updated_at_ms=?, version=?, head=?, stats=?, small=?, sum=?"
)
_WHERE: Final = " WHERE id=? AND key=? AND sequence=? AND epoch=? AND length=?"
_LEASED: Final = " AND ?=(SELECT incarnation FROM claim WHERE claim.key=session.key)"
_RETURNING: Final = " RETURNING items, event_sequence, token_before, start"
_ADVANCE: Final = {
    (moved, leased): _SET
    + (", changed=?" if moved else "")
    + _WHERE
    + (_LEASED if leased else "")
    + _RETURNING
    for moved in (False, True)
    for leased in (False, True)
}
_CREATE: Final = (
    "INSERT INTO session(key, sequence, first_sequence, epoch, start, length, items,"
    " event_sequence, token_sequence, changed, updated_at_ms, version, head, stats, small,"
    " sum) VALUES(?,?,?,?,1,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT(key) DO NOTHING RETURNING id"
)
_GROW: Final = (
    "UPDATE session SET event_sequence=event_sequence+?, token_before=token_sequence,"
    " token_sequence=CASE WHEN ?>0 THEN event_sequence+? ELSE token_sequence END WHERE key=?"
)
_GROWN: Final = " RETURNING id, event_sequence, token_before"
_APPEND: Final = {False: _GROW + _GROWN, True: _GROW + _LEASED + _GROWN}
_WRITES: Final = {
    "epoch": "INSERT INTO epoch VALUES(?,?,?,?)",
    "item": "INSERT INTO item VALUES(?,?,?,?,?,?,?,?,?,?)",
    "part_gone": "DELETE FROM part WHERE session=? AND slot=? AND ordinal=?",
    "part": "INSERT OR REPLACE INTO part VALUES(?,?,?,?,?,?)",
    "event": "INSERT INTO event VALUES(?,?,?,?,?,?,?,?,?,?)",
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
        begins = base is None or base.epoch != checkpoint.context_epoch
        if base is None:
            last, before = self._create(job), 0
        else:
            last, before = self._advance(job, base, begins=begins)
        row = job.row
        if begins:
            if base is not None:
                if row in self._touched:
                    self._flush()
                self.connection.execute(
                    "UPDATE item SET until=? WHERE session=? AND n>=? AND n<?"
                    " AND since IS NOT NULL AND until IS NULL",
                    (checkpoint.context_epoch, row, base.start, job.start),
                )
            epoch = (row, checkpoint.context_epoch, checkpoint.sequence, job.start)
            self._rows["epoch"].append(epoch)
        n = last - len(job.items)
        for shown, since, kind, body, check in job.items:
            n += 1
            self._rows["item"].append(
                (
                    row,
                    n,
                    checkpoint.sequence,
                    shown,
                    since,
                    None,
                    kind,
                    CODEC_VERSION,
                    body,
                    check,
                )
            )
        self._parts(row, QUEUE, job.queue)
        self._parts(row, CALLS, job.calls)
        for slot, ordinal, body, check in job.parts:
            self._rows["part"].append((row, slot, ordinal, CODEC_VERSION, body, check))
        self._label(job)
        if job.execution is not None:
            self._rows["execution"].append(
                (row, checkpoint.sequence, CODEC_VERSION, job.execution, seal(job.execution))
            )
        for digest, text in job.contents.items():
            self._rows["content"].append((digest, text, seal(text.encode())))
            self._rows["content_use"].append((row, digest))
        self._journal(job, row, before)

    def _create(self, job: Save) -> int:
        """Insert the session's row; return the number of its last item."""
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
                self.now_ms(),
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
        job.start = 1
        job.first = 1
        self._newest = job.row
        return len(job.items)

    def _advance(self, job: Save, base: Base, *, begins: bool) -> tuple[int, int]:
        """Compare and set; return the numbers of the last item and of the old token count."""
        checkpoint = job.checkpoint
        moved = self._newest != base.row
        values: list[Any] = [
            checkpoint.sequence,
            checkpoint.context_epoch,
            begins,
            len(checkpoint.context),
            len(job.items),
            len(job.entries),
            job.token_offset,
            job.token_offset,
            self.now_ms(),
            CODEC_VERSION,
            job.head,
            job.stats,
            job.small,
            job.sum,
        ]
        if moved:
            values.append(self._changed + 1)
        values += [base.row, job.key, checkpoint.sequence - 1, base.epoch, base.length]
        if job.lease is not None:
            values.append(job.lease)
        statement = _ADVANCE[moved, job.lease is not None]
        stored = self.connection.execute(statement, values).fetchone()
        if stored is None:
            raise self._why_lost(job)
        if moved:
            self._changed += 1
            self._newest = base.row
        last, events, before, job.start = stored
        job.row = base.row
        job.first = events - len(job.entries) + 1
        return last, before

    def _append(self, job: Job) -> None:
        values: list[Any] = [len(job.entries), job.token_offset, job.token_offset, job.key]
        if job.lease is not None:
            values.append(job.lease)
        statement = _APPEND[job.lease is not None]
        stored = self.connection.execute(statement, values).fetchone()
        if stored is None:
            found = self.connection.execute("SELECT 1 FROM session WHERE key=?", (job.key,))
            if found.fetchone() is None:
                raise UnknownError(f"there is no session {job.key!r}")
            raise _lost_lease(job)
        row, events, before = stored
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
            if row in self._touched:
                self._flush()
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
        def stored(step_id: str) -> list[Stream]:
            if row in self._touched:
                self._flush()
            found = self.connection.execute(
                "SELECT stream FROM event INDEXED BY event_step WHERE session=? AND step=?"
                " ORDER BY sequence",
                (row, step_id),
            )
            return [Stream(*msgspec.json.decode(text)) for (text,) in found]

        for step_id in settle(job.entries, stored):
            self._rows["delta_gone"].append((row, step_id))
        if job.token_offset:
            self._rows["token_gone"].append((row, token_before))
        events = self._rows["event"]
        for at, entry in enumerate(job.entries):
            sequence = job.first + at
            msg = entry.msg
            if isinstance(msg, SubmissionAccepted):
                accepted = (row, entry.submission_id, sequence, msg.digest)
                self._rows["receipt"].append(accepted)
            if not entry.row:
                continue
            body = job.bodies[at] or write_row(msg)
            salt = event_salt(msg.tag, sequence, entry.at_ms, entry.submission_id)
            events.append(
                (
                    row,
                    sequence,
                    entry.at_ms,
                    msg.tag,
                    entry.submission_id,
                    entry.step_id,
                    None if entry.stream is None else stream_text(entry.stream),
                    CODEC_VERSION,
                    body,
                    seal(body, salt),
                )
            )
        self._touched.add(row)

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
