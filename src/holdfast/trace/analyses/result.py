"""The result of an analysis, and the analysis as an entry of the report."""

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
    """A table and a chart with a caption and named numbers."""

    table: Table
    """The chart's data, tidy: one row per point, bar or box; written as CSV beside the figure."""
    chart: Figure | None
    """The chart; None: the report shows the table."""
    caption: str
    """One to three sentences computed from the data, with n, units and weights."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Named headline numbers, for the findings: `seren.gpu.median_duration_s`."""

    def figure(self) -> "matplotlib.figure.Figure":
        """Draw the chart with matplotlib; needs `holdfast[trace]`."""
        from holdfast.trace.figures import draw

        assert self.chart is not None, "this result is a table"
        return draw(self.chart)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """An analysis as the report runs it."""

    name: str
    """File stem and anchor: `gpu_job_duration`."""
    section: str
    """One of `analyses.SECTIONS`."""
    title: str
    run: Callable[["Trace"], Result]
    """The analysis; raises LeftOut if the trace lacks an input."""
    source: str = ""
    """Place in the study, such as `Fig 2a`; empty if the study has no such figure."""
