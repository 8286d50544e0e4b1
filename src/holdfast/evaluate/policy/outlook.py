"""Predict the remaining time and its lower bound, for a display.

The predictions are based on the samples submitted so far. So both numbers grow while the harness
still builds requests.
"""

from dataclasses import dataclass
from typing import Any

from holdfast.evaluate.policy.state import State
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold the prediction of an evaluation.

    Attributes:
        evaluation: an evaluation in the state "planned", with expected makespan, bound, account and
            critical path, but without scores.
        timeline: the predicted timeline.
        notes: sentences on the assumptions of the prediction, such as the known history and the
            memory that the model needs.
    """

    evaluation: Evaluation
    timeline: Timeline
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values, without the timeline."""
        fields = self.evaluation.to_json()
        kept = (
            "suite",
            "model",
            "makespan_s",
            "bound_s",
            "ratio",
            "bound",
            "engines",
            "nodes",
            "samples",
            "account",
        )
        return {**{name: fields[name] for name in kept}, "notes": list(self.notes)}


def work_left_s(state: State) -> float:
    """Return the engine-seconds of all open work in full batches; 0 before the first engine."""
    if state.reference is None:
        return 0.0
    waiting_s = sum(state.waiting_s(state.models[number]) for number in state.waiting_models)
    return waiting_s + sum(engine.load_s() for engine in state.engines.values())


def time_left_s(state: State) -> float:
    """Predict the seconds until all submitted work is done; 0 if there is no engine.

    The prediction is the largest of three times: all work divided by the number of engines, the
    time of the engine that needs longest, and the metrics divided by the number of their slots.
    """
    if state.reference is None or not state.engines:
        return 0.0
    engines_s = work_left_s(state) / state.capacity()
    longest_s = max(engine.end_s() for engine in state.engines.values())
    slots = sum(state.slots_free.values()) + len(state.metric_node)
    metrics_s = sum(-negated_s for negated_s, _sample in state.metrics) / max(1, slots)
    return max(engines_s, longest_s, metrics_s)


def bound_s(state: State, answered_s: float) -> float:
    """Return the shortest time in which the present engines could do all work, done and open.

    Args:
        state: the state of the policy.
        answered_s: the engine-seconds of all answers so far in full batches (`Curve.saturated_s`).
    """
    capacity = state.capacity() if state.engines else 0.0
    return (answered_s + work_left_s(state)) / capacity if capacity > 0 else 0.0
