"""The numbers of a harness's results object, a row each, in the order in which lm-eval prints them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

NOT_METRICS = frozenset({"alias", "name", "sample_len", "sample_count"})
"""What lm-eval keeps beside the metrics of a task."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task, or of a group of tasks."""

    task: str
    alias: str
    """How the harness shows the task."""
    depth: int = 0
    """0 for a task or group of its own, 1 for a task of a group, and so on."""
    group: bool = False
    version: str | int | float | None = None
    filter: str
    n_shot: int | None = None
    metric: str
    value: float | int | str | None
    """As the harness has it; a few metrics are words."""
    stderr: float | None = None
    higher_is_better: bool | None = None
    samples: int | None = None

    @property
    def number(self) -> float | None:
        """The value, where it is a number."""
        if (
            isinstance(self.value, bool)
            or not isinstance(self.value, int | float)
            or not math.isfinite(self.value)
        ):
            return None
        return float(self.value)


def scores_of(
    results: Mapping[str, Any], column: Literal["results", "groups"] = "results"
) -> tuple[Score, ...]:
    """Flatten a results object of lm-eval's form (`results`, `versions`, `n-shot`, `higher_is_better`, …).

    A metric stands as `metric,filter` with its standard error as `metric_stderr,filter`; groups stand before their
    tasks, tasks and metrics by name, as lm-eval's own table has them. "groups" gives those groups alone that have a
    score of their own.
    """
    found: Mapping[str, Mapping[str, Any]] = results.get(column, {})
    subtasks: Mapping[str, Sequence[str]] = results.get("group_subtasks", {})
    scores = []
    for task, depth in _in_order(found, subtasks):
        metrics = found[task]
        for key in sorted(metrics):
            metric, _, filter_name = key.partition(",")
            if key in NOT_METRICS or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filter_name}")
            scores.append(
                Score(
                    task=task,
                    alias=str(metrics.get("alias", task)).strip(" -"),
                    depth=depth,
                    group=bool(subtasks.get(task)),
                    version=results.get("versions", {}).get(task),
                    filter=filter_name,
                    n_shot=results.get("n-shot", {}).get(task),
                    metric=metric,
                    value=metrics[key],
                    stderr=stderr
                    if isinstance(stderr, float | int) and not isinstance(stderr, bool)
                    else None,
                    higher_is_better=results.get("higher_is_better", {}).get(task, {}).get(metric),
                    samples=_samples(task, metrics, results),
                )
            )
    return tuple(scores)


def compact(scores: Iterable[Score]) -> dict[str, dict[str, Any]]:
    """Scores as the ledger keeps them: task, then `metric,filter` to value, standard error, whether higher is better.

    A number that JSON does not have (NaN, infinities) is kept as its word.
    """
    kept: dict[str, dict[str, Any]] = {}
    for score in scores:
        value, stderr = (_as_json(number) for number in (score.value, score.stderr))
        kept.setdefault(score.task, {})[f"{score.metric},{score.filter}"] = [
            value,
            stderr,
            score.higher_is_better,
        ]
    return kept


def _in_order(
    found: Mapping[str, Mapping[str, Any]], subtasks: Mapping[str, Sequence[str]]
) -> Iterable[tuple[str, int]]:
    """Tasks with their depth: each group's tree first, then what is in no group."""
    children = {child for members in subtasks.values() for child in members}
    seen: dict[str, int] = {}

    def visit(name: str, depth: int) -> None:
        if name not in seen:
            seen[name] = depth
            for child in sorted(subtasks.get(name, ())):
                visit(child, depth + 1)

    for name in sorted(subtasks):
        if name not in children:
            visit(name, 0)
    for name in sorted(found):
        seen.setdefault(name, 0)
    return [(name, depth) for name, depth in seen.items() if name in found]


def _samples(task: str, metrics: Mapping[str, Any], results: Mapping[str, Any]) -> int | None:
    counted = metrics.get("sample_len", results.get("n-samples", {}).get(task, {}).get("effective"))
    return counted if isinstance(counted, int) else None


def _as_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def sanitized(model_name: str) -> str:
    """A model's name as lm-eval makes a folder of it (`lm_eval.utils.sanitize_model_name`)."""
    return re.sub(r"[\"<>:/|\\?*\[\]]+", "__", model_name)
