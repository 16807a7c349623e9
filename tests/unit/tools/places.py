"""Types that tools of tests take, the context they are called in, and one such tool."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Literal, TypedDict

import attrs
import msgspec

from trio_agent.tools.base import ToolContext
from trio_agent.tools.function import tool


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
