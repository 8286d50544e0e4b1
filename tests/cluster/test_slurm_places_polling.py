"""Test the Slurm places against a scripted Slurm; test_slurm_places.py uses a real one."""

import sys

import pytest
from cluster_tasks import states

from holdfast.cluster.places_slurm import SlurmPlaces
from holdfast.cluster.slurm_place import PlaceRecord, read_record, request_of, run_place
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.testing import FakeClock

RUNNING = ("running", None)


class ScriptedSlurm:
    """A Slurm whose squeue prints `job`, or raises `job` if that is an exception."""

    def __init__(self, *, nodes: str = "") -> None:
        self.job: str | Exception = "PENDING||Priority"
        self.nodes = nodes
        self.said: list[list[str]] = []
        self.clock = FakeClock()

    def places(self, count: int, **options) -> SlurmPlaces:
        return SlurmPlaces(nodes=count, command=self, clock=self.clock, **options)

    def __call__(self, argv, environment=None):
        self.said.append(list(argv))
        match argv[0]:
            case "sbatch":
                self.environment = environment
                return "77;cluster\n"
            case "squeue" if isinstance(self.job, Exception):
                raise self.job
            case "squeue":
                return self.job
            case "scontrol" if "nodes" in argv:
                return self.nodes
            case "scontrol" if "hostnames" in argv:
                return "".join(f"{node}\n" for node in argv[-1].split(","))
            case "scontrol":
                return "JobId=77 JobState=TIMEOUT Reason=TimeLimit RunTime=00:30:00\n"
        return ""

    def times_asked(self) -> int:
        return sum(argv[0] == "squeue" for argv in self.said)


@pytest.fixture
def slurm():
    return ScriptedSlurm()


def started(slurm, folder, count=2):
    placement = slurm.places(count).start(["agent"], environment={"TOKEN": "t"}, folder=folder)
    [submission] = folder.glob("slurm-*")
    return placement, submission


def polled(slurm, placement):
    slurm.clock.advance(60)
    return states(placement)


def test_waiting_says_why_and_slurm_is_not_asked_at_every_poll(slurm, tmp_path):
    placement, _ = started(slurm, tmp_path)
    assert [place.why for place in placement.poll()] == ["Slurm says PENDING: Priority"] * 2
    assert states(placement) == [("waiting", None)] * 2
    assert slurm.times_asked() == 1


def test_a_record_tells_that_it_runs_before_slurm_is_asked_again(slurm, tmp_path):
    placement, submission = started(slurm, tmp_path)
    placement.poll()
    PlaceRecord(node="a", starts=1).write(submission, 0)
    assert states(placement) == [RUNNING, ("waiting", None)]


def test_a_controller_that_does_not_answer_changes_nothing_and_one_that_forgot_the_job_is_believed(
    slurm, tmp_path
):
    placement, submission = started(slurm, tmp_path)
    slurm.job = "RUNNING|a,b|None"
    for index, node in enumerate("ab"):
        PlaceRecord(node=node, starts=1).write(submission, index)
    assert polled(slurm, placement) == [RUNNING] * 2
    slurm.job = HoldfastError("squeue failed: Unable to contact slurm controller")
    assert polled(slurm, placement) == [RUNNING] * 2
    slurm.job = HoldfastError("squeue failed: Invalid job id specified")
    assert polled(slurm, placement) == [("ended", None)] * 2
    assert "JobState=TIMEOUT, Reason=TimeLimit" in placement.poll()[0].why


def test_a_start_is_asked_for_once_for_one_that_ended_on_a_node_that_is_still_there(
    slurm, tmp_path
):
    placement, submission = started(slurm, tmp_path)
    slurm.job = "RUNNING|a,b|None"
    PlaceRecord(node="a", starts=1).write(submission, 0)
    PlaceRecord(node="b", starts=1, exit_code=3).write(submission, 1)
    assert polled(slurm, placement) == [RUNNING, ("ended", 3)]
    assert not placement.restart(0)
    assert placement.restart(1)
    assert request_of(submission, 1, 1).exists()
    assert states(placement) == [RUNNING, ("waiting", None)]
    PlaceRecord(node="b", starts=2).write(submission, 1)
    assert states(placement) == [RUNNING, RUNNING]
    PlaceRecord(node="b", starts=2, exit_code=4, over=True).write(submission, 1)
    assert states(placement) == [RUNNING, ("ended", 4)]
    assert not placement.restart(1)
    slurm.job = "RUNNING|b|None"
    PlaceRecord(node="a", starts=1, exit_code=3).write(submission, 0)
    assert polled(slurm, placement)[0] == ("ended", 3)
    assert not placement.restart(0), "its node is gone"


def test_the_secret_goes_by_the_environment_and_what_is_asked_of_slurm_comes_after_the_users_own(
    slurm, tmp_path
):
    options = {
        "gpus_per_node": 8,
        "cpus_per_node": 64,
        "sbatch_options": ("--partition=x", "--requeue"),
    }
    slurm.places(3, **options).start(
        ["agent", "a b"], environment={"TOKEN": "t0ken"}, folder=tmp_path
    )
    assert slurm.environment["TOKEN"] == "t0ken"
    [sbatch] = [argv for argv in slurm.said if argv[0] == "sbatch"]
    assert sbatch[1:3] == ["--partition=x", "--requeue"]
    assert {
        "--nodes=3",
        "--ntasks=3",
        "--no-kill",
        "--no-requeue",
        "--gpus-per-node=8",
        "--cpus-per-task=64",
    } < {*sbatch}
    [script] = tmp_path.glob("slurm-*/job.sh")
    assert "t0ken" not in " ".join(sbatch) + script.read_text()
    assert "agent 'a b'" in script.read_text()


def test_a_refusal_is_bad_use_with_its_words_and_leaves_nothing(slurm, tmp_path):
    def refusing(argv, environment=None):
        if argv[0] == "sbatch":
            raise HoldfastError("sbatch failed: invalid partition specified: x")
        return slurm(argv, environment)

    with pytest.raises(BadUse, match=r"invalid partition specified: x.* --partition"):
        SlurmPlaces(nodes=1, command=refusing).start(["agent"], environment={}, folder=tmp_path)
    assert slurm.said[-1][0] == "scancel"
    assert not list(tmp_path.glob("slurm-*"))


def test_a_cancel_that_fails_says_how_to_do_it_by_hand_and_can_be_tried_again(slurm, tmp_path):
    broken = True

    def sometimes(argv, environment=None):
        if argv[0] == "scancel" and broken:
            raise HoldfastError("scancel failed: no controller")
        return slurm(argv, environment)

    placement = SlurmPlaces(nodes=1, command=sometimes).start(
        ["agent"], environment={}, folder=tmp_path
    )
    with pytest.raises(HoldfastError, match="may still run: scancel --name=holdfast-"):
        placement.stop()
    broken = False
    placement.stop()
    assert slurm.said[-1][0] == "scancel"
    assert states(placement) == [("ended", None)]


def test_the_nodes_are_told_an_address_beyond_this_machine_if_there_is_one(monkeypatch):
    routes = {"this": "127.0.1.1", "n1": "10.0.0.5", "n2": "10.0.0.5", "gone": ""}
    monkeypatch.setattr("holdfast.cluster.places_slurm._own_address_towards", routes.__getitem__)

    def address(*nodes: str) -> str:
        told = "".join(f"NodeName={node} NodeAddr={node} State=IDLE\n" for node in nodes)
        return ScriptedSlurm(nodes=told).places(1).address_host()

    assert address("this", "gone", "n1", "n2") == "10.0.0.5"
    assert address("this") == "127.0.1.1"
    monkeypatch.setattr("socket.getfqdn", lambda: "login.cluster")
    assert address("gone") == "login.cluster"


def test_the_far_end_starts_the_command_as_often_as_it_is_asked_for(tmp_path, monkeypatch):
    submission = tmp_path / "slurm-0"
    (submission / "places").mkdir(parents=True)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURMD_NODENAME", "n6")
    monkeypatch.setattr("holdfast.cluster.slurm_place._LINGER_S", 0)
    for starts in (1, 2):
        request_of(submission, 5, starts).touch()
    command = [
        sys.executable,
        "-c",
        "import os; print(os.environ['HOLDFAST_PLACE']); raise SystemExit(9)",
    ]
    assert run_place(submission, command) == 9
    assert read_record(submission, 5) == PlaceRecord(node="n6", starts=3, exit_code=9, over=True)
    assert (tmp_path / "place-5.log").read_text() == "5\n" * 3

    assert run_place(submission, ["true"]) == 0
    assert read_record(submission, 5) == PlaceRecord(node="n6", starts=1, exit_code=0, over=True)
