"""Diagnose a running job from output that arrives piece by piece, in bounded memory."""

from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from holdfast.diagnose.explain.answer import conclude
from holdfast.diagnose.explain.diagnosis import Diagnosis, Evidence, LogLine
from holdfast.diagnose.explain.scan import Scan, scan_texts
from holdfast.diagnose.logs.files import LINE_LIMIT_BYTES, LogFile
from holdfast.diagnose.logs.job_context import JobContext, observed_lines
from holdfast.diagnose.rules.packaged import packaged_rules
from holdfast.diagnose.rules.rules import RuleSet

_BLOCK_BYTES: Final = 64 * 1024
"""The output of a log is scanned when this number of bytes has arrived. A diagnosis first scans the
bytes that have arrived since.
"""
_ALL_BYTES: Final = 4 << 20
"""All logs are scanned when this number of bytes of all logs together has arrived. The limit is
needed since a job may have thousands of logs.
"""

Cited = TypeVar("Cited", LogLine, Evidence)


class LogWatcher:
    """Diagnose one job from its output, while the output arrives.

    The memory use does not grow with the output. Kept are some events of each rule, the state of
    each rank's traceback, and the part of each log that was not scanned yet.
    """

    def __init__(self, rules: RuleSet | None = None) -> None:
        self._rules = packaged_rules() if rules is None else rules
        self._scan = Scan(self._rules)
        self._logs: dict[str, _Pending] = {}
        self._pending_bytes = 0

    def feed(
        self, data: bytes | str, log: str = "job.log", rank: int | None = None, part: int = 0
    ) -> None:
        """Add the next piece of output to a log.

        Args:
            data: any number of lines, or a part of a line. With empty data, the log is only
                registered.
            log: the name of the log in the diagnosis.
            rank: the rank that wrote the log, if known.
            part: the number of the file in a rotated log, from 0 for the oldest. A diagnosis cites
                a line of the second newest file as `log.1`.
        """
        pending = self._logs.get(log)
        if pending is None:
            file = LogFile(path=Path(log), group=log, part=0, rank=rank)
            pending = self._logs[log] = _Pending(file)
            self._scan.know(file)
        pending.turn(part)
        before = len(pending.bytes)
        pending.add(data.encode("utf-8", "replace") if isinstance(data, str) else data)
        self._pending_bytes += len(pending.bytes) - before
        if len(pending.bytes) >= _BLOCK_BYTES:
            self._pending_bytes -= len(pending.bytes)
            pending.hand_over(self._scan, last=False)
            self._pending_bytes += len(pending.bytes)
        if self._pending_bytes > _ALL_BYTES:
            self._hand_over(last=False)

    def diagnosis(self, context: JobContext | None = None, *, ended: bool = False) -> Diagnosis:
        """Return the diagnosis of the output so far.

        Args:
            context: the observations of a supervisor.
            ended: True if no more output follows, so that a last line without a line feed is
                complete.
        """
        self._hand_over(last=ended)
        observed = [] if context is None else scan_texts(observed_lines(context), self._rules)
        found = conclude(self._scan.events(), observed, context)
        return replace(
            found,
            end_line=None if found.end_line is None else self._placed(found.end_line),
            root_line=None if found.root_line is None else self._placed(found.root_line),
            root_lines=tuple(map(self._placed, found.root_lines)),
            evidence=tuple(map(self._placed, found.evidence)),
        )

    def _placed(self, cited: Cited) -> Cited:
        """Convert a line number over all parts of a log to the name of a part and the number in it."""
        pending = self._logs.get(cited.file)
        if pending is None or cited.line < 1:
            return cited
        older, line = pending.place(cited.line)
        return replace(cited, file=f"{cited.file}.{older}" if older else cited.file, line=line)

    def _hand_over(self, *, last: bool) -> None:
        for pending in self._logs.values():
            pending.hand_over(self._scan, last=last)
        self._pending_bytes = sum(len(pending.bytes) for pending in self._logs.values())


class _Pending:
    """The part of one log that was not scanned yet."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._next_line = 1
        self._cutting = False
        self._starts = [1]
        """The number of the first line of each part."""
        self.bytes = bytearray()

    def turn(self, part: int) -> None:
        """Begin the part with the number `part`."""
        if (new := part + 1 - len(self._starts)) > 0:
            self._starts += [self._next_line + self.bytes.count(b"\n")] * new

    def place(self, line: int) -> tuple[int, int]:
        """Return how many parts are newer than the part with `line`, and the number in its part."""
        part = bisect_right(self._starts, line) - 1
        return len(self._starts) - 1 - part, line - self._starts[part] + 1

    def add(self, data: bytes) -> None:
        if self._cutting:  # inside a line that is longer than the limit
            ends = [end for end in (data.find(b"\n"), data.find(b"\r")) if end >= 0]
            if not ends:
                return
            data, self._cutting = data[min(ends) :], False
        self.bytes += data
        begun = len(self.bytes) - self._end()
        if begun > LINE_LIMIT_BYTES:
            del self.bytes[self._end() + LINE_LIMIT_BYTES :]
            self._cutting = True

    def _end(self) -> int:
        """Return the offset after the last whole line."""
        return max(self.bytes.rfind(b"\n"), self.bytes.rfind(b"\r")) + 1

    def hand_over(self, scan: Scan, *, last: bool) -> None:
        end = len(self.bytes) if last else self._end()
        if not end:
            return
        block = bytes(self.bytes[:end])
        del self.bytes[:end]
        scan.block(self._file, block, self._next_line)
        self._next_line += block.count(b"\n")
