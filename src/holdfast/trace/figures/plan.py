"""What every panel comes to before a stroke is drawn: axes, keys, and who draws inside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from holdfast.trace.figures.look import Look
from holdfast.trace.figures.ticks import AxisPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_HEIGHT_IN = 2.05
"""Height inside the axes of curves."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """An entry of the legend."""

    label: str
    colour: str
    kind: Literal["line", "points", "area"] = "line"
    width_pt: float = 1.5
    dash: Any = "solid"
    marker: str = "o"
    hatch: str = ""
    opacity: float = 1.0


def empty(axes: "Axes", look: Look) -> None:
    """Say in the middle of the axes that there is nothing to draw."""
    axes.text(
        0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", fontsize=look.text_pt,
        color=look.colours["muted"], family=list(look.fonts),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A panel, ready to be laid out."""

    title: str
    x: AxisPlan
    y: AxisPlan
    keys: Sequence[Key]
    draw: Callable[["Axes"], dict[str, str]]
    """Draws inside the axes; answers with the titles that a reader sees on hover, by the artist's gid."""
    height_in: float = PLOT_HEIGHT_IN
    grid: str = "both"
    """matplotlib's: along which axes lines are drawn."""
    beside: Sequence[tuple[float, float]] = ()
    """Texts right of something inside the axes: where along x they begin, and how many points they are long."""
    framed: bool = True
    """Whether the horizontal axis is a line."""
