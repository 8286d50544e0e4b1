"""Test the Slurm workers against a scripted Slurm; test_slurm_workers.py uses a real one."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from cluster_tasks import exit_codes, python_task

from holdfast.cluster.slurm import SlurmWorkers
from holdfast.cluster.slurm_task import Manifest, run_element
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.testing import FakeClock


class ScriptedSlurm:
    """A Slurm that answers each squeue with the next of `polls`; the last one repeats."""

    def __init__(self, *polls: Callable[[Manifest], str], max_array_size: int = 1001) -> None:
        self.polls = list(polls)
        self.max_array_size = max_array_size
        self.said: list[list[str]] = []
        self.clock = FakeClock()

    def workers(self, **options) -> SlurmWorkers:
        return SlurmWorkers(command=self, clock=self.clock, sleep=self.clock.advance, **options)

    def __call__(self, argv):
        self.said.append(list(argv))
        match argv[0]:
            case "sbatch":
                self.manifest = Manifest.read(Path(argv[-1]).parent / "manifest.json")
                return "77;cluster\n"
            case "squeue":
                return (self.polls.pop(0) if len(self.polls) > 1 else self.polls[0])(self.manifest)
            case "scontrol" if "config" in argv:
                return f"Configuration data\nMaxArraySize            = {self.max_array_size}\nMaxDBDMsgs = 1\n"
            case "scontrol":
                return "JobId=77 JobState=TIMEOUT Reason=TimeLimit Requeue=1 ExitCode=0:15 RunTime=00:30:00\n"
        return ""


def running(*elements: int):
    return lambda manifest: "".join(f"{element}\n" for element in elements)


def failing(message: str):
    def poll(manifest):
        raise HoldfastError(f"squeue failed: {message}")

    return poll


def recording(element: int, exit_code: int, *, left: tuple[int, ...]):
    """Return a poll that finds an exit code of an element, and `left` still in the queue."""

    def poll(manifest):
        (Path(manifest.records) / str(element)).write_text(str(exit_code))
        return running(*left)(manifest)

    return poll


def test_a_task_whose_element_left_without_a_word_fails_after_the_grace_and_its_log_says_what_slurm_says(
    tmp_path,
):
    slurm = ScriptedSlurm(running(0), running())
    [finished] = slurm.workers(grace_s=90).run([python_task(tmp_path, "t")], folder=tmp_path / "f")
    assert finished.exit_code == 1
    assert "JobState=TIMEOUT, Reason=TimeLimit" in finished.log.read_text()
    assert 90 <= slurm.clock.monotonic_s() < 90 + 3 * 20 + 2


def test_a_result_that_shows_late_counts(tmp_path):
    task = python_task(tmp_path, "t")

    def late(manifest):
        if slurm.clock.monotonic_s() > 60:
            task.result.write_text("late")
        return ""

    slurm = ScriptedSlurm(running(0), late)
    assert exit_codes(slurm.workers().run([task], folder=tmp_path / "f")) == {"t": 0}


def test_a_controller_that_does_not_answer_is_asked_again_and_one_that_has_forgotten_the_job_is_believed(
    tmp_path,
):
    down, forgotten = (
        failing("Unable to contact slurm controller"),
        failing("Invalid job id specified"),
    )
    slurm = ScriptedSlurm(running(0), *[down] * 50, forgotten)
    [finished] = slurm.workers().run([python_task(tmp_path, "t")], folder=tmp_path / "f")
    assert finished.exit_code == 1
    assert len(slurm.polls) == 1, "it gave up while the controller was silent"


def test_a_signal_may_be_slurms_own_and_counts_only_when_the_element_has_left(tmp_path):
    task = python_task(tmp_path, "t")

    def requeued(manifest):
        assert run_element(manifest, 0), "the record of a signal kept it from running again"
        return "0\n"

    slurm = ScriptedSlurm(recording(0, -15, left=(0,)), running(0), requeued)
    assert exit_codes(slurm.workers().run([task], folder=tmp_path / "f")) == {"t": 0}

    slurm = ScriptedSlurm(recording(0, -9, left=(0,)), running())
    other = python_task(tmp_path, "other")
    assert exit_codes(slurm.workers(grace_s=0).run([other], folder=tmp_path / "f")) == {"other": -9}


def test_more_tasks_than_an_array_may_have_share_its_elements(tmp_path):
    tasks = [
        python_task(tmp_path, f"t{n}", "raise SystemExit(9)" if n == 1 else "") for n in range(5)
    ]

    def run_all(manifest):
        assert manifest.elements == 2
        assert [run_element(manifest, element) for element in range(2)] == [True, False]
        return ""

    slurm = ScriptedSlurm(running(0, 1), run_all, max_array_size=2)
    codes = exit_codes(slurm.workers(limit=1).run(tasks, folder=tmp_path / "f"))
    assert codes == {"t0": 0, "t1": 9, "t2": 0, "t3": 0, "t4": 0}
    [sbatch] = [argv for argv in slurm.said if argv[0] == "sbatch"]
    assert "--array=0-1%1" in sbatch


def test_polls_come_less_often_while_nothing_happens(tmp_path):
    times_s: list[float] = []

    def poll(manifest):
        times_s.append(slurm.clock.monotonic_s())
        return "0\n" if len(times_s) < 20 else recording(0, 3, left=())(manifest)

    slurm = ScriptedSlurm(poll)
    assert exit_codes(slurm.workers().run([python_task(tmp_path, "t")], folder=tmp_path / "f")) == {
        "t": 3
    }
    gaps_s = [after - before for before, after in pairwise(times_s)]
    assert gaps_s == sorted(gaps_s)
    assert (gaps_s[0], gaps_s[-1]) == (1.5, 20)


def test_leaving_early_cancels_the_array_and_what_an_earlier_caller_left_is_cancelled_first(
    tmp_path,
):
    tasks = [python_task(tmp_path, "a"), python_task(tmp_path, "b")]
    (tmp_path / "f" / "slurm-0123").mkdir(parents=True)
    slurm = ScriptedSlurm(recording(0, 4, left=(1,)))
    running_tasks = slurm.workers().run(tasks, folder=tmp_path / "f")
    assert next(running_tasks).exit_code == 4
    assert slurm.said[0] == ["scancel", "--quiet", "--name=holdfast-0123"]
    running_tasks.close()
    [sbatch] = [argv for argv in slurm.said if argv[0] == "sbatch"]
    [name] = [word.removeprefix("--job-name=") for word in sbatch if word.startswith("--job-name=")]
    assert slurm.said[-1] == ["scancel", "--quiet", f"--name={name}"]
    assert not list((tmp_path / "f").glob("slurm-*"))


def test_a_cancel_that_fails_says_how_to_do_it_by_hand_and_is_tried_again_by_the_next_run(tmp_path):
    slurm = ScriptedSlurm(recording(0, 4, left=(1,)))

    def cannot_cancel(argv):
        if argv[0] == "scancel":
            raise HoldfastError("scancel failed: no controller")
        return slurm(argv)

    tasks = [python_task(tmp_path, "a"), python_task(tmp_path, "b")]
    broken = SlurmWorkers(command=cannot_cancel, clock=slurm.clock, sleep=slurm.clock.advance)
    running_tasks = broken.run(tasks, folder=tmp_path / "f")
    next(running_tasks)
    with pytest.raises(HoldfastError, match="may still run: scancel --name=holdfast-"):
        running_tasks.close()
    assert len(list((tmp_path / "f").glob("slurm-*"))) == 1


def test_an_array_that_sbatch_refuses_is_bad_use_with_its_words(tmp_path):
    def refusing(argv):
        if argv[0] == "sbatch":
            raise HoldfastError("sbatch failed: invalid partition specified: x")
        return ""

    with pytest.raises(BadUse, match=r"invalid partition specified: x.* --partition"):
        list(
            SlurmWorkers(command=refusing).run([python_task(tmp_path, "t")], folder=tmp_path / "f")
        )


def test_the_manifest_keeps_every_word_as_it_is(tmp_path):
    words = ("printf", "%s|", "a b", "'\"$HOME`", "", "\n", "é")
    manifest = Manifest(elements=1, records="r", commands=(words,), results=("x",), logs=("l",))
    manifest.write(tmp_path / "m.json")
    assert Manifest.read(tmp_path / "m.json") == manifest
    assert json.loads((tmp_path / "m.json").read_text())["commands"] == [list(words)]
