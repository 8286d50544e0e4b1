"""Characterize a cluster's workload: read job records and telemetry, write one report.

The input is files of job records (`sources` has one adapter per format) and telemetry
(`telemetry`). The output is a page with every figure and its data (`report`). The modules, in the
order in which data flow through them:

| module | one idea |
|---|---|
| `sources` | convert each format of job records to one normalised table (`schema`) |
| `loading`, `store` | recognise, read and join files, assign job types; convert to Parquet once |
| `jobtypes`, `checks` | assign types by rules in a file; find contradictory rows, and drop or mend them |
| `telemetry` | reduce samples of GPUs and servers to exact value counts, hourly sums and a list of devices |
| `trace` | hold the tables of one or more clusters in a scratch database |
| `aggregates` | run the only queries that read whole tables; partial results merge |
| `spread` | divide the reading among many workers |
| `analyses` | compute a table, a chart (`charts`) and named numbers from a trace |
| `findings` | compare the study's headline findings with this trace |
| `run`, `figures`, `report` | run all analyses, draw their charts, write the report |
| `twin` | make a synthetic trace with the counts of a trace and none of its rows |

The study is Hu et al., *Characterization of Large Language Model Development in the Datacenter*,
NSDI 2024.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.trace.analyses.capacity import beyond_capacity
    from holdfast.trace.analyses.catalogue import Assumptions, catalogue
    from holdfast.trace.checks import NO_GPUS
    from holdfast.trace.loading import LoadOptions, by_cluster, load
    from holdfast.trace.notes import Note
    from holdfast.trace.report import overviews, require_report_folder, write_report
    from holdfast.trace.run import characterize
    from holdfast.trace.sources import adapters
    from holdfast.trace.spread import load_spread
    from holdfast.trace.store import convert
    from holdfast.trace.table import Table
    from holdfast.trace.trace import Trace

__all__ = [
    "NO_GPUS",
    "Assumptions",
    "LoadOptions",
    "Note",
    "Table",
    "Trace",
    "adapters",
    "beyond_capacity",
    "by_cluster",
    "catalogue",
    "characterize",
    "convert",
    "load",
    "load_spread",
    "overviews",
    "require_report_folder",
    "write_report",
]

_HOME = {
    "NO_GPUS": "checks",
    "Assumptions": "analyses.catalogue",
    "LoadOptions": "loading",
    "Note": "notes",
    "Table": "table",
    "Trace": "trace",
    "adapters": "sources",
    "beyond_capacity": "analyses.capacity",
    "by_cluster": "loading",
    "catalogue": "analyses.catalogue",
    "characterize": "run",
    "convert": "store",
    "load": "loading",
    "load_spread": "spread",
    "overviews": "report",
    "require_report_folder": "report",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Reading a trace then does not load the code for drawing or for synthetic traces.
    """
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
