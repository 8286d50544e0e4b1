"""Summarize a recording: speed, MFU, phases, idle valleys, memory beside theory, energy, gaps."""

import bisect
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from holdfast.core import words
from holdfast.core.errors import BadUse
from holdfast.profile.columns import Columns, column, fields
from holdfast.profile.formulas.flops import (
    Peak,
    flops_per_token,
    hardware_flops_per_token,
    peak_of,
    utilization,
)
from holdfast.profile.formulas.memory import StageMemory, stage_memory
from holdfast.profile.iterations import iterations_of
from holdfast.profile.job import Job
from holdfast.profile.metrics import EVALUATION_PHASES, STEP_PHASE, SYNTHETIC, TRAINING_PHASES
from holdfast.profile.recording import Recording, Series, Span
from holdfast.profile.valleys import (
    SHARE_OF_MEDIAN,
    Stretch,
    Valleys,
    find_valleys,
    local_ranks,
    phases_of_rank,
    ranks_of,
)

FORMULA: Final = "6·N + 12·L·H·Q·T FLOPs a token; causal: the second term counts half"
UNCOVERED: Final = "between phases"


@dataclass(frozen=True, slots=True)
class Step:
    """Hold the start and the end of one execution of a training step on the reference rank.

    Times are Unix times in nanoseconds. A step that ran twice, for example after a restart, has two
    objects.
    """

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Hold the speed of training.

    Attributes:
        steps: the number of steps that were recorded.
        median_step_s: the median time in seconds from the start of one step to the start of the
            next.
        tokens_a_step: tokens per step; None if the layout of the job is unknown.
        tokens_per_s: tokens per second of the whole job, computed from the median step; None if the
            layout of the job is unknown.
        source: `phases`, `log`, or the metric whose rise and fall shows the steps.
    """

    steps: int
    median_step_s: float
    tokens_a_step: int | None
    tokens_per_s: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """Hold MFU and HFU as shares from 0 to 1, and the peak that they are based on.

    `full` counts attention between all pairs of tokens, `causal` counts half of it.
    """

    peak: Peak
    mfu_full: float
    mfu_causal: float
    hfu_full: float
    hfu_causal: float
    tokens_per_s_per_gpu: float


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Hold the time of one phase, averaged over the ranks.

    Attributes:
        seconds: seconds in the phase, without the seconds in phases inside it.
        share: share of the recorded time.
        idle_share: share of the phase's sampled time in which the device was idle; None if no
            utilisation was sampled.
    """

    name: str
    seconds: float
    share: float
    idle_share: float | None


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Hold the peak memory of one rank's PyTorch, and the theory for its pipeline stage."""

    rank: int
    stage: int | None
    peak_bytes: int
    reserved_bytes: int
    theory: StageMemory | None

    @property
    def residual_bytes(self) -> float | None:
        """Return the measured peak minus the theoretical total; None if there is no theory."""
        return None if self.theory is None else self.peak_bytes - self.theory.total


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Hold the energy that the recorded GPUs used.

    Attributes:
        joules_a_step: joules per step of all recorded GPUs; None if no step was recorded.
        source: a description of the source: the GPU's energy counter, or power times the sample
            interval.
    """

    joules: float
    joules_a_step: float | None
    gpus: int
    source: str


@dataclass(frozen=True, kw_only=True)
class ProfileSummary:
    """Hold all figures that a report shows about one recording.

    A figure that cannot be computed is None or empty, and `missing` gives the reasons.
    """

    name: str
    recording: Recording
    job: Job | None
    start_ns: int
    end_ns: int
    steps: Sequence[Step]
    speed: Speed | None
    utilization: Utilization | None
    phases: tuple[Phase, ...]
    valleys: Valleys
    memory: tuple[RankMemory, ...]
    energy: Energy | None
    missing: tuple[str, ...]

    @property
    def wall_s(self) -> float:
        """Return the length of the recording in seconds."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def evaluation(self) -> bool:
        """Return True if the recording is of an evaluation and not of training."""
        names = {phase.name for phase in self.phases}
        return bool(names & set(EVALUATION_PHASES)) and not names & set(TRAINING_PHASES)

    @property
    def idle_share(self) -> float | None:
        """Return the share of the devices' sampled time that was spent in idle valleys."""
        if not self.valleys.watched_s:
            return None
        return sum(self.valleys.seconds_by_cause().values()) / self.valleys.watched_s


def summarize(
    recording: Recording, *, name: str, job: Job | None = None, peak_tflops: float | None = None
) -> ProfileSummary:
    """Summarize a recording.

    Args:
        recording: the recording of a run.
        name: the name of the run.
        job: the model, its layout and the GPU. Without them, the summary has no tokens, no MFU and
            no theoretical memory.
        peak_tflops: the dense peak of a GPU in TFLOP/s; takes precedence over the peak in `job`.

    Raises:
        BadUse: `peak_tflops` is not above 0.
    """
    start_ns, end_ns = _bounds(recording)
    steps, source = _steps(recording)
    valleys = find_valleys(recording, pipeline=job is not None and job.layout.pipeline > 1)
    missing: list[str] = _missing(recording, valleys)
    speed = _speed(steps, source, job)
    phases = _phases(recording, valleys, (end_ns - start_ns) / 1e9)
    evaluated = {phase.name for phase in phases} & set(EVALUATION_PHASES)
    if speed is None and not evaluated:
        missing.append("No step was recorded, so there is no speed, no MFU and no energy a step.")
    use = None
    if job is None and not evaluated:
        missing.append(
            "The model and its layout are not known, so there are no tokens/s, no MFU and no theory"
            " of memory. Write a job.toml and name it by --job."
        )
    elif job is not None and speed is not None:
        use, reason = _utilization(job, speed, peak_tflops)
        missing += reason
    energy = _energy(recording, steps)
    if energy is None:
        missing.append("No GPU power was recorded, so there is no energy.")
    memory = _memory(recording, job)
    if not memory:
        missing.append("No rank recorded the memory of PyTorch's allocator.")
    return ProfileSummary(
        name=name,
        recording=recording,
        job=job,
        start_ns=start_ns,
        end_ns=end_ns,
        steps=steps,
        speed=speed,
        utilization=use,
        phases=phases,
        valleys=valleys,
        memory=memory,
        energy=energy,
        missing=tuple(missing),
    )


def steps_of(spans: Sequence[Span]) -> Sequence[Step]:
    """Return the steps of the rank that recorded the most steps, in chronological order.

    Args:
        spans: the spans of all ranks, in the order of `Recording.spans`.
    """
    found, steps = _Steps(), _Steps()
    rank_before: int | None = None
    for phase, start_ns, end_ns, step, rank in fields(
        spans, "phase", "start_ns", "end_ns", "step", "rank"
    ):
        if rank != rank_before:
            found, steps = max(found, steps, key=len), _Steps()
            rank_before = rank
        if step is not None and (phase in TRAINING_PHASES or phase == STEP_PHASE):
            steps.extend(step, start_ns, end_ns)
    return max(found, steps, key=len).rows()


class _Steps:
    """Collect the steps of one rank in columns."""

    def __init__(self) -> None:
        self._numbers, self._starts_ns, self._ends_ns = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._numbers)

    def extend(self, number: int, start_ns: int, end_ns: int) -> None:
        """Extend the last step by a phase, or start a new step if the step number differs."""
        if self._numbers and self._numbers[-1] == number:
            self._ends_ns[-1] = max(self._ends_ns[-1], end_ns)
            return
        self._numbers.append(number)
        self._starts_ns.append(start_ns)
        self._ends_ns.append(end_ns)

    def rows(self) -> Columns[Step]:
        columns = {
            "number": self._numbers,
            "start_ns": self._starts_ns,
            "end_ns": self._ends_ns,
        }
        return Columns(Step, columns)


def _bounds(recording: Recording) -> tuple[int, int]:
    moments = [
        at for one in recording.series if one.times_ns for at in (one.times_ns[0], one.times_ns[-1])
    ]
    for rows, name in (
        (recording.spans, "start_ns"),
        (recording.spans, "end_ns"),
        (recording.memory, "at_ns"),
    ):
        if rows:
            moments += [min(column(rows, name)), max(column(rows, name))]
    return (min(moments), max(moments)) if moments else (0, 0)


def _missing(recording: Recording, valleys: Valleys) -> list[str]:
    missing = []
    if any(one.source == SYNTHETIC for one in recording.series):
        missing.append("Nothing here was measured: the recording comes from a model of a job.")
    if not any(one.metric.startswith("gpu_") for one in recording.series):
        why = sorted(
            {
                f"{name}: {text}"
                for of in recording.unavailable.values()
                for name, text in of.items()
            }
        )
        missing.append("No counter of a GPU was recorded." + (f" {'; '.join(why)}." if why else ""))
    elif valleys.metric != "gpu_sm_active":
        missing.append(
            "No source measures SM activity here. The share of time in which a kernel ran "
            "is shown instead."
        )
    if not recording.spans:
        missing.append("No rank recorded phases, so the cause of every idle valley is unknown.")
    if recording.dropped_spans:
        missing.append(
            f"{words.plainly(recording.dropped_spans, 'phase')} left out: the disk was too slow."
        )
    if recording.left_out_bytes:
        missing.append(
            f"The oldest parts of the recording are left out, {recording.left_out_bytes / 1e6:.1f} MB:"
            " a report holds in memory what it reads."
        )
    return missing


def _steps(recording: Recording) -> tuple[Sequence[Step], str]:
    """Return the steps of a recording and their source.

    If no rank recorded any phase, the steps are estimated from the utilisation.
    """
    if steps := steps_of(recording.spans):
        logged = STEP_PHASE in column(recording.spans, "phase")
        return steps, "log" if logged else "phases"
    if recording.spans:
        return [], ""
    iterations, source = iterations_of(recording)
    return [
        Step(number=number, start_ns=one.start_ns, end_ns=one.end_ns)
        for number, one in enumerate(iterations, start=1)
    ], source


def _speed(steps: Sequence[Step], source: str, job: Job | None) -> Speed | None:
    if not steps:
        return None
    times_s = array(
        "d",
        (
            (two.start_ns - one.start_ns) / 1e9
            for one, two in pairwise(steps)
            if two.number == one.number + 1
        ),
    )
    times_s = times_s or array("d", ((one.end_ns - one.start_ns) / 1e9 for one in steps))
    median_s = statistics.median(times_s)
    tokens = None if job is None else job.layout.tokens_a_step
    rate = tokens / median_s if tokens is not None and median_s > 0 else None
    return Speed(
        steps=len(steps),
        median_step_s=median_s,
        tokens_a_step=tokens,
        tokens_per_s=rate,
        source=source,
    )


def _utilization(
    job: Job, speed: Speed, peak_tflops: float | None
) -> tuple[Utilization | None, list[str]]:
    stated = job.gpu.peak_tflops if peak_tflops is None else peak_tflops
    if peak_tflops is not None:
        peak_of(None, peak_tflops)  # raises if the peak is impossible
    try:
        peak = peak_of(job.gpu.name, stated)
    except BadUse as error:
        return None, [f"There is no MFU. {error}"]
    if speed.tokens_per_s is None:
        return None, ["There is no MFU, because the steps took no time."]
    rate = speed.tokens_per_s / job.layout.gpus
    model, sequence, recompute = job.model, job.layout.sequence, job.layout.recompute

    def mfu(*, causal: bool) -> float:
        return utilization(flops_per_token(model, sequence, causal=causal), rate, peak.tflops)

    def hfu(*, causal: bool) -> float:
        flops = hardware_flops_per_token(model, sequence, causal=causal, recompute=recompute)
        return utilization(flops, rate, peak.tflops)

    return Utilization(
        peak=peak,
        mfu_full=mfu(causal=False),
        mfu_causal=mfu(causal=True),
        hfu_full=hfu(causal=False),
        hfu_causal=hfu(causal=True),
        tokens_per_s_per_gpu=rate,
    ), []


def _phases(recording: Recording, valleys: Valleys, wall_s: float) -> tuple[Phase, ...]:
    stretches = {rank: phases_of_rank(own) for rank, own in recording.spans_by_rank()}
    totals: dict[str, float] = {}
    for own in stretches.values():
        for label, start_ns, end_ns in fields(own, "label", "start_ns", "end_ns"):
            seconds = (end_ns - start_ns) / 1e9 / len(stretches)
            totals[label] = totals.get(label, 0.0) + seconds
    if not totals:
        return ()
    totals[UNCOVERED] = max(0.0, wall_s - sum(totals.values()))
    idle, sampled = _idle_by_phase(recording, valleys, stretches)
    order = (*TRAINING_PHASES, *EVALUATION_PHASES, UNCOVERED)
    return tuple(
        Phase(
            name=name,
            seconds=totals[name],
            share=totals[name] / wall_s if wall_s > 0 else 0.0,
            idle_share=idle.get(name, 0.0) / sampled[name] if sampled.get(name) else None,
        )
        for name in order
        if totals.get(name, 0.0) > 1e-6 * wall_s
    )


def _idle_by_phase(
    recording: Recording, valleys: Valleys, stretches: Mapping[int, Sequence[Stretch]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return, for each phase, its idle and its sampled time in nanoseconds."""
    idle: dict[str, float] = {}
    sampled: dict[str, float] = {}
    if valleys.metric is None:
        return idle, sampled
    local = local_ranks(recording)
    threshold = SHARE_OF_MEDIAN * valleys.median
    for series in recording.of(valleys.metric):
        ranks = ranks_of(series, local)
        if len(ranks) != 1:
            continue
        own = stretches.get(ranks[0], ())
        starts = column(own, "start_ns")
        for at_ns, value in zip(series.times_ns, series.values, strict=True):
            start_ns = at_ns - round(series.interval_s * 1e9)
            for label, part_ns in _labelled(own, starts, start_ns, at_ns):
                sampled[label] = sampled.get(label, 0.0) + part_ns
                if value < threshold:
                    idle[label] = idle.get(label, 0.0) + part_ns
    return idle, sampled


def _labelled(
    stretches: Sequence[Stretch], starts: Sequence[int], start_ns: int, end_ns: int
) -> Iterator[tuple[str, int]]:
    rest_ns = end_ns - start_ns
    index = max(0, bisect.bisect_right(starts, start_ns) - 1)
    while index < len(stretches) and stretches[index].start_ns < end_ns:
        one = stretches[index]
        part_ns = min(one.end_ns, end_ns) - max(one.start_ns, start_ns)
        if part_ns > 0:
            rest_ns -= part_ns
            yield one.label, part_ns
        index += 1
    if rest_ns > 0:
        yield UNCOVERED, rest_ns


def stage_of(rank: int, job: Job) -> int | None:
    """Return the pipeline stage of a rank, or None if the layout has no such stage.

    Ranks are numbered in Megatron's order: the tensor index varies fastest, then data, then
    pipeline.
    """
    stage = rank // (job.layout.tensor * job.layout.data)
    return stage if stage < job.layout.pipeline else None


def _memory(recording: Recording, job: Job | None) -> tuple[RankMemory, ...]:
    peaks: dict[int, tuple[int, int]] = {}
    for one in recording.memory:
        peak, reserved = peaks.get(one.rank, (0, 0))
        peaks[one.rank] = (max(peak, one.peak_bytes), max(reserved, one.reserved_bytes))
    rows = []
    for rank, (peak, reserved) in sorted(peaks.items()):
        stage = None if job is None else stage_of(rank, job)
        theory = None
        if job is not None and stage is not None:
            theory = stage_memory(job.model, job.layout, stage)
        rows.append(
            RankMemory(
                rank=rank, stage=stage, peak_bytes=peak, reserved_bytes=reserved, theory=theory
            )
        )
    return tuple(rows)


def _energy(recording: Recording, steps: Sequence[Step]) -> Energy | None:
    for metric, source in (
        ("gpu_energy", "the GPU's energy counter"),
        ("gpu_power", "power times the sample interval"),
    ):
        series = [one for one in recording.of(metric) if len(one.times_ns) > 1]
        if not series:
            continue
        total = sum(joules_between(one) for one in series)
        a_step = None
        if steps:
            start_ns, end_ns = steps[0].start_ns, steps[-1].end_ns
            within = sum(joules_between(one, start_ns, end_ns) for one in series)
            a_step = within / len(steps)
        return Energy(joules=total, joules_a_step=a_step, gpus=len(series), source=source)
    return None


def joules_between(series: Series, start_ns: int | None = None, end_ns: int | None = None) -> float:
    """Return the joules that one GPU used between two times.

    The series is the GPU's energy counter or its power. A sample interval that lies partly outside
    the two times counts in proportion. If the energy counter decreases, the driver was restarted,
    and that interval counts as 0.
    """
    joules = 0.0
    for (before_ns, before), (at_ns, value) in pairwise(
        zip(series.times_ns, series.values, strict=True)
    ):
        amount = max(0.0, value - before)
        if series.metric == "gpu_power":
            amount = value * min((at_ns - before_ns) / 1e9, 2 * series.interval_s)
        inside_ns = min(at_ns, end_ns or at_ns) - max(before_ns, start_ns or before_ns)
        if at_ns > before_ns and inside_ns > 0:
            joules += amount * inside_ns / (at_ns - before_ns)
    return joules
