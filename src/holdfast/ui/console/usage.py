"""The profile curves of the runs that were looked at last, each read again after a rest."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REST_S = 15.0
"""The least seconds from one reading of a run's recording to the next."""
REST_SHARE = 10.0
"""The least rest after a reading, in times of the reading's own time."""
RUNS_KEPT = 32

Curves = Sequence[Mapping[str, Any]]


class Usage:
    """The curves of runs. Any thread may use it; one at a time reads a recording."""

    def __init__(
        self,
        curves_of: Callable[[str], Curves],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._curves_of = curves_of
        self._monotonic_s = monotonic_s
        self._known: OrderedDict[str, tuple[float, Curves]] = OrderedDict()
        """By run: the earliest time of the next reading, and the curves."""
        self._lock = threading.Lock()

    def of(self, run_id: str) -> Curves:
        """Return the curves of a run; empty if this host has no recording of the run.

        Raises:
            HoldfastError: the recording cannot be read.
        """
        with self._lock:
            began_s = self._monotonic_s()
            known = self._known.pop(run_id, None)
            if known is None or began_s >= known[0]:
                curves = self._curves_of(run_id)
                took_s = self._monotonic_s() - began_s
                known = began_s + took_s + max(REST_S, REST_SHARE * took_s), curves
            self._known[run_id] = known
            while len(self._known) > RUNS_KEPT:
                self._known.popitem(last=False)
            return known[1]
