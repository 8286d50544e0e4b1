"""WHERE TIME GOES: from job records and telemetry of any cluster to one report.

Enter files of job records (`sources`, an adapter a form) and telemetry (`telemetry`); leaves a page with every figure
and its data (`report`). The stages, in order:

| module | one idea |
|---|---|
| `sources` | each form of job records into one normalised table (`schema`) |
| `loading`, `store` | recognise, read, join, tell types; convert to Parquet once |
| `jobtypes`, `checks` | types told by rules that are data; contradictions found, dropped, mended |
| `telemetry` | what GPUs and servers measured, as exact value counts, hours and devices |
| `trace` | the tables of one or more clusters in a scratch database |
| `aggregates` | the only queries that read whole tables; partial results merge |
| `spread` | the same reading by many workers |
| `analyses` | pure functions from a trace to a table, a chart as data (`charts`) and its numbers |
| `findings` | the study's headlines, asked of this trace |
| `run`, `figures`, `report` | all of it drawn and written |
| `twin` | a synthetic trace that has a trace's counts and none of its rows |

The study is Hu et al., *Characterization of Large Language Model Development in the Datacenter*, NSDI 2024.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.trace.analyses.capacity import beyond_capacity
    from holdfast.trace.analyses.catalogue import Assumptions, catalogue
    from holdfast.trace.checks import NO_GPUS
    from holdfast.trace.loading import LoadOptions, by_cluster, load
    from holdfast.trace.notes import Note
    from holdfast.trace.report import refuse_what_is_not_ours, write_report
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
    "refuse_what_is_not_ours",
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
    "refuse_what_is_not_ours": "report",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    """Imported when first used: reading a trace needs no drawing, and the twin neither."""
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
