"""What an evaluation came to, from the outcomes of its tasks and the timeline of its engines."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.coordinator.config import CoordinatorFiles
from holdfast.evaluate.coordinator.wire import ModelOutcome, TaskOutcome
from holdfast.evaluate.engines.engine import Curve
from holdfast.evaluate.evaluation import BoundTerm, Evaluation, PathStep
from holdfast.evaluate.harness.lm_eval.results import merge
from holdfast.evaluate.options import EvaluateOptions
from holdfast.evaluate.policy.account import Account, Step, account
from holdfast.evaluate.policy.bound import SampleWork, Work, lower_bound
from holdfast.evaluate.report.timeline import End, Line, RequestSpan, Span, Timeline, TimelineWriter, read_timeline
from holdfast.evaluate.scores import scores_of
from holdfast.evaluate.suite import Suite


def summarize(
    suite: Suite,
    model: str,
    paths: EvaluationPaths,
    tasks: Mapping[int, TaskOutcome],
    outcome: ModelOutcome | None,
    options: EvaluateOptions,
    *,
    timeline: Timeline | None = None,
) -> Evaluation:
    """The evaluation of one model: what its tasks' harness said, and what the time went to.

    Args:
        suite: what was run.
        model: as a person named it.
        paths: the evaluation's files.
        tasks: number of the entry to what it came to.
        outcome: of the model; None where the coordinator did not come to it.
        options: how it was run.
        timeline: of this model alone; None where the evaluation has no other.
    """
    timeline = timeline or read_timeline(paths.timeline)
    begun_s = timeline.begin.started_at_s
    number = outcome.model if outcome else 0
    bound = _bound(timeline, number, CoordinatorFiles(paths.root).curve)
    engines = {span.engine for span in timeline.engines if span.what == "serve"}
    spent = _account(timeline, CoordinatorFiles(paths.root).curve)
    blank = Evaluation(
        id=paths.evaluation_id,
        suite=suite.name,
        model=model,
        started_at_s=begun_s,
        makespan_s=timeline.makespan_s,
        bound=bound,
        engines=len(engines),
        nodes=len({span.node for span in timeline.nodes}),
        engine_seconds=sum(spent.seconds.values()),
        account={cause: seconds for cause, seconds in spent.seconds.items() if seconds > 0},
        critical_path=tuple(
            PathStep(what=step.what, t0=step.t0, t1=step.t1, detail=_detail(step, timeline)) for step in spent.path
        ),
        samples=sum(span.samples for span in timeline.tasks if span.model == number),
        requests=sum(span.model == number for span in timeline.requests),
        reused=sum(span.reused for span in timeline.tasks if span.model == number),
        remote_bytes=sum(span.remote_bytes for span in timeline.nodes if span.model == number),
        digest=outcome.digest if outcome else "",
        numerics=outcome.numerics if outcome else "",
        mode=options.engine.mode,
        run_id=options.run_id,
        step=options.step,
        folder=str(paths.root),
    )
    found = results_of(suite, tasks, blank)
    if outcome and outcome.error:  # of the model as a whole: why the tasks that did not end have no scores
        missing = [entry.name for task, entry in enumerate(suite.entries) if task not in tasks]
        found["errors"] = {**dict.fromkeys(missing, outcome.error), **found["errors"]}
    return replace(blank, **found)


def results_of(suite: Suite, tasks: Mapping[int, TaskOutcome], of: Evaluation) -> dict[str, Any]:
    """The fields of an evaluation that its tasks' outcomes decide; `of` says what and when it was."""
    found = [one.result.results for _, one in sorted(tasks.items()) if one.result is not None]
    errors = {suite.entries[task].name: one.error for task, one in sorted(tasks.items()) if one.error}
    started_s = of.started_at_s
    merged = merge(found, model_name=of.model, start_s=started_s, end_s=started_s + of.makespan_s) if found else {}
    return {
        "state": "done" if len(tasks) == len(suite.entries) and not errors else "failed",
        "results": merged,
        "scores": scores_of(merged) if merged else (),
        "errors": errors,
        "harness_versions": _versions(merged),
    }


def write_slice(session: EvaluationPaths, paths: EvaluationPaths, model: int) -> Timeline:
    """One model's part of a stream's timeline, as a timeline of its own in the model's folder.

    It begins when the model was added or, if that is later, when the one before had ended.
    """
    whole = read_timeline(session.timeline)
    own = next((span for span in whole.models if span.model == model), None)
    begun_s = own.t0 if own else 0.0
    begun_s = max([begun_s, *(span.t1 for span in whole.models if span.model != model and own and span.t1 < own.t1)])
    kinds: tuple[Sequence[Line], ...] = (
        whole.engines, whole.requests, whole.metrics, whole.judged, whole.tasks, whole.models,
    )  # fmt: skip
    spans = [
        span for spans in kinds for span in spans if isinstance(span, Span) and getattr(span, "model", -1) == model
    ]
    spans = [span for span in spans if span.t1 >= begun_s]
    spans += [span for span in whole.nodes if span.what == "fetch" and span.model == model]
    curve = CoordinatorFiles(session.root).curve
    if curve.exists():
        write_atomic(CoordinatorFiles(paths.root).curve, curve.read_bytes())
    begin = msgspec.structs.replace(whole.begin, started_at_s=whole.begin.started_at_s + begun_s)
    paths.timeline.unlink(missing_ok=True)
    with TimelineWriter(paths.timeline) as writer:
        writer.append(begin)
        for span in spans:
            t0, t1 = max(0.0, span.t0 - begun_s), max(0.0, span.t1 - begun_s)
            writer.append(msgspec.structs.replace(span, t0=t0, t1=t1))
        if own:
            writer.append(End(state="failed" if own.error else "done", t1=own.t1 - begun_s))
    return read_timeline(paths.timeline)


def _versions(merged: Mapping[str, object]) -> dict[str, str]:
    said = merged.get("lm_eval_version")
    return {"lm-eval": str(said)} if said else {}


def _bound(timeline: Timeline, model: int, curve_file: Path) -> tuple[BoundTerm, ...]:
    """The lower bound, from what the requests and metrics truly cost; none where no engine was at work."""
    requests = [span for span in timeline.requests if span.model == model and not span.error]
    engines = {span.engine for span in timeline.engines}
    if not requests or not engines or not curve_file.exists():
        return ()
    curve = msgspec.json.decode(curve_file.read_bytes(), type=Curve)
    metric_s: dict[tuple[int, int], float] = defaultdict(float)
    for metric in timeline.metrics:
        if metric.model == model:
            metric_s[metric.task, metric.sample] = metric.t1 - metric.t0
    shares = _shares_s(requests) if curve.max_batch == 1 else {}
    scale = 1.0 if shares else _scale(requests, curve)
    by_sample: dict[tuple[int, int], list[RequestSpan]] = defaultdict(list)
    for span in requests:
        by_sample[span.task, span.sample].append(span)
    samples = []
    for place, spans in by_sample.items():
        longest = max(spans, key=lambda span: span.new_tokens)
        samples.append(
            SampleWork(
                engine_s=sum(
                    shares[id(span)] if shares else scale * curve.saturated_s(span.prompt_tokens, span.new_tokens)
                    for span in spans
                ),
                alone_s=max(
                    shares[id(span)] if shares else scale * curve.alone_s(span.prompt_tokens, span.new_tokens)
                    for span in spans
                ),
                metric_s=metric_s[place],
                tokens=longest.new_tokens,
            )
        )
    slots = max(1, len({metric.node for metric in timeline.metrics})) * max(1, _at_once(timeline))
    work = Work(samples=samples, engines_there_s=[0.0] * len(engines), slots_there_s=[0.0] * slots)
    bound = lower_bound(work)
    return tuple(BoundTerm(name=name, seconds=seconds) for name, seconds in bound.terms.items() if seconds > 0)


def _shares_s(spans: Iterable[RequestSpan]) -> dict[int, float]:
    """Of engines that do one thing at a time: each request's share of the time, by identity of its span.

    Requests that one forward answered have the same span; together they count once.
    """
    together: dict[tuple[int, float, float], list[RequestSpan]] = defaultdict(list)
    for span in spans:
        together[span.engine, span.t0, span.t1].append(span)
    return {id(span): (t1 - t0) / len(same) for (_, t0, t1), same in together.items() for span in same}


def _scale(spans: Iterable[RequestSpan], curve: Curve) -> float:
    """By what the curve's costs are to be multiplied so that no request was faster than alone on an engine."""
    ratios = [
        (span.t1 - span.t0) / alone_s
        for span in spans
        if (alone_s := curve.alone_s(span.prompt_tokens, span.new_tokens)) > 0
    ]
    return min(1.0, *ratios) if ratios else 1.0


def _at_once(timeline: Timeline) -> int:
    """The most metrics that ran at a time."""
    edges = sorted([(span.t0, 1) for span in timeline.metrics] + [(span.t1, -1) for span in timeline.metrics])
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    return most


def _account(timeline: Timeline, curve_file: Path) -> Account:
    if not curve_file.exists():
        return Account(engines=0, makespan_s=timeline.makespan_s)
    return account(timeline, msgspec.json.decode(curve_file.read_bytes(), type=Curve))


def _detail(step: Step, timeline: Timeline) -> str:
    parts = [timeline.task_name(step.task)] if step.task >= 0 else []
    parts += [f"sample {step.sample}"] if step.sample >= 0 else []
    parts += [f"engine {step.engine}"] if step.engine >= 0 else []
    parts += [f"after {step.waited_s:.2f} s of waiting"] if step.waited_s >= 0.01 else []
    return ", ".join(parts)
