"""Format an analysis' table for the page: headings in words, units, three significant figures."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from holdfast.core import words
from holdfast.trace.table import Table

ROWS_LIMIT = 24
"""The most rows shown of a table that belongs to a figure; its CSV file has all rows."""
ALONE_ROWS_LIMIT = 60
"""The most rows shown of a table without a figure; its CSV file has all rows."""
_UPRIGHT_ROWS, _WIDE_COLUMNS = 6, 8


@dataclass(frozen=True)
class TableView:
    """A table as text."""

    head: list[str]
    numeric: list[bool]
    """True for each column that contains numbers."""
    rows: list[list[str]]
    more: int
    """Number of rows that are not shown."""


def table_view(table: Table, *, alone: bool) -> TableView:
    """Format the first rows of a table.

    If the table stands without a figure and has few rows and many columns, it is transposed.
    """
    limit = ALONE_ROWS_LIMIT if alone else ROWS_LIMIT
    first = Table({name: column[:limit] for name, column in table.columns.items()})
    columns = [_column(name) for name in table.columns]
    names = [heading for heading, _ in columns]
    rows = [
        [show(value) for (_, show), value in zip(columns, row, strict=True)] for row in first.rows()
    ]
    if alone and len(rows) <= _UPRIGHT_ROWS and len(names) > _WIDE_COLUMNS:
        return TableView(
            [names[0], *(row[0] for row in rows)],
            [False] + [True] * len(rows),
            _turned(names, rows),
            0,
        )
    numeric = [column.dtype.kind in "fiu" for column in table.columns.values()]
    return TableView(names, numeric, rows, max(len(table) - limit, 0))


def _turned(names: list[str], rows: list[list[str]]) -> list[list[str]]:
    return [[name, *(row[number] for row in rows)] for number, name in enumerate(names) if number]


_WHOLE: Final = {
    "at_s": "time (UTC)",
    "day_start_s": "day (UTC)",
    "n": "number",
    "q1": "first quartile",
    "q3": "third quartile",
    "hour_of_day": "hour of the day",
    "jobs_an_hour": "jobs per hour",
    "mean_jobs_an_hour": "mean of jobs per hour",
    "max_jobs_an_hour": "most jobs per hour",
    "job_num": "jobs",
    "share": "share",
    "share_at_most": "share at most this",
    "per_1000_gpu_h": "per 1,000 GPU-hours",
    "per_1000_node_days": "per 1,000 node-days",
    "mttf_h": "mean time to failure (h)",
    "gpu_tdp_w": "power limit of a GPU (W)",
    "emissions_t_co2e": "emissions (t CO2e)",
    "emissions_with_pue_t_co2e": "emissions with PUE (t CO2e)",
    "waiter": "who waits",
    "holder": "who holds the GPUs",
}
"""Full headings of columns whose name does not yield a good heading word by word."""
_WORDS: Final = {
    "avg": "mean", "med": "median", "max": "largest", "gpu": "GPU", "gpus": "GPUs", "cpu": "CPU",
    "it": "IT", "ettr": "ETTR", "p95": "95th percentile of", "complete": "completed", "cancel": "cancelled",
    "fail": "failed", "preempt": "preempted", "xid": "Xid",
}  # fmt: skip
_UNITS: Final = {
    "h": "h", "pct": "%", "w": "W", "c": "°C", "mwh": "MWh", "gib": "GiB", "mib": "MiB",
}  # fmt: skip
_MOMENTS: Final = frozenset({"at_s", "day_start_s"})
"""Columns that contain Unix times in seconds."""
_SHARE: Final = re.compile(r"^share|_share$|_rate_(gpu|cpu)")


def _column(name: str) -> tuple[str, Callable[[object], str]]:
    """Return the heading of a column in words, and the function that formats its values."""
    heading = _heading(name)
    heading = f"{heading[:1].upper()}{heading[1:]}"
    if name in _MOMENTS:
        return heading, moment
    if _SHARE.search(name):
        return heading, _share
    if name.endswith("gpu_time_s"):
        return heading, _hours_of_seconds
    return heading, _duration if name.endswith("_s") else cell


def _heading(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    if found := re.fullmatch(r"(.*)_rate_gpu_time", name):
        return f"{_in_words(found[1])}, share of GPU time"
    if found := re.fullmatch(r"(.*)_rate_(gpu|cpu)", name):
        return f"{_in_words(found[1])}, share of {found[2].upper()} jobs"
    if found := re.fullmatch(r"(.*)_time_(gpu|cpu)_s", name):
        return f"{_in_words(found[1])} time of {found[2].upper()} jobs"
    if found := re.fullmatch(r"(.*?)_?gpu_time_[hs]", name):
        return f"{_in_words(found[1])} GPU-hours".strip()
    if found := re.fullmatch(r"(.*?)_?(gpu|job)_num", name):
        return f"{_in_words(found[1])} {'GPUs' if found[2] == 'gpu' else 'jobs'}".strip()
    stem, _, last = name.rpartition("_")
    if stem and last in _UNITS:
        return f"{_in_words(stem)} ({_UNITS[last]})"
    return _in_words(stem if stem and last == "s" else name)


def _in_words(name: str) -> str:
    return " ".join(_WORDS.get(word, word) for word in name.split("_"))


def moment(value: object) -> str:
    """Format a Unix time in seconds as date and time, UTC."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return cell(value)
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M")


def cell(value: object) -> str:
    """Format a value for a table cell: three significant figures for a number, empty if missing."""
    if value is None or value != value:  # noqa: PLR0124 - NaN and NaT differ from themselves
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(float(value))
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M")
    return words.clean(str(value))


def _known(value: object) -> float | None:
    """Return the value as a float if it is a finite number, else None."""
    known = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if known else None  # type: ignore[arg-type]


def _share(value: object) -> str:
    share = _known(value)
    return cell(value) if share is None else f"{share * 100:.3g}{words.NBSP}%"


def _duration(value: object) -> str:
    seconds = _known(value)
    if seconds is None or seconds < 0:
        return cell(value)
    return words.duration(seconds) if seconds else "0"


def _hours_of_seconds(value: object) -> str:
    seconds = _known(value)
    return cell(value) if seconds is None else number(seconds / 3600)


def number(value: float) -> str:
    """Format a number with three significant figures.

    Whole numbers keep all digits, with thousands separators. Numbers far from 1 are written as
    powers of ten.
    """
    if not math.isfinite(value):
        return "∞" if value > 0 else "\N{MINUS SIGN}∞" if value < 0 else "unknown"
    if value == int(value) and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif abs(value) >= 100:
        text = f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"
    else:
        text = f"{value:.3g}"
    return text.replace("-", "\N{MINUS SIGN}")
