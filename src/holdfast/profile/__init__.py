"""Profile one run: counters of its nodes, phases of its ranks.

`sources` measure the counters of a node; `sampler`, one process a node, writes them. `phases`
finds what a rank does by hooks in the rank. Both append to a `recording`, which reports read.
`deep` captures a few steps with PyTorch's own profiler on a trigger. `iterations` finds steps
where nothing is instrumented.
"""

from holdfast.profile.metrics import METRICS, PHASES, Metric
from holdfast.profile.recording import (
    ClockReading,
    IncidentMark,
    MemoryUse,
    Recording,
    RecordingWriter,
    Series,
    SeriesId,
    Span,
    incidents_of,
)

__all__ = [
    "METRICS",
    "PHASES",
    "ClockReading",
    "IncidentMark",
    "MemoryUse",
    "Metric",
    "Recording",
    "RecordingWriter",
    "Series",
    "SeriesId",
    "Span",
    "incidents_of",
]
