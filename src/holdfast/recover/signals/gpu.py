"""Read the state of the GPUs from `nvidia-smi`, in a process that may hang without harm."""

import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.recover.signals.facts import TEXT_LIMIT, CannotSee, Fact, NodeSignal

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

COMMAND: Final = ("nvidia-smi", "-q", "-x")
TIMEOUT_S = 30.0
LEAST_PERIOD_S = 30.0
SHARE = 1 / 500
"""`nvidia-smi` runs for at most this share of the time, so that it uses at most 0.2% of a core."""
LOST = re.compile(r"GPU is lost|fallen off the bus", re.IGNORECASE)
_PCI = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.\d)?")


class Gpus:
    """The GPUs of this node, as NVIDIA's driver describes them."""

    name = "the state of the GPUs"

    def __init__(
        self,
        *,
        driver: Path = Path("/proc/driver/nvidia"),
        command: Sequence[str] = COMMAND,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Read nothing yet.

        Args:
            driver: the folder that is there if NVIDIA's driver is loaded.
            command: prints the XML of `nvidia-smi -q -x`.
            timeout_s: seconds after which the command is killed.
        """
        self._driver = driver
        self._command = list(command)
        self._timeout_s = timeout_s
        self._stuck: subprocess.Popen[bytes] | None = None
        self._took_s = 0.0
        self._known: set[str] = set()
        """The GPUs that were there at any look."""
        self._first_errors: dict[str, int] = {}
        """For each GPU, the uncorrectable errors since the driver was loaded, at the first look."""

    @property
    def period_s(self) -> float:
        """See `Source.period_s`."""
        return max(LEAST_PERIOD_S, self._took_s / SHARE)

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        if not self._driver.exists():
            raise CannotSee("this host has no NVIDIA driver")
        code, out = self._run()
        if code != 0:
            said = " ".join(out.decode(errors="replace").split())
            if LOST.search(said):
                place = _PCI.search(said)
                where = "" if place is None else place[0].lower()
                return [self._signal("gpu-lost", where, said)]
            raise CannotSee(f"{self._command[0]} ended with code {code}: {said[:100]}")
        from xml.etree import ElementTree  # most hosts of tests have no GPU, and need no parser

        try:
            log = ElementTree.fromstring(out)
        except ElementTree.ParseError as error:
            raise CannotSee(f"{self._command[0]} printed no XML: {error}") from error
        gpus = {(gpu.get("id") or "").lower(): gpu for gpu in log.findall("gpu")}
        if not gpus and not self._known:
            raise CannotSee(f"{self._command[0]} shows no GPU")
        missing = sorted(self._known - set(gpus))
        self._known |= set(gpus)
        lost = [
            self._signal("gpu-lost", where, "nvidia-smi shows this GPU no more")
            for where in missing
        ]
        return [*lost, *(fact for where, gpu in gpus.items() for fact in self._of(where, gpu))]

    def _run(self) -> tuple[int, bytes]:
        if self._stuck is not None and self._stuck.poll() is None:
            raise CannotSee(f"{self._command[0]} hangs, and SIGKILL does not end it")
        self._stuck, began_s = None, time.monotonic()
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
            self._stuck = process  # not waited for: the kernel may hold it
            raise CannotSee(
                f"{self._command[0]} did not answer within {self._timeout_s:g} s"
            ) from error
        finally:
            self._took_s = time.monotonic() - began_s
        return process.returncode, out

    def _of(self, where: str, gpu: "Element") -> Iterable[NodeSignal]:
        errors = sum(
            count
            for each in gpu.iterfind("ecc_errors/volatile//*")
            if "uncorrectable" in each.tag and (count := _number(each.text)) is not None
        )
        new = errors - self._first_errors.setdefault(where, errors)
        if new > 0:
            yield self._signal(
                "ecc-uncorrectable", where, f"{new} new uncorrectable ECC errors", new
            )
        if _is_yes(gpu, "remapped_rows/remapped_row_failure"):
            yield self._signal("row-remap-failure", where, "a memory row could not be remapped")
        if _is_yes(gpu, "remapped_rows/remapped_row_pending"):
            yield self._signal(
                "row-remap-pending", where, "a memory row waits to be remapped by a reset"
            )
        action = (gpu.findtext("gpu_recovery_action") or "None").strip()
        if action not in ("None", "N/A"):
            yield self._signal("gpu-needs-reset", where, f"the driver asks for: {action}")
        for tag in ("hw_thermal_slowdown", "hw_power_brake_slowdown"):
            reasons = (each for each in gpu.iter() if each.tag.endswith(f"_reason_{tag}"))
            if any((each.text or "").strip() == "Active" for each in reasons):
                temperature = (gpu.findtext("temperature/gpu_temp") or "?").strip()
                yield self._signal(
                    "gpu-slowed", f"{where} {tag}".strip(), f"{tag} is active at {temperature}"
                )

    def _signal(self, name: str, where: str, text: str, count: int = 1) -> NodeSignal:
        text = f"GPU {where}: {text}" if where else text
        return NodeSignal(
            source=self.name, name=name, where=where, text=text[:TEXT_LIMIT], count=count
        )


def _number(text: str | None) -> int | None:
    words = (text or "").split()
    return int(words[0]) if words and words[0].isdigit() else None


def _is_yes(gpu: "Element", path: str) -> bool:
    return (gpu.findtext(path) or "").strip() == "Yes"
