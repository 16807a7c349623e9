"""One session as `MemoryCheckpoint` keeps it: its newest checkpoint and its whole past."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import attrs
from msgspec import Struct, field

from trio_agent.protocol.events import Event, SubmissionAccepted, TokenCount
from trio_agent.protocol.items import Item
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.store.base import Receipt, SessionSummary
from trio_agent.store.history import (
    Epoch,
    EventRow,
    FinishedTurn,
    ItemRow,
    readable,
    weave,
)
from trio_agent.store.numbering import Entry, Stream, settle


class RememberedSession(Struct, kw_only=True, eq=False):
    """One session as it is now, and its whole past."""

    checkpoint: Checkpoint
    created_at_ms: int
    updated_at_ms: int
    changed: int = 0
    first_sequence: int
    title: str | None = None
    event_sequence: int = 0
    pruned_through: int = 0
    parent_session_id: str | None = None
    parent_sequence: int | None = None
    rows: list[ItemRow] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    deltas: dict[str, list[int]] = field(default_factory=dict)
    token_sequence: int = 0
    executions: list[FinishedTurn] = field(default_factory=list)
    receipts: dict[str, Receipt] = field(default_factory=dict)
    contents: set[str] = field(default_factory=set)

    def add(self, checkpoint: Checkpoint, delta: Sequence[Item]) -> None:
        """Add the rows of a save, and close those that a new epoch left out."""
        epoch = checkpoint.context_epoch
        begun = self.epochs[-1].epoch if self.epochs else None
        if epoch == begun:
            tail = checkpoint.context.since(len(self.checkpoint.context))
        else:
            self.close(0, epoch)
            self.epochs.append(Epoch(epoch, checkpoint.sequence, len(self.rows) + 1))
            tail = checkpoint.context.since(0)
        for item, shown, held in weave(delta, tail):
            since = epoch if held else None
            self.rows.append(ItemRow(checkpoint.sequence, item, shown, since))

    def close(self, keep: int, epoch: int) -> None:
        """Take all but the first *keep* held rows out of the context from *epoch* on."""
        for index, row in enumerate(self.rows):
            if row.since is not None and row.until is None:
                if keep:
                    keep -= 1
                else:
                    self.rows[index] = attrs.evolve(row, until=epoch)

    def journal(self, entries: Sequence[Entry]) -> tuple[Event, ...]:
        """Number *entries*, store their rows, and return the events."""

        def stored(step_id: str) -> list[Stream]:
            rows = [self.events[at] for at in self.places(self.deltas.get(step_id, ()))]
            return [row.stream for row in rows if row.stream is not None]

        completed = settle(entries, stored)
        events: list[Event] = []
        for entry in entries:
            self.event_sequence += 1
            event = entry.numbered(self.event_sequence)
            events.append(event)
            if isinstance(entry.msg, SubmissionAccepted):
                self.accept(event, entry.msg)
            if entry.row:
                if isinstance(entry.msg, TokenCount):
                    self.remove([self.token_sequence])
                    self.token_sequence = event.sequence
                if entry.step_id is not None:
                    self.deltas.setdefault(entry.step_id, []).append(event.sequence)
                row = EventRow(event=event, step_id=entry.step_id, stream=entry.stream)
                self.events.append(row)
        for step_id in completed:
            self.remove(self.deltas.pop(step_id, ()))
        return tuple(events)

    def place(self, sequence: int) -> int:
        """Return the index of the first event row numbered *sequence* or above."""
        return bisect.bisect_left(self.events, sequence, key=lambda row: row.event.sequence)

    def places(self, sequences: Iterable[int]) -> list[int]:
        """Return the indices of those *sequences* that still have a row."""
        found = [(at, number) for number in sequences for at in [self.place(number)]]
        return [
            at
            for at, number in found
            if at < len(self.events) and self.events[at].event.sequence == number
        ]

    def remove(self, sequences: Iterable[int]) -> None:
        """Delete the rows of *sequences*, where there still are any."""
        for at in reversed(self.places(sequences)):
            del self.events[at]

    def accept(self, event: Event, msg: SubmissionAccepted) -> None:
        """Leave a receipt, unless an earlier one stands."""
        assert event.submission_id is not None
        receipt = Receipt(
            submission_id=event.submission_id,
            status="duplicate",
            sequence=event.sequence,
            digest=msg.digest,
        )
        self.receipts.setdefault(event.submission_id, receipt)

    def summary(self) -> SessionSummary:
        """Return what a list shows."""
        checkpoint = self.checkpoint
        subagent = checkpoint.role.kind == "subagent"
        return SessionSummary(
            session_id=checkpoint.session_id,
            sequence=checkpoint.sequence,
            latest_event_sequence=self.event_sequence,
            title=self.title,
            first_user_message=checkpoint.first_user_message,
            session_context=checkpoint.session_context,
            execution_stats=checkpoint.execution_stats,
            parent_session_id=self.parent_session_id,
            parent_sequence=self.parent_sequence,
            subagent=subagent,
            created_at_ms=self.created_at_ms,
            updated_at_ms=self.updated_at_ms,
        )

    def holds(self, text: str) -> bool:
        """Whether a search for the folded *text* finds this session."""
        first = self.checkpoint.first_user_message
        if any(text in told.casefold() for told in (self.title, first) if told):
            return True
        return any(row.shown and text in readable(row.item).casefold() for row in self.rows)
