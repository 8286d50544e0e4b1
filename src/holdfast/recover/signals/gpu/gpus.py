"""Convert the measured state of a node's GPUs to signals: typed evidence that a node is faulty.

The program that reads the GPUs' counters is a separate process, the reader, because a call into a
driver may hang.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.core.exporter import ENV_EXPORTER
from holdfast.core.processes import module_command
from holdfast.recover.signals.facts import TEXT_LIMIT, CannotSee, Fact, NodeSignal
from holdfast.recover.signals.gpu.state import GpuState, Reading

TIMEOUT_S = 50.0
"""The seconds to wait for an answer: more than all commands of the readers can take together."""
MIN_PERIOD_S = 5.0
SHARE = 1 / 500
"""The largest share of a core that reading may use.

Only CPU time counts, and not the time of waiting for the driver.
"""
NVLINK_ERRORS = 100
"""This number of new errors of the NVLinks since the first look is reported as a fact.

After that, each doubling is reported.
"""


class Gpus:
    """The GPUs of this node, as a source of signals."""

    name = "the state of the GPUs"

    def __init__(
        self,
        *,
        driver: Path = Path("/proc/driver/nvidia"),
        command: Sequence[str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Store what `read` needs.

        Args:
            driver: the folder that exists if NVIDIA's driver is loaded.
            command: the command that starts a reader process, which must answer like `reader`; None
                for `reader` itself.
            timeout_s: the seconds after which a process that does not answer is killed.
        """
        self._driver = driver
        self._command = command
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stuck: subprocess.Popen[bytes] | None = None
        self._cpu_s = 0.0
        """The CPU seconds that the last look took."""
        self._known: dict[str, set[str]] = {}
        """For each reader, the GPUs that any look has found."""
        self._first: dict[tuple[str, str, str], int] = {}
        """For each reader, GPU and counter: the count at the first look, or at the first look after
        a reset.
        """
        self._most_links: dict[tuple[str, str], int] = {}
        self._xids: dict[tuple[str, int], int] = {}
        """For each GPU and code, the number of Xid events."""

    @property
    def period_s(self) -> float:
        """See `Source.period_s`."""
        return max(MIN_PERIOD_S, self._cpu_s / SHARE)

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        if not self._driver.exists() and not os.environ.get(ENV_EXPORTER):
            raise CannotSee("this host has no NVIDIA driver")
        reply = self._ask()
        cpu_s = reply.get("cpu_s")
        self._cpu_s = cpu_s if isinstance(cpu_s, float) else 0.0
        if "error" in reply:
            raise CannotSee(str(reply["error"]))
        return self.facts_of(Reading.of_json(reply))

    def facts_of(self, reading: Reading) -> Sequence[Fact]:
        """Return the facts in a reading, compared with earlier readings."""
        known = self._known.setdefault(reading.reader, set())
        lost = dict(reading.lost)
        if not lost:
            missing = sorted(known - set(reading.gpus))
            lost = dict.fromkeys(missing, f"{reading.reader} no longer shows this GPU")
        if not reading.gpus and not lost:
            raise CannotSee(f"{reading.reader} shows no GPU")
        known |= set(reading.gpus)
        facts: list[Fact] = [self._signal("gpu-lost", where, text) for where, text in lost.items()]
        for where, gpu in reading.gpus.items():
            for code in gpu.xids:
                self._xids[where, code] = self._xids.get((where, code), 0) + 1
            facts += self._of(reading.reader, where, gpu)
        for (where, code), count in self._xids.items():
            # The text has the form of a log line of the driver, so that the rules of the
            # diagnosis match the text.
            text = f"NVRM: Xid (PCI:{where}): {code}, by {reading.reader}"
            facts.append(
                NodeSignal(
                    source=self.name, name=f"xid-{code}", where=where, text=text, count=count
                )
            )
        return facts

    def _of(self, reader: str, where: str, gpu: GpuState) -> Iterable[NodeSignal]:
        new = self._new(reader, where, "errors", gpu.uncorrectable_errors)
        if new > 0:
            yield self._signal(
                "ecc-uncorrectable", where, f"{new} new uncorrectable ECC errors", new
            )
        if gpu.remap_failed:
            yield self._signal("row-remap-failure", where, "a memory row could not be remapped")
        if gpu.remap_pending:
            yield self._signal(
                "row-remap-pending", where, "a memory row waits to be remapped by a reset"
            )
        if gpu.recovery_action:
            yield self._signal(
                "gpu-needs-reset", where, f"the driver recommends: {gpu.recovery_action}"
            )
        for name in gpu.slowdowns:
            yield self._signal(
                "gpu-slowed", where, f"{name} is active at {gpu.temperature}", part=name
            )
        new = self._new(reader, where, "nvlink", gpu.nvlink_errors)
        if new >= NVLINK_ERRORS:
            level = NVLINK_ERRORS << (new // NVLINK_ERRORS).bit_length() - 1
            yield self._signal(
                "nvlink-errors", where, f"its NVLinks had more than {level} errors since the start",
                level,
            )  # fmt: skip
        if gpu.nvlinks_up is not None:
            most = max(gpu.nvlinks_up, self._most_links.get((reader, where), 0))
            self._most_links[reader, where] = most
            if gpu.nvlinks_up < most:
                yield self._signal(
                    "nvlink-down", where, f"{gpu.nvlinks_up} of its {most} NVLinks are up"
                )

    def _new(self, reader: str, where: str, counter: str, count: int | None) -> int:
        if count is None:
            return 0
        key = reader, where, counter
        self._first[key] = min(count, self._first.get(key, count))  # a reset sets counts to 0
        return count - self._first[key]

    def _signal(
        self, name: str, where: str, text: str, count: int = 1, *, part: str = ""
    ) -> NodeSignal:
        text = f"GPU {where}: {text}" if where else text
        place = f"{where} {part}".strip()
        return NodeSignal(
            source=self.name, name=name, where=place, text=text[:TEXT_LIMIT], count=count
        )

    def _ask(self) -> dict[str, object]:
        """Return the answer of the reader process; start the process if there is none."""
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(b"\n")
            process.stdin.flush()
            reply: dict[str, object] = json.loads(self._line(process))
        except (OSError, ValueError) as error:
            self._give_up(process)
            raise CannotSee(f"the process that reads the GPUs: {error}") from error
        except CannotSee:
            self._give_up(process)
            raise
        return reply

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        line, deadline_s = b"", time.monotonic() + self._timeout_s
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([process.stdout], [], [], left_s)[0]:
                raise CannotSee(f"the driver did not answer within {self._timeout_s:g} s")
            if not (chunk := os.read(process.stdout.fileno(), 1 << 16)):
                raise CannotSee("the process that reads the GPUs has ended")
            line += chunk
        return line

    def _start(self) -> subprocess.Popen[bytes]:
        if self._stuck is not None and self._stuck.poll() is None:
            raise CannotSee("the driver hangs, and SIGKILL does not end the process that reads it")
        self._stuck = None
        command, environment = module_command("holdfast.recover.signals.gpu.reader")
        try:
            self._process = subprocess.Popen(
                self._command or command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a process group for the reader and its commands
            )
        except OSError as error:
            raise CannotSee(f"no process reads the GPUs: {error.strerror}") from error
        return self._process

    def _give_up(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped: no other group has this id
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        self._process, self._stuck = None, process  # do not wait: the process may hang
