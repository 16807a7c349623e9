"""The past of a session: one row an item, shared by transcript and context.

A row remembers the save that added it, whether the transcript shows it, and the
epochs in which the context holds it: from ``since`` until before ``until``. So the context
at any earlier save can be told, and a rewind only closes rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_

import attrs

from trio_agent.errors import ConfigError
from trio_agent.protocol.events import Event
from trio_agent.protocol.items import Item, ToolCallItem, ToolOutputItem, UserItem
from trio_agent.record import Record
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord, ExecutionStats
from trio_agent.store.numbering import Stream


def weave(delta: Sequence[Item], tail: Sequence[Item]) -> list[tuple[Item, bool, bool]]:
    """Merge what the transcript and the context gained, in both orders.

    Returns the new rows: an item, whether the transcript shows it, whether the context
    holds it. An item that both gained becomes one row. Where their orders contradict
    each other it becomes two, which is correct, only larger.
    """
    if len(delta) == len(tail) and all(map(is_, delta, tail)):
        return [(item, True, True) for item in delta]
    rows: list[tuple[Item, bool, bool]] = []
    pending = {id(item) for item in tail}
    mine, theirs = 0, 0
    while mine < len(delta) and theirs < len(tail):
        shown, held = delta[mine], tail[theirs]
        if shown is held or shown == held:
            rows.append((shown, True, True))
            mine, theirs = mine + 1, theirs + 1
        elif id(shown) in pending:
            rows.append((held, False, True))
            theirs += 1
            pending.discard(id(held))
        else:
            rows.append((shown, True, False))
            mine += 1
    rows += [(item, True, False) for item in delta[mine:]]
    rows += [(item, False, True) for item in tail[theirs:]]
    return rows


def cut_for_rewind(checkpoint: Checkpoint, finished: Iterable[str], turns: int) -> Checkpoint:
    """Return *checkpoint* without its last *turns* turns, in a new epoch.

    A turn begins where the message of a finished submission entered; *finished*
    are those submissions.

    Raises:
        ConfigError: If a turn is running, or the context holds fewer turns.
    """
    name = f"session {checkpoint.session_id!r}"
    if turns < 1:
        raise ConfigError(f"turns must be at least 1, not {turns}")
    if checkpoint.active_execution is not None:
        raise ConfigError(f"{name} has a running turn; interrupt it before a rewind")
    known = set(finished)
    starts = [
        index
        for index, item in enumerate(checkpoint.context)
        if isinstance(item, UserItem) and item.submission_id in known
    ]
    if len(starts) < turns:
        raise ConfigError(f"{name} has {len(starts)} turns in its context, not {turns}")
    return attrs.evolve(
        checkpoint,
        sequence=checkpoint.sequence + 1,
        context_epoch=checkpoint.context_epoch + 1,
        context=checkpoint.context[: starts[-turns]],
    )


def forked(
    parent: Checkpoint, context: Sequence[Item], epoch: int, session_id: str, *, live: bool
) -> Checkpoint:
    """Return the first checkpoint of a fork of *parent* with the *context* of an earlier save.

    Labels, metadata, route and content go along. Usage, statistics, grants and
    queue start empty; the states of capabilities are known for the newest save
    only, so they go along if it is that one (*live*).

    Raises:
        ConfigError: If a call is open in *context*: its output would never come.
    """
    open_calls: set[str] = set()
    for item in context:
        if isinstance(item, ToolCallItem):
            open_calls.add(item.call_id)
        elif isinstance(item, ToolOutputItem):
            open_calls.discard(item.call_id)
    if open_calls:
        raise ConfigError(
            f"session {parent.session_id!r} has an open call {min(open_calls)!r} at that save;"
            " fork at the end of a turn"
        )
    return Checkpoint(
        session_id=session_id,
        session_context=parent.session_context,
        metadata=parent.metadata,
        first_user_message=parent.first_user_message,
        model_route=parent.model_route,
        context=tuple(context),
        context_epoch=epoch,
        execution_stats=ExecutionStats(),
        states=parent.states if live else {},
        instructions_digest=parent.instructions_digest,
        tools_digest=parent.tools_digest,
    )


def readable(item: Item) -> str:
    """Return what a search looks at in *item*; hidden guidance has nothing to find."""
    match item:
        case UserItem():
            return "" if item.internal is not None else item.text
        case ToolCallItem():
            return item.name
        case ToolOutputItem():
            return item.output
        case _:
            return item.text


@attrs.frozen(eq=False, repr=False)
class ItemRow(Record):
    """One row of a session's past; rows are numbered 1, 2, 3 … and never deleted one by one."""

    added: int
    item: Item
    shown: bool = True
    since: int | None = None
    until: int | None = None

    def held_in(self, epoch: int) -> bool:
        """Whether the context of *epoch* holds it, at the end of that epoch."""
        if self.since is None or self.since > epoch:
            return False
        return self.until is None or self.until > epoch


@attrs.frozen(eq=False, repr=False)
class Epoch(Record):
    """A context epoch: the save that began it, and the first row that it can hold."""

    epoch: int
    sequence: int
    start: int


@attrs.frozen(kw_only=True, eq=False, repr=False)
class EventRow(Record):
    """An event that has a row; ``stream`` is what a delta's row knows of its arrival."""

    event: Event
    step_id: str | None = None
    stream: Stream | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class FinishedTurn(Record):
    """A finished turn, and the save that ended it."""

    sequence: int
    record: ExecutionRecord


def epoch_at(epochs: Sequence[Epoch], sequence: int) -> Epoch:
    """Return the epoch that was current at the save *sequence*."""
    return max((one for one in epochs if one.sequence <= sequence), key=lambda one: one.epoch)


def past_at(rows: Sequence[ItemRow], epoch: int, sequence: int) -> list[ItemRow]:
    """Return the rows of a fork at the save *sequence*: what was shown or held then."""
    return [
        ItemRow(
            added=0,
            item=row.item,
            shown=row.shown,
            since=epoch if row.held_in(epoch) else None,
        )
        for row in rows
        if row.added <= sequence and (row.shown or row.held_in(epoch))
    ]


def first_held(rows: Sequence[ItemRow]) -> int:
    """Return the number of the first row that a context holds, or the next free number."""
    return next((n for n, row in enumerate(rows, 1) if row.since is not None), len(rows) + 1)
