"""Decide when the next save is due: after N steps, after N seconds, or after the best interval.

All ranks count the same steps, but their clocks differ. So rank 0's clock and measurements decide.
The decision reaches all ranks in the same later call of `save` (see `rank_agreement`), and all save
at that step.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Literal

from holdfast.core.clock import Clock
from holdfast.core.errors import BadUse
from holdfast.core.failure_history import FailureHistory
from holdfast.core.whole import whole_number

Every = int | timedelta | Literal["auto"]

FIRST_S: Final = 60.0
"""Seconds between the first saves with `auto`, by which the cost of a save is measured.

The cost of the very first save is not used, because that save also makes the plan.
"""
LONGEST_S: Final = 3600.0
"""The longest interval in seconds with `auto`, since the failure rate is only an estimate."""
PRIOR_GPU_S: Final = 11_800 * 3600.0
"""The assumed mean time between failures of one GPU in seconds, before a job has own failures.

Table 3 of "Characterization of Large Language Model Development in the Datacenter" (NSDI '24) has
134 infrastructure failures in 1.58 million GPU-hours (number x mean GPUs x mean time to failure).
This does not include ConnectionError, since most of these come in the first minute. Jobs without a
failure are not in the table, so the true value is probably higher. For comparison, "The Llama 3
Herd of Models", table 5, has one failure in 50,700 GPU-hours (419 interruptions in 54 days on
16,384 GPUs).
"""
PRIOR_JOB_S: Final = 86_400.0
"""The limit on the assumed time for a job of any size, since most failures are not hardware's."""
_RECENT: Final = 5


def best_interval_s(loss_s: float, mtbf_s: float) -> float:
    """Return the interval between saves that loses the least time to saves and failures.

    The formula is Young's sqrt(2 C M), with the higher-order correction of J. T. Daly, "A higher
    order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
    Systems 22 (2006), equation 37. The interval is sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) /
    9) - C, or M if C >= 2M.

    Args:
        loss_s: C, the seconds of training time that one save costs. Writing in the background is
            not included.
        mtbf_s: M, the job's mean time between failures in seconds.

    Returns:
        Seconds of training between the end of one save and the start of the next.
    """
    if loss_s >= 2 * mtbf_s:
        return mtbf_s
    part = loss_s / (2 * mtbf_s)
    return math.sqrt(2 * loss_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - loss_s


def mean_time_between_failures_s(history: FailureHistory, *, devices: int) -> float:
    """Estimate a job's mean time between failures, in seconds, by Bayesian inference.

    Failures are modelled as a Poisson process. Its rate has a gamma prior that is worth one failure
    in T0 seconds. T0 is the shorter of `PRIOR_JOB_S` and `PRIOR_GPU_S` / `devices`. After n
    failures in T seconds, the mean of the rate is (1 + n) / (T0 + T) (Gelman and others, Bayesian
    Data Analysis, 3rd edition, section 2.6). The result is the inverse of this mean.

    Args:
        history: the failures n and the training time T of the job so far.
        devices: the number of the job's GPUs, or of its ranks if it has no GPUs.
    """
    prior_s = min(PRIOR_JOB_S, PRIOR_GPU_S / devices)
    return (prior_s + history.trained_s) / (1 + history.failures)


class Interval:
    """Decide when a save is due; methods that a subclass does not need do nothing."""

    by_clock = False

    def falls_on(self, step: int) -> bool:  # noqa: ARG002
        """Return True if a save is due at `step`; called for every step that training reports."""
        return False

    def resumed(self, step: int) -> None:
        """Record that training continues after the restored step `step`."""

    def has_passed(self) -> bool:
        """Return True if a save is due by this rank's clock; the first call starts the interval."""
        return False

    def began(self) -> None:
        """Restart the interval, because a save has begun."""

    def measured(self, *, lost_s: float, durable_s: float) -> None:
        """Record the cost of a save that has become durable.

        Args:
            lost_s: seconds of training time that the save has cost.
            durable_s: seconds from the call of `save` until the checkpoint was durable.
        """


class EverySteps(Interval):
    """Save at each step divisible by a number.

    If training does not report such a step, save at the next step that it reports.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._last_step: int | None = None

    def falls_on(self, step: int) -> bool:
        """Return True if `step`, or a step since the last reported one, is due.

        `step` may be lower than the last reported step, as after a rollback.
        """
        last_step, self._last_step = self._last_step, step
        passed_by = last_step is not None and step // self._every > last_step // self._every
        return passed_by or step % self._every == 0

    def resumed(self, step: int) -> None:
        """Record the restored step, so that a due step before the next report is not missed."""
        self._last_step = step


class EverySeconds(Interval):
    """Save once `interval_s` seconds have passed since the last save began."""

    by_clock = True

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self.interval_s = interval_s
        self._clock = clock
        self._since_s: float | None = None

    def has_passed(self) -> bool:
        """Return True once `interval_s` seconds have passed since the last save began."""
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= self.interval_s

    def began(self) -> None:
        """Restart the interval, because a save has begun."""
        self._since_s = self._clock.monotonic_s()


class Auto(EverySeconds):
    """Save at the interval that `best_interval_s` computes.

    The inputs are the measured cost of recent saves and the job's failure rate. The interval is no
    shorter than the time that the slowest recent save took to become durable, so that the disk is
    fast enough.
    """

    def __init__(
        self, clock: Clock, *, history: FailureHistory, devices: Callable[[], int]
    ) -> None:
        """Start with the `history` of earlier processes; the time of this process is added."""
        super().__init__(FIRST_S, clock)
        self._history = history
        self._devices = devices
        self._made_at_s = clock.monotonic_s()
        self._lost_s: deque[float] = deque(maxlen=_RECENT)
        self._durable_s: deque[float] = deque(maxlen=_RECENT)
        self._is_first = True

    def measured(self, *, lost_s: float, durable_s: float) -> None:
        """Record the cost of a durable save, and compute the next interval from recent costs."""
        self._durable_s.append(durable_s)
        slowest_s = max(self._durable_s)
        if self._is_first:
            self._is_first = False
            self.interval_s = max(FIRST_S, slowest_s)
            return
        # Steps beside a save may have been faster than usual steps: then the cost is 0.
        self._lost_s.append(max(lost_s, 0.0))
        best_s = best_interval_s(statistics.median(self._lost_s), self.mtbf_s)
        self.interval_s = max(min(best_s, LONGEST_S), slowest_s)

    @property
    def mtbf_s(self) -> float:
        """Return the current estimate of this job's mean time between failures, in seconds."""
        own_s = self._clock.monotonic_s() - self._made_at_s
        known = FailureHistory(
            failures=self._history.failures, trained_s=self._history.trained_s + own_s
        )
        return mean_time_between_failures_s(known, devices=self._devices())


def check_every(every: Any) -> Every:
    """Check the option `every`, and return it; a number of steps is converted to an int.

    Raises:
        BadUse: the value is not a number of steps from 1 on, a `datetime.timedelta` above 0, or
            `auto`.
    """
    if (steps := whole_number(every)) is not None and steps >= 1:
        return steps
    if isinstance(every, timedelta) and every > timedelta(0):
        return every
    if every == "auto":
        return "auto"
    raise BadUse(
        f"every is {every!r}; allowed is a whole number of steps from 1 on, a datetime.timedelta "
        "above 0, or 'auto'."
    )


def make_interval(every: Any, clock: Clock, *, devices: Callable[[], int]) -> Interval:
    """Make the `Interval` for the option `every` of `Checkpointer`.

    Args:
        every: a number of steps, a `datetime.timedelta`, or `auto`.
        clock: the source of the time.
        devices: returns the number of devices; called only once training runs.

    Raises:
        BadUse: see `check_every`.
    """
    due = check_every(every)
    if isinstance(due, int):
        return EverySteps(due)
    if isinstance(due, timedelta):
        return EverySeconds(due.total_seconds(), clock)
    return Auto(clock, history=FailureHistory.of_environment(), devices=devices)
