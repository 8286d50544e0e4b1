"""Schedules, the log of the truth, and real faults of real processes; the run's processes are stand-ins."""

import collections
import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.core.errors import BadUse
from holdfast.testing import Injector, faults, injector, rank_faults, read_log, schedule
from holdfast.testing.run_processes import NodeProcesses


def test_a_schedule_follows_from_its_seed():
    one, again, other = (schedule(seed, mtbf_s=60, duration_s=1800) for seed in (3, 3, 4))
    assert one == again != other
    assert [planned.at_s for planned in one] == sorted(planned.at_s for planned in one)
    assert all(0 < planned.at_s < 1800 for planned in one)


def test_a_long_schedule_has_the_stated_rate_and_weights():
    planned = schedule(1, mtbf_s=2.0, duration_s=40_000)
    assert len(planned) == pytest.approx(20_000, rel=0.03)
    counts = collections.Counter(one.kind for one in planned)
    for kind, weight in injector.WEIGHTS.items():
        assert counts[kind] / len(planned) == pytest.approx(weight / 100, abs=0.01), kind


def test_the_weights_name_every_kind_and_add_up_to_100():
    assert set(injector.WEIGHTS) == set(injector.KINDS)
    assert sum(injector.WEIGHTS.values()) == 100


@pytest.mark.parametrize("options", [{"mtbf_s": 0}, {"mtbf_s": 1, "kinds": []}])
def test_an_impossible_schedule_is_refused(options):
    with pytest.raises(BadUse, match="a kind with a weight above 0"):
        schedule(0, duration_s=1, **options)


@pytest.fixture
def victims(monkeypatch):
    """Two processes that stand for the ranks of two nodes."""
    code = "import signal; signal.pause()"
    started = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(2)]
    nodes = []
    for rank, process in enumerate(started):
        found = psutil.Process(process.pid)
        nodes.append(NodeProcesses(f"n{rank + 1}", found, agents=[found], ranks={rank: found}))
    monkeypatch.setattr(injector, "nodes_of", lambda _home, _run: nodes)
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def made(tmp_path):
    """An injector without hosts and without checkpoints."""
    one = Injector(tmp_path / "log.jsonl", home=tmp_path, run_id="r", orders=tmp_path / "orders")
    yield one
    one.close()


def test_a_killed_rank_is_killed_and_logged(victims, made, tmp_path):
    done = made.inject("rank killed", rank=1)
    assert victims[1].wait(60) == -signal.SIGKILL
    assert victims[0].poll() is None
    assert (done.node, done.rank, done.pid) == ("n2", 1, victims[1].pid)
    assert done.at_s <= done.took_effect_at_s
    assert read_log(tmp_path / "log.jsonl") == [done]
    events = [line.split('"')[3] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert events == ["injected", "took_effect"]


def test_a_frozen_rank_is_stopped(victims, made):
    made.inject("rank frozen", node="n1")
    _, status = os.waitpid(victims[0].pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_the_targets_follow_from_the_seed(victims, tmp_path):
    drawn = []
    for attempt in range(2):
        one = Injector(tmp_path / f"{attempt}.jsonl", home=tmp_path, run_id="r", seed=5)
        drawn.append([one.inject("rank frozen").rank for _ in range(12)])
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {0, 1}


def test_numbers_go_on_where_the_log_is_there_already(victims, tmp_path):
    for _ in range(2):
        Injector(tmp_path / "log.jsonl", home=tmp_path, run_id="r").inject("rank frozen")
    assert [one.number for one in read_log(tmp_path / "log.jsonl")] == [1, 2]


def test_a_log_whose_last_line_was_cut_off_is_read_and_added_to(victims, tmp_path):
    log = tmp_path / "log.jsonl"
    Injector(log, home=tmp_path, run_id="r").inject("rank frozen")
    log.write_text(log.read_text() + '{"event": "inj')
    Injector(log, home=tmp_path, run_id="r").inject("rank frozen")
    assert [one.number for one in read_log(log)] == [1, 2]


def test_a_duration_of_a_fault_that_does_not_end_is_refused(victims, made, tmp_path):
    with pytest.raises(BadUse, match="'rank frozen' does not end by itself"):
        made.inject("rank frozen", for_s=5)
    assert read_log(tmp_path / "log.jsonl") == []


def test_a_target_that_is_not_there_is_logged_as_no_effect(victims, made, monkeypatch, tmp_path):
    monkeypatch.setattr(injector, "TARGET_TIMEOUT_S", 0.0)
    done = made.inject("supervisor killed")
    assert done.took_effect_at_s is None
    assert "nothing to strike" in done.detail
    assert read_log(tmp_path / "log.jsonl") == [done]


def test_kinds_that_need_more_are_refused(victims, made):
    assert {"network cut", "disk full", "damaged checkpoint"}.isdisjoint(made.kinds)
    with pytest.raises(BadUse, match="'network cut' is not possible with this injector"):
        made.inject("network cut")


def test_an_order_that_nobody_takes_is_withdrawn(victims, made, monkeypatch, tmp_path):
    monkeypatch.setattr(injector, "EFFECT_TIMEOUT_S", 0.0)
    done = made.inject("NaN gradients", rank=0)
    assert done.took_effect_at_s is None
    assert "did not call RankFaults" in done.detail
    assert rank_faults.RankFaults(tmp_path / "orders", 0).before_backward([]) is None


def test_a_schedule_is_followed_until_the_run_is_over(victims, made):
    planned = [injector.Planned(at_s=at_s, kind="rank frozen") for at_s in (0.0, 0.0, 3600.0)]
    looks = iter([False] * 5 + [True] * 10)
    assert len(made.follow(planned, is_over=lambda: next(looks))) == 2


@dataclasses.dataclass
class Saved:
    """A checkpoint."""

    step: int
    path: Path


def test_one_whole_checkpoint_is_left(victims, tmp_path, monkeypatch):
    saved = []
    for step in (10, 20):
        saved.append(Saved(step, tmp_path / f"step-{step}"))
        saved[-1].path.mkdir()
        (saved[-1].path / "__0_0.distcp").write_bytes(bytes(100))
    monkeypatch.setattr(injector, "scan", lambda _folder: saved)
    one = Injector(tmp_path / "log.jsonl", home=tmp_path, run_id="r", checkpoints=tmp_path / "c")
    first = one.inject("damaged checkpoint", rank=0)
    assert "step-20" in first.detail
    assert victims[0].wait(60) == -signal.SIGKILL
    assert (tmp_path / "step-10" / "__0_0.distcp").read_bytes() == bytes(100)
    second = one.inject("damaged checkpoint", rank=1)
    assert second.took_effect_at_s is None
    assert victims[1].poll() is None
    assert [path.read_bytes() for path in saved[0].path.iterdir()] == [bytes(100)]


def test_a_file_is_cut_off(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(bytes(1000))
    left_bytes = faults.truncate(path, random.Random(1))
    assert path.stat().st_size == left_bytes < 1000


def test_a_large_file_system_is_not_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "DISK_LIMIT_BYTES", 1)
    with pytest.raises(BadUse, match="other users may need it"):
        faults.fill_disk(tmp_path / "filler")
    assert not (tmp_path / "filler").exists()


def test_an_interrupted_filling_of_a_disk_leaves_no_file(tmp_path, monkeypatch):
    def interrupted(_descriptor, _piece):
        raise KeyboardInterrupt

    monkeypatch.setattr(faults, "DISK_LIMIT_BYTES", 2**80)
    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        faults.fill_disk(tmp_path / "filler")
    assert not (tmp_path / "filler").exists()


@contextlib.contextmanager
def small_disk(folder):
    """Mount a file system of a mebibyte, where this user may."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_full_until_the_fault_ends(victims, tmp_path):
    (tmp_path / "small").mkdir()
    with small_disk(tmp_path / "small") as folder:
        one = Injector(
            tmp_path / "log.jsonl", home=tmp_path, run_id="r", checkpoints=folder / "checkpoints"
        )
        one.inject("disk full", for_s=3600)
        with pytest.raises(OSError, match="No space left"):
            (folder / "file").write_bytes(bytes(8192))
        one.close()
        (folder / "file").write_bytes(bytes(8192))
        (done,) = read_log(tmp_path / "log.jsonl")
        assert done.took_effect_at_s <= done.ended_at_s
