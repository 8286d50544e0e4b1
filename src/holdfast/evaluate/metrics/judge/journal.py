"""Record each request's reservation before it is sent, then its actual use, and the answers.

A judge has one journal for all evaluations, which share the judge's limits per minute and its
answers. Each evaluation writes an `opened` line. The lines from there to the next `opened` line
belong to this evaluation, so that its cost is known. Each line is JSON. A line that a crash cut off
is the last one, and is dropped. An answer stays in the file and is read by its offset, so that only
its key takes memory.
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
    """Return the path of a judge's journal in `folder`, which depends only on the judge's URL."""
    digest = hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
    return folder / f"judge-{digest}.journal"


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """A request that may have been sent, with the largest use that was reserved for it.

    `is_ours` is True if the request belongs to this evaluation, which then pays for it.
    """

    request: int
    tokens: int
    cost_microdollars: int
    is_ours: bool


@dataclass(kw_only=True)
class Past:
    """Hold the content of a journal when it was opened.

    `last_s` is the latest time in the journal; 0 if the journal is new. A request in `settled` has
    the cost 0 if another evaluation paid for it.
    """

    last_s: float = 0.0
    next_request: int = 0
    settled: list[Remembered] = field(default_factory=list)
    unsettled: list[Reserved] = field(default_factory=list)
    answers: dict[str, tuple[int, int]] = field(default_factory=dict)


class JudgeJournal:
    """Write a judge's journal; one process at a time can do so."""

    def __init__(self, path: Path, evaluation_id: str) -> None:
        """Open the file, or create it, and read its content.

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
        """Record durably that a request will be sent, with the largest use that it can have.

        Raises:
            OSError: the journal cannot be written.
        """
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
        """Record the actual use of a request.

        Raises:
            OSError: the journal cannot be written.
        """
        line = {
            "what": "settled",
            "at_s": at_s,
            "request": request,
            "tokens": tokens,
            "cost": cost_microdollars,
        }
        self._append(line)

    def keep(self, key: str, body: str) -> None:
        """Keep an answer under a key.

        Raises:
            OSError: the journal cannot be written.
        """
        start = self._size_bytes
        self._append({"what": "answer", "key": key, "body": body})
        self.past.answers[key] = (start, self._size_bytes - start)

    def kept(self, key: str) -> str | None:
        """Return the answer that is kept under a key; None if there is none."""
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

    If the previous proxy of this evaluation still holds the lock, wait until that proxy has ended.

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
                f"{who} uses this judge, whose limits only one proxy may manage. Wait for it, or "
                "stop it."
            ) from error
        fcntl.flock(file, fcntl.LOCK_EX)  # held by the previous proxy, which ends soon


def _last_opened_by(path: Path) -> str:
    holder = ""
    with path.open("rb") as file:
        for line in file:
            if line.startswith(b'{"what":"opened"') and line.endswith(b"\n"):
                holder = json.loads(line)["evaluation"]
    return holder


def judged_between(journal: Path, from_s: float, to_s: float, *, model: int = 0) -> list[JudgeSpan]:
    """Return a `JudgeSpan` for each answer of the judge in a period; empty without a journal.

    Two kinds of attempts are left out, because a better schedule would not have made them: attempts
    without use, which the judge refused; and attempts whose use equals their reservation, which
    failed or whose use is unknown. The journal does not record the sample and the waiting time of a
    request, so `task` and `sample` are -1.

    Args:
        journal: the judge's journal.
        from_s: the start of the period in seconds since the Unix epoch; returned times count from
            here.
        to_s: the end of the period in seconds since the Unix epoch.
        model: the model number for the returned spans.
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
