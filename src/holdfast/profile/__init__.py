"""Profile one run: counters of its nodes, and phases of its ranks.

The modules, in the order in which data flow through them:

- `sources` measure the hardware counters of a node. `sampler` runs as one process on each node and
  writes the counters to a file.
- `phases` times the phases of a training step (data, forward, backward, …) by hooks inside each
  rank.
- `writing` appends counters and phases to the files of a `recording`. Reports read these files.
- `captures` runs PyTorch's own profiler for a few steps, when a user requests a capture.
- `iterations` estimates the steps of a job without hooks, from its log or from its GPU utilisation.
- `usage` reduces the counters to one curve for each metric.
- `report` summarizes a recording. The package is the second public face of this room.
- `formulas` computes theoretical FLOPs and memory. `synthetic` writes example recordings of jobs
  that never ran.
"""

from typing import TYPE_CHECKING, Any

from holdfast.core.phases import ENV_NODE, own_node

if TYPE_CHECKING:
    from holdfast.profile.captures import (
        Captured,
        captured,
        outlier_rank,
        request_capture,
    )
    from holdfast.profile.incidents import IncidentMark, incidents_of
    from holdfast.profile.iterations import from_lines, iterations_of, step_of, typical_s
    from holdfast.profile.local import (
        MIN_INTERVAL_S,
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
    from holdfast.profile.sources.probe import gpu_memory, has_gpu
    from holdfast.profile.usage import UsageCurve, usage_curves
    from holdfast.profile.writing import RecordingWriter

__all__ = [
    "ENV_NODE",
    "METRICS",
    "MIN_INTERVAL_S",
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

_HOMES = {
    "Captured": "captures",
    "ClockReading": "recording",
    "IncidentMark": "incidents",
    "MIN_INTERVAL_S": "local",
    "LocalSampler": "local",
    "METRICS": "metrics",
    "MemoryUse": "recording",
    "Metric": "metrics",
    "PHASES": "metrics",
    "Recording": "recording",
    "RecordingWriter": "writing",
    "STEP_PHASE": "metrics",
    "Series": "recording",
    "SeriesId": "recording",
    "Span": "recording",
    "UsageCurve": "usage",
    "captured": "captures",
    "end_step": "phases",
    "from_lines": "iterations",
    "gpu_memory": "sources.probe",
    "has_gpu": "sources.probe",
    "incidents_of": "incidents",
    "iterations_of": "iterations",
    "new_folder": "local",
    "outlier_rank": "captures",
    "record": "local",
    "request_capture": "captures",
    "sampler_command": "local",
    "sampler_limit": "local",
    "start_evaluation": "phases",
    "start_from_environment": "phases",
    "step_of": "iterations",
    "stop_phases": "phases",
    "timed_data": "phases",
    "typical_s": "iterations",
    "usage_curves": "usage",
}


def __getattr__(name: str) -> Any:
    # Import on first use: the processes between a node and its ranks record nothing, and a rank
    # opens no source of GPU metrics.
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.profile' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.profile.{_HOMES[name]}"), name)
