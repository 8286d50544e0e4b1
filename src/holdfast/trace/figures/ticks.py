"""Plan an axis: limits and ticks, and numbers and durations as text."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from holdfast.trace import charts
from holdfast.trace.figures.text import shown

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS_OF_TIME = (
    (86400.0, "d"),
    (3600.0, "h"),
    (60.0, "min"),
    (1.0, "s"),
    (1e-3, "ms"),
    (1e-6, "µs"),
)
_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def duration(seconds: float) -> str:
    """Format a duration in its largest unit with three significant figures: `10 min`, `1.5 d`."""
    if seconds == 0 or not math.isfinite(seconds):
        return "0" if seconds == 0 else "\N{EN DASH}"
    size = abs(seconds)
    unit_s, unit = next(
        (pair for pair in _UNITS_OF_TIME if size >= pair[0] * 0.9995), _UNITS_OF_TIME[-1]
    )
    return f"{_plain(seconds / unit_s)} {unit}"


def number(value: float) -> str:
    """Format a number with three significant figures and a suffix k, M or G.

    Very large and very small numbers are formatted as powers of ten.
    """
    if not math.isfinite(value):
        return "\N{EN DASH}"
    size = abs(value)
    if size and not 1e-4 <= size < 1e12:
        exponent = math.floor(math.log10(size))
        digits = _plain(value / 10.0**exponent)
        power = f"10{str(exponent).translate(_SUPERSCRIPT)}"
        return power if digits == "1" else f"{digits}·{power}"
    if size < 9999.5:
        return f"{value:,.0f}".replace("-", "\N{MINUS SIGN}") if size >= 999.5 else _plain(value)
    unit, suffix = next(pair for pair in _SUFFIXES if size >= pair[0] * 0.9995)
    return _plain(value / unit) + suffix


def _plain(value: float) -> str:
    """Format a number with three significant figures, without exponent and trailing zeros."""
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:.{min(decimals, 12)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return ("0" if text in ("", "-0") else text).replace("-", "\N{MINUS SIGN}")


_SECONDS = re.compile(r"\s*\((?:s|seconds)\)")
_DURATIONS_LOG_S = (
    1.0,
    60.0,
    3600.0,
    86400.0,
    10.0,
    600.0,
    864e3,
    36e3,
    864e4,
    864e5,
    0.001,
    0.1,
    0.01,
    1e-4,
    1e-5,
)
"""Preferred ticks of a logarithmic axis of durations, in s, in order of preference."""
_DURATIONS_FINE_S = tuple(
    digit * unit_s
    for unit_s in (1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 60.0, 3600.0, 86400.0)
    for digit in (2, 5, 20, 30, 3)
)
"""Additional ticks, for an axis that spans less than two decades."""
_DURATIONS_LINEAR_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Tick distances of a linear axis of durations between a minute and a day, in s."""
LABEL_LIMIT = 34
"""The most characters of a category label; the table beside the figure has the full text."""


@dataclass(frozen=True, kw_only=True)
class AxisPlan:
    """The plan of an axis; positions are in data coordinates."""

    label: str
    scale: str
    """Name of the scale in matplotlib: `linear`, `log` or `symlog`."""
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    category: bool = False
    linear_within: float = 1.0
    """On a symlog axis, values closer to 0 than this are drawn on a linear scale."""
    format: Callable[[float], str] = number
    """Formats a value of this axis as text."""

    def place(self, value: float) -> float:
        """Return the position of a value along the axis, from 0 to 1."""
        low, at, high = (self._scaled(x) for x in (self.low, value, self.high))
        return (at - low) / (high - low)

    def _scaled(self, value: float) -> float:
        if self.scale == "log":
            return math.log10(max(value, 1e-300))
        if self.scale == "symlog":
            size = abs(value) / self.linear_within
            # In matplotlib's symlog, the linear part is longer than a decade by the factor base /
            # (base - 1).
            return math.copysign(size * 10 / 9 if size <= 1 else 10 / 9 + math.log10(size), value)
        return value


def plan_axis(
    axis: charts.Axis, data: charts.Values, *, length_pt: float, gap_pt: float, zero: bool = False
) -> AxisPlan:
    """Plan an axis for the given data.

    Args:
        axis: the axis of the chart.
        data: all values along the axis; non-finite values are ignored.
        length_pt: drawn length of the axis, in points.
        gap_pt: smallest distance between the middles of two tick labels, in points.
        zero: True if bars start at the axis. A linear axis then starts at 0, and a logarithmic axis
            well below the smallest value.
    """
    label, room = shown(axis.label), max(2, int(length_pt / gap_pt))
    if axis.scale == "category" or (axis.ticks and axis.scale == "linear"):
        return _category(axis, label)
    timed = bool(_SECONDS.search(label)) and axis.scale != "time"
    low, high, linear_within = _limits(axis, data[np.isfinite(data)], zero=zero)
    plan = AxisPlan(
        label=label,
        scale={"log": "log", "log2": "log", "symlog": "symlog"}.get(axis.scale, "linear"),
        low=low,
        high=high,
        ticks=(),
        linear_within=linear_within,
        format=duration if timed else number,
    )
    if timed and (plan.scale != "linear" or high > 120):
        plan = replace(plan, label=_SECONDS.sub("", label))
        at = (
            _linear_durations(plan, room)
            if plan.scale == "linear"
            else _spread(plan, _durations(plan), room)
        )
        return replace(plan, ticks=[(value, duration(value)) for value in at])
    if axis.scale == "time":
        return _time(plan, room)
    if axis.scale == "log2":
        return replace(plan, ticks=[(value, number(value)) for value in _powers(plan, 2.0, room)])
    if plan.scale == "linear":
        return replace(plan, ticks=_linear(low, high, room))
    return replace(plan, ticks=[(value, number(value)) for value in _decades(plan, room)])


def _category(axis: charts.Axis, label: str) -> AxisPlan:
    ticks = [(float(index), shown(text, LABEL_LIMIT)) for index, text in enumerate(axis.ticks)]
    return AxisPlan(
        label=label,
        scale="linear",
        low=-0.5,
        high=max(len(ticks), 1) - 0.5,
        ticks=ticks,
        category=True,
    )


def _limits(axis: charts.Axis, data: charts.Values, *, zero: bool) -> tuple[float, float, float]:
    """Return the lower end, the upper end, and the limit of symlog's linear part."""
    logarithmic = axis.scale in ("log", "log2")
    if logarithmic:
        data = data[data > 0]
    least, most = (
        (float(data.min()), float(data.max()))
        if len(data)
        else (1.0, 10.0)
        if logarithmic
        else (0.0, 1.0)
    )
    low = axis.low if axis.low is not None and (axis.low > 0 or not logarithmic) else None
    high = axis.high if axis.high is not None and (axis.high > 0 or not logarithmic) else None
    if logarithmic:
        pad = max((most / least) ** 0.03, 1.05) if most > least else 3.0
        # A bar begins at the axis, so the lower end leaves room to see the shortest bar.
        ends = (
            (low or max(least / (max(pad, 2.0) if zero else pad), 1e-300)),
            (high or min(most * pad, 1e300)),
        )
    else:
        pad = 0.03 * (most - least) or 0.5 * abs(most) or 0.5
        pad = 0.0 if axis.scale == "time" and most > least else pad
        begin = (
            0.0
            if least >= 0 and (zero or axis.scale == "symlog" or least < 0.4 * most)
            else least - pad
        )
        end = 0.0 if most <= 0 and zero and least < 0 else most + pad
        ends = (begin if low is None else low), (end if high is None else high)
    if not ends[0] < ends[1]:
        ends = (ends[0] / 3, ends[0] * 3) if logarithmic else (ends[0] - 0.5, ends[0] + 0.5)
    positive = np.abs(data[data != 0])
    within = (
        10.0 ** math.floor(math.log10(max(float(positive.min()), 1e-6))) if len(positive) else 1.0
    )
    return ends[0], ends[1], min(within, 1.0)


def _inside(plan: AxisPlan, values: Sequence[float]) -> list[float]:
    slack = 1e-9
    return [value for value in values if -slack <= plan.place(value) <= 1 + slack]


def _durations(plan: AxisPlan) -> list[float]:
    if plan.scale == "symlog":
        return _inside(plan, [0.0, *_DURATIONS_LOG_S, *(-value for value in _DURATIONS_LOG_S)])
    inside = _inside(plan, _DURATIONS_LOG_S)
    return inside if len(inside) >= 3 else [*inside, *_inside(plan, _DURATIONS_FINE_S)]


def _spread(plan: AxisPlan, welcome: Sequence[float], room: int) -> list[float]:
    """Select as many values as fit on the axis, trying them in order of preference.

    A value is selected if it is far enough from the values selected before; `room` is the number of
    ticks that fit.
    """
    taken: list[float] = []
    for value in welcome:
        at = plan.place(value)
        if all(abs(at - plan.place(other)) >= 0.94 / room for other in taken):
            taken.append(value)
    return sorted(taken)


def _powers(plan: AxisPlan, base: float, room: int) -> list[float]:
    if plan.low >= plan.high:
        return [plan.low]
    first, last = (
        math.ceil(math.log(plan.low, base) - 1e-9),
        math.floor(math.log(plan.high, base) + 1e-9),
    )
    every = max(1, math.ceil((last - first + 1) / room))
    return [
        base**exponent for exponent in range(first, last + 1) if exponent % every == 0 or every == 1
    ]


def _decades(plan: AxisPlan, room: int) -> list[float]:
    if plan.scale == "symlog":
        top = max(abs(plan.low), abs(plan.high))
        exponents = range(
            math.floor(math.log10(plan.linear_within)), math.floor(math.log10(max(top, 1e-9))) + 1
        )
        sides = [sign * 10.0**exponent for exponent in reversed(exponents) for sign in (1, -1)]
        return _spread(plan, _inside(plan, [0.0, *sides]), room)
    powers = _powers(plan, 10.0, room)
    if len(powers) >= 3:
        return powers
    exponents = range(math.floor(math.log10(plan.low)), math.ceil(math.log10(plan.high)) + 1)
    fine = [digit * 10.0**exponent for digit in (1, 2, 5, 3, 7) for exponent in exponents]
    inside = _inside(plan, fine)
    return (
        _spread(plan, inside, room)
        if len(inside) >= 2
        else [value for value, _ in _linear(plan.low, plan.high, 4)]
    )


def _linear(low: float, high: float, room: int) -> list[tuple[float, str]]:
    span = high - low
    if not math.isfinite(span):
        return [(low, number(low)), (high, number(high))]
    raw = span / room
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    values = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
    return [(value, _stepped(value, step, max(abs(low), abs(high)))) for value in values]


def _stepped(value: float, step: float, largest: float) -> str:
    """Format a tick of a linear axis; all ticks have the same unit and number of decimals."""
    if not 1e-4 <= largest < 1e12:
        return number(value)
    unit, suffix = next(
        (
            (unit, suffix)
            for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k"))
            if largest >= 10 * unit
        ),
        (1.0, ""),
    )
    decimals = next(
        (digits for digits in range(5) if math.isclose(step / unit, round(step / unit, digits))), 5
    )
    text = f"{value / unit:,.{decimals}f}".replace("-", "\N{MINUS SIGN}")
    return "0" if value == 0 else text + suffix


def _linear_durations(plan: AxisPlan, room: int) -> list[float]:
    raw = (plan.high - plan.low) / room
    if raw <= 60:
        return [value for value, _ in _linear(plan.low, plan.high, room)]
    step = next((float(step) for step in _DURATIONS_LINEAR_S if step >= raw), 0.0)
    if not step:
        return [value * 86400 for value, _ in _linear(plan.low / 86400, plan.high / 86400, room)]
    first = math.ceil(plan.low / step - 1e-9)
    return [index * step for index in range(first, math.floor(plan.high / step + 1e-9) + 1)]


def _time(plan: AxisPlan, room: int) -> AxisPlan:
    """Place ticks at round times in UTC; a label shows what changed since the previous tick."""
    moments, pattern = _moments(plan.low, plan.high, room)
    ticks = []
    for before, moment in zip([None, *moments], moments, strict=False):
        text = moment.strftime(pattern)
        if pattern == "%H:%M" and (before is None or before.date() != moment.date()):
            text = (
                f"{moment.day} {moment:%b}\n{text}"
                if before is None or moment.hour
                else f"{moment.day} {moment:%b}"
            )
        elif "%b" in pattern and (before is None or before.year != moment.year):
            text = f"{text}\n{moment.year}"
        ticks.append((moment.timestamp(), text.lstrip("0") if pattern == "%d %b" else text))
    return replace(plan, ticks=ticks, format=_moment)


def _moments(low: float, high: float, room: int) -> tuple[list[datetime], str]:
    span = high - low
    for step in (60, 300, 900, 1800, 3600, 7200, 10800, 21600, 43200):
        if span / step <= room:
            first = math.ceil(low / step)
            return [
                datetime.fromtimestamp(n * step, UTC)
                for n in range(first, math.floor(high / step) + 1)
            ], "%H:%M"
    begin = datetime.fromtimestamp(low, UTC)
    for days in (1, 2, 7, 14):
        if span / (86400 * days) <= room:
            first = math.ceil(low / 86400)
            if days >= 7:  # Weeks begin on Monday; day 0 of Unix time was a Thursday.
                first += (4 - first) % 7
            return [
                datetime.fromtimestamp(n * 86400, UTC)
                for n in range(first, int(high // 86400) + 1, days)
            ], "%d %b"
    for months in (1, 2, 3, 6, 12, 24, 60, 120):
        if span / (86400 * 30.44 * months) <= room:
            break
    number = begin.year * 12 + begin.month - 1
    found = []
    for month in range(number - number % months, number + 12 * 400, months):
        if not 0 < month // 12 < 9999:
            break
        moment = datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC)
        if moment.timestamp() > high:
            break
        if moment.timestamp() >= low:
            found.append(moment)
    return found, "%b" if months < 12 else "%Y"


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M")
