"""Read NVIDIA GPUs through DCGM, from the command `dcgmi dmon` or from a dcgm-exporter.

The exporter serves its values on an HTTP page of this node. For `dcgmi`, fields are matched by
number, because their names have changed between versions. The exporter's page contains only names.
"""

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Final

from holdfast.core.exporter import fetch_page, samples
from holdfast.core.processes import die_with_parent
from holdfast.profile.metrics import DCGM, EXPORTER
from holdfast.profile.recording import SeriesId
from holdfast.profile.sources.source import CannotRead, SourceEnded, plausible

MIB: Final = 1024 * 1024
FIELDS: Final = {
    1002: ("gpu_sm_active", 100.0),
    1003: ("gpu_sm_occupancy", 100.0),
    1004: ("gpu_tensor_active", 100.0),
    1005: ("gpu_dram_active", 100.0),
    1009: ("gpu_pcie_tx", 1.0),
    1010: ("gpu_pcie_rx", 1.0),
    1011: ("gpu_nvlink_tx", 1.0),
    1012: ("gpu_nvlink_rx", 1.0),
    203: ("gpu_utilization", 1.0),
    252: ("gpu_memory_used", MIB),
    155: ("gpu_power", 1.0),
    156: ("gpu_energy", 1e-3),
    150: ("gpu_temperature", 1.0),
    100: ("gpu_sm_clock", 1.0),
}
"""For each DCGM field number: the name of the metric, and the factor that converts DCGM's unit.

DCGM's units are 0 to 1 for counters, MiB for memory and mJ for energy.
"""
NAMES: Final = {
    "DCGM_FI_PROF_SM_ACTIVE": 1002,
    "DCGM_FI_PROF_SM_OCCUPANCY": 1003,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 1004,
    "DCGM_FI_PROF_DRAM_ACTIVE": 1005,
    "DCGM_FI_PROF_PCIE_TX_BYTES": 1009,
    "DCGM_FI_PROF_PCIE_RX_BYTES": 1010,
    "DCGM_FI_PROF_NVLINK_TX_BYTES": 1011,
    "DCGM_FI_PROF_NVLINK_RX_BYTES": 1012,
    "DCGM_FI_DEV_GPU_UTIL": 203,
    "DCGM_FI_DEV_FB_USED": 252,
    "DCGM_FI_DEV_POWER_USAGE": 155,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 156,
    "DCGM_FI_DEV_GPU_TEMP": 150,
    "DCGM_FI_DEV_GPU_TEMP_CELSIUS": 150,
    "DCGM_FI_DEV_SM_CLOCK": 100,
}
"""The field number for each name that an exporter uses, in old and new versions."""
EXPORTER_INTERVAL_S: Final = 30.0
"""The exporter's default update interval in seconds. Between updates its values do not change."""
ANSWER_S: Final = 5.0
LAST_WAIT_S: Final = 1.0
"""Seconds to wait for a command to end, after SIGKILL or after its output was closed."""


class Dcgmi:
    """The running command `dcgmi dmon`, which prints one line per GPU and interval."""

    name = DCGM

    def __init__(
        self, *, interval_s: float = 1.0, command: str = "dcgmi", answer_s: float = ANSWER_S
    ) -> None:
        """Start the command, and wait for the header of its table.

        If DCGM's host engine is not running, the command prints an error instead of the header.

        Args:
            interval_s: seconds between two lines of a GPU.
            command: the name or path of the program.
            answer_s: seconds to wait for the header.

        Raises:
            CannotRead: the command is missing, or prints no header.
        """
        self._interval_s = interval_s
        fields = ",".join(map(str, FIELDS))
        words = [command, "dmon", "-e", fields, "-d", str(max(100, round(interval_s * 1000)))]
        try:
            # A reader that hangs is killed; `dcgmi` then ends, too.
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - a reader has one thread
            )
        except OSError as error:
            raise CannotRead(f"{command}: {error.strerror}") from error
        assert self._process.stdout is not None
        self._fd = self._process.stdout.fileno()
        os.set_blocking(self._fd, False)
        self._rest = b""
        self._has_header = self._is_at_end = False
        self._last_line = ""
        self._newest: dict[int, list[str]] = {}
        """For each GPU, the columns of its newest line that `read` has not returned yet."""
        try:
            self._wait_for_header(command, answer_s)
        except CannotRead:
            self.close()
            raise

    def _wait_for_header(self, command: str, answer_s: float) -> None:
        deadline_s = time.monotonic() + answer_s
        while not self._has_header:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._fd], [], [], left_s)[0]:
                reason = f": {self._last_line[:200]}" if self._last_line else ""
                raise CannotRead(f"{command} printed no table within {answer_s:g} s{reason}")
            self._take_lines()
            if self._is_at_end and not self._has_header:
                raise CannotRead(self._ending())

    def read(self, now_ns: int) -> dict[SeriesId, float]:  # noqa: ARG002 - the command has its own clock
        """See `Source.read`; empty if the command has printed nothing since the last call."""
        self._take_lines()
        newest, self._newest = self._newest, {}
        if not newest and self._is_at_end:
            raise SourceEnded(self._ending())
        return plausible(
            (self._id(metric, device), factor * number)
            for device, words in newest.items()
            for (metric, factor), word in zip(FIELDS.values(), words, strict=True)
            if (number := _number(word)) is not None
        )

    def close(self) -> None:
        """See `Source.close`."""
        self._process.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stuck in the kernel
            self._process.wait(LAST_WAIT_S)

    def _id(self, metric: str, device: int) -> SeriesId:
        return SeriesId(metric, DCGM, device=device, interval_s=self._interval_s)

    def _take_lines(self) -> None:
        """Parse the lines that the command has printed so far, without waiting for more."""
        for line in self._lines():
            words = line.split()
            if line.startswith("#"):
                self._has_header = True
            elif words[:1] == ["GPU"] and len(words) == 2 + len(FIELDS) and words[1].isdigit():
                self._newest[int(words[1])] = words[2:]
            elif words and not line.startswith("ID"):
                self._last_line = line

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                chunk = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                self._is_at_end = True
                return
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)

    def _ending(self) -> str:
        # A command that has closed its output sends no more values, even if the command still runs.
        try:
            returncode = self._process.wait(LAST_WAIT_S)
        except subprocess.TimeoutExpired:
            return f"dcgmi closed its output: {self._last_line[:200]}"
        return f"dcgmi ended with code {returncode}: {self._last_line[:200]}"


class Exporter:
    """The metrics page of a dcgm-exporter on this node."""

    name = EXPORTER

    def __init__(self, fetch: Callable[[], bytes] | None = None) -> None:
        """Fetch the page once, to check that it has values of a GPU.

        Args:
            fetch: returns the page. By default the page is fetched from the URL in
                `$HOLDFAST_DCGM_EXPORTER`, else from port 9400 of this node.

        Raises:
            CannotRead: the page cannot be fetched, or has no values of a GPU.
        """
        self._fetch = fetch or _fetch_page
        self._due_ns = 0
        if not parse_page(self._fetch()):
            raise CannotRead("the exporter's page names no GPU")

    def read(self, now_ns: int) -> dict[SeriesId, float]:
        """See `Source.read`; empty until the exporter's next update is due."""
        if now_ns < self._due_ns:
            return {}
        self._due_ns = now_ns + round(EXPORTER_INTERVAL_S * 1e9)
        return parse_page(self._fetch())

    def close(self) -> None:
        """See `Source.close`."""


def parse_page(page: bytes) -> dict[SeriesId, float]:
    """Return the values on an exporter's page, except values of MIG instances."""
    found: list[tuple[SeriesId, float | None]] = []
    for name, labels, word in samples(page):
        number = NAMES.get(name)
        if number is None:
            continue
        device = labels.get("gpu", "")
        if not device.isdigit() or labels.get("GPU_I_ID"):
            continue
        metric, factor = FIELDS[number]
        key = SeriesId(metric, EXPORTER, device=int(device), interval_s=EXPORTER_INTERVAL_S)
        value = _number(word)
        found.append((key, None if value is None else factor * value))
    return plausible(found)


def _fetch_page() -> bytes:
    try:
        return fetch_page()
    except OSError as error:
        raise CannotRead(str(error)) from error


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # N/A
        return None
