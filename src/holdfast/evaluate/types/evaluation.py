"""What an evaluation came to: the harness's own scores, and what the time went to."""

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
    """One thing that no schedule could have gone below."""

    name: str
    """`engines`, `sample`, `metrics`, `judge` or `storage`, as `policy.bound` derives them."""
    seconds: float
    detail: str = ""
    """What it was computed from."""


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """A piece of the critical path: what the end had to wait for."""

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
    """`planned`: nothing was run, the times are predictions, and there are no scores."""
    started_at_s: float = 0.0
    """Since the Unix epoch."""
    results: dict[str, Any] = field(default_factory=dict)
    """The harness's own results object, of all tasks that have one."""
    scores: tuple[Score, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)
    """Task to why it has no scores."""
    notes: tuple[str, ...] = ()
    """Where a score may differ from the harness's own also in the exact mode, and why, a sentence each."""
    makespan_s: float = 0.0
    bound: tuple[BoundTerm, ...] = ()
    """The lower bound is the largest."""
    engines: int = 0
    nodes: int = 0
    engine_seconds: float = 0.0
    """Engines times the time that each was there."""
    account: dict[str, float] = field(default_factory=dict)
    """Where the engine-seconds went, by cause; they add up to `engine_seconds`."""
    critical_path: tuple[PathStep, ...] = ()
    samples: int = 0
    requests: int = 0
    """That engines answered."""
    reused: int = 0
    """Further ones, whose answer the journal already had."""
    remote_bytes: int = 0
    """Read from where the checkpoint lies, by all nodes together."""
    digest: str = ""
    """Of the weights' content."""
    numerics: str = ""
    mode: str = ""
    """`exact`: bit for bit the scores of the harness alone; `free`: floats may differ in their last digits."""
    harness_versions: dict[str, str] = field(default_factory=dict)
    run_id: str | None = None
    step: int | None = None
    folder: str = ""

    @property
    def bound_s(self) -> float:
        """What no schedule could have gone below; 0 where it is not known."""
        return max((term.seconds for term in self.bound), default=0.0)

    @property
    def ratio(self) -> float | None:
        """Makespan over bound; 1 is as fast as can be."""
        return self.makespan_s / self.bound_s if self.bound_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        """JSON values, the name and version of their schema first."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return {
            "schema": SCHEMA,
            "version": VERSION,
            **values,
            "bound_s": self.bound_s,
            "ratio": self.ratio,
        }


def write_evaluation(evaluation: Evaluation, folder: Path) -> Path:
    """Write an evaluation into its folder, whole or not at all; returns the file.

    Raises:
        OSError: it could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS_FILE
    # As lm-eval writes it: a score that is not a number stands as NaN, which Python's JSON reads.
    write_atomic(path, json.dumps(evaluation.to_json(), indent=1).encode() + b"\n")
    return path


def read_evaluation(folder: Path) -> Evaluation:
    """The evaluation in a folder.

    Raises:
        NotFound: it has no results (yet).
        EvaluationError: they are of another version, or no results.
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
    said = (
        (values.get("schema"), values.get("version")) if isinstance(values, dict) else (None, None)
    )
    if said != (SCHEMA, VERSION):
        raise EvaluationError(
            f"{path} is of {said[0]} version {said[1]}; this Holdfast reads {SCHEMA} version {VERSION}. "
            "Compute the scores again: holdfast eval rescore."
        )
    try:
        return msgspec.convert(values, Evaluation)
    except msgspec.ValidationError as error:
        raise EvaluationError(
            f"{path} is damaged: {error}. Compute the scores again: holdfast eval rescore {folder.name}"
        ) from error
