"""A persistent append-only sequence: versions share one list, growing costs what it adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from trio_agent.protocol.items import Item, ToolOutputItem, UserItem


class ItemLog(Sequence[Item]):
    """An immutable sequence of items that grows by making a longer version of itself.

    Versions that grow from one another share storage. A version that is not the
    longest copies the shared part when it grows, so no version ever changes; but if it
    grows by what a longer one has there already, it shares that, too. So trying out a
    change before committing it does not make the commit copy the history.
    """

    __slots__ = ("_items", "_length")

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._items = list(items)
        self._length = len(self._items)

    def extended(self, items: Iterable[Item]) -> ItemLog:
        """Return the version that has *items* after these."""
        added = list(items)
        if not added:
            return self
        shared, length = self._items, self._length + len(added)
        if len(shared) == self._length:
            shared.extend(added)
        elif length > len(shared) or not all(
            map(_same, shared[self._length : length], added)  # as many
        ):
            shared = [*shared[: self._length], *added]
        longer = ItemLog.__new__(ItemLog)
        longer._items = shared  # noqa: SLF001  # one of us
        longer._length = length  # noqa: SLF001
        return longer

    def since(self, length: int) -> list[Item]:
        """Return what was added after the first *length* items."""
        return self._items[length : self._length]

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        """Return one item, or a list for a slice."""
        if isinstance(index, slice):
            return [self._items[i] for i in range(*index.indices(self._length))]
        if index < 0:
            index += self._length
        if not 0 <= index < self._length:
            raise IndexError("item index out of range")
        return self._items[index]

    def __len__(self) -> int:
        """Return how many items this version has."""
        return self._length

    def __iter__(self) -> Iterator[Item]:
        """Walk this version, whatever is appended meanwhile."""
        for index in range(self._length):
            yield self._items[index]

    def __eq__(self, other: object) -> bool:
        """Compare item by item with another log."""
        if not isinstance(other, ItemLog):
            return NotImplemented
        if self._length != other._length:
            return False
        return self._items is other._items or all(
            mine == theirs for mine, theirs in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # compared by value, used as no key

    def __repr__(self) -> str:
        """Show the items."""
        return f"ItemLog({list(self)!r})"


def _same(one: Item, other: Item) -> bool:
    """Tell whether nobody could tell *one* from *other*.

    Items with JSON values inside must be one object: ``True`` equals 1 in Python only.
    """
    return one is other or (isinstance(one, (UserItem, ToolOutputItem)) and one == other)


def as_log(items: Iterable[Item]) -> ItemLog:
    """Return *items* as a log: itself if it is one already."""
    return items if isinstance(items, ItemLog) else ItemLog(items)
