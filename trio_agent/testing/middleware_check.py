"""`check_middleware`: what every middleware has to keep, checked against one of yours."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import attrs
import trio

from trio_agent.ambient import Ambient
from trio_agent.errors import ConfigError
from trio_agent.middleware.base import Middleware
from trio_agent.middleware.contexts import (
    Effects,
    FrontendUpdate,
    RouteContext,
    RuntimeContext,
    check_state,
)
from trio_agent.middleware.stack import MiddlewareStack
from trio_agent.model.base import ModelRequest
from trio_agent.protocol.events import Notice, RemoveWidget, SessionContext, Widget
from trio_agent.protocol.items import AssistantItem, Item, UserItem
from trio_agent.protocol.ops import CapabilityCommand, Op, UserInput
from trio_agent.protocol.text import Json
from trio_agent.state.checkpoint import AgentRole, QueuedMessage, ToolCall
from trio_agent.state.context import check_pairing
from trio_agent.testing import samples
from trio_agent.tools.catalog import Catalog

TURN_ID: Final = "turn-1"
PATIENCE: Final = 30.0
"""Seconds that a hook may take before the check fails; virtual ones under a mock clock."""


class _QuietSender:
    """Takes every op and does nothing with it."""

    def submit_nowait(self, op: Op, *, id: str | None = None) -> str:  # noqa: A002
        """See `WeakSender.submit_nowait`."""
        del op
        return id or "submission-1"


def quiet_runtime(
    *,
    session_id: str = "session-1",
    states: Mapping[str, Json] | None = None,
    show: Callable[[FrontendUpdate], None] = lambda _: None,
) -> RuntimeContext:
    """Return a `RuntimeContext` with no session behind it, for testing hooks alone.

    What a middleware submits goes nowhere. The states that it saves, and *states*
    to begin with, are in ``runtime.states``.

    Args:
        session_id: The session.
        states: The durable states at the start, by name.
        show: Called with everything that is shown.
    """
    kept: dict[str, Json] = dict(states or {})

    async def save_state(name: str, value: Json) -> None:
        await trio.lowlevel.checkpoint()
        check_state(name, value)
        kept[name] = copy.deepcopy(value)

    return RuntimeContext(
        session_id=session_id,
        session_context=SessionContext(),
        metadata={},
        role=AgentRole.main(),
        model_route="default",
        sender=_QuietSender(),
        show=show,
        states=kept,
        save_state=save_state,
        ambient=Ambient(now_ms=lambda: 1_700_000_000_000, new_id=lambda: "id-1"),
    )


async def check_middleware(factory: Callable[[], Middleware]) -> None:
    """Check that a middleware keeps what every session relies on.

    Nothing is mocked in the middleware: each of its hooks really runs, several
    times, on plain inputs. So give it a factory whose middlewares may do whatever
    their hooks do.

    * Name, contribution and prompt section are valid and the same each time.
    * ``register`` adds the same tools to every new catalog.
    * ``session`` can be entered and left in order, by an error, and by cancellation
      at any of its checkpoints; errors and cancellations leave it again, and no
      nursery stays open.
    * Hooks change nothing that they were given: contexts, calls, requests and the
      changes of other middlewares are as they were, except by the context's methods.
      Their durable state is JSON and only their own is touched; what they show
      carries their own name. A hook that is cancelled stops.
    * ``route_message`` answers equal questions equally, and with an answer that a
      session can follow. ``render`` is pure.
    * Declared commands run; `ConfigError` is an answer.

    Args:
        factory: Called with nothing; returns a new middleware each time.

    Raises:
        AssertionError: It says which rule is broken. What a hook itself raises
            comes out as it is, with a note.
    """
    await trio.lowlevel.checkpoint()
    first, second = factory(), factory()
    _require(first is not second, "the factory must return a new middleware each time")
    stack = MiddlewareStack([first])
    _require(stack.names == MiddlewareStack([second]).names, "the name differs between objects")
    _check_declarations(factory)
    _check_render(factory)
    _check_routing(factory)
    await _check_session(factory)
    for hook in _HOOK_CHECKS:
        if stack.has(hook.__name__.removeprefix("_")):
            await _check_hook(factory, hook)
    await _check_commands(factory)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _check_declarations(factory: Callable[[], Middleware]) -> None:
    runtime = quiet_runtime()
    seen = [
        (stack.contributions(), stack.prompt("Base.", runtime), _registered(stack, runtime))
        for stack in (MiddlewareStack([factory()]) for _ in range(2))
    ]
    for what, one, other in zip(
        ("the contribution", "the prompt section", "the registered tools"), *seen, strict=True
    ):
        _require(one == other, f"{what} differs between two middlewares of one configuration")


def _registered(stack: MiddlewareStack, runtime: RuntimeContext) -> object:
    catalog = Catalog()
    stack.register(catalog, runtime)
    return catalog.definitions()


def _check_render(factory: Callable[[], Middleware]) -> None:
    forwards, backwards = MiddlewareStack([factory()]), MiddlewareStack([factory()])
    given = copy.deepcopy(samples.EVENTS)
    once = [forwards.render(event) for event in given]
    again = [backwards.render(event) for event in reversed(given)]
    _require(given == samples.EVENTS, "render changed an event")
    _require(once == again[::-1], "render depends on more than its event")


def _check_routing(factory: Callable[[], Middleware]) -> None:
    stack = MiddlewareStack([factory()])
    if not stack.has("route_message"):
        return
    waiting = QueuedMessage(owner=stack.handler_name, id="m", boundary="queue", text="x")
    for op in (
        UserInput(text="hello"),
        UserInput(text="hello", delivery="steer"),
        UserInput(text="hello", delivery="queue"),
        UserInput(text="hello", target_turn_id=TURN_ID),
        UserInput(text="hello", target_turn_id="another"),
    ):
        for active in (None, TURN_ID):
            for queue in ((), (waiting,)):
                ctx = RouteContext(submission_id="s", op=op, active_turn_id=active, queue=queue)
                first, second = stack.route_message(ctx), stack.route_message(ctx)
                _require(first == second, f"route_message answered {first}, then {second}")


class _BlockError(Exception):
    """What the block inside of a session raises here."""


async def _check_session(factory: Callable[[], Middleware]) -> None:
    nurseries = len(trio.lowlevel.current_task().child_nurseries)
    with trio.fail_after(PATIENCE):
        async with MiddlewareStack([factory()]).sessions(quiet_runtime()):
            await trio.lowlevel.checkpoint()
    failure = _BlockError()
    raised = False
    try:
        with trio.fail_after(PATIENCE):
            # The real thing, not the stack's: that raises again what is swallowed.
            async with factory().session(quiet_runtime()):
                await trio.lowlevel.checkpoint()
                raise failure
    except* _BlockError:
        raised = True
    _require(raised, "session swallowed what its block raised")
    for inside in (False, True):
        with trio.fail_after(PATIENCE), trio.CancelScope() as scope:
            if not inside:
                scope.cancel(reason="check_middleware: cancelled on entry")
            async with factory().session(quiet_runtime()):
                scope.cancel(reason="check_middleware: cancelled inside")
                await trio.sleep_forever()
        where = "in its block" if inside else "on entry"
        _require(scope.cancelled_caught, f"session swallowed a cancellation {where}")
    now = len(trio.lowlevel.current_task().child_nurseries)
    _require(now == nurseries, "session left a nursery open")


@attrs.define
class _Pass:
    """One pass of one hook, on inputs of its own."""

    stack: MiddlewareStack
    runtime: RuntimeContext
    effects: Effects = attrs.field(factory=lambda: _others_effects())  # noqa: PLW0108
    saved: dict[str, Json] = attrs.field(factory=lambda: dict[str, Json](other=[1]))
    items: tuple[Item, ...] = (UserItem(text="Hello"), AssistantItem(text="Good day."))
    call: ToolCall = attrs.field(
        factory=lambda: ToolCall(
            call_id="call-1", name="read_file", arguments={"path": ["a", {"b": 1}]}
        )
    )
    request: ModelRequest = attrs.field(
        factory=lambda: ModelRequest(instructions="Be kind.", items=(UserItem(text="Hello"),))
    )

    def inputs(self) -> tuple[object, ...]:
        """Return everything that no hook may change."""
        return self.saved, self.items, self.call, self.request


def _others_effects() -> Effects:
    return Effects(
        events=[Notice(capability="other", text="first")], states={"other": {"count": 1}}
    )


async def _message_submit(one: _Pass) -> None:
    await one.stack.message_submit(
        one.runtime,
        TURN_ID,
        one.effects,
        one.saved,
        submission_id="submission-1",
        text="Hello",
        delivery="turn",
    )


async def _pre_model(one: _Pass) -> None:
    await one.stack.pre_model(
        one.runtime,
        TURN_ID,
        one.effects,
        one.saved,
        items=one.items,
        step_index=0,
        context_window=272_000,
        estimated_input_tokens=10,
    )
    rewritten = one.items if one.effects.rewrite is None else one.effects.rewrite
    check_pairing((*rewritten, *one.effects.items))


async def _model_request(one: _Pass) -> None:
    await one.stack.model_request(one.runtime, TURN_ID, one.request)


async def _pre_tool_use(one: _Pass) -> None:
    await one.stack.pre_tool_use(one.runtime, TURN_ID, one.effects, one.saved, one.call)


async def _permission_request(one: _Pass) -> None:
    await one.stack.permission_request(
        one.runtime, TURN_ID, one.effects, one.saved, one.call, reason="it changes files"
    )


async def _post_tool_use(one: _Pass) -> None:
    await one.stack.post_tool_use(
        one.runtime, TURN_ID, one.effects, one.saved, one.call, output="done", is_error=False
    )


async def _stop(one: _Pass) -> None:
    await one.stack.stop(
        one.runtime, TURN_ID, one.effects, one.saved, text="Good day.", active=False
    )


async def _turn_end(one: _Pass) -> None:
    await one.stack.turn_end(
        one.runtime, TURN_ID, one.effects, one.saved, outcome="completed", queue=()
    )


_HOOK_CHECKS: Final[Sequence[Callable[[_Pass], Awaitable[None]]]] = (
    _message_submit,
    _pre_model,
    _model_request,
    _pre_tool_use,
    _permission_request,
    _post_tool_use,
    _stop,
    _turn_end,
)


async def _check_hook(
    factory: Callable[[], Middleware], run: Callable[[_Pass], Awaitable[None]]
) -> None:
    hook = run.__name__.removeprefix("_")
    for cancelled in (False, True):
        stack = MiddlewareStack([factory()])
        runtime = quiet_runtime()
        one, untouched = _Pass(stack, runtime), _Pass(stack, runtime)
        failure: Exception | None = None
        async with stack.sessions(runtime):
            try:
                with trio.fail_after(PATIENCE), trio.CancelScope() as scope:
                    if cancelled:
                        scope.cancel(reason="check_middleware: a hook is cancelled")
                    await run(one)
            except Exception as exc:  # raised below, where nothing wraps it
                failure = exc
        if failure is not None:
            raise failure
        _require(one.inputs() == untouched.inputs(), f"{hook} changed what it was given")
        _check_effects(stack.names[0], hook, one.effects, untouched.effects)


def _check_effects(name: str, hook: str, effects: Effects, before: Effects) -> None:
    kept = effects.events[: len(before.events)] == before.events and all(
        effects.states.get(other) == state for other, state in before.states.items()
    )
    _require(kept, f"{hook} changed what another middleware had done")
    foreign = effects.states.keys() - before.states.keys() - {name}
    _require(not foreign, f"{hook} wrote states that are not its own: {sorted(foreign)}")
    if name in effects.states:
        check_state(name, effects.states[name])
    for event in effects.events[len(before.events) :]:
        shown = isinstance(event, Notice | Widget | RemoveWidget)
        _require(shown, f"{hook} shows a {type(event).__name__}: only notices and widgets are")
        own = isinstance(event, Notice | Widget | RemoveWidget) and event.capability == name
        _require(own, f"{hook} speaks under another middleware's name")


async def _check_commands(factory: Callable[[], Middleware]) -> None:
    (name,) = MiddlewareStack([factory()]).names
    for contribution in MiddlewareStack([factory()]).contributions():
        for command in contribution.commands:
            stack, runtime, effects = MiddlewareStack([factory()]), quiet_runtime(), Effects()
            async with stack.sessions(runtime):
                try:
                    with trio.fail_after(PATIENCE):
                        await stack.command(
                            runtime,
                            "",
                            effects,
                            {},
                            CapabilityCommand(capability=name, command=command.name),
                        )
                except ConfigError:
                    pass  # an answer: shown to the user
            _check_effects(name, f"command {command.name!r}", effects, Effects())
