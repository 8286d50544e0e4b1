"""Record a job that runs without a supervisor.

A sampler process beside this process records the counters of the node. Hooks in this process record
its phases.
"""

import contextlib
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.core.child_process import RestartLimit, end_within
from holdfast.core.paths import holdfast_home
from holdfast.core.phases import ENV_PROFILE, own_node
from holdfast.core.processes import module_command
from holdfast.profile.phases import recorder, start_phases, stop_phases

if TYPE_CHECKING:
    import torch

INTERVAL_S: Final = 1.0
MIN_INTERVAL_S: Final = 0.1
"""The shortest sample interval, because GPM and DCGM measure over at least this time."""
END_S: Final = 30.0
"""Seconds that the sampler gets to write its last sample."""


def sampler_command(
    folder: Path, node: str, interval_s: float = INTERVAL_S
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a sampler for this node, and its environment variables."""
    command, environment = module_command("holdfast.profile.sampler")
    return [*command, str(folder), node, str(interval_s)], environment


def sampler_limit() -> RestartLimit:
    """Return the limit on how often a sampler that ends is restarted."""
    return RestartLimit(restarts=1000, quick_end_s=30.0, quick_ends=5)


class LocalSampler:
    """A sampler of this node that runs as a child process of this process."""

    def __init__(self, folder: Path, node: str, interval_s: float = INTERVAL_S) -> None:
        """Start the sampler.

        Raises:
            OSError: the process cannot be started.
        """
        self._command, self._environment = sampler_command(folder, node, interval_s)
        self._limit = sampler_limit()
        self._pids: dict[int, int] = {}
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Return the process id of the sampler."""
        return self._process.pid

    def look(self, pids: Mapping[int, int]) -> None:
        """Restart the sampler if it has ended, and send it the process ids of the ranks.

        Args:
            pids: the process id of each rank on this node, by rank.
        """
        if (returncode := self._process.poll()) is not None:
            if self._limit.is_exceeded:
                return
            ran_s = math.inf if returncode < 0 else time.monotonic() - self._began_s
            if not self._limit.allows_restart(ran_s):
                return
            self._process = self._start()
        if dict(pids) != self._pids:
            self._pids = dict(pids)
            self._send()

    def close(self) -> None:
        """Stop the sampler after its last sample."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        end_within(self._process, END_S)

    def _start(self) -> subprocess.Popen[bytes]:
        self._began_s = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end the sampler before the job
        )
        if self._pids:
            self._send()
        return self._process

    def _send(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process is ending
            self._process.stdin.write(json.dumps({"ranks": self._pids}).encode() + b"\n")
            self._process.stdin.flush()


def new_folder(stem: str) -> Path:
    """Return `$HOLDFAST_HOME/profiles/STEM-TIME`, for a recording that belongs to no run."""
    now = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return holdfast_home() / "profiles" / f"{stem}-{now}"


@contextlib.contextmanager
def record(
    folder: str | os.PathLike[str] | None = None, *, modules: "Sequence[torch.nn.Module]" = ()
) -> Iterator[Path]:
    """Record the code in the `with` block: the phases of this rank and the counters of this node.

    - Under `holdfast run` and `holdfast profile`, a sampler already records the node. The block
      then records only the phases.
    - Elsewhere, the process with local rank 0 also starts a sampler for its node.
    - If this process is already being recorded, and no folder is given, the block does nothing.

    Args:
        folder: the folder of the recording, the same on all ranks. None means the launcher's
            folder, or else a new folder in `$HOLDFAST_HOME/profiles`.
        modules: the modules whose forward and backward passes become phases. By default the
            recorder finds them at the first step of each optimizer: the modules whose parameters
            the optimizer updates.

    Yields:
        The folder of the recording.
    """
    present = recorder()
    if present is not None and folder is None:
        yield present.folder
        return
    inherited = os.environ.get(ENV_PROFILE)
    place = Path(folder or inherited or new_folder("job"))
    rank = int(os.environ.get("RANK", "0"))
    samples = not inherited and os.environ.get("LOCAL_RANK", "0") == "0"
    sampler = LocalSampler(place, own_node()) if samples else None
    try:
        if sampler is not None:
            sampler.look({rank: os.getpid()})
        start_phases(place, rank=rank, node=own_node(), attempt=0, modules=modules)
        yield place
    finally:
        stop_phases()
        if sampler is not None:
            sampler.close()
