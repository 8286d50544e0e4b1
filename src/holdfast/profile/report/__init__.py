"""Report on one recording: a summary, an HTML page, a JSON object, a Perfetto trace.

The input is a recording and, if known, the shape of the job that was recorded. The modules, in the
order in which data flow through them:

| module | one idea |
|---|---|
| `summary` | compute speed, MFU, phases, idle valleys, memory beside theory, energy |
| `charts` | draw the charts |
| `view` | phrase the sentences and rows for the page, the terminal and the comparison of two runs |
| `write` | write the page and the JSON object |

This package is the second public face of `holdfast.profile`. It is separate because reports need
matplotlib and jinja2, which the sampler must not load.
"""

from holdfast.profile.job import Job
from holdfast.profile.perfetto import write_perfetto
from holdfast.profile.report.summary import ProfileSummary, summarize
from holdfast.profile.report.view import comparison, sentences
from holdfast.profile.report.write import as_json, write_report

__all__ = [
    "Job",
    "ProfileSummary",
    "as_json",
    "comparison",
    "sentences",
    "summarize",
    "write_perfetto",
    "write_report",
]
