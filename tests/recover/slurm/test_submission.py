"""Runs in the queue, against a fake Slurm with scripted answers."""

import stat
from pathlib import Path

import pytest

from holdfast.cluster import SlurmJobs
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import Attempt, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover.runs import remove_run
from holdfast.recover.slurm.submission import (
    END_RETRY_S,
    END_TRIES,
    Submission,
    is_left,
    new_submission,
    settle_jobs,
    stop_queued,
    submit_run,
)


class Scripted:
    """A Slurm with one job."""

    def __init__(self):
        self.state, self.refusal, self.cancelled, self.script = "", None, [], ""
        self.named = ""

    def __call__(self, argv, environment=None):
        match argv[0]:
            case "sbatch" if self.refusal is not None:
                raise HoldfastError(self.refusal)
            case "sbatch":
                self.script = Path(argv[-1]).read_text()
                return "17\n"
            case "scancel":
                self.cancelled.append(argv[-1])
                return ""
            case "squeue" if "--me" in argv:
                return self.named
        return f"{self.state}||\n"


class World:
    def __init__(self, home):
        self.home, self.url, self.slurm = home, ledger_url(home), Scripted()
        self.paths = RunPaths(home, "r")
        self.paths.logs.mkdir(parents=True)

    def run(self, state="running"):
        run = Run(
            run_id="r",
            state=state,
            command=["python", "job.py"],
            options={},
            cwd=str(self.home),
            host="login",
            pid=1,
            started_at_s=1.0,
        )
        with Ledger.open(self.url) as ledger:
            ledger.add_run(run)
        return run

    def submit(self, run):
        submission = Submission.read(self.paths) or new_submission(
            run_id="r",
            ledger_url=self.url,
            nodes=2,
            spares=1,
            options=["--qos=x"],
            environment={"HOLDFAST_NOTIFY": "json://secret"},
            echo=False,
        )
        return submit_run(run, submission, self.url, self.home, SlurmJobs(self.slurm))

    def known(self):
        with Ledger.open(self.url) as ledger:
            return ledger.run("r")


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_submitted_run_is_queued_and_its_job_resumes_it(world):
    submission = world.submit(world.run())
    assert submission.jobs == ("17",)
    assert Submission.read(world.paths) == submission
    assert world.known().state == "queued"
    assert "exec srun " in world.slurm.script
    assert "--no-kill" in world.slurm.script
    assert "run --resume r --no-echo --spares $((SLURM_JOB_NUM_NODES - 2))" in world.slurm.script
    assert "secret" not in world.slurm.script
    mode = (world.paths.root / "slurm.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600, "the addresses of messages hold secrets"


def test_a_new_run_that_slurm_refuses_is_forgotten(world):
    world.slurm.refusal = "sbatch failed: invalid partition specified: gpu"
    with pytest.raises(BadUse, match=r"invalid partition specified: gpu.*--sbatch-option"):
        world.submit(world.run())
    with Ledger.open(world.url) as ledger:
        assert ledger.runs() == []
    assert not world.paths.root.exists()


def test_an_old_run_that_slurm_refuses_stays_as_it_was(world):
    run = world.run("failed")
    with Ledger.open(world.url) as ledger:
        ledger.add_attempt(Attempt(run_id="r", number=1, started_at_s=1.0, outcome="failed"))
    world.slurm.refusal = "sbatch failed: no"
    with pytest.raises(BadUse):
        world.submit(run)
    assert world.known().state == "failed"


def test_a_run_whose_job_has_not_ended_is_not_submitted_again(world):
    run = world.run()
    world.submit(run)
    world.slurm.state = "PENDING"
    with pytest.raises(BadUse, match="Slurm job 17 of run r has not ended"):
        world.submit(run)


@pytest.mark.parametrize(("state", "clean"), [("failed", 1), ("stopped", 1), ("queued", 0)])
def test_what_a_person_submits_again_begins_with_a_clean_slate(world, state, clean):
    run = world.run(state)
    world.submit(run)
    with Ledger.open(world.url) as ledger:
        assert len(ledger.events("r", kind="begun")) == clean


def test_a_queued_run_is_stopped_by_ending_its_job(world):
    world.submit(world.run())
    world.slurm.state = "PENDING"
    with Ledger.open(world.url) as ledger:
        with pytest.raises(BadUse, match="waits in the queue"):
            remove_run(ledger.run("r"), ledger, world.home)
        stop_queued(ledger.run("r"), ledger, world.home, SlurmJobs(world.slurm))
    assert world.slurm.cancelled == ["17"]
    run = world.known()
    assert (run.state, run.exit_code) == ("stopped", 4)
    assert run.outcome == "Stopped while it waited as Slurm job 17."


@pytest.mark.parametrize("jobs", [(), ("16",)])
def test_a_job_whose_submitter_died_before_it_had_recorded_the_job_is_ended_too(world, jobs):
    world.run("queued")
    record = {"key": "k", "nodes": 1, "spares": 0, "options": (), "command": (), "environment": {}}
    Submission(**record, jobs=jobs).write(world.paths)
    world.slurm.state, world.slurm.named = "PENDING", "16|PENDING\n17|PENDING"
    if not jobs:
        world.slurm.named = "17|PENDING"
    with Ledger.open(world.url) as ledger:
        stop_queued(ledger.run("r"), ledger, world.home, SlurmJobs(world.slurm))
    assert world.slurm.cancelled == [*jobs, "17"]
    assert world.known().state == "stopped"


def test_a_queued_run_without_a_job_is_stopped(world):
    world.run("queued")
    record = {"key": "k", "nodes": 1, "spares": 0, "options": (), "command": (), "environment": {}}
    Submission(**record).write(world.paths)
    with Ledger.open(world.url) as ledger:
        stop_queued(ledger.run("r"), ledger, world.home, SlurmJobs(world.slurm))
    assert world.known().outcome == "Stopped before a Slurm job was submitted."


@pytest.mark.parametrize(
    ("state", "said"),
    [("RUNNING", "begins just now"), ("COMPLETING", "changes its state just now")],
)
def test_a_queued_run_whose_job_begins_just_now_is_not_ended_by_the_queue(world, state, said):
    world.submit(world.run())
    world.slurm.state = state
    with (
        Ledger.open(world.url) as ledger,
        pytest.raises(BadUse, match=rf"{said}\. Stop it again"),
    ):
        stop_queued(ledger.run("r"), ledger, world.home, SlurmJobs(world.slurm))
    assert world.known().state == "queued"
    assert world.slurm.cancelled == []


@pytest.mark.parametrize(
    ("state", "restarts", "left"),
    [
        ("queued", "0", False),
        ("running", "0", False),
        ("running", "1", False),
        ("stopped", "1", False),  # by Slurm, which has started the job again
        ("stopped", "0", True),
        ("completed", "0", True),
        ("failed", "1", True),
    ],
)
def test_a_job_of_a_run_that_is_over_starts_nothing(world, state, restarts, left):
    run = world.run(state)
    Submission(
        key="k", nodes=1, spares=0, options=(), command=(), environment={}, jobs=("16", "17")
    ).write(world.paths)
    inside = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": restarts}
    assert is_left(run, world.home, inside) is left
    assert not is_left(run, world.home, {"SLURM_JOB_ID": "5"}), "a job of the user's own"
    unrecorded = {**inside, "SLURM_JOB_ID": "18", "SLURM_JOB_NAME": "holdfast-r-k"}
    assert is_left(run, world.home, unrecorded) is left
    assert not is_left(run, world.home, {})


def test_a_damaged_record_is_an_error_with_the_next_step(world):
    (world.paths.root / "slurm.json").write_text('{"jobs": 3}')
    with pytest.raises(HoldfastError, match="squeue --me"):
        Submission.read(world.paths)


@pytest.mark.parametrize(
    ("own", "node", "is_queued", "ended"),
    [
        ("16", "0", True, ["16"]),  # the next job waits for that
        ("16", "1", True, ["16"]),
        ("16", "0", False, ["17", "18"]),  # the run is over, and needs no next job
        ("18", "0", True, []),  # Slurm starts this job again
        ("18", "0", False, []),
        ("18", "1", False, ["18"]),  # its first node is gone, and with that the batch script
        ("5", "1", True, []),  # a job of the user's own
        (None, "1", True, []),
    ],
)
def test_only_own_jobs_that_are_not_needed_are_ended(world, own, node, is_queued, ended):
    jobs = ("15", "16", "17", "18")
    Submission(key="k", nodes=1, spares=0, options=(), command=(), environment={}, jobs=jobs).write(
        world.paths
    )
    world.slurm.state = "RUNNING"
    inside = {"SLURM_NODEID": node} | ({} if own is None else {"SLURM_JOB_ID": own})
    told = settle_jobs(
        world.paths, is_queued=is_queued, environment=inside, jobs=SlurmJobs(world.slurm)
    )
    assert told == ended == world.slurm.cancelled


@pytest.mark.parametrize(
    ("node", "failures", "waits"),
    [("1", 2, 2), ("1", END_TRIES, END_TRIES - 1), ("0", 1, 0)],
)
def test_a_job_without_its_batch_script_is_ended_once_slurm_answers(world, node, failures, waits):
    Submission(
        key="k", nodes=1, spares=0, options=(), command=(), environment={}, jobs=("18", "19")
    ).write(world.paths)
    world.slurm.state, left, waited = "RUNNING", [None] * failures, []

    def command(argv, environment=None):
        if left:
            left.pop()
            raise HoldfastError("squeue failed: Unable to contact slurm controller.")
        return world.slurm(argv, environment)

    inside = {"SLURM_NODEID": node, "SLURM_JOB_ID": "18"}
    given = {"is_queued": True, "environment": inside, "jobs": SlurmJobs(command)}
    if waits == failures:
        assert settle_jobs(world.paths, **given, sleep=waited.append) == ["18"]
    else:
        hint = "scancel 18" if node == "1" else "Unable to contact"
        with pytest.raises(HoldfastError, match=hint):
            settle_jobs(world.paths, **given, sleep=waited.append)
    assert waited == [END_RETRY_S] * waits
