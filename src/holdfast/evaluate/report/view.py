"""Compute all texts of an evaluation's page from the evaluation and its timeline."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from holdfast.core import words
from holdfast.core.ledger import EvaluationRecord
from holdfast.core.page import Bar, KeyFigure, TimeBars, time_bars
from holdfast.evaluate.policy import account
from holdfast.evaluate.report.compare import difference
from holdfast.evaluate.report.gantt import Picture, gantt
from holdfast.evaluate.report.occupation import occupation
from holdfast.evaluate.report.table import ARROWS, shown
from holdfast.evaluate.report.why import (
    CAUSES,
    all_known,
    bound_terms,
    longest_waits,
    lost_time,
    named,
)
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.scores import sanitized
from holdfast.evaluate.types.timeline import Timeline

SHOWN = 15


@dataclass
class SampleTime:
    """The times of one sample of one model."""

    model: int
    task: int
    sample: int
    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    engine_s: float = 0.0
    """The sum of the times that the sample's requests took on engines."""
    metric_s: float = 0.0
    judge_s: float = 0.0
    t0: float = float("inf")
    t1: float = 0.0


def slowest(timeline: Timeline, *, shown: int = SHOWN) -> list[SampleTime]:
    """List the samples with the longest time from first start to last end, the longest first.

    At most `shown` samples are listed.
    """
    found = sample_times(timeline)
    return heapq.nlargest(
        shown, found, key=lambda sample: (sample.t1 - sample.t0, -sample.task, -sample.sample)
    )


def sample_times(timeline: Timeline) -> Iterable[SampleTime]:
    """Return the times of every sample for which an engine, a metric or a judge worked."""
    found: dict[tuple[int, int, int], SampleTime] = {}

    def of(model: int, task: int, sample: int) -> SampleTime:
        key = (model, task, sample)
        if key not in found:
            found[key] = SampleTime(model=model, task=task, sample=sample)
        return found[key]

    for request in timeline.requests:
        one = of(request.model, request.task, request.sample)
        one.requests += 1
        one.prompt_tokens += request.prompt_tokens
        one.new_tokens += request.new_tokens
        one.engine_s += request.t1 - request.t0
        one.t0, one.t1 = min(one.t0, request.t0), max(one.t1, request.t1)
    for metric in timeline.metrics:
        one = of(metric.model, metric.task, metric.sample)
        one.metric_s += metric.t1 - metric.t0
        one.t0, one.t1 = min(one.t0, metric.t0), max(one.t1, metric.t1)
    for judged in timeline.judged:
        one = of(judged.model, judged.task, judged.sample)
        one.judge_s += judged.t1 - judged.t0 + judged.waited_s
        one.t0, one.t1 = min(one.t0, judged.t0 - judged.waited_s), max(one.t1, judged.t1)
    return found.values()


COLOURS = {
    account.USEFUL: "useful",
    account.WEIGHTS: "load",
    account.START: "load",
    account.SWAP: "swap",
    account.LOST: "lost",
    "busy": "busy",
    "idle": "idle",
}
"""CSS classes of the causes with a colour of their own; all other causes share one colour."""


@dataclass(frozen=True, kw_only=True)
class ScoreView:
    """A row of the table of scores."""

    task: str
    first: bool
    """True for the first row of each task."""
    depth: int
    group: bool
    n_shot: str
    samples: str
    metric: str
    arrow: str
    value: str
    stderr: str
    difference: str
    """The difference to the score in the previous evaluation; empty if unknown."""
    verdict: str
    """The meaning of the difference, which is also a CSS class: `better`, `worse` or empty."""
    link: str
    """The path of the task's samples relative to the page; empty if there are none."""


@dataclass(frozen=True, kw_only=True)
class EvaluationView:
    """The contents of an evaluation's page."""

    title: str
    state: str
    answer: str
    """The scores summarized in one line; for a plan, the predicted time."""
    headline: str
    beside: str
    """A sentence that names the previous evaluation; empty if there is none."""
    context: str
    key_figures: list[KeyFigure]
    scores: list[ScoreView]
    errors: list[tuple[str, str]]
    bound: list[Bar]
    unit: str
    gantt: Picture | None
    gantt_svg: Markup
    lost: TimeBars
    slowest: list[tuple[str, ...]]
    path: list[tuple[str, ...]]
    facts: list[tuple[str, str]]


def page_view(
    evaluation: Evaluation,
    timeline: Timeline,
    *,
    previous: EvaluationRecord | None,
    samples: Mapping[str, str],
) -> EvaluationView:
    """Return the contents of an evaluation's page.

    If the evaluation has no account of the engine-seconds, the account is computed from the
    timeline.
    """
    scores = _scores(evaluation, previous, samples)
    picture = gantt(timeline)
    bound, unit = _bound(evaluation)
    return EvaluationView(
        title=f"{evaluation.suite} on {evaluation.model}",
        state=evaluation.state,
        answer=headline(evaluation)
        if evaluation.state == "planned"
        else _answer(evaluation, scores, previous),
        headline=headline(evaluation),
        beside="" if previous is None else _beside(previous),
        context=_context(evaluation),
        key_figures=_key_figures(evaluation),
        scores=scores,
        errors=list(evaluation.errors.items()),
        bound=bound,
        unit=unit,
        gantt=picture,
        gantt_svg=Markup(picture.svg if picture else ""),  # safe: `gantt` writes no names into it
        lost=_lost(evaluation, timeline),
        slowest=[_sample(sample, timeline) for sample in slowest(timeline)],
        path=[
            (
                words.duration(step.t0),
                named(step.what),
                words.duration(step.t1 - step.t0),
                step.detail,
            )
            for step in longest_waits(evaluation.critical_path)
        ],
        facts=_facts(evaluation),
    )


def headline(evaluation: Evaluation) -> str:
    """Summarize an evaluation in one line: `60 tasks in 3 min 20 s, 1.06 times the lower bound`."""
    tasks = len({score.task for score in evaluation.scores if not score.group})
    what = words.plainly(tasks, "task")
    if evaluation.state == "planned":
        what = words.plainly(evaluation.samples, "sample")
    text = f"{what} in {words.duration(evaluation.makespan_s)}"
    if evaluation.ratio is not None:
        text += f", {evaluation.ratio:.2f} times the lower bound"
    if evaluation.errors:
        text += f"; {words.plainly(len(evaluation.errors), 'task')} failed"
    ended = {"done": "", "failed": "Failed: ", "stopped": "Stopped: ", "planned": "Predicted: "}[
        evaluation.state
    ]
    return (ended + text).replace(words.NBSP, " ")


def _answer(
    evaluation: Evaluation, scores: Sequence[ScoreView], previous: EvaluationRecord | None
) -> str:
    """Summarize the scores in one line: `4 tasks: 2 scores better and 1 worse than step 11,000`."""
    tasks = len({score.task for score in evaluation.scores if not score.group})
    said = words.plainly(tasks, "task")
    if previous is not None:
        better, worse = (
            sum(score.verdict == verdict for score in scores) for verdict in ("better", "worse")
        )
        than = _name(previous)
        if not better and not worse:
            said += f": no score differs from {than} by more than chance"
        else:
            said += f": {words.plainly(better, 'score')} better and {worse:,} worse than {than}"
    if evaluation.errors:
        said += f"; {words.plainly(len(evaluation.errors), 'task')} failed"
    ended = {"failed": "Failed: ", "stopped": "Stopped: "}.get(evaluation.state, "")
    return ended + said


def _name(previous: EvaluationRecord) -> str:
    return previous.evaluation_id if previous.step is None else f"step {previous.step:,}"


def _beside(previous: EvaluationRecord) -> str:
    return (
        f"Differences are to {_name(previous)} (evaluation {previous.evaluation_id}); coloured ones "
        "exceed 1.96 standard errors."
    )


def _context(evaluation: Evaluation) -> str:
    engines = words.count(evaluation.engines, "engine")
    nodes = words.count(evaluation.nodes, "node")
    exact = {"exact": "exact, bit for bit the harness's own scores", "free": "free batching"}
    mode = exact.get(evaluation.mode, evaluation.mode)
    on = f" on {engines}, {nodes}" if evaluation.engines else ""
    started = (
        f", started {words.moment(evaluation.started_at_s)}" if evaluation.started_at_s else ""
    )
    said = f"Evaluation {evaluation.id}{on}{f'; {mode}' if mode else ''}{started}."
    return f"{said} {all_known(evaluation)}".rstrip()


def _key_figures(evaluation: Evaluation) -> list[KeyFigure]:
    ratio = "unknown" if evaluation.ratio is None else f"{evaluation.ratio:.2f}"
    rate = evaluation.samples / evaluation.makespan_s if evaluation.makespan_s > 0 else 0.0
    useful = {
        cause: evaluation.account[cause]
        for cause in (account.USEFUL, "busy")
        if cause in evaluation.account
    }
    figures = [
        KeyFigure(
            name="Makespan",
            value=words.duration(evaluation.makespan_s),
            note="first start to last score",
        ),
        KeyFigure(
            name="Over the bound",
            value=ratio,
            note=f"bound {words.duration(evaluation.bound_s)}"
            if evaluation.bound
            else "no bound known",
        ),
        KeyFigure(name="Samples", value=f"{evaluation.samples:,}", note=f"{rate:,.1f} a second"),
        KeyFigure(
            name="Reused",
            value=f"{evaluation.reused:,}",
            note=f"answers, besides {evaluation.requests:,} made",
        ),
    ]
    if useful and (total_s := sum(evaluation.account.values())) > 0:
        share = sum(useful.values()) / total_s
        figures.append(
            KeyFigure(
                name="Engines useful",
                value=words.percent(share),
                note=f"of {total_s:,.0f} engine-seconds",
            )
        )
    return figures


def _scores(
    evaluation: Evaluation, previous: EvaluationRecord | None, samples: Mapping[str, str]
) -> list[ScoreView]:
    views = []
    before = None
    for score in evaluation.scores:
        change, verdict = difference(score, previous)
        views.append(
            ScoreView(
                task=score.alias,
                first=score.task != before,
                depth=min(score.depth, 6),
                group=score.group,
                n_shot="" if score.n_shot is None else str(score.n_shot),
                samples="" if score.samples is None else f"{score.samples:,}",
                metric=score.metric
                if score.filter in ("none", "")
                else f"{score.metric}, {score.filter}",
                arrow=ARROWS[score.higher_is_better],
                value=shown(score.value),
                stderr=shown(score.stderr),
                difference="" if change is None else _signed(change),
                verdict=verdict if verdict in ("better", "worse") else "",
                link=samples.get(sanitized(score.task), ""),
            )
        )
        before = score.task
    return views


def _signed(change: float) -> str:
    return f"{change:+.4f}".replace("-", "\N{MINUS SIGN}")


def _bound(evaluation: Evaluation) -> tuple[list[Bar], str]:
    if not evaluation.bound:
        return [], ""
    longest_s = max(evaluation.makespan_s, evaluation.bound_s)
    unit, unit_s = words.unit_of_time(longest_s)
    rows = [("makespan", "Makespan", "what it took", evaluation.makespan_s)]
    rows += [
        ("bound", named(term.name), text, term.seconds) for term, text in bound_terms(evaluation)
    ]
    bars = [
        Bar(
            key=key,
            name=name,
            meaning=meaning,
            amount=f"{seconds / unit_s:.2f}",
            share="" if seconds <= 0 else f"{evaluation.makespan_s / seconds:.2f}",
            width=f"{seconds / longest_s * 100 if longest_s > 0 else 0:.2f}%",
        )
        for key, name, meaning, seconds in rows
    ]
    return bars, unit


def _lost(evaluation: Evaluation, timeline: Timeline) -> TimeBars:
    rows = [(row.cause, row.name, row.meaning, row.seconds) for row in lost_time(evaluation)]
    if not rows:
        found = (
            occupation(timeline, slices=1).seconds()
            if timeline.engines or timeline.requests
            else {}
        )
        kinds = {"load": account.START, "swap": account.SWAP, "lost": account.LOST, "idle": "idle"}
        observed = {cause: found.pop(kind, 0.0) for kind, cause in kinds.items()}
        rows = [("busy", *CAUSES["busy"], sum(found.values()))] if found else []
        rows += [
            (cause, *CAUSES[cause], seconds) for cause, seconds in observed.items() if seconds > 0
        ]
    return time_bars(
        [
            (COLOURS.get(cause, "other"), name, meaning, seconds)
            for cause, name, meaning, seconds in rows
        ]
    )


def _sample(sample: SampleTime, timeline: Timeline) -> tuple[str, ...]:
    return (
        timeline.task_name(sample.task),
        str(sample.sample),
        words.duration(sample.t0),
        words.duration(sample.t1 - sample.t0),
        words.duration(sample.engine_s),
        f"{sample.new_tokens:,}",
        words.duration(sample.metric_s) if sample.metric_s else "",
        words.duration(sample.judge_s) if sample.judge_s else "",
    )


def _facts(evaluation: Evaluation) -> list[tuple[str, str]]:
    facts = [
        ("Model", evaluation.model),
        ("Digest of the weights", evaluation.digest),
        ("Numerics", evaluation.numerics),
        (
            "Harness",
            ", ".join(
                f"{name} {version}" for name, version in sorted(evaluation.harness_versions.items())
            ),
        ),
        ("Training run", evaluation.run_id or ""),
        ("Step", "" if evaluation.step is None else f"{evaluation.step:,}"),
        (
            "Read from storage",
            words.size(evaluation.remote_bytes) if evaluation.remote_bytes else "",
        ),
        ("Folder", evaluation.folder),
    ]
    return [(name, value) for name, value in facts if value]
