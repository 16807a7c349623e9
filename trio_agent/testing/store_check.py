"""`check_store`: what every `CheckpointStore` must do, as a test that any store can run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import trio
import trio.testing

from trio_agent.errors import (
    StaleSessionError,
)
from trio_agent.protocol.events import (
    SubmissionAccepted,
)
from trio_agent.protocol.items import (
    UserItem,
)
from trio_agent.state.checkpoint import (
    Checkpoint,
)
from trio_agent.store.base import CheckpointStore
from trio_agent.testing.mortal import MortalStore, ProcessDied
from trio_agent.testing.store_parts import (
    begin,
    draft,
    following,
    journal_of,
    note,
    owned,
    stale,
)
from trio_agent.testing.store_saves import (
    check_atomic,
    check_compare_and_set,
    check_context_rules,
    check_deltas,
    check_empty,
    check_guard,
    check_leases,
    check_numbers,
    check_receipts,
    check_round_trip,
    check_told_twice,
)
from trio_agent.testing.store_sessions import (
    check_cancellation,
    check_catalog,
    check_contents,
    check_delete,
    check_fork,
    check_limits,
    check_many,
    check_pages,
    check_prune,
    check_rewind,
    check_state,
    check_transfer,
)

Factory: TypeAlias = Callable[[], CheckpointStore]
Again: TypeAlias = Callable[[CheckpointStore], CheckpointStore]


async def check_store(factory: Factory, *, again: Again | None = None) -> None:
    """Check that a store keeps the contract of `CheckpointStore`.

    Runs for some seconds; call it from an async test::

        async def test_my_store(tmp_path):
            count = itertools.count()
            await check_store(
                lambda: MyStore(tmp_path / f"{next(count)}"),
                again=lambda store: MyStore(store.path),
            )

    Args:
        factory: Returns a new store over new, empty storage at each call. The check
            closes it.
        again: Opens the storage of a given store once more, as another process
            would, while the first is open or after it was closed. None if the
            storage cannot be shared or dies with its store.

    Raises:
        AssertionError: At the first rule that is broken; the traceback shows which.
    """
    for check in CHECKS:
        store = factory()
        try:
            await check(store)
            assert await store.verify() == (), "verify() must find nothing to complain about"
        finally:
            await store.aclose()
            await store.aclose()
    for dies_at in range(1, 8):
        await _check_crash(factory(), dies_at, "before", again)
        await _check_crash(factory(), dies_at, "after", again)
    if again is not None:
        for rival in RIVALS:
            store = factory()
            try:
                await rival(store, again)
            finally:
                await store.aclose()


CHECKS: Sequence[Callable[[CheckpointStore], Awaitable[None]]] = (
    check_empty,
    check_round_trip,
    check_compare_and_set,
    check_atomic,
    check_context_rules,
    check_leases,
    check_guard,
    check_numbers,
    check_deltas,
    check_told_twice,
    check_receipts,
    check_pages,
    check_limits,
    check_prune,
    check_contents,
    check_fork,
    check_rewind,
    check_delete,
    check_transfer,
    check_catalog,
    check_state,
    check_cancellation,
    check_many,
)
"""Each takes a new store and checks one rule."""


# --- crashes and rivals


async def _check_crash(
    store: CheckpointStore, dies_at: int, when: Any, again: Again | None
) -> None:
    """Whatever was acknowledged before a death is there after it, and the next one goes on."""
    mortal = MortalStore(store, dies_at=dies_at, when=when)
    acknowledged = -1
    checkpoint = Checkpoint(session_id="s", sequence=-1)
    lease = None
    try:
        lease = await mortal.claim("s", "mortal")
        for number in range(5):
            added = [UserItem(text=f"{number}", submission_id=f"s{number}")]
            checkpoint = following(checkpoint, *added)
            accepted = draft(SubmissionAccepted(), submission_id=f"s{number}")
            await mortal.save(checkpoint, added, lease=lease, events=[accepted])
            acknowledged = number
    except ProcessDied:
        pass
    await mortal.bury()
    reopened = store
    if again is not None:
        await store.aclose()
        reopened = again(store)
    try:
        found = await reopened.load("s")
        sequence = -1 if found is None else found.sequence
        happened = acknowledged + (when == "after" and 1 < dies_at <= 6)
        assert sequence == happened, f"save {happened} was the last, found {sequence}"
        for number in range(5):
            receipt = await reopened.receipt("s", f"s{number}")
            assert (receipt is not None) == (number <= happened)
        next_owner = await reopened.claim("s", "heir")
        if lease is not None and found is not None:
            await stale(reopened.save(following(found), lease=lease))
        await reopened.save(
            Checkpoint(session_id="s") if found is None else following(found), lease=next_owner
        )
        await reopened.release(next_owner)
        assert await reopened.verify() == ()
    finally:
        await reopened.aclose()


async def rival_saves(store: CheckpointStore, again: Again) -> None:
    """Of two openers that save the same number, one wins and the other is told."""
    other = again(store)
    try:
        checkpoint = await begin(store)
        for number in range(5):
            results: list[str] = []

            async with trio.open_nursery() as nursery:
                nursery.start_soon(_rival, store, checkpoint, "one", results)
                nursery.start_soon(_rival, other, checkpoint, "other", results)
            assert len(results) == 1, f"round {number}: {results} both won"
            loaded = await other.load("s")
            assert loaded is not None
            assert loaded.context[-1] == UserItem(text=results[0])
            assert await store.load("s") == loaded
            checkpoint = loaded
        assert len(await journal_of(other)) == 5
    finally:
        await other.aclose()


async def _rival(
    store: CheckpointStore, checkpoint: Checkpoint, name: str, winners: list[str]
) -> None:
    rival = following(checkpoint, UserItem(text=name))
    try:
        await store.save(rival, rival.context[-1:], events=[note(name)])
        winners.append(name)
    except StaleSessionError:
        pass


async def rival_owners(store: CheckpointStore, again: Again) -> None:
    """A second opener is refused, may take over, and the first one's guard ends."""
    other = again(store)
    try:
        mine = await store.claim("s", "the first")
        await store.save(Checkpoint.empty("s"), lease=mine)
        refusal = await owned(other.claim("s", "the second"))
        assert "the first" in str(refusal)
        await owned(other.delete_session("s"))
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(owned, store.guard(mine))
                await trio.testing.wait_all_tasks_blocked()
                theirs = await other.claim("s", "the second", takeover=True)
        await stale(store.save(Checkpoint(session_id="s", sequence=1), lease=mine))
        await other.save(Checkpoint(session_id="s", sequence=1), lease=theirs)
        await other.aclose()  # closing frees what it holds
        await store.release(await store.claim("s", "the first"))
    finally:
        await other.aclose()


RIVALS = (rival_saves, rival_owners)
"""Each opens the same storage twice."""
