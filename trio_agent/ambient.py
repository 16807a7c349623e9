"""The two powers that come from outside: the wall clock and fresh ids.

Every part that needs one takes it as an argument, so tests can count instead.
Order is never taken from the clock; sequence numbers give it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import attrs


def now_ms() -> int:
    """Return the wall clock as whole milliseconds since 1970, never below zero."""
    return max(0, time.time_ns() // 1_000_000)


def new_id() -> str:
    """Return a fresh random UUID4 as text."""
    return str(uuid.uuid4())


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Ambient:
    """The wall clock and the id source of one session."""

    now_ms: Callable[[], int] = now_ms
    new_id: Callable[[], str] = new_id
