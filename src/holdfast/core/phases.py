"""Connect the code that runs a rank's phases with the recorder of the rank's profile.

`holdfast.profile` sets a sink for the process. The checkpoint and evaluation rooms record phases
with `note_phase`, which does nothing while no sink is set.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

ENV_PROFILE: Final = "HOLDFAST_PROFILE"
"""The environment variable with the folder of a rank's profile; if unset, none is recorded."""
ENV_NODE: Final = "HOLDFAST_PROFILE_NODE"
"""The environment variable with the name that the node's sampler writes for this node."""


class PhaseSink(Protocol):
    """Record the phases of this process."""

    def span(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Record a phase from `start_ns` to `end_ns`, both in the time of `time.monotonic_ns`.

        Never block, never raise.
        """
        ...


_sink: PhaseSink | None = None


def set_phase_sink(sink: PhaseSink | None) -> None:
    """Set the sink that receives the phases of this process; None stops the recording."""
    global _sink  # noqa: PLW0603 - one process is one rank: its recorder is process-wide by nature
    _sink = sink


def note_phase(phase: str, start_ns: int) -> None:
    """Record a phase that ends now and began at `start_ns`, in the time of `time.monotonic_ns`."""
    if _sink is not None:
        _sink.span(phase, start_ns, time.monotonic_ns())


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Record the time that the `with` block takes as a phase, also if the block raises."""
    start_ns = time.monotonic_ns()
    try:
        yield
    finally:
        note_phase(name, start_ns)


def own_node() -> str:
    """Return `$HOLDFAST_PROFILE_NODE`, which the node's sampler sets, or else the host's name."""
    import socket

    return os.environ.get(ENV_NODE) or socket.gethostname()
