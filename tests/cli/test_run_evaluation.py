"""The evaluation beside a run, with a script of this file as the watch."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.cli.main import cli
from holdfast.cli.run.evaluation import RunEvaluation, Wish
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.paths import RunPaths

# Records its pid and arguments, and ends once the file of the end exists; with FAIL in its
# environment, at once with that exit code.
WATCH = """
import json, os, pathlib, sys, time
words = sys.argv[2:]
with open(sys.argv[1], "a") as notes:
    notes.write(json.dumps([os.getpid(), words]) + "\\n")
if "FAIL" in os.environ:
    sys.exit(int(os.environ["FAIL"]))
over = pathlib.Path(words[words.index("--until-file") + 1])
while not over.exists():
    time.sleep(0.02)
print("all done", flush=True)
"""


class World:
    """A run's folder, and the started commands and printed lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = RunPaths(folder / "home", "r")
        self.paths.logs.mkdir(parents=True)
        self.said: list[str] = []
        self._notes = folder / "notes"
        (folder / "watch.py").write_text(WATCH)

    def evaluation(self, **fields) -> RunEvaluation:
        wish = Wish(**{"suite": "a,b", "drop_stale": False, "options": (), **fields})
        return RunEvaluation(
            wish,
            self.paths,
            "sqlite:///ledger.db",
            working_folder=self.folder,
            say=self.said.append,
            holdfast=[sys.executable, str(self.folder / "watch.py"), str(self._notes)],
        )

    def starts(self, count: int) -> list[tuple[int, list[str]]]:
        """The pid and words of each watch, once there are so many."""
        deadline_s = time.monotonic() + 90
        while True:
            lines = self._notes.read_text().splitlines() if self._notes.exists() else []
            if len(lines) >= count:
                return [tuple(json.loads(line)) for line in lines]
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_the_watch_begins_with_the_first_checkpoint_and_ends_when_the_run_is_over(world):
    evaluation = world.evaluation(drop_stale=True, options=("--on=slurm",))
    evaluation("step", {"step": 1})
    evaluation("checkpoint", {"path": "out/step-1"})
    evaluation("checkpoint", {"path": "out/step-2"})
    evaluation.finish()
    [(_, words)] = world.starts(1)
    assert words == [
        *(
            "--ledger",
            "sqlite:///ledger.db",
            "eval",
            "watch",
            str(world.folder / "out"),
            "--suite",
            "a,b",
        ),
        *("--drop-stale", "--run", "r", "--until-file", str(world.paths.root / "evaluation.over")),
        *("--no-progress", "--on=slurm"),
    ]
    assert evaluation.log.read_text() == "all done\n"
    assert world.said == ["evaluating the remaining checkpoints; Ctrl-C stops the evaluation"]


def test_a_run_without_checkpoints_starts_nothing(world):
    evaluation = world.evaluation()
    evaluation("ended", {"outcome": "x"})
    evaluation.finish()
    assert (world.said, evaluation.log.exists()) == ([], False)


def test_a_watch_that_was_killed_is_started_again_by_the_next_checkpoint(world):
    evaluation = world.evaluation()
    evaluation("restored", {"path": "/c/step-1"})
    [(pid, _)] = world.starts(1)
    os.kill(pid, signal.SIGKILL)
    evaluation._child.wait()
    evaluation("checkpoint", {"path": "/c/step-2"})
    world.starts(2)
    evaluation.finish()
    assert len(world.starts(2)) == 2


def test_one_that_fails_is_tried_once_more_at_the_end_and_said_and_nothing_is_raised(
    world, monkeypatch
):
    monkeypatch.setenv("FAIL", "2")
    evaluation = world.evaluation()
    evaluation("checkpoint", {"path": "/c/step-1"})
    evaluation._child.wait()
    evaluation.finish()
    assert len(world.starts(2)) == 2
    [_, line] = world.said
    assert line.startswith(f"the evaluation ended with 2; see {evaluation.log}. ")
    assert line.endswith("holdfast eval watch /c --once --suite a,b --run r")


def test_one_that_cannot_be_started_is_said_and_nothing_is_raised(world):
    evaluation = world.evaluation()
    world.paths.logs.rmdir()
    evaluation("checkpoint", {"path": "/c/step-1"})
    evaluation.finish()
    assert "cannot be started" in world.said[0]


def test_ctrl_c_while_waiting_ends_the_watch(world):
    evaluation = world.evaluation()
    evaluation("checkpoint", {"path": "/c/step-1"})
    [(pid, _)] = world.starts(1)
    os.kill(pid, signal.SIGSTOP)  # it does not hear that the run is over
    waiting = threading.Event()

    def say(text: str) -> None:
        world.said.append(text)
        waiting.set()

    def press() -> None:
        waiting.wait()
        os.kill(os.getpid(), signal.SIGINT)

    evaluation._print = say
    interrupt = threading.Thread(target=press)
    interrupt.start()
    evaluation.finish()
    interrupt.join()
    assert evaluation._child.returncode is not None
    assert not Path(f"/proc/{pid}/exe").exists()
    assert "was ended" in world.said[1]


def test_what_was_wished_is_kept_for_a_resume(world, monkeypatch, tmp_path):
    (tmp_path / "s.toml").write_text('tasks = ["a"]')
    monkeypatch.chdir(tmp_path)
    wish = Wish.checked("s.toml", drop_stale=True, options=["--on=ray"])
    assert wish.suite == str(tmp_path / "s.toml")
    assert Wish.kept(world.paths) is None
    wish.keep(world.paths)
    assert Wish.kept(world.paths) == wish


def test_the_file_of_the_run_before_does_not_end_the_watch_of_a_resumed_one(world):
    evaluation = world.evaluation()
    evaluation("checkpoint", {"path": "/c/step-1"})
    evaluation.finish()
    again = world.evaluation()
    assert not (world.paths.root / "evaluation.over").exists()
    again("restored", {"path": "/c/step-1"})
    world.starts(2)
    again.finish()


def test_what_cannot_be_had_is_refused_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))

    def run(*words):
        result = CliRunner().invoke(cli, ["run", *words, "--", "true"], standalone_mode=False)
        raise result.exception

    with pytest.raises(NotFound, match="There is no suite"):
        run("--eval-suite", str(tmp_path / "none.toml"))
    with pytest.raises(BadUse, match="'nodes' is not an option"):
        run("--eval-suite", "a", "--eval-option", "nodes")
    with pytest.raises(BadUse, match="Give --eval-suite too"):
        run("--eval-drop-stale")
    assert not (tmp_path / "home" / "runs").exists()
