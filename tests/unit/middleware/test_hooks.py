from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import ConfigError, ToolError
from trio_agent.middleware.base import Middleware
from trio_agent.middleware.contexts import (
    Effects,
    MessageSubmitContext,
    ModelRequestContext,
    PermissionContext,
    PostToolContext,
    PreModelContext,
    PreToolContext,
    StopContext,
    TurnEndContext,
)
from trio_agent.middleware.stack import MiddlewareStack
from trio_agent.model.base import ModelRequest
from trio_agent.protocol.items import AssistantItem, ToolCallItem, ToolOutputItem, UserItem
from trio_agent.protocol.limits import (
    MAX_CAPABILITY_INPUT_BYTES,
    MAX_STATE_BYTES,
    MAX_TOOL_OUTPUT_BYTES,
)
from trio_agent.state.checkpoint import ToolCall
from trio_agent.testing.middleware_check import quiet_runtime

TURN = "turn-1"
RUNTIME = quiet_runtime()


class Named(Middleware):
    """A middleware whose name the test chooses, which notes what happens to it."""

    def __init__(self, name: str, log: list[str] | None = None) -> None:
        self._name = name
        self.log: list[str] = [] if log is None else log

    @property
    def name(self) -> str:
        return self._name


class Acting(Named):
    """One whose every hook does what the test says."""

    def __init__(self, name: str, act: Callable[[Any], object], log: list[str] | None = None):
        super().__init__(name, log)
        self.act = act

    def _run(self, ctx: Any) -> None:
        self.log.append(self._name)
        self.act(ctx)

    async def message_submit(self, ctx: MessageSubmitContext) -> None:
        self._run(ctx)

    async def pre_model(self, ctx: PreModelContext) -> None:
        self._run(ctx)

    async def model_request(self, ctx: ModelRequestContext) -> None:
        self._run(ctx)

    async def pre_tool_use(self, ctx: PreToolContext) -> None:
        self._run(ctx)

    async def permission_request(self, ctx: PermissionContext) -> None:
        self._run(ctx)

    async def post_tool_use(self, ctx: PostToolContext) -> None:
        self._run(ctx)

    async def stop(self, ctx: StopContext) -> None:
        self._run(ctx)

    async def turn_end(self, ctx: TurnEndContext) -> None:
        self._run(ctx)


def acting(*acts: Callable[[Any], object], log: list[str] | None = None) -> MiddlewareStack:
    return MiddlewareStack([Acting(f"m{i}", act, log) for i, act in enumerate(acts)])


def call(**arguments: Any) -> ToolCall:
    return ToolCall(call_id="call-1", name="read", arguments=arguments)


def request() -> ModelRequest:
    return ModelRequest(instructions="", items=())


RUNS: dict[str, Callable[[MiddlewareStack, Effects], Any]] = {
    "message_submit": lambda stack, effects: stack.message_submit(
        RUNTIME, TURN, effects, {}, submission_id="s", text="t", delivery="turn"
    ),
    "pre_model": lambda stack, effects: stack.pre_model(
        RUNTIME,
        TURN,
        effects,
        {},
        items=(),
        step_index=0,
        context_window=1,
        estimated_input_tokens=0,
    ),
    "model_request": lambda stack, _: stack.model_request(RUNTIME, TURN, request()),
    "pre_tool_use": lambda stack, effects: stack.pre_tool_use(
        RUNTIME, TURN, effects, {}, call()
    ),
    "permission_request": lambda stack, effects: stack.permission_request(
        RUNTIME, TURN, effects, {}, call(), "why"
    ),
    "post_tool_use": lambda stack, effects: stack.post_tool_use(
        RUNTIME, TURN, effects, {}, call(), "out", is_error=False
    ),
    "stop": lambda stack, effects: stack.stop(
        RUNTIME, TURN, effects, {}, text="t", active=False
    ),
    "turn_end": lambda stack, effects: stack.turn_end(
        RUNTIME, TURN, effects, {}, outcome="completed", queue=()
    ),
}
with_each_hook = pytest.mark.parametrize("hook", RUNS)


# --- what holds for every hook


@with_each_hook
async def test_hooks_run_in_declaration_order(hook: str) -> None:
    log: list[str] = []
    stack = acting(*[lambda _: None] * 3, log=log)

    await RUNS[hook](stack, Effects())

    assert log == ["m0", "m1", "m2"]


@with_each_hook
async def test_a_failing_hook_keeps_what_was_done_and_names_itself(hook: str) -> None:
    failure = KeyError("oops")

    def speak(ctx: Any) -> None:
        if hook != "model_request":
            ctx.notice("done")

    def fail(ctx: Any) -> None:
        speak(ctx)
        raise failure

    effects = Effects()
    with pytest.raises(KeyError) as caught:
        await RUNS[hook](acting(speak, fail), effects)

    assert caught.value is failure
    assert "m1" in failure.__notes__[0]
    if hook != "model_request":
        assert [event.capability for event in effects.events] == ["m0", "m1"]  # type: ignore[union-attr]


@with_each_hook
async def test_without_overriding_hooks_nothing_is_awaited(hook: str) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await RUNS[hook](MiddlewareStack([Named("a")]), Effects())

    assert not scope.cancelled_caught


@with_each_hook
async def test_cancellation_passes_through(hook: str) -> None:
    class Waiting(Acting):
        pass

    async def wait(_self: Any, ctx: Any) -> None:
        del ctx
        await trio.sleep_forever()

    setattr(Waiting, hook, wait)
    reached: list[str] = []
    stack = MiddlewareStack(
        [
            Waiting("a", lambda _: None),
            Acting("b", lambda _: reached.append("b")),
        ]
    )
    with trio.CancelScope() as scope:
        scope.cancel()
        await RUNS[hook](stack, Effects())

    assert scope.cancelled_caught
    assert not reached


@pytest.mark.parametrize("hook", [hook for hook in RUNS if hook != "model_request"])
async def test_a_state_is_private_and_seen_by_later_passes(hook: str) -> None:
    def count(ctx: Any) -> None:
        ctx.state = {"count": (ctx.state or {"count": 0})["count"] + 1}

    effects = Effects()
    stack = acting(count, count)
    await RUNS[hook](stack, effects)
    await RUNS[hook](stack, effects)

    assert effects.states == {"m0": {"count": 2}, "m1": {"count": 2}}


async def test_a_state_that_is_no_json_or_too_large_is_refused() -> None:
    def too_large(ctx: MessageSubmitContext) -> None:
        ctx.state = "x" * (MAX_STATE_BYTES - 2)
        with pytest.raises(ConfigError):
            ctx.state = "x" * (MAX_STATE_BYTES - 1)
        with pytest.raises(ConfigError):
            ctx.state = float("nan")
        with pytest.raises(ConfigError):
            ctx.state = {1: 2}
        assert ctx.state == "x" * (MAX_STATE_BYTES - 2)

    await RUNS["message_submit"](acting(too_large), Effects())


async def test_a_hook_cannot_change_a_state_by_accident() -> None:
    def grow(ctx: MessageSubmitContext) -> None:
        value = ["mine"]
        ctx.state = value
        value.append("later")
        ctx.state.append("on a copy")
        assert ctx.state == ["mine"]

    await RUNS["message_submit"](acting(grow), Effects())


# --- messages and commands


async def test_the_first_rejection_ends_the_pass() -> None:
    log: list[str] = []
    stack = acting(
        lambda _: None,
        lambda ctx: (ctx.reject("first"), ctx.reject("second")),
        lambda _: None,
        log=log,
    )

    assert await RUNS["message_submit"](stack, Effects()) == "first"
    assert log == ["m0", "m1"]


async def test_an_accepted_message_may_get_hidden_guidance() -> None:
    effects = Effects()
    stack = acting(lambda ctx: ctx.add_hidden("be brief"))

    assert await RUNS["message_submit"](stack, effects) is None
    assert effects.items == [UserItem(text="be brief", internal="m0")]


@pytest.mark.parametrize("text", ["", " \n", "é" * (MAX_CAPABILITY_INPUT_BYTES // 2) + "x"])
async def test_texts_of_hooks_are_bounded_and_not_blank(text: str) -> None:
    def say(ctx: PreModelContext) -> None:
        for method in (ctx.push, ctx.add_hidden, ctx.notice, ctx.stop):
            with pytest.raises(ConfigError):
                method(text)

    effects = Effects()
    await RUNS["pre_model"](acting(say), effects)

    assert not effects
    assert effects.stop_reason is None


# --- the model's side


async def test_each_pre_model_hook_sees_what_the_ones_before_made() -> None:
    base = (UserItem(text="hello"),)
    seen: list[tuple[Any, ...]] = []

    def look(ctx: PreModelContext) -> None:
        seen.append(tuple(ctx.items))

    def push(ctx: PreModelContext) -> None:
        ctx.push("pushed")
        look(ctx)

    def rewrite(ctx: PreModelContext) -> None:
        look(ctx)
        ctx.rewrite("shorter", [UserItem(text="summary"), ctx.items[-1]])

    effects = Effects()
    await acting(push, rewrite, look).pre_model(
        RUNTIME,
        TURN,
        effects,
        {},
        items=base,
        step_index=0,
        context_window=9,
        estimated_input_tokens=1,
    )

    pushed, summary = UserItem(text="pushed"), UserItem(text="summary")
    assert seen == [(*base, pushed), (*base, pushed), (summary, pushed)]
    assert effects.rewrite == [summary]
    assert effects.items == [pushed], "what a hook pushed still reaches the transcript"


async def test_equal_items_are_no_rewrite() -> None:
    effects = Effects()

    await acting(lambda ctx: ctx.rewrite("again", list(ctx.items))).pre_model(
        RUNTIME,
        TURN,
        effects,
        {},
        items=(UserItem(text="hello"),),
        step_index=0,
        context_window=9,
        estimated_input_tokens=1,
    )

    assert effects.rewrite is None
    assert not effects.rewrite_reasons


async def test_reasons_to_rewrite_are_kept_once_and_in_order() -> None:
    effects = Effects()
    stack = acting(
        *(
            lambda ctx, reason=reason, n=n: ctx.rewrite(reason, [AssistantItem(text=str(n))])
            for n, reason in enumerate(["size", "age", "size"])
        )
    )

    await RUNS["pre_model"](stack, effects)

    assert effects.rewrite_reasons == ["size", "age"]
    assert effects.rewrite == [AssistantItem(text="2")]


@pytest.mark.parametrize(
    ("reason", "items"),
    [
        ("cut", [ToolCallItem(call_id="c", name="read", arguments={})]),
        ("cut", [ToolOutputItem(call_id="c", output="")]),
        (" ", []),
    ],
)
async def test_a_bad_rewrite_changes_nothing(reason: str, items: list[Any]) -> None:
    def rewrite(ctx: PreModelContext) -> None:
        ctx.push("kept")
        with pytest.raises(ConfigError):
            ctx.rewrite(reason, items)

    effects = Effects()
    await RUNS["pre_model"](acting(rewrite), effects)

    assert (effects.rewrite, effects.rewrite_reasons) == (None, [])
    assert effects.items == [UserItem(text="kept")]


async def test_requests_are_replaced_one_after_another_and_never_stored() -> None:
    def add(ctx: ModelRequestContext) -> None:
        instructions = ctx.request.instructions + ctx.name
        ctx.replace(attrs.evolve(ctx.request, instructions=instructions))

    sent, replaced = await acting(add, lambda _: None, add).model_request(
        RUNTIME, TURN, request()
    )

    assert (sent.instructions, replaced) == ("m0m2", True)
    assert await acting(lambda _: None).model_request(RUNTIME, TURN, sent) == (sent, False)


async def test_one_stop_hook_makes_the_model_go_on() -> None:
    stack = acting(lambda _: None, lambda ctx: ctx.continue_with("more"), lambda _: None)

    assert await RUNS["stop"](stack, Effects()) == "more"


async def test_two_stop_hooks_of_one_pass_cannot_both() -> None:
    stack = acting(*[lambda ctx: ctx.continue_with("more")] * 2)

    with pytest.raises(ConfigError):
        await RUNS["stop"](stack, Effects())


async def test_a_turn_goes_on_once_at_most() -> None:
    stack = acting(lambda ctx: ctx.continue_with("more"))

    prompt = await stack.stop(RUNTIME, TURN, Effects(), {}, text="", active=True)

    assert prompt is None


async def test_every_turn_end_hook_runs_and_the_first_failure_is_raised() -> None:
    log: list[str] = []

    def fail(ctx: TurnEndContext) -> None:
        raise ValueError(ctx.name)

    stack = acting(fail, lambda ctx: ctx.notice("still here"), fail, log=log)
    effects = Effects()

    with pytest.raises(ValueError, match="m0"):
        await RUNS["turn_end"](stack, effects)
    assert log == ["m0", "m1", "m2"]
    assert len(effects.events) == 1


# --- tool calls


async def test_calls_are_rewritten_one_after_another_and_the_original_is_kept() -> None:
    def add(ctx: PreToolContext) -> None:
        ctx.rewrite(arguments={**ctx.call.arguments, ctx.name: True})

    stack = acting(add, lambda ctx: ctx.rewrite(name="write"), add)
    made, denial = await stack.pre_tool_use(RUNTIME, TURN, Effects(), {}, call(path="a"))

    assert denial is None
    assert made == attrs.evolve(
        call(path="a", m0=True, m2=True), name="write", requested={"path": "a"}
    )


async def test_a_call_that_nobody_rewrote_is_the_same() -> None:
    given = call(path="a")

    made, _ = await acting(lambda _: None).pre_tool_use(RUNTIME, TURN, Effects(), {}, given)

    assert made is given


async def test_only_rewrite_changes_what_runs() -> None:
    def meddle(ctx: Any) -> None:
        ctx.call.arguments["path"] = "/etc/passwd"

    given = call(path="a")
    made, _ = await acting(meddle).pre_tool_use(RUNTIME, TURN, Effects(), {}, given)
    await acting(meddle).post_tool_use(RUNTIME, TURN, Effects(), {}, given, "", is_error=False)
    await acting(meddle).permission_request(RUNTIME, TURN, Effects(), {}, given, "why")

    assert made == given == call(path="a")


async def test_an_invalid_rewrite_changes_nothing() -> None:
    def rewrite(ctx: PreToolContext) -> None:
        for members in ({"name": " "}, {"name": "ok", "arguments": {"x": float("inf")}}):
            with pytest.raises(ToolError):
                ctx.rewrite(**members)

    given = call(path="a")
    made, _ = await acting(rewrite).pre_tool_use(RUNTIME, TURN, Effects(), {}, given)

    assert made is given


async def test_output_is_replaced_one_after_another_within_its_limit() -> None:
    stack = acting(
        lambda ctx: ctx.replace_output(ctx.output + "!"),
        lambda ctx: ctx.replace_output(ctx.output * 50_000),
    )

    output = await RUNS["post_tool_use"](stack, Effects())

    assert output.startswith("out!out!")
    assert len(output.encode()) <= MAX_TOOL_OUTPUT_BYTES


# --- properties: decisions are monotone

moves = st.lists(st.sampled_from(["allow", "deny", "undo", "nothing"]), max_size=6)


def verdicts(ctx: PermissionContext, move: str) -> None:
    if move == "allow":
        ctx.allow()
    elif move == "deny":
        ctx.deny(ctx.name)
    elif move == "undo":  # a hook that does not keep to the methods
        ctx.verdict, ctx.rejection = "allow", ""


def denials(ctx: PreToolContext, move: str) -> None:
    if move == "deny":
        ctx.deny(ctx.name)
    elif move == "undo":
        ctx.denial = None


def making(act: Callable[[Any, str], None], chosen: list[str]) -> MiddlewareStack:
    return acting(*((lambda ctx, move=move: act(ctx, move)) for move in chosen))


@given(moves)
def test_a_denial_outlasts_every_later_hook(chosen: list[str]) -> None:
    first = next((f"m{i}" for i, move in enumerate(chosen) if move == "deny"), "")
    allowed = "allow" in chosen or "undo" in chosen

    verdict = trio.run(RUNS["permission_request"], making(verdicts, chosen), Effects())
    _, denial = trio.run(RUNS["pre_tool_use"], making(denials, chosen), Effects())

    assert verdict == (("deny", first) if first else ("allow" if allowed else None, ""))
    assert denial == (first or None)


@given(st.lists(st.booleans(), max_size=6))
def test_the_first_reason_to_stop_counts_and_all_hooks_run(stops: list[bool]) -> None:
    log: list[str] = []
    effects = Effects()
    stack = acting(
        *((lambda ctx, stop=stop: stop and ctx.stop(ctx.name)) for stop in stops), log=log
    )

    trio.run(RUNS["pre_model"], stack, effects)

    assert effects.stop_reason == next((f"m{i}" for i, s in enumerate(stops) if s), None)
    assert len(log) == len(stops)


edits = st.lists(st.sampled_from(["push", "hide", "drop", "summarise", "nothing"]), max_size=6)


@given(st.integers(0, 3), edits)
def test_every_pre_model_hook_sees_exactly_what_will_be_committed(
    size: int, chosen: list[str]
) -> None:
    base = tuple(UserItem(text=str(n)) for n in range(size))
    effects = Effects()
    views: list[tuple[Any, ...]] = []

    def committed() -> tuple[Any, ...]:
        return (*(base if effects.rewrite is None else effects.rewrite), *effects.items)

    def edit(ctx: PreModelContext, move: str) -> None:
        assert tuple(ctx.items) == committed()
        if move == "push":
            ctx.push(ctx.name)
        elif move == "hide":
            ctx.add_hidden(ctx.name)
        elif move == "drop":
            ctx.rewrite("drop", ctx.items[1:])
        elif move == "summarise":
            ctx.rewrite("summarise", [AssistantItem(text=ctx.name), *ctx.items[-2:]])
        assert tuple(ctx.items) == committed()
        views.append(tuple(ctx.items))

    stack = making(edit, chosen)
    trio.run(
        lambda: stack.pre_model(
            RUNTIME,
            TURN,
            effects,
            {},
            items=base,
            step_index=0,
            context_window=9,
            estimated_input_tokens=1,
        )
    )

    assert len(views) == len(chosen)
    assert committed() == (views[-1] if views else base)
