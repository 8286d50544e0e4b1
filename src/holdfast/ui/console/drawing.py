"""Draw the loss curve and the time line as SVG without styles or scripts."""

import math
from collections.abc import Sequence
from typing import Any

from holdfast.core import words

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 920.0, 260.0, 62.0, 30.0, 16.0
ROW = 22.0
ROWS_LIMIT = 40


def loss_chart(
    lines: Sequence[dict[str, Any]], marks: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the loss curve in units of the drawing; None without a loss.

    Args:
        lines: the result of `Series.lines`.
        marks: `step`, `kind` and `label` of each mark: a spike, a rollback or a restart.

    Returns:
        `paths` (a path an attempt), `marks`, `ticks` of both axes, and the size.
    """
    highs = sorted(value for line in lines for value in line["high"])
    if not highs:
        return None
    low: float = min(value for line in lines for value in line["low"])
    high: float = highs[-1]
    first: int = min(line["steps"][0] for line in lines)
    last: int = max(line["steps"][-1] for line in lines)
    high, last = max(high, low + 1e-9), max(last, first + 1)

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - 12)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    paths = []
    for line in lines:
        points = []
        for step, least, most, end in zip(
            line["steps"], line["low"], line["high"], line["last"], strict=True
        ):
            points += [(step, most), (step, least), (step, end)] if most > least else [(step, end)]
        shape = "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in points)
        paths.append(
            {"attempt": line["attempt"], "d": f"M{shape}" + ("h.1" if len(points) == 1 else "")}
        )
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "paths": paths,
        "marks": [
            {**mark, "x": round(x(mark["step"]), 1)}
            for mark in marks
            if first <= mark["step"] <= last
        ],
        "x_ticks": [
            {"at": round(x(value), 1), "text": f"{value:,.0f}"} for value in _ticks(first, last, 6)
        ],
        "y_ticks": [
            {"at": round(y(value), 1), "text": f"{value:.4g}"} for value in _ticks(low, high, 4)
        ],
        "left": LEFT,
        "base": HEIGHT - BOTTOM,
        "top": TOP,
    }


def _ticks(low: float, high: float, count: int) -> list[float]:
    span = high - low
    unit = 10.0 ** math.floor(math.log10(span / count))
    step = next((unit * one for one in (1, 2, 5, 10) if span / (unit * one) <= count), unit * 10)
    first = math.ceil(low / step) * step
    return [first + at * step for at in range(count + 1) if first + at * step <= high + 1e-9]


def time_line(
    attempts: Sequence[Any], incidents: Sequence[dict[str, Any]], *, start_s: float, end_s: float
) -> dict[str, Any] | None:
    """Return attempts and incidents on one line of time; None before the first attempt.

    Args:
        attempts: the attempts of the run, from the ledger.
        incidents: `at_s`, `attempt`, `label` and `number` of each incident.
        start_s: the beginning of the time, Unix seconds.
        end_s: the end of the time, Unix seconds.
    """
    if not attempts:
        return None
    shown = attempts[-ROWS_LIMIT:]
    start_s = max(start_s, shown[0].started_at_s) if len(shown) < len(attempts) else start_s
    span = max(end_s - start_s, 1e-3)
    unit, unit_s = words.unit_of_time(span)

    def x(at_s: float) -> float:
        return LEFT + min(1.0, max(0.0, (at_s - start_s) / span)) * (WIDTH - LEFT - 12)

    rows = {attempt.number: at for at, attempt in enumerate(shown)}
    bars = []
    for attempt in shown:
        begin, end = x(attempt.started_at_s), x(attempt.ended_at_s or end_s)
        bars.append(
            {"number": attempt.number, "outcome": attempt.outcome, "x": round(begin, 1),
             "y": rows[attempt.number] * ROW + 4, "width": round(max(2.0, end - begin), 1)}
        )  # fmt: skip
    height = len(shown) * ROW + 30
    return {
        "width": WIDTH,
        "height": height,
        "left": LEFT,
        "base": height - 24,
        "bars": bars,
        "marks": [
            {**one, "x": round(x(one["at_s"]), 1), "y": rows[one["attempt"]] * ROW + 13}
            for one in incidents
            if one["attempt"] in rows
        ],
        "ticks": [
            {"at": round(x(start_s + value * unit_s), 1), "text": f"{value:g} {unit}"}
            for value in _ticks(0, span / unit_s, 6)
        ],
    }
