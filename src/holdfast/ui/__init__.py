"""Show runs on an HTML page that works offline, and live in the console.

The page is made from `RunSummary` objects of `holdfast.core.accounting`. The stages, in order:

| module | one idea |
|---|---|
| `headline` | the answer in one sentence, and the key figures |
| `cards` | an incident's card |
| `view` | every other section's words, computed from the summary |
| `charts` | the loss curve and the timeline, and their colours |
| `metric_charts` | small charts of the speed and the reported metrics |
| `cited` | the log and the traceback of a cited line |
| `run_report` | the template filled and written, whole or not at all |
| `period` | all runs of a period, such as a week |
| `period_report` | the period in Markdown or as a page |
| `trackers` | a run's curves, written into TensorBoard, W&B or trackio |
| `console` | live pages over the ledger, with actions that the command line passes in |
"""

from holdfast.ui.console.backend import ActionName, Backend, ClusterReport, Order
from holdfast.ui.console.now_page import now_page
from holdfast.ui.console.serving import Address, serve
from holdfast.ui.period import Period, period_of
from holdfast.ui.period_report import period_html, period_markdown
from holdfast.ui.run_report import write_report
from holdfast.ui.trackers import Tracker, curves_of, export

__all__ = [
    "ActionName",
    "Address",
    "Backend",
    "ClusterReport",
    "Order",
    "Period",
    "Tracker",
    "curves_of",
    "export",
    "now_page",
    "period_html",
    "period_markdown",
    "period_of",
    "serve",
    "write_report",
]
