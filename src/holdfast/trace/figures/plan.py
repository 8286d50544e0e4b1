"""Describe a panel before drawing: axes, legend keys, and the function that draws inside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from holdfast.trace.figures.look import Look
from holdfast.trace.figures.ticks import AxisPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_HEIGHT_IN = 2.05
"""Height of the axes in a panel of curves, in inches."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One entry of the legend."""

    label: str
    colour: str
    kind: Literal["line", "points", "area"] = "line"
    width_pt: float = 1.5
    dash: Any = "solid"
    marker: str = "o"
    hatch: str = ""
    opacity: float = 1.0


def empty(axes: "Axes", look: Look) -> None:
    """Write "no data" into the middle of the axes."""
    axes.text(
        0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", fontsize=look.text_pt,
        color=look.colours["muted"], family=list(look.fonts),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A panel that is ready to be laid out and drawn."""

    title: str
    x: AxisPlan
    y: AxisPlan
    keys: Sequence[Key]
    draw: Callable[["Axes"], dict[str, str]]
    """Draws inside the axes, and returns the titles to show on hover, by gid."""
    height_in: float = PLOT_HEIGHT_IN
    grid: str = "both"
    """The axes with grid lines, in matplotlib's words: `x`, `y`, `both`, or empty for none."""
    beside: Sequence[tuple[float, float]] = ()
    """For each label to the right of a bar: its start along x, and its length in points."""
    framed: bool = True
    """True if the horizontal axis is drawn as a line."""
