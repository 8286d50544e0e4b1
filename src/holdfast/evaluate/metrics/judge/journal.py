"""Journal reservations before requests are sent, their actual use, and answers to keep.

A judge has one journal for all evaluations, which share its limits per minute and its answers. Each
evaluation writes an `opened` line, and owns the lines until the next one, so that its cost is
known. The journal has lines of JSON. A line cut by a crash is the last one, and is dropped.
`answer` lines are read by their offset, so that memory holds only keys.
"""

import fcntl
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import BadUse
from holdfast.evaluate.metrics.judge.quota import Remembered
from holdfast.evaluate.types.timeline import JudgeSpan


def journal_of(url: str, folder: Path) -> Path:
    """Return the path of a judge's journal in the folder of answers, by its URL alone."""
    digest = hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
    return folder / f"judge-{digest}.journal"


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """A request before it is sent, with its most use; `is_ours` if this evaluation pays."""

    request: int
    tokens: int
    cost_microdollars: int
    is_ours: bool


@dataclass(kw_only=True)
class Past:
    """Hold a journal's content from earlier lives; `last_s` is its latest time, 0 if new.

    In `settled`, the cost is 0 if another evaluation paid.
    """

    last_s: float = 0.0
    next_request: int = 0
    settled: list[Remembered] = field(default_factory=list)
    unsettled: list[Reserved] = field(default_factory=list)
    answers: dict[str, tuple[int, int]] = field(default_factory=dict)


class JudgeJournal:
    """Write the journal; one process at a time."""

    def __init__(self, path: Path, evaluation_id: str) -> None:
        """Open or make the file, and read it.

        Args:
            path: the file.
            evaluation_id: the evaluation that will use the judge.

        Raises:
            BadUse: another evaluation holds the journal.
            OSError: the file cannot be opened.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _lock(self._fd, path, evaluation_id)
        except BaseException:
            os.close(self._fd)
            raise
        self.past = Past()
        self._size_bytes = 0
        self._evaluation_id, self._is_ours = evaluation_id, False
        reserved: dict[int, Reserved] = {}
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._remember(json.loads(line), len(line), reserved)
                self._size_bytes += len(line)
        self.past.unsettled = list(reserved.values())
        os.ftruncate(self._fd, self._size_bytes)
        if not self._is_ours:
            self._append({"what": "opened", "evaluation": evaluation_id})

    def _remember(self, line: dict[str, Any], length: int, reserved: dict[int, Reserved]) -> None:
        past = self.past
        past.last_s = max(past.last_s, line.get("at_s", 0.0))
        match line["what"]:
            case "opened":
                self._is_ours = line["evaluation"] == self._evaluation_id
            case "reserved":
                request, tokens, cost = line["request"], line["tokens"], line["cost"]
                reserved[request] = Reserved(
                    request=request, tokens=tokens, cost_microdollars=cost, is_ours=self._is_ours
                )
                past.next_request = max(past.next_request, request + 1)
            case "settled":
                cost = line["cost"] if reserved.pop(line["request"]).is_ours else 0
                settled = Remembered(
                    until_s=line["at_s"], tokens=line["tokens"], cost_microdollars=cost
                )
                past.settled.append(settled)
            case "answer":
                past.answers[line["key"]] = (self._size_bytes, length)

    def reserve(self, at_s: float, request: int, tokens: int, cost_microdollars: int) -> None:
        """Record durably that a request will be sent, with its most use. Raises OSError."""
        line = {
            "what": "reserved",
            "at_s": at_s,
            "request": request,
            "tokens": tokens,
            "cost": cost_microdollars,
        }
        self._append(line)
        os.fdatasync(self._fd)

    def settle(self, at_s: float, request: int, tokens: int, cost_microdollars: int) -> None:
        """Record the actual use of a request. Raises OSError."""
        line = {
            "what": "settled",
            "at_s": at_s,
            "request": request,
            "tokens": tokens,
            "cost": cost_microdollars,
        }
        self._append(line)

    def keep(self, key: str, body: str) -> None:
        """Keep an answer. Raises OSError."""
        start = self._size_bytes
        self._append({"what": "answer", "key": key, "body": body})
        self.past.answers[key] = (start, self._size_bytes - start)

    def kept(self, key: str) -> str | None:
        """Return the answer kept under a key, if any."""
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
            os.ftruncate(self._fd, self._size_bytes)  # half a line would corrupt the next one
            raise
        self._size_bytes += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _lock(file: int, path: Path, evaluation_id: str) -> None:
    """Lock the journal for this process.

    Raises:
        BadUse: another evaluation holds the journal.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _last_opened_by(path)
        if holder != evaluation_id:
            who = f"The evaluation {holder}" if holder else "Another evaluation"
            raise BadUse(
                f"{who} asks this judge, whose limits are kept by one at a time. Wait for it, or "
                "stop it."
            ) from error
        fcntl.flock(file, fcntl.LOCK_EX)  # held by our own earlier life, which ends soon


def _last_opened_by(path: Path) -> str:
    holder = ""
    with path.open("rb") as file:
        for line in file:
            if line.startswith(b'{"what":"opened"') and line.endswith(b"\n"):
                holder = json.loads(line)["evaluation"]
    return holder


def judged_between(journal: Path, from_s: float, to_s: float, *, model: int = 0) -> list[JudgeSpan]:
    """Return the judge's answers in a span of time; empty without a journal.

    A try without use (refused), or with its whole reservation (failed or unknown), is left out: a
    better schedule would not have had it. The journal does not have the sample and the wait of a
    request, so `task` and `sample` are -1.

    Args:
        journal: the judge's journal.
        from_s: the start in seconds since the Unix epoch, and the zero of the returned times.
        to_s: the end in seconds since the Unix epoch.
        model: the model number for the spans.
    """
    found: list[JudgeSpan] = []
    reserved: dict[int, tuple[float, int]] = {}
    try:
        file = journal.open("rb")
    except FileNotFoundError:
        return found
    with file:
        for text in file:
            if not text.endswith(b"\n"):
                break
            line = json.loads(text)
            if line["what"] == "reserved":
                reserved[line["request"]] = line["at_s"], line["tokens"]
            elif line["what"] == "settled" and line["request"] in reserved:
                asked_s, most = reserved.pop(line["request"])
                if from_s <= asked_s and line["at_s"] <= to_s and 0 < line["tokens"] < most:
                    t0, t1 = asked_s - from_s, line["at_s"] - from_s
                    found.append(
                        JudgeSpan(
                            model=model, task=-1, sample=-1, tokens=line["tokens"], t0=t0, t1=t1
                        )
                    )
    return found
