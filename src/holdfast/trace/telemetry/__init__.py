"""TELEMETRY: what GPUs and servers measured of themselves, to aggregates that a trace's analyses read.

In: wide CSV (AcmeTrace), long Parquet, a store converted before, or a Prometheus. Out: exact value counts, hours and
devices of every metric, Xid onsets, and notes of what was dropped, mended or contradicts itself.

1. `metrics`: names, units, physical ranges, DCGM's words for no value, names of GPUs and nodes.
2. `inputs`: which telemetry a path holds.
3. `wide_csv`, over `dictionary` and `values`: a wide file as blocks of numbers.
4. `scan`: one pass by several threads into a `tally` and Xid onsets; `checks`: its notes; `summary`: its tables.
5. `long`: rows of one sample each, by SQL over the same aggregates.
6. `store` and `convert`: Parquet with its aggregates beside it; `prometheus`, over `prometheus_http`: from a server.
7. `attach`: into a trace.
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
