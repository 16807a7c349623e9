"""Whether to ask a model again, and how long to wait first; pure."""

from __future__ import annotations

import hashlib
from typing import Final

from trio_agent.errors import ProviderError
from trio_agent.protocol.limits import MAX_STREAM_RETRIES

BASE_SECONDS: Final = 0.2
MAX_DOUBLINGS: Final = 4
"""So the wait grows from 0.2 s to 3.2 s."""

RETRY_AFTER_CAP_SECONDS: Final = 120.0
"""A provider that asks for longer is not waited for: the turn fails at once."""


def retry_delay(error: ProviderError, attempt: int, step_id: str) -> float | None:
    """Return the seconds to wait before the next attempt, or None to give up.

    The wait doubles with every *attempt* (counted from 1), and is moved by up to a
    fifth in a direction that depends on *step_id*, so that many sessions do not
    come back together. A provider's own ``retry_after`` wins if it is longer.
    """
    if not error.retryable or attempt > MAX_STREAM_RETRIES:
        return None
    asked = error.retry_after or 0.0
    if asked > RETRY_AFTER_CAP_SECONDS:
        return None
    digest = hashlib.sha256(f"{step_id}:{attempt}".encode()).digest()
    jitter = 0.8 + 0.4 * int.from_bytes(digest[:4]) / 0xFFFF_FFFF
    return max(asked, BASE_SECONDS * 2.0 ** min(attempt - 1, MAX_DOUBLINGS) * jitter)
