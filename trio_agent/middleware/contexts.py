"""What each hook may see and change.

A context is valid only until its hook returns. Changes collect in `Effects`; the
engine commits them together with the step they belong to, so a hook whose step
was never committed has changed nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar, Literal, Protocol, TypeAlias, TypedDict, Unpack

import attrs
import msgspec

from trio_agent.ambient import Ambient
from trio_agent.errors import ConfigError, ToolError
from trio_agent.model.base import ModelRequest
from trio_agent.protocol.events import (
    Delivery,
    EventMsg,
    Notice,
    RemoveWidget,
    SessionContext,
    TurnOutcome,
    Widget,
)
from trio_agent.protocol.frontend import Block, Tone
from trio_agent.protocol.items import Item, UserItem
from trio_agent.protocol.limits import (
    MAX_ARGUMENT_BYTES,
    MAX_CAPABILITY_INPUT_BYTES,
    MAX_NAME_BYTES,
    MAX_STATE_BYTES,
    MAX_TOOL_OUTPUT_BYTES,
)
from trio_agent.protocol.ops import Op, UserInput
from trio_agent.protocol.text import Json, check_json, check_text, cut_middle
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Record
from trio_agent.state.checkpoint import AgentRole, QueuedMessage, ToolCall
from trio_agent.state.context import check_pairing

FrontendUpdate: TypeAlias = Notice | Widget | RemoveWidget


class WeakSender(Protocol):
    """A sender that does not keep the session open: what a middleware gets."""

    def submit_nowait(self, op: Op, *, id: str | None = None) -> str:  # noqa: A002
        """Queue an op in memory and return its id.

        Raises:
            BusyError: If too many ops wait. StoppedError: If the session is over.
        """
        ...


@attrs.define(kw_only=True, eq=False, repr=False)
class RuntimeContext:
    """The session as a middleware sees it, from `Middleware.register` to its end.

    Attributes:
        session_id: The session.
        session_context: Its labels.
        metadata: Its durable metadata.
        role: Main, or a subagent of which turn.
        model_route: The route at the start.
        sender: For submitting ops to this very session.
        show: Shows a `Notice`, `Widget` or `RemoveWidget`; not a checkpoint. What is
            shown during the start is kept, up to 256 updates, until the session is
            durable; more is a `StoppedError`.
        states: The durable state of every middleware by name, at the start.
        save_state: ``await save_state(name, value)`` commits a state outside of hooks.
        ambient: The clock and the id source.
    """

    session_id: str
    session_context: SessionContext
    metadata: Mapping[str, Json]
    role: AgentRole
    model_route: str
    sender: WeakSender
    show: Callable[[FrontendUpdate], None]
    states: Mapping[str, Json]
    save_state: Callable[[str, Json], Awaitable[None]]
    ambient: Ambient


@attrs.define(kw_only=True, eq=False, repr=False)
class Effects:
    """What the hooks of one pass have changed so far.

    ``items`` join the context; those that are not internal join the transcript,
    too. ``rewrite`` replaces the whole context before ``items`` are added.
    """

    items: list[Item] = attrs.field(factory=list[Item])
    rewrite: list[Item] | None = None
    rewrite_reasons: list[str] = attrs.field(factory=list[str])
    events: list[EventMsg] = attrs.field(factory=list[EventMsg])
    states: dict[str, Json] = attrs.field(factory=dict[str, Json])
    usage: TokenUsage | None = None
    stop_reason: str | None = None

    def __bool__(self) -> bool:
        """Whether anything needs to be committed."""
        return bool(
            self.items
            or self.rewrite is not None
            or self.events
            or self.states
            or self.usage is not None
        )


def _reason(text: str) -> str:
    try:
        check_text(text, name="reason", limit=MAX_CAPABILITY_INPUT_BYTES, blank=False)
    except ValueError as exc:
        raise ConfigError(str(exc)) from None
    return text


class HookContext:
    """What every hook has: where it runs, its own durable state, and a voice."""

    adds_to_context: ClassVar[bool] = True

    def __init__(
        self,
        *,
        runtime: RuntimeContext,
        name: str,
        turn_id: str,
        effects: Effects,
        saved_states: Mapping[str, Json],
    ) -> None:
        self.runtime = runtime
        self.name = name
        self.turn_id = turn_id
        self.effects = effects
        self.saved_states = saved_states

    @property
    def session_id(self) -> str:
        """The session."""
        return self.runtime.session_id

    @property
    def state(self) -> Json:
        """A copy of this middleware's durable state, or None if it has none yet."""
        states = self.effects.states if self.name in self.effects.states else self.saved_states
        return copy.deepcopy(states.get(self.name))

    @state.setter
    def state(self, value: Json) -> None:
        try:
            check_state(self.name, value)
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
        self.effects.states[self.name] = copy.deepcopy(value)

    def notice(self, text: str, *, tone: Tone = "neutral", block: Block | None = None) -> None:
        """Tell readers something; recorded with the step."""
        self.effects.events.append(
            Notice(capability=self.name, text=_reason(text), tone=tone, block=block)
        )

    def add_hidden(self, text: str) -> None:
        """Add guidance that the model reads and the transcript does not show.

        Raises:
            ConfigError: If it is blank or over 64 KiB, or this hook has no place for it.
        """
        if not self.adds_to_context:
            raise ConfigError(f"{type(self).__name__} has no place for hidden text")
        self.effects.items.append(UserItem(text=_reason(text), internal=self.name))


def check_state(name: str, value: Json) -> None:
    """Check that *value* can be *name*'s durable state.

    Raises:
        ValueError: If it is not JSON or over 64 KiB.
    """
    check_json(value, name=f"state of {name}")
    size = len(msgspec.json.encode(value))
    if size > MAX_STATE_BYTES:
        raise ValueError(f"state of {name}: {size:,} bytes; {MAX_STATE_BYTES:,} are allowed")


def _check_arguments(arguments: dict[str, Json]) -> None:
    check_json(arguments, name="arguments")
    size = len(msgspec.json.encode(arguments))
    if size > MAX_ARGUMENT_BYTES:
        raise ValueError(f"arguments: {size:,} bytes; {MAX_ARGUMENT_BYTES:,} are allowed")


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Deliver(Record):
    """A message is accepted: it starts a turn, joins the running one, or waits."""

    boundary: Delivery


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Refuse(Record):
    """A message is refused; ``code`` is one of `REJECTION_CODES`."""

    code: str
    message: str


Routing: TypeAlias = Deliver | Refuse


class RouteContext:
    """A message has arrived. ``active_turn_id`` is None while the session is idle."""

    def __init__(
        self,
        *,
        submission_id: str,
        op: UserInput,
        active_turn_id: str | None,
        queue: Sequence[QueuedMessage],
    ) -> None:
        self.submission_id = submission_id
        self.op = op
        self.active_turn_id = active_turn_id
        self.queue = queue


class HookParts(TypedDict):
    """What every hook context is made from."""

    runtime: RuntimeContext
    name: str
    turn_id: str
    effects: Effects
    saved_states: Mapping[str, Json]


class MessageSubmitContext(HookContext):
    """A message is about to enter the context."""

    def __init__(
        self,
        *,
        submission_id: str,
        text: str,
        delivery: Delivery,
        rejection: str | None = None,
        **common: Unpack[HookParts],
    ) -> None:
        super().__init__(**common)
        self.submission_id = submission_id
        self.text = text
        self.delivery = delivery
        self.rejection = rejection

    def reject(self, reason: str) -> None:
        """Keep the message out: its turn is recorded as aborted, a steer is refused.

        The first reason given counts.
        """
        self.rejection = self.rejection or _reason(reason)


class PreModelContext(HookContext):
    """A model request is about to be made. ``items`` is the context as it stands now."""

    def __init__(
        self,
        *,
        items: Sequence[Item],
        step_index: int,
        context_window: int,
        estimated_input_tokens: int,
        **common: Unpack[HookParts],
    ) -> None:
        super().__init__(**common)
        self.items = items
        self.step_index = step_index
        self.context_window = context_window
        self.estimated_input_tokens = estimated_input_tokens

    def push(self, text: str) -> None:
        """Add a user message that the transcript shows."""
        self._append(UserItem(text=_reason(text)))

    def add_hidden(self, text: str) -> None:
        """See `HookContext.add_hidden`."""
        self._append(UserItem(text=_reason(text), internal=self.name))

    def _append(self, item: UserItem) -> None:
        self.effects.items.append(item)
        self.items = (*self.items, item)

    def rewrite(self, reason: str, items: Sequence[Item]) -> None:
        """Replace the context; one new epoch a pass, however many rewrites.

        Items that equal the context as it stands change nothing. What this pass has
        added stays an addition, and so reaches the transcript, if *items* end with it.

        Raises:
            ConfigError: If the reason is blank, or if a call and its output would be
                separated; nothing is changed then.
        """
        reason, new = _reason(reason), list(items)
        if new == list(self.items):
            return
        check_pairing(new)
        added = self.effects.items
        kept = next(
            count
            for count in range(min(len(added), len(new)), -1, -1)
            if not count or added[-count:] == new[-count:]
        )
        self.effects.items = added[len(added) - kept :]
        self.effects.rewrite = new[: len(new) - kept]
        if reason not in self.effects.rewrite_reasons:
            self.effects.rewrite_reasons.append(reason)
        self.items = tuple(new)

    def record_usage(self, usage: TokenUsage) -> None:
        """Count tokens that this hook spent."""
        self.effects.usage = usage if self.effects.usage is None else self.effects.usage + usage

    def stop(self, reason: str) -> None:
        """Complete the turn without asking the model. The first reason counts."""
        self.effects.stop_reason = self.effects.stop_reason or _reason(reason)


class ModelRequestContext:
    """The request itself. What is changed here is sent and never stored."""

    def __init__(
        self,
        *,
        runtime: RuntimeContext,
        name: str,
        turn_id: str,
        request: ModelRequest,
        replaced: bool = False,
    ) -> None:
        self.runtime = runtime
        self.name = name
        self.turn_id = turn_id
        self.request = request
        self.replaced = replaced

    def replace(self, request: ModelRequest) -> None:
        """Send *request* instead."""
        self.request = request
        self.replaced = True


class PreToolContext(HookContext):
    """A call is about to be admitted. Hidden texts go before the answer that asked for it."""

    def __init__(
        self, *, call: ToolCall, denial: str | None = None, **common: Unpack[HookParts]
    ) -> None:
        super().__init__(**common)
        self.call = call
        self.denial = denial

    def rewrite(
        self, *, name: str | None = None, arguments: dict[str, Json] | None = None
    ) -> None:
        """Change what runs; the original is kept beside it.

        Raises:
            ToolError: If the new call is not valid; nothing is changed then.
        """
        try:
            if name is not None:
                check_text(name, name="tool name", limit=MAX_NAME_BYTES, blank=False)
            if arguments is not None:
                _check_arguments(arguments)
        except ValueError as exc:
            raise ToolError(str(exc)) from None
        self.call = attrs.evolve(
            self.call,
            name=self.call.name if name is None else name,
            arguments=self.call.arguments if arguments is None else copy.deepcopy(arguments),
        )

    def deny(self, reason: str) -> None:
        """Refuse the call; no later hook can undo it, and the first reason counts."""
        self.denial = self.denial or _reason(reason)


class PermissionContext(HookContext):
    """A call needs somebody's consent; a hook may give or refuse it."""

    adds_to_context = False

    def __init__(
        self,
        *,
        call: ToolCall,
        reason: str,
        verdict: Literal["allow", "deny"] | None = None,
        rejection: str = "",
        **common: Unpack[HookParts],
    ) -> None:
        super().__init__(**common)
        self.call = call
        self.reason = reason
        self.verdict: Literal["allow", "deny"] | None = verdict
        self.rejection = rejection

    def allow(self) -> None:
        """Let it run, unless a hook has denied it already."""
        if self.verdict is None:
            self.verdict = "allow"

    def deny(self, reason: str) -> None:
        """Refuse it; no later hook can undo it, and the first reason counts."""
        if self.verdict != "deny":
            self.verdict = "deny"
            self.rejection = _reason(reason)


class PostToolContext(HookContext):
    """A call's handler has run. Hidden texts go after the outputs of the batch."""

    def __init__(
        self, *, call: ToolCall, output: str, is_error: bool, **common: Unpack[HookParts]
    ) -> None:
        super().__init__(**common)
        self.call = call
        self.output = output
        self.is_error = is_error

    def replace_output(self, text: str) -> None:
        """Let the model read *text* instead; the usual size limit applies."""
        self.output = cut_middle(text, MAX_TOOL_OUTPUT_BYTES)


class StopContext(HookContext):
    """The model has ended the turn. ``active``: a stop hook already made it go on once."""

    def __init__(
        self, *, text: str, active: bool, prompt: str | None = None, **common: Unpack[HookParts]
    ) -> None:
        super().__init__(**common)
        self.text = text
        self.active = active
        self.prompt = prompt

    def continue_with(self, prompt: str) -> None:
        """Make the model go on, at most once a turn.

        Raises:
            ConfigError: If another hook of this pass has asked already.
        """
        if self.prompt is not None:
            raise ConfigError("two stop hooks ask to continue the same turn")
        self.prompt = _reason(prompt)


class TurnEndContext(HookContext):
    """A turn ends, whichever way; its outcome cannot be changed any more."""

    adds_to_context = False

    def __init__(
        self,
        *,
        outcome: TurnOutcome,
        queue: Sequence[QueuedMessage],
        **common: Unpack[HookParts],
    ) -> None:
        super().__init__(**common)
        self.outcome = outcome
        self.queue = queue


class CommandContext(HookContext):
    """A frontend called a command of this middleware. Its turn id is empty while idle."""

    adds_to_context = False

    def __init__(
        self,
        *,
        command: str,
        arguments: str,
        input: str | None,  # noqa: A002  # the op's word
        **common: Unpack[HookParts],
    ) -> None:
        super().__init__(**common)
        self.command = command
        self.arguments = arguments
        self.input = input
