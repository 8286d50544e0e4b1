"""The published answer: `Diagnosis`, its parts and its JSON, schema `holdfast.diagnosis` version 2."""

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
    """One line of a log: the file as the caller named it, the 1-based number, the text shortened."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Evidence(LogLine):
    """A cited line and the part it plays."""

    role: Role


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another root that the evidence would also allow."""

    reason: str
    confidence: float
    decided_by: str


_OWN_WORDS = re2.compile(r"^holdfast(?:\.core\.errors\.\w+)?: ")
"""What Holdfast's own sentences begin with; the rest of them says it better."""
_SUMMARY_CHARACTERS: Final = 400
ENDS_IN_WORDS: Final[Mapping[Outcome, str]] = {
    "completed": "The job ended well: nothing to do.",
    "completed_teardown_failed": "The job ended well and only its teardown failed: nothing to do.",
    "running": "The job still runs, as far as its log goes.",
    "unknown": "The logs do not say how the job ended.",
}
"""Each outcome that needs no cause."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """How a job ended and why, with the lines that say so, and what to do next."""

    outcome: Outcome = "failed"
    end_line: LogLine | None = None
    """The line that states the end, or the newest step of a job that still runs."""
    id: str | None = None
    """The incident that the ledger keeps of it, as `holdfast incidents show` takes it; None where none is kept."""
    reason: str
    """A key of `CATEGORIES`."""
    category: Category
    root_line: LogLine | None = None
    root_lines: tuple[LogLine, ...] = ()
    """Up to three lines that state the root; the first is `root_line`."""
    evidence: tuple[Evidence, ...] = ()
    scope: Mapping[str, Any] = field(default_factory=dict)
    """`rank`, `local_rank`, `node`, `gpu`, `link`: a value or a list; absent where the logs do not say."""
    action: Advice
    restart_helps: bool
    mitigation: str
    confidence: float
    alternatives: tuple[Alternative, ...] = ()
    similar: tuple[Mapping[str, Any], ...] = ()
    """Past incidents like this one; empty until there is a memory."""
    decided_by: tuple[str, ...] = ()
    """Ids of the rules that decided, the deciding one first."""
    notes: tuple[str, ...] = ()
    """What of the input could not be used, a sentence each."""
    root_text: str = ""
    """What states the root, without time stamps and rank prefixes; given also where no line can be cited."""

    @property
    def ended_well(self) -> bool:
        """Whether the work was done: there is no cause to look for and no incident."""
        return self.outcome in ("completed", "completed_teardown_failed")

    @property
    def summary(self) -> str:
        """How the job ended in a sentence; of a failure or a stop the reason, and what states the root."""
        if self.outcome in ENDS_IN_WORDS:
            return ENDS_IN_WORDS[self.outcome]
        said = str(_OWN_WORDS.sub("", self.root_text.strip()))[:_SUMMARY_CHARACTERS].rstrip(".")
        if self.reason == "Others" and said:  # a name for what has none says nothing
            return f"{said}."
        return f"{self.reason}: {said}." if said else f"{self.reason}."

    @property
    def fingerprint(self) -> str:
        """16 hex digits, equal when the same root comes back, whatever its rank, pid, time or step."""
        rule = self.decided_by[0] if self.decided_by else ""
        root = "\n".join((self.reason, rule, mask_varying(self.root_text)))
        return hashlib.sha256(root.encode("utf-8", "replace")).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """The published form: plain JSON values only."""

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
    """`text` with temporary names, hexadecimal and decimal numbers replaced by marks."""
    return _masked(shape_of(text))


@functools.lru_cache(1024)
def _masked(text: str) -> str:
    text = _NO_STEP.sub("after step 0", text)
    text = _TEMPORARY_NAME.sub("<tmp>", text)
    text = _HEX.sub("<hex>", text)
    return str(_NUMBER.sub("<n>", text))
