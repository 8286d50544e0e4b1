"""Plan panels of curves and points over a common x axis."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.trace import charts
from holdfast.trace.figures.look import DASHES, MARKERS, Look
from holdfast.trace.figures.plan import PLOT_HEIGHT_IN, Key, Plan, empty
from holdfast.trace.figures.text import shown
from holdfast.trace.figures.ticks import AxisPlan, plan_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from holdfast.trace.charts import Values

DENSE = 200
"""A curve over time with more points than this is drawn thin and solid.

Dashes would blur such a jagged line.
"""
FEW_POINTS = 60
"""The most points for which each series gets its own marker shape; more are drawn as dots."""


def plan_curves(panel: charts.Lines, look: Look, *, width_in: float) -> Plan:
    """Plan a panel of curves, bands, error bars and points."""
    every = [np.empty(0), *(series.x for series in panel.series)]
    heights = [np.empty(0)]
    for series in panel.series:
        heights += [part for part in (series.y, series.low, series.high) if part is not None]
    x = plan_axis(panel.x, np.concatenate(every), length_pt=width_in * 62, gap_pt=38)
    y = plan_axis(panel.y, np.concatenate(heights), length_pt=PLOT_HEIGHT_IN * 72, gap_pt=26)
    if not y.category:  # Leave room for the full width of a curve along the edge.
        y = replace(
            y, high=y.high + 0.012 * (y.high - y.low) if y.scale == "linear" else y.high * 1.12
        )
    keys = [_key(panel, number, look) for number in range(len(panel.series))]
    return Plan(
        title=shown(panel.title),
        x=x,
        y=y,
        keys=[key for key in keys if key.label],
        draw=partial(_draw, panel, keys, x, y, look),
    )


def dash_of(panel: charts.Lines, number: int) -> int:
    """Return the index in `DASHES` of the dash pattern of a series."""
    if panel.series[number].style == "dashed":
        return 1
    return 0 if _dense(panel, number) else number % len(DASHES)


def _dense(panel: charts.Lines, number: int) -> bool:
    return panel.x.scale == "time" and len(panel.series[number].x) > DENSE


def _key(panel: charts.Lines, number: int, look: Look) -> Key:
    series = panel.series[number]
    thin = series.role == "compared" or _dense(panel, number)
    return Key(
        label=shown(series.label),
        colour=look.series(number),
        kind="points" if series.style == "points" else "line",
        width_pt=look.compared_pt if thin else look.line_pt,
        dash=DASHES[dash_of(panel, number)],
        marker=MARKERS[number % len(MARKERS)],
        opacity=0.85 if series.role == "compared" else 1.0,
    )


def _draw(
    panel: charts.Lines, keys: list[Key], x: AxisPlan, y: AxisPlan, look: Look, axes: "Axes"
) -> dict[str, str]:
    if not any(
        np.isfinite(series.x).any() and np.isfinite(series.y).any() for series in panel.series
    ):
        empty(axes, look)
    # Draw compared series first, so that they lie behind. Within the same role, draw the first
    # series last, so that it lies on top, as in the legend.
    for number in reversed(range(len(panel.series))):
        series, key = panel.series[number], keys[number]
        order = 2.5 if series.role == "compared" else 3.0
        if series.style == "points":
            _points(series, key, x, y, axes, order)
            continue
        across, up = vertices(series, x, y)
        if series.low is not None and series.high is not None:
            _, low = vertices(series, x, y, series.low)
            _, high = vertices(series, x, y, series.high)
            axes.fill_between(
                across, low, high, color=key.colour, alpha=0.18, linewidth=0, zorder=order - 1
            )
        alone = np.isfinite(up) & np.isnan(np.r_[np.nan, up[:-1]]) & np.isnan(np.r_[up[1:], np.nan])
        style: dict[str, Any] = {"color": key.colour, "alpha": key.opacity, "zorder": order}
        axes.plot(
            across, up, linewidth=key.width_pt, linestyle=key.dash, solid_joinstyle="round", **style
        )
        if alone.any():  # A point without neighbours is no line.
            axes.plot(
                across[alone],
                up[alone],
                linestyle="none",
                marker=key.marker,
                markersize=3.5,
                **style,
            )
    return {}


def vertices(
    series: charts.Series, x: AxisPlan, y: AxisPlan, values: "Values | None" = None
) -> tuple["Values", "Values"]:
    """Return the vertices of a curve, limited to values that these axes can show.

    On a logarithmic y axis, the curve has a gap where values are 0 or negative. On x, a step curve
    enters at the left edge with its height there, so the share of zeros is visible.
    """
    across = np.asarray(series.x, dtype=float)
    up = np.asarray(series.y if values is None else values, dtype=float)
    keep = np.isfinite(across)
    across, up = across[keep], up[keep]
    if series.style == "step" and len(across):
        entering = np.flatnonzero(across <= x.low)
        if len(entering):
            across, up = across[entering[-1] :].copy(), up[entering[-1] :]
            across[0] = x.low
        if values is None and series.cumulative:
            start = [] if len(entering) else [0.0]
            across, up = np.r_[across[: len(start)], across, x.high], np.r_[start, up, up[-1]]
        across, up = np.repeat(across, 2)[1:], np.repeat(up, 2)[:-1]
    elif x.scale == "log":
        across, up = across[across > 0], up[across > 0]
    if y.scale == "log":
        up = np.where(up > 0, up, np.nan)
    return across, np.where(np.isfinite(up), up, np.nan)


def _points(
    series: charts.Series, key: Key, x: AxisPlan, y: AxisPlan, axes: "Axes", order: float
) -> None:
    across, up = np.asarray(series.x, dtype=float), np.asarray(series.y, dtype=float)
    keep = np.isfinite(across) & np.isfinite(up)
    keep &= (across > 0) if x.scale == "log" else True
    keep &= (up > 0) if y.scale == "log" else True
    if series.low is not None and series.high is not None:
        bottom = np.maximum(series.low, y.low if y.scale == "log" else -np.inf)
        axes.vlines(
            across[keep],
            bottom[keep],
            series.high[keep],
            color=key.colour,
            linewidth=0.8,
            zorder=order,
        )
    across, up = across[keep], up[keep]
    if len(across) <= FEW_POINTS:
        axes.plot(
            across, up, linestyle="none", marker=key.marker, markersize=4, color=key.colour, markeredgewidth=0,
            zorder=order,
        )  # fmt: skip
        return
    _dots(across, up, key, x, axes, order)


def _dots(
    across: "Values", up: "Values", key: Key, x: AxisPlan, axes: "Axes", order: float
) -> None:
    """Draw dots as one path of short strokes with round ends.

    In an SVG, the path takes a tenth of the size of as many markers. The strokes have a length of a
    millionth of the axis, because a PNG omits strokes without length.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    end = across * (1 + 1e-6) if x.scale == "log" else across + 1e-6 * (x.high - x.low)
    corners = np.column_stack([across, up, end, up]).reshape(-1, 2)
    codes = np.tile(np.array([Path.MOVETO, Path.LINETO], dtype=Path.code_type), len(across))
    path = Path(corners, codes)
    path.should_simplify = False
    axes.add_patch(
        PathPatch(
            path,
            facecolor="none",
            edgecolor=key.colour,
            linewidth=2.2,
            capstyle="round",
            alpha=0.6,
            zorder=order,
            snap=False,
        )
    )
