"""What to run where and when: a pure function, the same live, emulated and simulated.

What enters is an event, what leaves are actions; `priors` learns on the way, and returns what it learned at the end.

| module | one idea |
|---|---|
| `events` | the events that enter and the actions that leave |
| `decisions` | the function: `decide` |
| `state` | its state |
| `feed` | dealing requests out: which, to which engine, how many ahead |
| `longest_first` | the queue |
| `target` | when all could be done, and how large batches may be for it |
| `tail` | when nothing is left to deal out: stealing, doubling, the next model |
| `priors` | what a sample will cost |
| `bound` | what no schedule can go below |
| `account` | where each engine-second went |
| `outlook` | what is left and what is predicted, for a display |

What `simulate` runs under a virtual clock is imported from here, with the timeline that a run is recorded in.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.evaluate.policy.bound import (
        Bound,
        Quota,
        RunWork,
        SampleWork,
        Transfer,
        lower_bound,
    )
    from holdfast.evaluate.policy.decisions import decide
    from holdfast.evaluate.policy.events import (
        Action,
        Answered,
        Ask,
        EngineReady,
        Event,
        Measure,
        Measured,
        ModelReady,
        NodeJoined,
        Recall,
        Recalled,
        RequestSpec,
        SamplesAdded,
        SampleSpec,
        Swap,
        Tick,
    )
    from holdfast.evaluate.policy.priors import Priors, TaskHistory
    from holdfast.evaluate.policy.state import PolicyConfig, State
    from holdfast.evaluate.types.engine import Curve
    from holdfast.evaluate.types.timeline import (
        Begin,
        End,
        EngineSpan,
        Line,
        MetricSpan,
        RequestSpan,
        Timeline,
        timeline_of,
    )

__all__ = [
    "Action",
    "Answered",
    "Ask",
    "Begin",
    "Bound",
    "Curve",
    "End",
    "EngineReady",
    "EngineSpan",
    "Event",
    "Line",
    "Measure",
    "Measured",
    "MetricSpan",
    "ModelReady",
    "NodeJoined",
    "PolicyConfig",
    "Priors",
    "Quota",
    "Recall",
    "Recalled",
    "RequestSpan",
    "RequestSpec",
    "RunWork",
    "SampleSpec",
    "SampleWork",
    "SamplesAdded",
    "State",
    "Swap",
    "TaskHistory",
    "Tick",
    "Timeline",
    "Transfer",
    "decide",
    "lower_bound",
    "timeline_of",
]

_HOMES = {
    "Action": "policy.events",
    "Answered": "policy.events",
    "Ask": "policy.events",
    "Begin": "types.timeline",
    "Bound": "policy.bound",
    "Curve": "types.engine",
    "End": "types.timeline",
    "EngineReady": "policy.events",
    "EngineSpan": "types.timeline",
    "Event": "policy.events",
    "Line": "types.timeline",
    "Measure": "policy.events",
    "Measured": "policy.events",
    "MetricSpan": "types.timeline",
    "ModelReady": "policy.events",
    "NodeJoined": "policy.events",
    "PolicyConfig": "policy.state",
    "Priors": "policy.priors",
    "Quota": "policy.bound",
    "Recall": "policy.events",
    "Recalled": "policy.events",
    "RequestSpan": "types.timeline",
    "RequestSpec": "policy.events",
    "RunWork": "policy.bound",
    "SampleSpec": "policy.events",
    "SampleWork": "policy.bound",
    "SamplesAdded": "policy.events",
    "State": "policy.state",
    "Swap": "policy.events",
    "TaskHistory": "policy.priors",
    "Tick": "policy.events",
    "Timeline": "types.timeline",
    "Transfer": "policy.bound",
    "decide": "policy.decisions",
    "lower_bound": "policy.bound",
    "timeline_of": "types.timeline",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.evaluate.policy' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.evaluate.{_HOMES[name]}"), name)
