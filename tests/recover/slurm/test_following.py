"""The terminal's output for a run in the queue, against a Slurm with prepared answers."""

import pytest

from holdfast.cluster import SlurmJobs
from holdfast.core.errors import HoldfastError
from holdfast.core.paths import RunPaths
from holdfast.recover.slurm.following import Following
from holdfast.recover.slurm.submission import Submission, logs_of

AWAY = HoldfastError("squeue failed: Unable to contact slurm controller.\nmore")


class World:
    """A run whose jobs pass through states, one at each look.

    What else happens then is in `then`.
    """

    def __init__(self, home, *jobs):
        self.paths = RunPaths(home, "r")
        self.paths.logs.mkdir(parents=True)
        self.submission = Submission(
            key="k", nodes=1, spares=0, options=(), command=(), environment={}, jobs=("17",)
        )
        self.submission.write(self.paths)
        self.answers, self.cancelled = dict(jobs), []
        self.said, self.shown, self.then = [], {1: b"", 2: b""}, {}
        self.following = Following(
            self.paths,
            self.submission,
            SlurmJobs(self),
            say=self.said.append,
            show=self.show,
            sleep=lambda _s: None,
        )

    def show(self, fd, lines):
        self.shown[fd] += lines

    def __call__(self, argv, _environment=None):
        if argv[0] == "scancel":
            self.cancelled.append(argv[-1])
            return ""
        if argv[0] == "scontrol":
            return "n1\nn2\n"
        job_id = next(word for word in argv if word.startswith("--jobs=")).partition("=")[2]
        answers = self.answers[job_id]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        if (happens := self.then.pop(answer.partition("|")[0], None)) is not None:
            happens()
        return answer

    def write(self, job_id, fd, text):
        with logs_of(self.paths, job_id)[fd - 1].open("a") as log:
            log.write(text)


def test_the_wait_the_nodes_and_the_output_are_shown(tmp_path):
    waiting = ["PENDING|None|", "PENDING|Priority|", "PENDING|Priority|"]
    running = ["RUNNING|None|n[1-2]", "COMPLETING|None|n1", ""]
    world = World(tmp_path, ("17", [*waiting, *running]))
    world.then["RUNNING"] = lambda: world.write("17", 1, "loss 1\nloss 2\nlos")
    world.then["COMPLETING"] = lambda: world.write("17", 2, "holdfast: The job completed.\n")
    world.following.until_over()
    assert world.said == [
        "Slurm job 17 waits",
        "Slurm job 17 waits: Priority",
        "Slurm job 17 runs on n1, n2",
    ]
    assert world.shown == {1: b"loss 1\nloss 2\nlos", 2: b"holdfast: The job completed.\n"}


def test_a_controller_that_is_away_ends_nothing_and_is_said_once(tmp_path):
    world = World(tmp_path, ("17", ["RUNNING||n1", AWAY, AWAY, AWAY, "RUNNING||n1", ""]))
    world.following.until_over()
    away = (
        "squeue failed: Unable to contact slurm controller. The run is not affected; trying again."
    )
    assert world.said.count(away) == 1
    assert world.said[-1] == "Slurm job 17 runs on n1, n2"


def test_the_next_job_of_the_run_is_followed_too(tmp_path):
    world = World(
        tmp_path, ("17", ["RUNNING||n1", ""]), ("18", ["PENDING|Resources|", "RUNNING||n2", ""])
    )

    def queue_again():
        world.write("17", 1, "of 17\n")
        type(world.submission)(
            key="k", nodes=1, spares=0, options=(), command=(), environment={}, jobs=("17", "18")
        ).write(world.paths)

    world.then["RUNNING"] = queue_again
    world.then["PENDING"] = lambda: world.write("18", 1, "of 18\n")
    world.following.until_over()
    assert world.following.job_id == "18"
    assert world.shown[1] == b"of 17\nof 18\n"
    assert "Slurm job 18 waits: Resources" in world.said


def test_ctrl_c_asks_the_run_to_save_and_stop_then_to_stop_at_once_then_leaves(tmp_path):
    world = World(tmp_path, ("17", ["RUNNING||n1"]))

    def sleep(_s):
        world.following.stop()

    world.following._sleep = sleep
    world.following.until_over()
    assert world.paths.stop_request.read_bytes() == b"xx"
    assert world.cancelled == []
    assert world.said[-1] == "run r still ends: holdfast runs show r"


@pytest.mark.parametrize(
    ("state", "cancelled"), [("PENDING|Priority|", ["17"]), ("COMPLETING||", [])]
)
def test_ctrl_c_ends_a_job_that_has_not_begun(tmp_path, state, cancelled):
    world = World(tmp_path, ("17", [state, state, ""]))
    world.following._sleep = lambda _s: None if world.following._stops else world.following.stop()
    world.following.until_over()
    assert world.cancelled == cancelled
