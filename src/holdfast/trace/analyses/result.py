"""What an analysis answers with, and what it is to the report."""

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
    """A table and a figure, with the words that go with them."""

    table: Table
    """The figure's data, tidy: one row a point, a bar or a box; written as CSV beside it."""
    chart: Figure | None
    """None: the table itself is what is shown."""
    caption: str
    """What is to be seen, with n, units and weights; one to three sentences, computed from the data."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Named headline numbers, for the findings: `seren.gpu.median_duration_s`."""

    def figure(self) -> "matplotlib.figure.Figure":
        """The chart drawn by matplotlib; needs `holdfast[trace]`."""
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
    """Raises LeftOut where the trace has not what it needs."""
    source: str = ""
    """Where the study has it: `Fig 2a`; empty: what the study lacks."""
