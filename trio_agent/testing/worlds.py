"""What surrounds a session in a property test: tools, a model, frontends, and their story.

Everything random is drawn by the caller's ``draw``, so Hypothesis can shrink it.
`check_story` compares what was written, heard, promised and done. Needs Hypothesis
(the extra ``testing``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeAlias

import attrs
import trio
from hypothesis import event
from hypothesis import strategies as st

from trio_agent.agent.handle import Agent
from trio_agent.errors import StreamInterruptedError, SubmissionRejectedError
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
    Op,
)
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state.checkpoint import Effect
from trio_agent.store.base import CheckpointStore
from trio_agent.testing.invariants import JournalCheck, check_checkpoint
from trio_agent.tools.base import ToolContext
from trio_agent.tools.function import tool

Draw: TypeAlias = Callable[..., Any]

SESSION: Final = "s"
REPEATABLE: Final = frozenset({"read_only", "idempotent"})
"""The tools of a `World` that may be entered again; they are called as their effect is."""

FLEETING: Final = (*TRANSIENT_TYPES, AgentMessageDelta, AgentReasoningDelta, TokenCount)
"""What a reader may hear and the journal not keep."""

DECISIONS: Final[tuple[Decision, ...]] = (
    Approved(),
    Approved(arguments={"seconds": 0.1}),
    Denied("no"),
    Abort(),
)


@attrs.define(eq=False)
class World:
    """What the tools of a session did to it, over all processes."""

    entered: Counter[str] = attrs.field(factory=Counter[str])
    keys: dict[str, set[str]] = attrs.field(factory=dict[str, "set[str]"])
    left: set[str] = attrs.field(factory=set[str])

    async def act(self, ctx: ToolContext, seconds: float, fails: bool) -> str:
        """Record the entry of a call, take *seconds*, and record that it got through."""
        self.entered[ctx.call_id] += 1
        self.keys.setdefault(ctx.call_id, set()).add(ctx.idempotency_key)
        await trio.sleep(seconds)
        self.left.add(ctx.call_id)
        if fails:
            raise ValueError("no")
        return "done"

    def tools(self) -> list[Any]:
        """Return tools of every effect: parallel, alone, gated, and one without patience."""

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


_NAMES = ("undeclared", "read_only", "idempotent", "destructive", "gated", "gated_alone")

CALLS: Final[st.SearchStrategy[ModelCall]] = st.builds(
    ModelCall,
    name=st.sampled_from((*_NAMES, *_NAMES, "impatient", "no_such_tool", "")),
    arguments=st.sampled_from(
        ("{}", "{}", '{"seconds":1}', '{"seconds":0.2,"fails":true}', "[1]", '{"seco', "")
    ),
    call_id=st.sampled_from(("call_0", "call_1", "", "x" * 500)),
)
"""Calls of a `World`'s tools, also bad ones: no such tool, broken arguments, odd ids."""

_HOW = st.sampled_from(
    ["calls", "calls", "calls", "end", "end", "break", "on", "empty", "bug", "stall"]
)


class RandomModel:
    """Says and asks what is drawn; sometimes its stream breaks, or it says nothing.

    Args:
        draw: Draws from a strategy.
        calls: What it may ask for.
    """

    def __init__(self, draw: Draw, calls: st.SearchStrategy[ModelCall] = CALLS) -> None:
        self._draw = draw
        self._calls = calls
        self._pieces = 0

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:  # noqa: ARG002
        """See `Model.respond`."""
        await trio.lowlevel.checkpoint()
        said = ""
        for _ in range(self._draw(st.integers(0, 2))):
            self._pieces += 1
            said += f"<{self._pieces}>"
            await emit(f"<{self._pieces}>")
        await trio.sleep(self._draw(st.sampled_from([0, 0, 0.3, 2])))
        how = self._draw(_HOW)
        usage = TokenUsage(input_tokens=3, output_tokens=1, total_tokens=4)
        match how:
            case "stall":
                await trio.sleep(1_000)
                raise StreamInterruptedError
            case "break":
                raise StreamInterruptedError
            case "bug":
                raise ZeroDivisionError("a bug in the adapter")
            case "calls":
                calls = self._draw(st.lists(self._calls, min_size=1, max_size=3))
                return ModelOutput.answer(said, *calls, usage=usage)
            case "on":
                return attrs.evolve(ModelOutput.answer(said, usage=usage), end_turn=False)
            case "empty" if not said:
                return ModelOutput(items=(AssistantItem(text=" \n"),), usage=usage)
            case _:
                return ModelOutput.answer(said + ".", usage=usage)


@attrs.define(eq=False)
class Frontend:
    """Everything that frontends asked for, and what they were promised and heard.

    ``withdrawals`` are the ops that take a message back or replace it, with that message.
    """

    accepted: set[str] = attrs.field(factory=set[str])
    rejected: set[str] = attrs.field(factory=set[str])
    unsure: dict[str, tuple[Op, str | None]] = attrs.field(
        factory=dict[str, "tuple[Op, str | None]"]
    )
    withdrawals: dict[str, str] = attrs.field(factory=dict[str, str])
    heard: list[Event] = attrs.field(factory=list[Event])
    count: int = 0

    def fresh(self) -> str:
        """Return an id that no op had before."""
        self.count += 1
        return f"op{self.count}"

    async def submit(
        self, agent: Agent, op: Op, *, name: str | None = None, expect: str | None = None
    ) -> None:
        """Submit *op*, and remember the promise, or that there is none.

        Raises:
            AgentError: If the session is over; the op stays in ``unsure``.
        """
        name = self.fresh() if name is None else name
        if name not in self.accepted:
            self.unsure[name] = op, expect
        if isinstance(op, EditQueued | CancelQueued):
            self.withdrawals[name] = op.submission_id
        try:
            receipt = await agent.submit(op, id=name, expect=expect)
        except SubmissionRejectedError:
            assert name not in self.accepted, "accepted before, refused now"
            self.unsure.pop(name, None)
            self.rejected.add(name)
            return
        if name in self.accepted:
            assert receipt.status == "duplicate", "accepted twice"
        self.rejected.discard(name)
        self.unsure.pop(name, None)
        self.accepted.add(name)

    async def listen(self, agent: Agent, store: CheckpointStore) -> None:
        """Hear everything, and check that it is durable by then."""
        async for told in agent.events:
            found = await store.events_after(agent.session_id, told.sequence - 1, 1)
            assert found.latest_sequence >= told.sequence, "published before it was durable"
            self.heard.append(told)

    async def settle(self, agent: Agent) -> None:
        """Ask again what is unsure, deny every open question, and wait until idle."""
        for name, (op, expect) in list(self.unsure.items()):
            await self.submit(agent, op, name=name, expect=expect)
        for _ in range(200):
            for question in agent.snapshot().approvals:
                await self.submit(agent, ExecApproval(question.id, Denied()))
            with trio.move_on_after(30):
                await agent.wait_idle()
                return
        raise AssertionError(f"the session never became idle: {agent.snapshot()}")


async def check_story(
    store: CheckpointStore,
    world: World,
    frontend: Frontend,
    *,
    repeatable: Collection[str] = REPEATABLE,
    max_model_steps: int | None = None,
    steers_join: bool = False,
) -> JournalCheck:
    """Compare everything that was written, heard, promised and done in session ``"s"``.

    Raises:
        AssertionError: If two of these do not agree.
    """
    checkpoint = await store.load(SESSION)
    assert checkpoint is not None
    check_checkpoint(checkpoint)
    journal = (await store.events_after(SESSION, 0, 1_000_000)).events
    page = await store.execution_page(SESSION, limit=1_000)
    check = JournalCheck(repeatable=repeatable, steers_join=steers_join)
    check.read(journal)
    check.settle(
        checkpoint,
        list(reversed(page.executions)),
        withdrawn={
            message for name, message in frontend.withdrawals.items() if name in check.accepted
        },
    )
    for turn in check.turns.values():
        assert max_model_steps is None or turn.completed <= max_model_steps
    _check_promises(journal, frontend)
    _check_heard(journal, frontend)
    _check_world(journal, world, check, repeatable)
    batches = (await store.transcript_page(SESSION, max_batches=100_000)).batches
    transcript = [item for batch in reversed(batches) for item in batch.items]
    shown = [
        one for one in checkpoint.context if not (isinstance(one, UserItem) and one.internal)
    ]
    if checkpoint.context_epoch == 0:
        assert transcript == shown
    for end in {one.outcome for one in check.ended.values()}:
        event(f"a call {end}")
    for ending in set(check.outcomes.values()):
        event(f"a turn {ending}")
    return check


def _check_promises(journal: Sequence[Event], frontend: Frontend) -> None:
    accepted = {one.submission_id for one in journal if isinstance(one.msg, SubmissionAccepted)}
    assert frontend.accepted <= accepted, "a promise was lost"
    assert not frontend.rejected & accepted, "refused, and done all the same"


def _check_heard(journal: Sequence[Event], frontend: Frontend) -> None:
    rows = {one.sequence: one for one in journal}
    for told in frontend.heard:
        if not isinstance(told.msg, FLEETING):
            assert rows.get(told.sequence) == told, f"heard {told}"
    numbers = [told.sequence for told in frontend.heard]
    assert numbers == sorted(set(numbers)), "heard twice, or out of order"


def _check_world(
    journal: Sequence[Event], world: World, check: JournalCheck, repeatable: Collection[str]
) -> None:
    told = [one.msg for one in journal]
    begun = {msg.call_id: msg for msg in told if isinstance(msg, ToolCallBegin)}
    ended = {msg.call_id: msg for msg in told if isinstance(msg, ToolCallEnd)}
    for call_id, times in world.entered.items():
        assert call_id in begun, "entered before its begin was durable"
        name = begun[call_id].name
        assert times == 1 or name in repeatable, f"{name} was entered {times} times"
        assert len(world.keys[call_id]) == 1, "one call had two keys"
        if call_id in ended:
            assert ended[call_id].outcome not in {"not_started", "denied"}, "it was entered"
    for question in check.resolved.values():
        if isinstance(question.decision, Denied | Abort):
            assert not world.entered[question.call_id], "denied, and entered all the same"
    for call_id, end in ended.items():
        if end.outcome == "finished" and end.name in {*_NAMES, "impatient"}:
            assert call_id in world.left, "reported as finished, and it did not finish"
