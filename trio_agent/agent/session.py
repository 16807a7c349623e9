"""The one mutable thing of a session, and the one way to change it.

Rule 1: what a reader has seen is durable. Rule 2: after a failed write nobody knows
what is on disk, so nothing is ever computed from memory again; only recovery may.
Rule 3: `Cancelled` from a write means that nothing happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import attrs
import trio

from trio_agent.agent.readers import Tail
from trio_agent.ambient import Ambient
from trio_agent.errors import (
    CheckpointError,
    SessionBrokenError,
    SessionOwnedError,
    StaleSessionError,
    StoppedError,
)
from trio_agent.protocol.events import Draft, Event, EventMsg
from trio_agent.protocol.items import Item, UserItem
from trio_agent.state.changes import (
    ApprovalAsked,
    CallEnded,
    CallsBegan,
    Change,
    ContextChanged,
    StepBegan,
    StepEnded,
    TurnEnded,
)
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord
from trio_agent.state.execution import record_of
from trio_agent.state.intake import Refusal
from trio_agent.state.machine import advance
from trio_agent.state.narration import Told, narrate
from trio_agent.store.base import CheckpointStore, Lease

MAX_PENDING_DELTAS: Final = 64
"""How many deltas a model may run ahead of the disk."""

Part: TypeAlias = Change | Told
"""A piece of a commit: a change, or a message that belongs at this place."""

Decide: TypeAlias = Callable[[Checkpoint], "Sequence[Part] | Refusal"]
"""Chooses what to commit, given the checkpoint that it will be applied to."""


def told(msg: EventMsg, cause: str | None = None) -> Told:
    """Return *msg* as a part of a commit, caused by the submission *cause*."""
    return (cause, msg)


def applied(checkpoint: Checkpoint, parts: Sequence[Part]) -> Checkpoint:
    """Return *checkpoint* after the changes among *parts*."""
    for part in parts:
        if not isinstance(part, tuple):
            checkpoint = advance(checkpoint, part)
    return checkpoint


class _Plan:
    """A commit worked out: what to write, and nothing of it written yet."""

    def __init__(self, checkpoint: Checkpoint, cause: str | None = None) -> None:
        self.checkpoint = checkpoint
        self.cause = cause
        self.changed = False
        self.delta: list[Item] = []
        self.told: list[Told] = []
        self.record: ExecutionRecord | None = None

    def add(self, part: Part) -> None:
        if isinstance(part, tuple):
            why, msg = part
            self.told.append((why or self.cause, msg))
            return
        before = self.checkpoint
        if isinstance(part, TurnEnded):
            self.record = record_of(before, part)
        after = advance(before, part)
        active = before.active_execution or after.active_execution
        cause = None if active is None else active.submission_id
        if self.cause is not None and not isinstance(part, _TURNS_OWN):
            cause = self.cause
        self.told.extend((why or cause, msg) for why, msg in narrate(before, part, after))
        if isinstance(part, ContextChanged) and part.rewrite is not None:
            added: Sequence[Item] = part.items
        else:
            added = after.context.since(len(before.context))
        self.delta.extend(item for item in added if not _hidden(item))
        self.checkpoint, self.changed = after, True


_TURNS_OWN: Final = (StepBegan, StepEnded, CallsBegan, CallEnded, ApprovalAsked)
"""What these tell belongs to the turn's own submission, whoever caused the commit."""


def _hidden(item: Item) -> bool:
    return isinstance(item, UserItem) and item.internal is not None


class Session:
    """The current checkpoint, its store, and everyone who wants to hear of it."""

    def __init__(
        self,
        store: CheckpointStore,
        lease: Lease,
        ambient: Ambient,
        checkpoint: Checkpoint,
    ) -> None:
        self._store = store
        self._lease = lease
        self._ambient = ambient
        self.checkpoint = checkpoint
        self.tail = Tail()
        self.broken: BaseException | None = None
        # Intake, runner and recorder all write. The lock keeps what is written and what is
        # published in one order, and makes a decision and its commit one.
        self._lock = trio.Lock()
        self._pending = list[Draft]()
        self._arrived = trio.Event()
        self._written = trio.lowlevel.ParkingLot()

    async def commit(self, *parts: Part, cause: str | None = None) -> tuple[Event, ...]:
        """Apply the changes among *parts*, write them and the messages atomically, publish.

        Everything appended before goes with it, in order. Any task may call this;
        calls take effect one at a time. If it raises `trio.Cancelled` then nothing
        was changed, written or published. If it raises anything else then nobody
        knows what was written, and the session is broken for good.

        Args:
            parts: Changes, and messages made by `told`.
            cause: The submission that causes this: what the commit tells is attributed to
                it, but for steps and calls, which are their turn's own. Default: the turn's.
        """
        events = await self.transact(lambda _: parts, cause=cause)
        assert not isinstance(events, Refusal)
        return events

    async def transact(
        self,
        decide: Decide,
        *,
        cause: str | None = None,
        first: bool = False,
        contents: Mapping[str, str] | None = None,
    ) -> tuple[Event, ...] | Refusal:
        """Let *decide* choose what to commit, with nothing in between, and commit it.

        Nothing is changed if it chooses nothing or refuses. Otherwise see `commit`.

        Args:
            decide: A plain function; it must not change anything.
            cause: See `commit`.
            first: Whether this creates the session, at sequence 0.
            contents: Texts to be stored once, by digest.
        """
        async with self._lock:
            self._check()
            try:
                parts = decide(self.checkpoint)
                if isinstance(parts, Refusal):
                    return parts
                plan = _Plan(self.checkpoint, cause)
                for part in parts:
                    plan.add(part)
            except Exception as exc:
                self.fail(exc)
                raise
            if not plan.changed and not plan.told and not self._pending:
                return ()
            if plan.changed and not first:
                plan.checkpoint = attrs.evolve(
                    plan.checkpoint, sequence=plan.checkpoint.sequence + 1
                )
            return await self._write(plan, contents)

    def append(self, msg: EventMsg, cause: str | None) -> None:
        """Queue an event: kept in order, written soon, lost if the process dies first.

        Not a checkpoint; pair it with `wait_written` where a stranger decides how many.
        """
        self._pending.append(self._draft(cause, msg))
        self._arrived.set()

    async def wait_written(self) -> None:
        """Wait until at most 64 appended events are ahead of the disk; a checkpoint."""
        await trio.lowlevel.checkpoint()
        while len(self._pending) > MAX_PENDING_DELTAS and self.broken is None:
            await self._written.park()

    async def run_recorder(self) -> None:
        """Write what is appended, as much at a time as has arrived. Runs until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived = trio.Event()  # only its one waiter may renew it
            async with self._lock:
                self._check()
                if self._pending:
                    await self._write(_Plan(self.checkpoint), None)

    async def run_guard(self) -> None:
        """Wait for another process to take the session, and fail then. Runs until cancelled."""
        try:
            await self._store.guard(self._lease)
        except CheckpointError as exc:
            self.fail(exc)  # the new owner writes the ending
            raise

    def _check(self) -> None:
        if self.broken is not None:
            raise SessionBrokenError("an earlier write failed") from self.broken
        if self.tail.over:
            raise StoppedError("the session is over")

    def fail(self, exc: BaseException) -> None:
        """Write nothing any more: *exc* broke the session. The first one given stays."""
        self.broken = self.broken or exc
        self._written.unpark_all()

    def _draft(self, cause: str | None, msg: EventMsg) -> Draft:
        return Draft(recorded_at_ms=self._ambient.now_ms(), submission_id=cause, msg=msg)

    @trio.lowlevel.enable_ki_protection
    async def _write(
        self, plan: _Plan, contents: Mapping[str, str] | None
    ) -> tuple[Event, ...]:
        waiting = len(self._pending)
        drafts = self._pending[:waiting]
        drafts.extend(self._draft(why, msg) for why, msg in plan.told)
        try:
            if plan.changed:
                events = await self._store.save(
                    plan.checkpoint,
                    plan.delta,
                    lease=self._lease,
                    execution=plan.record,
                    events=drafts,
                    contents=contents,
                )
            else:
                events = await self._store.append_events(
                    plan.checkpoint.session_id, drafts, lease=self._lease
                )
        except trio.Cancelled:
            raise
        except StaleSessionError as exc:
            if exc.owner is None:
                self.fail(exc)
                raise
            owned = SessionOwnedError(f"the session was taken by {exc.owner}")
            self.fail(owned)
            raise owned from exc
        except BaseException as exc:
            self.fail(exc)
            raise
        # No checkpoint from here on: what is durable becomes visible.
        self.checkpoint = plan.checkpoint
        del self._pending[:waiting]
        self._written.unpark_all()
        self.tail.publish(events)
        return events
