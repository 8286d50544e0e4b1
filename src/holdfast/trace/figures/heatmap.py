"""Plan a panel that shows a matrix as shades of one colour."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from holdfast.trace import charts
from holdfast.trace.figures import ticks
from holdfast.trace.figures.look import Look
from holdfast.trace.figures.plan import Key, Plan, empty
from holdfast.trace.figures.text import shown
from holdfast.trace.figures.ticks import LABEL_LIMIT, AxisPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHADES = 12
"""Number of opacities. One colour at different opacities suits light, dark and grey print."""
FAINTEST = 0.12
"""Opacity of the smallest value; missing values are blank."""
CELLS_APART = 400
"""The most cells for which a gap is drawn around each cell."""


def plan_heatmap(panel: charts.Heatmap, look: Look, *, width_in: float) -> Plan:
    """Plan a heat map: cells in `SHADES` shades, with row 0 on top and NaN left blank."""
    values = np.asarray(panel.values, dtype=float)
    rows, columns = values.shape
    low, high = shade_ends(values)
    colour = look.series(0)
    marks = (
        [low + share * (high - low) for share in (0, 0.25, 0.5, 0.75, 1)]
        if np.isfinite(low)
        else []
    )
    keys = [
        Key(
            label=ticks.number(mark),
            colour=colour,
            kind="area",
            opacity=_opacity(mark, low, high),
        )
        for mark in (marks if high > low else marks[:1])
    ]
    if keys and panel.unit:
        keys[-1] = Key(
            label=f"{keys[-1].label} {shown(panel.unit, 40)}",
            colour=colour,
            kind="area",
            opacity=keys[-1].opacity,
        )
    across = _positions(panel.x, columns, width_in * 58)
    down = _positions(panel.y, rows, max(rows * 13.0, 120.0), gap_pt=11)
    return Plan(
        title=shown(panel.title),
        x=across,
        y=AxisPlan(
            label=down.label,
            scale="linear",
            low=down.high,
            high=down.low,
            ticks=down.ticks,
            category=down.category,
        ),
        keys=keys,
        draw=partial(_draw, values, low, high, look),
        height_in=min(max(rows * 0.18, 0.5), 3.2),
        grid="",
        framed=False,
    )


def shade_ends(values: charts.Values) -> tuple[float, float]:
    """Return the values that get the faintest and the strongest shade; NaN if there are no values.

    The faintest shade is 0, unless all values are far from 0.
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return float("nan"), float("nan")
    low, high = float(finite.min()), float(finite.max())
    return (0.0 if 0 <= low < 0.6 * high else low), high


def _opacity(value: float, low: float, high: float) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    return FAINTEST + (1 - FAINTEST) * round(share * (SHADES - 1)) / (SHADES - 1)


def _positions(
    axis: charts.Axis, number: int, length_pt: float, *, gap_pt: float = 0.0
) -> AxisPlan:
    """Plan an axis of cells; the middle of cell k is at position k."""
    labels = [shown(text, LABEL_LIMIT) for text in axis.ticks] or [
        str(index) for index in range(number)
    ]
    longest = max(map(len, labels), default=1)
    gap_pt = gap_pt or (longest * 5.6 + 4 if longest <= 6 else 12)
    every = max(1, int(np.ceil(number * gap_pt / length_pt)))
    ticks = [
        (float(index), label) for index, label in enumerate(labels[:number]) if index % every == 0
    ]
    return AxisPlan(
        label=shown(axis.label),
        scale="linear",
        low=-0.5,
        high=max(number, 1) - 0.5,
        ticks=ticks,
        category=True,
    )


def _draw(
    values: charts.Values, low: float, high: float, look: Look, axes: "Axes"
) -> dict[str, str]:
    """Draw one path for each shade, which covers all cells of that shade.

    In a large map, neighbouring cells of a row with the same shade form one rectangle.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    shades = np.full(values.shape, -1)
    finite = np.isfinite(values)
    if not finite.any():
        empty(axes, look)
    span = high - low if high > low else 1.0
    apart = values.size <= CELLS_APART
    shades[finite] = np.rint((values[finite] - low) / span * (SHADES - 1)).astype(int)
    gap = 0.03 if apart else 0.0
    runs: dict[int, list[tuple[float, float, float]]] = {}
    for row, line in enumerate(shades):
        starts = (
            np.arange(len(line))
            if apart
            else np.flatnonzero(np.r_[True, line[1:] != line[:-1]][: len(line)])
        )
        for start, end in zip(starts, np.r_[starts[1:], len(line)], strict=True):
            runs.setdefault(int(line[start]), []).append(
                (row - 0.5 + gap, start - 0.5 + gap, end - 0.5 - gap)
            )
    for shade, spans in runs.items():
        if shade < 0:
            continue
        corners = [
            corner
            for top, left, right in spans
            for corner in (
                (left, top), (right, top), (right, top + 1 - 2 * gap), (left, top + 1 - 2 * gap), (left, top),
            )
        ]  # fmt: skip
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(spans)
        opacity = _opacity(low + shade * span / (SHADES - 1), low, high) if high > low else 0.5
        axes.add_patch(
            PathPatch(
                Path(corners, codes), facecolor=look.series(0), alpha=opacity, linewidth=0, zorder=2
            )
        )
    return {}
