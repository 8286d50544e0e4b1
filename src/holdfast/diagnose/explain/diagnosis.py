"""Define the published answer, and its JSON form (schema `holdfast.diagnosis`, version 2)."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import re2

from holdfast.diagnose.rules.taxonomy import Advice, Category, Outcome
from holdfast.diagnose.shapes import shape_of

SCHEMA: Final = "holdfast.diagnosis"
VERSION: Final = 2

Role = Literal["root", "cascade", "recovered", "teardown"]


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line of a log: the file as the caller named it, the line number from 1, the shortened text."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Evidence(LogLine):
    """A cited line and its role."""

    role: Role


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another root that the evidence allows."""

    reason: str
    confidence: float
    decided_by: str


_OWN_WORDS = re2.compile(r"^holdfast(?:\.core\.errors\.\w+)?: ")
"""Matches the prefix of Holdfast's own messages, which summaries leave out."""
_SUMMARY_CHARACTERS: Final = 400
ENDS_IN_WORDS: Final[Mapping[Outcome, str]] = {
    "completed": "The job ended well: nothing to do.",
    "completed_teardown_failed": "The job ended well and only its teardown failed: nothing to do.",
    "running": "The job still runs, as far as its log goes.",
    "unknown": "The logs do not say how the job ended.",
}
"""The sentence for each outcome that has no cause to explain."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The way in which a job ended, the cause, the cited lines and the next action."""

    outcome: Outcome = "failed"
    end_line: LogLine | None = None
    """The line that states the end, or the newest step of a job that still runs."""
    id: str | None = None
    """The id of the incident in the ledger, for `holdfast incidents show`; None if it is not
    recorded.
    """
    reason: str
    """The reason of the failure: a key of `CATEGORIES`."""
    category: Category
    root_line: LogLine | None = None
    root_lines: tuple[LogLine, ...] = ()
    """Up to three lines that state the root cause; the first is `root_line`."""
    evidence: tuple[Evidence, ...] = ()
    scope: Mapping[str, Any] = field(default_factory=dict)
    """The location of the fault: `rank`, `local_rank`, `node`, `gpu` and `link`, each a value or a
    list. A key is absent if the logs do not name its value."""
    action: Advice
    restart_helps: bool
    mitigation: str
    confidence: float
    alternatives: tuple[Alternative, ...] = ()
    similar: tuple[Mapping[str, Any], ...] = ()
    """Past incidents that are similar to this one; empty without a memory."""
    decided_by: tuple[str, ...] = ()
    """The ids of the rules that matched the root and the other cited lines; the root's rule comes
    first.
    """
    notes: tuple[str, ...] = ()
    """A sentence for each part of the input that could not be used."""
    root_text: str = ""
    """The text of the root, without time stamps and rank prefixes. It is present even if no line
    can be cited."""

    @property
    def ended_well(self) -> bool:
        """True if the job completed its work, so that there is no cause and no incident."""
        return self.outcome in ("completed", "completed_teardown_failed")

    @property
    def summary(self) -> str:
        """Return a sentence on how the job ended, with reason and root if it failed or was stopped."""
        if self.outcome in ENDS_IN_WORDS:
            return ENDS_IN_WORDS[self.outcome]
        message = str(_OWN_WORDS.sub("", self.root_text.strip()))[:_SUMMARY_CHARACTERS].rstrip(".")
        if self.reason == "Others" and message:  # "Others" says nothing
            return f"{message}."
        if message.partition(":")[0].rpartition(".")[2] == self.reason:
            return f"{message}."  # the root already names the class
        return f"{self.reason}: {message}." if message else f"{self.reason}."

    @property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that depend on the root, but not on rank, pid, time or step."""
        rule = self.decided_by[0] if self.decided_by else ""
        root = "\n".join((self.reason, rule, mask_varying(self.root_text)))
        return hashlib.sha256(root.encode("utf-8", "replace")).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return the published form: plain JSON values only."""

        def cited(line: LogLine) -> dict[str, Any]:
            return {"file": line.file, "line": line.line, "text": line.text}

        return {
            "schema": SCHEMA,
            "version": VERSION,
            "id": self.id,
            "outcome": self.outcome,
            "end_line": None if self.end_line is None else cited(self.end_line),
            "reason": self.reason,
            "category": self.category,
            "root_line": None if self.root_line is None else cited(self.root_line),
            "root_lines": [cited(line) for line in self.root_lines],
            "evidence": [{**cited(line), "role": line.role} for line in self.evidence],
            "scope": dict(self.scope),
            "action": self.action,
            "restart_helps": self.restart_helps,
            "mitigation": self.mitigation,
            "confidence": round(self.confidence, 3),
            "alternatives": [
                {
                    "reason": one.reason,
                    "confidence": round(one.confidence, 3),
                    "decided_by": one.decided_by,
                }
                for one in self.alternatives
            ],
            "similar": [dict(one) for one in self.similar],
            "decided_by": list(self.decided_by),
            "notes": list(self.notes),
            "fingerprint": self.fingerprint,
        }


_TEMPORARY_NAME = re2.compile(r"/tmp[\w-]+|\.[\w-]+\.tmp\b")
_HEX = re2.compile(r"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]*[0-9][0-9a-f]*[a-f][0-9a-f]{6,}\b")
_NUMBER = re2.compile(r"[0-9]+(?:[.,:][0-9]+)*")
_NO_STEP = re2.compile(r"before (?:its|the) first step")


def mask_varying(text: str) -> str:
    """Return `text` with placeholders for temporary names, hexadecimal and decimal numbers."""
    return _masked(shape_of(text))


@functools.lru_cache(1024)
def _masked(text: str) -> str:
    text = _NO_STEP.sub("after step 0", text)
    text = _TEMPORARY_NAME.sub("<tmp>", text)
    text = _HEX.sub("<hex>", text)
    return str(_NUMBER.sub("<n>", text))
