"""What one save or append adds to the journal, encoded before it waits for its turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from trio_agent.errors import ConfigError
from trio_agent.protocol.events import (
    Draft,
    Event,
    ModelStepCompleted,
    SubmissionAccepted,
    TokenCount,
)
from trio_agent.store.event_rows import Row, rows_of
from trio_agent.store.numbering import Entry, arrange
from trio_agent.store.quoting import quote
from trio_agent.store.rows import write_row


class NewEvents(Struct, frozen=True):
    """Events in order; their numbers are settled in the transaction.

    ``token_offset`` is the place of the newest token count, from 1; 0 if there is none.
    ``completes``: a model step ends here, whose deltas leave the journal. ``receipts`` are
    place, submission and digest of what is accepted.
    """

    entries: Sequence[Entry]
    token_offset: int = 0
    completes: bool = False
    receipts: Sequence[tuple[int, str, str]] = ()

    def rows(self, first: int) -> list[Row]:
        """Return the rows, if the first event gets the number *first*."""
        return rows_of(pair for pair in enumerate(self.entries, first) if pair[1].row)

    def events(self, first: int) -> tuple[Event, ...]:
        """Return the events, if the first one gets the number *first*."""
        return tuple([entry.numbered(at) for at, entry in enumerate(self.entries, first)])

    def token_sequence(self, first: int) -> int:
        """Return the number of the newest token count, 0 if there is none."""
        return first + self.token_offset - 1 if self.token_offset else 0


NOTHING: Final = NewEvents(())
_MARKED: Final = (TokenCount, SubmissionAccepted, ModelStepCompleted)


def new_events(key: str, drafts: Sequence[Draft], texts: Mapping[str, int]) -> NewEvents:
    """Arrange and encode *drafts*.

    Args:
        key: The session, for messages.
        drafts: The events.
        texts: Those of the items that are added with them, and their numbers.

    Raises:
        ConfigError: If something in them cannot be stored.
    """
    if not drafts:
        return NOTHING
    entries = arrange(drafts)
    token_offset, completes = 0, False
    receipts: list[tuple[int, str, str]] = []
    try:
        for place, entry in enumerate(entries):
            msg = entry.msg
            if isinstance(msg, _MARKED):
                if isinstance(msg, TokenCount):
                    token_offset = place + 1
                elif isinstance(msg, SubmissionAccepted):
                    assert entry.submission_id is not None  # `arrange` has looked
                    receipts.append((place, entry.submission_id, msg.digest))
                elif msg.outcome == "completed":
                    completes = True
                    continue  # encoded in the transaction, which knows its metrics
            if entry.row:
                stored, entry.item = quote(msg, texts)
                entry.body = write_row(stored)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ConfigError(f"session {key!r}: an event cannot be stored: {exc}") from exc
    return NewEvents(entries, token_offset, completes, receipts)
