"""The checksum of every row: of its body, and of what stands beside it and matters."""

from __future__ import annotations

import zlib
from typing import Final

from trio_agent.protocol.codec import ROW_TYPES


def seal(body: bytes, salt: int = 0) -> int:
    """Return the checksum of a row; *salt* mixes in what stands beside the body."""
    return zlib.crc32(body, salt & 0xFFFFFFFF)


_KINDS: Final = {kind: zlib.crc32(kind.encode()) for kind in ROW_TYPES}
"""A salt for each kind, so that a body under another kind does not pass."""


def item_sum(kind: str, body: bytes) -> int:
    """Return the checksum of an item's row."""
    return zlib.crc32(body, _KINDS.get(kind, 0))


def event_sum(
    kind: str,
    body: bytes,
    sequence: int,
    at_ms: int,
    submission_id: str | None,
    item: int | None,
) -> int:
    """Return the checksum of an event's row."""
    numbers = sequence ^ at_ms * 31 ^ (item or 0) * 8191
    names = kind if submission_id is None else kind + submission_id
    return zlib.crc32(body, zlib.crc32(names.encode(), numbers & 0xFFFFFFFF))


def session_sum(
    head: bytes, stats: bytes, small: bytes | None, numbers: tuple[int, int, int]
) -> int:
    """Return the checksum of a session's row; *numbers* are sequence, epoch and length."""
    salt = zlib.crc32(b"%d.%d.%d" % numbers)
    return zlib.crc32(head, zlib.crc32(stats, zlib.crc32(small or b"", salt)))


def label_sum(first_user_message: str | None, context: bytes, body: bytes) -> int:
    """Return the checksum of a label row."""
    first = b"" if first_user_message is None else first_user_message.encode()
    return seal(body, seal(context, seal(first)))
