"""Account for a run: the surviving steps, the seconds, the costs of the incidents, ETTR.

The account reads only the run's rows in the ledger and the run's journal of steps. So every figure
of a report can be traced to a row or a line. The result is a `RunSummary`. The stages, in order:

| module | one idea |
|---|---|
| `survival` | which executed steps are part of the final state, and which were rolled back |
| `wall_time` | each second of the run given to exactly one cause |
| `lost_time` | each second of each rank given to one cause, and to the incident that cost it |
| `costs` | the cost of each incident and of the checkpoints |
| `summary` | the summary of a run's records |
| `records` | the frozen dataclasses of the result |
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
from holdfast.core.accounting.summary import latest_steps, summarize

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
    "latest_steps",
    "summarize",
]
