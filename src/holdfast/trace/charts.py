"""Charts as data, independent of the way of drawing.

`holdfast.trace.figures` draws them with matplotlib (SVG, PDF, PNG), and the page reads the same
values for hover and zoom.
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
    """Quantity and unit, such as `GPU job duration (s)`."""
    scale: Literal["linear", "log", "log2", "symlog", "time", "category"] = "linear"
    """`time`: values are seconds since the Unix epoch, UTC.

    `category`: positions 0, 1 … of `ticks`.
    """
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
        """True for a whole empirical CDF: a step that rises to 1, or to 100 %.

        Outside the x of a whole CDF the share is known: 0 before the first x, all after the last.
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
    """Horizontal bars, grouped or stacked; each part has a colour."""

    title: str = ""
    value: Axis
    groups: Sequence[str]
    """Label of each bar (or group of bars), top to bottom."""
    parts: dict[str, Values]
    """Values of each part, one for each group."""
    stacked: bool = False
    low: dict[str, Values] = field(default_factory=dict)
    high: dict[str, Values] = field(default_factory=dict)
    """Optional intervals about the values."""


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
