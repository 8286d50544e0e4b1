"""A checkpoint is healthy once the training has gone well for some steps after it."""

import time
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import Checkpointer, scan
from holdfast.recover.gate import CheckpointGate, hold, let_go, mark_healthy

FOLDER = Path("/checkpoints")


def path(step):
    return FOLDER / f"step-{step}"


@pytest.fixture
def gate():
    return CheckpointGate(healthy_after=20)


def passed(gate, step):
    return [one.path for one in gate.passed(step)]


def test_one_checkpoint_after_the_other_becomes_healthy(gate):
    assert gate.saved(path(10), 10), "to be held"
    assert not gate.saved(path(15), 15)
    assert passed(gate, 29) == []
    assert passed(gate, 30) == [path(10)]
    assert passed(gate, 31) == [], "once"
    assert gate.saved(path(35), 35)
    assert passed(gate, 35) == [path(15)]
    assert passed(gate, 55) == [path(35)]
    assert gate.folders == {FOLDER}


def test_a_candidate_that_is_not_held_is_healthy_once_it_is_marked(gate):
    """Retention may have deleted it."""
    gate.saved(path(10), 10)
    gate.saved(path(12), 12)
    gate.saved(path(14), 14)
    assert not gate.can_go_back(1000)
    held, newest = gate.passed(40)
    assert (held.path, held.is_held, newest.path) == (path(10), True, path(14))
    assert gate.healthy == {FOLDER: 10}
    gate.marked(newest)
    assert gate.healthy == {FOLDER: 14}


def test_each_folder_has_a_candidate_of_its_own(gate):
    other = Path("/averaged/step-12")
    assert gate.saved(path(10), 10)
    assert gate.saved(other, 12)
    assert passed(gate, 32) == [path(10), other]
    assert gate.folders == {FOLDER, other.parent}


def test_a_checkpoint_that_becomes_durable_late_is_healthy_at_the_next_step(gate):
    assert passed(gate, 50) == []
    assert gate.saved(path(10), 10)
    assert passed(gate, 51) == [path(10)]


def test_where_the_training_goes_back_the_candidate_is_left_behind(gate):
    assert gate.saved(path(10), 10)
    assert gate.restored(5) == [path(10)], "to be released"
    assert passed(gate, 100) == []


def test_a_restart_keeps_the_candidate_that_its_state_descends_from(gate):
    assert gate.saved(path(10), 10)
    assert gate.restored(25) == []
    assert passed(gate, 30) == [path(10)]


def test_a_candidate_that_is_gone_makes_room_for_the_next(gate):
    assert gate.saved(path(10), 10)
    gate.lost(path(5))
    assert not gate.saved(path(15), 15)
    gate.lost(path(10))
    assert gate.saved(path(20), 20)


def test_checkpoints_that_were_abandoned_are_not_healthy_any_more(gate, tmp_path):
    with Checkpointer(tmp_path, keep=None) as ckpt:
        for step in (10, 30):
            saved = ckpt.save(step, {"w": torch.ones(4)}).result()
            gate.saved(saved, step)
            assert passed(gate, step + 20) == [saved]
            assert mark_healthy(saved, step + 20, time.time()) is None
    assert not gate.can_go_back(25), "the newest healthy one is of step 30"
    assert gate.go_back(25) == 10
    assert gate.can_go_back(25)


def test_a_held_checkpoint_is_not_deleted_and_a_healthy_one_neither(tmp_path):
    held = tmp_path / "step-0000000001"
    with Checkpointer(tmp_path, keep=1) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, {"w": torch.ones(4)}).result()
            assert step > 1 or hold(held, time.time()) is None
        while [info.step for info in scan(tmp_path)] != [5, 1]:
            time.sleep(0.01)  # what the last save replaces goes after the save is durable
        assert mark_healthy(held, 5, time.time()) is None
        ckpt.save(6, {"w": torch.ones(4)}).result()
    (_, healthy) = scan(tmp_path)
    assert healthy.marks.healthy is not None
    assert healthy.marks.wanted == {}
    assert let_go(tmp_path / "step-0000000003", 0.0) is not None, "deleted"
