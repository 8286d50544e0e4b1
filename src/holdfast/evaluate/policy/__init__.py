"""Decide what to run where and when, by a pure function that is the same live and simulated.

Events enter and actions leave. `priors` predicts the cost of samples, learns during the run, and
returns its history at the end.

| module | one idea |
|---|---|
| `events` | the events that enter and the actions that leave |
| `decisions` | the function: `decide` |
| `state` | the state of `decide` |
| `feed` | gives requests to engines: which request, to which engine, how many ahead |
| `longest_first` | the queue of requests |
| `target` | the earliest possible end, and the batch sizes that it requires |
| `tail` | acts when the queue is empty: takes requests back, sends them twice, swaps to the next model |
| `priors` | predicts the cost of a sample |
| `bound` | a lower bound on the time of any schedule |
| `account` | what each engine-second was spent on |
| `outlook` | the remaining work and the predicted time, for a display |

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
        SendRequests,
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
    "SendRequests",
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
    "SendRequests": "policy.events",
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
