"""What survives the judge's proxy: every reservation before its request is sent, what it took, and answers to keep.

A judge has one journal, for all evaluations that ask it: its limits a minute and its answers are the same for them all.
Each says when it opens it, and what follows is its own, until another does: so the cost of each is known.

Lines of JSON, appended. A line that a crash cut short is the last one, and is dropped. `answer` lines are found again
by their place in the file, so memory holds keys alone.
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
    """Where the journal of a judge is, below the folder of all answers. Prices and limits make no other judge."""
    digest = hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
    return folder / f"judge-{digest}.journal"


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """A request that was about to be sent, and the most it could take; `is_ours` where this evaluation pays for it."""

    request: int
    tokens: int
    cost_microdollars: int
    is_ours: bool


@dataclass(kw_only=True)
class Past:
    """What a journal says of earlier lives. `last_s` is its latest time, 0 if it is new.

    Of what is `settled`, the cost is 0 where another evaluation paid it.
    """

    last_s: float = 0.0
    next_request: int = 0
    settled: list[Remembered] = field(default_factory=list)
    unsettled: list[Reserved] = field(default_factory=list)
    answers: dict[str, tuple[int, int]] = field(default_factory=dict)


class JudgeJournal:
    """One file, one writer."""

    def __init__(self, path: Path, evaluation_id: str) -> None:
        """Open or make it; reads it whole.

        Args:
            path: the file.
            evaluation_id: who will ask the judge.

        Raises:
            BadUse: another evaluation writes it.
            OSError: it cannot be opened.
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
        """Say, durably, that a request is about to be sent, and the most it can take. Raises OSError."""
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
        """Say what a request took. Raises OSError."""
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


def _lock(file: int, path: Path, evaluation_id: str) -> None:
    """Be its one writer.

    Raises:
        BadUse: another evaluation is.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _last_opened_by(path)
        if holder != evaluation_id:
            who = f"The evaluation {holder}" if holder else "Another evaluation"
            raise BadUse(
                f"{who} asks this judge, whose limits are kept by one at a time. Wait for it, or stop it."
            ) from error
        fcntl.flock(file, fcntl.LOCK_EX)  # an earlier life of our own, which is about to end


def _last_opened_by(path: Path) -> str:
    holder = ""
    with path.open("rb") as file:
        for line in file:
            if line.startswith(b'{"what":"opened"') and line.endswith(b"\n"):
                holder = json.loads(line)["evaluation"]
    return holder


def judged_between(journal: Path, from_s: float, to_s: float, *, model: int = 0) -> list[JudgeSpan]:
    """The judge's answers in a stretch of time; none where there is no journal.

    A try that took nothing (it was turned away) or all that was reserved for it (it failed, or nobody knows) is left
    out: a luckier schedule would not have had it. Which sample asked is not in a journal, so `task` and `sample` are
    -1; nor is how long it waited.

    Args:
        journal: the judge's (`judge_journal`).
        from_s: seconds since the Unix epoch; the times of what is returned count from here.
        to_s: likewise.
        model: that the spans are said to be of.
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
