"""What may enter: text that is Unicode, values that are JSON, and cuts that keep both so.

A lone surrogate or a NaN is refused here, at the boundary, because nothing
behind it can store or send one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

Json: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, list or dict with text keys."""

MAX_JSON_DEPTH = 128

MAX_INTEGER_BITS = 1_024
"""No float is larger, and readers in other languages would make it one."""


def utf8_length(text: str) -> int:
    """Return the length of *text* in UTF-8 bytes.

    Raises:
        ValueError: If *text* holds a lone surrogate, which is no character.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as exc:
        raise ValueError(
            f"text is not valid Unicode: half a character at position {exc.start}"
        ) from None


def check_text(text: str, *, name: str, limit: int, blank: bool = True) -> None:
    """Check that *text* is Unicode of at most *limit* bytes, and not blank unless allowed.

    Raises:
        ValueError: It names *name*, the limit and what was found.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name} must be text, not {type(text).__name__}")  # noqa: TRY004
    try:
        size = utf8_length(text)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from None
    if size > limit:
        raise ValueError(f"{name} has {size:,} bytes; at most {limit:,} are allowed")
    if not blank and not text.strip():
        raise ValueError(f"{name} must not be blank")


def check_json(value: Json, *, name: str, depth: int = 0) -> None:
    """Check that *value* is JSON that every store and provider can hold.

    Raises:
        ValueError: For NaN, infinities, integers of more than 1,024 bits, half
            characters, keys that are not text, values of other types and nesting
            deeper than 128.
    """
    if depth > MAX_JSON_DEPTH:
        raise ValueError(f"{name} is nested deeper than {MAX_JSON_DEPTH}")
    if value is None or isinstance(value, bool) or (type(value) is str and value.isascii()):
        return  # most are: every save of a call comes here, so the usual goes first
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise ValueError(f"{name} holds a number of more than {MAX_INTEGER_BITS} bits")
        return
    if isinstance(value, str):
        try:
            utf8_length(value)
        except ValueError as exc:
            raise ValueError(f"{name}: {exc}") from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} holds {value}, which is not JSON")
    elif isinstance(value, (dict, Mapping)):
        for key, member in cast("Mapping[object, Json]", value).items():
            if not isinstance(key, str):
                raise ValueError(f"{name} has a key that is not text: {key!r}")  # noqa: TRY004
            check_json(key, name=name, depth=depth + 1)
            check_json(member, name=name, depth=depth + 1)
    elif isinstance(value, (list, tuple)):
        for member in cast("list[Json]", value):
            check_json(member, name=name, depth=depth + 1)
    else:
        raise ValueError(f"{name} holds a {type(value).__name__}, which is not JSON")  # noqa: TRY004


def replace_surrogates(text: str) -> str:
    """Return *text* with every half character replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


CUT_NOTICE = "\n[… {} bytes cut here …]\n"
"""What stands where the middle of a long text was; ``{}`` is the number of bytes missing."""


def cut_middle(text: str, limit: int) -> str:
    """Return *text* in at most *limit* UTF-8 bytes, head and tail kept, the cut named.

    Whole characters only; half ones become U+FFFD. A limit too small for the notice
    gives the head alone.
    """
    text = replace_surrogates(text)
    data = text.encode()
    if len(data) <= limit:
        return text
    room = limit - len(CUT_NOTICE.format(f"{len(data):,}").encode())
    if room <= 0:
        return data[:limit].decode(errors="ignore")
    head = data[: room - room // 2].decode(errors="ignore")
    tail = data[len(data) - room // 2 :].decode(errors="ignore")
    missing = len(data) - len(head.encode()) - len(tail.encode())
    return head + CUT_NOTICE.format(f"{missing:,}") + tail


def cut_end(text: str, limit: int) -> str:
    """Return *text* in at most *limit* UTF-8 bytes; an ellipsis ends what was cut.

    Whole characters only; half ones become U+FFFD. A limit below the ellipsis' three
    bytes gives the head alone.
    """
    text = replace_surrogates(text)
    data = text.encode()
    if len(data) <= limit:
        return text
    ellipsis = "…" if limit >= 3 else ""
    return data[: limit - len(ellipsis.encode())].decode(errors="ignore") + ellipsis
