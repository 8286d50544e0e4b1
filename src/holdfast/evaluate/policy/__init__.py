"""Decide what to run where and when, by a pure function: the same live, emulated and simulated.

Events enter and actions leave. `priors` learns during the run and returns its history at the end.

| module | one idea |
|---|---|
| `events` | the events that enter and the actions that leave |
| `decisions` | the function: `decide` |
| `state` | its state |
| `feed` | dealing requests out: which, to which engine, how many ahead |
| `longest_first` | the queue |
| `target` | the earliest end, and the batch sizes that allow it |
| `tail` | the end of the queue: stealing, doubling, the next model |
| `priors` | predictions of a sample's cost |
| `bound` | a lower bound on the time of any schedule |
| `account` | the use of each engine-second |
| `outlook` | the remaining work and predicted time, for a display |

`simulate` imports the policy and the timeline from here, and runs them under a virtual clock.
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
