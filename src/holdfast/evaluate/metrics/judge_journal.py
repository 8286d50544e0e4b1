"""What survives the judge's proxy: every reservation before its request is sent, what it took, and answers to keep.

Lines of JSON, appended. A line that a crash cut short is the last one, and is dropped. `answer` lines are found again
by their place in the file, so memory holds keys alone.
"""

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import BadUse
from holdfast.evaluate.metrics.quota import Remembered


@dataclass(kw_only=True)
class Past:
    """What a journal says of earlier lives. `last_s` is its latest time, 0 if it is new."""

    last_s: float = 0.0
    next_request: int = 0
    settled: list[Remembered] = field(default_factory=list)
    unsettled: list[tuple[int, int]] = field(default_factory=list)
    answers: dict[str, tuple[int, int]] = field(default_factory=dict)


class JudgeJournal:
    """One file, one writer."""

    def __init__(self, path: Path) -> None:
        """Open or make it; reads it whole.

        Raises:
            BadUse: another process writes it.
            OSError: it cannot be opened.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise BadUse(
                f"Another judge's proxy uses {path}; end it, or give this one a journal of its own."
            ) from error
        self.past = Past()
        self._size_bytes = 0
        reserved: dict[int, tuple[int, int]] = {}
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._remember(json.loads(line), len(line), reserved)
                self._size_bytes += len(line)
        self.past.unsettled = list(reserved.values())
        os.ftruncate(self._fd, self._size_bytes)

    def _remember(self, line: dict[str, Any], length: int, reserved: dict[int, tuple[int, int]]) -> None:
        past = self.past
        past.last_s = max(past.last_s, line.get("at_s", 0.0))
        match line["what"]:
            case "reserved":
                reserved[line["request"]] = (line["tokens"], line["cost"])
                past.next_request = max(past.next_request, line["request"] + 1)
            case "settled":
                reserved.pop(line["request"], None)
                settled = Remembered(until_s=line["at_s"], tokens=line["tokens"], cost_microdollars=line["cost"])
                past.settled.append(settled)
            case "answer":
                past.answers[line["key"]] = (self._size_bytes, length)

    def reserve(self, at_s: float, request: int, tokens: int, cost_microdollars: int) -> None:
        """Say, durably, that a request is about to be sent, and the most it can take. Raises OSError."""
        line = {"what": "reserved", "at_s": at_s, "request": request, "tokens": tokens, "cost": cost_microdollars}
        self._append(line)
        os.fdatasync(self._fd)

    def settle(self, at_s: float, request: int, tokens: int, cost_microdollars: int) -> None:
        """Say what a request took. Raises OSError."""
        line = {"what": "settled", "at_s": at_s, "request": request, "tokens": tokens, "cost": cost_microdollars}
        self._append(line)

    def keep(self, key: str, body: str) -> None:
        """Keep an answer. Raises OSError."""
        start = self._size_bytes
        self._append({"what": "answer", "key": key, "body": body})
        self.past.answers[key] = (start, self._size_bytes - start)

    def kept(self, key: str) -> str | None:
        """An answer kept under a key."""
        if key not in self.past.answers:
            return None
        start, length = self.past.answers[key]
        body: str = json.loads(os.pread(self._fd, length, start))["body"]
        return body

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, self._size_bytes)  # half a line would swallow the next one
            raise
        self._size_bytes += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
