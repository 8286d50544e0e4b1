"""When the next save is due: every so many steps, every so many seconds, or as often as is worth it.

Steps are the same on all ranks. Time is not: rank 0's clock and measurements count, and its word reaches the others
at a later call of `save` (`votes`), so that all of them save at the same step and none waits for another.
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
"""With `auto`, the first two saves come so soon, to learn what one costs; the first plans, and is not typical."""
LONGEST_S: Final = 3600.0
"""With `auto`, training saves so often at least: the rate of failures is an estimate."""
PRIOR_GPU_S: Final = 11_800 * 3600.0
"""Seconds of one GPU to a failure that are assumed at first. Table 3 of "Characterization of Large Language Model
Development in the Datacenter" (NSDI '24): 134 infrastructure failures, without ConnectionError, which mostly comes in
the first minute, in jobs that had used 1.58 million GPU-hours (number x mean GPUs x mean time to failure). Jobs that
did not fail are not in it, so it is rather too low: 50,700 GPU-hours were seen elsewhere (419 interruptions in 54 days
on 16,384 GPUs, "The Llama 3 Herd of Models", Table 5)."""
PRIOR_JOB_S: Final = 86_400.0
"""And a job, however small, is assumed to fail once a day: most failures are not the hardware's."""
_RECENT: Final = 5


def best_interval_s(loss_s: float, mtbf_s: float) -> float:
    """How long to train between two saves, so that what is lost to saves and to failures is least.

    Young's sqrt(2 C M), with the higher-order correction of J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006), equation 37:
    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C, and M where C >= 2M.

    Args:
        loss_s: C, training time lost to one save, seconds. What is written beside the training costs none.
        mtbf_s: M, mean time between failures of the job, seconds.

    Returns:
        Seconds of training between the end of one save and the begin of the next.
    """
    if loss_s >= 2 * mtbf_s:
        return mtbf_s
    part = loss_s / (2 * mtbf_s)
    return math.sqrt(2 * loss_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - loss_s


def mean_time_between_failures_s(history: FailureHistory, *, devices: int) -> float:
    """Of a job on so many devices: what is known of others like it, and what its own ledger says.

    Failures are taken for a Poisson process whose rate has a gamma prior of one failure in T0 seconds, the shorter of
    `PRIOR_JOB_S` and `PRIOR_GPU_S` / `devices`. After n failures in T seconds the mean of the rate is
    (1 + n) / (T0 + T) (Gelman and others, Bayesian Data Analysis, 3rd edition, section 2.6); this is its inverse.

    Args:
        history: n and T.
        devices: GPUs of the job; where it has none, ranks.

    Returns:
        Seconds.
    """
    prior_s = min(PRIOR_JOB_S, PRIOR_GPU_S / devices)
    return (prior_s + history.trained_s) / (1 + history.failures)


class Interval:
    """When a save is due; what each kind does not care for does nothing here."""

    by_clock = False

    def falls_on(self, step: int) -> bool:  # noqa: ARG002
        """Whether `step` is due by its number. Asked of each step that training tells of."""
        return False

    def resumed(self, step: int) -> None:
        """Training goes on after `step`."""

    def has_passed(self) -> bool:
        """Whether a save is due now, by this rank's clock. The first call starts it."""
        return False

    def began(self) -> None:
        """A save has begun: the time runs anew."""

    def measured(self, *, lost_s: float, durable_s: float) -> None:
        """Learn from a save that has become durable.

        Args:
            lost_s: training time that it cost, seconds.
            durable_s: from the call until it was durable, seconds.
        """


class EverySteps(Interval):
    """At steps divisible by a number, or the next that is told where such a one was passed by."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._last_step: int | None = None

    def falls_on(self, step: int) -> bool:
        """See `Interval`. A step before the last one, as after a roll-back, begins anew."""
        last_step, self._last_step = self._last_step, step
        passed_by = last_step is not None and step // self._every > last_step // self._every
        return passed_by or step % self._every == 0

    def resumed(self, step: int) -> None:
        """See `Interval`. What lies between it and the first step that is told of was passed by."""
        self._last_step = step


class EverySeconds(Interval):
    """So many seconds after the last save began; `interval_s`."""

    by_clock = True

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self.interval_s = interval_s
        self._clock = clock
        self._since_s: float | None = None

    def has_passed(self) -> bool:
        """See `Interval`."""
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= self.interval_s

    def began(self) -> None:
        """See `Interval`."""
        self._since_s = self._clock.monotonic_s()


class Auto(EverySeconds):
    """As often as is worth it: `best_interval_s` of what the last saves cost, and of how often the job fails.

    Never more often than the disk keeps up with: the last saves' seconds from the call until they were durable.
    """

    def __init__(
        self, clock: Clock, *, history: FailureHistory, devices: Callable[[], int]
    ) -> None:
        """`history` is of before this process; its own time without a failure is added."""
        super().__init__(FIRST_S, clock)
        self._history = history
        self._devices = devices
        self._made_at_s = clock.monotonic_s()
        self._lost_s: deque[float] = deque(maxlen=_RECENT)
        self._durable_s: deque[float] = deque(maxlen=_RECENT)
        self._is_first = True

    def measured(self, *, lost_s: float, durable_s: float) -> None:
        """See `Interval`."""
        self._durable_s.append(durable_s)
        slowest_s = max(self._durable_s)
        if self._is_first:
            self._is_first = False
            self.interval_s = max(FIRST_S, slowest_s)
            return
        self._lost_s.append(
            max(lost_s, 0.0)
        )  # steps beside a save may have been faster than the usual one
        best_s = best_interval_s(statistics.median(self._lost_s), self.mtbf_s)
        self.interval_s = max(min(best_s, LONGEST_S), slowest_s)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of this job as far as is known now, seconds."""
        own_s = self._clock.monotonic_s() - self._made_at_s
        known = FailureHistory(
            failures=self._history.failures, trained_s=self._history.trained_s + own_s
        )
        return mean_time_between_failures_s(known, devices=self._devices())


def check_every(every: Any) -> Every:
    """Check the option `every`, and return it, a number of steps as an int.

    Raises:
        BadUse: the value is no number of steps, no `datetime.timedelta` above 0, and not `auto`.
    """
    if (steps := whole_number(every)) is not None and steps >= 1:
        return steps
    if isinstance(every, timedelta) and every > timedelta(0):
        return every
    if every == "auto":
        return "auto"
    raise BadUse(
        f"every is {every!r}; allowed is a whole number of steps from 1 on, a datetime.timedelta above 0, or 'auto'."
    )


def make_interval(every: Any, clock: Clock, *, devices: Callable[[], int]) -> Interval:
    """Make the `Interval` that the option `every` of `Checkpointer` describes.

    Args:
        every: steps, a `datetime.timedelta`, or `auto`.
        clock: what time is taken from.
        devices: returns the number of devices, once training goes on; see `mean_time_between_failures_s`.

    Raises:
        BadUse: see `check_every`.
    """
    due = check_every(every)
    if isinstance(due, int):
        return EverySteps(due)
    if isinstance(due, timedelta):
        return EverySeconds(due.total_seconds(), clock)
    return Auto(clock, history=FailureHistory.of_environment(), devices=devices)
