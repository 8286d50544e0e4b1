"""Summarize a run from its records: the ledger's rows and the journal's lines."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core.accounting.costs import checkpoint_summary, incident_summaries, interventions
from holdfast.core.accounting.lost_time import Records, lost_time
from holdfast.core.accounting.records import (
    IncidentSummary,
    LossCurve,
    LostSegment,
    Point,
    RunSummary,
)
from holdfast.core.accounting.survival import UNUSABLE_STATES, ExecutedStep, executed_steps
from holdfast.core.accounting.wall_time import Outage, wall_time
from holdfast.core.ledger import Attempt, Checkpoint, Event, Incident, Ledger, Run
from holdfast.core.paths import RunPaths
from holdfast.core.telemetry import StepRecord, read_steps


def summarize(
    ledger: Ledger, home: Path, run_id: str, *, steps: Sequence[StepRecord] | None = None
) -> RunSummary:
    """Summarize a run from the ledger and the journal of steps.

    ETTR (effective training time ratio) is the time of the steps that survive in the final state,
    divided by the wall time since the first start. An attempt's first step counts without its
    warm-up (see `survival`). All seconds come from the records; nothing is measured here.

    Args:
        ledger: the ledger that holds the run.
        home: `$HOLDFAST_HOME`, the folder above the run's journal.
        run_id: the run.
        steps: the journal's steps, if the caller has read them; None: read all steps here.

    Raises:
        NotFound: the ledger has no such run.
        HoldfastError: the journal is damaged.
        LedgerError: the ledger cannot be read.
    """
    return account(
        run=ledger.run(run_id),
        attempts=ledger.attempts(run_id),
        events=ledger.events(run_id),
        incidents=ledger.incidents(run_id),
        checkpoints=ledger.checkpoints(run_id),
        steps=list(read_steps(RunPaths(home, run_id).steps)) if steps is None else steps,
    )


def account(
    *,
    run: Run,
    attempts: Sequence[Attempt],
    events: Sequence[Event],
    incidents: Sequence[Incident],
    checkpoints: Sequence[Checkpoint],
    steps: Sequence[StepRecord],
) -> RunSummary:
    """Summarize a run as a pure function of its records (see `summarize`)."""
    records = _by_attempt(steps)
    attempts = _complete(run.run_id, attempts, records, events)
    executed = executed_steps(run.state, attempts, records, checkpoints)
    world_size = _world_size(run, events)
    costs = incident_summaries(incidents, events, world_size)
    end_s = run.ended_at_s
    if end_s is None:
        end_s = _last_record_s(attempts, events, incidents, checkpoints, steps)
    wall_s = max(0.0, end_s - run.started_at_s)
    breakdown, phases = wall_time(
        start_s=run.started_at_s,
        end_s=end_s,
        running=run.state == "running",
        attempts=[attempt.number for attempt in attempts],
        steps=executed,
        outages=_outages(costs),
        stalls_s=_stalls_s(checkpoints),
    )
    in_order = [step for attempt in attempts for step in executed[attempt.number]]
    later_s = [step.record.step_s for lines in executed.values() for step in lines[1:]]
    return RunSummary(
        run=run,
        attempts=tuple(attempts),
        world_size=world_size,
        wall_s=wall_s,
        final_step=_final_step(attempts, in_order, checkpoints),
        steps_executed=sum(step.covers for step in in_order),
        steps_lost=sum(step.covers for step in in_order if not step.survives),
        median_step_s=statistics.median(later_s) if later_s else None,
        breakdown=breakdown,
        ettr=breakdown.productive_s / wall_s if wall_s > 0 else None,
        phases=phases,
        incidents=costs,
        interventions=interventions(attempts, incidents, events),
        lost_time=lost_time(
            Records(
                start_s=run.started_at_s,
                phases=phases,
                attempts=attempts,
                executed=executed,
                incidents=costs,
                events=events,
                stalls_s=_stalls_s(checkpoints),
                ranks=world_size or 1,
                nnodes=_nnodes(run),
            )
        ),
        checkpoints=checkpoint_summary(checkpoints, wall_s),
        loss=_loss_curve(in_order),
        metrics=_metrics(in_order),
        proof=next((event.data for event in reversed(events) if event.kind == "proof"), None),
    )


def latest_steps(ledger: Ledger, home: Path, run_id: str) -> list[StepRecord]:
    """Return one record for each step of a run, in order; the last execution of a step counts.

    Steps that a later attempt rolled back and did not execute again are left out. All steps of the
    last attempt are returned, also those that a failure lost after the newest checkpoint.

    A script may report one step in several records, for example the loss and then the validation
    loss. Such records are merged; later values replace earlier ones.

    Raises:
        NotFound: the ledger has no such run.
        HoldfastError: the journal is damaged.
        LedgerError: the ledger cannot be read.
    """
    ledger.run(run_id)  # raises `NotFound`
    records = _by_attempt(read_steps(RunPaths(home, run_id).steps))
    attempts = _complete(run_id, ledger.attempts(run_id), records, ledger.events(run_id))
    # "completed": the steps after the newest checkpoint do not count as lost.
    executed = executed_steps("completed", attempts, records, ())
    found: dict[int, StepRecord] = {}
    for attempt in attempts:
        for line in executed[attempt.number]:
            if not line.survives:
                continue
            record, before = line.record, found.get(line.record.step)
            if before is not None:
                record = replace(
                    record,
                    step_s=before.step_s,
                    loss=before.loss if record.loss is None else record.loss,
                    metrics={**before.metrics, **record.metrics},
                )
            found[record.step] = record
    return [found[step] for step in sorted(found)]


def _complete(
    run_id: str,
    attempts: Sequence[Attempt],
    records: Mapping[int, Sequence[StepRecord]],
    events: Sequence[Event],
) -> list[Attempt]:
    """Return all attempts in order, each with its start step.

    The result includes attempts that appear only in the journal.
    """
    known = {attempt.number for attempt in attempts}
    # The supervisor records an attempt before the attempt's first step. A journal restored from
    # elsewhere may still hold steps of attempts that the ledger lacks.
    unknown = [
        Attempt(run_id=run_id, number=number, started_at_s=lines[0].at_s)
        for number, lines in records.items()
        if number not in known
    ]
    return sorted(
        (_with_start_step(attempt, events) for attempt in [*attempts, *unknown]),
        key=lambda attempt: attempt.number,
    )


def _by_attempt(steps: Iterable[StepRecord]) -> dict[int, list[StepRecord]]:
    records: dict[int, list[StepRecord]] = {}
    for step in steps:
        records.setdefault(step.attempt, []).append(step)
    return records


def _last_record_s(
    attempts: Sequence[Attempt],
    events: Sequence[Event],
    incidents: Sequence[Incident],
    checkpoints: Sequence[Checkpoint],
    steps: Sequence[StepRecord],
) -> float:
    return max(
        itertools.chain(
            (attempt.ended_at_s or attempt.started_at_s for attempt in attempts),
            (event.at_s for event in events),
            (incident.resumed_at_s or incident.detected_at_s for incident in incidents),
            (checkpoint.committed_at_s for checkpoint in checkpoints),
            (step.at_s for step in steps),
        ),
        default=0.0,
    )


def _with_start_step(attempt: Attempt, events: Sequence[Event]) -> Attempt:
    """Return the attempt with its start step.

    If the attempt's row has no start step, the step is taken from the `restored` event. The row has
    none if the attempt ended between its restore and its first step.
    """
    if attempt.start_step is not None:
        return attempt
    restored = [
        event.data
        for event in events
        if (event.kind, event.attempt) == ("restored", attempt.number)
    ]
    return replace(attempt, start_step=int(restored[0]["step"])) if restored else attempt


def _outages(costs: Sequence[IncidentSummary]) -> dict[int, Outage]:
    outages: dict[int, Outage] = {}
    for cost in costs:
        # The first incident of an attempt ended the attempt.
        outage = Outage(fault_at_s=cost.fault_at_s, detected_at_s=cost.incident.detected_at_s)
        outages.setdefault(cost.incident.attempt, outage)
    return outages


def _stalls_s(checkpoints: Sequence[Checkpoint]) -> dict[int, float]:
    stalls_s: dict[int, float] = {}
    for checkpoint in checkpoints:
        stalls_s[checkpoint.attempt] = stalls_s.get(checkpoint.attempt, 0.0) + checkpoint.stall_s
    return stalls_s


def _world_size(run: Run, events: Sequence[Event]) -> int | None:
    stated: list[Any] = [event.data.get("world_size") for event in reversed(events)]
    if run.command and Path(run.command[0]).name != "torchrun":  # torchrun sets its own ranks
        stated.append(run.options.get("nproc"))
    return next((size for size in stated if isinstance(size, int) and size > 0), None)


def _nnodes(run: Run) -> int:
    nnodes = run.options.get("nnodes")
    return nnodes if isinstance(nnodes, int) else 1


def _final_step(
    attempts: Sequence[Attempt], steps: Sequence[ExecutedStep], checkpoints: Sequence[Checkpoint]
) -> int:
    surviving = [step.record.step for step in steps if step.survives]
    if surviving:
        return max(surviving)
    for attempt in reversed(attempts):  # a script may save without reporting its steps
        saved = [
            one.step
            for one in checkpoints
            if one.attempt == attempt.number and one.state not in UNUSABLE_STATES
        ]
        if saved:
            return max(saved)
        if attempt.start_step is not None:
            return attempt.start_step
    return 0


def _loss_curve(steps: Sequence[ExecutedStep]) -> LossCurve:
    surviving: list[Point] = []
    validation: list[Point] = []
    lost: list[LostSegment] = []
    for (attempt, survives), group in itertools.groupby(
        steps, lambda step: (step.record.attempt, step.survives)
    ):
        lines = [step.record for step in group]
        points = [Point(line.step, line.loss) for line in lines if line.loss is not None]
        if survives:
            surviving += points
            validation += _validation(lines)
        elif points:
            lost.append(LostSegment(attempt=attempt, points=tuple(points)))
    surviving.sort(key=lambda point: point.step)
    validation.sort(key=lambda point: point.step)
    return LossCurve(surviving=tuple(surviving), lost=tuple(lost), validation=tuple(validation))


def _metrics(steps: Sequence[ExecutedStep]) -> dict[str, tuple[Point, ...]]:
    found: dict[str, list[Point]] = {}
    for step in sorted(
        (step for step in steps if step.survives), key=lambda step: step.record.step
    ):
        if step.counted_s > 0:
            speed = Point(step.record.step, step.covers / step.counted_s)
            found.setdefault("steps per second", []).append(speed)
        for name, value in step.record.metrics.items():
            found.setdefault(name, []).append(Point(step.record.step, value))
    return {name: tuple(points) for name, points in found.items()}


def _validation(lines: Sequence[StepRecord]) -> list[Point]:
    metrics: list[tuple[int, Mapping[str, float]]] = [(line.step, line.metrics) for line in lines]
    return [Point(step, values["val_loss"]) for step, values in metrics if "val_loss" in values]
