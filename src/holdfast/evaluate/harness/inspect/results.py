"""Inspect's scores in the layout of lm-eval's results object, so that one table shows both."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog

_ERRORS = ("stderr",)  # inspect's metrics that say how sure another is


def results_of(logs: "list[EvalLog]") -> dict[str, Any]:
    """The results object of an entry: a task a log, `"METRIC,SCORER"` a value, `"METRIC_stderr,SCORER"` its error.

    A scorer whose scores over epochs were reduced in several ways is there as SCORER/REDUCER for each.
    """
    results: dict[str, Any] = {
        "results": {},
        "group_subtasks": {},
        "configs": {},
        "versions": {},
        "n-shot": {},
    }
    results |= {"higher_is_better": {}, "n-samples": {}, "config": {}}
    for log in logs:
        task = log.eval.task.rpartition("/")[2]
        results["results"][task] = {"alias": task, **_row(log)}
        results["group_subtasks"][task] = []
        results["configs"][task] = {
            "task": log.eval.task,
            "task_args": log.eval.task_args,
            "generate": log.plan.config.model_dump(exclude_none=True),
            "solver": [step.solver for step in log.plan.steps],
            "metadata": {"version": log.eval.task_version, "harness": "inspect"},
        }
        results["versions"][task] = log.eval.task_version
        results["n-shot"][task] = 0
        results["higher_is_better"][task] = {}
        whole, taken = log.eval.dataset.samples, log.eval.dataset.sample_ids
        results["n-samples"][task] = {
            "original": whole,
            "effective": whole if taken is None else len(taken),
        }
    results["date"] = min(datetime.fromisoformat(log.eval.created).timestamp() for log in logs)
    return results


def _row(log: "EvalLog") -> dict[str, float]:
    scores = log.results.scores if log.results else []
    names = [score.name for score in scores]
    row: dict[str, float] = {}
    for score in scores:
        scorer = (
            f"{score.name}/{score.reducer}"
            if score.reducer and names.count(score.name) > 1
            else score.name
        )
        measured = [name for name in score.metrics if name not in _ERRORS]
        for name, metric in score.metrics.items():
            label = f"{measured[0]}_{name}" if name in _ERRORS and measured else name
            row[f"{label},{scorer}"] = metric.value
    return row
