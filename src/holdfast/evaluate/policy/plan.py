"""What an evaluation is predicted to take, before anything is run; made by `holdfast.simulate`."""

from dataclasses import dataclass
from typing import Any

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
