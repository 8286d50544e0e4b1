"""Collect the inputs from which the duration of an evaluation is predicted before it runs.

The inputs are the harness's requests, and measured costs from the ledger. `holdfast.simulate.plan`
makes the prediction.
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

from holdfast.core import words
from holdfast.core.errors import BadUse
from holdfast.core.ledger import Ledger
from holdfast.core.paths import EvaluationPaths, holdfast_home
from holdfast.evaluate.coordinator.config import CoordinatorFiles, task_names
from holdfast.evaluate.engines.fit import fits
from holdfast.evaluate.harness.counting import count_requests
from holdfast.evaluate.policy.priors import TaskHistory
from holdfast.evaluate.run.actual_cost import fetch_bytes_per_s
from holdfast.evaluate.run.ledger import history_of, opened_ledger
from holdfast.evaluate.run.node_agent import gpu_count
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.run.plan import Planned, describe_model
from holdfast.evaluate.types.engine import Curve, engines_on, uses_gpus
from holdfast.evaluate.types.harness import ModelFacts, SampleRequests
from holdfast.evaluate.types.suite import Suite, load_suite
from holdfast.evaluate.types.timeline import read_timeline

_FREE_BATCH = 32  # the default of `engines.hf`, which imports torch


@dataclass(frozen=True, kw_only=True)
class MeasuredEngines:
    """Hold the measurements of an earlier evaluation's engines.

    Attributes:
        evaluation_id: the id of the earlier evaluation.
        curve: the cost curve of one engine.
        start_s: the seconds for an engine to start and load the weights; None if not recorded.
        bytes_per_s: the rate at which a node received the weights; 0 if no node fetched any.
    """

    evaluation_id: str
    curve: Curve
    start_s: float | None
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Hold the inputs of a prediction.

    Attributes:
        suite: the suite with the options applied.
        options: the options of the run.
        family: the family of models whose recorded costs are used.
        task_names: the names of the suite's entries in the history.
        samples: for each entry, the samples with their requests.
        history: the recorded costs of the entries' samples.
        model_bytes: the size of the weights; 0 if the engines already have the weights.
        engines_per_node: the number of engines on each node.
        measured: measurements of engines from the newest evaluation of the same family and mode
            that has any; None if there is none.
        history_note: a sentence on how complete the history is.
        device_notes: sentences on the assumed devices, and on how the model fits them.
    """

    suite: Suite
    options: EvaluateOptions
    family: str
    task_names: Sequence[str]
    samples: Sequence[Sequence[SampleRequests]]
    history: Sequence[TaskHistory]
    model_bytes: int
    engines_per_node: int
    measured: MeasuredEngines | None
    history_note: str
    device_notes: tuple[str, ...]


def plan_inputs(
    suite: Suite | str | Sequence[str],
    model: str,
    *,
    options: EvaluateOptions,
    device_memory_gib: float | None = None,
) -> PlanInputs:
    """Collect the inputs of a prediction.

    The harness prepares its requests on this machine; nothing else is run.

    Args:
        suite: as for `holdfast.evaluate.evaluate`.
        model: as for `holdfast.evaluate.evaluate`.
        options: as for `holdfast.evaluate.evaluate`.
        device_memory_gib: the memory in GiB of each GPU of the run, or of a node if engines run on
            CPUs; None for the memory of this machine's devices.

    Raises:
        BadUse: the suite, model or options are wrong, or the model does not fit the devices.
    """
    if device_memory_gib is not None and not 0 < device_memory_gib < float("inf"):
        raise BadUse(
            f"device_memory_gib is {device_memory_gib:g}. Give the memory of a device in GiB, above 0."
        )
    chosen = options.applied_to(suite if isinstance(suite, Suite) else load_suite(suite))
    manifest = describe_model(model, options)
    planned = Planned(suite=chosen, model=model, manifest=manifest, options=options)
    paths = EvaluationPaths(options.home or holdfast_home(), "plan")
    with opened_ledger(options, paths) as ledger:
        history, measured = history_of(ledger, planned), _measured(ledger, planned)
    engines_per_node, counted = engines_per_node_of(planned)
    fit = fit_of(planned, device_memory_gib)
    with tempfile.TemporaryDirectory(prefix="holdfast-plan-") as folder:
        facts = _facts(planned, Path(folder))
        with _quiet():
            samples = count_requests(chosen, facts)
    names = task_names(chosen)
    return PlanInputs(
        suite=chosen,
        options=options,
        family=planned.family,
        task_names=names,
        samples=samples,
        history=history,
        model_bytes=sum(chunk.size_bytes for chunk in manifest.chunks) if manifest else 0,
        engines_per_node=engines_per_node,
        measured=measured,
        history_note=history_note(history, names, samples),
        device_notes=(counted, planned.note_of_devices, fit),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the logs and progress bars of harnesses during a `with` block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _measured(ledger: Ledger, planned: Planned) -> MeasuredEngines | None:
    for record in ledger.evaluations(family=planned.family, mode=planned.options.engine.mode):
        folder = Path(record.folder)
        curve = CoordinatorFiles(folder).curve
        if curve.exists():
            timeline = read_timeline(folder / "timeline.jsonl")
            loads = [span.t1 - span.t0 for span in timeline.engines if span.what == "load"]
            return MeasuredEngines(
                evaluation_id=record.evaluation_id,
                curve=msgspec.json.decode(curve.read_bytes(), type=Curve),
                start_s=median(loads) if loads else None,
                bytes_per_s=fetch_bytes_per_s(timeline),
            )
    return None


def history_note(
    history: Sequence[TaskHistory],
    names: Sequence[str],
    samples: Sequence[Sequence[SampleRequests]],
) -> str:
    """Return a sentence on how complete the recorded history of the suite's tasks is.

    The prediction uses the recorded lengths of answers and times of metrics.
    """
    unsure = {
        name
        for name, entry_samples in zip(names, samples, strict=True)
        if any(
            one.metric_key or any(request.max_new_tokens() for request in one.requests)
            for one in entry_samples
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
        return f"These tasks were never measured: lengths are estimated from their limits.{others}"
    which = (
        "every entry that generates"
        if known == unsure
        else f"{len(known)} of {len(unsure)} entries that generate"
    )
    return f"Lengths as the last evaluation of this family had them, for {which}.{others}"


def engines_per_node_of(planned: Planned) -> tuple[int, str]:
    """Return the number of engines that would run on a node, and the reason as a sentence.

    The number is computed as in `coordinator.engine_slots`.
    """
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
            f"{how_many} on each node, for the {words.plainly(gpus, 'GPU')} that were requested.",
        )
    return (
        engines,
        f"{how_many} on each node is assumed, since its GPUs are unknown. Give --engines-per-node.",
    )


def fit_of(planned: Planned, told_gib: float | None) -> str:
    """Return a sentence on how the model fits the devices of the run.

    `told_gib` is the memory in GiB that the user stated, if any.

    Raises:
        BadUse: the model does not fit.
    """
    manifest, options = planned.manifest, planned.options
    if manifest is None:  # the engines already have the weights
        return ""
    memory = _memory(planned, told_gib)
    if memory is None:
        return "Whether the model fits is not known: give --device-memory-gib, of one device."
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
    """The memory of one GPU, or one engine's share of a node's memory.

    `whose` is a phrase that names the owner of the memory.
    """

    device: str
    size_bytes: int
    whose: str


def _memory(planned: Planned, told_gib: float | None) -> _Memory | None:
    """Return the memory of the run's devices.

    This is the memory that the user stated; without a statement, the memory of this machine's
    devices, if the run is on this machine; otherwise None.
    """
    options, spec = planned.options, planned.options.engine
    stated_bytes = None if told_gib is None else int(told_gib * 2**30)
    on_cpu = spec.device == "cpu"
    if stated_bytes is None and not spec.device and spec.kind != "vllm" and options.on == "local":
        on_cpu = not _has_gpu()
    if on_cpu:
        engines, _ = engines_per_node_of(planned)
        if stated_bytes is None:
            if options.on != "local":
                return None
            # All nodes are on this machine.
            stated_bytes = psutil.virtual_memory().total // options.nodes
        whose = (
            " of a node's memory" if engines == 1 else f", a node's memory among {engines} engines"
        )
        return _Memory(device="cpu", size_bytes=stated_bytes // engines, whose=whose)
    if stated_bytes is None:
        if options.on != "local" or not _has_gpu():
            return None
        import torch

        stated_bytes = torch.cuda.get_device_properties(0).total_memory
    return _Memory(device="cuda", size_bytes=stated_bytes, whose=" of a GPU")


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
