"""Define the result of an analysis, and the analysis as an entry of the report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.trace.charts import Figure
from holdfast.trace.table import Table

if TYPE_CHECKING:
    import matplotlib.figure

    from holdfast.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Result:
    """Hold the result of an analysis: a table, a chart with a caption, and named numbers."""

    table: Table
    """The chart's data with one row per point, bar or box; written as CSV beside the figure."""
    chart: Figure | None
    """The chart, or None if the report shows the table instead."""
    caption: str
    """One to three sentences that are computed from the data, with counts, units and weights."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Named headline numbers for `findings`, such as `seren.gpu.median_duration_s`."""

    def figure(self) -> "matplotlib.figure.Figure":
        """Draw the chart with matplotlib; needs `holdfast[trace]`."""
        from holdfast.trace.figures import draw

        assert self.chart is not None, "this result is a table"
        return draw(self.chart)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Describe an analysis that the report runs."""

    name: str
    """Name of the analysis, used for its files and its anchor on the page: `gpu_job_duration`."""
    section: str
    """One of `analyses.SECTIONS`."""
    title: str
    run: Callable[["Trace"], Result]
    """Compute the result; raise LeftOut if the trace lacks an input."""
    source: str = ""
    """Figure or table of the study that corresponds, such as `Fig 2a`; empty if there is none."""
