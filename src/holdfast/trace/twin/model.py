"""Define the data of the twin's stages: the calibration, and the drawn jobs."""

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
    """Hold targets for the recorded causes of failures, by reason at full size. R reasons."""

    names: tuple[str, ...]
    """R names of reasons in the study's Table 3."""
    types: frozenset[str]
    """Types of the jobs whose causes were recorded."""
    jobs: Floats
    """(R) failed GPU jobs."""
    gpu_num: Floats
    """(R) mean GPUs; NaN if unknown."""
    run_s: Floats
    """(R) mean time to failure, s; NaN if unknown."""
    gpu_time_s: Floats
    """(R) GPU time, s."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rhythm:
    """Hold the parameters of the order of jobs in time. T types."""

    same_size: Floats
    """(T) probability that a batch belongs to the campaign of the batch before: same user, same GPUs."""
    near_size: float
    """Correlation of the ranks of sizes of successive campaigns."""
    near_duration: Floats
    """(T) correlation of the ranks of durations of successive batches."""
    alike: float
    """Correlation of the rank of a job's duration with the rank of its batch."""
    gap_cv2: Floats
    """(T) squared coefficient of variation of gaps between batches, apart from hours and days."""
    retry_share: float
    """Part of the failed batches whose next batch in the campaign is a retry."""
    retry_median_s: float
    """Median pause between a failure and its retry."""
    drift: Floats
    """(T) exponents: a part u**drift of the jobs has come when a part u would without drift."""
    first_parts: Floats
    """(T) part of the arrivals by which exactly that part of the jobs has come; 0 if unknown."""
    known: Mapping[int, tuple[float, float, float, float]]
    """Target of `sessions.order_statistics` over the completed jobs, by number of the type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Hold the tables of counts from which a twin is drawn.

    The shapes name T types, G GPU counts, D bins, S states and U users. Bins are powers of two, as
    in the published curves: bin 0 has values <= 1 s, bin i values in (2^(i-1), 2^i] s.
    """

    cluster: str
    zone: str
    """Offset from UTC of the written times, such as `+08:00`."""
    start_s: float
    """Unix time of the first submission."""
    window_s: float
    """Seconds from the first submission to the last."""
    snapshot_s: float | None
    """Unix time of the export: later ends are RUNNING then. None: all jobs had ended."""
    counts_queue: bool
    """True if `duration` begins at submission (Kalos as released), False if at the start."""
    capacity_gpus: int | None
    """GPUs of the cluster, which bound the GPUs in use; None: unknown, no bound."""
    types: tuple[str, ...]
    gpu_nums: Floats
    """(G) possible GPU counts of a job, ascending; 0 is a CPU job."""
    cells: Floats
    """(T, G, D) jobs by type, GPUs and bin of duration."""
    seconds: Floats
    """(T, G) total duration of these jobs, s."""
    duration_limit_s: Floats
    """(T) the longest possible duration."""
    longest: tuple[int, float] | None
    """Type and duration of the longest job; None if unknown."""
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
    """The order of jobs in time."""
    reasons: Reasons | None
    """The causes of failures; None if no cause was recorded."""

    @property
    def jobs(self) -> int:
        """Return the number of jobs at full size."""
        return round(float(self.cells.sum()))

    @property
    def gpu_time_s(self) -> float:
        """Return the GPU time at full size, by the trace's meaning of duration."""
        return float((self.seconds * self.gpu_nums).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class TwinJobs:
    """Hold a synthetic trace: columns of one length, sorted by time of submission."""

    cluster: str
    zone: str
    counts_queue: bool
    """True if `duration_s` begins at submission, False if at the start."""
    capacity_gpus: int | None
    peak_gpus: int
    """The most GPUs in use at one time."""
    job_id: Column
    user: Column
    type: Column
    """`Pretrain`, `Evaluation`, `SFT`, `MLLM`, `Debug`, `Other`; `CPU` without GPUs."""
    state: Column
    reason: Column
    """The cause of the failure; empty if none was recorded, as for most failures."""
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
        """Return the Unix times of the starts."""
        return self.submit_s + self.queue_s

    @property
    def run_s(self) -> Ints:
        """Return the seconds from start to end, for either meaning of `duration_s`."""
        return self.duration_s - self.queue_s if self.counts_queue else self.duration_s

    @property
    def end_s(self) -> Ints:
        """Return the Unix times of the ends; for RUNNING jobs the time of the export."""
        return self.start_s + self.run_s

    @property
    def gpu_time_s(self) -> Ints:
        """Return GPUs times `duration_s`, as the trace does."""
        return self.gpu_num * self.duration_s

    def columns(self) -> dict[str, Column]:
        """Return columns by name for `fit` and `export`; `duration_s` counts from the start."""
        names = [field.name for field in fields(self) if field.name not in _NOT_COLUMNS]
        return {name: getattr(self, name) for name in names} | {"duration_s": self.run_s}


_NOT_COLUMNS = frozenset({"cluster", "zone", "counts_queue", "capacity_gpus", "peak_gpus"})
