"""Read telemetry of GPUs and servers, and reduce it to the aggregates that a trace's analyses read.

The input is wide CSV (AcmeTrace), long Parquet, the output of tools, a converted store, or a
Prometheus server. The output is exact value counts, hourly sums, totals of each device, the onsets
of Xid errors, and notes about dropped, mended and contradictory samples. The modules, in the order
in which data flow through them:

| module | one idea |
|---|---|
| `metrics` | define names, units, physical ranges, DCGM's values for "no value", names of GPUs and nodes |
| `inputs` | find the telemetry in a path |
| `wide_csv`, with `dictionary`, `values` | read a wide file as blocks of numbers |
| `scan` | read a wide file once, in several threads, into a `tally` and Xid onsets |
| `checks`, `summary` | make the notes and the tables of a scan |
| `long`, `recorded` | read files with one row per sample, by SQL over the same aggregates |
| `store`, `convert` | write Parquet with its aggregates |
| `prometheus`, with `prometheus_http` | fetch telemetry from a server |
| `attach` | add telemetry to a trace |
"""

from holdfast.trace.telemetry.attach import attach, value_counts
from holdfast.trace.telemetry.convert import convert
from holdfast.trace.telemetry.metrics import METRICS
from holdfast.trace.telemetry.prometheus import Span, fetch
from holdfast.trace.telemetry.prometheus_http import Credentials, Prometheus

__all__ = [
    "METRICS",
    "Credentials",
    "Prometheus",
    "Span",
    "attach",
    "convert",
    "fetch",
    "value_counts",
]
