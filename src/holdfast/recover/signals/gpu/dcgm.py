"""Read the GPUs by DCGM: by the command `dcgmi`, or from a dcgm-exporter on this node.

DCGM reports only the last Xid of each GPU, which may be older than this process. So the first look
at a GPU reports no Xid, and the same code in two consecutive looks counts once.
"""

import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from holdfast.core.exporter import fetch_page, samples
from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.gpu.state import GpuState, Reading, slowdowns_of

TIMEOUT_S = 15.0
MOST: Final = 2**31 - 17
"""Larger values mean that a value is missing (dcgm_structs.h, DCGM_INT32_BLANK)."""
XID, ERRORS, FAILED, PENDING, CLOCKS, TEMPERATURE = 230, 311, 395, 396, 112, 150
NVLINK: Final = (409, 419, 429, 439)
FIELDS: Final = (XID, ERRORS, FAILED, PENDING, CLOCKS, TEMPERATURE, *NVLINK)
"""The numbers of DCGM's fields (dcgm_fields.h), which all versions of `dcgmi` accept."""
NAMES: Final = {
    "DCGM_FI_DEV_XID_ERRORS": XID,
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ERRORS,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": FAILED,
    "DCGM_FI_DEV_ROW_REMAP_PENDING": PENDING,
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": CLOCKS,
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": CLOCKS,
    "DCGM_FI_DEV_GPU_TEMP": TEMPERATURE,
    "DCGM_FI_DEV_GPU_TEMP_CELSIUS": TEMPERATURE,
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": NVLINK[0],
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": NVLINK[1],
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": NVLINK[2],
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": NVLINK[3],
}
"""The number of each field, by the names that old and new versions of the exporter use."""
_HEALTH: Final = frozenset(NAMES.values()) - {TEMPERATURE}


class Dcgmi:
    """A reader that runs the command `dcgmi dmon` for each look."""

    name = "DCGM"

    def __init__(self, command: str = "dcgmi", *, timeout_s: float = TIMEOUT_S) -> None:
        """Store the command, and `timeout_s`, the seconds after which it is killed."""
        self._command = command
        self._timeout_s = timeout_s
        self._xids = _Xids()

    def read(self) -> Reading:
        """See `Reader.read`."""
        words = [self._command, "dmon", "-e", ",".join(map(str, FIELDS)), "-c", "1"]
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                check=False,
            )
        except OSError as error:
            raise CannotSee(f"{self._command}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise CannotSee(
                f"{self._command} did not answer within {self._timeout_s:g} s"
            ) from error
        gpus = {}
        for line in done.stdout.splitlines():
            words = line.split()
            if words[:1] == ["GPU"] and len(words) == 2 + len(FIELDS):
                gpus[f"number {words[1]}"] = _usable(zip(FIELDS, words[2:], strict=True))
        if not gpus:
            output = " ".join((done.stdout + done.stderr).split())[:100]
            raise CannotSee(f"{self._command} ended with code {done.returncode}: {output}")
        return self._xids.reading(self.name, gpus)


class Exporter:
    """A reader of the page of a dcgm-exporter, which has the fields that its administrator chose."""

    name = "dcgm-exporter"

    def __init__(self, fetch: Callable[[], bytes] = fetch_page) -> None:
        """Store `fetch`, which returns the page, and raises OSError if there is none."""
        self._fetch = fetch
        self._xids = _Xids()

    def read(self) -> Reading:
        """See `Reader.read`."""
        try:
            page = self._fetch()
        except OSError as error:
            raise CannotSee(str(error)) from error
        gpus: dict[str, list[tuple[int, str]]] = {}
        for name, labels, value in samples(page):
            number, device = NAMES.get(name), labels.get("gpu", "")
            if number is not None and device.isdigit() and not labels.get("GPU_I_ID"):
                where = labels.get("pci_bus_id", "").lower() or f"number {device}"
                gpus.setdefault(where, []).append((number, value))
        found = {where: _usable(values) for where, values in gpus.items()}
        if not any(_HEALTH & set(values) for values in found.values()):
            raise CannotSee("the dcgm-exporter's page has no field about the health of a GPU")
        return self._xids.reading(self.name, found)


class _Xids:
    """The last Xid of each GPU at the previous look, to find new ones."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def reading(self, name: str, gpus: Mapping[str, Mapping[int, int]]) -> Reading:
        return Reading(reader=name, gpus={where: self._state(where, gpus[where]) for where in gpus})

    def _state(self, where: str, values: Mapping[int, int]) -> GpuState:
        last = values.get(XID, 0)
        before = self._last.get(where, last)
        self._last[where] = last
        counters = [values[number] for number in NVLINK if number in values]
        return GpuState(
            uncorrectable_errors=values.get(ERRORS),
            remap_failed=values.get(FAILED, 0) != 0,
            remap_pending=values.get(PENDING, 0) != 0,
            slowdowns=slowdowns_of(values.get(CLOCKS)),
            temperature=f"{values[TEMPERATURE]} C" if TEMPERATURE in values else "?",
            nvlink_errors=sum(counters) if counters else None,
            xids=(last,) if last not in (0, before) else (),
        )


def _usable(values: Iterable[tuple[int, str]]) -> dict[int, int]:
    """Return the values that are not missing."""
    found = {}
    for number, word in values:
        try:
            value = float(word)
        except ValueError:  # N/A
            continue
        if 0 <= value <= MOST:
            found[number] = int(value)
    return found
