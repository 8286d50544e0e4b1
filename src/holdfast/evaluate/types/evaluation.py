"""Hold the result of an evaluation: the harness's scores, and an account of the time."""

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
    """A lower bound on the time of any schedule, derived from one resource."""

    name: str
    """`engines`, `sample`, `metrics`, `judge` or `storage`, as `policy.bound` derives them."""
    seconds: float
    detail: str = ""
    """A text that describes the term; if it is empty, reports use a standard text."""


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """One step of the critical path.

    The critical path is the chain of steps that determined when the evaluation ended.
    """

    what: str
    """`load`, `swap`, `wait`, `answer`, `metric`, `judge`, `score` …"""
    t0: float
    t1: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of one suite on one model; all times are in seconds."""

    id: str
    suite: str
    model: str
    state: Literal["done", "failed", "stopped", "planned"] = "done"
    """`planned`: nothing ran, the times are predictions, and there are no scores."""
    started_at_s: float = 0.0
    """Seconds since the Unix epoch."""
    results: dict[str, Any] = field(default_factory=dict)
    """The harness's results object with all tasks that have results."""
    scores: tuple[Score, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)
    """Task name to the reason why the task has no scores."""
    notes: tuple[str, ...] = ()
    """Sentences on possible differences from the harness's own scores in exact mode.

    Each sentence names one possible difference and its cause.
    """
    makespan_s: float = 0.0
    bound: tuple[BoundTerm, ...] = ()
    """Lower bounds by resource; the evaluation's lower bound is the largest of them."""
    engines: int = 0
    nodes: int = 0
    engine_seconds: float = 0.0
    """The sum over all engines of the seconds between each engine's start and end."""
    account: dict[str, float] = field(default_factory=dict)
    """Cause to engine-seconds; the values add up to `engine_seconds`."""
    critical_path: tuple[PathStep, ...] = ()
    samples: int = 0
    requests: int = 0
    """Requests that engines answered."""
    reused: int = 0
    """Requests whose answer was already in the journal; not counted in `requests`."""
    remote_bytes: int = 0
    """Bytes that all nodes together read from the checkpoint's storage."""
    digest: str = ""
    """The digest of the weights' content."""
    numerics: str = ""
    mode: str = ""
    """The mode of answering requests.

    `exact`: the scores equal the harness's own scores bit for bit; `free`: floats may differ in
    their last digits.
    """
    harness_versions: dict[str, str] = field(default_factory=dict)
    run_id: str | None = None
    step: int | None = None
    folder: str = ""

    @property
    def bound_s(self) -> float:
        """The lower bound on the time of any schedule; 0 if unknown."""
        return max((term.seconds for term in self.bound), default=0.0)

    @property
    def ratio(self) -> float | None:
        """The makespan divided by the lower bound; 1 is optimal."""
        return self.makespan_s / self.bound_s if self.bound_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, of which the first are the name and version of the schema."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return {
            "schema": SCHEMA,
            "version": VERSION,
            **values,
            "bound_s": self.bound_s,
            "ratio": self.ratio,
        }


def write_evaluation(evaluation: Evaluation, folder: Path) -> Path:
    """Write an evaluation into its folder atomically; return the path of the file.

    Raises:
        OSError: the file could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS_FILE
    # Like lm-eval, write a score that is not a number as NaN: Python's JSON module reads NaN.
    write_atomic(path, json.dumps(evaluation.to_json(), indent=1).encode() + b"\n")
    return path


def read_evaluation(folder: Path) -> Evaluation:
    """Read the evaluation in a folder.

    Raises:
        NotFound: the folder has no results (yet).
        EvaluationError: the results have another schema version, or are malformed.
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
            f"{path} is not JSON ({error}). Compute the scores again: holdfast eval rescore."
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
