"""Token usage and its checked arithmetic."""

from __future__ import annotations

import attrs

from trio_agent.errors import InternalError
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.record import Record


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TokenUsage(Record):
    """What one response, turn or session cost, in tokens.

    ``cached_input_tokens`` and ``cache_write_input_tokens`` are parts of
    ``input_tokens``; ``reasoning_output_tokens`` is a part of ``output_tokens``.
    """

    input_tokens: int = 0
    cached_input_tokens: int = 0
    cache_write_input_tokens: int = 0
    output_tokens: int = 0
    reasoning_output_tokens: int = 0
    total_tokens: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        """Return the sum, or raise `InternalError` where any part leaves 0..2**63-1."""
        parts: dict[str, int] = {}
        for name in _PARTS:
            value = getattr(self, name) + getattr(other, name)
            if not 0 <= value <= MAX_INTEGER:
                raise InternalError(f"token usage out of range: {name} would be {value}")
            parts[name] = value
        return TokenUsage(**parts)


_PARTS = tuple(field.name for field in attrs.fields(TokenUsage))
