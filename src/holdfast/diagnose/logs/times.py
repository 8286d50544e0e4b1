"""Convert the time stamps of log lines to seconds.

If a time stamp has no year or no date, the missing part is taken from the time stamp before.
Seconds since boot are ignored, since they are no wall-clock time.
"""

import calendar
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import re2

from holdfast.diagnose.shapes import shape_of

_CLOCK: Final = r"\d{2}:\d{2}:\d{2}(?:[.,]\d+)?"
_ZONE: Final = r"(?: ?(?:Z\b|UTC|[+-]\d{2}:?\d{2}))?"
_DATED: Final = (
    rf"\d{{4}}[-/]\d{{2}}[-/]\d{{2}}[T _-]{_CLOCK}{_ZONE}"
    rf"|\d{{2}}/\d{{2}}/(?:\d{{4}}|\d{{2}})[ T]{_CLOCK}"
    rf"|(?:[A-Z][a-z]{{2}} )?[A-Z][a-z]{{2}} [ \d]\d {_CLOCK}(?: \d{{4}})?"
)
TIME_PATTERN: Final = rf"{_DATED}|{_CLOCK}|1[5-9]\d{{8}}\.\d{{1,9}}"
"""The RE2 patterns of time stamps at the beginning of lines, by form."""
_HEAD_CHARACTERS: Final = 64
"""The time stamp of a line must begin within this number of characters."""
_WINDOW_BYTES: Final = 4096
_STAMP_IN_BYTES: Final = re2.compile(
    rf"(?m)^[^\n]{{0,{_HEAD_CHARACTERS}}}?(?:\b({_DATED})|\[?[IWEF](\d{{3,4}} {_CLOCK}))".encode()
)
_GLOG: Final = re2.compile(rf"^\[?[IWEF](\d{{3,4}} {_CLOCK})")
_DAY_S: Final = 86_400.0
_YEAR_S: Final = 365.2425 * _DAY_S
_NO_YEAR: Final = 1972
"""The year that is assumed if the first time stamp of a log has none: a leap year, so that every
date exists.
"""
_MONTHS: Final = (
    "Jan",
    "Feb",
    "Mar",
    "Apr",
    "May",
    "Jun",
    "Jul",
    "Aug",
    "Sep",
    "Oct",
    "Nov",
    "Dec",
)
# The groups have no names, since the Python binding of RE2 looks up names in each match, which
# takes longer than the match itself.
_ISO = re2.compile(r"^(\d{4})[-/](\d{2})[-/](\d{2})[T _-]([\d:.,]+)(?: ?(Z|UTC|[+-]\d{2}:?\d{2}))?")
_US = re2.compile(r"^(\d{2})/(\d{2})(?:/(\d{4}|\d{2}))?[ T]([\d:.,]+)")
_NAMED = re2.compile(r"^(?:[A-Z][a-z]{2} )?([A-Z][a-z]{2}) ([ \d]\d) ([\d:.,]+)(?: (\d{4}))?")
_SHORT = re2.compile(r"^(\d{1,2})(\d{2}) ([\d:.,]+)")
_DAYLESS = re2.compile(rf"^{_CLOCK}$")
_EPOCH = re2.compile(r"^1[5-9]\d{8}(?:\.\d+)?$")
_LIKE_EPOCH = re2.compile(r"^\d{10}(?:\.\d+)?$")

_WAITED = re2.compile(
    r"(?i)(?:ran for|waited(?: for)?|timed? ?out(?: \(?ms\)?)?(?: after| of| for|=|:)?|timeout\(ms\)=)"
    r" ?(?P<number>\d+(?:\.\d+)?)"
    r" ?(?P<unit>ms|milliseconds|s|sec|secs|seconds|min|mins|minutes)?\b"
)
_UNITS_S: Final = {"ms": 1e-3, "milliseconds": 1e-3, "min": 60.0, "mins": 60.0, "minutes": 60.0}


@dataclass(frozen=True, slots=True)
class Stamp:
    """A time stamp of a line."""

    seconds: float
    """Seconds since 1970 in UTC or, if the time stamp names no time zone, in the log's own."""
    form: str
    """The form of the time stamp. Time stamps of the same form in one log come from the same clock.
    """


@functools.lru_cache(256)
def parse_time(text: str, before: float | None = None) -> Stamp | None:
    """Parse a time stamp; return None if `text` is no wall-clock time.

    Args:
        text: the text of the time stamp.
        before: the time of an earlier line in seconds, from which a missing year or date is taken.
    """
    form = _form_of(shape_of(text))
    if form is None or (found := _FORMS[form].search(text)) is None:
        return None
    try:
        return Stamp(_READERS[form](found, before), form)
    except (ValueError, OverflowError):
        return None


@functools.lru_cache(256)
def _form_of(shape: str) -> str | None:
    """Return the form of the times that have this shape; None if such texts are no times."""
    patterns = {**_FORMS, "epoch": _LIKE_EPOCH}
    return next((form for form, pattern in patterns.items() if pattern.search(shape)), None)


def time_of_line(stated: str | None, text: str, before: float | None = None) -> Stamp | None:
    """Return the time of a line.

    Args:
        stated: the time in the prefix of the line, if there is any.
        text: the text of the line, which may begin with the time stamp of a C++ library.
        before: the time of an earlier line in seconds.
    """
    if stated is not None and (found := parse_time(stated, before)) is not None:
        return found
    glog = _GLOG.search(text)
    return None if glog is None else parse_time(glog[1], before)


class BlockTimes:
    """Find the last time stamp before an offset in a block of lines.

    If the offsets are ascending, no byte is searched twice.
    """

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._end = 0
        self._searched = 0
        """All lines that begin before this offset were searched."""
        self._last: tuple[int, str] | None = None
        """The offset of the line with the last dated stamp, and the stamp."""

    def last(self, end: int, before: float | None = None) -> Stamp | None:
        """Return the last time stamp with a date, at the start of a line at most 4 KiB before `end`."""
        low = max(0, end - _WINDOW_BYTES)
        if end < self._end:
            self._searched, self._last = low, None
        self._end = end
        start = max(low, self._searched)
        for found in _STAMP_IN_BYTES.finditer(self._block, start, end):
            stated = (found[1] or found[2]).decode("ascii", "replace")
            self._last = found.start(), stated
        self._searched = max(self._searched, self._block.rfind(b"\n", start, end) + 1)
        if self._last is None or self._last[0] < low:
            return None
        return parse_time(self._last[1], before)


def waited_s(text: str) -> float | None:
    """Return the seconds of waiting that the line of a timeout states; None if it states none."""
    found = _WAITED.search(text)
    if found is None:
        return None
    unit = (found["unit"] or ("ms" if "(ms)" in found[0].lower() else "s")).lower()
    return float(found["number"]) * _UNITS_S.get(unit, 1.0)


def _clock_s(text: str) -> float:
    hours, minutes, seconds = text.replace(",", ".").split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


@functools.lru_cache(64)
def _date_s(year: int, month: int, day: int) -> float:
    if not 1 <= day <= calendar.monthrange(year, month)[1]:
        raise ValueError(day)
    return float(calendar.timegm((year, month, day, 0, 0, 0)))


def _iso(found: Any, _before: float | None) -> float:
    year, month, day, clock, zone = found.groups()
    zone_s = 0.0
    if zone and zone[0] in "+-":
        sign = -1 if zone[0] == "-" else 1
        zone_s = sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    return _date_s(int(year), int(month), int(day)) + _clock_s(clock) - zone_s


def _with_year(year: str | None, month: int, day: int, clock: str, before: float | None) -> float:
    if year is not None:
        return _date_s(int(year) + (2000 if len(year) == 2 else 0), month, day) + _clock_s(clock)
    if before is None:
        return _date_s(_NO_YEAR, month, day) + _clock_s(clock)
    around = 1970 + int(before // _YEAR_S)
    tries = (_date_s(one, month, day) + _clock_s(clock) for one in (around - 1, around, around + 1))
    return min(tries, key=lambda one: abs(one - before))


def _us(found: Any, before: float | None) -> float:
    month, day, year, clock = found.groups()
    return _with_year(year, int(month), int(day), clock, before)


def _named(found: Any, before: float | None) -> float:
    name, day, clock, year = found.groups()
    return _with_year(year, 1 + _MONTHS.index(name), int(day), clock, before)


def _short(found: Any, before: float | None) -> float:
    month, day, clock = found.groups()
    return _with_year(None, int(month), int(day), clock, before)


def _dayless(found: Any, before: float | None) -> float:
    clock_s = _clock_s(found[0])
    if before is None:
        return clock_s
    return clock_s + _DAY_S * round((before - clock_s) / _DAY_S)


def _epoch(found: Any, _before: float | None) -> float:
    return float(found[0])


_FORMS: Final[dict[str, Any]] = {
    "iso": _ISO,
    "us": _US,
    "named": _NAMED,
    "short": _SHORT,
    "dayless": _DAYLESS,
    "epoch": _EPOCH,
}
_READERS: Final[dict[str, Callable[[Any, float | None], float]]] = {
    "iso": _iso,
    "us": _us,
    "named": _named,
    "short": _short,
    "dayless": _dayless,
    "epoch": _epoch,
}
