"""A checkpoint is healthy once the training has gone well for some steps after it."""

from pathlib import Path

from holdfast.recover.gate import CheckpointGate

FOLDER = Path("/checkpoints")


def path(step):
    return FOLDER / f"step-{step}"


def test_a_checkpoint_is_healthy_so_many_steps_later():
    gate = CheckpointGate(healthy_after=20)
    gate.saved(path(10), 10)
    gate.saved(path(15), 15)
    assert gate.passed(29) == []
    assert gate.passed(30) == [path(10)]
    assert gate.passed(31) == [], "once"
    assert gate.passed(60) == [path(15)]
    assert gate.folders == {FOLDER}


def test_what_becomes_durable_late_is_healthy_at_the_next_step():
    gate = CheckpointGate(healthy_after=20)
    assert gate.passed(50) == []
    gate.saved(path(10), 10)
    assert gate.passed(51) == [path(10)]


def test_an_attempt_that_ends_takes_what_waits_with_it():
    gate = CheckpointGate(healthy_after=20)
    gate.saved(path(10), 10)
    gate.restarted()
    gate.saved(path(5), 5)
    assert gate.passed(100) == [path(5)]
    assert gate.folders == {FOLDER}
