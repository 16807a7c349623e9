"""Rules that every provider's wire format shares; pure.

1. Items are grouped into turns: what was said to the model, and its answers, each
   with the outputs of its calls directly behind it.
2. Calls are named to the provider by *our* id, which is unique; what a provider
   called them, perhaps twice, perhaps in 500 characters, never goes out again.
3. Tool names that a provider would refuse are mapped, always to the same name.
4. What a provider sealed is sent to it alone. Nothing is lost: the store keeps it.
5. Nothing blank is sent, and no answer that says nothing and calls nothing, or that
   ends in a thought.
6. What goes out is strict JSON in strict UTF-8.
"""

from __future__ import annotations

import hashlib
import json  # msgspec writes Infinity as null
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias, cast

import attrs

from trio_agent.errors import ProviderError
from trio_agent.model.base import ToolDefinition
from trio_agent.protocol.items import (
    AssistantItem,
    ImageItem,
    ReasoningItem,
    RequestItem,
    Sealed,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.limits import (
    MAX_MODEL_OUTPUT_BYTES,
    MAX_TOOL_CALLS,
)
from trio_agent.protocol.text import Json, replace_surrogates
from trio_agent.record import Record

_LEGAL: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ILLEGAL: Final = re.compile(r"[^a-zA-Z0-9_-]")

MAX_TOKENS: Final = 2**40
"""What one answer can cost; more is a provider's mistake."""

AnswerPart: TypeAlias = ReasoningItem | AssistantItem | ToolCallItem


# ---------------------------------------------------------------- names and ids


def is_legal(name: str) -> bool:
    """Return whether every provider accepts *name* for a tool or a call."""
    return _LEGAL.fullmatch(name) is not None


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:digits]


def legal_name(name: str) -> str:
    """Return the name that providers know a tool by: *name* itself if it is legal.

    Any other name keeps what is legal of it and ends in a digest of the whole, so
    two names stay two.
    """
    if is_legal(name):
        return name
    return f"{_ILLEGAL.sub('_', name)[:50] or 'tool'}_{_digest(name, 12)}"


def legal_call_id(call_id: str) -> str:
    """Return the id that providers know a call by: *call_id* itself if it is legal."""
    return call_id if is_legal(call_id) else f"call_{_digest(call_id, 32)}"


def original_names(tools: Iterable[ToolDefinition]) -> dict[str, str]:
    """Return, for the tools whose name had to be mapped, the wire's name to ours."""
    return {wire: tool.name for tool in tools if (wire := legal_name(tool.name)) != tool.name}


# ---------------------------------------------------------------- history


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Said(Record):
    """What a model was told between two of its answers: at least one item, none blank."""

    items: tuple[UserItem | ImageItem, ...]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Answered(Record):
    """One answer, and the outputs of its calls.

    ``sealed`` of a part is None unless it is the receiving provider's own.
    """

    parts: tuple[AnswerPart, ...]
    outputs: tuple[ToolOutputItem, ...] = ()


Turn: TypeAlias = Said | Answered


def _no_sealed_part_stands_alone(_data: Json) -> bool:
    return False


def _own(item: AnswerPart, binding: str) -> AnswerPart:
    sealed: Sealed | None = item.sealed
    if sealed is None or sealed.provider == binding:
        return item
    return attrs.evolve(item, sealed=None)


def own_items(items: Sequence[RequestItem], binding: str) -> tuple[RequestItem, ...]:
    """Return *items* as the provider *binding* may see them.

    Parts that others sealed lose their seal, or go if nothing else is in them;
    so do blank messages and answers that say nothing and call nothing.
    """
    return tuple(
        item
        for turn in turns(items, binding)
        for item in (turn.items if isinstance(turn, Said) else (*turn.parts, *turn.outputs))
    )


def turns(
    items: Sequence[RequestItem],
    binding: str,
    *,
    stands_alone: Callable[[Json], bool] = _no_sealed_part_stands_alone,
) -> list[Turn]:
    """Group *items* into turns, as the provider *binding* may see them.

    Args:
        items: A valid history: see `ModelRequest`.
        binding: Whose sealed parts may stay.
        stands_alone: Whether an own sealed part is worth sending although its
            answer has neither text nor calls.
    """
    found: list[Turn] = []
    said: list[UserItem | ImageItem] = []
    parts: list[AnswerPart] = []
    outputs: list[ToolOutputItem] = []

    def end_said() -> None:
        if not said:
            return
        before = found[-1] if found else None
        if isinstance(before, Said):  # the answer that stood between was empty
            found[-1] = Said(items=(*before.items, *said))
        else:
            found.append(Said(items=tuple(said)))
        said.clear()

    def is_thought(part: AnswerPart) -> bool:
        return isinstance(part, ReasoningItem) and not (
            part.sealed is not None and stands_alone(part.sealed.data)
        )

    def end_answer() -> None:
        while parts and is_thought(parts[-1]):
            parts.pop()  # servers refuse a thought that nothing follows from
        if parts:
            found.append(Answered(parts=tuple(parts), outputs=tuple(outputs)))
        parts.clear()
        outputs.clear()

    for item in items:
        if isinstance(item, UserItem):
            if item.text.strip():
                end_answer()
                said.append(item)
        elif isinstance(item, ImageItem):
            end_answer()
            said.append(item)
        elif isinstance(item, ToolOutputItem):
            outputs.append(item)
        else:
            part = _own(item, binding)
            if isinstance(part, AssistantItem) and not part.text.strip():
                continue
            if isinstance(part, ReasoningItem) and part.sealed is None and not part.text:
                continue
            end_said()
            if outputs:
                end_answer()
            parts.append(part)
    end_answer()
    end_said()
    return found


# ---------------------------------------------------------------- JSON


def encode(body: dict[str, Json]) -> bytes:
    """Return *body* as strict JSON in strict UTF-8.

    Half characters, which no text of ours should hold, become U+FFFD.

    Raises:
        ProviderError: If *body* holds what is not JSON, such as NaN.
    """
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as exc:
        raise ProviderError(f"the request is not JSON: {exc}", status=400) from exc
    return replace_surrogates(text).encode()


def member(value: Json, *path: str) -> Json:
    """Return what stands in nested objects under *path*, or None."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = cast("dict[str, Any]", value).get(key)
    return value


def text_member(value: Json, *path: str) -> str:
    """Return the text under *path*, or ``""`` if there is none."""
    found = member(value, *path)
    return found if isinstance(found, str) else ""


def list_member(value: Json, *path: str) -> Sequence[Json]:
    """Return the list under *path*, or an empty one if there is none."""
    found = member(value, *path)
    return cast("Sequence[Json]", found) if isinstance(found, list) else ()


def token_count(value: Json, *path: str) -> int:
    """Return the number of tokens under *path*; 0 if the provider did not say.

    Raises:
        ProviderError: If it is negative, a fraction, or larger than any answer can cost;
            so sums over a session stay in range.
    """
    found = member(value, *path)
    if isinstance(found, float) and math.isfinite(found) and found.is_integer():
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return 0
    if isinstance(found, float) or not 0 <= found <= MAX_TOKENS:
        raise ProviderError(f"the provider counts {found} tokens as {'.'.join(path)}")
    return found


class Halves:
    """Joins characters whose two halves arrive in different deltas.

    Some servers cut their text between the two halves of a character, which JSON
    can express. A first half is held back until the second comes; one that stays
    alone becomes U+FFFD.
    """

    def __init__(self) -> None:
        self._held = ""

    def join(self, text: str) -> str:
        """Return what of all the text so far is whole and was not returned yet."""
        if not self._held and (text.isascii() or _HALF.search(text) is None):
            return text
        text = self._held + text
        self._held = ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self._held = text[:-1], text[-1]
        return replace_surrogates(text)


_HALF: Final = re.compile("[\ud800-\udfff]")


class OutputLimit:
    """Counts what an answer holds and refuses what is over the limits."""

    def __init__(self) -> None:
        self._bytes = 0
        self._calls = 0

    def add(self, text: str) -> None:
        """Count *text*; `ProviderError` beyond 16 MiB."""
        self._bytes += len(text) if text.isascii() else len(text.encode(errors="replace"))
        if self._bytes > MAX_MODEL_OUTPUT_BYTES:
            raise ProviderError(
                f"the answer has more than {MAX_MODEL_OUTPUT_BYTES:,} bytes; it was dropped"
            )

    def add_call(self) -> None:
        """Count one call; `ProviderError` beyond 128."""
        self._calls += 1
        if self._calls > MAX_TOOL_CALLS:
            raise ProviderError(
                f"the answer asks for more than {MAX_TOOL_CALLS} tools; it was dropped"
            )
