# mypy: disable-error-code="valid-type,misc"
"""A function becomes a tool: what it promises, what it accepts, what it gives back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any, TypedDict

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tools.places import Colour, Dog, Even, Place, context, weather
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

# --- the schema


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
