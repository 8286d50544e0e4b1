"""One page for a cluster: what was read, what was wrong with it, what holds, and every figure.

Enter a `Report`, which `holdfast.trace.run.characterize` makes; leaves a folder: `index.html`, which needs no network,
`findings.json`, and each figure's drawing and numbers. The stages, in order:

| module | one idea |
|---|---|
| `model` | what a report is made of |
| `embedded` | a chart's values, compact, for the script that makes it explorable |
| `view` | everything the template shows: the answer on top, key figures, sections, tables |
| `folder` | a folder written whole or not at all |
| `write` | the template filled, the findings as JSON, and all of it in a folder: `write_report` |
"""

from holdfast.trace.report.model import Entry, Read, Report
from holdfast.trace.report.write import refuse_what_is_not_ours, write_report

__all__ = ["Entry", "Read", "Report", "refuse_what_is_not_ours", "write_report"]
