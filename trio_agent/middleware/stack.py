"""`MiddlewareStack`: the order of the middlewares of a session, and how their hooks compose.

Rules that hold for every hook:

* Only middlewares that override it run, in the order in which they were declared.
* All of one pass write into the `Effects` of the caller, so what the earlier ones
  did, and what a failing one had done, is still there when a hook raises.
* What an `Exception` of a hook says is left as it is; a note names the middleware.
  `Cancelled` passes untouched.
* Decisions are monotone: a denial stays one, and the first reason counts.
* No method here waits by itself: a stack without overriding hooks never reaches a
  checkpoint.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Literal

import attrs

from trio_agent.errors import ConfigError, DuplicateError, StoppedError, UnknownError
from trio_agent.middleware.base import HOOKS, Middleware, checked_name, overrides
from trio_agent.middleware.contexts import (
    CommandContext,
    Effects,
    HookParts,
    MessageSubmitContext,
    ModelRequestContext,
    PermissionContext,
    PostToolContext,
    PreModelContext,
    PreToolContext,
    Refuse,
    RouteContext,
    Routing,
    RuntimeContext,
    StopContext,
    TurnEndContext,
)
from trio_agent.middleware.messages import Messages
from trio_agent.middleware.presentation import check_contributions, render_section
from trio_agent.model.base import ModelRequest
from trio_agent.protocol.events import Delivery, EventMsg, TurnOutcome
from trio_agent.protocol.frontend import Block, Command, Contribution
from trio_agent.protocol.items import Item
from trio_agent.protocol.ops import REJECTION_CODES, CapabilityCommand
from trio_agent.protocol.text import Json
from trio_agent.state.checkpoint import QueuedMessage, ToolCall
from trio_agent.tools.catalog import Catalog

_logger = logging.getLogger("trio_agent.middleware")


class MiddlewareStack:
    """The middlewares of one session, in order. Immutable.

    Args:
        middlewares: In the order in which their hooks run.

    Raises:
        DuplicateError: If two carry one name.
        ConfigError: If a name is not 1 to 256 bytes of text that is not blank, if
            something is no `Middleware`, or if two override `route_message`.
    """

    __slots__ = ("_contributions", "_entries", "_hooks")

    def __init__(self, middlewares: Sequence[Middleware]) -> None:
        entries: dict[str, Middleware] = {}
        for one in middlewares:
            name = checked_name(one)
            if name in entries:
                raise DuplicateError(f"two middlewares are called {name!r}; rename one")
            entries[name] = one
        self._entries = entries
        self._hooks = {
            hook: tuple(name for name, one in entries.items() if overrides(one, hook))
            for hook in HOOKS
        }
        handlers = self._hooks["route_message"]
        if len(handlers) > 1:
            listed = " and ".join(repr(name) for name in handlers)
            raise ConfigError(
                f"middlewares {listed} both route messages; a session has one message handler"
            )
        self._contributions: tuple[Contribution, ...] | None = None

    def with_messages(self) -> MiddlewareStack:
        """Return this stack, with the shipped `Messages` at its end if nothing routes messages.

        Raises:
            DuplicateError: If it is needed and its name is taken.
        """
        if self.has("route_message"):
            return self
        return MiddlewareStack((*self._entries.values(), Messages()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self._entries)

    @property
    def handler_name(self) -> str:
        """The name of the one that routes messages: the owner of what waits in the queue.

        Raises:
            ConfigError: If none does (see `with_messages`).
        """
        handlers = self._hooks["route_message"]
        if not handlers:
            raise ConfigError("no middleware routes messages; MiddlewareStack.with_messages()")
        return handlers[0]

    def has(self, hook_name: str) -> bool:
        """Return whether any middleware overrides that hook.

        Raises:
            UnknownError: If there is no such hook.
        """
        if hook_name not in self._hooks:
            raise UnknownError(f"no hook is called {hook_name!r}; one of: {', '.join(HOOKS)}")
        return bool(self._hooks[hook_name])

    def _each(self, hook: str) -> Generator[tuple[str, Middleware]]:
        for name in self._hooks[hook]:
            yield name, self._entries[name]

    def _each_in_turn(
        self,
        hook: str,
        runtime: RuntimeContext,
        turn_id: str,
        effects: Effects,
        saved_states: Mapping[str, Json],
    ) -> Generator[tuple[str, Middleware, HookParts]]:
        """Yield who overrides *hook*, with what the context of each is made from."""
        for name, one in self._each(hook):
            yield (
                name,
                one,
                HookParts(
                    runtime=runtime,
                    name=name,
                    turn_id=turn_id,
                    effects=effects,
                    saved_states=saved_states,
                ),
            )

    # --- once an opening

    @asynccontextmanager
    async def sessions(
        self,
        runtime: RuntimeContext,
        *,
        failed: Callable[[Exception], None] = lambda _: None,
    ) -> AsyncGenerator[None]:
        """Enter every `Middleware.session` in order; leave them in reverse.

        When one fails on entry, those before it are left, in reverse, and the
        failure goes on up; what they raise meanwhile replaces it and keeps it as
        ``__context__``. An `Exception` that a middleware swallows is raised again.

        Args:
            runtime: What each is given.
            failed: Told what went wrong as it was raised; on its way out a middleware's
                nursery may wrap it.

        Raises:
            StoppedError: If a middleware cancelled a scope of its own around the
                session.
        """
        failures: list[Exception] = []
        suppressed = True
        async with AsyncExitStack() as entered:
            try:
                for name, one in self._each("session"):
                    with _named(name, "session"):
                        await entered.enter_async_context(one.session(runtime))
                yield
            except Exception as exc:
                failures.append(exc)
                failed(exc)
                raise
            suppressed = False
        # Neither an error nor an end may pass unseen.
        if failures:
            raise failures[0]
        if suppressed:
            raise StoppedError("a middleware ended its own scope, and the session with it")

    def register(self, catalog: Catalog, runtime: RuntimeContext) -> None:
        """Let every middleware add its tools to *catalog*."""
        for name, one in self._each("register"):
            with _named(name, "register"):
                one.register(catalog, runtime)

    def prompt(self, base: str, runtime: RuntimeContext) -> str:
        """Return *base*, then each section under its own ``##`` heading, in order.

        Raises:
            ConfigError: If a section has a title that is not one line of text, or a
                blank body; it names the middleware.
        """
        parts = [base]
        for name, one in self._each("prompt_section"):
            with _named(name, "prompt_section"):
                section = one.prompt_section(runtime)
            if section is not None:
                parts.append(render_section(name, section))
        return "\n\n".join(parts)

    def contributions(self) -> tuple[Contribution, ...]:
        """Return what every middleware adds to a frontend; asked once, then kept.

        Raises:
            ConfigError: If a contribution names another capability, a command's name
                is blank or has white space, or a reference's trigger is not one
                visible character or its value is blank or has white space.
            DuplicateError: If two commands, or two references of one trigger, are equal.
        """
        if self._contributions is None:
            found: list[tuple[str, Contribution]] = []
            for name, one in self._each("frontend"):
                with _named(name, "frontend"):
                    contribution = one.frontend()
                if contribution is not None:
                    found.append((name, contribution))
            check_contributions(found)
            self._contributions = tuple(contribution for _, contribution in found)
        return self._contributions

    def render(self, event: EventMsg) -> tuple[Block, ...]:
        """Return every block that a middleware shows for *event*, in order."""
        blocks: list[Block] = []
        for name, one in self._each("render"):
            with _named(name, "render"):
                block = one.render(event)
            if block is not None:
                blocks.append(block)
        return tuple(blocks)

    # --- messages and commands

    def route_message(self, ctx: RouteContext) -> Routing:
        """Ask the message handler how a message enters.

        Raises:
            ConfigError: If there is no handler, or its answer is none that a session
                can follow: a steer while no turn runs, an unknown code or boundary.
        """
        name = self.handler_name
        with _named(name, "route_message"):
            routing = self._entries[name].route_message(ctx)
        if routing is None:
            raise ConfigError(f"middleware {name!r} did not say how a message enters")
        if isinstance(routing, Refuse):
            if routing.code not in REJECTION_CODES:
                raise ConfigError(f"middleware {name!r}: no rejection code {routing.code!r}")
        elif routing.boundary not in {"turn", "steer", "queue"}:
            raise ConfigError(f"middleware {name!r}: no delivery {routing.boundary!r}")
        elif routing.boundary == "steer" and ctx.active_turn_id is None:
            raise ConfigError(f"middleware {name!r} steers a message into no turn")
        return routing

    def command_requires_idle(self, op: CapabilityCommand) -> bool:
        """Return whether that command waits for an idle session.

        Raises:
            UnknownError: If no middleware declares it.
        """
        return self._declared(op).requires_idle

    def _declared(self, op: CapabilityCommand) -> Command:
        for contribution in self.contributions():
            if contribution.capability == op.capability:
                for command in contribution.commands:
                    if command.name == op.command:
                        return command
                known = ", ".join(command.name for command in contribution.commands) or "none"
                raise UnknownError(
                    f"{op.capability!r} has no command {op.command!r}; it has: {known}"
                )
        raise UnknownError(f"no capability {op.capability!r} declares commands")

    async def command(
        self,
        runtime: RuntimeContext,
        turn_id: str,
        effects: Effects,
        saved_states: Mapping[str, Json],
        op: CapabilityCommand,
    ) -> None:
        """Run a command that a middleware declared; *turn_id* is empty while idle.

        Raises:
            UnknownError: If no middleware declares it.
        """
        self._declared(op)
        name = op.capability
        with _named(name, "command"):
            await self._entries[name].command(
                CommandContext(
                    runtime=runtime,
                    name=name,
                    turn_id=turn_id,
                    effects=effects,
                    saved_states=saved_states,
                    command=op.command,
                    arguments=op.arguments,
                    input=op.input,
                )
            )

    async def message_submit(
        self,
        runtime: RuntimeContext,
        turn_id: str,
        effects: Effects,
        saved_states: Mapping[str, Json],
        *,
        submission_id: str,
        text: str,
        delivery: Delivery,
    ) -> str | None:
        """Run until one rejects the message; return its reason, or None."""
        hooks = self._each_in_turn("message_submit", runtime, turn_id, effects, saved_states)
        for name, one, parts in hooks:
            ctx = MessageSubmitContext(
                **parts, submission_id=submission_id, text=text, delivery=delivery
            )
            with _named(name, "message_submit"):
                await one.message_submit(ctx)
            if ctx.rejection is not None:
                return ctx.rejection
        return None

    # --- around a model step

    async def pre_model(
        self,
        runtime: RuntimeContext,
        turn_id: str,
        effects: Effects,
        saved_states: Mapping[str, Json],
        *,
        items: Sequence[Item],
        step_index: int,
        context_window: int,
        estimated_input_tokens: int,
    ) -> None:
        """Run all, each on the context as the ones before have left it.

        A reason to stop is in ``effects.stop_reason``: the first counts, and the
        later hooks still run. *items* is the context without what *effects* holds.
        """
        hooks = self._each_in_turn("pre_model", runtime, turn_id, effects, saved_states)
        for name, one, parts in hooks:
            ctx = PreModelContext(
                **parts,
                items=_current(items, effects),
                step_index=step_index,
                context_window=context_window,
                estimated_input_tokens=estimated_input_tokens,
            )
            with _named(name, "pre_model"):
                await one.pre_model(ctx)

    async def model_request(
        self, runtime: RuntimeContext, turn_id: str, request: ModelRequest
    ) -> tuple[ModelRequest, bool]:
        """Run all, each on the request that the ones before have left.

        Returns:
            The request to send, and whether any hook replaced it.
        """
        replaced = False
        for name, one in self._each("model_request"):
            ctx = ModelRequestContext(
                runtime=runtime, name=name, turn_id=turn_id, request=request
            )
            with _named(name, "model_request"):
                await one.model_request(ctx)
            if ctx.replaced:
                request, replaced = ctx.request, True
        return request, replaced

    async def stop(
        self,
        runtime: RuntimeContext,
        turn_id: str,
        effects: Effects,
        saved_states: Mapping[str, Json],
        *,
        text: str,
        active: bool,
    ) -> str | None:
        """Run all; return the prompt that makes the model go on, or None.

        With *active* the turn has gone on once already, and None is returned
        whatever the hooks ask.

        Raises:
            ConfigError: If two hooks ask.
        """
        prompt: str | None = None
        hooks = self._each_in_turn("stop", runtime, turn_id, effects, saved_states)
        for name, one, parts in hooks:
            ctx = StopContext(**parts, text=text, active=active, prompt=prompt)
            with _named(name, "stop"):
                await one.stop(ctx)
            prompt = prompt or ctx.prompt
        return None if active else prompt

    async def turn_end(
        self,
        runtime: RuntimeContext,
        turn_id: str,
        effects: Effects,
        saved_states: Mapping[str, Json],
        *,
        outcome: TurnOutcome,
        queue: Sequence[QueuedMessage],
    ) -> None:
        """Run all, also after one has raised; then raise the first `Exception`.

        The turn is over: no middleware may cost another one its last hook. Later
        exceptions are logged.
        """
        failure: Exception | None = None
        hooks = self._each_in_turn("turn_end", runtime, turn_id, effects, saved_states)
        for name, one, parts in hooks:
            ctx = TurnEndContext(**parts, outcome=outcome, queue=tuple(queue))
            try:
                with _named(name, "turn_end"):
                    await one.turn_end(ctx)
            except Exception as exc:
                if failure is None:
                    failure = exc
                else:
                    _logger.exception("turn_end of middleware %r failed, too", name)
        if failure is not None:
            raise failure

    # --- around a tool call

    async def pre_tool_use(
        self,
        runtime: RuntimeContext,
        turn_id: str,
        effects: Effects,
        saved_states: Mapping[str, Json],
        call: ToolCall,
    ) -> tuple[ToolCall, str | None]:
        """Run all on one call, each on what the ones before have made of it.

        Returns:
            The call to admit, with ``requested`` set to the model's arguments if any
            hook rewrote it, and the first reason to deny it, or None.
        """
        name_now, arguments = call.name, call.arguments
        denial: str | None = None
        hooks = self._each_in_turn("pre_tool_use", runtime, turn_id, effects, saved_states)
        for name, one, parts in hooks:
            ctx = PreToolContext(
                **parts,
                # A copy: only `rewrite`, which checks, may change what runs.
                call=attrs.evolve(call, name=name_now, arguments=copy.deepcopy(arguments)),
                denial=denial,
            )
            given = ctx.call
            with _named(name, "pre_tool_use"):
                await one.pre_tool_use(ctx)
            denial = denial or ctx.denial
            if ctx.call is not given:
                name_now, arguments = ctx.call.name, ctx.call.arguments
        if name_now != call.name or arguments != call.arguments:
            requested = call.arguments if call.requested is None else call.requested
            call = attrs.evolve(call, name=name_now, arguments=arguments, requested=requested)
        return call, denial

    async def permission_request(  # both ways of passing the last ones
        self,
        runtime: RuntimeContext,
        turn_id: str,
        effects: Effects,
        saved_states: Mapping[str, Json],
        call: ToolCall,
        reason: str,
    ) -> tuple[Literal["allow", "deny"] | None, str]:
        """Run all on one call that needs consent.

        Returns:
            The verdict, or None if a person must be asked, and the first reason to
            deny the call (empty unless it is denied). No allowance undoes a denial.
        """
        verdict: Literal["allow", "deny"] | None = None
        rejection = ""
        hooks = self._each_in_turn(
            "permission_request", runtime, turn_id, effects, saved_states
        )
        for name, one, parts in hooks:
            ctx = PermissionContext(
                **parts, call=_copied(call), reason=reason, verdict=verdict, rejection=rejection
            )
            with _named(name, "permission_request"):
                await one.permission_request(ctx)
            if verdict != "deny":
                verdict = ctx.verdict
                rejection = ctx.rejection if verdict == "deny" else ""
        return verdict, rejection

    async def post_tool_use(  # both ways of passing the last ones
        self,
        runtime: RuntimeContext,
        turn_id: str,
        effects: Effects,
        saved_states: Mapping[str, Json],
        call: ToolCall,
        output: str,
        is_error: bool,
    ) -> str:
        """Run all on one call whose handler ran; return the output for the model."""
        hooks = self._each_in_turn("post_tool_use", runtime, turn_id, effects, saved_states)
        for name, one, parts in hooks:
            ctx = PostToolContext(**parts, call=_copied(call), output=output, is_error=is_error)
            with _named(name, "post_tool_use"):
                await one.post_tool_use(ctx)
            output = ctx.output
        return output


@contextmanager
def _named(name: str, hook: str) -> Generator[None]:
    """Note on an `Exception` whose it is."""
    try:
        yield
    except Exception as exc:
        exc.add_note(f"raised by {hook} of middleware {name!r}")
        raise


def _current(items: Sequence[Item], effects: Effects) -> Sequence[Item]:
    if effects.rewrite is None and not effects.items:
        return items
    return (*(items if effects.rewrite is None else effects.rewrite), *effects.items)


def _copied(call: ToolCall) -> ToolCall:
    return attrs.evolve(call, arguments=copy.deepcopy(call.arguments))
