"""Read telemetry of GPUs and servers and reduce it to the aggregates that a trace's analyses read.

The input is wide CSV (AcmeTrace), long Parquet, a converted store, or a Prometheus server. The
output is exact value counts, hours and devices of every metric, Xid onsets, and notes of dropped,
mended and contradictory samples.

1. `metrics`: names, units, physical ranges, DCGM's values for "no value", names of GPUs and nodes.
2. `inputs`: find the telemetry in a path. 3. `wide_csv`, over `dictionary` and `values`: read a
wide file as blocks of numbers. 4. `scan`: read a file once in several threads into a `tally` and
Xid onsets; `checks`: make its notes; `summary`: make its tables. 5. `long`: read rows of one sample
each, by SQL over the same aggregates. 6. `store` and `convert`: write Parquet with its aggregates;
`prometheus`, over `prometheus_http`: fetch from a server. 7. `attach`: add telemetry to a trace.
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
