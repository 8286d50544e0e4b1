"""What a twin is drawn from, and what is drawn."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Column = npt.NDArray[np.generic]

CPU = "CPU"
"""The type of a job without GPUs, as AcmeTrace writes it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reasons:
    """Why jobs failed whose cause was recorded: targets by reason at full size. R reasons."""

    names: tuple[str, ...]
    """R reasons of the study's Table 3."""
    types: frozenset[str]
    """Types of the jobs whose causes were recorded."""
    jobs: Floats
    """(R) failed GPU jobs."""
    gpu_num: Floats
    """(R) mean GPUs; NaN where it is not known."""
    run_s: Floats
    """(R) mean time to failure, s; NaN where it is not known."""
    gpu_time_s: Floats
    """(R) GPU time, s."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rhythm:
    """How jobs follow each other in time. T types."""

    same_size: Floats
    """(T) probability that a batch belongs to the campaign of the batch before: same user, same GPUs."""
    near_size: float
    """Correlation of the ranks of sizes of successive campaigns."""
    near_duration: Floats
    """(T) correlation of the ranks of durations of successive batches."""
    alike: float
    """Correlation of the rank of a job's duration with the rank of its batch."""
    gap_cv2: Floats
    """(T) squared coefficient of variation of the gaps between batches, beside what the hours and the days add."""
    retry_share: float
    """Part of the failed batches after which the next one of the campaign is a retry."""
    retry_median_s: float
    """Median pause between a failure and its retry."""
    drift: Floats
    """(T) exponents: of the jobs of a type a part u**drift has come when a part u of all would have without drift."""
    first_parts: Floats
    """(T) part of a type's jobs that has come exactly when that part of its arrivals has; 0 where none is known."""
    known: Mapping[int, tuple[float, float, float, float]]
    """By number of a type, `sessions.order_statistics` of its completed jobs, which the order must be near to."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Tables of counts: all that the draw knows of a trace. T types, G GPU counts, D bins, S states, U users.

    Bins are powers of two, as the published curves have them: bin 0 holds <= 1 s, bin i (2^(i-1), 2^i] s.
    """

    cluster: str
    zone: str
    """Offset from UTC that its times are written with, such as `+08:00`."""
    start_s: float
    """Unix time of the first submission."""
    window_s: float
    """From the first submission to the last."""
    snapshot_s: float | None
    """Unix time at which the table was exported: what had not ended is RUNNING. None: all had ended."""
    counts_queue: bool
    """Whether `duration` begins at submission (Kalos as released) or at the start."""
    capacity_gpus: int | None
    """GPUs of the cluster: what jobs hold at one time stays within it. None: not known, no bound."""
    types: tuple[str, ...]
    gpu_nums: Floats
    """(G) GPUs a job may hold, ascending; 0 is a CPU job."""
    cells: Floats
    """(T, G, D) jobs by type, GPUs and bin of duration."""
    seconds: Floats
    """(T, G) total duration of these jobs, s."""
    duration_limit_s: Floats
    """(T) no job of the type is longer."""
    longest: tuple[int, float] | None
    """Type of the longest job of all and its duration, where that is known."""
    queue_cells: Floats
    """(T, D) jobs by type and bin of queueing time."""
    queue_seconds: Floats
    """(T) total queueing time, s."""
    medians_s: Mapping[str, float]
    """Medians that must hold: `gpu_duration`, `gpu_queue`, `cpu_duration`, `cpu_queue`."""
    states: tuple[str, ...]
    state_shares: Floats
    """(T, G, D, S) probability of each state in a cell."""
    state_totals: Floats
    """(2, S) share of each state among CPU jobs (row 0) and GPU jobs (row 1)."""
    state_gpu_time: Floats
    """(S) share of each state in GPU time."""
    users: Floats
    """(T, U) share of each user among the jobs of a type; columns are users, the busiest first."""
    cpus: Floats
    """(T, G) CPU cores of a job."""
    hour_of_week: Floats
    """(168) share of submissions by local hour, from Monday 00:00."""
    dispersion: float
    """Standard deviation of the logarithm of a day's rate of arrivals."""
    batch_sizes: Floats
    """(T) mean jobs submitted together."""
    rhythm: Rhythm
    """How jobs follow each other."""
    reasons: Reasons | None
    """Why failed jobs failed; None: nobody recorded any cause."""

    @property
    def jobs(self) -> int:
        """Jobs at full size."""
        return round(float(self.cells.sum()))

    @property
    def gpu_time_s(self) -> float:
        """GPU time at full size, as the trace counts it."""
        return float((self.seconds * self.gpu_nums).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class TwinJobs:
    """A synthetic trace: columns of one length, sorted by time of submission."""

    cluster: str
    zone: str
    counts_queue: bool
    """What `duration_s` means: from submission (True) or from the start."""
    capacity_gpus: int | None
    peak_gpus: int
    """The most GPUs that jobs hold at one time."""
    job_id: Column
    user: Column
    type: Column
    """`Pretrain`, `Evaluation`, `SFT`, `MLLM`, `Debug`, `Other`; `CPU` without GPUs."""
    state: Column
    reason: Column
    """Why it failed; empty where nobody recorded that, as of most that failed."""
    gpu_num: Ints
    node_num: Ints
    cpu_num: Ints
    submit_s: Ints
    """Unix time."""
    queue_s: Ints
    duration_s: Ints

    def __len__(self) -> int:
        return len(self.submit_s)

    @property
    def start_s(self) -> Ints:
        """Unix time of the start."""
        return self.submit_s + self.queue_s

    @property
    def run_s(self) -> Ints:
        """End - start, whatever `duration_s` counts."""
        return self.duration_s - self.queue_s if self.counts_queue else self.duration_s

    @property
    def end_s(self) -> Ints:
        """Unix time of the end; of a RUNNING job, of the export."""
        return self.start_s + self.run_s

    @property
    def gpu_time_s(self) -> Ints:
        """GPUs x `duration_s`, as the trace counts it."""
        return self.gpu_num * self.duration_s

    def columns(self) -> dict[str, Column]:
        """The columns by name, `duration_s` counted from the start: what `fit` and `export` take."""
        names = [field.name for field in fields(self) if field.name not in _NOT_COLUMNS]
        return {name: getattr(self, name) for name in names} | {"duration_s": self.run_s}


_NOT_COLUMNS = frozenset({"cluster", "zone", "counts_queue", "capacity_gpus", "peak_gpus"})
