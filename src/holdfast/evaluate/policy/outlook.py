"""Predict the remaining time and its lower bound for a display, from present knowledge.

Samples that the harness has not submitted yet are unknown, so both numbers grow while the harness
builds requests.
"""

from dataclasses import dataclass
from typing import Any

from holdfast.evaluate.policy.state import State
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold a prediction of an evaluation.

    Attributes:
        evaluation: an evaluation in state "planned", with expected makespan, bound, account and
            critical path, without scores.
        timeline: the predicted timeline.
        notes: sentences on the assumptions: the known history, the model's memory.
    """

    evaluation: Evaluation
    timeline: Timeline
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, without the timeline."""
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
    """Return full-batch engine-seconds of all open work; 0 before the first engine."""
    if state.reference is None:
        return 0.0
    waiting_s = sum(state.waiting_s(state.models[number]) for number in state.waiting_models)
    return waiting_s + sum(engine.load_s() for engine in state.engines.values())


def time_left_s(state: State) -> float:
    """Return seconds until all known work is done: total work over engines, or the longest engine.

    0 if there is no engine.
    """
    if state.reference is None or not state.engines:
        return 0.0
    engines_s = work_left_s(state) / state.capacity()
    longest_s = max(engine.end_s() for engine in state.engines.values())
    slots = sum(state.slots_free.values()) + len(state.metric_node)
    metrics_s = sum(-negated_s for negated_s, _sample in state.metrics) / max(1, slots)
    return max(engines_s, longest_s, metrics_s)


def bound_s(state: State, answered_s: float) -> float:
    """Return the least seconds that the present engines need for all known work, answered and open.

    Args:
        state: the state of the policy.
        answered_s: full-batch engine-seconds of the answers (`Curve.saturated_s`).
    """
    capacity = state.capacity() if state.engines else 0.0
    return (answered_s + work_left_s(state)) / capacity if capacity > 0 else 0.0
