"""Find lines in the kernel's log that report a fault of the node."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from holdfast.recover.signals.facts import TEXT_LIMIT, CannotSee, Fact, NodeSignal

READ_BYTES = 16 * 1024
"""The read size in bytes. It is larger than the longest record of /dev/kmsg, since the kernel
refuses a smaller buffer.
"""
READS = 20_000
"""The largest number of reads per look. If the log is flooded, the rest is read at the next look.
"""
DEVICE_PERIOD_S = 2.0
JOURNAL_PERIOD_S = 30.0
JOURNAL_TIMEOUT_S = 20.0
SINCE_S = 120
"""Each look reads this number of last seconds of the journal. Lines that were read before are left
out.
"""
JOURNAL: Final = ("journalctl", "--dmesg", "--quiet", "--no-pager", "--output=short-monotonic")
_RECORD = re.compile(r"\d+,\d+,(?P<stamp_us>\d+),[^;]*;(?P<text>.*)")
_JOURNAL_LINE = re.compile(r"\[\s*(?P<stamp_s>\d+\.\d+)\] \S+ kernel: (?P<text>.*)")
_PCI = r"\((?:PCI:)?(?P<where>[0-9A-Fa-f:.]+)[^)]*\)"
PATTERNS: Final = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("xid", rf"NVRM: Xid {_PCI}: (?P<code>\d+)\b"),
        ("sxid", rf"nvidia-nvswitch\d*: SXid {_PCI}: (?P<code>\d+)\b"),
        ("gpu-lost", r"NVRM: .*(?:fallen off the bus|GPU is lost|RmInitAdapter failed)"),
        ("disk-lost", r"nvme (?P<where>nvme\d+): .*(?:controller is down|Removing after probe|Device not ready)"),
        ("disk-error", r"I/O error,? .*?\bdev (?P<where>[\w-]+)"),
        ("file-system-error", r"(?:EXT4-fs error|BTRFS: error) \(device (?P<where>[\w-]+)"),
        ("file-system-error", r"XFS \((?P<where>[\w-]+)\): .*(?:shut ?down|[Cc]orrupt|I/O error)"),
        ("machine-check", r"(?:Hardware Error|EDAC|mce:).*(?:[Uu]ncorrect|\bUE\b|[Ff]atal)"),
        ("nic-fault", r"mlx5_core (?P<where>\S+?):? .*(?:health compromised|[Ff]atal error|poll_health)"),
        ("nic-stuck", r"NETDEV WATCHDOG: (?P<where>\S+) .*transmit queue \d+ timed out"),
        ("cpu-lockup", r"watchdog: BUG: soft lockup|NMI watchdog: .*hard LOCKUP"),
    )
)  # fmt: skip
"""The name of each fault, with the pattern of the lines that report it."""
HOT: Final = re.compile(
    r"Xid|NVRM|nvme|I/O error|EXT4-fs|BTRFS|XFS|Hardware Error|EDAC|mce:|mlx5_core|NETDEV WATCHDOG|watchdog:"
)
"""Every line that a pattern in `PATTERNS` matches has one of these words."""


def fault_in(line: str) -> tuple[str, str] | None:
    """Return the name and the device of the fault that a line reports; None if it reports none."""
    if HOT.search(line) is None:
        return None
    for name, pattern in PATTERNS:
        if (found := pattern.search(line)) is not None:
            groups = found.groupdict()
            code = groups.get("code")
            return (name if code is None else f"{name}-{code}"), groups.get("where") or ""
    return None


class KernelLog:
    """The kernel's log from a certain time on: /dev/kmsg, or the journal if that is not readable."""

    name = "the kernel's log"

    def __init__(
        self,
        *,
        since_s: float,
        path: Path = Path("/dev/kmsg"),
        journal: Sequence[str] = JOURNAL,
    ) -> None:
        """Store what `read` needs.

        Args:
            since_s: a time in monotonic seconds. Older lines are left out, so that old faults are
                not reported again at a start.
            path: the device, or a file in the same format.
            journal: the command that prints lines of the journal, for users who may not read the
                device.
        """
        self._since_us = since_s * 1e6
        self._path = path
        self._command = journal
        self._fd: int | None = None
        self._rest = b""
        self._found: dict[tuple[str, str], NodeSignal] = {}

    @property
    def period_s(self) -> float:
        """See `Source.period_s`."""
        return DEVICE_PERIOD_S if self._fd is not None else JOURNAL_PERIOD_S

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        why = "" if self._fd is not None else self._open()
        for line in self._device_lines() if self._fd is not None else self._journal_lines(why):
            found = fault_in(line)
            if found is None:
                continue
            name, where = found
            before = self._found.get(found)
            count = 1 if before is None else before.count + 1
            self._found[found] = NodeSignal(
                source=self.name, name=name, where=where, text=line[:TEXT_LIMIT], count=count
            )
        return list(self._found.values())

    def _open(self) -> str:
        """Open the device; return the reason if this fails."""
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        return ""

    def _device_lines(self) -> Iterator[str]:
        assert self._fd is not None
        for _ in range(READS):
            try:
                chunk = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # the kernel has overwritten unread records; continue with the oldest
            except OSError as error:
                raise CannotSee(f"{self._path}: {error.strerror}") from error
            if not chunk:
                return
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            for line in whole:
                record = _RECORD.match(line.decode(errors="replace"))
                if record is not None and int(record["stamp_us"]) >= self._since_us:
                    yield record["text"]

    def _journal_lines(self, why: str) -> Iterator[str]:
        name = self._command[0]
        try:
            done = subprocess.run(
                [*self._command, f"--since=-{SINCE_S}s"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=JOURNAL_TIMEOUT_S,
                check=False,
            )
        except OSError as error:
            raise CannotSee(f"{why}; {name}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise CannotSee(f"{why}; {name} did not answer") from error
        if done.returncode != 0 or "not seeing messages" in done.stderr:
            output = " ".join(done.stderr.split())[:100]
            raise CannotSee(f"{why}; {name} ended with code {done.returncode}: {output}")
        last_us = self._since_us
        for line in done.stdout.splitlines():
            record = _JOURNAL_LINE.match(line)
            if record is not None and (stamp_us := float(record["stamp_s"]) * 1e6) > last_us:
                self._since_us = max(self._since_us, stamp_us)
                yield record["text"]
