from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.protocol.items import Item, ToolCallItem, UserItem
from trio_agent.state.item_log import ItemLog, as_log


def items(*names: str) -> list[Item]:
    return [UserItem(text=name) for name in names]


growth = st.lists(st.tuples(st.integers(0, 10), st.lists(st.sampled_from("abc"), max_size=3)))


@given(st.lists(st.sampled_from("abc"), max_size=3), growth)
def test_no_version_ever_changes(start: list[str], steps: list[tuple[int, list[str]]]) -> None:
    """Grow any version, old or new, in any order: each stays what it was."""
    first = items(*start)
    versions = [(ItemLog(first), list(first))]
    for choice, names in steps:
        log, model = versions[choice % len(versions)]
        added = items(*names)
        versions.append((log.extended(added), model + added))
    for log, model in versions:
        assert list(log) == model
        assert len(log) == len(model)
        assert log == ItemLog(model)
        for length in range(len(model) + 1):
            assert log.since(length) == model[length:]


@given(st.lists(st.sampled_from("abc"), max_size=6), st.integers(-8, 8), st.slices(6))
def test_it_reads_like_a_list(names: list[str], index: int, part: slice) -> None:
    model = items(*names)
    log = ItemLog(model).extended(items("later"))
    shorter = ItemLog(model)
    longer = shorter.extended(items("later"))  # shares storage with the shorter one

    assert shorter[part] == model[part]
    assert log[part] == [*model, *items("later")][part]
    assert longer[-1] == items("later")[0]
    if -len(model) <= index < len(model):
        assert shorter[index] == model[index]
    else:
        with pytest.raises(IndexError):
            shorter[index]


def test_what_it_was_made_from_may_change() -> None:
    source = items("a")
    log = ItemLog(source)
    source.append(items("b")[0])

    assert list(log) == items("a")


def test_a_slice_is_a_copy() -> None:
    log = ItemLog(items("a", "b"))
    log[:].clear()
    log.since(0).clear()

    assert list(log) == items("a", "b")


def test_growing_by_nothing_is_the_same_version() -> None:
    log = ItemLog(items("a"))

    assert log.extended([]) is log
    assert as_log(log) is log
    assert as_log(items("a")) == log


def test_growing_while_walking_does_not_show() -> None:
    log = ItemLog(items("a", "b"))
    seen = []
    for item in log:
        log.extended(items("c"))
        seen.append(item)

    assert seen == items("a", "b")


def test_growing_by_itself_doubles() -> None:
    log = ItemLog(items("a", "b"))

    assert list(log.extended(log)) == items("a", "b", "a", "b")
    assert list(log) == items("a", "b")


def test_equality_is_by_value_and_only_among_logs() -> None:
    one: Any = ItemLog(items("a"))

    assert one != items("a")
    assert one != ItemLog(items("b"))
    assert one != one.extended(items("a"))
    with pytest.raises(TypeError):
        hash(one)


def test_appending_shares_storage() -> None:
    """The cost of growing is what is added, however long the log is."""
    log = ItemLog(items("a"))
    longer = log.extended(items("b"))
    branch = log.extended(items("c"))

    assert longer._items is log._items
    assert branch._items is not log._items


def test_growing_again_by_the_same_shares_what_is_there() -> None:
    """Whoever tries a change out and then makes it copies nothing."""
    log = ItemLog(items("a"))
    tried = log.extended(items("b", "c", "d"))
    made = log.extended(items("b", "c"))

    assert made._items is tried._items
    assert list(made) == items("a", "b", "c")
    assert list(made.extended(items("e"))) == items("a", "b", "c", "e")
    assert list(tried) == items("a", "b", "c", "d")


def test_items_that_only_python_takes_for_equal_are_kept_apart() -> None:
    one, true = (
        ToolCallItem(call_id="c", name="f", arguments={"x": value}) for value in (1, True)
    )
    log = ItemLog(items("a"))
    tried = log.extended([one])

    assert log.extended([true])[-1] is true
    assert log.extended([one])._items is tried._items
