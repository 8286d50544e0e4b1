"""The SQL that reads a CSV file: columns by their types, times by their offsets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.trace.sources.sql import literal, quoted

MIXED: Final = "mixed"
"""In place of a row's zone offset: some of its times have one and some have none."""
_SECONDS_END: Final = len("2023-03-01 00:18:22")
_AFTER: Final = f"substring({{}}, {_SECONDS_END + 1}, {{}})"


@dataclass(frozen=True, kw_only=True)
class Time:
    """A column of times."""

    zone: str = "UTC"
    """Where the clock stands for a time that is written without an offset: a name of the IANA database."""
    format: str | None = None
    """As strptime has it; None: ISO 8601, with or without an offset."""


Columns = Mapping[str, str | Time]
"""Name and DuckDB type of each column of a file, or its `Time`."""


@dataclass(frozen=True)
class CsvSource:
    """The SQL that reads a CSV file."""

    file: Path
    columns: Sequence[tuple[str, str | Time]]
    """In the file's order."""
    delimiter: str
    has_header: bool

    def typed(self) -> str:
        """SELECT of each column by its type; fails on a field that is not of it."""
        return f"{self._columns()} FROM {self.reader(self._kinds())}"

    def good(self) -> str:
        """As `typed`, of the rows that can be read."""
        wrong = " OR ".join(
            wrong for name, _ in self.columns if (wrong := self._wrong(name, times=True))
        )
        return f"{self._columns()} FROM {self.reader(self._kinds(), 'ignore_errors=true')} WHERE NOT ({wrong or 'false'})"  # noqa: E501

    def checked(self, *options: str) -> str:
        """The table function with every column of its type, as far as it can check that: not `unchecked`."""
        kinds = {
            name: "TIMESTAMPTZ"
            for name, kind in self.columns
            if isinstance(kind, Time) and not kind.format
        }
        return self.reader({**self._kinds(), **kinds}, *options)

    def unchecked(self) -> Mapping[str, str]:
        """SQL, by column: whether a field that passed `checked` is none of its type."""
        return {
            name: wrong for name, _ in self.columns if (wrong := self._wrong(name, times=False))
        }

    def texts(self, *options: str) -> str:
        """The table function with every column a text."""
        return self.reader({name: "VARCHAR" for name, _ in self.columns}, *options)

    def reader(self, kinds: Mapping[str, str], *options: str) -> str:
        """The table function, with these types of columns."""
        schema = ", ".join(f"{literal(name)}: '{kind}'" for name, kind in kinds.items())
        listed = "".join(f", {option}" for option in options)
        return (
            f"read_csv({literal(self.file)}, auto_detect=false, header={str(self.has_header).lower()}, "
            f"delim={literal(self.delimiter)}, quote='\"', escape='\"', nullstr='', columns={{{schema}}}{listed})"
        )

    def with_offset(self) -> Mapping[str, str]:
        """SQL: whether a time was written with a zone offset, NULL where there is no time; by column."""
        return {
            name: _has_offset(quoted(name), kind)
            for name, kind in self.columns
            if isinstance(kind, Time)
        }

    def _kinds(self) -> dict[str, str]:
        return {name: "VARCHAR" if isinstance(kind, Time) else kind for name, kind in self.columns}

    def _columns(self) -> str:
        # A file that was exported from a trace may have a column zone_offset; the one that is made here is meant.
        cells = [
            f"{_cell(name, kind)} AS {quoted(name)}"
            for name, kind in self.columns
            if name != "zone_offset"
        ]
        return f"SELECT {', '.join([*cells, self._offset()])}"

    def _wrong(self, name: str, *, times: bool) -> str:
        cell, kind = quoted(name), dict(self.columns)[name]
        if kind == "DOUBLE":
            return f"isinf({cell})"
        if isinstance(kind, Time) and kind.format:
            return f"({cell} IS NOT NULL AND try_strptime({cell}, {literal(kind.format)}) IS NULL)"
        if isinstance(kind, Time) and times:
            return f"({cell} IS NOT NULL AND TRY_CAST({cell} AS TIMESTAMPTZ) IS NULL)"
        return ""

    def _offset(self) -> str:
        times = [(quoted(name), kind) for name, kind in self.columns if isinstance(kind, Time)]
        if not times:
            return "'' AS zone_offset"
        first, *others = (_has_offset(cell, time) for cell, time in times)
        alike = " AND ".join(f"coalesce({first} = {other}, true)" for other in others) or "true"
        written = ", ".join(_written_offset(cell, time) for cell, time in times)
        return f"CASE WHEN {alike} THEN coalesce({written}) ELSE '{MIXED}' END AS zone_offset"


def _cell(name: str, kind: str | Time) -> str:
    """A field as `source` has it."""
    cell = quoted(name)
    if isinstance(kind, Time):
        return utc_sql(cell, kind)
    if kind != "DOUBLE":
        return cell
    # An infinite number is no number; csv_faults says where it stands.
    return f"CASE WHEN isfinite({cell}) THEN {cell} WHEN isinf({cell}) THEN error('infinite') END"


def utc_sql(cell: str, time: Time) -> str:
    """A time's text as a naive UTC TIMESTAMP."""
    if time.format:
        parsed = f"strptime({cell}, {literal(time.format)})"
        if "%z" in time.format or "%Z" in time.format:
            return _naive(parsed)
        return parsed if time.zone == "UTC" else _naive(f"timezone({literal(time.zone)}, {parsed})")
    # By way of TIMESTAMPTZ, which minds an offset; a cast to TIMESTAMP drops it in silence.
    aware = f"{cell}::TIMESTAMPTZ"
    if time.zone == "UTC":
        return _naive(aware)
    local = f"timezone({literal(time.zone)}, {cell}::TIMESTAMP)"
    return _naive(f"CASE WHEN {_has_offset(cell, time)} THEN {aware} ELSE {local} END")


def _naive(aware: str) -> str:
    # As timezone('UTC', …), at a third of the cost: no calendar is asked.
    return f"make_timestamp(epoch_us({aware}))"


def _has_offset(cell: str, time: Time) -> str:
    if time.format:
        return f"CASE WHEN {cell} IS NOT NULL THEN false END"
    return (
        f"CASE WHEN strlen({cell}) <= {_SECONDS_END} THEN false WHEN {_AFTER.format(cell, 1)} IN ('+', '-') THEN true "
        f"WHEN {cell} IS NOT NULL THEN {_after_seconds(cell)} <> '' END"
    )


def _written_offset(cell: str, time: Time) -> str:
    """What follows the seconds: '+08:00', 'Z', or '' where nothing does."""
    if time.format:
        return f"CASE WHEN {cell} IS NOT NULL THEN '' END"
    # Most are as long as 2023-03-01 00:18:22, or have the sign next; the general way costs more.
    return (
        f"CASE WHEN strlen({cell}) <= {_SECONDS_END} THEN '' WHEN {_AFTER.format(cell, 1)} IN ('+', '-') "
        f"THEN {_AFTER.format(cell, 9)} ELSE {_after_seconds(cell)} END"
    )


def _after_seconds(cell: str) -> str:
    """What follows the seconds and their fraction."""
    return f"ltrim({_AFTER.format(cell, 40)}, '.0123456789 ')"
