"""Which supervisor leads, by files that all nodes share."""

import os

import pytest

from holdfast.core.paths import RunPaths
from holdfast.recover import leadership
from holdfast.recover.leadership import (
    Superseded,
    Watch,
    beat,
    claim,
    newest_generation,
    next_generation,
)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path, "r")


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("holdfast.recover.leadership.time.monotonic", lambda: now[0])
    return now


def test_numbers_rise_and_the_highest_leads(paths):
    assert newest_generation(paths) == 0
    assert [next_generation(paths, "n1") for _ in range(3)] == [1, 2, 3]
    assert beat(paths, 3)
    assert not beat(paths, 2)


def test_storage_that_fails_ends_no_supervisor(paths):
    paths.root.mkdir(parents=True)
    paths.supervisors.write_text("no folder")
    assert beat(paths, 1)


def test_a_supervisor_that_beats_is_not_gone(paths, clock):
    next_generation(paths, "n1")
    beat(paths, 1)
    watch = Watch(paths)
    for at_s in range(100):
        os.utime(paths.supervisors / "beat", (at_s, at_s))
        assert watch.gone() is None
        clock[0] += 5.0
    clock[0] += leadership.SILENT_S + 1
    assert watch.gone() == 1


def test_without_the_folder_nobody_is_gone(paths, clock):
    watch = Watch(paths)
    clock[0] += 1000.0
    assert watch.gone() is None


def test_one_node_takes_over_and_another_if_that_one_does_not(paths):
    next_generation(paths, "n1")
    assert claim(paths, 1)
    assert not claim(paths, 1)
    (first,) = paths.supervisors.glob("*.follower-0")
    os.utime(first, (0, 0))
    assert claim(paths, 1)
    assert not claim(paths, 1)
    assert newest_generation(paths) == 1, "who has said so leads once its supervisor has started"


def test_a_node_from_which_another_has_taken_over_does_not_lead_again(paths):
    assert next_generation(paths, "n1") == 1
    assert next_generation(paths, "n1", after=1) == 2
    assert next_generation(paths, "n1", after=1) == 3, "its own that ended early"
    assert next_generation(paths, "n2", after=3) == 4
    with pytest.raises(Superseded):
        next_generation(paths, "n1", after=3)
    assert next_generation(paths, "n3") == 5, "a person has started it"
