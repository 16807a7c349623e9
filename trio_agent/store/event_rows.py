"""The rows of a journal: of one event, or of several that one save or append added.

Rules:

1.  Neighbours that share a submission make one row, a *pack*, up to `PACK_BYTES`: what
    a row costs, its events cost once. Streamed deltas have rows of their own, since
    they leave the journal again.
2.  A row stands under the number of its last event; the others count back from it.
3.  Of the token counts only the newest is told. The session names it; older ones
    stay in their packs and are passed over.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Final, TypeAlias, cast

import msgspec
from msgspec import Raw, Struct

from trio_agent.errors import ProtocolError
from trio_agent.protocol.codec import CODEC_VERSION
from trio_agent.protocol.events import Event, TokenCount
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.store.checksums import event_sum, item_sum
from trio_agent.store.numbering import Entry, Stream
from trio_agent.store.quoting import item_text, with_text
from trio_agent.store.rows import read_row

PACK: Final = "pack"
"""The kind of a row that holds several events."""

PACK_BYTES: Final = 3_000
"""The most that the bodies in one pack have together: it fits in a page of the file."""

Row: TypeAlias = tuple[Any, ...]

INSERT_EVENT: Final = "INSERT INTO event VALUES(?,?,?,?,?,?,?,?,?,?,?)"
"""The session's row id, then what `rows_of` returns."""

SELECT_EVENTS: Final = (
    "SELECT sequence, at, kind, submission, version, body, sum, item, step, stream FROM event"
    " WHERE session=?"
)
"""What `decode_events` reads; step and stream belong to deltas."""


class Packed(Struct, array_like=True):
    """One event of a pack; a JSON array.

    ``skip`` is its number less the one before it, ``later`` its time less the row's.
    """

    kind: str
    body: Raw
    skip: int = 1
    later: int = 0
    item: int | None = None


_packed: Final = msgspec.json.Decoder(list[Packed])
_encode: Final = msgspec.json.Encoder().encode


def rows_of(numbered: Iterable[tuple[int, Entry]]) -> list[Row]:
    """Return the rows of encoded entries, each with its number, in order."""
    rows: list[Row] = []
    run: list[tuple[int, Entry, bytes]] = []
    submission: str | None = None
    room = 0
    for sequence, entry in numbered:
        body = entry.body or b""
        room -= len(body)
        if room < 0 or entry.step_id is not None or entry.submission_id != submission:
            if run:
                rows.append(_row(run))
            run = []
            submission = entry.submission_id
            room = PACK_BYTES - len(body) if entry.step_id is None else 0
        run.append((sequence, entry, body))
    if run:
        rows.append(_row(run))
    return rows


def _row(run: Sequence[tuple[int, Entry, bytes]]) -> Row:
    number, entry, body = run[0]
    at, submission, item = entry.at_ms, entry.submission_id, entry.item
    if len(run) == 1:
        kind, step = entry.msg.tag, entry.step_id
        stream = None if entry.stream is None else stream_text(entry.stream)
    else:
        kind, step, stream = PACK, None, None
        before = number - 1
        packed: list[Packed] = []
        for number, entry, body in run:
            skip, later = number - before, entry.at_ms - at
            packed.append(Packed(entry.msg.tag, Raw(body), skip, later, entry.item))
            before = number
        body, item = _encode(packed), None
    check = event_sum(kind, body, number, at, submission, item)
    return (number, at, kind, submission, step, stream, CODEC_VERSION, body, check, item)


def stream_text(stream: Stream) -> str:
    """Return the text of a delta row's stream column."""
    parts = (stream.phase, stream.first_ms, stream.last_ms, stream.chunks, stream.size)
    return _encode((*parts, stream.gap_ms)).decode()


def read_stream(text: str) -> Stream:
    """Return what `stream_text` wrote."""
    return Stream(*msgspec.json.decode(text))


class Members(Struct, frozen=True):
    """The events of one row, undecoded, in order, each with its number."""

    row: Row
    numbered: tuple[tuple[int, Packed], ...]

    def told(self, counts_from: int) -> list[int]:
        """Return the numbers of those that are told; see `is_past`."""
        return [n for n, one in self.numbered if not is_past(n, one, counts_from)]

    def after(self, number: int) -> tuple[bytes, int]:
        """Return body and checksum of the row without its events up to *number*."""
        sequence, at, kind, submission, *_ = self.row
        body = _encode([one for n, one in self.numbered if n > number])
        return body, event_sum(kind, body, sequence, at, submission, None)


def members(row: Row) -> Members:
    """Take a row of `SELECT_EVENTS` apart.

    Raises:
        ProtocolError: If it is damaged.
    """
    sequence, at, kind, submission, _, body, check, item, *_ = row
    if not isinstance(kind, str) or not isinstance(body, bytes):
        raise ProtocolError("its kind is no text, or its body is one")
    if event_sum(kind, body, sequence, at, submission, item) != check:
        raise ProtocolError("its checksum does not match")
    if kind != PACK:
        return Members(row, ((sequence, Packed(kind, Raw(body), item=item)),))
    try:
        packed = _packed.decode(body)
    except (msgspec.MsgspecError, UnicodeError) as exc:
        raise ProtocolError(f"a pack of events: {exc}") from None
    found: list[tuple[int, Packed]] = []
    for one in reversed(packed):
        found.append((sequence, one))
        sequence -= one.skip
    return Members(row, tuple(reversed(found)))


def decode_events(
    connection: sqlite3.Connection,
    session: int,
    row: Row,
    *,
    counts_from: int,
    after: int = 0,
    before: int = MAX_INTEGER,
    backwards: bool = False,
) -> Generator[tuple[Event, int]]:
    """Yield the events of a row of `SELECT_EVENTS`, and what each was in bytes.

    Args:
        connection: Reads the items that events quote.
        session: The session's row id.
        row: The row.
        counts_from: The number of the newest token count; older ones are passed over.
        after: Only events behind this number.
        before: Only events before this number.
        backwards: Newest first.

    Raises:
        ProtocolError: If something is damaged.
    """
    _, at, _, submission, version, *_ = row
    numbered = members(row).numbered
    for sequence, one in reversed(numbered) if backwards else numbered:
        if not after < sequence < before or is_past(sequence, one, counts_from):
            continue
        body = bytes(one.body)
        size = len(body)
        msg: Any = read_row(one.kind, version, body)
        if one.item is not None:
            text = _text(connection, session, one.item)
            size += len(text)
            msg = with_text(msg, text)
        event = Event(
            sequence=sequence, recorded_at_ms=at + one.later, submission_id=submission, msg=msg
        )
        yield event, size


def is_past(sequence: int, one: Packed, counts_from: int) -> bool:
    """Whether it is a token count that a newer one took the place of."""
    return one.kind == TokenCount.tag and sequence < counts_from


def _text(connection: sqlite3.Connection, session: int, n: int) -> str:
    """Return the text of an item that an event quotes."""
    found = connection.execute(
        "SELECT kind, version, body, sum FROM item WHERE session=? AND n=?", (session, n)
    ).fetchone()
    if found is None:
        raise ProtocolError(f"it quotes item {n}, which is missing")
    kind, version, body, check = found
    if item_sum(kind, body) != check:
        raise ProtocolError(f"the checksum of item {n}, which it quotes, does not match")
    text = item_text(cast("Any", read_row(kind, version, body)))
    if text is None:
        raise ProtocolError(f"it quotes a {kind}")
    return text
