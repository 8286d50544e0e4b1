"""Read the lines of the kernel's log that report a fault of the node."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from holdfast.core.processes import die_with_parent
from holdfast.recover.signals.facts import TEXT_LIMIT, CannotSee, Fact, NodeSignal

READ_BYTES = 16 * 1024
"""More than the longest record of /dev/kmsg: a smaller buffer makes the kernel refuse the read."""
LINES_PER_READ = 20_000
"""A log that is flooded is read on at the next look."""
JOURNAL: Final = ("journalctl", "--dmesg", "--follow", "--lines=0", "--output=cat")
_RECORD = re.compile(r"\d+,\d+,(?P<stamp_us>\d+),[^;]*;(?P<text>.*)")
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
"""The name of each fault, and the line that reports the fault."""
HOT: Final = re.compile(
    r"Xid|NVRM|nvme|I/O error|EXT4-fs|BTRFS|XFS|Hardware Error|EDAC|mce:|mlx5_core|NETDEV WATCHDOG|watchdog:"
)
"""Every line of `PATTERNS` has one of these words."""


def fault_in(line: str) -> tuple[str, str] | None:
    """Return the name of the fault that a line reports and its device; None for another line."""
    if HOT.search(line) is None:
        return None
    for name, pattern in PATTERNS:
        if (found := pattern.search(line)) is not None:
            groups = found.groupdict()
            code = groups.get("code")
            return (name if code is None else f"{name}-{code}"), groups.get("where") or ""
    return None


class KernelLog:
    """The kernel's log from a moment on: /dev/kmsg, or the journal if that may not be read."""

    name = "the kernel's log"
    period_s = 2.0

    def __init__(
        self,
        *,
        since_s: float,
        path: Path = Path("/dev/kmsg"),
        journal: Sequence[str] = JOURNAL,
    ) -> None:
        """Open nothing yet.

        Args:
            since_s: monotonic seconds; older lines are left out, so that a start replays no old fault.
            path: the device, or a file of the same form.
            journal: the command that prints new lines, for a user who may not read the device.
        """
        self._since_us = since_s * 1e6
        self._path = path
        self._command = journal
        self._fd: int | None = None
        self._journal: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._found: dict[tuple[str, str], NodeSignal] = {}

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        if self._fd is None:
            self._open()
        for line in self._lines():
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

    def _open(self) -> None:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._open_journal(f"{self._path}: {error.strerror}")

    def _open_journal(self, why: str) -> None:
        try:
            self._journal = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - the function only calls prctl
            )
        except OSError as error:
            raise CannotSee(f"{why}; {self._command[0]}: {error.strerror}") from error
        assert self._journal.stdout is not None
        self._fd = self._journal.stdout.fileno()
        os.set_blocking(self._fd, False)

    def _lines(self) -> Iterator[str]:
        assert self._fd is not None
        for _ in range(LINES_PER_READ):
            try:
                chunk = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were overwritten before they were read: go on with the oldest one
            except OSError as error:
                self._close()
                raise CannotSee(f"{self._path}: {error.strerror}") from error
            if not chunk:
                if self._journal is not None:
                    code = self._journal.wait()
                    self._close()
                    raise CannotSee(
                        f"{self._path} may not be read, and {self._command[0]} ended with code {code}"
                    )
                return
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            for line in whole:
                text = line.decode(errors="replace")
                record = _RECORD.match(text)
                if record is None:
                    if self._journal is not None:
                        yield text
                elif int(record["stamp_us"]) >= self._since_us:
                    yield record["text"]

    def _close(self) -> None:
        if self._journal is not None and self._journal.stdout is not None:
            self._journal.stdout.close()
        elif self._fd is not None:
            os.close(self._fd)
        self._fd = self._journal = None
