"""Random frontends, models, tools and deaths against the real engine, on virtual time.

A run is a few lives of one session. In each life a random frontend acts while the
store may die before or after its n-th write; then another process opens the session,
under either policy. The last life answers every open question and waits until the
session is idle. Afterwards the journal, the checkpoint, the finished turns, the
transcript, everything that readers heard and everything that tools did must tell one
story. MUTANTS.md says which broken engines this finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import trio
import trio.testing
from hypothesis import event, given
from hypothesis import strategies as st

from trio_agent import Agent, AgentConfig, create_agent
from trio_agent.ambient import Ambient
from trio_agent.errors import AgentError, StreamInterruptedError, SubmissionRejectedError
from trio_agent.model.base import Emit, ModelCall, ModelOutput, ModelRequest
from trio_agent.protocol.events import (
    TRANSIENT_TYPES,
    AgentMessageDelta,
    AgentReasoningDelta,
    Event,
    SubmissionAccepted,
    TokenCount,
    ToolCallBegin,
    ToolCallEnd,
)
from trio_agent.protocol.items import AssistantItem, UserItem
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
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state.checkpoint import Effect
from trio_agent.state.recovery import Recovery
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.invariants import JournalCheck, check_checkpoint
from trio_agent.testing.models import StrictModel
from trio_agent.testing.mortal import MortalStore, ProcessDied
from trio_agent.tools.base import ToolContext
from trio_agent.tools.function import tool

REPEATABLE = frozenset({"read_only", "idempotent"})
MAX_STEPS = 6
FLEETING = (*TRANSIENT_TYPES, AgentMessageDelta, AgentReasoningDelta, TokenCount)
"""What a reader may hear and the journal not keep."""


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


@attrs.define(eq=False)
class World:
    """What tools did, over all lives."""

    entered: Counter[str] = attrs.field(factory=Counter)
    keys: dict[str, set[str]] = attrs.field(factory=dict)
    left: set[str] = attrs.field(factory=set)

    async def act(self, ctx: ToolContext, seconds: float, fails: bool) -> str:
        self.entered[ctx.call_id] += 1
        self.keys.setdefault(ctx.call_id, set()).add(ctx.idempotency_key)
        await trio.sleep(seconds)
        self.left.add(ctx.call_id)
        if fails:
            raise ValueError("no")
        return "done"

    def tools(self) -> list[Any]:
        """Return tools whose names begin with their effects: parallel, alone, and gated."""

        def make(name: str, effect: Effect, **options: Any) -> Any:
            @tool(name=name, effect=effect, **options)
            async def act(ctx: ToolContext, seconds: float = 0, fails: bool = False) -> str:
                return await self.act(ctx, seconds, fails)

            return act

        return [
            make("undeclared", "undeclared", exclusive=False),
            make("read_only", "read_only"),
            make("idempotent", "idempotent", exclusive=False),
            make("destructive", "destructive", exclusive=True),
            make("gated", "undeclared", exclusive=False, needs_approval=True),
            make("gated_alone", "destructive", exclusive=True, needs_approval=True),
            make("impatient", "undeclared", exclusive=False, timeout=0.5),
        ]


NAMES = ("undeclared", "read_only", "idempotent", "destructive", "gated", "gated_alone")
CALLS = st.builds(
    ModelCall,
    name=st.sampled_from((*NAMES, *NAMES, "impatient", "no_such_tool", "")),
    arguments=st.sampled_from(
        ("{}", "{}", '{"seconds":1}', '{"seconds":0.2,"fails":true}', "[1]", '{"seco', "")
    ),
    call_id=st.sampled_from(("call_0", "call_1", "", "x" * 500)),
)


HOW = st.sampled_from(["calls", "calls", "calls", "end", "end", "break", "on", "empty", "bug"])


class RandomModel:
    """Says and asks what is drawn; sometimes its stream breaks, or it says nothing."""

    def __init__(self, draw: Callable[..., Any], emitted: list[str]) -> None:
        self.draw = draw
        self.emitted = emitted

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        await trio.lowlevel.checkpoint()
        said = ""
        for _ in range(self.draw(st.integers(0, 2))):
            piece = f"<{len(self.emitted)}>"
            self.emitted.append(piece)
            said += piece
            await emit(piece)
        await trio.sleep(self.draw(st.sampled_from([0, 0, 0.3, 2])))
        how = self.draw(
            st.sampled_from(["end", "calls", "calls", "break", "bug", "on", "empty"])
        )
        usage = TokenUsage(input_tokens=3, output_tokens=1, total_tokens=4)
        match how:
            case "break":
                raise StreamInterruptedError
            case "bug":
                raise ZeroDivisionError("a bug in the adapter")
            case "calls":
                calls = self.draw(st.lists(CALLS, min_size=1, max_size=3))
                return ModelOutput.answer(said, *calls, usage=usage)
            case "on":
                return attrs.evolve(ModelOutput.answer(said, usage=usage), end_turn=False)
            case "empty" if not said:
                return ModelOutput(items=(AssistantItem(text=" \n"),), usage=usage)
            case _:
                return ModelOutput.answer(said + ".", usage=usage)


@attrs.define(eq=False)
class Frontend:
    """Everything that frontends asked for, and what they were promised."""

    accepted: set[str] = attrs.field(factory=set)
    rejected: set[str] = attrs.field(factory=set)
    unsure: dict[str, Op] = attrs.field(factory=dict)
    withdrawn: set[str] = attrs.field(factory=set)
    count: int = 0

    def fresh(self) -> str:
        self.count += 1
        return f"op{self.count}"

    async def submit(
        self, agent: Agent, op: Op, *, name: str | None = None, expect: str | None = None
    ) -> None:
        """Submit *op*; remember the promise, or that there is none."""
        name = self.fresh() if name is None else name
        if name not in self.accepted:
            self.unsure[name] = op
        try:
            receipt = await agent.submit(op, id=name, expect=expect)
        except SubmissionRejectedError:
            assert name not in self.accepted, "accepted before, refused now"
            self.unsure.pop(name, None)
            self.rejected.add(name)
            return
        assert receipt.status == ("duplicate" if name in self.accepted else receipt.status)
        self.unsure.pop(name, None)
        self.accepted.add(name)
        self.note(op)

    def note(self, op: Op) -> None:
        if isinstance(op, EditQueued | CancelQueued):
            self.withdrawn.add(op.submission_id)


WORDS = """say steer queue again idle stale interrupt edit cancel
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
    store: SlowMemory = attrs.field(factory=SlowMemory)
    world: World = attrs.field(factory=World)
    frontend: Frontend = attrs.field(factory=Frontend)
    emitted: list[str] = attrs.field(factory=list)
    heard: list[Event] = attrs.field(factory=list)
    model: StrictModel = attrs.field(init=False)
    ids: int = 0
    ticks: int = 0

    def __attrs_post_init__(self) -> None:
        self.model = StrictModel(RandomModel(self.draw, self.emitted))

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
            ambient=Ambient(now_ms=self.now_ms, new_id=self.new_id),
        )

    async def live(
        self, store: Any, policy: Recovery, program: Sequence[str], deadline: float
    ) -> None:
        """Live one life, until the program, the deadline or the store ends it."""
        with trio.move_on_after(deadline):
            async with create_agent(self.config(store, policy)) as agent:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.listen, agent)
                    for verb in program:
                        await act(verb, self.draw, agent, self.frontend)
                    nursery.cancel_scope.cancel()

    async def listen(self, agent: Agent) -> None:
        """Hear everything; what is heard must be durable by then."""
        async for heard in agent.events:
            found = await self.store.events_after("s", heard.sequence - 1, 1)
            assert found.latest_sequence >= heard.sequence, "published before it was durable"
            self.heard.append(heard)

    def die(self, policy: Recovery) -> None:
        """Live a life that a death may cut off."""
        program = ["say", *self.draw(st.lists(VERBS, max_size=8), label="program")]
        deadline = self.draw(st.sampled_from([1000, 1000, 5, 1, 0.005]), label="deadline")
        dies_at = self.draw(st.integers(1, 16) | st.none(), label="dies at write")
        when: Literal["before", "after"] = self.draw(st.sampled_from(["before", "after"]))
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
        run(mortal.bury)

    async def settle(self) -> None:
        """Live the last life: ask again what is unsure, answer all, wait until idle."""
        async with create_agent(self.config(self.store, Recovery.RESUME)) as agent:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.listen, agent)
                for name, op in list(self.frontend.unsure.items()):
                    await self.frontend.submit(agent, op, name=name)
                while True:
                    for question in agent.snapshot().approvals:
                        await self.frontend.submit(agent, ExecApproval(question.id, Denied()))
                    with trio.move_on_after(30):
                        await agent.wait_idle()
                        break
                nursery.cancel_scope.cancel()

    async def check(self) -> None:
        """Compare everything that was written, heard, promised and done."""
        checkpoint = await self.store.load("s")
        assert checkpoint is not None
        check_checkpoint(checkpoint)
        journal = list((await self.store.events_after("s", 0, 1_000_000)).events)
        page = await self.store.execution_page("s", limit=1000)
        check = JournalCheck(repeatable=REPEATABLE)
        check.read(journal)
        check.settle(
            checkpoint, list(reversed(page.executions)), withdrawn=self.frontend.withdrawn
        )
        assert checkpoint.active_execution is None
        assert not checkpoint.queue
        assert not self.model.refusals, self.model.refusals
        for turn in check.turns.values():
            assert turn.completed <= MAX_STEPS
        for end in {end.outcome for end in check.ended.values()}:
            event(f"a call {end}")
        for ending in set(check.outcomes.values()):
            event(f"a turn {ending}")
        for decision in {type(one.decision).__name__ for one in check.resolved.values()}:
            event(f"an approval {decision}")
        self.check_promises(journal)
        self.check_heard(journal)
        self.check_world(journal)
        batches = (await self.store.transcript_page("s", max_batches=1000)).batches
        transcript = [item for batch in reversed(batches) for item in batch.items]
        shown = [
            item
            for item in checkpoint.context
            if not (isinstance(item, UserItem) and item.internal)
        ]
        assert transcript == shown

    def check_promises(self, journal: list[Event]) -> None:
        accepted = {
            one.submission_id for one in journal if isinstance(one.msg, SubmissionAccepted)
        }
        assert self.frontend.accepted <= accepted
        assert not self.frontend.rejected & accepted

    def check_heard(self, journal: list[Event]) -> None:
        rows = {one.sequence: one for one in journal}
        for heard in self.heard:
            if not isinstance(heard.msg, FLEETING):
                assert rows.get(heard.sequence) == heard, f"heard {heard}"
        numbers = [heard.sequence for heard in self.heard]
        assert numbers == sorted(set(numbers)), "heard twice, or out of order"

    def check_world(self, journal: list[Event]) -> None:
        begun = {
            one.msg.call_id: one.msg for one in journal if isinstance(one.msg, ToolCallBegin)
        }
        ended = {
            one.msg.call_id: one.msg for one in journal if isinstance(one.msg, ToolCallEnd)
        }
        for call_id, times in self.world.entered.items():
            assert call_id in begun, "entered before its begin was durable"
            name = begun[call_id].name
            assert times == 1 or name in REPEATABLE, f"{name} was entered {times} times"
            assert ended[call_id].outcome not in {"not_started", "denied"}, "it was entered"
            assert len(self.world.keys[call_id]) == 1
        for call_id, end in ended.items():
            if end.outcome == "finished":
                assert call_id in self.world.left, "it did not finish"


def run(function: Callable[..., Any], *args: Any) -> None:
    trio.run(function, *args, clock=trio.testing.MockClock(autojump_threshold=0))


@given(st.data(), st.lists(st.sampled_from(Recovery), min_size=1, max_size=3))
def test_every_interleaving_tells_one_story(data: st.DataObject, lives: list[Recovery]) -> None:
    session = Run(data.draw)
    for policy in lives:
        session.die(policy)
    run(session.settle)
    run(session.check)
