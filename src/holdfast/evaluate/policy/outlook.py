"""How long it will still take, and what it cannot take less than, for a display; by what is known at the moment.

Samples that the harness has not asked for yet are not known, so both numbers grow while it still builds requests.
"""

from dataclasses import dataclass
from typing import Any

from holdfast.evaluate.policy.state import State
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A prediction in the form of what it predicts.

    Attributes:
        evaluation: in state "planned": makespan, bound, account and critical path as they are expected; no scores.
        timeline: what would happen when.
        notes: what the prediction stands on, a sentence each: how much history, how much memory the model takes.
    """

    evaluation: Evaluation
    timeline: Timeline
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON values, without the timeline."""
        said = self.evaluation.to_json()
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
        return {**{name: said[name] for name in kept}, "notes": list(self.notes)}


def work_left_s(state: State) -> float:
    """Seconds of an engine with a full batch that all that is not answered takes; 0 before an engine was there."""
    if state.reference is None:
        return 0.0
    waiting_s = sum(state.waiting_s(state.models[number]) for number in state.waiting_models)
    return waiting_s + sum(engine.load_s() for engine in state.engines.values())


def time_left_s(state: State) -> float:
    """Until everything known is answered and measured: all work over all engines, or what one of them has to end.

    0 where nobody can tell: no engine is there.
    """
    if state.reference is None or not state.engines:
        return 0.0
    engines_s = work_left_s(state) / state.capacity()
    longest_s = max(engine.end_s() for engine in state.engines.values())
    slots = sum(state.slots_free.values()) + len(state.metric_node)
    metrics_s = sum(-negated_s for negated_s, _sample in state.metrics) / max(1, slots)
    return max(engines_s, longest_s, metrics_s)


def bound_s(state: State, answered_s: float) -> float:
    """What the engines there are would take at least for all work known: what is answered, and what is left.

    Args:
        state: the policy's.
        answered_s: seconds of an engine with a full batch that what is answered took (`Curve.saturated_s`).
    """
    capacity = state.capacity() if state.engines else 0.0
    return (answered_s + work_left_s(state)) / capacity if capacity > 0 else 0.0
