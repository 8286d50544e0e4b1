"""Profile one run: counters of its nodes, phases of its ranks.

`sources` measure the counters of a node; `sampler`, one process a node, writes them. `phases`
finds what a rank does by hooks in the rank. Both append to a `recording`, which reports read.
`deep` captures a few steps with PyTorch's own profiler on a trigger. `iterations` finds steps
where nothing is instrumented.
"""

from holdfast.profile.local import LocalSampler, new_folder, record
from holdfast.profile.metrics import METRICS, PHASES, Metric
from holdfast.profile.phases import ENV_NODE, end_step, start_from_environment, timed_data
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
    "ENV_NODE",
    "METRICS",
    "PHASES",
    "ClockReading",
    "IncidentMark",
    "LocalSampler",
    "MemoryUse",
    "Metric",
    "Recording",
    "RecordingWriter",
    "Series",
    "SeriesId",
    "Span",
    "end_step",
    "incidents_of",
    "new_folder",
    "record",
    "start_from_environment",
    "timed_data",
]
