"""List the numbers of a harness's results object in the order in which lm-eval prints them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

NOT_METRICS = frozenset({"alias", "name", "sample_len", "sample_count"})
"""Keys of a task in lm-eval's results that are not metrics."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task, or of a group of tasks."""

    task: str
    alias: str
    """The display name of the task."""
    depth: int = 0
    """0 for a top-level task or group, 1 for a task of a group, and so on."""
    group: bool = False
    version: str | int | float | None = None
    filter: str
    n_shot: int | None = None
    metric: str
    value: float | int | str | None
    """The harness's value; a few metrics have text as value."""
    stderr: float | None = None
    higher_is_better: bool | None = None
    samples: int | None = None

    @property
    def number(self) -> float | None:
        """The value as a number; None if it is text, or not finite."""
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
    """List the scores in a results object of lm-eval's form (`results`, `versions`, `n-shot`, …).

    In such an object, a metric has the key `metric,filter`, and its standard error the key
    `metric_stderr,filter`. As in lm-eval's table, each group comes before its tasks, and tasks and
    metrics are sorted by name. With `column="groups"`, only groups that have a score themselves are
    listed.
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
    """Convert scores to the form in which the ledger keeps them.

    The form maps each task to a mapping from `metric,filter` to [value, standard error, direction].
    The direction is True if a higher value is better. A number that JSON lacks (NaN, infinities)
    becomes a string.
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
    """List tasks with their depth: first each group followed by its tasks, then all other tasks."""
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
    """Convert a model's name to the folder name that lm-eval uses for the model.

    The conversion equals `lm_eval.utils.sanitize_model_name`.
    """
    return re.sub(r"[\"<>:/|\\?*\[\]]+", "__", model_name)
