"""Box plots from five numbers each."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from holdfast.trace import charts
from holdfast.trace.figures.look import Look
from holdfast.trace.figures.plan import Plan
from holdfast.trace.figures.text import shown
from holdfast.trace.figures.ticks import LABEL_LIMIT, AxisPlan, plan_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = ("whisker", "first quartile", "median", "third quartile", "whisker")


def plan_boxes(panel: charts.Boxes, look: Look, *, width_in: float) -> Plan:
    """The plan of box plots: one row a group, its box from quartile to quartile, its median a thick stroke."""
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
        draw=partial(_draw, panel, five, value, look),
        height_in=max(0.25 * len(panel.groups), 0.5),
        grid="x",
    )


def _draw(
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
        # What is at or below 0 stands at the edge of a logarithmic axis.
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
        said = ", ".join(
            f"{name} {value.format(float(number))}"
            for name, number in zip(_NAMES, numbers, strict=True)
        )
        titles[gid] = f"{shown(panel.groups[group])}: {said}"
    return titles
