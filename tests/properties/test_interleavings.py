"""Random frontends, models, tools and deaths against the real engine, on virtual time.

A run is a few lives of one session. In each life a random frontend acts while the
store may die before or after its n-th write; then another process opens the session,
under either policy. The last life answers every open question and waits until the
session is idle. Afterwards the journal, the checkpoint, the finished turns, the
transcript, everything that readers heard and everything that tools did must tell one
story. MUTANTS.md says which broken engines this finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import trio
import trio.testing
from hypothesis import event, given
from hypothesis import strategies as st

from trio_agent import Agent, AgentConfig, create_agent
from trio_agent.ambient import Ambient
from trio_agent.errors import AgentError
from trio_agent.protocol.events import (
    Event,
    ExecApprovalRequest,
)
from trio_agent.protocol.ops import (
    Abort,
    Approved,
    CancelQueued,
    Decision,
    Denied,
    EditQueued,
    ExecApproval,
    Interrupt,
    Op,
    UserInput,
)
from trio_agent.state.recovery import Recovery
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.models import StrictModel
from trio_agent.testing.mortal import MortalStore, ProcessDied
from trio_agent.testing.worlds import Frontend, RandomModel, World, check_story

MAX_STEPS = 6


class SlowMemory(MemoryCheckpoint):
    """Memory that takes as long as a disk does; once begun, a write is not cancelled."""

    async def save(self, *args: Any, **kwargs: Any) -> tuple[Event, ...]:
        await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=True):
            await trio.sleep(0.01)
            return await super().save(*args, **kwargs)
        raise AssertionError("a shield lets nothing through")

    async def append_events(self, *args: Any, **kwargs: Any) -> tuple[Event, ...]:
        await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=True):
            await trio.sleep(0.003)
            return await super().append_events(*args, **kwargs)
        raise AssertionError("a shield lets nothing through")


WORDS = """say steer steer steer queue again idle stale interrupt edit cancel
    approve approve edited deny abort sleep sleep rest"""
VERBS = st.sampled_from(WORDS.split())
DECISIONS: dict[str, Decision] = {
    "approve": Approved(),
    "edited": Approved(arguments={"seconds": 0.1}),
    "deny": Denied("no"),
    "abort": Abort(),
}


async def act(verb: str, draw: Callable[..., Any], agent: Agent, frontend: Frontend) -> None:
    """Do one thing that a frontend may do."""
    snapshot = agent.snapshot()
    match verb:
        case "rest":
            await trio.sleep(10)
        case "say":
            await frontend.submit(agent, UserInput(text="go"))
        case "steer" | "queue":
            await frontend.submit(agent, UserInput(text=verb, delivery=verb))
        case "again":
            await frontend.submit(agent, UserInput(text="again"), name="again")
        case "idle":
            await frontend.submit(agent, UserInput(text="if idle"), expect="idle")
        case "stale":
            await frontend.submit(agent, UserInput(text="stale"), expect="no such turn")
        case "interrupt":
            await frontend.submit(agent, Interrupt(snapshot.turn_id or "none"))
        case "edit" | "cancel" if snapshot.queued:
            queued = draw(st.sampled_from(snapshot.queued)).submission_id
            op: Op = EditQueued(queued, "edited") if verb == "edit" else CancelQueued(queued)
            await frontend.submit(agent, op)
        case "approve" | "edited" | "deny" | "abort" if snapshot.approvals:
            question = draw(st.sampled_from(snapshot.approvals)).id
            await frontend.submit(agent, ExecApproval(question, DECISIONS[verb]))
        case _:
            await trio.sleep(draw(st.sampled_from([0, 0.02, 0.4, 3])))


@attrs.define(eq=False)
class Run:
    """One session over several lives."""

    draw: Callable[..., Any]
    attended: bool = False
    store: SlowMemory = attrs.field(factory=SlowMemory)
    world: World = attrs.field(factory=World)
    frontend: Frontend = attrs.field(factory=Frontend)
    model: StrictModel = attrs.field(init=False)
    opened: bool = False
    ids: int = 0
    ticks: int = 0

    def __attrs_post_init__(self) -> None:
        self.model = StrictModel(RandomModel(self.draw))

    def new_id(self) -> str:
        self.ids += 1
        return f"id{self.ids}"

    def now_ms(self) -> int:
        """Return a clock that jumps back and forth."""
        self.ticks += 1
        return 1_000 + (self.ticks * 7) % 40

    def config(self, store: Any, policy: Recovery) -> AgentConfig:
        return AgentConfig(
            model=self.model,
            checkpoints=store,
            session_id="s",
            tools=self.world.tools(),
            recovery=policy,
            max_model_steps=MAX_STEPS,
            shutdown_grace=1.0,
            on_approval=self.answer if self.attended else None,
            ambient=Ambient(now_ms=self.now_ms, new_id=self.new_id),
        )

    async def answer(self, request: ExecApprovalRequest) -> Decision:
        """Answer in process, at once or after a while, what frontends may answer as well."""
        await trio.sleep(self.draw(st.sampled_from([0, 0, 0.3])))
        decision: Decision = self.draw(st.sampled_from([Approved(), Approved(), Denied()]))
        return decision

    async def live(
        self, store: Any, policy: Recovery, program: Sequence[str], deadline: float
    ) -> None:
        """Live one life, until the program, the deadline or the store ends it."""
        with trio.move_on_after(deadline):
            async with create_agent(self.config(store, policy)) as agent:
                self.opened = True
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.frontend.listen, agent, self.store)
                    for verb in program:
                        await act(verb, self.draw, agent, self.frontend)
                    nursery.cancel_scope.cancel()

    def die(self, policy: Recovery) -> None:
        """Live a life that a death may cut off."""
        program = ["say", *self.draw(st.lists(VERBS, max_size=8), label="program")]
        deadline = self.draw(st.sampled_from([1000, 1000, 5, 1, 0.005]), label="deadline")
        dies_at = self.draw(st.integers(1, 16) | st.none(), label="dies at write")
        when: Literal["before", "after"] = self.draw(st.sampled_from(["before", "after"]))
        self.opened = False
        mortal = MortalStore(self.store, dies_at=dies_at, when=when)
        try:
            run(self.live, mortal, policy, program, deadline)
        except ProcessDied:
            pass
        except BaseExceptionGroup as group:
            rest = group.split(ProcessDied)[1]
            if rest is not None:
                raise
        except AgentError:
            if not mortal.dead:
                raise
        event(f"died: {mortal.dead}")
        if self.opened and not mortal.dead:
            run(self.check_left)
        run(mortal.bury)

    async def settle(self) -> None:
        """Live the last life: ask again what is unsure, answer all, wait until idle."""
        async with create_agent(self.config(self.store, Recovery.RESUME)) as agent:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.frontend.listen, agent, self.store)
                await self.frontend.settle(agent)
                nursery.cancel_scope.cancel()

    async def check(self) -> None:
        """Compare everything that was written, heard, promised and done."""
        await check_story(
            self.store,
            self.world,
            self.frontend,
            max_model_steps=MAX_STEPS,
            steers_join=True,
        )
        checkpoint = await self.store.load("s")
        assert checkpoint is not None
        assert checkpoint.active_execution is None
        assert not checkpoint.queue
        assert not self.model.refusals, self.model.refusals

    async def check_left(self) -> None:
        """A session that was left in any way but by death is idle on disk."""
        checkpoint = await self.store.load("s")
        assert checkpoint is None or checkpoint.active_execution is None


def run(function: Callable[..., Any], *args: Any) -> None:
    trio.run(function, *args, clock=trio.testing.MockClock(autojump_threshold=0))


@given(st.data(), st.lists(st.sampled_from(Recovery), min_size=1, max_size=3), st.booleans())
def test_every_interleaving_tells_one_story(
    data: st.DataObject, lives: list[Recovery], attended: bool
) -> None:
    session = Run(data.draw, attended=attended)
    for policy in lives:
        session.die(policy)
    run(session.settle)
    run(session.check)
