"""The machine, and what others did on it while a benchmark ran."""

import os
import resource
import time
from typing import Self

import psutil


class OthersLoad:
    """Cores that processes other than this one's kept busy, over a stretch of time.

    The kernel's busy time of all cores less the CPU time of this process and of its descendants, which is known
    once they ended and were waited for. Processes of the kernel for our own disk writes count as others'.
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
        """For the notes below a table."""
        load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
        return (
            f"{len(os.sched_getaffinity(0))} cores, no GPU used; other processes kept {self.cores or 0:.2f} of them "
            f"busy on average; load averages at the end (1, 5, 15 min; ours included): {load}"
        )


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0) + getattr(times, "softirq", 0))


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
