"""What an evaluation would take: its requests as the harness builds them, their costs as the ledger has them.

The same policy that would run it is run under virtual time, on the engines as an earlier evaluation measured them. What
is known of no earlier evaluation is assumed, and said in a note.
"""

import io
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import psutil

from holdfast.cluster.local import core_count
from holdfast.core import words
from holdfast.core.errors import BadUse
from holdfast.core.ledger import Ledger
from holdfast.core.paths import EvaluationPaths, holdfast_home
from holdfast.evaluate.coordinator.config import CoordinatorFiles, task_names
from holdfast.evaluate.engines.fit import fits
from holdfast.evaluate.harness.counting import count_requests
from holdfast.evaluate.policy.outlook import Plan
from holdfast.evaluate.policy.priors import Priors, TaskHistory
from holdfast.evaluate.run.actual_cost import fetch_bytes_per_s
from holdfast.evaluate.run.ledger import history_of, opened_ledger
from holdfast.evaluate.run.node_agent import gpu_count
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.run.plan import Planned, describe_model
from holdfast.evaluate.types.engine import Curve, engines_on, uses_gpus
from holdfast.evaluate.types.evaluation import BoundTerm, Evaluation
from holdfast.evaluate.types.harness import ModelFacts, SampleRequests
from holdfast.evaluate.types.suite import Suite, load_suite
from holdfast.evaluate.types.timeline import read_timeline
from holdfast.simulate.evaluate import simulate
from holdfast.simulate.workload import SimCluster, SimModel, SimTask, Workload

_DEFAULT_START_S = 10.0
_FREE_BATCH = 32  # of `engines.transformers`, which needs torch


def plan(
    suite: Suite | str | Sequence[str],
    model: str,
    *,
    options: EvaluateOptions | None = None,
    device_memory_gib: float | None = None,
) -> Plan:
    """Predict an evaluation; nothing is run but the harness's own preparation, on this machine.

    Args:
        suite: as `holdfast.evaluate.evaluate`.
        model: likewise.
        options: likewise; how many nodes there would be, and engines on each: as told, else as many as a live node
            starts with this machine's GPUs, or with those that a cluster would be asked for.
        device_memory_gib: of each GPU it would run on, or of a node for engines on CPUs; None: this machine's.

    Raises:
        BadUse: suite, model or options are wrong, or the model does not fit the devices.
    """
    options = options or EvaluateOptions()
    if device_memory_gib is not None and not 0 < device_memory_gib < float("inf"):
        raise BadUse(
            f"device_memory_gib is {device_memory_gib:g}. Give the memory of a device in GiB, above 0."
        )
    chosen = options.applied_to(suite if isinstance(suite, Suite) else load_suite(suite))
    planned = Planned(
        suite=chosen, model=model, manifest=describe_model(model, options), options=options
    )
    paths = EvaluationPaths(options.home or holdfast_home(), "plan")
    with opened_ledger(options, paths) as ledger:
        history, known = history_of(ledger, planned), _measured(ledger, planned)
    engines_per_node, counted = _engines_per_node(planned)
    fit = _fit(planned, device_memory_gib)
    with tempfile.TemporaryDirectory(prefix="holdfast-plan-") as folder:
        facts = _facts(planned, Path(folder))
        with _quiet():
            samples = count_requests(chosen, facts)
    notes = [
        _history_note(history, task_names(chosen), samples),
        known.note,
        counted,
        planned.note_of_devices,
        fit,
    ]
    if options.judge is not None:
        notes.append("The judge is left out: which samples ask it is known when they do.")
    manifest = planned.manifest
    workload = Workload(
        tasks=tuple(
            _task(name, number, asked, history, chosen)
            for number, (name, asked) in enumerate(zip(task_names(chosen), samples, strict=True))
        ),
        models=(
            SimModel(
                size_bytes=sum(chunk.size_bytes for chunk in manifest.chunks) if manifest else 0.0
            ),
        ),
    )
    cluster = SimCluster(
        nodes=options.nodes,
        engines_per_node=engines_per_node,
        metric_slots=options.metric_slots or core_count(),
        curve=known.curve,
        engine_start_s=known.start_s,
        store_bytes_per_s=known.bytes_per_s,
        node_bytes_per_s=known.bytes_per_s,
    )
    outcome = simulate(workload, cluster, history=history, record=True)
    evaluation = Evaluation(
        id="plan",
        suite=chosen.name,
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Harnesses tell much of what they load, and show bars of their own."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What earlier evaluations measured of the engines, and of the rate at which weights come."""

    curve: Curve
    start_s: float
    bytes_per_s: float
    note: str


def _measured(ledger: Ledger, planned: Planned) -> _Measured:
    """The newest evaluation of the same family and mode that measured an engine; else an assumption."""
    assumed = SimCluster()
    for record in ledger.evaluations(family=planned.family, mode=planned.options.engine.mode):
        folder = Path(record.folder)
        curve = CoordinatorFiles(folder).curve
        if curve.exists():
            timeline = read_timeline(folder / "timeline.jsonl")
            loads = [span.t1 - span.t0 for span in timeline.engines if span.what == "load"]
            return _Measured(
                curve=msgspec.json.decode(curve.read_bytes(), type=Curve),
                start_s=median(loads) if loads else _DEFAULT_START_S,
                bytes_per_s=fetch_bytes_per_s(timeline) or assumed.store_bytes_per_s,
                note=f"Engines as evaluation {record.evaluation_id} measured them.",
            )
    batch = 1 if planned.options.engine.mode == "exact" else planned.options.engine.max_batch or 64
    return _Measured(
        curve=msgspec.structs.replace(assumed.curve, max_batch=batch),
        start_s=_DEFAULT_START_S,
        bytes_per_s=assumed.store_bytes_per_s,
        note=(
            f"No evaluation of this family ({planned.family}) was measured yet: engines are assumed to read "
            f"{assumed.curve.prefill_tokens_per_s:,.0f} tokens a second and to start in {_DEFAULT_START_S:.0f} s."
        ),
    )


def _history_note(
    history: Sequence[TaskHistory],
    names: Sequence[str],
    samples: Sequence[Sequence[SampleRequests]],
) -> str:
    """How much of what has to be predicted is known: lengths of what is generated, and times of metrics."""
    unsure = {
        name
        for name, asked in zip(names, samples, strict=True)
        if any(
            one.metric_key or any(request.max_new_tokens() for request in one.requests)
            for one in asked
        )
    }
    if not unsure:
        return "All entries read prompts alone, whose lengths are known."
    rest = len(names) - len(unsure)
    others = (
        f" {words.plainly(rest, 'entry reads', 'entries read')} prompts alone, whose lengths are known."
        if rest
        else ""
    )
    known = unsure & {task.task for task in history}
    if not known:
        return f"Nothing is known of these tasks yet: lengths are guessed from the limits.{others}"
    which = (
        "every entry that generates"
        if known == unsure
        else f"{len(known)} of {len(unsure)} entries that generate"
    )
    return f"Lengths as the last evaluation of this family had them, for {which}.{others}"


def _engines_per_node(planned: Planned) -> tuple[int, str]:
    """How many engines a live node would start (`coordinator.orders`), and what that goes by, in a sentence."""
    options, spec = planned.options, planned.options.engine
    gpus = (
        (gpu_count() if options.on == "local" else planned.gpus_per_node) if uses_gpus(spec) else 0
    )
    engines = engines_on(gpus, spec, options.engines_per_node)
    if options.engines_per_node:
        return engines, ""
    how_many = words.plainly(engines, "engine")
    if options.on == "local":
        return (
            engines,
            f"{how_many} on each node, by this machine's {words.plainly(gpus, 'GPU')}."
            if gpus
            else "",
        )
    if gpus:
        return (
            engines,
            f"{how_many} on each node, for the {words.plainly(gpus, 'GPU')} that it is asked for.",
        )
    return (
        engines,
        f"{how_many} on each node is assumed: what its GPUs allow is not known. Give --engines-per-node.",
    )


def _fit(planned: Planned, told_gib: float | None) -> str:
    """How the model fits the devices it would run on.

    Raises:
        BadUse: it does not.
    """
    manifest, options = planned.manifest, planned.options
    if manifest is None:  # its engines have it themselves
        return ""
    memory = _memory(planned, told_gib)
    if memory is None:
        return "Whether the model fits is not known: give --device-memory-gib, of what it would run on."
    spec = msgspec.structs.replace(options.engine, device=memory.device)
    source = Path(manifest.source)
    config = (
        msgspec.json.decode(manifest.hf_config["config.json"]) if manifest.form == "dcp" else source
    )
    fit = fits(config, spec, memory.size_bytes)
    batch = spec.max_batch or _FREE_BATCH
    too_many = spec.kind == "hf" and spec.mode == "free" and batch > fit.batch
    advice = (
        f" A batch may have {batch}: give --max-batch {fit.batch} if they become that long."
        if too_many
        else ""
    )
    return (
        f"{fit.weights_bytes / 2**30:.1f} GiB of weights in {spec.tensor_parallel} x {memory.size_bytes / 2**30:.1f} "
        f"GiB{memory.whose}: room for {fit.batch} sequences of {fit.max_length} tokens.{advice}"
    )


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """What one device has, or one engine may have of a node's; `whose` says it in words."""

    device: str
    size_bytes: int
    whose: str


def _memory(planned: Planned, told_gib: float | None) -> _Memory | None:
    """Of the devices it would run on: as told, else this machine's; None where neither says it."""
    options, spec = planned.options, planned.options.engine
    told_bytes = None if told_gib is None else int(told_gib * 2**30)
    on_cpu = spec.device == "cpu"
    if told_bytes is None and not spec.device and spec.kind != "vllm" and options.on == "local":
        on_cpu = not _has_gpu()
    if on_cpu:
        engines, _ = _engines_per_node(planned)
        if told_bytes is None:
            if options.on != "local":
                return None
            told_bytes = (
                psutil.virtual_memory().total // options.nodes
            )  # all of them on this machine
        whose = (
            " of a node's memory" if engines == 1 else f", a node's memory among {engines} engines"
        )
        return _Memory(device="cpu", size_bytes=told_bytes // engines, whose=whose)
    if told_bytes is None:
        if options.on != "local" or not _has_gpu():
            return None
        import torch

        told_bytes = torch.cuda.get_device_properties(0).total_memory
    return _Memory(device="cuda", size_bytes=told_bytes, whose=" of a GPU")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _facts(planned: Planned, folder: Path) -> ModelFacts:
    manifest, spec = planned.manifest, planned.options.engine
    tokenizer = str(spec.options.get("tokenizer", ""))
    if manifest is not None and manifest.form == "dcp":
        for name, content in manifest.hf_config.items():
            (folder / name).write_bytes(content)
        tokenizer = str(folder)
    elif manifest is not None:
        tokenizer = manifest.source
        if not Path(tokenizer).is_dir():
            raise BadUse(
                f"{tokenizer} is not on this machine. Plan with a folder that has its config and tokenizer."
            )
    return ModelFacts(
        model=0,
        name=planned.model,
        tokenizer=tokenizer,
        max_length=spec.max_length,
        takes_text=not tokenizer,
    )


def _task(
    name: str,
    number: int,
    samples: Sequence[SampleRequests],
    history: Sequence[TaskHistory],
    suite: Suite,
) -> SimTask:
    """A task as it is expected to be: what is predicted is taken for true."""
    priors = Priors.from_history(history, task_names(suite))
    limits = [
        max((request.max_new_tokens() for request in sample.requests), default=0)
        for sample in samples
    ]
    return SimTask(
        name=name,
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
