"""A session of `MemoryCheckpoint` as an archive, and back; loaded by who moves one."""

from __future__ import annotations

from collections.abc import Mapping

from trio_agent.protocol.events import TokenCount
from trio_agent.protocol.text import Json
from trio_agent.store.archive import Archive, Content, ScopedState, write_archive
from trio_agent.store.remembered import RememberedSession
from trio_agent.store.rows import Head


def pack(
    session: RememberedSession,
    contents: Mapping[str, str],
    states: Mapping[tuple[str, str], Json],
) -> bytes:
    """Return *session* in its portable form.

    Args:
        session: Which one.
        contents: The long texts of all sessions, by digest.
        states: The values of all scopes, by scope and key.
    """
    checkpoint = session.checkpoint
    archive = Archive(
        head=Head.of(checkpoint),
        queue=checkpoint.queue,
        pending_tools=checkpoint.pending_tools,
        title=session.title,
        created_at_ms=session.created_at_ms,
        updated_at_ms=session.updated_at_ms,
        first_sequence=session.first_sequence,
        event_sequence=session.event_sequence,
        pruned_through=session.pruned_through,
        parent_session_id=session.parent_session_id,
        parent_sequence=session.parent_sequence,
        items=tuple(session.rows),
        epochs=tuple(session.epochs),
        events=tuple(session.events),
        executions=tuple(session.executions),
        receipts=tuple(session.receipts.values()),
        contents=tuple(
            Content(digest=digest, text=contents[digest]) for digest in sorted(session.contents)
        ),
        states=tuple(
            ScopedState(key=key, value=value)
            for (scope, key), value in sorted(states.items(), key=lambda one: one[0])
            if scope == checkpoint.session_id
        ),
    )
    return write_archive(archive)


def remembered(archive: Archive) -> RememberedSession:
    """Return the session that *archive* tells of."""
    session = RememberedSession(
        checkpoint=archive.checkpoint(),
        created_at_ms=archive.created_at_ms,
        updated_at_ms=archive.updated_at_ms,
        first_sequence=archive.first_sequence,
        title=archive.title,
        event_sequence=archive.event_sequence,
        pruned_through=archive.pruned_through,
        parent_session_id=archive.parent_session_id,
        parent_sequence=archive.parent_sequence,
        rows=list(archive.items),
        epochs=list(archive.epochs),
        events=list(archive.events),
        executions=list(archive.executions),
        receipts={receipt.submission_id: receipt for receipt in archive.receipts},
        contents={content.digest for content in archive.contents},
    )
    for row in archive.events:
        if row.step_id is not None:
            session.deltas.setdefault(row.step_id, []).append(row.event.sequence)
        if isinstance(row.event.msg, TokenCount):
            session.token_sequence = row.event.sequence
    return session
