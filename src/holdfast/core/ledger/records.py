"""What the ledger holds, a frozen dataclass a table. Times are seconds since the Unix epoch, UTC."""

from dataclasses import dataclass, field
from typing import Any, Literal

RunState = Literal["running", "completed", "failed", "stopped"]
AttemptOutcome = Literal["running", "completed", "failed", "stopped"]
EvaluationState = Literal["running", "done", "failed", "stopped"]
CheckpointState = Literal["written", "verified", "healthy", "damaged", "incomplete"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One `holdfast run`, with all its restarts."""

    run_id: str
    state: RunState
    command: list[str]
    options: dict[str, Any]
    """How it is supervised, as `recover.spec` writes it; enough to resume the run."""
    cwd: str
    host: str
    pid: int
    """The supervisor's process."""
    started_at_s: float
    ended_at_s: float | None = None
    exit_code: int | None = None
    outcome: str = ""
    """One sentence: how it ended and what to do next."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the job's processes."""

    run_id: str
    number: int
    """1 for the first start of the run."""
    started_at_s: float
    outcome: AttemptOutcome = "running"
    start_step: int | None = None
    """Steps completed in the state it began from; None until a rank said so."""
    first_step_at_s: float | None = None
    last_step: int | None = None
    """The highest step that any rank reported."""
    ended_at_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run, for the record."""

    run_id: str
    attempt: int
    at_s: float
    kind: str
    rank: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A failure of the job: what was seen, what it was diagnosed to be, what was done, what it cost."""

    incident_id: int | None = None
    """None until the ledger gave it one."""
    run_id: str
    attempt: int
    kind: Literal["exit", "hang"]
    rank: int | None
    """The rank that failed first, where one is known."""
    step: int | None
    """The highest step any rank had completed."""
    fault_at_s: float
    """When it happened as far as the supervisor can know: the first rank's death, or a last sign of life."""
    detected_at_s: float
    diagnosis: dict[str, Any]
    """The published JSON of `holdfast.diagnose`."""
    action: str = ""
    """What was done: `restart` or `stop`."""
    explanation: str = ""
    """Why, in a sentence."""
    resumed_at_s: float | None = None
    """When the job completed its next step."""
    restored_step: int | None = None
    """Steps completed in the state the job went on from."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that became durable."""

    run_id: str
    attempt: int
    step: int
    path: str
    state: CheckpointState
    size_bytes: int
    stall_s: float
    """How long training stood still for it: the longest of its ranks."""
    committed_at_s: float


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One evaluation of a suite on a model. Its samples and scores in full are files in `folder`."""

    evaluation_id: str
    suite: str
    model: str
    """As a person named it."""
    family: str
    """Models of one family answer alike, so that the history of one predicts the next; checkpoints of a run are one."""
    state: EvaluationState
    started_at_s: float
    folder: str
    digest: str = ""
    """Of the weights' content."""
    mode: str = ""
    """`exact` or `free`."""
    numerics: str = ""
    """What the bits of the answers depend on besides weights and requests."""
    harness_versions: dict[str, str] = field(default_factory=dict)
    ended_at_s: float | None = None
    makespan_s: float | None = None
    bound_s: float | None = None
    """What no schedule could have gone below."""
    engines: int = 0
    nodes: int = 0
    engine_seconds: float = 0.0
    """Engines times the time that each was there."""
    account: dict[str, float] = field(default_factory=dict)
    """Where the engine-seconds went, by cause."""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task, then `metric,filter` as lm-eval writes it, to `[value, standard error or None]`."""
    failed_tasks: dict[str, str] = field(default_factory=dict)
    """Task to why it has no scores."""
    run_id: str | None = None
    """The training run that the checkpoint is of, where it is known."""
    step: int | None = None
    outcome: str = ""
    """One sentence: how it ended and what to do next; empty where all is well."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What an evaluation found a task's samples to cost, for models of a family."""

    family: str
    harness: str
    task: str
    recorded_at_s: float
    evaluation_id: str
    history: bytes
    """As the policy packs it; at most `HISTORY_LIMIT_BYTES`."""


HISTORY_LIMIT_BYTES = 1 << 20
