"""Build the SQL that reads a CSV file with given column types, and converts times to UTC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.trace.sources.sql import literal, quoted

MIXED: Final = "mixed"
"""Value of a row's `zone_offset` if only some of its times have a zone offset."""
_SECONDS_END: Final = len("2023-03-01 00:18:22")
_AFTER: Final = f"substring({{}}, {_SECONDS_END + 1}, {{}})"


@dataclass(frozen=True, kw_only=True)
class Time:
    """The type of a column that contains times."""

    zone: str = "UTC"
    """IANA time zone of times without a zone offset."""
    format: str | None = None
    """Format for strptime; None means ISO 8601, with or without a zone offset."""


Columns = Mapping[str, str | Time]
"""For each column of a file: its name, and its DuckDB type or a `Time`."""


@dataclass(frozen=True)
class CsvSource:
    """Build the SQL that reads a CSV file."""

    file: Path
    columns: Sequence[tuple[str, str | Time]]
    """Names and types of the columns, in the file's order."""
    delimiter: str
    has_header: bool

    def typed(self) -> str:
        """Return a SELECT that reads each column with its type, and fails on other types."""
        return f"{self._columns()} FROM {self.reader(self._kinds())}"

    def good(self) -> str:
        """Return a SELECT like `typed` that skips unreadable rows."""
        wrong = " OR ".join(
            wrong for name, _ in self.columns if (wrong := self._wrong(name, times=True))
        )
        return f"{self._columns()} FROM {self.reader(self._kinds(), 'ignore_errors=true')} WHERE NOT ({wrong or 'false'})"  # noqa: E501

    def checked(self, *options: str) -> str:
        """Return a table function that reads every column with its type.

        The function finds the errors that the reader itself can find. `unchecked` finds the other
        errors.
        """
        kinds = {
            name: "TIMESTAMPTZ"
            for name, kind in self.columns
            if isinstance(kind, Time) and not kind.format
        }
        return self.reader({**self._kinds(), **kinds}, *options)

    def unchecked(self) -> Mapping[str, str]:
        """Return, by column, an SQL condition that finds wrong fields which `checked` accepts."""
        return {
            name: wrong for name, _ in self.columns if (wrong := self._wrong(name, times=False))
        }

    def texts(self, *options: str) -> str:
        """Return a table function that reads every column as text."""
        return self.reader({name: "VARCHAR" for name, _ in self.columns}, *options)

    def reader(self, kinds: Mapping[str, str], *options: str) -> str:
        """Return a table function that reads the columns with the given types."""
        schema = ", ".join(f"{literal(name)}: '{kind}'" for name, kind in kinds.items())
        listed = "".join(f", {option}" for option in options)
        return (
            f"read_csv({literal(self.file)}, auto_detect=false, "
            f"header={str(self.has_header).lower()}, "
            f"delim={literal(self.delimiter)}, quote='\"', escape='\"', nullstr='', "
            f"columns={{{schema}}}{listed})"
        )

    def with_offset(self) -> Mapping[str, str]:
        """Return, by column of times, an SQL condition that is true if a time has a zone offset.

        The condition is NULL if the field is empty.
        """
        return {
            name: _has_offset(quoted(name), kind)
            for name, kind in self.columns
            if isinstance(kind, Time)
        }

    def _kinds(self) -> dict[str, str]:
        return {name: "VARCHAR" if isinstance(kind, Time) else kind for name, kind in self.columns}

    def _columns(self) -> str:
        # A file exported from a trace may have a column zone_offset; use the column made here.
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
    """Return SQL that converts a field to the value that the table `source` has."""
    cell = quoted(name)
    if isinstance(kind, Time):
        return utc_sql(cell, kind)
    if kind != "DOUBLE":
        return cell
    # An infinite number is an error; `faults` finds its place.
    return f"CASE WHEN isfinite({cell}) THEN {cell} WHEN isinf({cell}) THEN error('infinite') END"


def utc_sql(cell: str, time: Time) -> str:
    """Return SQL that converts a time's text to a TIMESTAMP in UTC without a zone."""
    if time.format:
        parsed = f"strptime({cell}, {literal(time.format)})"
        if "%z" in time.format or "%Z" in time.format:
            return _naive(parsed)
        return parsed if time.zone == "UTC" else _naive(f"timezone({literal(time.zone)}, {parsed})")
    # Cast to TIMESTAMPTZ, which applies an offset; a cast to TIMESTAMP ignores the offset silently.
    aware = f"{cell}::TIMESTAMPTZ"
    if time.zone == "UTC":
        return _naive(aware)
    local = f"timezone({literal(time.zone)}, {cell}::TIMESTAMP)"
    return _naive(f"CASE WHEN {_has_offset(cell, time)} THEN {aware} ELSE {local} END")


def _naive(aware: str) -> str:
    # Same result as timezone('UTC', …) at a third of the cost, without a calendar.
    return f"make_timestamp(epoch_us({aware}))"


def _has_offset(cell: str, time: Time) -> str:
    if time.format:
        return f"CASE WHEN {cell} IS NOT NULL THEN false END"
    return (
        f"CASE WHEN strlen({cell}) <= {_SECONDS_END} THEN false WHEN {_AFTER.format(cell, 1)} IN "
        "('+', '-') THEN true "
        f"WHEN {cell} IS NOT NULL THEN {_after_seconds(cell)} <> '' END"
    )


def _written_offset(cell: str, time: Time) -> str:
    """Return SQL for the zone offset as written after the seconds: '+08:00', 'Z', or ''."""
    if time.format:
        return f"CASE WHEN {cell} IS NOT NULL THEN '' END"
    # Most times are as long as 2023-03-01 00:18:22, or continue with the sign of the offset. The
    # general expression is slower.
    return (
        f"CASE WHEN strlen({cell}) <= {_SECONDS_END} THEN '' WHEN {_AFTER.format(cell, 1)} IN "
        "('+', '-') "
        f"THEN {_AFTER.format(cell, 9)} ELSE {_after_seconds(cell)} END"
    )


def _after_seconds(cell: str) -> str:
    """Return SQL for the text after the seconds and their fraction."""
    return f"ltrim({_AFTER.format(cell, 40)}, '.0123456789 ')"
