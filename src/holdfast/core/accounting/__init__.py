"""What a run's records add up to: the steps that survive, the seconds, the incidents' costs, ETTR.

Enters a run of the ledger with its journal of steps, leaves a `RunSummary`; nothing else is looked at, so
that every figure of a report can be traced to a row or a line. The stages, in order:

| module | one idea |
|---|---|
| `survival` | which executed steps are part of the final state, and which were rolled back |
| `wall_time` | each second of the run given to exactly one cause |
| `lost_time` | each second of each rank given to one cause, and to the incident that cost it |
| `costs` | what each incident and the checkpoints cost |
| `summary` | the two readings of a run's records, put together |
| `records` | the frozen dataclasses that leave |
"""

from holdfast.core.accounting.records import (
    LOST_CAUSES,
    AttemptCheckpoints,
    CheckpointSummary,
    IncidentSummary,
    LossCurve,
    LostCause,
    LostSegment,
    LostTime,
    PassedOver,
    Phase,
    Point,
    RankTime,
    RunSummary,
    TimeBreakdown,
    gpu_hours,
)
from holdfast.core.accounting.summary import summarize

__all__ = [
    "LOST_CAUSES",
    "AttemptCheckpoints",
    "CheckpointSummary",
    "IncidentSummary",
    "LossCurve",
    "LostCause",
    "LostSegment",
    "LostTime",
    "PassedOver",
    "Phase",
    "Point",
    "RankTime",
    "RunSummary",
    "TimeBreakdown",
    "gpu_hours",
    "summarize",
]
