"""Pack a chart's values for the script that adds hover and zoom to the chart.

A list of numbers is stored as differences between neighbours, in whole multiples of a unit. On a
logarithmic axis, these are differences of logarithms. A CDF of 300 steps then takes 1.5 kB. Values
are accurate to five significant figures, which is more than hover shows.
"""

import math
from typing import Any

import numpy as np

from holdfast.trace import charts
from holdfast.trace.figures.curves import dash_of
from holdfast.trace.figures.export import Drawn
from holdfast.trace.figures.heatmap import shade_ends
from holdfast.trace.figures.look import SERIES_COLOURS
from holdfast.trace.figures.text import shown

_LOG_UNIT = 1 / 20_000
"""Unit on a logarithmic axis, in decades; it is about 0.01 % of a value."""
_LINEAR_PARTS = 1e5
"""Number of units into which the range of values on a linear axis is divided, approximately."""


def embedded(panel: charts.Panel, drawn: Drawn) -> dict[str, Any] | None:
    """Return a panel's data for the script: the values of curves, or the cells of a heat map.

    Args:
        panel: the panel of the chart.
        drawn: the panel as drawn on the page.

    Returns:
        The data, or None if the script cannot make this kind of panel explorable.
    """
    if isinstance(panel, charts.Lines):
        return _curves(panel, drawn)
    if isinstance(panel, charts.Heatmap):
        return _map(panel, drawn)
    return None


def packed(values: charts.Values, *, log: bool) -> dict[str, Any]:
    """Pack numbers for the script.

    The result has `unit`, the flag `log` for logarithms, and `steps`, in which null is a missing
    number.
    """
    usable = np.isfinite(values) & ((values > 0) if log else True)
    scaled = np.full(len(values), np.nan)
    scaled[usable] = np.log10(values[usable]) if log else values[usable]
    unit = _LOG_UNIT
    if not log:
        most = float(np.max(np.abs(scaled[usable]), initial=0.0)) or 1.0
        span = float(np.ptp(scaled[usable])) if usable.any() else 0.0
        # The unit is no finer than the precision of the numbers.
        unit = 10.0 ** math.floor(
            math.log10(max((span or most) / _LINEAR_PARTS, most * 1e-15, 1e-300))
        )
    steps: list[int | None] = []
    before = 0
    for value, there in zip(scaled, usable, strict=True):
        whole = round(value / unit) if there else 0
        steps.append(whole - before if there else None)
        before = whole if there else before
    return {"unit": unit, "log": int(log), "steps": steps}


def _curves(panel: charts.Lines, drawn: Drawn) -> dict[str, Any] | None:
    series = []
    for number, each in enumerate(panel.series):
        ordered = _ordered(each)
        if ordered is None:
            return None
        x, y, low, high = ordered
        values = {
            "label": shown(each.label) or f"series {number + 1}",
            "style": each.style,
            "colour": number % SERIES_COLOURS + 1,
            "dash": dash_of(panel, number),
            "compared": int(each.role == "compared"),
            "whole": int(each.cumulative),
            "x": packed(x, log=panel.x.scale in ("log", "log2")),
            "y": packed(y, log=panel.y.scale in ("log", "log2")),
        }
        if low is not None and high is not None:
            values |= {"low": packed(low, log=False), "high": packed(high, log=False)}
        series.append(values)
    if not any(len(each.x) > 1 for each in panel.series):
        return None
    return {
        "kind": "lines",
        "x": _axis(panel.x, drawn.x_ends),
        "y": _axis(panel.y, drawn.y_ends),
        "series": series,
    }


def _ordered(
    series: charts.Series,
) -> tuple[charts.Values, charts.Values, charts.Values | None, charts.Values | None] | None:
    """Sort a series by x; where a step curve has several values at the same x, keep the last.

    Returns:
        x, y and the ends of the intervals. None if a series that is not a step curve has several
        values at the same x.
    """
    keep = np.flatnonzero(np.isfinite(np.asarray(series.x, dtype=float)))
    keep = keep[np.argsort(series.x[keep], kind="stable")]
    repeated = np.flatnonzero(np.diff(series.x[keep]) == 0)
    if len(repeated) and series.style != "step":
        return None
    keep = np.delete(keep, repeated)
    sides = [
        None if side is None else np.asarray(side, dtype=float)[keep]
        for side in (series.low, series.high)
    ]
    return (
        np.asarray(series.x, dtype=float)[keep],
        np.asarray(series.y, dtype=float)[keep],
        sides[0],
        sides[1],
    )


def _axis(axis: charts.Axis, ends: tuple[float, float]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "label": shown(axis.label),
        "scale": axis.scale,
        "low": ends[0],
        "high": ends[1],
    }
    return made | ({"ticks": [shown(tick, 60) for tick in axis.ticks]} if axis.ticks else {})


def _map(panel: charts.Heatmap, drawn: Drawn) -> dict[str, Any]:
    values = np.asarray(panel.values, dtype=float)
    rows, columns = values.shape
    low, high = shade_ends(values)
    return {
        "kind": "map",
        "box": [round(side, 4) for side in drawn.box],
        "columns": [shown(tick, 60) for tick in panel.x.ticks]
        or [str(number) for number in range(columns)],
        "rows": [shown(tick, 60) for tick in panel.y.ticks]
        or [str(number) for number in range(rows)],
        "x": shown(panel.x.label),
        "y": shown(panel.y.label),
        "unit": shown(panel.unit, 40),
        "values": packed(values.ravel(), log=False)
        if np.isfinite(low) and np.isfinite(high)
        else None,
    }
