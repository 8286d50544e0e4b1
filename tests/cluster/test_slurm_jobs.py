"""Test single jobs against a scripted Slurm; recover/slurm/test_slurm_runs.py uses a real one."""

import pytest

from holdfast.cluster.slurm_jobs import EXPEDITE, SlurmJobs
from holdfast.core.errors import BadUse, HoldfastError


class Scripted:
    """A Slurm with one job."""

    def __init__(self, job="RUNNING|None|n[1-2]", version="slurm-wlm 22.05.8"):
        self.job, self.version, self.said, self.environment = job, version, [], None

    def __call__(self, argv, environment=None):
        self.said.append(list(argv))
        match argv[0]:
            case "squeue" if isinstance(self.job, Exception):
                raise self.job
            case "squeue":
                return f"{self.job}\n"
            case "scontrol" if "--version" in argv:
                return self.version
            case "scontrol" if "hostnames" in argv:
                return "n1\nn2\n"
            case "sbatch":
                self.environment = environment
                return "77;cluster\n"
        return ""

    def argv(self, program):
        return next((argv for argv in self.said if argv[0] == program), None)


@pytest.mark.parametrize(
    ("told", "is_waiting", "is_running", "is_over"),
    [
        ("PENDING|Priority|", True, False, False),
        ("CONFIGURING|None|n[1-2]", True, False, False),
        ("RUNNING|None|n[1-2]", False, True, False),
        ("SUSPENDED|None|n[1-2]", False, True, False),
        ("COMPLETING|NonZeroExitCode|n1", False, False, False),
        ("STAGE_OUT|None|n1", False, False, False),
        ("SPECIAL_EXIT|JobHeldUser|", True, False, False),
        ("A_STATE_OF_A_NEWER_SLURM||n1", False, False, False),
        ("CANCELLED|None|", False, False, True),
        ("NODE_FAIL|None|", False, False, True),
        ("", False, False, True),
    ],
)
def test_the_state_of_a_job(told, is_waiting, is_running, is_over):
    state = SlurmJobs(Scripted(told)).state("77")
    assert (state.is_waiting, state.is_running, state.is_over) == (is_waiting, is_running, is_over)


def test_a_forgotten_job_is_over_and_a_silent_controller_is_an_error():
    forgotten = HoldfastError("squeue failed: slurm_load_jobs error: Invalid job id specified")
    assert SlurmJobs(Scripted(forgotten)).state("77").is_over
    with pytest.raises(HoldfastError, match="Unable to contact"):
        SlurmJobs(Scripted(HoldfastError("Unable to contact slurm controller"))).state("77")


@pytest.mark.parametrize(
    ("told", "is_ended"),
    [("RUNNING||n1", True), ("PENDING||", True), ("COMPLETING||n1", False), ("TIMEOUT||", False)],
)
def test_a_job_that_is_about_to_end_is_never_touched(told, is_ended):
    slurm = Scripted(told)
    assert SlurmJobs(slurm).end("77") is is_ended
    assert (slurm.argv("scancel") is not None) is is_ended


def submit(slurm, tmp_path, **options):
    given = {"name": "holdfast-r-1", "nodes": "4", "options": (), "environment": {"TOKEN": "t"}}
    given |= {"working_folder": "/w", "logs": tmp_path, **options}
    job_id = SlurmJobs(slurm).submit(tmp_path / "job.sh", **given)
    assert job_id == "77"
    return slurm.argv("sbatch")


def test_a_job_goes_on_without_nodes_that_die_and_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "9")
    slurm = Scripted()
    argv = submit(slurm, tmp_path, options=("--partition=gpu",))
    assert argv[:2] == ["sbatch", "--partition=gpu"]
    assert {"--no-kill", "--requeue", "--nodes=4", "--chdir=/w", "--export=ALL"} <= set(argv)
    assert slurm.environment["TOKEN"] == "t"
    assert "SLURM_NTASKS" not in slurm.environment, "of a job around this process"


def test_the_next_job_waits_for_the_end_of_the_one_before_and_leaves_nodes_out(tmp_path):
    options = ("--exclude=bad[1-2]",)
    argv = submit(
        Scripted(), tmp_path, nodes="4-5", options=options, after="70", exclude=["n2", "n1"]
    )
    assert {"--nodes=4-5", "--dependency=afterany:70", "--exclude=bad[1-2],n1,n2"} <= set(argv)
    assert argv.index("--exclude=bad[1-2],n1,n2") > argv.index("--exclude=bad[1-2]"), "it holds"


@pytest.mark.parametrize("own", ["--requeue=expedite", "--no-requeue"])
def test_what_the_user_says_about_requeueing_holds(tmp_path, own):
    argv = submit(Scripted(), tmp_path, options=(own,))
    assert [word for word in argv if "requeue" in word] == [own]


def test_options_that_holdfast_sets_and_those_that_this_slurm_lacks_are_refused():
    with pytest.raises(BadUse, match="--nodes and --spares"):
        SlurmJobs(Scripted()).check_options(["--nodes=3"])
    with pytest.raises(BadUse, match=r"needs Slurm 25\.11; this is Slurm 22\.05"):
        SlurmJobs(Scripted()).check_options([EXPEDITE])
    SlurmJobs(Scripted(version="slurm 25.11.1")).check_options([EXPEDITE, "--qos=high"])
    SlurmJobs(Scripted(version="slurm 26.05.4")).check_options([EXPEDITE])
    SlurmJobs(Scripted()).check_options(["--qos=high"])


def test_jobs_are_found_by_their_name():
    slurm = Scripted("76|COMPLETING\n77|PENDING\n78|RUNNING")
    assert SlurmJobs(slurm).named("holdfast-r-1") == ["77", "78"]
    assert {"--me", "--name=holdfast-r-1"} <= set(slurm.argv("squeue"))
