"""Read the GPUs by `nvidia-smi`, which exists wherever the driver is installed."""

import re
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.gpu.state import SLOWDOWNS, GpuState, Reading

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

COMMAND: Final = ("nvidia-smi", "-q", "-x")
TIMEOUT_S = 25.0
"""The seconds after which the command is killed. They are fewer than the seconds after which the
reader process is killed.
"""
LOST = re.compile(r"GPU is lost|fallen off the bus", re.IGNORECASE)
_PCI = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.\d)?")


class Smi:
    """A reader that runs the command `nvidia-smi` for each look."""

    name = "nvidia-smi"

    def __init__(self, command: Sequence[str] = COMMAND, *, timeout_s: float = TIMEOUT_S) -> None:
        """Store what `read` needs.

        Args:
            command: the command that prints the XML of `nvidia-smi -q -x`.
            timeout_s: the seconds after which the command is killed.
        """
        self._command = list(command)
        self._timeout_s = timeout_s
        self._stuck: subprocess.Popen[bytes] | None = None

    def read(self) -> Reading:
        """See `Reader.read`."""
        code, out = self._run()
        if code != 0:
            output = " ".join(out.decode(errors="replace").split())
            if LOST.search(output):
                place = _PCI.search(output)
                where = "" if place is None else place[0].lower()
                return Reading(reader=self.name, gpus={}, lost={where: output})
            raise CannotSee(f"{self._command[0]} ended with code {code}: {output[:100]}")
        from xml.etree import ElementTree  # without a GPU, no parser is needed

        try:
            log = ElementTree.fromstring(out)
        except ElementTree.ParseError as error:
            raise CannotSee(f"{self._command[0]} printed no XML: {error}") from error
        gpus = {(gpu.get("id") or "").lower(): _state(gpu) for gpu in log.findall("gpu")}
        return Reading(reader=self.name, gpus=gpus)

    def _run(self) -> tuple[int, bytes]:
        if self._stuck is not None and self._stuck.poll() is None:
            raise CannotSee(f"{self._command[0]} hangs, and SIGKILL does not end it")
        self._stuck = None
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise CannotSee(f"{self._command[0]}: {error.strerror}") from error
        try:
            out, _ = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired as error:
            process.kill()
            assert process.stdout is not None
            process.stdout.close()
            self._stuck = process  # do not wait: the process may hang in the kernel
            raise CannotSee(
                f"{self._command[0]} did not answer within {self._timeout_s:g} s"
            ) from error
        return process.returncode, out


def _state(gpu: "Element") -> GpuState:
    action = (gpu.findtext("gpu_recovery_action") or "None").strip()
    return GpuState(
        uncorrectable_errors=sum(
            count
            for each in gpu.iterfind("ecc_errors/volatile//*")
            if "uncorrectable" in each.tag and (count := _number(each.text)) is not None
        ),
        remap_failed=_is_yes(gpu, "remapped_rows/remapped_row_failure"),
        remap_pending=_is_yes(gpu, "remapped_rows/remapped_row_pending"),
        recovery_action="" if action in ("None", "N/A") else action,
        slowdowns=tuple(name for name in SLOWDOWNS.values() if _is_active(gpu, name)),
        temperature=(gpu.findtext("temperature/gpu_temp") or "?").strip(),
    )


def _number(text: str | None) -> int | None:
    words = (text or "").split()
    return int(words[0]) if words and words[0].isdigit() else None


def _is_yes(gpu: "Element", path: str) -> bool:
    return (gpu.findtext(path) or "").strip() == "Yes"


def _is_active(gpu: "Element", name: str) -> bool:
    # clocks_throttle_reason_… of older drivers, clocks_event_reason_… of newer ones
    reasons = (each for each in gpu.iter() if each.tag.endswith(f"_reason_{name}"))
    return any((each.text or "").strip() == "Active" for each in reasons)
