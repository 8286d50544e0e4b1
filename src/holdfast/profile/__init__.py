"""Profile one run: counters of its nodes, phases of its ranks.

`sources` measure the counters of a node; `sampler`, one process a node, writes them. `phases` finds
what a rank does by hooks in the rank. Both append to a `recording`, by `writing`; reports read it. `captures`
trace a few steps with PyTorch's own profiler on request. `iterations` finds steps where nothing is
instrumented. `usage` reduces the counters to one curve a metric. `report`, the second
face, adds up a recording; `formulas` has the theory and `synthetic` jobs that did not run.
"""

from typing import TYPE_CHECKING, Any

from holdfast.core.phases import ENV_NODE, own_node
from holdfast.profile.captures import (
    Captured,
    captured,
    outlier_rank,
    request_capture,
)
from holdfast.profile.incidents import IncidentMark, incidents_of
from holdfast.profile.iterations import from_lines, iterations_of, step_of, typical_s
from holdfast.profile.local import (
    LEAST_INTERVAL_S,
    LocalSampler,
    new_folder,
    record,
    sampler_command,
    sampler_limit,
)
from holdfast.profile.metrics import METRICS, PHASES, STEP_PHASE, Metric
from holdfast.profile.phases import (
    end_step,
    start_evaluation,
    start_from_environment,
    stop_phases,
    timed_data,
)
from holdfast.profile.recording import (
    ClockReading,
    MemoryUse,
    Recording,
    Series,
    SeriesId,
    Span,
)
from holdfast.profile.usage import UsageCurve, usage_curves
from holdfast.profile.writing import RecordingWriter

if TYPE_CHECKING:
    from holdfast.profile.sources.probe import gpu_memory, has_gpu

__all__ = [
    "ENV_NODE",
    "LEAST_INTERVAL_S",
    "METRICS",
    "PHASES",
    "STEP_PHASE",
    "Captured",
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
    "UsageCurve",
    "captured",
    "end_step",
    "from_lines",
    "gpu_memory",
    "has_gpu",
    "incidents_of",
    "iterations_of",
    "new_folder",
    "outlier_rank",
    "own_node",
    "record",
    "request_capture",
    "sampler_command",
    "sampler_limit",
    "start_evaluation",
    "start_from_environment",
    "step_of",
    "stop_phases",
    "timed_data",
    "typical_s",
    "usage_curves",
]


def __getattr__(name: str) -> Any:
    # Lazy: a rank that notes its phases opens no source of the GPUs.
    if name in ("gpu_memory", "has_gpu"):
        from holdfast.profile.sources import probe

        return getattr(probe, name)
    raise AttributeError(f"module 'holdfast.profile' has no attribute {name!r}")
