"""Queueing a run again that lacks nodes, against a Slurm with prepared answers."""

import asyncio

import pytest

from holdfast.cluster import EXPEDITE, SlurmJobs, SlurmNode
from holdfast.core.errors import HoldfastError
from holdfast.core.paths import RunPaths
from holdfast.recover.slurm.requeue import (
    PATIENCE_S,
    QUEUED_AGAIN,
    RETRY_S,
    Requeue,
    in_vain,
    is_due,
)
from holdfast.recover.slurm.submission import Submission, settle_jobs
from holdfast.testing import FakeClock

UP, DOWN = frozenset(["MIXED"]), frozenset(["DOWN", "NOT_RESPONDING"])
ALL = ("n1", "n2", "n3")


def states(**words):
    return {name: SlurmNode(name=name, states=one) for name, one in words.items()}


@pytest.mark.parametrize(
    ("connected", "cordoned", "down", "waited_s", "due"),
    [
        (("n1", "n2"), (), ("n3",), 0.0, False),  # enough without the one that is down
        (("n1",), (), ("n2", "n3"), 0.0, True),
        (("n1",), (), ("n2",), 0.0, False),  # n3 may come back
        (("n1",), (), ("n2",), PATIENCE_S, True),
        (("n1", "n2"), ("n2",), ("n3",), 0.0, True),  # a cordoned node is of no use
        (("n1",), (), (), PATIENCE_S - 1, False),
        (("n1",), (), (), PATIENCE_S, True),
    ],
)
def test_a_run_leaves_its_job_when_too_few_nodes_can_come(connected, cordoned, down, waited_s, due):
    known = states(**{name: DOWN if name in down else UP for name in ALL})
    assert is_due(ALL, connected, cordoned, known, nnodes=2, waited_s=waited_s) is due


@pytest.mark.parametrize(
    ("past", "reached", "count"),
    [
        ([], 5, 0),
        ([None, None], None, 2),
        ([5, 5, 5], 5, 3),
        ([5, 5, 5], 6, 0),
        ([5, 9, 9], 9, 2),
        ([None, 9], 9, 1),
        ([9, 9], 3, 2),
    ],
)
def test_requeues_in_a_row_that_gain_nothing_are_counted(past, reached, count):
    assert in_vain([{"reached": one} for one in past], reached) == count


class Recorded:
    def __init__(self):
        self.kept, self.reached = [], 7

    def event(self, kind, data, rank=None):
        self.kept.append((kind, 1, data))

    def events(self, *kinds):
        return [one for one in self.kept if one[0] in kinds]


class Scripted:
    """A Slurm with the job 70, and nodes of which `down` are down.

    `while_submitting` happens during sbatch.
    """

    def __init__(self):
        self.down, self.error, self.queue, self.submitted = (
            ("n2", "n3"),
            None,
            {"70": "RUNNING"},
            [],
        )
        self.while_submitting = lambda: None

    def __call__(self, argv, environment=None):
        if self.error is not None:
            raise HoldfastError(self.error)
        match argv[0]:
            case "scontrol" if "hostnames" in argv:
                return "n1\nn2\nn3\n"
            case "scontrol":
                named = (*ALL, "n4")
                lines = (
                    f"NodeName={one} State={'DOWN*' if one in self.down else 'IDLE'}"
                    for one in named
                )
                return "\n".join(lines)
            case "sbatch":
                self.submitted.append((argv, environment))
                job_id = str(70 + len(self.submitted))
                self.queue[job_id] = "PENDING"
                self.while_submitting()
                return job_id
            case "scancel":
                self.queue[argv[-1]] = ""
                return ""
            case "squeue" if "--me" in argv:
                return "\n".join(f"{job_id}|{state}" for job_id, state in self.queue.items())
            case "squeue":
                job_id = next(word for word in argv if word.startswith("--jobs="))
                return f"{self.queue.get(job_id.partition('=')[2], '')}||"
        raise AssertionError(argv)


class World:
    def __init__(self, folder, *options):
        self.paths = RunPaths(folder, "r")
        self.paths.logs.mkdir(parents=True)
        record = {"key": "k", "nodes": 2, "spares": 1, "options": options, "command": ("holdfast",)}
        Submission(**record, environment={"SECRET": "s"}, jobs=("70",)).write(self.paths)
        self.slurm, self.records, self.clock, self.said = Scripted(), Recorded(), FakeClock(), []
        self.given_up = asyncio.Event()
        self.requeue = self.supervisor()

    def supervisor(self, **environment):
        return Requeue(
            self.paths,
            "/w",
            self.records,
            lambda _kind, data: self.said.append(data["text"]),
            self.clock,
            nnodes=2,
            limit=3,
            environment={"SLURM_JOB_ID": "70", "SLURM_JOB_NODELIST": "n[1-3]", **environment},
            jobs=lambda: SlurmJobs(self.slurm),
        )

    def look(self, connected=("n1",), cordoned=()):
        return asyncio.run(self.requeue.look(connected, cordoned, self.given_up))

    @property
    def jobs(self):
        return Submission.read(self.paths).jobs


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_the_next_job_leaves_out_lost_and_cordoned_nodes_and_waits_for_this_one(world):
    assert world.look(cordoned=("n4", "of-another-cluster"))
    ((argv, environment),) = world.slurm.submitted
    assert "--exclude=n2,n3,n4" in argv, "Slurm refuses names that it does not have"
    assert "--dependency=afterany:70" in argv
    assert "--nodes=2-3" in argv
    assert environment["SECRET"] == "s"
    assert environment["HOLDFAST_HOME"] == str(world.paths.home)
    assert world.jobs == ("70", "71")
    assert "queued again as Slurm job 71 without n2, n3, n4" in world.requeue.queued
    ((kind, _, data),) = world.records.kept
    assert (kind, data["job"], data["next"], data["reached"]) == (QUEUED_AGAIN, "70", "71", 7)


def test_a_node_that_may_come_back_is_waited_for(world):
    world.slurm.down = ()
    assert not world.look()
    world.clock.advance(PATIENCE_S - 1)
    assert not world.look()
    world.clock.advance(1)
    assert world.look()
    assert len(world.slurm.submitted) == 1


def test_the_wait_begins_anew_after_the_nodes_were_there(world):
    world.slurm.down = ()
    assert not world.look()
    world.clock.advance(PATIENCE_S)
    world.requeue.enough()
    assert not world.look()


def test_a_supervisor_that_died_after_the_submission_submits_nothing_twice(world):
    submitted = world.jobs
    assert world.look()
    record = Submission.read(world.paths)
    # The process ended between sbatch and the record of its answer.
    Submission(
        **{name: getattr(record, name) for name in record.__struct_fields__} | {"jobs": submitted}
    ).write(world.paths)
    world.requeue = world.supervisor()
    assert world.look()
    assert len(world.slurm.submitted) == 1
    assert world.jobs == ("70", "71")
    # It ended after that record.
    world.requeue = world.supervisor()
    assert world.look()
    assert len(world.slurm.submitted) == 1


def test_a_next_job_that_somebody_has_cancelled_is_replaced(world):
    assert world.look()
    world.slurm.queue["71"] = ""
    world.requeue = world.supervisor()
    assert world.look()
    assert world.jobs == ("70", "71", "72")


def test_while_slurm_does_not_answer_nothing_is_done_and_it_is_said_once(world):
    world.slurm.error = "scontrol failed: Unable to contact slurm controller"
    for _ in range(5):
        assert not world.look()
        world.clock.advance(RETRY_S)
    assert world.said == [world.slurm.error]
    assert world.requeue.queued is None
    world.slurm.error = None
    assert world.look()


def test_the_budget_ends_requeues_that_gain_nothing(world):
    world.records.kept = [(QUEUED_AGAIN, 1, {"reached": 7})] * 3
    assert not world.look()
    assert not world.slurm.submitted
    assert "3 times in a row that gained nothing" in world.said[0]
    world.records.reached = 8
    world.clock.advance(RETRY_S)
    assert world.look()


def test_slurm_may_start_the_job_again_and_a_next_job_waits_for_the_case_that_it_does_not(tmp_path):
    world = World(tmp_path, EXPEDITE)
    assert world.look()
    ((argv, _),) = world.slurm.submitted
    assert "--dependency=afterany:70" in argv
    assert world.jobs == ("70", "71")
    assert world.requeue.queued.startswith("Nodes are missing. Slurm is to start job 70 again.")
    assert "goes on as Slurm job 71 without n2, n3 once job 70 has ended" in world.requeue.queued
    inside = {"SLURM_JOB_ID": "70"}
    given = {"environment": inside, "jobs": SlurmJobs(world.slurm)}
    assert settle_jobs(world.paths, is_queued=True, **given) == [], "Slurm may start this job again"
    assert settle_jobs(world.paths, is_queued=False, **given) == ["71"]


@pytest.mark.parametrize("error", [None, "sbatch gave no answer within 120 s."])
def test_a_stop_during_the_submission_cancels_the_next_job(world, error):
    def stop():
        world.given_up.set()
        if error is not None:
            raise HoldfastError(error)

    world.slurm.while_submitting = stop
    assert not world.look()
    assert world.slurm.queue == {"70": "RUNNING", "71": ""}
    assert (world.requeue.queued, world.records.kept) == (None, [])


def test_a_next_job_of_a_stopped_run_that_cannot_be_cancelled_is_named(world):
    def stop():
        world.given_up.set()
        world.slurm.error = "squeue failed: Unable to contact slurm controller"

    world.slurm.while_submitting = stop
    assert not world.look()
    assert world.said[-1].endswith("scancel --state=PENDING --name=holdfast-r-k")


def test_a_job_that_has_lost_its_batch_script_cannot_be_started_again(tmp_path):
    world = World(tmp_path, EXPEDITE)
    world.requeue = world.supervisor(SLURM_NODEID="1")
    assert world.look()
    assert world.jobs == ("70", "71")


def test_a_job_that_holdfast_has_not_submitted_is_left_alone(world):
    world.requeue = world.supervisor(SLURM_JOB_ID="69")
    assert not world.look()
    Submission.read(world.paths)
    (world.paths.root / "slurm.json").unlink()
    assert not world.look()
    assert not world.slurm.submitted
