"""The records of the ledger: one frozen dataclass a table.

Times are seconds since the Unix epoch, UTC.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

BY_TIME_LIMIT = "the time limit"
"""The first words of a stop's author if the time limit of the scheduler's job causes the stop."""

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
    """The options of the supervision, as `recover.spec` writes them; enough to resume the run."""
    cwd: str
    host: str
    pid: int
    """The process id of the run's `holdfast run` on `host`."""
    started_at_s: float
    ended_at_s: float | None = None
    exit_code: int | None = None
    outcome: str = ""
    """One sentence on the end of the run and the next step of the user."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the job's processes."""

    run_id: str
    number: int
    """1 for the first start of the run."""
    started_at_s: float
    outcome: AttemptOutcome = "running"
    start_step: int | None = None
    """Steps completed in the state at the attempt's start; None until a rank reported them."""
    first_step_at_s: float | None = None
    last_step: int | None = None
    """The highest step that any rank reported."""
    ended_at_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of a run."""

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
    """The incident's id; None until the ledger assigns one."""
    run_id: str
    attempt: int
    kind: Literal["exit", "hang", "anomaly"]
    rank: int | None
    """The rank that failed first; None if unknown."""
    step: int | None
    """The highest step that any rank had completed."""
    fault_at_s: float
    """The supervisor's estimate of the failure's time.

    That is the first rank's end, or a last sign of life.
    """
    detected_at_s: float
    diagnosis: dict[str, Any]
    """The published JSON of `holdfast.diagnose`."""
    action: str = ""
    """The action that was taken: `restart` or `stop`."""
    explanation: str = ""
    """The reason for the action, in a sentence."""
    resumed_at_s: float | None = None
    """The time of the job's next completed step."""
    restored_step: int | None = None
    """Steps completed in the state that the job restored afterwards."""


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
    """Seconds that the checkpoint stopped the training: the longest of its ranks."""
    committed_at_s: float


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One evaluation of a suite on a model. The samples and all scores are files in `folder`."""

    evaluation_id: str
    suite: str
    model: str
    """The model's name, as a person gave it."""
    family: str
    """The model's family: models whose answers are alike, such as the checkpoints of one run.

    The history of one model predicts the costs of the next model of the family.
    """
    state: EvaluationState
    started_at_s: float
    folder: str
    digest: str = ""
    """The digest of the weights' content."""
    mode: str = ""
    """The mode of the numerics: `exact` or `free`."""
    numerics: str = ""
    """The conditions, besides weights and requests, that the bits of the answers depend on."""
    harness_versions: dict[str, str] = field(default_factory=dict)
    ended_at_s: float | None = None
    makespan_s: float | None = None
    bound_s: float | None = None
    """Seconds that every schedule needs at least."""
    engines: int = 0
    nodes: int = 0
    engine_seconds: float = 0.0
    """The sum of the seconds for which each engine was there."""
    account: dict[str, float] = field(default_factory=dict)
    """Engine-seconds by cause."""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Scores by task and by lm-eval's `metric,filter`: `[value, standard error or None]`."""
    failed_tasks: dict[str, str] = field(default_factory=dict)
    """The reason for missing scores, by task."""
    run_id: str | None = None
    """The training run of the checkpoint; None if unknown."""
    step: int | None = None
    outcome: str = ""
    """One sentence on the end of the evaluation and the next step; empty if all is well."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """The measured cost of a task's samples in an evaluation, for models of a family."""

    family: str
    harness: str
    task: str
    recorded_at_s: float
    evaluation_id: str
    history: bytes
    """The costs, as the policy packs them; at most `HISTORY_LIMIT_BYTES`."""


HISTORY_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of an incident, for finding similar incidents and for learning rules."""

    memory_id: int | None = None
    """The memory's id; None until the ledger assigns one."""
    incident_id: int | None = None
    """The incident of the run; None if logs were diagnosed without a run."""
    run_id: str = ""
    """The run; empty if logs were diagnosed without a run."""
    remembered_at_s: float
    reason: str
    """The reason in the diagnosis."""
    category: str
    confidence: float
    rule_id: str = ""
    """The rule that decided the diagnosis."""
    scope: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    action: str = ""
    """The action that the diagnosis advised."""
    done: str = ""
    """The action that was taken, in a sentence."""
    roots: list[str] = field(default_factory=list)
    """The lines that state the root, without prefixes; a person's lines replace the diagnosis'."""
    lines: list[list[Any]] = field(default_factory=list)
    """The compressed log: file, number and text of each kept line.

    The text has at most `MEMORY_LIMIT_BYTES`.
    """
    words: str = ""
    """The words of roots and lines for full-text search, separated by blanks, without values."""
    verdict: Literal["", "confirmed", "corrected"] = ""
    """A person's verdict on the diagnosis."""
    true_reason: str = ""
    """The reason given with the verdict."""
    true_action: str = ""
    """The action that helped, if a person named one."""
    judged_by: str = ""
    judged_at_s: float | None = None
    embedding: bytes | None = None
    """The root's embedding from an embeddings endpoint: float32, little-endian."""
    embedding_model: str = ""


MEMORY_LIMIT_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class LearnedRule:
    """A rule or a filter learned from incidents or good runs, after every check has passed."""

    rule_id: str
    kind: Literal["rule", "filter", "suggestion"]
    """The kind; a `suggestion` is a model's rule that no person has put in force yet."""
    body: dict[str, Any]
    """The fields of the rule or filter, plain JSON values."""
    author: str
    sources: list[str]
    """The sources of the rule: ids of incidents, or `good:ID`."""
    made_at_s: float
    withdrawn_at_s: float | None = None
    """The time of the withdrawal; a withdrawn rule is kept for the record but not used."""
    withdrawn_by: str = ""


@dataclass(frozen=True, kw_only=True)
class GoodRun:
    """The output of a run that ended well: no line in the output is a failure's root."""

    good_id: int | None = None
    """The id; None until the ledger assigns one."""
    name: str
    """The paths, as a person gave them."""
    fingerprint: str
    """The fingerprint of the lines, so that the same logs are recorded once."""
    added_at_s: float
    lines: list[list[Any]]
    """A line of each shape, without prefixes, and the number of lines of the shape."""


CordonKind = Literal["", "person", "hard", "soft"]
"""The origin of a cordon; empty if there was none.

`person`: a person. `hard`: a check of the node by itself with a wrong result. `soft`: tests that
may have met a busy node or a bad link.
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of one session of tests on a node."""

    name: str
    outcome: Literal["good", "bad", "suspect"]
    probability: float
    """The probability that the node is faulty, by this session and the earlier verdicts."""
    evidence: str
    """The evidence, in one sentence."""
    is_hard: bool = False
    """True if a check of the node by itself gave a wrong result."""
    passed: Literal["", "solo", "all"] = ""
    """The tests that have passed.

    `solo`: each check of the node by itself. `all`: also the tests with other nodes. Empty if a
    check or a test failed.
    """


@dataclass(frozen=True, kw_only=True)
class Lead:
    """The supervisor that leads a run."""

    run_id: str
    generation: int
    """The number of the supervisor; 0 before the first one."""
    node_id: str
    """The node that keeps the supervisor going."""
    beats: int
    """The number of the supervisor's signs of life."""


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """The address at which the nodes of a run meet, with the run's token.

    A reader of the token can command the nodes.
    """

    key: str
    run_id: str
    hosts: list[str]
    port: int
    token: str


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """A node that was tested or cordoned."""

    name: str
    """The node's name, as the scheduler or the host gives it."""
    cordoned_at_s: float | None = None
    """The time of the cordon; None if jobs may be launched on the node."""
    cordoned_by: str = ""
    """A user, or the run whose tests found the node faulty."""
    cordon_kind: CordonKind = ""
    """The origin of the last cordon; empty if there was none."""
    why: str = ""
    """The reason for the cordon, in one sentence."""
    probability: float | None = None
    """The probability that the node is faulty, by the last test; None without a test."""
    tested_at_s: float | None = None
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """The newest `VERDICTS_KEPT` verdicts, oldest first.

    Each has `at_s`, `by`, and the fields of `Verdict` without the name.
    """

    @property
    def is_cordoned(self) -> bool:
        """True if no job may be launched on the node."""
        return self.cordoned_at_s is not None

    @property
    def passed_since(self) -> bool:
        """True if the node has passed its last session of tests since its cordon.

        The probability of a fault may still be high, because it includes the faults before the
        repair. If a check of the single node caused the cordon, passing these checks is enough.
        """
        last = self.verdicts[-1] if self.verdicts else {}
        if float(last.get("at_s", 0.0)) <= (self.cordoned_at_s or 0.0):
            return False
        passed = last.get("passed")
        suffices = passed == "all" or (passed == "solo" and self.cordon_kind == "hard")
        return suffices or last.get("outcome") == "good"

    @property
    def is_hard(self) -> bool:
        """True if only `holdfast nodes return` may bring the node back.

        A cordon by a person, or by a failed check of the single node, is hard.
        """
        return self.is_cordoned and self.cordon_kind != "soft"


VERDICTS_KEPT = 50
"""The number of verdicts kept of each node."""


@dataclass(frozen=True, kw_only=True)
class ActionRecord:
    """One action of a person in the console."""

    action_id: int | None = None
    """The action's id; None until the ledger assigns one."""
    key: str
    """The key of the form that a browser sent. The same form sent twice is one action."""
    at_s: float
    by: str
    """The person, as the person signed in."""
    address: str
    """The network address of the person's browser."""
    what: str
    """The action, such as `stop` or `confirm`."""
    target: str
    """The id of the run or of the incident, or the name of the node."""
    why: str = ""
    """The person's reason, or the corrected cause of an incident."""
    seen: str
    """The state of the target that the page had shown to the person."""
    state: Literal["asked", "done", "refused"] = "asked"
    outcome: str = ""
    """The result in a sentence; empty while the action goes on."""
