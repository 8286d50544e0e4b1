"""Compute the result of an evaluation from the outcomes of its tasks and from its timeline."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from holdfast.cluster import core_count
from holdfast.core.atomic import write_atomic
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.coordinator.config import CoordinatorFiles
from holdfast.evaluate.harness.lm_eval.results import merge
from holdfast.evaluate.metrics.judge.journal import journal_of, judged_between
from holdfast.evaluate.policy.account import Account, Step, account
from holdfast.evaluate.policy.bound import lower_bound
from holdfast.evaluate.run.actual_cost import work_of
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.types.engine import Curve
from holdfast.evaluate.types.evaluation import BoundTerm, Evaluation, PathStep
from holdfast.evaluate.types.scores import scores_of
from holdfast.evaluate.types.suite import Suite
from holdfast.evaluate.types.timeline import (
    End,
    EngineSpan,
    Line,
    Span,
    Timeline,
    TimelineFile,
    read_timeline,
)
from holdfast.evaluate.wire.messages import ModelOutcome, TaskOutcome


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
    """Compute the result of one model: the harness's scores, and an account of the time.

    Args:
        suite: the suite that was evaluated.
        model: the user's name for the model.
        paths: the paths of the evaluation.
        tasks: the outcome of each task, by the index of its entry in the suite.
        outcome: the outcome of the model; None if the coordinator did not reach the model.
        options: the options of the run.
        timeline: the timeline of only this model; None to read the timeline of the evaluation.
    """
    number = outcome.model if outcome else 0
    timeline = _judged(timeline or read_timeline(paths.timeline), number, paths, options)
    begun_s = timeline.begin.started_at_s
    curve = _curve(paths)
    bound = _bound(timeline, number, curve, options)
    engines = {span.engine for span in timeline.engines if span.what == "serve"}
    spent = (
        account(timeline, curve) if curve else Account(engines=0, makespan_s=timeline.makespan_s)
    )
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
            PathStep(what=step.what, t0=step.t0, t1=step.t1, detail=_detail(step, timeline))
            for step in spent.path
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
    if outcome and outcome.error:  # the model's error explains why unfinished tasks have no scores
        missing = [entry.name for task, entry in enumerate(suite.entries) if task not in tasks]
        found["errors"] = {**dict.fromkeys(missing, outcome.error), **found["errors"]}
    return replace(blank, **found)


def results_of(suite: Suite, tasks: Mapping[int, TaskOutcome], of: Evaluation) -> dict[str, Any]:
    """Compute the fields of the result that depend on the tasks' outcomes.

    `of` is the evaluation with the model's name and the times.
    """
    found = [one.result.results for _, one in sorted(tasks.items()) if one.result is not None]
    errors = {
        suite.entries[task].name: one.error for task, one in sorted(tasks.items()) if one.error
    }
    started_s = of.started_at_s
    merged = (
        merge(found, model_name=of.model, start_s=started_s, end_s=started_s + of.makespan_s)
        if found
        else {}
    )
    return {
        "state": "done" if len(tasks) == len(suite.entries) and not errors else "failed",
        "results": merged,
        "scores": scores_of(merged) if merged else (),
        "errors": errors,
        "notes": tuple(
            note for _, one in sorted(tasks.items()) if one.result for note in one.result.notes
        ),
        "harness_versions": _versions(merged),
    }


def write_slice(
    whole: Timeline, session: EvaluationPaths, paths: EvaluationPaths, model: int
) -> Timeline:
    """Write one model's part of a stream's timeline into the model's folder; return the part.

    The part begins when the model was added. If the previous model ended later, or if the first
    engine switched to this model later, the part begins then.
    """
    own = next((span for span in whole.models if span.model == model), None)
    end_s = own.t1 if own else whole.makespan_s
    engines = [span for span in whole.engines if span.model == model]
    engines += _serving_still(engines, end_s)
    before_s = [span.t1 for span in whole.models if span.model != model and span.t1 < end_s]
    turned_s = min((span.t0 for span in engines), default=end_s)
    begun_s = max(own.t0 if own else 0.0, min(turned_s, max(before_s, default=0.0)))
    kinds: tuple[Sequence[Line], ...] = (
        engines, whole.requests, whole.metrics, whole.judged, whole.tasks, whole.models,
    )  # fmt: skip
    spans = [
        span
        for spans in kinds
        for span in spans
        if isinstance(span, Span) and getattr(span, "model", -1) == model
    ]
    spans = [span for span in spans if span.t1 >= begun_s]
    spans += [span for span in whole.nodes if span.what == "fetch" and span.model == model]
    curve = CoordinatorFiles(session.root).curve
    if curve.exists():
        write_atomic(CoordinatorFiles(paths.root).curve, curve.read_bytes())
    begin = msgspec.structs.replace(whole.begin, started_at_s=whole.begin.started_at_s + begun_s)
    paths.timeline.unlink(missing_ok=True)
    with TimelineFile(paths.timeline) as writer:
        writer.append(begin)
        for span in spans:
            t0, t1 = max(0.0, span.t0 - begun_s), max(0.0, span.t1 - begun_s)
            writer.append(msgspec.structs.replace(span, t0=t0, t1=t1))
        if own:
            writer.append(End(state="failed" if own.error else "done", t1=own.t1 - begun_s))
    return read_timeline(paths.timeline)


def _serving_still(engines: Sequence[EngineSpan], end_s: float) -> list[EngineSpan]:
    """Return a "serve" span for each engine that still serves the model.

    Such a span is written to the timeline only when it ends.
    """
    last = {span.engine: span for span in sorted(engines, key=lambda span: span.t1)}
    return [
        EngineSpan(
            what="serve", engine=span.engine, node=span.node, model=span.model, t0=span.t1, t1=end_s
        )
        for span in last.values()
        if span.what in ("load", "swap") and span.t1 < end_s
    ]


def _versions(merged: Mapping[str, object]) -> dict[str, str]:
    version = merged.get("lm_eval_version")
    return {"lm-eval": str(version)} if version else {}


def _bound(
    timeline: Timeline, model: int, curve: Curve | None, options: EvaluateOptions
) -> tuple[BoundTerm, ...]:
    """Compute the terms of the lower bound from the measured costs; empty if no engine worked."""
    if curve is None:
        return ()
    # For nodes on other machines, this machine's cores are the estimate.
    slots = options.metric_slots or core_count()
    work = work_of(timeline, model, curve, judge=options.judge, metric_slots=slots)
    if work is None:
        return ()
    return tuple(
        BoundTerm(name=name, seconds=s) for name, s in lower_bound(work).terms.items() if s > 0
    )


def _judged(
    timeline: Timeline, model: int, paths: EvaluationPaths, options: EvaluateOptions
) -> Timeline:
    """Add the judge's requests to a timeline, from the journal of the judge's proxy.

    The coordinator does not see these requests, so it cannot record them.
    """
    if options.judge is None or timeline.judged:
        return timeline
    begun_s = timeline.begin.started_at_s
    journal = journal_of(options.judge.url, paths.answers)
    judged = judged_between(journal, begun_s, begun_s + timeline.makespan_s, model=model)
    return replace(timeline, judged=tuple(sorted(judged, key=lambda span: span.t0)))


def _curve(paths: EvaluationPaths) -> Curve | None:
    """Return the cost curve that the first engine measured; None if no engine became ready."""
    file = CoordinatorFiles(paths.root).curve
    return msgspec.json.decode(file.read_bytes(), type=Curve) if file.exists() else None


def _detail(step: Step, timeline: Timeline) -> str:
    parts = [timeline.task_name(step.task)] if step.task >= 0 else []
    parts += [f"sample {step.sample}"] if step.sample >= 0 else []
    parts += [f"engine {step.engine}"] if step.engine >= 0 else []
    parts += [f"after {step.waited_s:.2f} s of waiting"] if step.waited_s >= 0.01 else []
    return ", ".join(parts)
