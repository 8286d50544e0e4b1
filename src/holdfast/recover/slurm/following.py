"""Follow a run in its Slurm jobs, by the files in the run's folder and the queue of Slurm.

The ledger is not read in the meantime, because the run's first node writes it, and SQLite files
must be used only on one host.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from holdfast.cluster import JobState, SlurmJobs
from holdfast.core.errors import HoldfastError
from holdfast.core.paths import RunPaths
from holdfast.recover.slurm.submission import Submission, logs_of

LOOK_S = 0.5
QUEUE_LOOK_S = 5.0
"""The seconds between two look-ups in the queue. They are many, since slurmctld serves all users of
the cluster.
"""


class Following:
    """Follow one run."""

    def __init__(
        self,
        paths: RunPaths,
        submission: Submission,
        jobs: SlurmJobs,
        *,
        say: Callable[[str], None],
        show: Callable[[int, bytes], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Store what `until_over` needs.

        Args:
            paths: the paths of the run.
            submission: the record of the run's jobs.
            jobs: the interface to Slurm's jobs.
            say: a function that receives sentences about the queue.
            show: a function that receives whole lines of the present job, with 1 for output or 2
                for errors.
            sleep: a function that waits for a number of seconds.
        """
        self._paths = paths
        self._jobs = jobs
        self._print = say
        self._show = show
        self._sleep = sleep
        self._stops = 0
        self._printed = ""
        self.job_id = submission.jobs[-1]
        """The id of the present Slurm job."""
        self.state = JobState()
        """The state of the present job at the last look."""
        self.has_begun = False
        """True once the present job had nodes."""
        self._tails = self._open()

    def until_over(self) -> None:
        """Follow until no job of the run waits or runs, or until the third stop request."""
        try:
            self._follow()
        finally:
            self._close()

    def _follow(self) -> None:
        look_in_s = 0.0
        while self._stops < 3:
            self._read()
            look_in_s -= LOOK_S
            if look_in_s <= 0:
                look_in_s = QUEUE_LOOK_S
                if self._is_over():
                    return
            self._sleep(LOOK_S)
        self._print(f"run {self._paths.run_id} still ends: holdfast runs show {self._paths.run_id}")

    def stop(self) -> None:
        """Accept a stop request.

        At the first request, the run saves its state and stops; at the second request, it stops at
        once.
        """
        self._stops += 1
        if self._stops == 1:
            self._print("saving state, then stopping (once more: stop now)")
        if self._stops < 3:
            with suppress(OSError), self._paths.stop_request.open("ab") as file:
                file.write(b"x")
        if not self.has_begun:
            try:
                self._jobs.end(self.job_id)
            except HoldfastError as error:
                self._print(f"{error} To end the job by hand: scancel {self.job_id}")

    def _is_over(self) -> bool:
        try:
            self.state = state = self._jobs.state(self.job_id)
        except HoldfastError as error:  # the run continues without slurmctld
            self._print_once(f"{str(error).splitlines()[0]} The run is not affected; trying again.")
            return False
        if state.is_waiting:
            why = "" if state.reason in ("", "None") else f": {state.reason}"
            self._print_once(f"Slurm job {self.job_id} waits{why}")
        elif state.is_running:
            self.has_begun = True
            self._print_once(f"Slurm job {self.job_id} runs on {', '.join(state.nodes)}")
        if not state.is_over:
            return False
        submission = Submission.read(self._paths)
        self._read(is_last=True)
        if submission is None or submission.jobs[-1] == self.job_id:
            return True
        self._close()
        self.job_id, self.has_begun = submission.jobs[-1], False
        self._tails = self._open()
        return self._is_over()

    def _print_once(self, text: str) -> None:
        if text != self._printed:
            self._printed = text
            self._print(text)

    def _open(self) -> list["_Tail"]:
        return [_Tail(path) for path in logs_of(self._paths, self.job_id)]

    def _close(self) -> None:
        for tail in self._tails:
            tail.close()

    def _read(self, *, is_last: bool = False) -> None:
        for fd, tail in enumerate(self._tails, 1):
            if lines := tail.read(is_last=is_last):
                self._show(fd, lines)


class _Tail:
    """Read whole lines from a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self, *, is_last: bool) -> bytes:
        """Return the new lines; with `is_last`, also an incomplete last line."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return b""
        data = self._rest + self._file.read()
        cut = len(data) if is_last else data.rfind(b"\n") + 1
        self._rest = data[cut:]
        return data[:cut]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
