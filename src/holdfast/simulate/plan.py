"""Predict an evaluation from the harness's requests and the costs in the ledger.

The live policy runs under virtual time. The simulated engines have the rates that an earlier
evaluation measured. If no earlier evaluation measured a figure, the figure is assumed, and a note
in the prediction says so.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast.cluster import core_count
from holdfast.evaluate import (
    BoundTerm,
    EvaluateOptions,
    Evaluation,
    Plan,
    PlanInputs,
    Suite,
    plan_inputs,
)
from holdfast.evaluate.policy import Curve, Priors, Timeline
from holdfast.simulate.arrivals import arrivals_of
from holdfast.simulate.evaluate import simulate
from holdfast.simulate.workload import SimCluster, SimModel, SimTask, Workload

__all__ = ["arrivals_of", "plan"]

_DEFAULT_START_S = 10.0


def plan(
    suite: Suite | str | Sequence[str],
    model: str,
    *,
    options: EvaluateOptions | None = None,
    device_memory_gib: float | None = None,
    arrivals_s: Sequence[float] = (),
) -> Plan:
    """Predict an evaluation; only the harness's preparation is really run, on this machine.

    Args:
        suite: as in `holdfast.evaluate.evaluate`.
        model: as in `holdfast.evaluate.evaluate`.
        options: as in `holdfast.evaluate.evaluate`. If the options give no number of engines per
            node, the number follows from the GPUs per node, as in a live evaluation: the GPUs that
            would be requested from the cluster's scheduler, or else the GPUs of this machine.
        device_memory_gib: the memory of each GPU, or of a node if engines run on CPUs; None for the
            memory of this machine's devices.
        arrivals_s: the times at which the checkpoints of a stream arrive, in seconds from the
            start; empty for a single model that is there from the start.

    Raises:
        BadUse: `suite`, `model` or `options` are wrong, or the model does not fit into the memory
            of the devices.
    """
    options = options or EvaluateOptions()
    inputs = plan_inputs(suite, model, options=options, device_memory_gib=device_memory_gib)
    engines = _engines(inputs)
    notes = [inputs.history_note, engines.note, *inputs.device_notes]
    if options.judge is not None:
        notes.append("The judge is left out: the samples that need it are unknown in advance.")
    workload = Workload(
        tasks=tuple(_task(inputs, number) for number in range(len(inputs.samples))),
        models=tuple(
            SimModel(release_s=at_s, size_bytes=inputs.model_bytes) for at_s in arrivals_s or (0.0,)
        ),
    )
    cluster = SimCluster(
        nodes=options.nodes,
        engines_per_node=inputs.engines_per_node,
        metric_slots=options.metric_slots or core_count(),
        curve=engines.curve,
        engine_start_s=engines.start_s,
        store_bytes_per_s=engines.bytes_per_s,
        node_bytes_per_s=engines.bytes_per_s,
    )
    outcome = simulate(workload, cluster, history=inputs.history, record=True)
    if arrivals_s:
        notes.append(_stream_note(outcome.timeline, arrivals_s))
    evaluation = Evaluation(
        id="plan",
        suite=inputs.suite.name,
        model=model,
        state="planned",
        makespan_s=outcome.makespan_s,
        bound=tuple(
            BoundTerm(name=name, seconds=s) for name, s in outcome.bound.terms.items() if s > 0
        ),
        engines=cluster.engines,
        nodes=cluster.nodes,
        engine_seconds=cluster.engines * outcome.makespan_s,
        samples=outcome.samples,
        requests=outcome.requests,
        mode=options.engine.mode,
    )
    return Plan(evaluation=evaluation, timeline=outcome.timeline, notes=tuple(filter(None, notes)))


def _stream_note(timeline: Timeline, arrivals_s: Sequence[float]) -> str:
    """Return a sentence about the times from the arrival of a checkpoint to its last score."""
    done_s = [0.0] * len(arrivals_s)
    for request in timeline.requests:
        done_s[request.model] = max(done_s[request.model], request.t1)
    for metric in timeline.metrics:
        done_s[metric.model] = max(done_s[metric.model], metric.t1)
    waits_s = [done - at_s for done, at_s in zip(done_s, arrivals_s, strict=True)]
    return (
        f"{len(waits_s)} checkpoints came in {max(arrivals_s) / 3600:.1f} h; all scores of one were there after "
        f"{statistics.median(waits_s):.0f} s in the median, {max(waits_s):.0f} s at most."
    )


@dataclass(frozen=True, kw_only=True)
class _Engines:
    """The rates of the simulated engines and of loading weights; `note` names the source."""

    curve: Curve
    start_s: float
    bytes_per_s: float
    note: str


def _engines(inputs: PlanInputs) -> _Engines:
    """Return the rates that an earlier evaluation measured, else assumed rates."""
    assumed = SimCluster()
    if (measured := inputs.measured) is not None:
        return _Engines(
            curve=measured.curve,
            start_s=_DEFAULT_START_S if measured.start_s is None else measured.start_s,
            bytes_per_s=measured.bytes_per_s or assumed.store_bytes_per_s,
            note=f"The speed of the engines is taken from evaluation {measured.evaluation_id}.",
        )
    spec = inputs.options.engine
    batch = 1 if spec.mode == "exact" else spec.max_batch or 64
    return _Engines(
        curve=msgspec.structs.replace(assumed.curve, max_batch=batch),
        start_s=_DEFAULT_START_S,
        bytes_per_s=assumed.store_bytes_per_s,
        note=(
            f"No evaluation of this family ({inputs.family}) was measured yet: engines are assumed to read "
            f"{assumed.curve.prefill_tokens_per_s:,.0f} tokens a second and to start in {_DEFAULT_START_S:.0f} s."
        ),
    )


def _task(inputs: PlanInputs, number: int) -> SimTask:
    """Return a simulated task whose true costs are the predicted costs."""
    samples = inputs.samples[number]
    priors = Priors.from_history(inputs.history, inputs.task_names)
    limits = [
        max((request.max_new_tokens() for request in sample.requests), default=0)
        for sample in samples
    ]
    return SimTask(
        name=inputs.task_names[number],
        prompt_tokens=[
            round(
                sum(request.prompt_tokens() for request in sample.requests)
                / max(1, len(sample.requests))
            )
            for sample in samples
        ],
        new_tokens=[
            round(priors.tokens(number, sample.sample, limit).q50) if limit else 0
            for sample, limit in zip(samples, limits, strict=True)
        ],
        max_new_tokens=max(limits, default=0),
        metric_s=[
            priors.metric_s(number, sample.sample) if sample.metric_key else 0.0
            for sample in samples
        ],
        choices=max(
            1, round(sum(len(sample.requests) for sample in samples) / max(1, len(samples)))
        ),
    )
