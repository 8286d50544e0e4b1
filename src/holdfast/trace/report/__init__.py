"""One page for a cluster: what was read, what was wrong with it, what holds, and every figure.

Enter a `Report`, which `holdfast.trace.run.characterize` makes; leaves a folder: `index.html`, which needs no network,
`findings.json`, and each figure's drawing and numbers. The stages, in order:

| module | one idea |
|---|---|
| `model` | what a report is made of |
| `answer` | the sentence on top and the key figures |
| `tables` | a table as the page shows it |
| `embedded` | a chart's values, compact, for the script that makes it explorable |
| `view` | everything the template shows |
| `page` | the template filled |
| `published` | the findings as published JSON |
| `folder` | a folder written whole or not at all |
| `write` | all of it: `write_report` |
"""

from holdfast.trace.report.model import Entry, Read, Report
from holdfast.trace.report.write import refuse_what_is_not_ours, write_report

__all__ = ["Entry", "Read", "Report", "refuse_what_is_not_ours", "write_report"]
