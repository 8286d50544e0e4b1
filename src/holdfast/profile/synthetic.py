"""Write recordings of jobs that never ran: 123B pretraining in two layouts, and an evaluation.

All times are computed from `formulas`, from `schedule` and from the constants of `Cluster`. Nothing
is measured, and every series has the source `synthetic`. The jobs follow figures 10 to 13 of the
study of the Acme datacenter (arXiv:2403.07648):

- 123B on 2,048 A100 GPUs under 3D parallelism (4 stages, 8-way tensor parallel)
- the same model under hierarchical ZeRO (shards in groups of 64, recompute)
- an evaluation of a 7B model on HumanEval
"""

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.profile.formulas.flops import flops_per_token, hardware_flops_per_token
from holdfast.profile.formulas.memory import StageMemory, stage_memory, stage_parameters
from holdfast.profile.formulas.shape import Layout, Model
from holdfast.profile.job import NAME, Gpu, Job
from holdfast.profile.metrics import SYNTHETIC
from holdfast.profile.recording import SeriesId
from holdfast.profile.schedule import Pass, one_f_one_b
from holdfast.profile.writing import RecordingWriter

BEGIN_NS: Final = 1_700_000_000_000_000_000
"""Unix time of the first step in ns; chosen arbitrarily."""
GPUS_A_NODE: Final = 8
RECORDED_RANKS: Final = 4
"""The number of recorded ranks: one GPU of each pipeline stage, since the others do the same."""

MODEL_123B: Final = Model(layers=96, hidden=10240, heads=80, vocabulary=103_168)
"""A shape with 122.9 billion parameters. It is our choice, since the study prints no shape."""
THREE_D: Final = Layout(
    sequence=4096,
    microbatches=32,
    data=64,
    tensor=8,
    pipeline=4,
    sequence_parallel=True,
    recompute="selective",
    zero=1,
    fp32_gradients=True,
)
HIERARCHICAL_ZERO: Final = Layout(sequence=4096, data=2048, zero=3, shards=64, recompute="full")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hold the constants of the timing model. All are chosen, and none is measured."""

    gpu: str = "NVIDIA A100-SXM4-80GB"
    peak_tflops: float = 312.0
    sliced_efficiency: float = 0.60
    """Share of the peak that kernels reach on one eighth of a layer."""
    whole_efficiency: float = 0.71
    """Share of the peak that kernels reach on a whole layer.

    This value makes a step 16 % shorter than under 3D parallelism, as in the study.
    """
    nvlink_bytes_s: float = 230e9
    """Bus bandwidth of a collective within a node, for each GPU."""
    network_bytes_s: float = 12.5e9
    """Network bandwidth for each GPU: four 200 Gb/s links for eight GPUs."""
    send_s: float = 0.005
    """Seconds to send a stage's output to the next stage."""
    data_s: float = 0.05
    optimizer_s: float = 0.1
    computing: float = 88.0
    """SM activity during computation, in %."""
    reducing: float = 22.0
    """SM activity during collectives within a node, in %: 24 of 108 SMs."""
    exchanging: float = 7.4
    """SM activity during collectives between nodes, in %: 8 of 108 SMs."""
    waiting: float = 1.9
    """SM activity while a receive waits for data, in %: 2 of 108 SMs."""
    idle_w: float = 90.0
    busy_w: float = 400.0


@dataclass
class _Track:
    """The phases of one rank, with the SM activity during each, and the rank's memory use."""

    rank: int
    spans: list[tuple[str, float, float, int, float]] = field(default_factory=list)
    """For each phase: name, start and end in seconds, step, SM activity in %."""
    memory: list[tuple[float, int, float]] = field(default_factory=list)
    """For each sample: time in seconds, step, allocated bytes."""


def write_three_d(folder: Path, *, steps: int = 4, cluster: Cluster | None = None) -> Job:
    """Write a recording of 123B pretraining under 3D parallelism, with one GPU of each stage.

    Args:
        folder: the folder of the recording.
        steps: the number of optimizer steps.
        cluster: the constants of the timing model; None for the defaults.
    """
    cluster = cluster or Cluster()
    model, layout = MODEL_123B, THREE_D
    per_token = flops_per_token(model, layout.sequence, causal=True)
    tokens = layout.sequence * layout.microbatch
    compute_s = (
        per_token
        * tokens
        / (layout.pipeline * layout.tensor)
        / (cluster.peak_tflops * 1e12 * cluster.sliced_efficiency)
    )
    # Each layer does two all-reduces in each direction (arXiv:1909.08053, section 3). A ring
    # all-reduce sends 2 (t - 1)/t of the bytes over each link.
    all_reduce_s = (
        (2 * (layout.tensor - 1) / layout.tensor * 2 * tokens * model.hidden)
        / cluster.nvlink_bytes_s
    )  # fmt: skip
    reduce_s = 2 * model.layers / layout.pipeline * all_reduce_s
    forward_s, backward_s = compute_s / 3 + reduce_s, compute_s * 2 / 3 + reduce_s
    passes = one_f_one_b(
        layout.pipeline,
        layout.microbatches,
        forward_s=forward_s,
        backward_s=backward_s,
        send_s=cluster.send_s,
    )
    activity = {
        "forward": _mixed((compute_s / 3, cluster.computing), (reduce_s, cluster.reducing)),
        "backward": _mixed((compute_s * 2 / 3, cluster.computing), (reduce_s, cluster.reducing)),
    }
    ranks_a_stage = layout.gpus // layout.pipeline
    tracks = [_Track(stage * ranks_a_stage) for stage in range(layout.pipeline)]
    start_s = 0.0
    for step in range(steps):
        ends_s = []
        for stage, track in enumerate(tracks):
            own = [one for one in passes if one.stage == stage]
            begin_s = start_s + cluster.data_s
            track.spans.append(("data", start_s, begin_s, step, cluster.waiting))
            track.spans += [
                (one.kind, begin_s + one.start_s, begin_s + one.end_s, step, activity[one.kind])
                for one in own
            ]
            track.memory += _pipeline_memory(own, stage_memory(model, layout, stage), begin_s, step)
            # fp32 gradients are reduced and bf16 weights gathered over the data-parallel ranks.
            share = (layout.data - 1) / layout.data
            exchange_s = (
                (4 + 2) * stage_parameters(model, layout, stage) * share / cluster.network_bytes_s
            )
            ends_s.append((begin_s + max(one.end_s for one in own), exchange_s))
        end_s = max(end + exchange for end, exchange in ends_s)
        for track, (last_s, _) in zip(tracks, ends_s, strict=True):
            # The norm of the gradients covers all stages, so each stage waits for the slowest.
            track.spans.append(("communication", last_s, end_s, step, cluster.exchanging))
            track.spans.append(
                ("optimizer", end_s, end_s + cluster.optimizer_s, step, cluster.computing)
            )
        start_s = end_s + cluster.optimizer_s
    job = Job(model=model, layout=layout, gpu=Gpu(name=cluster.gpu))
    _write(folder, job, tracks, cluster, interval_s=0.1)
    return job


def write_hierarchical_zero(folder: Path, *, steps: int = 4, cluster: Cluster | None = None) -> Job:
    """Write a recording of 123B pretraining under hierarchical ZeRO; see `write_three_d`."""
    cluster = cluster or Cluster()
    model, layout = MODEL_123B, HIERARCHICAL_ZERO
    tokens = layout.sequence * layout.microbatch
    rate = cluster.peak_tflops * 1e12 * cluster.whole_efficiency
    model_flops = flops_per_token(model, layout.sequence, causal=True) * tokens
    hardware_flops = tokens * hardware_flops_per_token(
        model, layout.sequence, causal=True, recompute=layout.recompute
    )
    forward_s = model_flops / 3 / rate
    backward_s = (hardware_flops - model_flops / 3) / rate
    # Each node gathers the seven eighths of a layer that other nodes hold. Every gather except the
    # first overlaps with the computation of the previous layer.
    gather_s = (
        (2 * model.layer_parameters * (GPUS_A_NODE - 1) / GPUS_A_NODE)
        / (GPUS_A_NODE * cluster.network_bytes_s)
    )  # fmt: skip
    groups = layout.data // layout.shard_count
    shard_bytes = 2 * model.parameters / layout.shard_count
    exchange_s = 2 * (groups - 1) / groups * shard_bytes / cluster.network_bytes_s
    memory = stage_memory(model, layout, 0)
    tracks = [_Track(number * layout.gpus // RECORDED_RANKS) for number in range(RECORDED_RANKS)]
    start_s = 0.0
    for step in range(steps):
        at_s = start_s
        timeline = (
            ("data", cluster.data_s, cluster.waiting),
            ("communication", gather_s, cluster.exchanging),
            ("forward", forward_s, cluster.computing),
            ("communication", gather_s, cluster.exchanging),
            ("backward", backward_s, cluster.computing),
            ("communication", exchange_s, cluster.exchanging),
            ("optimizer", cluster.optimizer_s, cluster.computing),
        )
        for phase, seconds, active in timeline:
            for track in tracks:
                track.spans.append((phase, at_s, at_s + seconds, step, active))
                if phase in ("forward", "backward"):
                    track.memory += _layers_memory(phase, at_s, seconds, step, memory)
            at_s += seconds
        start_s = at_s
    job = Job(model=model, layout=layout, gpu=Gpu(name=cluster.gpu))
    _write(folder, job, tracks, cluster, interval_s=0.1)
    return job


def write_evaluation(folder: Path, *, cluster: Cluster | None = None) -> None:
    """Write a synthetic recording of an evaluation, from the numbers of the NSDI'24 study.

    The study shows an evaluation of a 7B model on HumanEval in figure 13.

    Loading and preprocessing take 29.5 % of the time. The correctness tests take 42 s on CPUs,
    which is 19.0 %. The rest is inference: 20 batches of one prefill and one decode each.
    """
    cluster = cluster or Cluster()
    metric_s = 42.0
    total_s = metric_s / 0.190
    before_s = 0.295 * total_s
    batch_s = (total_s - before_s - metric_s) / 20
    timeline = [("load", 0.7 * before_s, 0.0), ("preprocess", 0.3 * before_s, 0.0)]
    for _ in range(20):
        timeline += [("prefill", 0.1 * batch_s, 75.0), ("decode", 0.9 * batch_s, 38.0)]
    timeline.append(("metric", metric_s, 0.0))
    track = _Track(0)
    at_s = 0.0
    for phase, seconds, active in timeline:
        track.spans.append((phase, at_s, at_s + seconds, 0, active))
        at_s += seconds
    _write(folder, None, [track], cluster, interval_s=1.0)


def _mixed(*parts: tuple[float, float]) -> float:
    """Return the average of pairs (seconds, activity), weighted by the seconds."""
    return sum(seconds * active for seconds, active in parts) / sum(seconds for seconds, _ in parts)


def _pipeline_memory(
    passes: Sequence[Pass], memory: StageMemory, begin_s: float, step: int
) -> list[tuple[float, int, float]]:
    """Return the allocated bytes after each pass of a pipeline stage.

    A forward pass keeps its activations, and the matching backward pass frees them.
    """
    fixed = memory.weights + memory.gradients + memory.optimizer
    each = memory.activations / memory.in_flight
    rows, held = [(begin_s, step, fixed)], 0
    for one in passes:
        held += 1 if one.kind == "forward" else -1
        logits = memory.output if one.kind == "forward" else 0.0
        rows.append((begin_s + one.end_s, step, fixed + held * each + logits))
    return rows


def _layers_memory(
    phase: str, at_s: float, seconds: float, step: int, memory: StageMemory, points: int = 12
) -> list[tuple[float, int, float]]:
    """Return the allocated bytes while the layers' activations are kept or freed one by one."""
    fixed = memory.weights + memory.gradients + memory.optimizer + memory.gathered
    rows = []
    for point in range(points + 1):
        share = point / points if phase == "forward" else 1 - point / points
        logits = memory.output if share == 1 else 0.0
        rows.append(
            (at_s + seconds * point / points, step, fixed + share * memory.activations + logits)
        )
    return rows


def _write(
    folder: Path, job: Job | None, tracks: Iterable[_Track], cluster: Cluster, *, interval_s: float
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if job is not None:
        job.write(folder / NAME)

    def clocks() -> tuple[int, int]:
        return 0, BEGIN_NS

    for track in tracks:
        node = f"node-{track.rank // GPUS_A_NODE:03d}"
        with RecordingWriter(folder, node=node, rank=track.rank, clocks=clocks) as writer:
            for step in sorted({step for *_, step, _ in track.spans}):
                rows = [
                    (phase, round(start_s * 1e9), round(end_s * 1e9))
                    for phase, start_s, end_s, of, _ in track.spans
                    if of == step
                ]
                writer.spans(step, rows)
            for at_s, step, allocated in track.memory:
                writer.memory(
                    round(at_s * 1e9),
                    step,
                    allocated_bytes=round(allocated),
                    reserved_bytes=round(max(one[2] for one in track.memory) * 1.04),
                    peak_bytes=round(allocated),
                )
        with RecordingWriter(folder, node=node, clocks=clocks) as writer:
            _write_samples(writer, track, cluster, interval_s)


def _write_samples(
    writer: RecordingWriter, track: _Track, cluster: Cluster, interval_s: float
) -> None:
    def series(metric: str) -> SeriesId:
        return SeriesId(metric, SYNTHETIC, device=0, rank=track.rank, interval_s=interval_s)

    spans = sorted(track.spans, key=lambda one: one[1])
    last_s = max(end_s for _, _, end_s, *_ in spans)
    joules, first = 0.0, 0
    for number in range(1, int(last_s / interval_s) + 1):
        start_s, end_s = (number - 1) * interval_s, number * interval_s
        while spans[first][2] <= start_s:
            first += 1
        covered_s = active = 0.0
        for _, from_s, to_s, _, level in spans[first:]:
            if from_s >= end_s:
                break
            seconds = max(0.0, min(to_s, end_s) - max(from_s, start_s))
            covered_s += seconds
            active += seconds * level
        activity = (active + max(0.0, interval_s - covered_s) * cluster.waiting) / interval_s
        watts = cluster.idle_w + (cluster.busy_w - cluster.idle_w) * activity / 100
        joules += watts * interval_s
        writer.sample(
            round(end_s * 1e9),
            {
                series("gpu_sm_active"): activity,
                series("gpu_power"): watts,
                series("gpu_energy"): joules,
            },
        )


def main() -> None:
    """Write all three recordings into subfolders of the folder given on the command line."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m holdfast.profile.synthetic FOLDER")
    folder = Path(sys.argv[1])
    cases: dict[str, Callable[[Path], object]] = {
        "3d": write_three_d,
        "zero": write_hierarchical_zero,
        "evaluation": write_evaluation,
    }
    for name, write in cases.items():
        # Remove an earlier recording, because writing appends to a recording.
        shutil.rmtree(folder / name, ignore_errors=True)
        write(folder / name)


if __name__ == "__main__":
    main()
