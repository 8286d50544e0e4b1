"""Define the data that the stages of drawing exchange: the calibration, and the drawn jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Column = npt.NDArray[np.generic]

CPU = "CPU"
"""The type of a job without GPUs, with AcmeTrace's name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reasons:
    """Hold targets for the recorded causes of failures at full size, for each of R reasons."""

    names: tuple[str, ...]
    """Names of the R reasons, from the study's Table 3."""
    types: frozenset[str]
    """Types of the jobs whose causes of failure were recorded."""
    jobs: Floats
    """(R) number of failed GPU jobs."""
    gpu_num: Floats
    """(R) mean number of GPUs; NaN if unknown."""
    run_s: Floats
    """(R) mean time to failure in s; NaN if unknown."""
    gpu_time_s: Floats
    """(R) GPU time in s."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rhythm:
    """Hold the parameters for the order of jobs in time, for T types.

    A batch is a group of jobs submitted together. A campaign is a series of batches of one user,
    with jobs of one type and size.
    """

    same_size: Floats
    """(T) probability that a batch continues the campaign of the batch before it."""
    near_size: float
    """Correlation between the size ranks of successive campaigns."""
    near_duration: Floats
    """(T) correlation between the duration ranks of successive batches."""
    alike: float
    """Correlation between the duration rank of a job and the rank of its batch."""
    gap_cv2: Floats
    """(T) squared coefficient of variation of batch gaps, without daily and weekly cycles."""
    retry_share: float
    """Share of the failed batches for which the next batch of the campaign is a retry."""
    retry_median_s: float
    """Median pause between a failure and its retry, in seconds."""
    drift: Floats
    """(T) exponents that move arrivals in time.

    When a share u of the jobs would have arrived without drift, the share u**drift has arrived.
    """
    first_parts: Floats
    """(T) share of the type's arrivals at which exactly the same share of its jobs has come.

    0 means that the share is unknown.
    """
    known: Mapping[int, tuple[float, float, float, float]]
    """For some type numbers, the values that `sessions.order_statistics` must have.

    They refer to the completed jobs.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Hold the tables of counts from which a synthetic trace is drawn.

    In the shapes, T is the number of types, G of GPU counts, D of bins, S of states and U of users.
    Bins are powers of two, as in the published curves: bin 0 has values up to 1 s, and bin i values
    in (2^(i-1), 2^i] s.
    """

    cluster: str
    zone: str
    """UTC offset of the written times, such as `+08:00`."""
    start_s: float
    """Unix time of the first submission."""
    window_s: float
    """Seconds from the first submission to the last."""
    snapshot_s: float | None
    """Unix time at which the trace was exported. A job that ends later is RUNNING.

    None means that all jobs had ended.
    """
    counts_queue: bool
    """True if `duration` counts from submission (Kalos as released), False if from the start."""
    capacity_gpus: int | None
    """Number of GPUs of the cluster, which limits the GPUs in use; None means no limit."""
    types: tuple[str, ...]
    gpu_nums: Floats
    """(G) possible GPU counts of a job, ascending; 0 means a CPU job."""
    cells: Floats
    """(T, G, D) number of jobs by type, GPU count and bin of duration."""
    seconds: Floats
    """(T, G) total duration of these jobs in s."""
    duration_limit_s: Floats
    """(T) longest possible duration in s."""
    longest: tuple[int, float] | None
    """Type number and duration in s of the longest job; None if unknown."""
    queue_cells: Floats
    """(T, D) number of jobs by type and bin of queueing time."""
    queue_seconds: Floats
    """(T) total queueing time in s."""
    medians_s: Mapping[str, float]
    """Required medians in s: `gpu_duration`, `gpu_queue`, `cpu_duration`, `cpu_queue`."""
    states: tuple[str, ...]
    state_shares: Floats
    """(T, G, D, S) probability of each state, for the jobs of a cell."""
    state_totals: Floats
    """(2, S) share of each state among CPU jobs (row 0) and GPU jobs (row 1)."""
    state_gpu_time: Floats
    """(S) share of the GPU time that jobs of each state have."""
    users: Floats
    """(T, U) share of each user among the jobs of a type, with one column per user."""
    cpus: Floats
    """(T, G) number of CPU cores of a job."""
    hour_of_week: Floats
    """(168) share of submissions in each local hour of the week, from Monday 00:00."""
    dispersion: float
    """Standard deviation of the logarithm of the daily rate of arrivals."""
    batch_sizes: Floats
    """(T) mean number of jobs that are submitted together."""
    rhythm: Rhythm
    """Parameters for the order of jobs in time."""
    reasons: Reasons | None
    """The causes of failures; None if no cause was recorded."""

    @property
    def jobs(self) -> int:
        """Return the number of jobs at full size."""
        return round(float(self.cells.sum()))

    @property
    def gpu_time_s(self) -> float:
        """Return the GPU time in s at full size; durations count as defined by `counts_queue`."""
        return float((self.seconds * self.gpu_nums).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class TwinJobs:
    """Hold a synthetic trace, as columns of equal length, sorted by time of submission."""

    cluster: str
    zone: str
    counts_queue: bool
    """True if `duration_s` counts from submission, False if from the start."""
    capacity_gpus: int | None
    peak_gpus: int
    """The most GPUs in use at the same time."""
    job_id: Column
    user: Column
    type: Column
    """`Pretrain`, `Evaluation`, `SFT`, `MLLM`, `Debug` or `Other`; `CPU` for a job without GPUs."""
    state: Column
    reason: Column
    """The cause of the failure; empty if none was recorded, which is the case for most failures."""
    gpu_num: Ints
    node_num: Ints
    cpu_num: Ints
    submit_s: Ints
    """Time of submission as a Unix time."""
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
        """Return the seconds from start to end, for either definition of `duration_s`."""
        return self.duration_s - self.queue_s if self.counts_queue else self.duration_s

    @property
    def end_s(self) -> Ints:
        """Return the Unix times at which jobs end; for RUNNING jobs, the time of the export."""
        return self.start_s + self.run_s

    @property
    def gpu_time_s(self) -> Ints:
        """Return the number of GPUs times `duration_s`, which is how the trace defines GPU time."""
        return self.gpu_num * self.duration_s

    def columns(self) -> dict[str, Column]:
        """Return columns by name for `fit` and `export`; `duration_s` counts from the start."""
        names = [field.name for field in fields(self) if field.name not in _NOT_COLUMNS]
        return {name: getattr(self, name) for name in names} | {"duration_s": self.run_s}


_NOT_COLUMNS = frozenset({"cluster", "zone", "counts_queue", "capacity_gpus", "peak_gpus"})
