"""A run in a Slurm job stops with its state saved before the job's time limit."""

import asyncio
import os
import subprocess

import pytest

from holdfast.recover.agent.time_limit import (
    LOOK_S,
    POLL_S,
    SPARE_S,
    NotSeen,
    seconds,
    stop_in_time,
    time_left_s,
)
from holdfast.testing.slurm import PrivateSlurm


@pytest.mark.parametrize(
    ("left", "expected_s"),
    [
        ("0:30\n", 30),
        ("2:03:04", 2 * 3600 + 184),
        ("11-02:03:04", 11 * 86400 + 2 * 3600 + 184),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_times_are_read_as_squeue_prints_them(left, expected_s):
    assert seconds(left) == expected_s


class Emulated:
    """A job whose time passes by `sleep` alone."""

    def __init__(self, left_s):
        self.left_s, self.now, self.leads = left_s, 5000.0, True
        self.stopped, self.said, self.looks = [], [], 0
        self.slept = 0

    def monotonic_s(self):
        return self.now

    def now_s(self):
        return 1e9 + self.now

    def look(self, _job_id):
        self.looks += 1
        return self.left_s

    async def sleep(self, for_s):
        assert 0 < for_s <= POLL_S
        self.now += for_s
        self.slept += 1
        if self.slept == 10_000:
            raise asyncio.CancelledError
        if self.left_s is not None:
            self.left_s -= for_s

    def run(self):
        asyncio.run(
            stop_in_time(
                "17",
                60.0,
                self.stopped.append,
                leads=lambda: self.leads,
                complain=self.said.append,
                look=self.look,
                clock=self,
                sleep=self.sleep,
            )
        )


@pytest.fixture(autouse=True)
def _in_no_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def test_the_stop_begins_as_late_as_its_grace_allows():
    job = Emulated(2 * 3600.0)
    job.run()
    assert job.stopped == ["the time limit of Slurm job 17"]
    assert job.left_s == 60.0 + SPARE_S
    assert job.looks <= 7200 / LOOK_S + 1


def test_a_limit_that_is_moved_is_seen():
    job = Emulated(700.0)
    sleep, moved = job.sleep, []

    async def move(for_s):
        await sleep(for_s)
        if not moved:
            moved.append(True)
            job.left_s += 7200.0

    job.sleep = move
    job.run()
    assert job.left_s == 60.0 + SPARE_S


def test_where_slurm_stops_answering_the_limit_that_was_seen_holds():
    job = Emulated(400.0)
    look = job.look

    def fail_later(job_id):
        if job.looks:
            raise NotSeen("Unable to contact slurm controller")
        return look(job_id)

    job.look = fail_later
    job.run()
    assert job.stopped
    assert job.left_s == 60.0 + SPARE_S
    assert job.said == []


def test_the_end_in_the_environment_holds_where_slurm_does_not_answer(monkeypatch):
    job = Emulated(1000.0)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(job.now_s() + 1000)))
    job.look = lambda _job_id: (_ for _ in ()).throw(NotSeen("squeue: command not found"))
    job.run()
    assert job.left_s == 60.0 + SPARE_S


def test_a_limit_that_cannot_be_seen_is_said_once():
    job = Emulated(1000.0)
    job.look = lambda _job_id: (_ for _ in ()).throw(NotSeen("squeue: command not found"))
    with pytest.raises(asyncio.CancelledError):
        job.run()
    assert job.said == ["The time limit of Slurm job 17 cannot be read: squeue: command not found."]


def test_a_node_that_comes_to_lead_looks_soon():
    job = Emulated(1000.0)
    job.leads = False
    sleep = job.sleep

    async def lead_later(for_s):
        await sleep(for_s)
        job.leads = job.left_s <= 200.0

    job.sleep = lead_later
    job.run()
    assert job.left_s == 60.0 + SPARE_S


def test_without_a_limit_and_on_other_nodes_nothing_is_stopped():
    for left_s, leads in ((None, True), (10.0, False)):
        job = Emulated(left_s)
        job.leads = leads
        with pytest.raises(asyncio.CancelledError):
            job.run()
        assert job.stopped == []


@pytest.mark.parametrize(
    ("printed", "expected_s"),
    [("16 1:00\n17 2:00\n18 3:00\n", 120.0), ("17 UNLIMITED\n", None)],
)
def test_of_an_array_the_own_job_counts(tmp_path, monkeypatch, printed, expected_s):
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert time_left_s("17") == expected_s
    with pytest.raises(NotSeen, match="squeue shows no job 5"):
        time_left_s("5")


@pytest.mark.slow
@pytest.mark.skipif(PrivateSlurm.missing() is not None, reason=str(PrivateSlurm.missing()))
def test_in_a_slurm_job_the_run_is_stopped_before_the_limit(place, tmp_path_factory):
    script = place.job("import time; time.sleep(1000)")
    batch = place.folder / "batch.sh"
    # Of one minute, 30 s are left to be sure and 15 s for the stop.
    batch.write_text(f"#!/bin/bash\nholdfast run --stop-grace-s 15 -- python {script}\n")
    output = place.folder / "output"
    with PrivateSlurm(tmp_path_factory.mktemp("s"), nodes=1) as slurm:
        environment = {**slurm.environment, **place.environment}
        subprocess.run(
            ["sbatch", "--time=1", f"--output={output}", f"--chdir={place.folder}", batch],
            env=environment,
            capture_output=True,
            check=True,
        )
        place.wait_until(lambda: not slurm.run(["squeue", "--noheader"]).strip())
    assert "Stopped by the time limit of Slurm job 1." in output.read_text()
