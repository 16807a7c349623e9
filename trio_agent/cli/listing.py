"""`trio-agent sessions` and `trio-agent show`: what is stored."""

from __future__ import annotations

import datetime as dt

import trio

from trio_agent import SqliteCheckpoint
from trio_agent.cli.arguments import Options, database_path
from trio_agent.cli.render import Renderer, printable
from trio_agent.errors import UnknownError
from trio_agent.protocol.text import cut_end
from trio_agent.store import SessionSummary, TranscriptBatch


async def list_sessions(options: Options, renderer: Renderer) -> None:
    """Print one line a session, the most recently changed first.

    Raises:
        CheckpointError: If the file cannot be read as a store.
    """
    await trio.lowlevel.checkpoint()
    path = database_path(options)
    if not path.exists():  # asking must not create a file
        return
    async with SqliteCheckpoint(path) as store:
        cursor: str | None = None
        while True:
            page = await store.list_sessions(cursor=cursor)
            for summary in page.sessions:
                renderer.line("", _line(summary))
            cursor = page.next_cursor
            if cursor is None:
                return


def _line(summary: SessionSummary) -> str:
    changed = dt.datetime.fromtimestamp(summary.updated_at_ms / 1000).astimezone()
    title = cut_end(" ".join((summary.title or summary.first_user_message or "").split()), 80)
    runs = summary.execution_stats.run_count
    turns = "1 turn" if runs == 1 else f"{runs} turns"
    return f"{summary.session_id}  {changed:%Y-%m-%d %H:%M}  {turns}  {printable(title)}"


async def show_session(options: Options, renderer: Renderer) -> None:
    """Print a session's transcript, oldest first.

    Raises:
        UnknownError: If there is no such session.
        CheckpointError: If the file cannot be read as a store.
    """
    path, session_id = database_path(options), options.session_id or ""
    unknown = UnknownError(f"{str(path)!r} holds no session {session_id!r}")
    if not path.exists():
        raise unknown
    async with SqliteCheckpoint(path) as store:
        if await store.session_summary(session_id) is None:
            raise unknown
        batches: list[TranscriptBatch] = []
        before: int | None = None
        while True:
            page = await store.transcript_page(session_id, before_sequence=before)
            batches += page.batches
            before = page.next_before_sequence
            if before is None:
                break
    for batch in reversed(batches):
        for item in batch.items:
            renderer.item(item)
