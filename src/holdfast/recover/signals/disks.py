"""Read the health that the disks of a node report themselves (SMART), by `smartctl`."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, Final

from holdfast.recover.signals.facts import TEXT_LIMIT, CannotSee, Fact, NodeSignal

PERIOD_S: Final = 600.0
TIMEOUT_S: Final = 20.0


class Disks:
    """The disks that `smartctl --scan` finds. On most systems, only root can read them."""

    name = "the disks' own health"
    period_s = PERIOD_S

    def __init__(self, command: str = "smartctl", *, timeout_s: float = TIMEOUT_S) -> None:
        """Store what `read` needs.

        Args:
            command: the program of smartmontools 7 or newer.
            timeout_s: the seconds per disk after which the program is killed.
        """
        self._command = command
        self._timeout_s = timeout_s

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        devices = [
            (str(one["name"]), str(one.get("type", "auto")))
            for one in self._run("--scan").get("devices") or ()
        ]
        if not devices:
            raise CannotSee(f"{self._command} finds no disk")
        facts: list[Fact] = []
        unseen: list[str] = []
        for device, kind in devices:
            try:
                facts += self._of(device, kind)
            except CannotSee as error:
                unseen.append(str(error))
        if len(unseen) == len(devices):
            raise CannotSee("; ".join(unseen))
        return facts

    def _of(self, device: str, kind: str) -> Iterator[Fact]:
        status = self._run("--health", "--device", kind, device)
        passed = (status.get("smart_status") or {}).get("passed")
        if not isinstance(passed, bool):
            messages = (status.get("smartctl") or {}).get("messages") or ()
            reasons = "; ".join(str(one.get("string", "")) for one in messages)
            raise CannotSee(f"{device}: {reasons or 'it reports no health'}")
        if not passed:
            log = status.get("nvme_smart_health_information_log") or {}
            words = [f"{name.replace('_', ' ')} {count}" for name, count in log.items() if count]
            text = ": ".join(
                filter(None, (f"{device} reports that it is failing", ", ".join(words)))
            )
            yield NodeSignal(
                source=self.name, name="disk-failing", where=device, text=text[:TEXT_LIMIT]
            )

    def _run(self, *arguments: str) -> dict[str, Any]:
        try:
            out = subprocess.run(
                [self._command, "--json", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=self._timeout_s,
                check=False,  # the bits of the exit code are also in the output
            ).stdout
            content = json.loads(out)
        except OSError as error:
            raise CannotSee(f"{self._command}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise CannotSee(
                f"{self._command} did not answer within {self._timeout_s:g} s"
            ) from error
        except ValueError as error:
            raise CannotSee(f"{self._command} printed no JSON") from error
        return content if isinstance(content, dict) else {}
