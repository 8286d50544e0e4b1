"""Hold the result of an evaluation: the harness's scores, and the use of the time."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.core.errors import NotFound
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.scores import Score

SCHEMA = "holdfast.evaluation"
VERSION = 1
RESULTS_FILE = "results.json"


@dataclass(frozen=True, kw_only=True)
class BoundTerm:
    """One resource with a lower bound on the time of any schedule."""

    name: str
    """`engines`, `sample`, `metrics`, `judge` or `storage`, as `policy.bound` derives them."""
    seconds: float
    detail: str = ""
    """The inputs of the term."""


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """A part of the critical path, the chain of steps that the end depended on."""

    what: str
    """`load`, `swap`, `wait`, `answer`, `metric`, `judge`, `score` …"""
    t0: float
    t1: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One suite on one model. Times in seconds."""

    id: str
    suite: str
    model: str
    state: Literal["done", "failed", "stopped", "planned"] = "done"
    """`planned`: nothing ran, the times are predictions, and there are no scores."""
    started_at_s: float = 0.0
    """Seconds since the Unix epoch."""
    results: dict[str, Any] = field(default_factory=dict)
    """The harness's results object, over all tasks with results."""
    scores: tuple[Score, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)
    """By task, the reason why it has no scores."""
    notes: tuple[str, ...] = ()
    """Sentences: each names a possible difference from the harness's own score in exact mode, and
    the cause."""
    makespan_s: float = 0.0
    bound: tuple[BoundTerm, ...] = ()
    """The lower bound is the largest of these terms."""
    engines: int = 0
    nodes: int = 0
    engine_seconds: float = 0.0
    """The sum over engines of the time that each existed."""
    account: dict[str, float] = field(default_factory=dict)
    """Engine-seconds by cause; their sum is `engine_seconds`."""
    critical_path: tuple[PathStep, ...] = ()
    samples: int = 0
    requests: int = 0
    """Requests that engines answered."""
    reused: int = 0
    """Requests with an answer from the journal, not counted in `requests`."""
    remote_bytes: int = 0
    """Bytes that all nodes together read from the checkpoint's storage."""
    digest: str = ""
    """The digest of the weights' content."""
    numerics: str = ""
    mode: str = ""
    """`exact`: the scores equal the harness's own bit for bit; `free`: floats may differ in their
    last digits."""
    harness_versions: dict[str, str] = field(default_factory=dict)
    run_id: str | None = None
    step: int | None = None
    folder: str = ""

    @property
    def bound_s(self) -> float:
        """The seconds that no schedule can undercut; 0 if unknown."""
        return max((term.seconds for term in self.bound), default=0.0)

    @property
    def ratio(self) -> float | None:
        """Makespan over bound; 1 is optimal."""
        return self.makespan_s / self.bound_s if self.bound_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, starting with the name and version of their schema."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return {
            "schema": SCHEMA,
            "version": VERSION,
            **values,
            "bound_s": self.bound_s,
            "ratio": self.ratio,
        }


def write_evaluation(evaluation: Evaluation, folder: Path) -> Path:
    """Write an evaluation into its folder, atomically; return the file.

    Raises:
        OSError: the file could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS_FILE
    # As in lm-eval, a score that is not a number is written as NaN, which Python's JSON reads.
    write_atomic(path, json.dumps(evaluation.to_json(), indent=1).encode() + b"\n")
    return path


def read_evaluation(folder: Path) -> Evaluation:
    """Read the evaluation in a folder.

    Raises:
        NotFound: the folder has no results (yet).
        EvaluationError: the results have another version, or are malformed.
    """
    path = folder / RESULTS_FILE
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(
            f"{folder} holds no results: this evaluation has not ended. "
            f"Go on with it: holdfast eval resume {folder.name}"
        ) from error
    except ValueError as error:
        raise EvaluationError(
            f"{path} is no JSON ({error}). Compute the scores again: holdfast eval rescore."
        ) from error
    content = (
        (values.get("schema"), values.get("version")) if isinstance(values, dict) else (None, None)
    )
    if content != (SCHEMA, VERSION):
        raise EvaluationError(
            f"{path} is of {content[0]} version {content[1]}; this Holdfast reads {SCHEMA} version "
            f"{VERSION}. "
            "Compute the scores again: holdfast eval rescore."
        )
    try:
        return msgspec.convert(values, Evaluation)
    except msgspec.ValidationError as error:
        raise EvaluationError(
            f"{path} is damaged: {error}. Compute the scores again: holdfast eval rescore "
            f"{folder.name}"
        ) from error
