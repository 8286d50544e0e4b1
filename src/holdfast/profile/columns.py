"""Store many rows as columns of numbers, and build a row object only when it is read.

A rank's phases of one week are millions of rows. Stored as Python objects, they would need eight
times the memory of columns.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar, overload

Row = TypeVar("Row")
_NONE: Final = -(1 << 63)
"""The number that represents None in a column."""


class Whole(Sequence[int | None]):
    """A column of 64-bit integers, any of which may be None."""

    def __init__(self, numbers: "array[int] | None" = None) -> None:
        """Wrap an array of type code `q`, or start empty if `numbers` is None."""
        self._numbers = array("q") if numbers is None else numbers

    def insert(self, at: int, value: int | None) -> None:
        """Insert a value before row `at`.

        Raises:
            OverflowError: the value needs more than 64 bits.
        """
        self._numbers.insert(at, _NONE if value is None else value)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> int | None: ...
    @overload
    def __getitem__(self, at: slice) -> "Whole": ...
    def __getitem__(self, at: int | slice) -> "int | Whole | None":
        if isinstance(at, slice):
            return Whole(self._numbers[at])
        number = self._numbers[at]
        return None if number == _NONE else number

    def __iter__(self) -> Iterator[int | None]:
        return (None if number == _NONE else number for number in self._numbers)


class Words(Sequence[str]):
    """A column of strings with few distinct values; each row takes two bytes."""

    def __init__(self, codes: "array[int] | None" = None, known: list[str] | None = None) -> None:
        """Wrap an array of type code `H` with indices into `known`, or start empty."""
        self._codes = array("H") if codes is None else codes
        self._known: list[str] = [] if known is None else known
        self._code_of = {word: code for code, word in enumerate(self._known)}

    def insert(self, at: int, word: str) -> None:
        """Insert a string before row `at`."""
        code = self._code_of.get(word)
        if code is None:
            code = self._code_of[word] = len(self._known)
            self._known.append(word)
        self._codes.insert(at, code)

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> "Words": ...
    def __getitem__(self, at: int | slice) -> "str | Words":
        if isinstance(at, slice):
            return Words(self._codes[at], self._known)
        return self._known[self._codes[at]]

    def __iter__(self) -> Iterator[str]:
        return map(self._known.__getitem__, self._codes)


class Columns(Sequence[Row], Generic[Row]):
    """A sequence of rows that is stored by column; a slice copies the columns' slices."""

    def __init__(self, row: Callable[..., Row], columns: Mapping[str, Sequence[Any]]) -> None:
        """Store the columns, which must have equal length.

        Args:
            row: builds a row from one value of each column, in the order of `columns`.
            columns: the values of each field, by field name.
        """
        self._row = row
        self._columns = dict(columns)
        self._first = next(iter(self._columns.values()))

    def column(self, name: str) -> Sequence[Any]:
        """Return the values of one field in all rows."""
        return self._columns[name]

    def __len__(self) -> int:
        return len(self._first)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> "Columns[Row]": ...
    def __getitem__(self, at: int | slice) -> "Row | Columns[Row]":
        if isinstance(at, slice):
            return Columns(self._row, {name: one[at] for name, one in self._columns.items()})
        return self._row(*(one[at] for one in self._columns.values()))

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, *self._columns.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def column(rows: Sequence[Any], name: str) -> Sequence[Any]:
    """Return the values of one field in all rows, for `Columns` and for any sequence of objects."""
    return rows.column(name) if isinstance(rows, Columns) else [getattr(one, name) for one in rows]


def fields(rows: Sequence[Any], *names: str) -> Iterable[tuple[Any, ...]]:
    """Yield, for each row, a tuple of the named fields."""
    return zip(*(column(rows, name) for name in names), strict=True)
