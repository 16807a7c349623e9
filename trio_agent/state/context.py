"""Rules of the model-visible history: which histories are whole, and how large they are."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trio_agent.errors import ConfigError
from trio_agent.protocol.items import Item, RequestItem, ToolCallItem, ToolOutputItem

BYTES_PER_TOKEN = 4
"""A coarse estimate, right for English; the last response's usage corrects most of it."""


def check_pairing(items: Iterable[Item], *, open_calls: bool = False) -> None:
    """Check that every call has exactly one output behind it, and no output stands alone.

    Args:
        items: A history.
        open_calls: Whether calls at the very end may still lack their outputs.

    Raises:
        ConfigError: It names the call.
    """
    waiting: set[str] = set()
    seen: set[str] = set()
    for item in items:
        if isinstance(item, ToolCallItem):
            if item.call_id in seen:
                raise ConfigError(f"two calls have the id {item.call_id!r}")
            seen.add(item.call_id)
            waiting.add(item.call_id)
        elif isinstance(item, ToolOutputItem):
            if item.call_id not in waiting:
                raise ConfigError(f"an output without an open call: {item.call_id!r}")
            waiting.discard(item.call_id)
    if waiting and not open_calls:
        raise ConfigError(f"a call without its output: {min(waiting)!r}")


def estimate_tokens(items: Iterable[RequestItem]) -> int:
    """Return roughly how many tokens *items* are; at least one each."""
    return sum(max(1, len(msgspec.json.encode(item)) // BYTES_PER_TOKEN) for item in items)
