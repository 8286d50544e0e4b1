"""Compare evaluations of one suite over checkpoints, and test differences for significance."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.core import words
from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse
from holdfast.core.ledger import EvaluationRecord
from holdfast.core.page import new_figure
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.scores import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Verdict = Literal["better", "worse", "differs", "no difference", "unknown"]
NORMAL_95 = 1.959964
"""In a standard normal distribution, 95 % lie within this many standard deviations."""
PANELS_LIMIT = 24
COLUMNS = 3
PLOT_SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True, kw_only=True)
class Value:
    """A score in one evaluation; `stderr` is None if the harness gives no standard error."""

    value: float
    stderr: float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One metric of one task in all evaluations.

    `values` has None for each evaluation without the metric.
    """

    task: str
    metric: str
    """The metric with its filter, in lm-eval's form: `acc,none`."""
    higher_is_better: bool | None
    values: tuple[Value | None, ...]
    difference: float | None
    """The value in the last evaluation minus the value in the first; None if one is missing."""
    stderr: float | None
    """The standard error of the difference; None if unknown."""
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several evaluations side by side.

    They are in the order of their steps if all of them have a step, and otherwise in the given
    order.

    Attributes:
        labels: for each evaluation, its step or the name of its model.
        steps: the step of each evaluation; empty if one of them has no step.
        rows: one row for each metric of each task.
        notes: sentences on differences that make the evaluations less comparable.
    """

    labels: tuple[str, ...]
    steps: tuple[int, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "labels": list(self.labels),
            "steps": list(self.steps),
            "rows": [
                {
                    **{name: getattr(row, name) for name in ("task", "metric", "higher_is_better")},
                    "values": [None if value is None else value.value for value in row.values],
                    "stderrs": [None if value is None else value.stderr for value in row.values],
                    **{name: getattr(row, name) for name in ("difference", "stderr", "verdict")},
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
        }


def compare(evaluations: Sequence[EvaluationRecord]) -> Comparison:
    """Compare the scores of evaluations.

    A difference is significant if it exceeds 1.96 times its standard error, which is computed from
    the standard errors of both scores. This is a two-sided z-test at 5 % for independent scores.
    Two models that answer the same samples are not independent and mostly agree, so the test is
    conservative: it misses small differences rather than inventing differences. Still, one in
    twenty tests of equal models finds a difference by chance.

    Raises:
        BadUse: there are fewer than two evaluations, or they have no metric in common.
    """
    if len(evaluations) < 2:
        given = words.plainly(len(evaluations), "evaluation")
        raise BadUse(
            f"{given} cannot be compared. Give two or more: `holdfast eval ls` lists them."
        )
    steps = [one.step for one in evaluations if one.step is not None]
    in_order = list(evaluations)
    if len(steps) == len(evaluations):
        in_order.sort(key=lambda one: (one.step or 0, one.started_at_s))
    keys = {
        (task, metric): None
        for one in in_order
        for task, metrics in one.scores.items()
        for metric in metrics
    }
    rows = tuple(row for task, metric in keys if (row := _row(task, metric, in_order)) is not None)
    if not any(sum(value is not None for value in row.values) > 1 for row in rows):
        raise BadUse(
            f"{', '.join(one.evaluation_id for one in in_order)} have no metric in common. "
            "Give evaluations of one suite: `holdfast eval ls --suite NAME` lists them."
        )
    return Comparison(
        labels=_labels(in_order, stepped=len(steps) == len(in_order)),
        steps=tuple(sorted(steps)) if len(steps) == len(in_order) else (),
        rows=rows,
        notes=tuple(_notes(in_order)),
    )


def previous_of(
    evaluation: Evaluation, records: Sequence[EvaluationRecord]
) -> EvaluationRecord | None:
    """Choose the evaluation to compare with: the last one before this evaluation.

    If the evaluation has a step, this is the evaluation of the closest earlier step of the same
    training run. Otherwise, it is the newest evaluation that started earlier.

    Args:
        evaluation: the evaluation.
        records: complete evaluations of the same suite and family, in any order.
    """
    before = [
        one
        for one in records
        if one.evaluation_id != evaluation.id
        and one.scores
        and one.run_id == evaluation.run_id
        and (
            one.started_at_s < evaluation.started_at_s
            if evaluation.step is None
            else one.step is not None and one.step < evaluation.step
        )
    ]
    if evaluation.step is None:
        return max(before, key=lambda one: one.started_at_s, default=None)
    return max(before, key=lambda one: (one.step or 0, one.started_at_s), default=None)


def difference(score: Score, previous: EvaluationRecord | None) -> tuple[float | None, Verdict]:
    """Return a score minus the same score of the previous evaluation, and a verdict.

    The verdict states whether the difference is significant, and in which direction.
    """
    kept = {} if previous is None else previous.scores.get(score.task, {})
    before = kept.get(f"{score.metric},{score.filter}")
    first = None if before is None else _value(before)
    last = _value((score.value, score.stderr))
    if first is None or last is None:
        return None, "unknown"
    change = last.value - first.value
    stderr = None
    if first.stderr is not None and last.stderr is not None:
        stderr = math.hypot(first.stderr, last.stderr)
    return change, _verdict(change, stderr, higher_is_better=score.higher_is_better)


def plot(comparison: Comparison, path: Path) -> int:
    """Draw each task's first metric with standard errors; return the number of tasks left out.

    Raises:
        BadUse: there is no writer for the file's suffix.
        HoldfastError: matplotlib is not installed.
        OSError: the file could not be written.
    """
    if path.suffix not in PLOT_SUFFIXES:
        raise BadUse(
            f"{path} ends in {path.suffix!r}. Give a file that ends in {', '.join(PLOT_SUFFIXES)}."
        )
    first: dict[str, Row] = {}
    for row in comparison.rows:
        first.setdefault(row.task, row)
    shown = list(first.values())[:PANELS_LIMIT]
    lines = math.ceil(len(shown) / COLUMNS)
    figure = new_figure(3.1 * min(COLUMNS, len(shown)), 2.0 * lines + 0.2)
    for place, row in enumerate(shown, start=1):
        _panel(figure.add_subplot(lines, min(COLUMNS, len(shown)), place), row, comparison)
    import matplotlib as mpl

    target = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "comparison"}):  # equal comparisons give equal files
        figure.savefig(
            target,
            format=path.suffix[1:],
            dpi=150,
            facecolor="white",
            metadata=_NO_DATE.get(path.suffix),
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, target.getvalue())
    return len(first) - len(shown)


_NO_DATE: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def _panel(axes: "Axes", row: Row, comparison: Comparison) -> None:
    places = comparison.steps or range(len(comparison.labels))
    points = [(x, one) for x, one in zip(places, row.values, strict=True) if one is not None]
    axes.errorbar(
        [x for x, _ in points],
        [one.value for _, one in points],
        yerr=[one.stderr or 0.0 for _, one in points],
        color="#0072b2", linewidth=1.3, marker="o", markersize=3.5, capsize=2.5, elinewidth=0.9,
    )  # fmt: skip
    axes.set_title(
        f"{row.task}  {row.metric.removesuffix(',none')}",
        fontsize=8.5,
        loc="left",
        parse_math=False,
    )
    axes.tick_params(labelsize=7.5)
    axes.grid(visible=True, color="#dddcd6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if comparison.steps:
        axes.set_xlabel("step", fontsize=7.5)
    else:
        axes.set_xticks(list(places), comparison.labels, rotation=25, ha="right")


def _row(task: str, metric: str, evaluations: Sequence[EvaluationRecord]) -> Row | None:
    kept = [one.scores.get(task, {}).get(metric) for one in evaluations]
    values = tuple(None if one is None else _value(one) for one in kept)
    if all(value is None for value in values):
        return None  # no value is a number
    higher = next((one[2] for one in kept if one is not None and one[2] is not None), None)
    first, last = values[0], values[-1]
    difference = None if first is None or last is None else last.value - first.value
    stderr = None
    if (
        first is not None
        and last is not None
        and first.stderr is not None
        and last.stderr is not None
    ):
        stderr = math.hypot(first.stderr, last.stderr)
    return Row(
        task=task,
        metric=metric,
        higher_is_better=higher,
        values=values,
        difference=difference,
        stderr=stderr,
        verdict=_verdict(difference, stderr, higher_is_better=higher),
    )


def _value(kept: Sequence[Any]) -> Value | None:
    value, stderr = kept[0], kept[1]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    known = isinstance(stderr, int | float) and math.isfinite(stderr)
    return Value(value=float(value), stderr=float(stderr) if known else None)


def _verdict(
    difference: float | None, stderr: float | None, *, higher_is_better: bool | None
) -> Verdict:
    if difference is None or stderr is None:
        return "no difference" if difference == 0 else "unknown"
    if abs(difference) <= NORMAL_95 * stderr:
        return "no difference"
    if higher_is_better is None:
        return "differs"
    return "better" if (difference > 0) == higher_is_better else "worse"


def _labels(evaluations: Sequence[EvaluationRecord], *, stepped: bool) -> tuple[str, ...]:
    names = [
        f"step {one.step}" if stepped else Path(one.model).name or one.model for one in evaluations
    ]
    # Replace names that occur twice by the evaluations' ids.
    return tuple(
        name if names.count(name) == 1 else one.evaluation_id
        for name, one in zip(names, evaluations, strict=True)
    )


def _notes(evaluations: Sequence[EvaluationRecord]) -> list[str]:
    notes = []
    for name, what in (("suite", "suites"), ("mode", "modes"), ("numerics", "numerics")):
        found = sorted({str(getattr(one, name)) for one in evaluations})
        if len(found) > 1:
            notes.append(f"Their {what} differ: {'; '.join(found)}.")
    harnesses = sorted(
        {f"{name} {of}" for one in evaluations for name, of in one.harness_versions.items()}
    )
    if len(harnesses) > len({name.rpartition(" ")[0] for name in harnesses}):
        notes.append(f"Their harnesses differ: {', '.join(harnesses)}.")
    open_ = [one.evaluation_id for one in evaluations if one.state != "done"]
    if open_:
        notes.append(f"Not complete: {', '.join(open_)}.")
    return notes
