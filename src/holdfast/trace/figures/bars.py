"""Plan panels of horizontal bars, grouped or stacked, and panels of box plots."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from holdfast.trace import charts
from holdfast.trace.figures.look import HATCHES, Look
from holdfast.trace.figures.plan import Key, Plan
from holdfast.trace.figures.text import shown, width_pt
from holdfast.trace.figures.ticks import LABEL_LIMIT, AxisPlan, plan_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALLER_PT = 0.7
LABELLED_LIMIT = 60
"""The most bars in a panel for which each bar is labelled with its value."""


def plan_bars(panel: charts.Bars, look: Look, *, width_in: float) -> Plan:
    """Plan a panel of bars.

    The parts of a group are drawn side by side, or one after another in one bar if stacked.
    """
    values = {part: np.asarray(column, dtype=float) for part, column in panel.parts.items()}
    together = np.concatenate([np.empty(0), *values.values()])
    if panel.stacked and values:
        together = np.nansum(list(values.values()), axis=0)
    ends = np.concatenate(
        [together, *(np.asarray(high, dtype=float) for high in panel.high.values())]
    )
    rows = 1 if panel.stacked else max(len(values), 1)
    row_in = 0.22 if rows == 1 else 0.135 * rows + 0.09
    value = plan_axis(panel.value, ends, length_pt=width_in * 50, gap_pt=42, zero=True)
    labelled = not panel.stacked and together.size <= LABELLED_LIMIT
    y = AxisPlan(
        label="",
        scale="linear",
        low=max(len(panel.groups), 1) - 0.5,
        high=-0.5,
        ticks=[
            (float(index), shown(group, LABEL_LIMIT)) for index, group in enumerate(panel.groups)
        ],
        category=True,
    )
    keys = [
        Key(
            label=shown(part, 60),
            colour=look.part(part, number),
            kind="area",
            hatch=HATCHES[number % len(HATCHES)] if look.hatched else "",
        )
        for number, part in enumerate(values)
    ]
    return Plan(
        title=shown(panel.title),
        x=value,
        y=y,
        keys=keys if len(keys) > 1 else [],
        draw=partial(_draw, panel, values, keys, value, look, labelled),
        height_in=max(row_in * len(panel.groups), 0.5),
        grid="x",
        beside=_beside(panel, values, value, look) if labelled else (),
        framed=False,
    )


def _beside(
    panel: charts.Bars, values: dict[str, charts.Values], value: AxisPlan, look: Look
) -> list[tuple[float, float]]:
    """Return, for the label beside each bar, its start along x and its length in points."""
    found = []
    for part, column in values.items():
        ends = np.fmax(column, panel.high[part]) if part in panel.high else column
        for amount, end in zip(column, ends, strict=True):
            length_pt = (
                width_pt(_words(float(amount), value), look.text_pt - _SMALLER_PT, look.fonts) + 5
            )
            found.append((float(end) if np.isfinite(end) else value.low, length_pt))
    return found


def _words(amount: float, value: AxisPlan) -> str:
    return value.format(amount) if np.isfinite(amount) else "no data"


def _draw(
    panel: charts.Bars,
    values: dict[str, charts.Values],
    keys: list[Key],
    value: AxisPlan,
    look: Look,
    labelled: bool,
    axes: "Axes",
) -> dict[str, str]:
    titles = {}
    rows = 1 if panel.stacked else max(len(values), 1)
    thick = 0.66 if rows == 1 else 0.8 / rows
    start = np.zeros(len(panel.groups))
    for number, (part, column) in enumerate(values.items()):
        for group, amount in enumerate(column):
            at = float(group) if rows == 1 else group - 0.4 + (number + 0.5) * thick
            words = f"{shown(panel.groups[group])}{f', {shown(part)}' if len(values) > 1 else ''}: "
            words += _words(float(amount), value)
            begin = start[group] if panel.stacked else (value.low if value.scale == "log" else 0.0)
            end = start[group] + amount if panel.stacked else amount
            if np.isfinite(amount) and amount != 0 and (value.scale != "log" or end > value.low):
                bar = axes.barh(
                    at, end - begin, left=begin, height=thick * (0.92 if rows > 1 else 1), color=keys[number].colour,
                    hatch=keys[number].hatch, edgecolor=look.colours["paper"], linewidth=0.5, zorder=3,
                )  # fmt: skip
                gid = f"bar-{number}-{group}"
                bar.patches[0].set_gid(gid)
                titles[gid] = words
                start[group] = end
            edge = _interval(panel, part, group, at, axes, look, float(amount))
            if labelled:
                edge = max(edge, value.low, 0.0) if np.isfinite(edge) else max(value.low, 0.0)
                _label(_words(float(amount), value), edge, at, look, axes)
    return titles


def _interval(
    panel: charts.Bars, part: str, group: int, at: float, axes: "Axes", look: Look, amount: float
) -> float:
    """Draw the interval around a bar's value, if it has one.

    Returns:
        The right end of the bar together with its interval, in data coordinates.
    """
    if part not in panel.low or part not in panel.high:
        return amount
    low, high = float(panel.low[part][group]), float(panel.high[part][group])
    if not (np.isfinite(low) and np.isfinite(high)):
        return amount
    axes.hlines(at, low, high, color=look.colours["ink"], linewidth=0.9, zorder=4)
    return max(amount, high)


def _label(text: str, edge: float, at: float, look: Look, axes: "Axes") -> None:
    axes.annotate(
        text, (edge, at), xytext=(3, 0), textcoords="offset points", ha="left", va="center_baseline",
        fontsize=look.text_pt - _SMALLER_PT, color=look.colours["muted"], family=look.fonts, parse_math=False,
        annotation_clip=False, zorder=5,
    )  # fmt: skip


_NAMES = ("whisker", "first quartile", "median", "third quartile", "whisker")


def plan_boxes(panel: charts.Boxes, look: Look, *, width_in: float) -> Plan:
    """Plan a panel of box plots, with one row per group.

    A box spans the two quartiles, and a thick stroke marks the median.
    """
    five = np.asarray(panel.five, dtype=float).reshape(-1, 5)
    value = plan_axis(panel.value, five.ravel(), length_pt=width_in * 55, gap_pt=40)
    y = AxisPlan(
        label="",
        scale="linear",
        low=max(len(panel.groups), 1) - 0.5,
        high=-0.5,
        ticks=[
            (float(index), shown(group, LABEL_LIMIT)) for index, group in enumerate(panel.groups)
        ],
        category=True,
    )
    return Plan(
        title=shown(panel.title),
        x=value,
        y=y,
        keys=[],
        draw=partial(_draw_boxes, panel, five, value, look),
        height_in=max(0.25 * len(panel.groups), 0.5),
        grid="x",
    )


def _draw_boxes(
    panel: charts.Boxes, five: charts.Values, value: AxisPlan, look: Look, axes: "Axes"
) -> dict[str, str]:
    titles = {}
    for group, numbers in enumerate(five):
        if not np.isfinite(numbers).all():
            axes.annotate(
                "no data", (value.low, group), xytext=(3, 0), textcoords="offset points", va="center_baseline",
                fontsize=look.text_pt - 0.7, color=look.colours["muted"], family=look.fonts,
            )  # fmt: skip
            continue
        # Values at or below 0 stand at the edge of a logarithmic axis.
        low, q1, median, q3, high = (
            np.maximum(numbers, value.low) if value.scale == "log" else numbers
        )
        axes.hlines(
            [group, group],
            [low, q3],
            [q1, high],
            color=look.colours["muted"],
            linewidth=0.9,
            zorder=2,
        )
        box = axes.barh(
            group, q3 - q1, left=q1, height=0.56, color=look.series(0), alpha=0.55, linewidth=0, zorder=3
        )  # fmt: skip
        axes.vlines(
            median, group - 0.36, group + 0.36, color=look.colours["ink"], linewidth=1.8, zorder=4
        )
        gid = f"box-{group}"
        box.patches[0].set_gid(gid)
        title = ", ".join(
            f"{name} {value.format(float(number))}"
            for name, number in zip(_NAMES, numbers, strict=True)
        )
        titles[gid] = f"{shown(panel.groups[group])}: {title}"
    return titles
