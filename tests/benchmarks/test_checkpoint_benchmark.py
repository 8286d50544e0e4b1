"""The benchmark of a save: its count of lost time. No timings."""

import importlib
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
