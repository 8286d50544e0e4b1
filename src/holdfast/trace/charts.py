"""Charts as data: what an analysis wants drawn, for every way of drawing it.

`holdfast.trace.figures` draws them with matplotlib (SVG, PDF, PNG) and the page reads the same values for hover and
zoom, so an analysis says only what is to be seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis with its unit."""

    label: str
    """`GPU job duration (s)`: what and unit."""
    scale: Literal["linear", "log", "log2", "symlog", "time", "category"] = "linear"
    """`time`: values are seconds since the Unix epoch, UTC. `category`: positions 0, 1 … of `ticks`."""
    low: float | None = None
    high: float | None = None
    ticks: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve or set of points."""

    label: str
    x: Values
    y: Values
    low: Values | None = None
    """Lower end of an interval about y, for a band or error bars."""
    high: Values | None = None
    style: Literal["line", "step", "points", "dashed"] = "line"
    """`step`: the value holds from its x to the next, as in an empirical CDF."""
    role: Literal["main", "compared"] = "main"
    """`compared` is drawn thinner: another trace, or a published curve."""

    @property
    def cumulative(self) -> bool:
        """Whether it is a whole empirical CDF: a step that rises to 1, or to 100 %.

        Only then is it known what holds outside its x: 0 before the first, all from the last on.
        """
        if self.style != "step" or not len(self.y) or not np.isfinite(self.y).all():
            return False
        rising = bool((np.diff(self.y) >= -1e-9).all()) and self.y[0] >= 0
        return rising and bool(np.isclose(self.y[-1], (1.0, 100.0), rtol=1e-6).any())


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Curves over a common x; also scatter (`points`)."""

    title: str = ""
    x: Axis
    y: Axis
    series: Sequence[Series]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal bars, grouped or stacked; a part is a colour."""

    title: str = ""
    value: Axis
    groups: Sequence[str]
    """Label of each bar (or group of bars), top to bottom."""
    parts: dict[str, Values]
    """Part and its value in each group."""
    stacked: bool = False
    low: dict[str, Values] = field(default_factory=dict)
    high: dict[str, Values] = field(default_factory=dict)
    """Intervals about the values, where there are any."""


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Box plots from five numbers each; whiskers at the furthest datum within 1.5 IQR of the box."""

    title: str = ""
    value: Axis
    groups: Sequence[str]
    five: Values
    """Shape (groups, 5): whisker, first quartile, median, third quartile, whisker."""


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """A matrix as colours; NaN is left blank."""

    title: str = ""
    x: Axis
    y: Axis
    values: Values
    """Shape (rows, columns); row 0 on top."""
    unit: str


Panel = Lines | Bars | Boxes | Heatmap


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Panels side by side, in rows of `columns`."""

    panels: Sequence[Panel]
    columns: int = 2
