"""The benchmark of a save: its count of lost time. No timings."""

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("checkpointing.training")


class _Durable:
    """A workload, and a saver whose save becomes durable in a given step."""

    def __init__(self, in_step):
        self.case = None
        self._in_step = in_step
        self._durable = threading.Event()
        self.steps = 0

    def settle(self):
        pass

    save = fence = clear = lambda self, *_: None

    def forward_backward(self, _amount):
        self.steps += 1
        if self.steps == self._in_step:
            self.end()
        return 0.0

    def update(self):
        pass

    def wait(self):
        assert self._durable.wait(30)

    def end(self):
        self._durable.set()
        self.case._watch.submit(int).result(30)  # the thread that waited for it is done


@pytest.mark.parametrize(("in_step", "steps"), [(1, 2), (3, 4), (9, 10), (10, 10)])
def test_a_block_with_a_save_ends_a_step_after_it_is_durable(training, in_step, steps):
    both = _Durable(in_step)
    both.case = training.Case(both, both, 1)
    assert both.case.train(10, save=True).steps == both.steps == steps


def test_a_save_that_is_not_durable_after_the_last_step_is_waited_for(training):
    both = _Durable(in_step=0)
    both.case = training.Case(both, both, 1)
    timer = threading.Timer(0.2, both.end)
    timer.start()
    block = both.case.train(3, save=True)
    assert (block.steps, len(both.case.durable_s)) == (3, 1)
    assert block.wall_s >= both.case.durable_s[0]


def test_a_block_without_a_save_has_all_its_steps(training):
    both = _Durable(in_step=1)
    both.case = training.Case(both, both, 1)
    assert both.case.train(5, save=False).steps == 5


def test_lost_is_what_as_many_steps_beside_it_take_less(training):
    def block(steps, wall_s):
        return training.Block(steps=steps, wall_s=wall_s, stood_s=0)

    without = [block(2, 2.0), block(3, 3.6), block(1, 1.0)]
    saved = [block(3, 3.9), block(1, 1.0)]
    assert training.lost_s(without, saved) == pytest.approx([0.6, -0.1])


FORKING = """
import json, os, pathlib, signal, sys, tempfile
import psutil
from checkpointing import child, forked
from common.jobs import DoesNotWork

forked.SHARED = ()  # torch has no part in this

def told(**given):
    print("said", flush=True)
    if os.environ.get("RANK") == str(given.get("fails")):
        raise ValueError("it fails")
    if given.get("fails") == 1:
        signal.pause()  # as in a collective operation with a rank that has failed
    names = ("RANK", "WORLD_SIZE", "HOLDFAST_HOME", "TMPDIR")
    return [os.getpid(), tempfile.gettempdir(), {name: os.environ.get(name) for name in names}]

place, found = pathlib.Path(sys.argv[1]), {}
for name, ranks, fails in (("alone", 0, None), ("group", 2, None), ("first", 2, 0), ("second", 2, 1)):
    try:
        arguments = {} if fails is None else {"fails": fails}
        found[name] = child.in_child(told, place / name, launcher=child.FORKED, ranks=ranks, **arguments)
    except DoesNotWork as error:
        found[name] = str(error)
    assert not psutil.Process().children()
print(json.dumps(found))
"""


def test_a_quick_run_forks_processes_and_groups_that_answer_like_started_ones(tmp_path):
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, rank, ranks in (("alone", None, None), ("group", "0", "2")):
        pid, temporary, environment = found[name]
        folder = str(tmp_path / name)
        home = f"{folder}/.holdfast"
        expected = {"RANK": rank, "WORLD_SIZE": ranks, "HOLDFAST_HOME": home, "TMPDIR": folder}
        assert (temporary, environment) == (folder, expected)
        assert not Path(f"/proc/{pid}").exists()
    assert (tmp_path / "alone/output.txt").read_text() == "said\n"
    assert found["first"] == "ValueError: it fails"
    assert found["second"].startswith("exit code 1")
