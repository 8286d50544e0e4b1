"""Where things lie: one class owns every file name of a run, one of an evaluation.

`$HOLDFAST_HOME` (default `./.holdfast`) holds `ledger.db`, `runs/RUN/`, `evaluations/ID/` and `answers/`.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from holdfast.core.errors import BadUse

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a run, and of an evaluation."""
_ID_RULE = "at most 64 letters, digits, `.`, `_` and `-`, the first a letter or digit"


def holdfast_home() -> Path:
    """`$HOLDFAST_HOME`, else `.holdfast` in the current folder; absolute."""
    # `or`: a variable that is set and empty means the default, not the current folder.
    return Path(os.environ.get("HOLDFAST_HOME") or ".holdfast").absolute()


def ledger_url(home: Path) -> str:
    """The default ledger of a home: SQLite beside its runs."""
    # Quoted, because a `?` or `%` in a folder's name would end or change the path of the URL.
    return f"sqlite:///{quote(str(home / 'ledger.db'))}"


def is_server(ledger: str) -> bool:
    """Whether the URL of a ledger names a server, which several hosts may use, and no file."""
    return not ledger.startswith("sqlite")


@dataclass(frozen=True)
class RunPaths:
    """Every file of one run, below `home/runs/RUN`.

    Raises:
        BadUse: the run id is not one; it could name a folder that is not a run's, to be read or removed.
    """

    home: Path
    run_id: str

    def __post_init__(self) -> None:
        if not RUN_ID.fullmatch(self.run_id):
            raise BadUse(
                f"{self.run_id!r} is not a run id: {_ID_RULE}. `holdfast runs ls` lists the runs there are."
            )

    @property
    def root(self) -> Path:
        """The run's folder."""
        return self.home / "runs" / self.run_id

    @property
    def logs(self) -> Path:
        """Folder of the logs, one folder an attempt."""
        return self.root / "logs"

    def attempt_logs(self, attempt: int) -> Path:
        """Folder of the logs of one attempt."""
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """What rank `rank` printed, both streams, newest part; older parts end in `.1`, `.2` …."""
        return self.attempt_logs(attempt) / f"rank-{rank}.log"

    def launcher_log(self, attempt: int) -> Path:
        """What PyTorch's launcher printed itself."""
        return self.attempt_logs(attempt) / "launcher.log"

    def observer_log(self, attempt: int) -> Path:
        """What the supervisor saw of the ranks: a rank's exit, its signal, a missing step."""
        return self.attempt_logs(attempt) / "observer.log"

    @property
    def stop_asked(self) -> Path:
        """There once `holdfast runs stop` asked the supervisor to stop."""
        return self.root / "stop-asked"

    @property
    def approved(self) -> Path:
        """The number of the proposal that `holdfast runs approve` approved last."""
        return self.root / "approved"

    @property
    def supervisor_log(self) -> Path:
        """What a detached supervisor printed."""
        return self.logs / "supervisor.log"

    @property
    def steps(self) -> Path:
        """The journal of steps (`holdfast.core.telemetry`)."""
        return self.root / "telemetry" / "steps.jsonl"

    @property
    def report(self) -> Path:
        """The run's page."""
        return self.root / "report" / "report.html"

    @property
    def supervisors(self) -> Path:
        """Folder with a file for each supervisor that the run has had; the highest number is the present one."""
        return self.root / "supervisors"

    def node_lock(self, node_id: str) -> Path:
        """Locked while any process of the run lives on a node other than the first."""
        return self.root / "nodes" / f"{node_id}.lock"

    @property
    def lock(self) -> Path:
        """Locked while the supervisor or any process of its job lives."""
        return self.root / "lock"


@dataclass(frozen=True)
class EvaluationPaths:
    """Every file of one evaluation, below `home/evaluations/ID`.

    Raises:
        BadUse: the id is not one; it could name a folder that is not an evaluation's.
    """

    home: Path
    evaluation_id: str

    def __post_init__(self) -> None:
        if not RUN_ID.fullmatch(self.evaluation_id):
            raise BadUse(
                f"{self.evaluation_id!r} is not an evaluation's id: {_ID_RULE}. "
                "`holdfast eval ls` lists those there are."
            )

    @property
    def root(self) -> Path:
        """The evaluation's folder."""
        return self.home / "evaluations" / self.evaluation_id

    @property
    def suite(self) -> Path:
        """The suite, with every flag applied."""
        return self.root / "suite.json"

    @property
    def plan(self) -> Path:
        """What was predicted before it began."""
        return self.root / "plan.json"

    @property
    def timeline(self) -> Path:
        """What happened when, a line each."""
        return self.root / "timeline.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of what its processes printed."""
        return self.root / "logs"

    @property
    def samples(self) -> Path:
        """Folder of the samples that the harness logs."""
        return self.root / "samples"

    @property
    def results(self) -> Path:
        """The scores and what they cost; there once it ended."""
        return self.root / "results.json"

    @property
    def report(self) -> Path:
        """The evaluation's page."""
        return self.root / "report.html"

    @property
    def state(self) -> Path:
        """Folder of what the coordinator needs to go on after a crash."""
        return self.root / "state"

    @property
    def answers(self) -> Path:
        """Root of the journals of answers, which all evaluations of a home share."""
        return self.home / "answers"
