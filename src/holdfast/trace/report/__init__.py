"""Write one page for a cluster: the input, its faults, the findings, and every figure.

The input is a `Report`, which `holdfast.trace.run.characterize` makes. The output is a folder:
`index.html`, which needs no network, `findings.json`, and each figure's drawing and numbers. The
stages, in order:

| module | one idea |
|---|---|
| `model` | the parts of a report |
| `overview` | the operator's first screen: key figures, three things to do, losses, the trend |
| `tables` | a table of an analysis as text: headings in words, units |
| `embedded` | pack a chart's values for the script that makes the chart explorable |
| `view` | compute everything the template shows: answer, figures, sections, the study beside |
| `folder` | write a folder whole or not at all |
| `write` | fill the template, write the findings as JSON, and write the folder: `write_report` |
"""

from holdfast.trace.report.model import Entry, Read, Report
from holdfast.trace.report.overview import overviews
from holdfast.trace.report.write import refuse_what_is_not_ours, write_report

__all__ = ["Entry", "Read", "Report", "overviews", "refuse_what_is_not_ours", "write_report"]
