"""What a store refuses before it touches anything: impossible arguments."""

from __future__ import annotations

from collections.abc import Sequence

from trio_agent.errors import ConfigError, CorruptStoreError
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.protocol.ops import check_session_id
from trio_agent.protocol.text import check_json
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord, validate_checkpoint


def check_id(session_id: str) -> None:
    """Refuse what cannot name a session.

    Raises:
        ConfigError: It says what is wrong with it.
    """
    try:
        check_session_id(session_id)
    except ValueError as exc:
        raise ConfigError(str(exc)) from None


def check_limit(limit: int, *, name: str = "limit") -> None:
    """Refuse a page size that is not between 1 and SQLite's largest integer minus 1.

    Raises:
        ConfigError: It names the number.
    """
    if not 1 <= limit < MAX_INTEGER:
        raise ConfigError(f"{name} must be at least 1, not {limit}")


def check_position(position: int | None, *, name: str) -> None:
    """Refuse a place in a journal that cannot exist.

    Raises:
        ConfigError: It names the number.
    """
    if position is not None and not 0 <= position <= MAX_INTEGER:
        raise ConfigError(f"{name} must be between 0 and {MAX_INTEGER}, not {position}")


def check_save(
    checkpoint: Checkpoint, previous: Checkpoint | None, execution: ExecutionRecord | None
) -> None:
    """Check everything about a save that does not depend on what is stored.

    What *previous*, the last checkpoint seen, shares with this one was checked then.

    Raises:
        CorruptStoreError: If *checkpoint* breaks a rule.
        ConfigError: If it holds something that is not JSON, or *execution* is not its own.
    """
    if previous is None:
        check_id(checkpoint.session_id)
    validate_checkpoint(checkpoint)
    if checkpoint.sequence > MAX_INTEGER or checkpoint.context_epoch > MAX_INTEGER:
        raise CorruptStoreError(f"session {checkpoint.session_id!r}: a counter is too large")
    try:
        if previous is None or checkpoint.states is not previous.states:
            check_json(checkpoint.states, name="states")
        if previous is None or checkpoint.metadata is not previous.metadata:
            check_json(checkpoint.metadata, name="metadata")
    except ValueError as exc:
        raise ConfigError(f"session {checkpoint.session_id!r}: {exc}") from None
    if execution is not None and execution.session_id != checkpoint.session_id:
        raise ConfigError(
            f"the finished turn belongs to session {execution.session_id!r},"
            f" the checkpoint to {checkpoint.session_id!r}"
        )


def check_cursor(cursor: str | None) -> int:
    """Return the place in the catalog that *cursor* stands for; the newest end for None.

    Raises:
        ConfigError: If no store gave out such a cursor.
    """
    if cursor is None:
        return MAX_INTEGER
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 18):
        raise ConfigError(f"{cursor!r} is not a cursor of a list of sessions")
    return int(cursor)


def check_context(checkpoint: Checkpoint, epoch: int, length: int) -> None:
    """Check the rule of the context: within an epoch it grows, epochs only rise.

    Raises:
        CorruptStoreError: If *checkpoint* breaks it against what is stored.
    """
    if checkpoint.context_epoch < epoch:
        raise CorruptStoreError(
            f"session {checkpoint.session_id!r}: context epoch {checkpoint.context_epoch}"
            f" after {epoch}"
        )
    if checkpoint.context_epoch == epoch and len(checkpoint.context) < length:
        raise CorruptStoreError(
            f"session {checkpoint.session_id!r}: the context shrank from {length} to"
            f" {len(checkpoint.context)} items within epoch {epoch}"
        )


def oldest(sequences: Sequence[int], *, more: bool) -> int | None:
    """Return where the next page towards the past begins, if there is one."""
    return sequences[-1] if more and sequences else None
