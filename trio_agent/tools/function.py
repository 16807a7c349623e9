"""`tool`: a plain or async function becomes a `Tool`, and stays a function."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar, cast, get_args, overload

import attrs
import msgspec
import trio

from trio_agent.errors import ConfigError, ToolError
from trio_agent.model.base import ToolDefinition
from trio_agent.protocol.text import Json, check_json, replace_surrogates
from trio_agent.state.checkpoint import Effect
from trio_agent.tools.base import Reconciled, Tool, ToolContext, ToolResult
from trio_agent.tools.signature import Signature, read_signature

P = ParamSpec("P")
R = TypeVar("R")

Describe: TypeAlias = Callable[[Mapping[str, Json], ToolContext], Awaitable[str]]
GrantKey: TypeAlias = Callable[[Mapping[str, Json]], str]
Reconcile: TypeAlias = Callable[[Mapping[str, Json], ToolContext], Awaitable[Reconciled]]

EFFECTS: Final[tuple[Effect, ...]] = get_args(Effect)

_FUNCTIONS: Final = (types.FunctionType, types.MethodType)
_TOOL_MEMBERS: Final = (
    "definition",
    "effect",
    "exclusive",
    "needs_approval",
    "timeout",
    "call",
)


class FunctionTool(Generic[P, R]):
    """A function that a model may call; made by `tool`.

    Calling the object itself calls the function, with nothing checked. `describe`
    and `grant_key` exist only on tools that were given them.

    Attributes:
        definition: Name, description and schema, read from the function.
        effect: What a call does to the world.
        exclusive: Whether a call runs alone in its batch.
        needs_approval: Whether a person may want to decide about a call.
        timeout: Seconds that one call may take, None for no limit.
        sandboxed: Whether everything a call changes lies inside the sandbox.
        reconcile: Asked after a crash what became of a call, or None.
        threaded: Whether the function is a plain ``def`` and runs in a thread.
    """

    definition: ToolDefinition
    effect: Effect
    exclusive: bool
    needs_approval: bool
    timeout: float | None
    sandboxed: bool
    reconcile: Reconcile | None
    threaded: bool
    describe: Describe
    grant_key: GrantKey

    def __init__(
        self,
        function: Callable[P, R],
        *,
        effect: Effect = "undeclared",
        needs_approval: bool = False,
        timeout: float | None = None,
        exclusive: bool | None = None,
        name: str | None = None,
        sandboxed: bool = False,
        describe: Describe | None = None,
        grant_key: GrantKey | None = None,
        reconcile: Reconcile | None = None,
    ) -> None:
        signature = read_signature(function, name=name)
        check_policy(signature.name, effect=effect, timeout=timeout)
        functools.update_wrapper(cast("Any", self), function)
        self._function = function
        self._signature: Signature = signature
        self.definition = ToolDefinition(
            name=signature.name,
            description=signature.description,
            parameters=signature.schema,
        )
        self.effect = effect
        self.exclusive = effect != "read_only" if exclusive is None else exclusive
        self.needs_approval = needs_approval
        self.timeout = timeout
        self.sandboxed = sandboxed
        self.reconcile = reconcile
        self.threaded = not inspect.iscoroutinefunction(function)
        # A member that is absent says "has no such thing" to isinstance checks; None would not.
        if describe is not None:
            self.describe = describe
        if grant_key is not None:
            self.grant_key = grant_key

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself."""
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        """Show the name."""
        return f"<FunctionTool {self.definition.name}>"

    def check(self, arguments: Mapping[str, Json]) -> None:
        """Check *arguments* without calling anything. Not a checkpoint.

        Raises:
            ToolError: It names everything that is wrong and what the tool takes.
        """
        self._signature.convert(arguments)

    async def call(
        self,
        arguments: Mapping[str, Json],
        ctx: ToolContext,
        *,
        abandon_on_cancel: bool = False,
    ) -> str | ToolResult:
        """Check *arguments*, call the function and make text of what it returns.

        A checkpoint before the function is entered: `Cancelled` from that one means
        that it was not. Several tasks may call at the same time.

        Args:
            arguments: JSON values by parameter name.
            ctx: Passed on if the function has a parameter for it.
            abandon_on_cancel: For a function in a thread: on cancellation leave the
                thread to itself instead of waiting for it. It goes on to run, and
                what it returns or raises is lost.

        Raises:
            ToolError: If an argument is wrong, if the function raised it, or if what
                it returned has no JSON form.
        """
        values = self._signature.convert(arguments)
        if self._signature.context is not None:
            values[self._signature.context] = ctx
        await trio.lowlevel.checkpoint()
        function = cast("Callable[..., Any]", self._function)
        if self.threaded:
            result = await trio.to_thread.run_sync(
                functools.partial(function, **values), abandon_on_cancel=abandon_on_cancel
            )
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError(
                    f"tool {self.definition.name!r} is a plain function that returned a "
                    "coroutine; declare it `async def`"
                )
        else:
            result = await function(**values)
        return render_result(result)


def check_policy(name: str, *, effect: object, timeout: object) -> None:
    """Check the words and numbers that a tool declares about itself.

    Raises:
        ConfigError: For an unknown effect and for a timeout that is no positive number.
    """
    if effect not in EFFECTS:
        raise ConfigError(f"tool {name!r}: effect {effect!r}; one of: {', '.join(EFFECTS)}")
    if timeout is None:
        return
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not math.isfinite(cast("float", timeout)) or cast("float", timeout) <= 0:
        raise ConfigError(
            f"tool {name!r}: timeout {timeout!r}; a positive number of seconds, or None"
        )


def render_result(value: object) -> str | ToolResult:
    """Return what a model reads of a function's result. Half characters are replaced.

    Text stays as it is, None becomes the empty text, everything else compact JSON.

    Raises:
        ToolError: If *value* has no JSON form.
    """
    if isinstance(value, str):
        return replace_surrogates(value)
    if value is None:
        return ""
    if isinstance(value, ToolResult):
        output = replace_surrogates(value.output)
        return value if output == value.output else attrs.evolve(value, output=output)
    try:
        plain = _without_surrogates(msgspec.to_builtins(value, str_keys=True))
        check_json(plain, name="the result")
        return msgspec.json.encode(plain).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ToolError(
            f"the call ran to its end, but what it returned has no JSON form: {exc}"
        ) from exc


def _without_surrogates(value: Json) -> Json:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {
            _without_surrogates(key): _without_surrogates(member)
            for key, member in value.items()  # pyright: ignore[reportUnknownVariableType]
        }
    if isinstance(value, (list, tuple)):
        return [_without_surrogates(member) for member in value]  # pyright: ignore[reportUnknownVariableType]
    return value


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@overload
def tool(
    *,
    effect: Effect = "undeclared",
    needs_approval: bool = False,
    timeout: float | None = None,
    exclusive: bool | None = None,
    name: str | None = None,
    sandboxed: bool = False,
    describe: Describe | None = None,
    grant_key: GrantKey | None = None,
    reconcile: Reconcile | None = None,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    effect: Effect = "undeclared",
    needs_approval: bool = False,
    timeout: float | None = None,
    exclusive: bool | None = None,
    name: str | None = None,
    sandboxed: bool = False,
    describe: Describe | None = None,
    grant_key: GrantKey | None = None,
    reconcile: Reconcile | None = None,
) -> FunctionTool[P, R] | Callable[[Callable[P, R]], FunctionTool[P, R]]:
    """Make a function callable by models; used bare, or with arguments.

    The schema comes from the signature, the texts from the docstring. Parameter
    types are what JSON can say: text, numbers, booleans, lists, dicts, ``Literal``,
    enums, typed dicts, dataclasses, attrs classes, optional ones, each perhaps
    constrained by ``Annotated[..., msgspec.Meta(...)]``. A parameter annotated
    `ToolContext` gets the call's context and is not shown to the model.

    Args:
        function: An ``async def``, or a ``def``, which runs in a worker thread.
        effect: ``"read_only"``, ``"idempotent"``, ``"destructive"`` or
            ``"undeclared"``; decides whether a call may run again after a crash.
        needs_approval: Whether a person may want to decide about a call.
        timeout: Seconds that one call may take, None for no limit.
        exclusive: Whether a call runs alone in its batch; by default all but
            ``read_only`` tools do.
        name: For the model; by default the function's.
        sandboxed: Whether everything a call changes lies inside the sandbox.
        describe: ``await describe(arguments, ctx)`` says what a call would do.
        grant_key: ``grant_key(arguments)`` is equal for calls that one session
            approval covers.
        reconcile: ``await reconcile(arguments, ctx)`` finds out after a crash what
            became of a call; must be safe to repeat.

    Raises:
        ConfigError: If the function cannot be a tool.
    """

    def wrap(function: Callable[P, R]) -> FunctionTool[P, R]:
        if not isinstance(function, _FUNCTIONS):
            raise ConfigError(
                f"@tool needs a function, got {function!r}: write a def around it"
            )
        return FunctionTool(
            function,
            effect=effect,
            needs_approval=needs_approval,
            timeout=timeout,
            exclusive=exclusive,
            name=name,
            sandboxed=sandboxed,
            describe=describe,
            grant_key=grant_key,
            reconcile=reconcile,
        )

    return wrap if function is None else wrap(function)


def as_tool(value: object) -> Tool:
    """Return *value* if it is a `Tool`, or a function wrapped as by `tool`.

    Raises:
        ConfigError: For anything else.
    """
    if not isinstance(value, type) and all(hasattr(value, name) for name in _TOOL_MEMBERS):
        return cast("Tool", value)
    if isinstance(value, _FUNCTIONS):
        return FunctionTool(cast("Callable[..., Any]", value))
    hint = "pass an instance of it" if isinstance(value, type) else "write a function around it"
    missing = ", ".join(name for name in _TOOL_MEMBERS if not hasattr(value, name))
    lacks = f" (as a Tool it lacks {missing})" if missing else ""
    raise ConfigError(f"{value!r} is neither a function nor a Tool{lacks}: {hint}")
