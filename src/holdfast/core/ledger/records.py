"""Define the records of the ledger, one frozen dataclass for each table.

Times are in seconds since the Unix epoch, UTC.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

BY_TIME_LIMIT = "the time limit"
"""The start of the author's name of a stop that the time limit of the scheduler's job caused."""

RunState = Literal["queued", "running", "completed", "failed", "stopped"]
"""The state of a run; `queued` means that the run waits for a job of its scheduler.

A run may be queued before its first attempt and between two attempts.
"""
AttemptOutcome = Literal["running", "completed", "failed", "stopped"]
EvaluationState = Literal["running", "done", "failed", "stopped"]
CheckpointState = Literal["written", "verified", "healthy", "damaged", "incomplete"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of `holdfast run`, with all its restarts."""

    run_id: str
    state: RunState
    command: list[str]
    options: dict[str, Any]
    """The options of the supervision as `recover.spec` writes them, enough to resume the run."""
    cwd: str
    host: str
    pid: int
    """The id of the run's `holdfast run` process on `host`."""
    started_at_s: float
    ended_at_s: float | None = None
    exit_code: int | None = None
    outcome: str = ""
    """One sentence on how the run ended and on the user's next step."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the job's processes."""

    run_id: str
    number: int
    """The number of the attempt in its run, from 1."""
    started_at_s: float
    outcome: AttemptOutcome = "running"
    start_step: int | None = None
    """Steps completed in the state that the attempt began with; None until a rank reported it."""
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
    """The supervisor's estimate of the time of the failure.

    The estimate is the end of the first rank that ended, or the last sign of life of the job.
    """
    detected_at_s: float
    diagnosis: dict[str, Any]
    """The diagnosis, in the published JSON format of `holdfast.diagnose`."""
    action: str = ""
    """The action that was taken: `restart` or `stop`."""
    explanation: str = ""
    """The reason for the action, in a sentence."""
    resumed_at_s: float | None = None
    """The time at which the job completed its next step."""
    restored_step: int | None = None
    """The number of completed steps in the state that the job restored after the incident."""


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
    """Seconds for which the checkpoint stopped the training, on the rank that waited longest."""
    committed_at_s: float


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One evaluation of a suite on a model.

    The samples and all scores are in files in `folder`.
    """

    evaluation_id: str
    suite: str
    model: str
    """The name of the model, as a person gave it."""
    family: str
    """The family of the model, such as all checkpoints of one run; their answers are similar.

    The measured costs of one model predict the costs of other models of the family.
    """
    state: EvaluationState
    started_at_s: float
    folder: str
    digest: str = ""
    """The digest of the weights."""
    mode: str = ""
    """The mode of the arithmetic, `exact` or `free`."""
    numerics: str = ""
    """The conditions that the exact answers depend on, besides the weights and the requests."""
    harness_versions: dict[str, str] = field(default_factory=dict)
    ended_at_s: float | None = None
    makespan_s: float | None = None
    bound_s: float | None = None
    """A lower bound, in seconds, on the duration of the evaluation with any schedule."""
    engines: int = 0
    nodes: int = 0
    engine_seconds: float = 0.0
    """The seconds for which engines existed, added up over the engines."""
    account: dict[str, float] = field(default_factory=dict)
    """The engine-seconds, by cause."""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Scores by task and by lm-eval's `metric,filter`: `[value, standard error or None]`."""
    failed_tasks: dict[str, str] = field(default_factory=dict)
    """The tasks without scores, each with the reason."""
    run_id: str | None = None
    """The training run that wrote the checkpoint; None if unknown."""
    step: int | None = None
    outcome: str = ""
    """One sentence on how the evaluation ended and on the next step; empty if all went well."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """The measured costs of a task's samples, which predict later evaluations of the family."""

    family: str
    harness: str
    task: str
    recorded_at_s: float
    evaluation_id: str
    history: bytes
    """The measured costs, in the scheduling policy's packed form; at most `HISTORY_LIMIT_BYTES`."""


HISTORY_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The stored diagnosis of an incident, used to find similar incidents and to learn rules."""

    memory_id: int | None = None
    """The memory's id; None until the ledger assigns one."""
    incident_id: int | None = None
    """The incident of the run; None if logs were diagnosed without a run."""
    run_id: str = ""
    """The run; empty if logs were diagnosed without a run."""
    remembered_at_s: float
    reason: str
    """The reason that the diagnosis gave."""
    category: str
    confidence: float
    rule_id: str = ""
    """The rule that decided the diagnosis."""
    scope: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    action: str = ""
    """The action that the diagnosis advised."""
    done: str = ""
    """The action that was taken, as a sentence."""
    roots: list[str] = field(default_factory=list)
    """The log lines that state the root cause, without their prefixes.

    If a person named other lines, these replace the diagnosis' lines.
    """
    lines: list[list[Any]] = field(default_factory=list)
    """The compressed log: file, line number and text of each kept line.

    The text has at most `MEMORY_LIMIT_BYTES`.
    """
    words: str = ""
    """The words of `roots` and `lines` for full-text search, separated by blanks.

    Values such as numbers are left out.
    """
    verdict: Literal["", "confirmed", "corrected"] = ""
    """A person's verdict on the diagnosis."""
    true_reason: str = ""
    """The true reason, as the person who gave the verdict named it."""
    true_action: str = ""
    """The action that helped, if a person named one."""
    judged_by: str = ""
    judged_at_s: float | None = None
    embedding: bytes | None = None
    """The embedding of the root lines from an embeddings endpoint: float32, little-endian."""
    embedding_model: str = ""


MEMORY_LIMIT_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class LearnedRule:
    """A rule or a filter that was learned from incidents or good runs and passed every check."""

    rule_id: str
    kind: Literal["rule", "filter", "suggestion"]
    """The kind of the record.

    A `suggestion` is a rule that a language model wrote and no person has accepted yet.
    """
    body: dict[str, Any]
    """The fields of the rule or filter, as plain JSON values."""
    author: str
    sources: list[str]
    """The sources of the rule: ids of incidents, or `good:ID` for good runs."""
    made_at_s: float
    withdrawn_at_s: float | None = None
    """The time at which the rule was withdrawn; a withdrawn rule is kept but not used."""
    withdrawn_by: str = ""


@dataclass(frozen=True, kw_only=True)
class GoodRun:
    """The output of a run that ended well, so none of the lines is the root of a failure."""

    good_id: int | None = None
    """The id; None until the ledger assigns one."""
    name: str
    """The paths of the logs, as a person gave them."""
    fingerprint: str
    """A fingerprint of the lines, so that the same logs are recorded only once."""
    added_at_s: float
    lines: list[list[Any]]
    """One line of each shape, without prefixes, with the number of lines that have the shape."""


CordonKind = Literal["", "person", "hard", "soft"]
"""The origin of a cordon; empty if there was no cordon.

`person`: a person cordoned the node. `hard`: a check of this node alone gave a wrong result.
`soft`: a test failed that may also fail because of a busy node or a bad link.
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one test session for one node."""

    name: str
    outcome: Literal["good", "bad", "suspect"]
    probability: float
    """The probability that the node is faulty, based on this session and the earlier verdicts."""
    evidence: str
    """The evidence, in one sentence."""
    is_hard: bool = False
    """True if a check of this node alone gave a wrong result."""
    passed: Literal["", "solo", "all"] = ""
    """The tests that the node has passed; empty if a check or a test failed.

    `solo`: each check of this node alone. `all`: also the tests together with other nodes.
    """


@dataclass(frozen=True, kw_only=True)
class Lead:
    """The supervisor that leads a run."""

    run_id: str
    generation: int
    """The number of the supervisor, from 1; 0 before the first supervisor."""
    node_id: str
    """The node that restarts the supervisor if the supervisor ends."""
    beats: int
    """The number of heartbeats that the supervisor has recorded."""


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """The address at which the nodes of a run meet, with the run's token.

    The token must stay secret: with the token, a program can send commands to the nodes.
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
    """The name of the node, as the scheduler or the host reports it."""
    cordoned_at_s: float | None = None
    """The time at which the node was cordoned; None if jobs may be launched on the node."""
    cordoned_by: str = ""
    """The user who cordoned the node, or the run whose tests found the node faulty."""
    cordon_kind: CordonKind = ""
    """The origin of the last cordon; empty if there was none."""
    why: str = ""
    """The reason for the cordon, in one sentence."""
    probability: float | None = None
    """The probability, by the last test, that the node is faulty; None if there was no test."""
    tested_at_s: float | None = None
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """The newest `VERDICTS_KEPT` verdicts, oldest first.

    Each verdict has `at_s`, `by`, and the fields of `Verdict` without the node's name.
    """

    @property
    def is_cordoned(self) -> bool:
        """True if no job may be launched on the node."""
        return self.cordoned_at_s is not None

    @property
    def passed_since(self) -> bool:
        """True if the node passed its last test session, and the session was after the cordon.

        The probability of a fault is not considered, because it includes the faults before the
        repair. If a failed check of this node alone caused the cordon, it is enough to pass these
        checks.
        """
        last = self.verdicts[-1] if self.verdicts else {}
        if float(last.get("at_s", 0.0)) <= (self.cordoned_at_s or 0.0):
            return False
        passed = last.get("passed")
        suffices = passed == "all" or (passed == "solo" and self.cordon_kind == "hard")
        return suffices or last.get("outcome") == "good"

    @property
    def is_hard(self) -> bool:
        """True if only `holdfast nodes return` can end the cordon.

        A cordon is hard if a person set it, or if a check of this node alone failed.
        """
        return self.is_cordoned and self.cordon_kind != "soft"


VERDICTS_KEPT = 50
"""The number of verdicts that are kept for each node."""


@dataclass(frozen=True, kw_only=True)
class ActionRecord:
    """One action of a person in the console."""

    action_id: int | None = None
    """The action's id; None until the ledger assigns one."""
    key: str
    """The key of the form that the browser sent; the same form sent twice counts as one action."""
    at_s: float
    by: str
    """The name with which the person signed in."""
    address: str
    """The network address of the person's browser."""
    what: str
    """The action, such as `stop` or `confirm`."""
    target: str
    """The id of the run or the incident, or the name of the node, that the action concerns."""
    why: str = ""
    """The reason that the person gave, or the corrected cause of an incident."""
    seen: str
    """The state of the target that the page showed to the person."""
    state: Literal["asked", "done", "refused"] = "asked"
    outcome: str = ""
    """The result as a sentence; empty while the action is in progress."""
