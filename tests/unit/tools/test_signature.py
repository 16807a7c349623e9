# mypy: disable-error-code="valid-type,misc"
# ruff: noqa: PLC2401  # a signature is what is tested here
"""Which signatures can be tools, and which arguments they accept: what the schema allows."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncGenerator, Generator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.unit.tools.places import (
    Cat,
    Colour,
    Dog,
    Even,
    Options,
    Place,
    Route,
    context,
    weather,
)
from trio_agent.errors import ConfigError, ToolError
from trio_agent.tools.base import ToolContext
from trio_agent.tools.function import tool

if TYPE_CHECKING:
    import collections as only_for_type_checkers


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
