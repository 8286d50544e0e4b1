"""Define charts as data, independent of how they are drawn.

`holdfast.trace.figures` draws the charts with matplotlib (SVG, PDF, PNG). The page uses the same
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
    """Describe an axis: label, unit, scale and limits."""

    label: str
    """Quantity and unit, such as `GPU job duration (s)`."""
    scale: Literal["linear", "log", "log2", "symlog", "time", "category"] = "linear"
    """Scale of the axis.

    For `time`, values are seconds since the Unix epoch, UTC. For `category`, values are the
    positions 0, 1, … of `ticks`.
    """
    low: float | None = None
    high: float | None = None
    ticks: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Series:
    """Hold one curve, or one set of points."""

    label: str
    x: Values
    y: Values
    low: Values | None = None
    """Lower end of an interval around y, for a band or error bars."""
    high: Values | None = None
    style: Literal["line", "step", "points", "dashed"] = "line"
    """`step` means that a value holds from its x to the next x, as in an empirical CDF."""
    role: Literal["main", "compared"] = "main"
    """`compared` is drawn thinner. It marks another trace, or a published curve."""

    @property
    def cumulative(self) -> bool:
        """Return True for a complete empirical CDF: a step that rises to 1, or to 100 %.

        The share of a complete CDF is also known outside its x values: 0 before the first x, and
        the whole after the last.
        """
        if self.style != "step" or not len(self.y) or not np.isfinite(self.y).all():
            return False
        rising = bool((np.diff(self.y) >= -1e-9).all()) and self.y[0] >= 0
        return rising and bool(np.isclose(self.y[-1], (1.0, 100.0), rtol=1e-6).any())


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Hold curves over a common x axis, or a scatter plot (`points`)."""

    title: str = ""
    x: Axis
    y: Axis
    series: Sequence[Series]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Hold horizontal bars, grouped or stacked; each part has its own colour."""

    title: str = ""
    value: Axis
    groups: Sequence[str]
    """Label of each bar, or of each group of bars, from top to bottom."""
    parts: dict[str, Values]
    """Values of each part, one for each group."""
    stacked: bool = False
    low: dict[str, Values] = field(default_factory=dict)
    high: dict[str, Values] = field(default_factory=dict)
    """Upper ends of optional intervals around the values."""


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Hold box plots, each given by five numbers.

    The whiskers end at the furthest value within 1.5 IQR of the box.
    """

    title: str = ""
    value: Axis
    groups: Sequence[str]
    five: Values
    """Shape (groups, 5): whisker, first quartile, median, third quartile, whisker."""


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """Hold a matrix that is drawn as colours; NaN is left blank."""

    title: str = ""
    x: Axis
    y: Axis
    values: Values
    """The matrix, of shape (rows, columns); row 0 is drawn on top."""
    unit: str


Panel = Lines | Bars | Boxes | Heatmap


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Arrange panels side by side, in rows of `columns`."""

    panels: Sequence[Panel]
    columns: int = 2
