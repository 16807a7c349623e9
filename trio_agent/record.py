"""What every record shares: equality, hash and repr by value.

attrs would write these three for each class. A hundred classes then cost half of
the import time; inherited once, they cost nothing (see benchmarks/README.md).

Records are what users see and what is stored or sent. What only lives between two
functions is a `msgspec.Struct`, which costs less still.
"""

from __future__ import annotations

from typing import Any, ClassVar


class Shown:
    """The base of attrs classes with an identity, declared with ``eq=False, repr=False``."""

    __slots__ = ()
    __attrs_attrs__: ClassVar[tuple[Any, ...]] = ()

    def __repr__(self) -> str:
        """Show the class and every field that differs from its default."""
        shown = (
            f"{field.name}={value!r}"
            for field in self.__attrs_attrs__
            if field.repr
            if (value := getattr(self, field.name)) is not field.default
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class Record(Shown):
    """The base of frozen attrs classes declared with ``eq=False, repr=False``."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Compare field by field; only an object of the same class can be equal."""
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self is other or all(
            getattr(self, field.name) == getattr(other, field.name)
            for field in self.__attrs_attrs__
        )

    def __hash__(self) -> int:
        """Hash all fields; records that hold a dict have no hash."""
        fields = self.__attrs_attrs__
        return hash((type(self), *(getattr(self, field.name) for field in fields)))
