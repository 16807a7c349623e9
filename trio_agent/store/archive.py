"""The portable form of one session: what `export_session` writes and `import_session` reads."""

from __future__ import annotations

from typing import Final, cast

import attrs

from trio_agent.errors import CorruptStoreError, ProtocolError
from trio_agent.protocol import codec
from trio_agent.protocol.items import Item
from trio_agent.protocol.text import Json
from trio_agent.record import Record
from trio_agent.state.checkpoint import (
    Checkpoint,
    QueuedMessage,
    ToolCall,
    validate_checkpoint,
)
from trio_agent.store.base import Receipt
from trio_agent.store.history import Epoch, EventRow, FinishedTurn, ItemRow
from trio_agent.store.rows import Head, whole

FORMAT: Final = "trio_agent.session"
ARCHIVE_VERSION: Final = 1


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Content(Record):
    """A long text and the digest that names it."""

    digest: str
    text: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ScopedState(Record):
    """A value stored under the session's own scope."""

    key: str
    value: Json


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Archive(Record):
    """Everything about one session."""

    format: str = FORMAT
    version: int = ARCHIVE_VERSION
    head: Head
    queue: tuple[QueuedMessage, ...] = ()
    pending_tools: tuple[ToolCall, ...] = ()
    title: str | None = None
    created_at_ms: int
    updated_at_ms: int
    first_sequence: int
    event_sequence: int
    pruned_through: int = 0
    parent_session_id: str | None = None
    parent_sequence: int | None = None
    items: tuple[ItemRow, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    events: tuple[EventRow, ...] = ()
    executions: tuple[FinishedTurn, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    contents: tuple[Content, ...] = ()
    states: tuple[ScopedState, ...] = ()

    @property
    def context(self) -> list[Item]:
        """The newest context, told from the rows."""
        epoch = self.head.context_epoch
        return [row.item for row in self.items if row.held_in(epoch)]

    def checkpoint(self) -> Checkpoint:
        """Return the newest checkpoint.

        Raises:
            CorruptStoreError: If it breaks a rule.
        """
        context = self.context
        length = len(context)
        checkpoint = whole(self.head, context, self.queue, self.pending_tools, length=length)
        validate_checkpoint(checkpoint)
        return checkpoint

    def renamed(self, session_id: str) -> Archive:
        """Return the same session under another id; events keep what they said."""
        return attrs.evolve(
            self,
            head=attrs.evolve(self.head, session_id=session_id),
            executions=tuple(
                attrs.evolve(turn, record=attrs.evolve(turn.record, session_id=session_id))
                for turn in self.executions
            ),
        )


def write_archive(archive: Archive) -> bytes:
    """Return *archive* as JSON text."""
    return codec.dumps(archive)


def read_archive(data: bytes, session_id: str | None = None) -> Archive:
    """Decode what `write_archive` wrote, and check that it makes sense.

    Args:
        data: The export.
        session_id: The session's new id, if it gets one.

    Raises:
        ProtocolError: If it is anything else.
    """
    members = codec.parse_json(data, name="export")
    if not isinstance(members, dict):
        raise ProtocolError("this is not an exported session")
    members = cast("dict[str, Json]", members)
    if members.get("format") != FORMAT:
        raise ProtocolError("this is not an exported session")
    version = members.get("version")
    if version != ARCHIVE_VERSION:
        raise ProtocolError(
            f"the export has version {version!r}; this library reads {ARCHIVE_VERSION}"
        )
    archive = codec.structure(members, Archive, name="export")
    found = problem(archive)
    if found is not None:
        raise ProtocolError(f"export: {found}")
    return archive if session_id is None else archive.renamed(session_id)


def problem(archive: Archive) -> str | None:
    """Return the first rule that *archive* breaks, None if it is sound."""
    try:
        archive.checkpoint()
    except CorruptStoreError as exc:
        return str(exc)
    numbers = [row.event.sequence for row in archive.events]
    if numbers != sorted(set(numbers)) or (numbers and numbers[0] < 1):
        return "the events are out of order"
    if archive.event_sequence < max([archive.pruned_through, 0, *numbers[-1:]]):
        return "the journal ends after its newest number"
    added = [row.added for row in archive.items]
    saves = range(archive.first_sequence, archive.head.sequence + 1)
    if added != sorted(added) or any(one not in saves for one in added):
        return "an item was added by no save"
    ended = [turn.sequence for turn in archive.executions]
    if ended != sorted(set(ended)) or any(one not in saves for one in ended):
        return "a turn was ended by no save"
    if any(turn.record.session_id != archive.head.session_id for turn in archive.executions):
        return "a turn belongs to another session"
    epochs = archive.epochs
    if not epochs or epochs[-1].epoch != archive.head.context_epoch:
        return "the context epochs are incomplete"
    if len({receipt.submission_id for receipt in archive.receipts}) < len(archive.receipts):
        return "two receipts have one submission id"
    return None
