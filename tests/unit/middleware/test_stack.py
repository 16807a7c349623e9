from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trio_agent.errors import ConfigError, DuplicateError, StoppedError, UnknownError
from trio_agent.middleware.base import HOOKS, Middleware, PromptSection
from trio_agent.middleware.contexts import (
    CommandContext,
    Deliver,
    Effects,
    Refuse,
    RouteContext,
    Routing,
    RuntimeContext,
)
from trio_agent.middleware.messages import Messages
from trio_agent.middleware.stack import MiddlewareStack
from trio_agent.protocol.events import EventMsg, Notice, TurnComplete, Warning  # noqa: A004
from trio_agent.protocol.frontend import Block, Command, Contribution, Reference
from trio_agent.protocol.limits import (
    MAX_NAME_BYTES,
)
from trio_agent.protocol.ops import CapabilityCommand, UserInput
from trio_agent.testing.middleware_check import quiet_runtime
from trio_agent.tools.catalog import Catalog

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


# --- construction


def test_names_are_kept_in_order() -> None:
    assert MiddlewareStack([Named("b"), Named("a")]).names == ("b", "a")


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(DuplicateError):
        MiddlewareStack([Named("a"), Named("a")])


@pytest.mark.parametrize("name", ["", " \t", "é" * (MAX_NAME_BYTES // 2) + "x", "\ud800", 5])
def test_a_name_that_is_no_short_text_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError):
        MiddlewareStack([Named(name)])


def test_a_name_may_have_exactly_the_limit() -> None:
    name = "é" * (MAX_NAME_BYTES // 2)

    assert MiddlewareStack([Named(name)]).names == (name,)


def test_the_default_name_is_the_class_in_snake_case() -> None:
    class WordCount(Middleware):
        pass

    assert MiddlewareStack([WordCount()]).names == ("word_count",)


def test_something_else_is_refused() -> None:
    with pytest.raises(ConfigError):
        MiddlewareStack([object()])  # type: ignore[list-item]


def test_two_message_handlers_are_refused() -> None:
    class Own(Messages):
        pass

    with pytest.raises(ConfigError):
        MiddlewareStack([Messages(), Own()])


def test_messages_are_added_at_the_end_if_nothing_routes_them() -> None:
    stack = MiddlewareStack([Named("a")]).with_messages()

    assert stack.names == ("a", "messages")
    assert stack.handler_name == "messages"


def test_messages_are_not_added_twice() -> None:
    stack = MiddlewareStack([Messages(), Named("a")])

    assert stack.with_messages() is stack


def test_without_a_handler_nothing_can_be_routed() -> None:
    stack = MiddlewareStack([])
    ctx = RouteContext(submission_id="s", op=UserInput(text="x"), active_turn_id=None, queue=())

    with pytest.raises(ConfigError):
        stack.route_message(ctx)


def test_has_knows_what_is_overridden() -> None:
    stack = MiddlewareStack([Named("a"), Messages()])

    assert [hook for hook in HOOKS if stack.has(hook)] == ["route_message"]


def test_has_refuses_a_hook_that_does_not_exist() -> None:
    with pytest.raises(UnknownError):
        MiddlewareStack([]).has("pre_modle")


def test_every_hook_of_the_class_is_known() -> None:
    public = {name for name in vars(Middleware) if not name.startswith("_")} - {"name"}

    assert public == set(HOOKS)


class Routes(Named):
    def __init__(self, answer: Any) -> None:
        super().__init__("routes")
        self.answer = answer

    def route_message(self, ctx: RouteContext) -> Routing | None:
        del ctx
        return self.answer  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        Deliver(boundary="steer"),
        Deliver(boundary="later"),  # type: ignore[arg-type]
        Refuse(code="because", message="no"),
    ],
)
def test_an_answer_that_no_session_can_follow_is_refused(answer: Any) -> None:
    ctx = RouteContext(submission_id="s", op=UserInput(text="x"), active_turn_id=None, queue=())

    with pytest.raises(ConfigError):
        MiddlewareStack([Routes(answer)]).route_message(ctx)


def test_a_message_may_be_steered_into_a_running_turn() -> None:
    ctx = RouteContext(submission_id="s", op=UserInput(text="x"), active_turn_id=TURN, queue=())
    steer = Deliver(boundary="steer")

    assert MiddlewareStack([Routes(steer)]).route_message(ctx) == steer


class Commanded(Named):
    def __init__(self, name: str, *commands: str, idle: bool = False) -> None:
        super().__init__(name)
        self.commands = commands
        self.idle = idle
        self.asked = 0
        self.seen: list[tuple[str, str, str | None]] = []

    def frontend(self) -> Contribution:
        self.asked += 1
        return Contribution(
            capability=self.name,
            commands=tuple(
                Command(name=name, description="", requires_idle=self.idle)
                for name in self.commands
            ),
        )

    async def command(self, ctx: CommandContext) -> None:
        self.seen.append((ctx.command, ctx.arguments, ctx.input))
        ctx.notice(ctx.turn_id or "idle")


async def test_a_command_reaches_its_own_middleware() -> None:
    first, second = Commanded("a", "go"), Commanded("b", "stop", idle=True)
    stack = MiddlewareStack([first, second])
    op = CapabilityCommand(capability="b", command="stop", arguments="now", input="please")
    effects = Effects()

    await stack.command(RUNTIME, "", effects, {}, op)

    assert stack.command_requires_idle(op)
    assert (first.seen, second.seen) == ([], [("stop", "now", "please")])
    assert effects.events == [Notice(capability="b", text="idle")]


@pytest.mark.parametrize(("capability", "command"), [("a", "stop"), ("b", "go"), ("c", "go")])
async def test_an_undeclared_command_is_unknown(capability: str, command: str) -> None:
    middleware = Commanded("a", "go")
    stack = MiddlewareStack([middleware, Named("b")])
    op = CapabilityCommand(capability=capability, command=command)

    with pytest.raises(UnknownError):
        await stack.command(RUNTIME, "", Effects(), {}, op)
    with pytest.raises(UnknownError):
        stack.command_requires_idle(op)
    assert not middleware.seen


def test_contributions_are_asked_for_once() -> None:
    middleware = Commanded("a", "go")
    stack = MiddlewareStack([middleware])

    assert stack.contributions() is stack.contributions()
    assert middleware.asked == 1


class Contributes(Named):
    def __init__(self, name: str, contribution: Contribution) -> None:
        super().__init__(name)
        self.contribution = contribution

    def frontend(self) -> Contribution:
        return self.contribution


def contributing(**members: Any) -> Contributes:
    return Contributes("a", Contribution(capability="a", **members))


def commands(*names: str) -> tuple[Command, ...]:
    return tuple(Command(name=name, description="") for name in names)


def references(*pairs: str) -> tuple[Reference, ...]:
    return tuple(Reference(trigger=pair[:1], value=pair[1:]) for pair in pairs)


@pytest.mark.parametrize(
    "middleware",
    [
        Contributes("a", Contribution(capability="b")),
        contributing(commands=commands("")),
        contributing(commands=commands("two words")),
        contributing(commands=commands("x" * (MAX_NAME_BYTES + 1))),
        contributing(commands=commands("go", "go")),
        contributing(references=(Reference(trigger="", value="x"),)),
        contributing(references=(Reference(trigger="@@", value="x"),)),
        contributing(references=(Reference(trigger=" ", value="x"),)),
        contributing(references=(Reference(trigger="\x07", value="x"),)),
        contributing(references=(Reference(trigger="@", value=""),)),
        contributing(references=(Reference(trigger="@", value="a b"),)),
        contributing(references=references("@x", "@x")),
    ],
)
def test_a_malformed_contribution_is_refused(middleware: Middleware) -> None:
    with pytest.raises(ConfigError):
        MiddlewareStack([middleware]).contributions()


def test_one_command_of_two_middlewares_is_a_duplicate() -> None:
    with pytest.raises(DuplicateError):
        MiddlewareStack([Commanded("a", "go"), Commanded("b", "go")]).contributions()


def test_good_contributions_come_in_order() -> None:
    first = contributing(commands=commands("go"), references=references("@x", "#x"))
    second = Commanded("b", "stop")

    found = MiddlewareStack([first, Named("c"), second]).contributions()

    assert found == (first.contribution, second.frontend())


# --- once an opening


class Sections(Named):
    def __init__(self, name: str, section: PromptSection | None) -> None:
        super().__init__(name)
        self.section = section

    def prompt_section(self, runtime: RuntimeContext) -> PromptSection | None:
        del runtime
        return self.section


def test_the_prompt_is_the_base_and_each_section_under_its_heading() -> None:
    stack = MiddlewareStack(
        [
            Sections("a", PromptSection(title="Tasks", body="Keep a list.\nAlways.")),
            Sections("b", None),
            Sections("c", PromptSection(title="Files", body="Look first.")),
        ]
    )

    prompt = stack.prompt("You help.", RUNTIME)

    assert prompt == (
        "You help.\n\n## Tasks\n\nKeep a list.\nAlways.\n\n## Files\n\nLook first."
    )


@pytest.mark.parametrize(
    ("title", "body"),
    [
        ("", "x"),
        (" ", "x"),
        ("a\nb", "x"),
        ("a\u2028b", "x"),
        ("a", ""),
        ("a", "\n"),
        ("a", "\ud800"),
    ],
)
def test_a_malformed_section_names_its_middleware(title: str, body: str) -> None:
    stack = MiddlewareStack([Sections("tasks", PromptSection(title=title, body=body))])

    with pytest.raises(ConfigError, match="tasks"):
        stack.prompt("You help.", RUNTIME)


def test_every_middleware_registers_its_tools() -> None:
    class Registers(Named):
        def register(self, catalog: Catalog, runtime: RuntimeContext) -> None:
            self.log.append(runtime.session_id)
            assert len(catalog) == 0

    log: list[str] = []
    MiddlewareStack([Registers("a", log), Registers("b", log)]).register(Catalog(), RUNTIME)

    assert log == ["session-1", "session-1"]


def test_every_block_is_shown_in_order() -> None:
    class Renders(Named):
        def render(self, event: EventMsg) -> Block | None:
            return Block(title=self.name) if isinstance(event, TurnComplete) else None

    stack = MiddlewareStack([Renders("a"), Named("b"), Renders("c")])

    shown = stack.render(TurnComplete(turn_id=TURN))
    assert [block.title for block in shown] == ["a", "c"]
    assert stack.render(Warning(code="x", message="y")) == ()


class Session(Named):
    def __init__(
        self,
        name: str,
        log: list[str],
        *,
        entry: Exception | None = None,
        leave: Exception | None = None,
        swallow: bool = False,
    ) -> None:
        super().__init__(name, log)
        self.entry, self.leave, self.swallow = entry, leave, swallow

    @asynccontextmanager
    async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
        del ctx
        if self.entry is not None:
            raise self.entry
        self.log.append(f"+{self.name}")
        try:
            yield
        except Exception:
            if not self.swallow:
                raise
        finally:
            self.log.append(f"-{self.name}")
            if self.leave is not None:
                raise self.leave


async def test_sessions_are_entered_in_order_and_left_in_reverse() -> None:
    log: list[str] = []
    stack = MiddlewareStack([Session("a", log), Named("x"), Session("b", log)])

    async with stack.sessions(RUNTIME):
        log.append("block")

    assert log == ["+a", "+b", "block", "-b", "-a"]


async def test_a_failed_start_leaves_the_earlier_ones_in_reverse() -> None:
    log: list[str] = []
    failure = KeyError("start")
    stack = MiddlewareStack(
        [
            Session("a", log),
            Session("b", log),
            Session("c", log, entry=failure),
            Session("d", log),
        ]
    )

    with pytest.raises(KeyError) as caught:
        async with stack.sessions(RUNTIME):
            log.append("block")

    assert caught.value is failure
    assert "'c'" in failure.__notes__[0]
    assert log == ["+a", "+b", "-b", "-a"]


async def test_a_failed_start_and_a_failed_leave_keep_both_errors() -> None:
    log: list[str] = []
    start, leave = KeyError("start"), ValueError("leave")
    stack = MiddlewareStack(
        [
            Session("a", log),
            Session("b", log, leave=leave),
            Session("c", log, entry=start),
        ]
    )

    with pytest.raises(ValueError, match="leave") as caught:
        async with stack.sessions(RUNTIME):
            log.append("block")

    assert caught.value.__context__ is start
    assert log == ["+a", "+b", "-b", "-a"]


@pytest.mark.parametrize("where", ["start", "block"])
async def test_what_a_session_swallows_is_raised_again(where: str) -> None:
    log: list[str] = []
    failure = KeyError(where)
    entry = failure if where == "start" else None
    stack = MiddlewareStack([Session("a", log, swallow=True), Session("b", log, entry=entry)])

    with pytest.raises(KeyError) as caught:
        async with stack.sessions(RUNTIME):
            raise failure

    assert caught.value is failure


@pytest.mark.parametrize("where", ["start", "block"])
async def test_a_middleware_that_cancels_itself_ends_the_session_visibly(where: str) -> None:
    class Suicidal(Named):
        @asynccontextmanager
        async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
            del ctx
            with trio.CancelScope() as scope:  # noqa: ASYNC100
                scope.cancel()
                yield

    class Slow(Named):
        @asynccontextmanager
        async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
            del ctx
            if where == "start":
                await trio.lowlevel.checkpoint()
            yield

    with pytest.raises(StoppedError):
        async with MiddlewareStack([Suicidal("a"), Slow("b")]).sessions(RUNTIME):
            await trio.lowlevel.checkpoint()


async def test_a_crashing_background_task_breaks_out_of_the_block() -> None:
    class Crashing(Named):
        @asynccontextmanager
        async def session(self, ctx: RuntimeContext) -> AsyncGenerator[None]:
            del ctx
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.crash)
                yield

        async def crash(self) -> None:
            await trio.lowlevel.checkpoint()
            raise KeyError("background")

    with pytest.RaisesGroup(KeyError):
        async with MiddlewareStack([Crashing("a")]).sessions(RUNTIME):
            await trio.sleep_forever()


async def test_cancelling_the_block_leaves_every_session() -> None:
    log: list[str] = []
    stack = MiddlewareStack([Session("a", log), Session("b", log)])

    with trio.CancelScope() as scope:
        async with stack.sessions(RUNTIME):
            scope.cancel()
            await trio.sleep_forever()

    assert scope.cancelled_caught
    assert log == ["+a", "+b", "-b", "-a"]
