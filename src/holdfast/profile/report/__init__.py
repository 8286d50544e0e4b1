"""Report on one recording: a summary, a page, an object for programs, a Perfetto trace.

The input is a recording and, if known, the job that was recorded. The stages, in order:

| module | one idea |
|---|---|
| `summary` | speed, MFU, phases, idle valleys, memory beside theory, energy, gaps |
| `charts` | the drawings |
| `view` | the sentences and the rows of the page, of the terminal and of two runs side by side |
| `write` | the page and the object |

This package is the second face of `holdfast.profile`: reports need matplotlib and jinja2, which
the sampler does not load.
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
