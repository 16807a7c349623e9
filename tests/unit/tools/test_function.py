# mypy: disable-error-code="valid-type,misc"
# ruff: noqa: PLC2401  # a signature is what is tested here
"""A function becomes a tool: what it promises, what it accepts, what it gives back."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import threading
from collections.abc import AsyncGenerator, Generator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import attrs
import msgspec
import pytest
import trio
from hypothesis import event, given
from hypothesis import strategies as st

from trio_agent.errors import ConfigError, ToolError
from trio_agent.protocol.text import check_json
from trio_agent.tools.base import (
    DescribedTool,
    GrantingTool,
    ReconcilingTool,
    SandboxedTool,
    ToolContext,
    ToolResult,
)
from trio_agent.tools.function import FunctionTool, as_tool, render_result, tool

if TYPE_CHECKING:
    import collections as only_for_type_checkers


@attrs.frozen
class Place:
    """A point on the map."""

    lat: float
    lon: float = 0.0
    inside: Place | None = None


@attrs.frozen
class Even:
    number: int = attrs.field()

    @number.validator
    def _is_even(self, _: object, value: int) -> None:
        if value % 2:
            raise KeyError(value)


@dataclasses.dataclass
class Route:
    stops: list[Place]
    name: str = ""


class Options(TypedDict, total=False):
    fast: bool
    depth: Annotated[int, msgspec.Meta(ge=0)]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(msgspec.Struct, tag="cat"):
    lives: int = 9


class Dog(msgspec.Struct, tag="dog"):
    name: str


def context() -> ToolContext:
    return ToolContext(session_id="s", turn_id="t", call_id="c", idempotency_key="k")


# --- the schema


@tool
async def weather(
    city: str,
    ctx: ToolContext,
    unit: Literal["c", "f"] = "c",
    where: Place | None = None,
    days: Annotated[int, msgspec.Meta(ge=1, le=9, description="how many")] = 1,
    tags: list[str] = [],  # noqa: B006  # what users write
) -> str:
    """Say what the weather will be.

    It may be wrong.

    Args:
        city: The city
            by name.
        ctx: Never shown.
        unit: Of temperature.
        days: Loses against the annotation's own words.
    """
    return f"{city} {unit} {where} {days} {tags} {ctx.call_id}"


def test_the_schema_says_what_signature_and_docstring_say() -> None:
    assert weather.definition.name == "weather"
    assert weather.definition.description == "Say what the weather will be.\n\nIt may be wrong."
    assert weather.definition.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The city by name."},
            "unit": {"enum": ["c", "f"], "description": "Of temperature.", "default": "c"},
            "where": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}], "default": None},
            "days": {
                "type": "integer",
                "minimum": 1,
                "maximum": 9,
                "description": "how many",
                "default": 1,
            },
            "tags": {"type": "array", "items": {"type": "string"}, "default": []},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {
            "Place": {
                "title": "Place",
                "description": "A point on the map.",
                "type": "object",
                "properties": {
                    "lat": {"type": "number"},
                    "lon": {"type": "number", "default": 0.0},
                    "inside": {
                        "anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["lat"],
                "additionalProperties": False,
            }
        },
    }


def test_a_tool_without_parameters_has_a_closed_empty_object() -> None:
    @tool
    def now() -> str:
        return "now"

    assert now.definition.parameters == {
        "type": "object",
        "properties": {},
        "required": [],
        "additionalProperties": False,
    }
    with pytest.raises(ToolError):
        now.check({"x": 1})


def test_a_class_named_like_the_schema_s_root_is_kept_apart() -> None:
    class arguments(TypedDict):  # noqa: N801
        x: int

    def f(a: Any) -> None: ...

    f.__annotations__["a"] = arguments
    schema = tool(f).definition.parameters
    (name,) = schema["$defs"]
    assert schema["properties"] == {"a": {"$ref": f"#/$defs/{name}"}}
    assert schema["$defs"][name]["properties"] == {"x": {"type": "integer"}}


def test_a_default_with_no_json_form_makes_a_parameter_optional_and_stays_out() -> None:
    missing: Any = object()

    @tool
    def f(x: str = missing) -> bool:
        return x is missing

    assert f.definition.parameters["properties"] == {"x": {"type": "string"}}
    assert f.definition.parameters["required"] == []
    assert f() is True


async def test_what_the_model_leaves_out_is_not_passed() -> None:
    @tool
    def f(x: str | None = None, *, many: tuple[int, ...] = (1, 2)) -> str:
        return f"{x} {many}"

    assert await f.call({}, context()) == "None (1, 2)"
    assert await f.call({"x": None, "many": [3]}, context()) == "None (3,)"


# --- what it is


def test_the_function_is_still_callable_and_introspectable() -> None:
    @tool(effect="read_only")
    def add(a: int, b: int = 2) -> int:
        """Add."""
        return a + b

    assert add(1) == 3
    assert add.__name__ == "add"  # type: ignore[attr-defined]
    assert add.__doc__ == "Add."


@pytest.mark.parametrize(
    ("effect", "exclusive", "expected"),
    [
        ("read_only", None, False),
        ("idempotent", None, True),
        ("destructive", None, True),
        ("undeclared", None, True),
        ("read_only", True, True),
        ("undeclared", False, False),
    ],
)
def test_all_but_read_only_tools_run_alone_unless_they_say_otherwise(
    effect: Any, exclusive: bool | None, expected: bool
) -> None:
    @tool(effect=effect, exclusive=exclusive)
    def f() -> None: ...

    assert f.effect == effect
    assert f.exclusive is expected


def test_defaults_and_options_are_kept() -> None:
    async def reconcile(arguments: Mapping[str, Any], ctx: ToolContext) -> Any: ...
    async def describe(arguments: Mapping[str, Any], ctx: ToolContext) -> str:
        return "d"

    def grant_key(arguments: Mapping[str, Any]) -> str:
        return "g"

    @tool
    def plain() -> None: ...

    assert (plain.effect, plain.needs_approval, plain.timeout) == ("undeclared", False, None)
    assert (plain.sandboxed, plain.reconcile, plain.threaded) == (False, None, True)
    assert isinstance(plain, SandboxedTool)
    assert not isinstance(plain, DescribedTool)
    assert not isinstance(plain, GrantingTool)

    @tool(
        needs_approval=True,
        timeout=1.5,
        name="other",
        sandboxed=True,
        describe=describe,
        grant_key=grant_key,
        reconcile=reconcile,
    )
    async def full() -> None: ...

    assert full.definition.name == "other"
    assert (full.needs_approval, full.timeout, full.sandboxed) == (True, 1.5, True)
    assert full.threaded is False
    assert isinstance(full, DescribedTool)
    assert full.describe is describe
    assert isinstance(full, GrantingTool)
    assert full.grant_key is grant_key
    assert isinstance(full, ReconcilingTool)
    assert full.reconcile is reconcile


def test_as_tool_wraps_functions_and_returns_tools() -> None:
    class Box:
        def open(self, key: str) -> str:
            return key

    def f(x: int) -> int:
        return x

    wrapped = as_tool(f)
    assert isinstance(wrapped, FunctionTool)
    assert as_tool(wrapped) is wrapped
    assert as_tool(Box().open).definition.parameters["required"] == ["key"]


@pytest.mark.parametrize(
    "value", [None, 3, "f", FunctionTool, functools.partial(print), object()]
)
def test_as_tool_refuses_everything_else(value: object) -> None:
    with pytest.raises(ConfigError):
        as_tool(value)


# --- signatures that cannot be tools


def positional(x: int, /) -> None: ...
def variable(*xs: int) -> None: ...
def keywords(**xs: int) -> None: ...
def bare(x) -> None: ...  # type: ignore[no-untyped-def]
def two(x: ToolContext, y: ToolContext) -> None: ...
def unresolved(x: only_for_type_checkers.deque[int]) -> None: ...
def no_json(x: Path) -> None: ...
def no_json_inside(x: list[dict[str, complex]]) -> None: ...
def two_classes(x: Place | Route) -> None: ...
def bad_default(x: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013
def non_ascii(größe: int) -> None: ...
async def stream() -> AsyncGenerator[int]:
    yield 1


def generate() -> Generator[int]:
    yield 1


class Holder:
    def method(self, x: int) -> None: ...
    @staticmethod
    def static(x: int) -> None: ...


def a_name_of_more_than_sixty_four_characters_is_more_than_providers_accept_() -> None: ...


@pytest.mark.parametrize(
    ("function", "parameter"),
    [
        (positional, "x"),
        (variable, "xs"),
        (keywords, "xs"),
        (bare, "x"),
        (two, "y"),
        (unresolved, "x"),
        (no_json, "x"),
        (no_json_inside, "x"),
        (two_classes, "x"),
        (bad_default, "x"),
        (non_ascii, "größe"),
        (Holder.method, "self"),
        (stream, None),
        (generate, None),
        (a_name_of_more_than_sixty_four_characters_is_more_than_providers_accept_, None),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_unusable_signature_names_function_and_parameter(
    function: Any, parameter: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        tool(function)
    assert function.__name__ in str(caught.value)
    assert parameter is None or repr(parameter) in str(caught.value)


@pytest.mark.parametrize(
    "function", [lambda: "", functools.partial(print), len, Holder.__dict__["static"], Holder]
)
def test_what_is_no_named_function_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError):
        tool(function)


def test_a_lambda_may_be_given_a_name() -> None:
    assert tool(name="f")(lambda: "").definition.name == "f"


@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", "x" * 65, "a\n", 3])
def test_names_that_providers_refuse_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError):

        @tool(name=name)
        def f() -> None: ...


@pytest.mark.parametrize(
    "options",
    [{"effect": "readonly"}, {"effect": None}]
    + [{"timeout": bad} for bad in (0, -1, float("nan"), float("inf"), True, "3")],
)
def test_policy_that_means_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):

        @tool(**options)
        def f() -> None: ...


def test_a_context_imported_for_type_checkers_only_is_recognised() -> None:
    def f(ctx: Any) -> None: ...

    f.__annotations__["ctx"] = "base.ToolContext"
    assert tool(f).definition.parameters["properties"] == {}


# --- arguments


@tool
def everything(
    text: str = "",
    number: float = 0,
    place: Place | None = None,
    route: Route | None = None,
    options: Options | None = None,
    colours: list[Colour] = [],  # noqa: B006
    by_number: dict[int, Place] = {},  # noqa: B006
    pair: tuple[int, Place] | None = None,
    pet: Cat | Dog | None = None,
    amount: Decimal | None = None,
    anything: Any = None,
    even: Even | None = None,
) -> str:
    return ""


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "x", "number": 1, "anything": {"x": [1, None]}},
        {"place": {"lat": 1, "inside": {"lat": 2.5, "inside": None}}},
        {"route": {"stops": [{"lat": 1}], "name": "n"}, "options": {"fast": True}},
        {"colours": ["red"], "by_number": {"3": {"lat": 1}}, "pair": [1, {"lat": 1}]},
        {"pet": {"type": "dog", "name": "Rex"}, "amount": "1.50", "even": {"number": 2}},
        {"pet": {"type": "cat"}},
    ],
)
def test_valid_arguments_pass(arguments: dict[str, Any]) -> None:
    everything.check(arguments)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"text": 5}, "`text`"),
        ({"text": None}, "`text`"),
        ({"number": True}, "`number`"),
        ({"number": "1"}, "`number`"),
        ({"place": {"lat": "x"}}, "`place.lat`"),
        ({"place": {}}, "`place`"),
        ({"place": {"lat": 1, "inside": {"lat": 1, "Lat": 1}}}, "`place.inside.Lat`"),
        ({"route": {"stops": [{"lat": 1}, {"lat": 1, "x": 1}]}}, "`route.stops[1].x`"),
        ({"options": {"depth": -1}}, "`options.depth`"),
        ({"options": {"fats": True}}, "`options.fats`"),
        ({"colours": ["green"]}, "`colours[0]`"),
        ({"by_number": {"x": {"lat": 1}}}, "`by_number`"),
        ({"by_number": {"1": {"lat": 1, "y": 2}}}, "`by_number['1'].y`"),
        ({"pair": [1]}, "`pair`"),
        ({"pair": [1, {"lat": 1, "y": 2}]}, "`pair[1].y`"),
        ({"pet": {"type": "bird"}}, "`pet.type`"),
        ({"pet": {"type": "dog", "name": "x", "lives": 9}}, "`pet.lives`"),
        ({"amount": 1.5}, "`amount`"),
        ({"even": {"number": 3}}, "`even`"),
        ({"texts": "x"}, "`texts`"),
    ],
)
def test_wrong_arguments_are_refused_with_their_path(
    arguments: dict[str, Any], path: str
) -> None:
    with pytest.raises(ToolError) as caught:
        everything.check(arguments)
    assert path in str(caught.value)


def test_all_mistakes_are_told_at_once_with_what_the_tool_takes() -> None:
    with pytest.raises(ToolError) as caught:
        weather.check({"unit": "k", "days": 0, "towns": 1})
    for word in ("city", "unit", '"c" | "f"', "days", "towns"):
        assert word in str(caught.value)


def test_the_complaint_is_short_however_wrong_the_arguments_are() -> None:
    with pytest.raises(ToolError) as caught:
        weather.check({"unit": "x" * 100_000} | {f"n{i}" * 1_000: i for i in range(1_000)})
    assert len(str(caught.value).encode()) <= 2_048
    assert "tags" in str(caught.value)


async def test_a_call_with_wrong_arguments_never_enters_the_function() -> None:
    entered: list[int] = []

    @tool
    async def f(x: int) -> None:
        entered.append(x)

    with pytest.raises(ToolError):
        await f.call({"x": "1"}, context())
    assert entered == []


# --- schema and check agree: a small judge for the schemas that we write


def allows(schema: Any, value: Any, defs: Mapping[str, Any]) -> bool:
    if "$ref" in schema:
        return allows(defs[schema["$ref"].rpartition("/")[2]], value, defs)
    if "anyOf" in schema:
        return any(allows(one, value, defs) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(one) is type(value) and one == value for one in schema["enum"])
    match schema.get("type"):
        case None:
            return True
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and _within(schema, value)
        case "number":
            return type(value) in {int, float} and _within(schema, value)
        case "string":
            return (
                isinstance(value, str)
                and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1e9)
                and (not (p := schema.get("pattern")) or bool(re.search(p, value)))
            )
        case "array":
            if not isinstance(value, list):
                return False
            if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1e9):
                return False
            prefix = schema.get("prefixItems", [])
            rest = schema.get("items", {})
            return all(
                allows(prefix[i] if i < len(prefix) else rest, one, defs)
                for i, one in enumerate(value)
            )
        case "object":
            if not isinstance(value, dict) or not set(schema.get("required", [])) <= set(value):
                return False
            named, others = schema.get("properties", {}), schema.get("additionalProperties", {})
            return all(
                allows(named[key], member, defs)
                if key in named
                else others is not False and allows(others, member, defs)
                for key, member in value.items()
            )
        case other:
            raise AssertionError(other)


def _within(schema: Any, value: float) -> bool:
    return bool(schema.get("minimum", -1e99) <= value <= schema.get("maximum", 1e99))


def fits(hint: Any, *values: Any) -> st.SearchStrategy[tuple[Any, Any]]:
    """Return pairs of a type and a value of it."""
    return st.sampled_from([(hint, value) for value in values])


FITTING = st.one_of(
    fits(str, "", "ab", "lat"),
    fits(int, 0, -3, 7),
    fits(float, 1, 0.5),
    fits(bool, True, False),
    fits(Any, None, [1], {"x": "y"}),
    fits(Colour, "red"),
    fits(Literal["a", "b"], "b"),
    fits(Literal[1, 2], 2),
    fits(Annotated[int, msgspec.Meta(ge=0, le=3)], 0, 3),
    fits(Annotated[str, msgspec.Meta(min_length=1, pattern="^[ab]+$")], "a", "ab"),
    fits(Place, {"lat": 1}, {"lat": 1, "lon": 2.5, "inside": {"lat": 0}}),
    fits(Route, {"stops": [{"lat": 1}, {"lat": 2}]}, {"stops": [], "name": "x"}),
    fits(Options, {}, {"fast": True, "depth": 0}),
    fits(Cat | Dog, {"type": "cat", "lives": 1}, {"type": "dog", "name": "x"}),
)


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        inner.map(lambda one: (list[one[0]], [one[1]])),
        inner.map(lambda one: (dict[str, one[0]], {"lat": one[1]})),
        inner.map(lambda one: (one[0] | None, one[1])),
        inner.map(lambda one: (one[0] | None, None)),
        st.tuples(inner, inner).map(
            lambda two: (tuple[two[0][0], two[1][0]], [two[0][1], two[1][1]])
        ),
        inner.map(lambda one: (Annotated[list[one[0]], msgspec.Meta(max_length=1)], [one[1]])),
    )


def damaged(value: Any, data: st.DataObject) -> Any:
    """Return *value* with one thing in it changed, somewhere."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return value | {key: damaged(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        index = data.draw(st.integers(0, len(value) - 1))
        return [*value[:index], damaged(value[index], data), *value[index + 1 :]]
    others: list[Any] = [None, True, 4, -1, 0.5, "a", "c", "red", [], {}, {"lat": 1}]
    if isinstance(value, dict):
        others += [value | {"extra": 1}, dict(list(value.items())[1:])]
    if isinstance(value, list):
        others += [value * 2, value[1:]]
    return data.draw(st.sampled_from(others))


@given(data=st.data())
def test_the_check_accepts_exactly_what_the_schema_allows(data: st.DataObject) -> None:
    """Caught when the walk for unknown members, or the closing of ``$defs``, is taken out."""

    def f(x: Any, y: int = 0) -> None: ...

    hint, value = data.draw(st.recursive(FITTING, compound, max_leaves=4))
    f.__annotations__["x"] = hint
    one = tool(f)
    schema = one.definition.parameters
    arguments = {"x": value}
    if data.draw(st.booleans()):
        arguments = damaged(arguments, data)
        if not isinstance(arguments, dict):
            return
    allowed = allows(schema, arguments, schema.get("$defs", {}))
    event(f"allowed: {allowed}")
    if allowed:
        one.check(arguments)
    else:
        with pytest.raises(ToolError):
            one.check(arguments)


# --- calling


async def test_an_async_tool_gets_its_context_and_converted_arguments() -> None:
    seen: list[Any] = []

    @tool
    async def f(place: Place, context_here: ToolContext) -> None:
        seen.extend((place, context_here))

    ctx = context()
    assert await f.call({"place": {"lat": 1}}, ctx) == ""
    assert seen == [Place(lat=1.0), ctx]


async def test_a_plain_function_runs_in_a_thread() -> None:
    @tool
    def f() -> bool:
        return threading.current_thread() is threading.main_thread()

    assert await f.call({}, context()) == "false"


async def test_a_thread_can_report_progress() -> None:
    told: list[tuple[str, float | None]] = []

    async def report(message: str, fraction: float | None) -> None:
        await trio.lowlevel.checkpoint()
        told.append((message, fraction))

    @tool
    def f(ctx: ToolContext) -> None:
        trio.from_thread.run(ctx.report, "half", 0.5)

    ctx = context()
    ctx = ToolContext(
        session_id="s", turn_id="t", call_id="c", idempotency_key="k", report=report
    )
    await f.call({}, ctx)
    assert told == [("half", 0.5)]


@pytest.mark.parametrize("abandon", [False, True])
async def test_a_cancelled_thread_is_waited_for_unless_it_may_be_abandoned(
    abandon: bool,
) -> None:
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    @tool
    def f() -> None:
        started.set()
        release.wait(10)
        ended.set()

    async def call() -> None:
        await f.call({}, context(), abandon_on_cancel=abandon)

    async def cancel() -> None:
        await trio.to_thread.run_sync(started.wait)
        scope.cancel()
        if not abandon:
            release.set()

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            with trio.CancelScope() as scope:
                await call()
            assert ended.is_set() is not abandon
            release.set()
            await trio.to_thread.run_sync(ended.wait)


async def test_a_cancelled_call_does_not_enter_the_function() -> None:
    entered: list[int] = []

    @tool
    async def f() -> None:
        entered.append(1)

    with trio.CancelScope() as scope:
        scope.cancel()
        await f.call({}, context())
    assert scope.cancelled_caught
    assert entered == []


async def test_what_the_function_raises_leaves_as_it_came() -> None:
    error = LookupError("x")

    @tool
    def f() -> None:
        raise error

    with pytest.raises(LookupError) as caught:
        await f.call({}, context())
    assert caught.value is error


async def test_a_plain_function_that_returns_a_coroutine_is_a_mistake() -> None:
    async def inner() -> str:
        return ""

    @tool
    def f() -> Any:
        return inner()

    with pytest.raises(TypeError):
        await f.call({}, context())


# --- results


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("as is ✓", "as is ✓"),
        (None, ""),
        ("half \ud800", "half \ufffd"),
        ({"a": [1, None, "\udfff"]}, '{"a":[1,null,"\ufffd"]}'),
        ([Even(number=2), Dog(name="x")], '[{"number":2},{"type":"dog","name":"x"}]'),
        ({1: (Colour.RED, b"x")}, '{"1":["red","eA=="]}'),
        (10**30, str(10**30)),
        (False, "false"),
    ],
)
def test_results_become_text(value: object, expected: str) -> None:
    assert render_result(value) == expected


def test_a_tool_result_stays_as_it_is_but_for_half_characters() -> None:
    result = ToolResult(output="no", is_error=True)
    assert render_result(result) is result
    assert render_result(ToolResult(output="\ud800")) == ToolResult(output="\ufffd")


endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    "value", [object(), float("nan"), [float("inf")], {(1, 2): 3}, endless]
)
def test_a_result_without_json_form_is_an_error_for_the_model(value: object) -> None:
    with pytest.raises(ToolError):
        render_result(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text() | st.integers(), inner)
            | st.tuples(inner)
        ),
        max_leaves=10,
    )
)
def test_any_result_is_text_that_can_be_stored_or_an_error(value: object) -> None:
    try:
        text = render_result(value)
    except ToolError:
        return
    assert isinstance(text, str)
    check_json(text, name="text")
