"""Write one page for a cluster: the input, its problems, the findings, and every figure.

The input is a `Report`, which `holdfast.trace.run.characterize` makes. The output is a folder with
`index.html`, which needs no network, with `findings.json`, and with each figure's drawing and
numbers. The modules, in the order in which a report passes through them:

| module | one idea |
|---|---|
| `model` | define the parts of a report |
| `overview` | compute the operator's first screen: key figures, three things to do, losses, the trend |
| `tables` | format a table of an analysis as text, with headings in words and units |
| `embedded` | pack a chart's values for the script that makes the chart explorable |
| `view` | compute everything that the template shows |
| `folder` | write a folder atomically |
| `write` | fill the template, write the findings as JSON, and write the folder: `write_report` |
"""

from holdfast.trace.report.model import Entry, Read, Report
from holdfast.trace.report.overview import overviews
from holdfast.trace.report.write import require_report_folder, write_report

__all__ = ["Entry", "Read", "Report", "overviews", "require_report_folder", "write_report"]
