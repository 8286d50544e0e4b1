"""What the ledger holds, a frozen dataclass a table. Times are seconds since the Unix epoch, UTC."""

from dataclasses import dataclass, field
from typing import Any, Literal

BY_TIME_LIMIT = "the time limit"
"""The beginning of the words for who asks for a stop where the time limit of the scheduler's job is near."""

RunState = Literal["queued", "running", "completed", "failed", "stopped"]
"""`queued`: the run waits for a job of its scheduler, before its first attempt or between two."""
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
    """A failure of the job, with its diagnosis, the action that was taken, and its cost."""

    incident_id: int | None = None
    """None until the ledger gave it one."""
    run_id: str
    attempt: int
    kind: Literal["exit", "hang", "anomaly"]
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
    """The action that was taken: `restart` or `stop`."""
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


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is remembered of an incident, so that it can be found again and learned from."""

    memory_id: int | None = None
    """None until the ledger gave it one."""
    incident_id: int | None = None
    """The run's incident that it is of; None where logs were diagnosed without a run."""
    run_id: str = ""
    """The run; empty where there is none."""
    remembered_at_s: float
    reason: str
    """What the diagnosis said."""
    category: str
    confidence: float
    rule_id: str = ""
    """What decided."""
    scope: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    action: str = ""
    """What the diagnosis advised."""
    done: str = ""
    """What was done about it, in a sentence."""
    roots: list[str] = field(default_factory=list)
    """The lines that state the root, without their prefixes; a person's word replaces the diagnosis'."""
    lines: list[list[Any]] = field(default_factory=list)
    """The compressed log: file, number and text of each kept line, at most `MEMORY_LIMIT_BYTES` of text."""
    words: str = ""
    """What full-text search looks at: the words of roots and lines, values left out, a blank between two."""
    verdict: Literal["", "confirmed", "corrected"] = ""
    """A person's word on the diagnosis."""
    true_reason: str = ""
    """Given with the verdict."""
    true_action: str = ""
    """What helped, where a person said so."""
    judged_by: str = ""
    judged_at_s: float | None = None
    embedding: bytes | None = None
    """Of the root, by an embeddings endpoint: float32, little-endian."""
    embedding_model: str = ""


MEMORY_LIMIT_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class LearnedRule:
    """A rule or a filter that was learned from incidents or good runs and passed every check."""

    rule_id: str
    kind: Literal["rule", "filter", "suggestion"]
    """A suggestion is a model's rule that no person's word has put in force yet."""
    body: dict[str, Any]
    """Its fields, plain JSON values."""
    author: str
    sources: list[str]
    """What it was learned from: ids of incidents, or `good:ID`."""
    made_at_s: float
    withdrawn_at_s: float | None = None
    """When it ceased to be used; it is kept for the record."""
    withdrawn_by: str = ""


@dataclass(frozen=True, kw_only=True)
class GoodRun:
    """What a run printed that ended well: nothing there is a failure's root."""

    good_id: int | None = None
    """None until the ledger gave it one."""
    name: str
    """The paths, as a person gave them."""
    fingerprint: str
    """Of the lines: the same logs are recorded once."""
    added_at_s: float
    lines: list[list[Any]]
    """A line of each shape, without prefixes, and how often the shape came."""


CordonKind = Literal["", "person", "hard", "soft"]
"""A person, a check of the node by itself with a wrong result, or tests that may have met a busy node or a bad link."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one session of tests says of a node."""

    name: str
    outcome: Literal["good", "bad", "suspect"]
    probability: float
    """That the node is faulty, by this session and what was known before."""
    evidence: str
    """One sentence."""
    is_hard: bool = False
    """Whether a check of the node by itself gave a wrong result."""
    passed: Literal["", "solo", "all"] = ""
    """Whether each check of the node by itself has passed, and each test with other nodes, if there was one."""


@dataclass(frozen=True, kw_only=True)
class Lead:
    """Which supervisor leads a run."""

    run_id: str
    generation: int
    """The number of the supervisor; 0 before the first one."""
    node_id: str
    """The node that keeps the supervisor going."""
    beats: int
    """How often the supervisor has shown that it lives."""


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """Where the nodes of a run meet. Who can read a record can command the nodes of the run."""

    key: str
    run_id: str
    hosts: list[str]
    port: int
    token: str


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """A node that was tested or cordoned, by the name that its scheduler or host gives it."""

    name: str
    cordoned_at_s: float | None = None
    """None where jobs may be launched on it."""
    cordoned_by: str = ""
    """A user, or the run whose tests found the node faulty."""
    cordon_kind: CordonKind = ""
    """Who or what has cordoned it last; empty where nobody has."""
    why: str = ""
    """One sentence: why the node is or was cordoned."""
    probability: float | None = None
    """That the node is faulty, by the last test; None where it was never tested."""
    tested_at_s: float | None = None
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """The newest `VERDICTS_KEPT`, oldest first: `at_s`, `by`, and the fields of `Verdict` without the name."""

    @property
    def is_cordoned(self) -> bool:
        """Return whether nothing may be launched on the node."""
        return self.cordoned_at_s is not None

    @property
    def passed_since(self) -> bool:
        """Return whether the node has passed its last session of tests since it was cordoned.

        Its probability need not be that of a good node: that remembers the faults before the repair. Where a check of
        the node by itself has cordoned it, the checks by itself suffice.
        """
        last = self.verdicts[-1] if self.verdicts else {}
        if float(last.get("at_s", 0.0)) <= (self.cordoned_at_s or 0.0):
            return False
        passed = last.get("passed")
        suffices = passed == "all" or (passed == "solo" and self.cordon_kind == "hard")
        return suffices or last.get("outcome") == "good"

    @property
    def is_hard(self) -> bool:
        """Return whether nothing but `holdfast nodes return` may bring the node back.

        That is where a person has cordoned it, or a check of the node by itself has failed.
        """
        return self.is_cordoned and self.cordon_kind != "soft"


VERDICTS_KEPT = 50
"""Of each node."""
