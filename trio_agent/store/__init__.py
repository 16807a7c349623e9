"""What survives: durable checkpoints, transcripts and journals."""

from trio_agent.store.base import (
    CheckpointStore,
    EventPage,
    ExecutionPage,
    JournalSlice,
    Lease,
    Receipt,
    SessionPage,
    SessionSummary,
    TranscriptBatch,
    TranscriptPage,
)
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.store.sqlite import SqliteCheckpoint

__all__ = [
    "CheckpointStore",
    "EventPage",
    "ExecutionPage",
    "JournalSlice",
    "Lease",
    "MemoryCheckpoint",
    "Receipt",
    "SessionPage",
    "SessionSummary",
    "SqliteCheckpoint",
    "TranscriptBatch",
    "TranscriptPage",
]
