"""Define the paths of all files of a run and of an evaluation.

No other module contains these file names. `$HOLDFAST_HOME` (default `./.holdfast`) holds
`ledger.db`, `runs/RUN/`, `evaluations/ID/` and `answers/`.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from holdfast.core.errors import BadUse

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The allowed form of the id of a run or an evaluation."""
_ID_RULE = "at most 64 letters, digits, `.`, `_` and `-`, the first a letter or digit"


def holdfast_home() -> Path:
    """Return `$HOLDFAST_HOME`, or `.holdfast` in the current folder, as an absolute path.

    Raises:
        BadUse: the path is a file, not a folder.
    """
    # `or`: an empty variable means the default, not the current folder.
    given = os.environ.get("HOLDFAST_HOME") or ".holdfast"
    home = Path(given).absolute()
    if home.exists() and not home.is_dir():
        raise BadUse(f"HOLDFAST_HOME={given} is a file; give a folder.")
    return home


def ledger_url(home: Path) -> str:
    """Return the URL of the default ledger of `home`, a SQLite file beside the runs."""
    # Quoted, because a `?` or `%` in a folder's name would end or change the path of the URL.
    return f"sqlite:///{quote(str(home / 'ledger.db'))}"


def ledger_at(place: str) -> str:
    """Convert a ledger's URL, or the path of its SQLite file, to a URL."""
    return place if "://" in place else f"sqlite:///{quote(str(Path(place).absolute()))}"


def ledger_file(ledger: str) -> Path | None:
    """Return the SQLite file of a ledger's URL; None if the URL names none."""
    scheme, slashes, path = ledger.partition("?")[0].partition(":///")
    is_file = slashes and path and not is_server(scheme)
    return Path(unquote(path)) if is_file else None


def is_server(ledger: str) -> bool:
    """Return True if a ledger's URL names a database server, which several hosts can use."""
    return not ledger.startswith("sqlite")


@dataclass(frozen=True)
class RunPaths:
    """The paths of every file of one run, below `home/runs/RUN`.

    Raises:
        BadUse: the run id has a form that is not allowed, and could name a folder outside `runs`.
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
        """The folder that holds a folder of logs for each attempt."""
        return self.root / "logs"

    def attempt_logs(self, attempt: int) -> Path:
        """Return the folder of the logs of one attempt."""
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """Return the log of a rank, which holds both output streams.

        This is the newest part of the log. Older parts have the suffixes `.1`, `.2` and so on.
        """
        return self.attempt_logs(attempt) / f"rank-{rank}.log"

    def launcher_log(self, attempt: int) -> Path:
        """Return the log with the output of PyTorch's launcher, without the output of the ranks."""
        return self.attempt_logs(attempt) / "launcher.log"

    def observer_log(self, attempt: int) -> Path:
        """Return the log of the supervisor's observations: exits, signals, missing steps."""
        return self.attempt_logs(attempt) / "observer.log"

    @property
    def stop_request(self) -> Path:
        """The file through which `holdfast runs stop` requests a stop from the supervisor."""
        return self.root / "stop-asked"

    @property
    def approved(self) -> Path:
        """The file with the number of the proposal that `holdfast runs approve` last approved."""
        return self.root / "approved"

    @property
    def rollback_request(self) -> Path:
        """The file with a person's request to go back to an earlier checkpoint."""
        return self.root / "rollback-asked"

    @property
    def supervisor_log(self) -> Path:
        """The log of a supervisor that runs in the background."""
        return self.logs / "supervisor.log"

    @property
    def steps(self) -> Path:
        """The journal of steps (`holdfast.core.telemetry`)."""
        return self.root / "telemetry" / "steps.jsonl"

    @property
    def profile(self) -> Path:
        """The folder of the run's profile (`holdfast.profile.recording`)."""
        return self.root / "profile"

    @property
    def report(self) -> Path:
        """The HTML report of the run."""
        return self.root / "report" / "report.html"

    @property
    def supervisors(self) -> Path:
        """The folder with a numbered file for each supervisor; the highest number leads the run."""
        return self.root / "supervisors"

    def node_lock(self, node_id: str) -> Path:
        """Return the lock file that is held while the run uses a node other than the first."""
        return self.root / "nodes" / f"{node_id}.lock"

    @property
    def lock(self) -> Path:
        """The lock file that is held while the supervisor or any process of its job is alive."""
        return self.root / "lock"


@dataclass(frozen=True)
class EvaluationPaths:
    """The paths of every file of one evaluation, below `home/evaluations/ID`.

    Raises:
        BadUse: the id has a form that is not allowed, and could name a folder outside
            `evaluations`.
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
        """The suite that is evaluated, after all command-line options were applied."""
        return self.root / "suite.json"

    @property
    def plan(self) -> Path:
        """The file of predictions that were made before the evaluation began."""
        return self.root / "plan.json"

    @property
    def timeline(self) -> Path:
        """The file of the evaluation's events with their times, one line for each event."""
        return self.root / "timeline.jsonl"

    @property
    def profile(self) -> Path:
        """The folder of the evaluation's profile (`holdfast.profile.recording`)."""
        return self.root / "profile"

    @property
    def logs(self) -> Path:
        """The folder of the logs of the evaluation's processes."""
        return self.root / "logs"

    @property
    def samples(self) -> Path:
        """The folder of the samples that the evaluation harness logs."""
        return self.root / "samples"

    @property
    def results(self) -> Path:
        """The file of scores and costs; the file exists once the evaluation has ended."""
        return self.root / "results.json"

    @property
    def report(self) -> Path:
        """The HTML report of the evaluation."""
        return self.root / "report.html"

    @property
    def state(self) -> Path:
        """The folder of the state from which the coordinator continues after a crash."""
        return self.root / "state"

    @property
    def answers(self) -> Path:
        """The folder of the recorded answers, which all evaluations of a home share."""
        return self.home / "answers"
