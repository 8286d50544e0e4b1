"""Sample one node in a process of its own.

A separate process keeps the cost of sampling, and any crash of the sampler, away from training.

    the node's agent, or `holdfast profile` ── sampler ── reader (only where a GPU's driver is
    loaded)

`sampler FOLDER NODE INTERVAL_S` reads the host's counters itself, and the GPUs' counters through a
`reader` process. It appends them to the node's file in the recording. Its standard input receives
JSON lines `{"ranks": {RANK: PID}}`; the sampler stops when its standard input is closed.

If a call into the GPU driver never returns, only the GPUs' values are missing. The sampler then
kills the silent reader and starts another one, after a longer wait each time. A process that hangs
in the kernel survives SIGKILL. The sampler therefore starts no more readers once `MAX_STUCK`
killed ones are still alive.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from holdfast.core.processes import die_with_parent, module_command
from holdfast.profile.recording import SeriesId
from holdfast.profile.sources.host import Host
from holdfast.profile.sources.probe import NO_GPU, has_gpu
from holdfast.profile.sources.reader import values_of
from holdfast.profile.sources.source import CannotRead
from holdfast.profile.writing import RecordingWriter

GPU: Final = "gpu"
"""The source name under which the recording states why GPU counters are missing."""
OPEN_S: Final = 30.0
"""Seconds that a new reader gets to probe all sources."""
SILENT_S: Final = 10.0
"""Seconds after which a reader that has not answered is killed."""
FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 600.0
MAX_STUCK: Final = 3
LAST_WAIT_S: Final = 1.0
"""Seconds that the sampler waits, when it stops, for a killed reader to end."""


class Gpus:
    """The reader process of this node's GPUs, which is replaced if it ends or stops answering.

    `poll` never waits for the reader.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Store how to start the reader; the first `poll` starts it.

        Args:
            command: the command line of the reader (`holdfast.profile.sources.reader`).
            environment: the environment variables of the reader; None to inherit this process's
                variables.
        """
        self._command = list(command)
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._rest = b""
        self._owes_since_s: float | None = None
        """When the unanswered request was sent, in monotonic seconds; None if all are answered."""
        self._is_open = False
        self._is_over = False
        """True after the reader found no source on this node, so there is nothing to read."""
        self._wait_s = FIRST_WAIT_S
        self._due_s = 0.0
        self.missing: dict[str, str] = {}
        """The reason for each source that returns no values."""

    def poll(self, now_s: float) -> tuple[int, dict[SeriesId, float]] | None:
        """Receive the reader's answer if there is one, and send the next request.

        Args:
            now_s: the current monotonic time in seconds.

        Returns:
            The monotonic time in ns and the values of the newest answer; None if there is no new
            answer.
        """
        if self._is_over:
            return None
        if self._process is None:
            self._start(now_s)
            return None
        found = None
        for answer in self._answers():
            self._owes_since_s = None
            if "source" in answer:
                self._opened(answer)
            elif "error" in answer:
                self.missing[GPU] = str(answer["error"])
            else:
                self.missing.pop(GPU, None)
                self._wait_s = FIRST_WAIT_S
                if answer["values"]:
                    found = int(answer["t_ns"]), values_of(answer)
        if self._process is not None:
            self._ask(self._process, now_s)
        return found

    def close(self) -> None:
        """Kill the reader."""
        self._end()
        for process in self._stuck:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WAIT_S)

    def _start(self, now_s: float) -> None:
        self._stuck = [one for one in self._stuck if one.poll() is None]
        if now_s < self._due_s or len(self._stuck) >= MAX_STUCK:
            return
        self._rest, self._is_open, self._owes_since_s = b"", False, now_s
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._environment,
            )
        except OSError as error:
            self._fail(now_s, f"the reader cannot be started: {error.strerror}")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _opened(self, answer: dict[str, Any]) -> None:
        self._is_open = True
        self.missing = {str(name): str(why) for name, why in answer["missing"].items()}
        if answer["source"] is None:
            self._is_over = True
            self._end()

    def _ask(self, process: subprocess.Popen[bytes], now_s: float) -> None:
        if process.poll() is not None:
            self._fail(now_s, f"the reader ended with code {process.returncode}")
        elif self._owes_since_s is None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # the reader is ending
                os.write(process.stdin.fileno(), b"\n")
                self._owes_since_s = now_s
        elif now_s - self._owes_since_s > (SILENT_S if self._is_open else OPEN_S):
            self._fail(now_s, f"the driver has not answered for {now_s - self._owes_since_s:.0f} s")

    def _fail(self, now_s: float, why: str) -> None:
        self.missing[GPU] = why
        self._end()
        self._due_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()
            self._stuck.append(process)  # no wait: the process may be stuck in the kernel

    def _answers(self) -> list[dict[str, Any]]:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._process.stdout.fileno(), 1 << 16):
                self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        found = []
        for line in lines:
            # A driver's library may print lines of its own.
            with contextlib.suppress(ValueError):
                if isinstance(answer := json.loads(line), dict):
                    found.append(answer)
        return found


class Sampler:
    """Write the counters of the host and the GPUs to a recording, one sample per call.

    The caller decides when to sample.
    """

    def __init__(self, writer: RecordingWriter, host: Host, gpus: Gpus | None) -> None:
        """Store the writer and the sources of the counters.

        Args:
            writer: the writer of the node's file.
            host: reads the counters of the host.
            gpus: reads the counters of the GPUs; None if this node has no GPU.
        """
        self._writer = writer
        self.host = host
        self._gpus = gpus
        self._reported: dict[str, str] = {}
        self.skipped = 0
        """The number of samples that could not be written, for example due to a full disk."""

    def sample(self, now_ns: int) -> None:
        """Read and write one sample. If writing fails, only this sample is lost."""
        missing = {GPU: NO_GPU} if self._gpus is None else self._gpus.missing
        try:
            if self._gpus is not None and (answer := self._gpus.poll(now_ns / 1e9)) is not None:
                self._writer.sample(*answer)
            try:
                self._writer.sample(now_ns, self.host.read(now_ns))
            except CannotRead as error:
                missing = {**missing, self.host.name: str(error)}
            for name in sorted(missing.keys() | self._reported.keys()):
                if missing.get(name, "") != self._reported.get(name, ""):
                    self._writer.source(name, missing.get(name, ""))
            self._reported = dict(missing)
        except OSError:
            self.skipped += 1


def main() -> None:
    """Write samples until the standard input is closed."""
    die_with_parent()
    folder, node, interval_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    gpus = None
    if has_gpu():
        command, environment = module_command("holdfast.profile.sources.reader")
        gpus = Gpus([*command, str(interval_s)], environment)
    with RecordingWriter(folder, node=node) as writer:
        sampler = Sampler(writer, Host(interval_s=interval_s), gpus)
        try:
            _run(sampler, round(interval_s * 1e9))
        finally:
            if gpus is not None:
                gpus.close()


def _run(sampler: Sampler, interval_ns: int) -> None:
    orders = b""
    due_ns = time.monotonic_ns()
    while True:
        sampler.sample(time.monotonic_ns())
        # A late sample does not delay later samples: the times stay on one grid.
        due_ns += interval_ns * max(1, -(-(time.monotonic_ns() - due_ns) // interval_ns))
        while (wait_ns := due_ns - time.monotonic_ns()) > 0:
            if select.select([0], [], [], wait_ns / 1e9)[0]:
                if not (chunk := os.read(0, 1 << 16)):
                    return
                *lines, orders = (orders + chunk).split(b"\n")
                for line in lines:
                    ranks = json.loads(line)["ranks"]
                    sampler.host.pids = {int(rank): int(pid) for rank, pid in ranks.items()}


if __name__ == "__main__":
    main()
