"""`AgentMachine`: a session that random frontends use and random deaths cut off.

Needs Hypothesis (the extra ``testing``).
"""

from __future__ import annotations

import queue
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast

import outcome
import trio
import trio.testing
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from trio_agent.agent.create import create_agent
from trio_agent.agent.handle import Agent, Snapshot
from trio_agent.ambient import Ambient
from trio_agent.config import AgentConfig
from trio_agent.errors import AgentError
from trio_agent.middleware.base import Middleware
from trio_agent.middleware.contexts import (
    PostToolContext,
    PreModelContext,
    PreToolContext,
    StopContext,
    TurnEndContext,
)
from trio_agent.model.base import Emit, ModelCall, ModelOutput, ModelRequest
from trio_agent.model.router import ModelRouter
from trio_agent.protocol.ops import (
    CancelQueued,
    Decision,
    EditQueued,
    ExecApproval,
    Interrupt,
    Op,
    SetModel,
    UserInput,
)
from trio_agent.state.recovery import Recovery
from trio_agent.store.base import CheckpointStore
from trio_agent.store.memory import MemoryCheckpoint
from trio_agent.testing.invariants import check_checkpoint
from trio_agent.testing.models import StrictModel
from trio_agent.testing.mortal import MortalStore, ProcessDied
from trio_agent.testing.worlds import (
    CALLS,
    DECISIONS,
    REPEATABLE,
    SESSION,
    Frontend,
    RandomModel,
    World,
    check_story,
)

T = TypeVar("T")

OTHER_ROUTE = "other"


class TrioHost:
    """A trio loop on virtual time that stands still between calls of `run`.

    Background tasks live on from one call to the next. Not for use inside of trio.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._over: outcome.Outcome[None] | None = None
        self._nursery: trio.Nursery | None = None
        trio.lowlevel.start_guest_run(
            self._main,
            run_sync_soon_threadsafe=self._calls.put,
            done_callback=self._done,
            clock=trio.testing.MockClock(autojump_threshold=0),
            restrict_keyboard_interrupt_to_checkpoints=True,
        )
        self._pump(lambda: self._nursery is not None)

    async def _main(self) -> None:
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    def _done(self, result: outcome.Outcome[None]) -> None:
        self._over = result

    def _pump(self, until: Callable[[], bool]) -> None:
        while not until() and self._over is None:
            self._calls.get(timeout=60)()

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run *function* to its end, and the background tasks beside it."""
        results: list[outcome.Outcome[T]] = []

        async def task() -> None:
            results.append(await outcome.acapture(function, *args))

        assert self._nursery is not None
        self._nursery.start_soon(task)
        self._pump(lambda: bool(results))
        assert results, f"the loop is over: {self._over}"
        return results[0].unwrap()

    def start(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start a background task, which must not raise."""
        assert self._nursery is not None
        self._nursery.start_soon(function, *args)

    def close(self) -> None:
        """Cancel everything and wait for its end."""
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel(reason="the host is closed")
        self._pump(lambda: self._over is not None)
        assert self._over is not None
        self._over.unwrap()


class Moody(Middleware):
    """Raises in the hook that ``mood`` names, once; adds guidance otherwise."""

    def __init__(self) -> None:
        self.mood: str | None = None

    def _mood(self, hook: str) -> None:
        if self.mood == hook:
            self.mood = None
            raise RuntimeError(f"a bug in {hook}")

    async def pre_model(self, ctx: PreModelContext) -> None:
        """See `Middleware.pre_model`."""
        await trio.lowlevel.checkpoint()
        ctx.state = (ctx.state or 0) + 1
        self._mood("pre_model")

    async def pre_tool_use(self, ctx: PreToolContext) -> None:
        """See `Middleware.pre_tool_use`."""
        await trio.lowlevel.checkpoint()
        ctx.add_hidden("guidance")
        self._mood("pre_tool_use")

    async def post_tool_use(self, ctx: PostToolContext) -> None:
        """See `Middleware.post_tool_use`."""
        await trio.lowlevel.checkpoint()
        ctx.add_hidden("more guidance")
        self._mood("post_tool_use")

    async def stop(self, ctx: StopContext) -> None:
        """See `Middleware.stop`."""
        await trio.lowlevel.checkpoint()
        if not ctx.active and self.mood == "continue":
            self.mood = None
            ctx.continue_with("go on")
        self._mood("stop")

    async def turn_end(self, ctx: TurnEndContext) -> None:  # noqa: ARG002
        """See `Middleware.turn_end`."""
        await trio.lowlevel.checkpoint()
        self._mood("turn_end")


MOODS = st.sampled_from(
    ["pre_model", "pre_tool_use", "post_tool_use", "stop", "turn_end", "continue"]
)


SECONDS = st.sampled_from([5, 5, 0.6, 0])
"""How long a frontend waits after it has acted: most often until a turn is over."""


class AgentMachine(RuleBasedStateMachine):
    """Uses, kills and reopens one session, and checks that all it leaves tells one story.

    Derive from it to put your own store, tools or middlewares under the same
    treatment::

        class MyMachine(AgentMachine):
            def make_store(self):
                return SqliteCheckpoint(path, run_sync=in_place)

        TestMyMachine = MyMachine.TestCase

    Rules submit messages (to start, steer, queue; stale, repeated, with an
    expectation), edit and withdraw them, interrupt, answer approvals, switch the
    model, let hooks raise, let time pass, take the session away, close or cancel it,
    and let the process die before a write, after it, or anywhere between. Whenever the
    session is down its journal, checkpoint, finished turns and transcript are compared
    with what readers heard, frontends were promised and tools did; no model is ever
    sent a history that a strict provider would refuse. At the end the session is
    opened once more and everything is settled.

    The loop stands still between rules and time is virtual, so a failure shrinks. All
    that the store does must happen in the loop's thread: a store that uses threads
    needs a ``run_sync`` that does not.

    Attributes:
        max_model_steps: Of one turn.
        store: What `make_store` returned.
        world: What the tools of the machine did.
    """

    max_model_steps: ClassVar[int] = 6

    def __init__(self) -> None:
        super().__init__()
        self.host = TrioHost()
        self.store = self.make_store()
        self.world = World()
        self.frontend = Frontend()
        self.moody = Moody()
        self.agent: Agent | None = None
        self._mortal: MortalStore | None = None
        self._scope = trio.CancelScope()
        self._opened = trio.Event()
        self._over = trio.Event()
        self._failure: BaseException | None = None
        self._expected = False
        self._data: st.DataObject | None = None
        self._ids = 0
        self._ticks = 0
        self._strict = StrictModel(RandomModel(self._draw, self.calls()))

    # --- what a subclass may change

    def make_store(self) -> CheckpointStore:
        """Return the store of a run; it outlives every death. Default: memory."""
        return MemoryCheckpoint()

    def tools(self) -> Sequence[Any]:
        """Return the session's tools; include ``super().tools()``."""
        return self.world.tools()

    def calls(self) -> st.SearchStrategy[ModelCall]:
        """Return what the model may ask for. Default: calls of the machine's own tools."""
        return CALLS

    def repeatable(self) -> frozenset[str]:
        """Return the names of the tools that a restart may enter again for one call."""
        return REPEATABLE

    def options(self) -> Mapping[str, Any]:
        """Return further fields of `AgentConfig`, such as more ``middleware``."""
        return {"middleware": (self.moody,)}

    # --- plumbing

    def _draw(self, strategy: st.SearchStrategy[T]) -> T:
        assert self._data is not None
        return self._data.draw(strategy)

    def _new_id(self) -> str:
        self._ids += 1
        return f"id{self._ids}"

    def _now_ms(self) -> int:
        """Return a clock that jumps back and forth."""
        self._ticks += 1
        return 1_000 + (self._ticks * 7) % 40

    def _config(self, store: CheckpointStore, policy: Recovery) -> AgentConfig:
        router = ModelRouter("default", self._strict)
        router.register(OTHER_ROUTE, self._strict)
        return AgentConfig(
            model=router,
            checkpoints=store,
            session_id=SESSION,
            tools=self.tools(),
            recovery=policy,
            max_model_steps=self.max_model_steps,
            shutdown_grace=1.0,
            ambient=Ambient(now_ms=self._now_ms, new_id=self._new_id),
            **self.options(),
        )

    async def _live(self, config: AgentConfig) -> None:
        try:
            with self._scope:
                async with create_agent(config) as agent:
                    self.agent = agent
                    self._opened.set()
                    await self.frontend.listen(agent, self.store)
        except BaseException as exc:  # noqa: ASYNC103  # a rule looks at it, see _end
            self._failure = exc
            if isinstance(exc, trio.Cancelled):
                raise
        finally:
            self._over.set()

    async def _wait_open(self) -> None:
        async with trio.open_nursery() as nursery:
            for opened in (self._opened, self._over):
                nursery.start_soon(_cancel_when, opened, nursery.cancel_scope)

    async def _settled(self) -> None:
        await trio.testing.wait_all_tasks_blocked()

    def _act(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Do something with the open session, and look what became of it."""

        async def act() -> None:
            with trio.fail_after(5_000):
                result = await outcome.acapture(function, *args)
                refused = isinstance(getattr(result, "error", None), AgentError)
                if refused:  # is the session over? then let its block end
                    with trio.move_on_after(10):
                        await self._over.wait()
                if not refused or not self._over.is_set():
                    result.unwrap()

        self.host.run(act)
        self.host.run(self._settled)
        if self._over.is_set():
            self._end()

    def _submit(self, op: Op, name: str | None = None, expect: str | None = None) -> None:
        async def submit() -> None:
            assert self.agent is not None
            await self.frontend.submit(self.agent, op, name=name, expect=expect)

        self._act(submit)

    def _end(self) -> None:
        """The session is down: was that expected, and does it tell one story?"""
        failure, mortal = self._failure, self._mortal
        assert mortal is not None
        event(f"the session ended, dead: {mortal.dead}")
        if failure is not None and not self._expected:
            strange = (
                leaf
                for leaf in _leaves(failure)
                if not isinstance(leaf, ProcessDied | AgentError)
            )
            assert mortal.dead, failure
            assert not any(strange), failure
        self.agent = None
        self.host.run(mortal.bury)
        self.host.run(self._check, mortal.dead or self._expected)

    async def _check(self, died: bool) -> None:
        if await self.store.load(SESSION) is None:
            assert died, "an opening left nothing"
            return
        checkpoint = await self.store.load(SESSION)
        assert checkpoint is not None
        assert died or checkpoint.active_execution is None, "closed in the middle of a turn"
        check_checkpoint(checkpoint)
        await check_story(
            self.store,
            self.world,
            self.frontend,
            repeatable=self.repeatable(),
            max_model_steps=self.max_model_steps,
        )
        assert not self._strict.refusals, self._strict.refusals

    def _pass(self, seconds: float) -> None:
        """Let time pass, if the session is open still."""
        if seconds and self.agent is not None:
            self._act(trio.sleep, seconds)

    def _snapshot(self) -> Snapshot:
        assert self.agent is not None
        return self.agent.snapshot()

    def _is_open(self) -> bool:
        return self.agent is not None

    # --- opening, and dying

    @precondition(lambda self: not self._is_open())
    @rule(
        data=st.data(),
        policy=st.sampled_from(Recovery),
        dies_at=st.none() | st.integers(1, 20),
        when=st.sampled_from(["before", "after"]),
    )
    def open(
        self,
        data: st.DataObject,
        policy: Recovery,
        dies_at: int | None,
        when: Literal["before", "after"],
    ) -> None:
        """Open the session in a process that may die at one of its writes."""
        self._data = data
        self._mortal = MortalStore(self.store, dies_at=dies_at, when=when)
        self._scope = trio.CancelScope()
        self._opened, self._over, self._expected = trio.Event(), trio.Event(), False
        self._failure = None
        config = self._config(self._mortal, policy)
        self.host.start(self._live, config)
        self.host.run(self._wait_open)
        self.host.run(self._settled)
        if self._over.is_set():
            self._end()

    @precondition(_is_open)
    @rule(data=st.data(), how=st.sampled_from(["close", "cancel", "kill", "rival"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        """End the session: in order, from outside, without a word, or to somebody else."""
        self._data = data
        event(f"left: {how}")

        async def leave() -> None:
            assert self.agent is not None
            assert self._mortal is not None
            if how == "close":
                self.agent.close()
            elif how == "rival":
                self._expected = True
                lease = await self.store.claim(SESSION, "a rival", takeover=True)
                await self.store.release(lease)
                self._scope.cancel(reason="the rival has it")
            else:
                self._mortal.dead = how == "kill"
                self._scope.cancel(reason=how)
            await self._over.wait()

        self._act(leave)

    # --- what frontends do

    @precondition(_is_open)
    @rule(
        data=st.data(),
        delivery=st.sampled_from([None, None, "steer", "queue"]),
        again=st.sampled_from([False, False, False, True]),
        expect=st.sampled_from([None, None, None, None, "idle", "turn", "stale"]),
        then=SECONDS,
    )
    def say(
        self,
        data: st.DataObject,
        delivery: Literal["steer", "queue"] | None,
        again: bool,
        expect: str | None,
        then: float,
    ) -> None:
        """Submit a message, *again* under an id that was used before; let time pass."""
        self._data = data
        if expect == "turn":
            expect = self._snapshot().turn_id
        op = UserInput(text="again") if again else UserInput(text="go", delivery=delivery)
        self._submit(op, "again" if again else None, expect)
        self._pass(then)

    @precondition(lambda self: self._is_open() and self._snapshot().queued)
    @rule(data=st.data(), edits=st.booleans())
    def change_queue(self, data: st.DataObject, edits: bool) -> None:
        """Edit a message that waits, or take it back."""
        self._data = data
        queued = data.draw(st.sampled_from(self._snapshot().queued)).submission_id
        self._submit(EditQueued(queued, "edited") if edits else CancelQueued(queued))

    @precondition(_is_open)
    @rule(data=st.data(), stale=st.booleans())
    def interrupt(self, data: st.DataObject, stale: bool) -> None:
        """Interrupt the turn, or one that does not run."""
        self._data = data
        turn_id = None if stale else self._snapshot().turn_id
        self._submit(Interrupt(turn_id or "no such turn"))

    @precondition(lambda self: self._is_open() and self._snapshot().approvals)
    @rule(data=st.data(), decision=st.sampled_from(DECISIONS), then=SECONDS)
    def decide(self, data: st.DataObject, decision: Decision, then: float) -> None:
        """Answer an open question, and let time pass."""
        self._data = data
        question = data.draw(st.sampled_from(self._snapshot().approvals))
        self._submit(ExecApproval(question.id, decision))
        self._pass(then)

    @precondition(_is_open)
    @rule(data=st.data(), route=st.sampled_from(["default", OTHER_ROUTE, "no such route"]))
    def switch_model(self, data: st.DataObject, route: str) -> None:
        """Switch the route; refused while a turn runs."""
        self._data = data
        self._submit(SetModel(route))

    @rule(mood=MOODS)
    def upset_a_hook(self, mood: str) -> None:
        """Let a hook raise when it runs next, or the stop hook go on once."""
        self.moody.mood = mood

    @precondition(_is_open)
    @rule(data=st.data(), seconds=st.sampled_from([0.05, 0.6, 5, 5, 100]))
    def wait(self, data: st.DataObject, seconds: float) -> None:
        """Let time pass."""
        self._data = data
        self._act(trio.sleep, seconds)

    # --- the end

    def teardown(self) -> None:
        """Settle everything in a last life, and check the whole story."""
        try:
            if self._data is not None:
                self._settle()
        finally:
            self.host.close()

    def _settle(self) -> None:
        self._strict.inner = _Quiet()
        if self.agent is not None:
            self._leave_for_good()
        self._mortal = MortalStore(self.store)
        self._scope = trio.CancelScope()
        self._opened, self._over, self._expected = trio.Event(), trio.Event(), False
        self._failure = None
        self.host.start(self._live, self._config(self._mortal, Recovery.RESUME))
        self.host.run(self._wait_open)
        assert self.agent is not None, self._failure

        async def settle() -> None:
            assert self.agent is not None
            await self.frontend.settle(self.agent)
            self.agent.close()
            await self._over.wait()

        self._act(settle)

    def _leave_for_good(self) -> None:
        """Close the session that is open at the end of a run."""

        async def leave() -> None:
            assert self.agent is not None
            self.agent.close()
            await self._over.wait()

        self._act(leave)


async def _cancel_when(event_: trio.Event, scope: trio.CancelScope) -> None:
    await event_.wait()
    scope.cancel(reason="one of them has happened")


def _leaves(exc: BaseException) -> list[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", exc)
        return [leaf for child in group.exceptions for leaf in _leaves(child)]
    return [exc]


class _Quiet:
    """Ends every turn: at the end of a run nothing new begins, and nothing is drawn."""

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:  # noqa: ARG002
        """See `Model.respond`."""
        await trio.lowlevel.checkpoint()
        return ModelOutput.answer("the end")
