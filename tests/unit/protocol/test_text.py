from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.protocol.text import (
    CUT_NOTICE,
    MAX_INTEGER_BITS,
    MAX_JSON_DEPTH,
    check_json,
    check_text,
    cut_end,
    cut_middle,
    replace_surrogates,
    utf8_length,
)
from trio_agent.testing import strategies

anything = st.text() | st.text(st.characters(categories=["Cs"])) | strategies.texts()
CUTS = pytest.mark.parametrize("cut", [cut_middle, cut_end])


@CUTS
@given(text=strategies.texts(max_size=60), limit=st.integers(0, 200))
def test_a_cut_is_valid_and_within_its_limit(cut: Any, text: str, limit: int) -> None:
    size = utf8_length(text)
    for most in (limit, *range(max(0, size - 1), size + 4)):
        result = cut(text, most)
        assert utf8_length(result) <= most
        if size <= most:
            assert result == text


@CUTS
@given(text=anything, limit=st.integers(0, 50))
def test_a_cut_bears_half_characters(cut: Any, text: str, limit: int) -> None:
    assert utf8_length(cut(text, limit)) <= limit


@given(st.text(min_size=1), st.integers(60, 200))
def test_a_middle_cut_keeps_both_ends_and_says_how_much_is_missing(
    piece: str, limit: int
) -> None:
    text = replace_surrogates(piece) * 300
    if utf8_length(text) <= limit:
        return
    result = cut_middle(text, limit)
    before, after = CUT_NOTICE.split("{}")
    head, rest = result.split(before, 1)
    number, tail = rest.split(after, 1)

    assert text.startswith(head)
    assert text.endswith(tail)
    missing = int(number.replace(",", ""))
    assert utf8_length(head) + utf8_length(tail) + missing == utf8_length(text)
    assert utf8_length(result) > limit - 12, "no more is cut than must be"


@given(strategies.texts(min_size=2, max_size=30), st.integers(3, 30))
def test_an_end_cut_keeps_the_beginning(text: str, limit: int) -> None:
    result = cut_end(text, limit)

    assert result == text or (result.endswith("…") and text.startswith(result[:-1]))


@given(anything)
def test_replacing_surrogates_makes_unicode_and_keeps_the_rest(text: str) -> None:
    result = replace_surrogates(text)

    utf8_length(result)
    if not any("\ud800" <= char <= "\udfff" for char in text):
        assert result == text


def test_two_halves_that_belong_together_become_one() -> None:
    assert replace_surrogates("\ud83d\ude00") == "😀"
    assert replace_surrogates("a\ud83db") == "a\ufffdb"


@given(st.text(max_size=5), st.integers(0, 20))
def test_a_limit_counts_bytes(text: str, limit: int) -> None:
    fits = utf8_length(text) <= limit

    if fits:
        check_text(text, name="x", limit=limit)
    else:
        with pytest.raises(ValueError):
            check_text(text, name="x", limit=limit)


@pytest.mark.parametrize("text", ["\ud800", 5, None, b"x"])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(ValueError):
        check_text(text, name="x", limit=10)


@pytest.mark.parametrize("text", ["", " ", "\n\u2003"])
def test_blank_text_is_refused_where_it_must_not_be(text: str) -> None:
    check_text(text, name="x", limit=10)
    with pytest.raises(ValueError):
        check_text(text, name="x", limit=10, blank=False)


@given(strategies.json_values())
def test_what_is_json_survives_being_written(value: Any) -> None:
    check_json(value, name="x")

    assert json.loads(msgspec.json.encode(value)) == value


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_limits_of_json_are_exact() -> None:
    check_json(nested(MAX_JSON_DEPTH), name="x")
    check_json(2**MAX_INTEGER_BITS - 1, name="x")
    for value in (nested(MAX_JSON_DEPTH + 1), 2**MAX_INTEGER_BITS):
        with pytest.raises(ValueError):
            check_json(value, name="x")


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError):
        check_json(value, name="x")


bad = st.sampled_from([float("nan"), float("inf"), "\udc80", b"x", {1}, {1: 1}, object()])


@given(strategies.json_values(), bad, st.booleans())
def test_one_bad_value_anywhere_is_found(value: Any, wrong: Any, inside: bool) -> None:
    whole = {"a": [value, {"b": wrong}]} if inside else [value, wrong]

    with pytest.raises(ValueError):
        check_json(whole, name="x")
