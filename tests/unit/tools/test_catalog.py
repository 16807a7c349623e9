"""The tools of a session: one name each, one order, read once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import ConfigError, DuplicateError
from trio_agent.model.base import ToolDefinition
from trio_agent.tools.base import Reconciled, ToolContext
from trio_agent.tools.catalog import Catalog, Registered
from trio_agent.tools.function import tool

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}


def definition(
    name: str = "foreign", description: str = "", **parameters: Any
) -> ToolDefinition:
    return ToolDefinition(
        name=name, description=description, parameters=parameters or dict(SCHEMA)
    )


@attrs.define
class Foreign:
    """A tool that owes nothing to ours; counts how often it is asked."""

    described: ToolDefinition = attrs.field(factory=definition)
    effect: Any = "undeclared"
    exclusive: Any = True
    needs_approval: Any = False
    timeout: Any = None
    asked: int = 0

    @property
    def definition(self) -> ToolDefinition:
        self.asked += 1
        return self.described

    async def call(self, arguments: Mapping[str, Any], ctx: ToolContext) -> str:
        return ""


def test_a_foreign_tool_is_read_once_with_defaults_for_what_it_does_not_say() -> None:
    foreign = Foreign(effect="idempotent", timeout=2)
    catalog = Catalog()
    one = catalog.register(foreign, owner="mcp")
    assert one == Registered(
        tool=foreign,
        owner="mcp",
        definition=definition(),
        effect="idempotent",
        exclusive=True,
        needs_approval=False,
        timeout=2,
    )
    assert catalog.get("foreign") is one
    asked = foreign.asked
    catalog.definitions()
    assert catalog.revision
    assert foreign.asked == asked


def test_everything_that_a_function_tool_says_is_registered() -> None:
    async def describe(arguments: Mapping[str, Any], ctx: ToolContext) -> str:
        return ""

    async def reconcile(arguments: Mapping[str, Any], ctx: ToolContext) -> Reconciled:
        return Reconciled(outcome="unknown")

    def grant_key(arguments: Mapping[str, Any]) -> str:
        return ""

    @tool(
        effect="destructive",
        needs_approval=True,
        timeout=3,
        exclusive=False,
        sandboxed=True,
        describe=describe,
        grant_key=grant_key,
        reconcile=reconcile,
    )
    def f() -> None: ...

    one = Catalog().register(f)
    assert one == Registered(
        tool=f,
        owner="config",
        definition=f.definition,
        effect="destructive",
        exclusive=False,
        needs_approval=True,
        timeout=3,
        sandboxed=True,
        threaded=True,
        check=f.check,
        describe=describe,
        grant_key=grant_key,
        reconcile=reconcile,
    )
    assert one.name == "f"


def test_a_function_is_wrapped() -> None:
    async def f(x: int) -> None: ...

    one = Catalog().register(f)
    assert one.name == "f"
    assert (one.describe, one.grant_key, one.reconcile) == (None, None, None)
    assert one.threaded is False
    assert one.check is not None


def test_two_tools_of_one_name_are_refused_and_both_owners_named() -> None:
    catalog = Catalog()
    first = catalog.register(Foreign(), owner="one")
    with pytest.raises(DuplicateError) as caught:
        catalog.register(Foreign(), owner="two")
    assert "one" in str(caught.value)
    assert "two" in str(caught.value)
    assert catalog.all() == (first,)


def test_a_frozen_catalog_takes_nothing_more() -> None:
    catalog = Catalog()
    catalog.freeze()
    catalog.freeze()
    with pytest.raises(ConfigError):
        catalog.register(Foreign())
    assert len(catalog) == 0


@pytest.mark.parametrize(
    "foreign",
    [
        Foreign(described=definition("")),
        Foreign(described=definition("a b")),
        Foreign(described=definition("x" * 65)),
        Foreign(described=definition(type="array")),
        Foreign(described=definition(properties={})),
        Foreign(described=definition(type="object", properties=[])),
        Foreign(described=definition(type="object", default=float("nan"))),
        Foreign(described=definition(type="object", default=object())),
        Foreign(described=ToolDefinition(name="x", description="", parameters=[])),  # type: ignore[arg-type]
        Foreign(described=definition(description="\ud800")),
        Foreign(described=definition(description="x" * 65_537)),
        Foreign(described={"name": "x"}),  # type: ignore[arg-type]
        Foreign(effect="readOnly"),
        Foreign(timeout=0),
        Foreign(exclusive=None),
        Foreign(needs_approval="yes"),
        object(),
        Foreign,
    ],
)
def test_what_a_provider_or_the_engine_could_not_use_is_refused(foreign: object) -> None:
    catalog = Catalog()
    with pytest.raises(ConfigError):
        catalog.register(foreign)
    assert len(catalog) == 0


NAMES = st.from_regex(r"\A[a-zA-Z0-9_-]{1,8}\Z")


@given(names=st.lists(NAMES, unique=True), data=st.data())
def test_order_and_revision_do_not_depend_on_the_order_of_registration(
    names: list[str], data: st.DataObject
) -> None:
    one, two = Catalog(), Catalog()
    for name in names:
        one.register(Foreign(described=definition(name)))
    for name in data.draw(st.permutations(names)):
        two.register(Foreign(described=definition(name)), owner="other")
    assert [tool.name for tool in one.all()] == sorted(names)
    assert one.definitions() == two.definitions()
    assert one.revision == two.revision
    assert all(name in one for name in names)


def test_the_revision_follows_what_the_model_sees_and_nothing_else() -> None:
    def revision(foreign: Foreign) -> str:
        catalog = Catalog()
        catalog.register(foreign)
        return catalog.revision

    base = revision(Foreign())
    assert base == revision(Foreign(effect="read_only", timeout=3))
    assert (
        len(
            {
                base,
                Catalog().revision,
                revision(Foreign(described=definition("other"))),
                revision(Foreign(described=definition(description="other"))),
                revision(Foreign(described=definition(type="object"))),
            }
        )
        == 5
    )
