"""Measure the machine's load by other processes during a benchmark."""

import os
import resource
import time
from typing import Self

import psutil

QUIET_CORES = 0.25
QUIET_WINDOW_S = 1.0


class OthersLoad:
    """The number of cores that other processes kept busy over a stretch of time.

    The kernel's busy time of all cores less the CPU time of this process and of its descendants,
    which is known once they ended and were waited for. Processes of the kernel for our own disk
    writes count as others'.
    """

    def __init__(self) -> None:
        self.cores: float | None = None
        """Mean over the stretch; None before its end."""

    def __enter__(self) -> Self:
        self._busy_s, self._own_s, self._began_s = _busy_s(), _own_s(), time.monotonic()
        return self

    def __exit__(self, *_error: object) -> None:
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        self.cores = max(0.0, others_s / (time.monotonic() - self._began_s))

    def sentence(self) -> str:
        """Return a sentence for the notes below a table."""
        load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
        return (
            f"{len(os.sched_getaffinity(0))} cores; other processes kept {self.cores or 0:.2f} of them "
            f"busy on average; load averages at the end (1, 5, 15 min; ours included): {load}"
        )


class Quiet:
    """Wait before each measurement until other processes are idle; drop no measurement."""

    def __init__(self, *, patience_s: float, window_s: float = QUIET_WINDOW_S) -> None:
        """Wait up to `patience_s`; take the load of others over `window_s`."""
        self._patience_s, self._window_s = patience_s, window_s
        self._cores: list[float] = []

    def wait(self) -> None:
        """Wait; call this while no own job runs. Return after the patience even if never quiet."""
        deadline_s = time.monotonic() + self._patience_s
        while (
            cores := _busy_cores(self._window_s)
        ) > QUIET_CORES and time.monotonic() < deadline_s:
            pass
        self._cores.append(cores)

    def sentence(self) -> str:
        """Return a sentence for the notes below a table."""
        quiet = sum(cores <= QUIET_CORES for cores in self._cores)
        return (
            f"{quiet} of {len(self._cores)} measurements began while others used at most {QUIET_CORES:g} cores "
            f"(waited for up to {self._patience_s:.0f} s each); all of them are in the table, and what others did "
            "meanwhile lengthens seconds by up to several times"
        )


def _busy_cores(window_s: float) -> float:
    busy_s, began_s = _busy_s(), time.monotonic()
    time.sleep(window_s)
    return (_busy_s() - busy_s) / (time.monotonic() - began_s)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(
        times.user
        + times.nice
        + times.system
        + getattr(times, "irq", 0)
        + getattr(times, "softirq", 0)
    )


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
