"""The seam between the code that runs a rank's phases and the recorder of the rank's profile.

`holdfast.profile` sets the process's sink. The checkpoint and evaluation rooms record phases with
`note_phase`, which does nothing without a sink.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

ENV_PROFILE: Final = "HOLDFAST_PROFILE"
"""The folder of the profile that a rank records; unset: the rank records none."""
ENV_NODE: Final = "HOLDFAST_PROFILE_NODE"
"""The name of the node, as its sampler writes it."""


class PhaseSink(Protocol):
    """Records the phases of this process."""

    def span(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Record a phase; both times are of `time.monotonic_ns`. Never block, never raise."""
        ...


_sink: PhaseSink | None = None


def set_phase_sink(sink: PhaseSink | None) -> None:
    """Make `sink` the recorder of this process; None: nothing is recorded."""
    global _sink  # noqa: PLW0603 - one process is one rank: its recorder is process-wide by nature
    _sink = sink


def note_phase(phase: str, start_ns: int) -> None:
    """Record a phase that began at `start_ns`, by `time.monotonic_ns`, and ends now."""
    if _sink is not None:
        _sink.span(phase, start_ns, time.monotonic_ns())


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Record the block as a phase, also if the block raises."""
    start_ns = time.monotonic_ns()
    try:
        yield
    finally:
        note_phase(name, start_ns)


def own_node() -> str:
    """Return this node's name: `$HOLDFAST_PROFILE_NODE` of its sampler, else the host's name."""
    import socket

    return os.environ.get(ENV_NODE) or socket.gethostname()
