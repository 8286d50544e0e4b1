"""A run in a Slurm job stops with its state saved before the job's time limit."""

import asyncio
import subprocess

import pytest

from holdfast.recover.agent.time_limit import LOOK_S, SPARE_S, seconds, stop_in_time
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
        self.left_s, self.stopped, self.looks, self.leads = left_s, [], 0, True

    def look(self, _job_id):
        self.looks += 1
        return self.left_s

    async def sleep(self, for_s):
        assert 0 < for_s <= LOOK_S
        if self.left_s is not None:
            self.left_s -= for_s

    def run(self):
        asyncio.run(
            stop_in_time(
                "17",
                60.0,
                self.stopped.append,
                leads=lambda: self.leads,
                look=self.look,
                sleep=self.sleep,
            )
        )


def test_the_stop_begins_as_late_as_its_grace_allows():
    job = Emulated(2 * 3600.0)
    job.run()
    assert job.stopped == ["the time limit of Slurm job 17"]
    assert job.left_s == 60.0 + SPARE_S


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
    assert job.looks > 7200 / LOOK_S
    assert job.left_s == 60.0 + SPARE_S


def test_without_a_limit_without_an_answer_and_on_other_nodes_nothing_is_stopped():
    for left_s, leads in ((None, True), (10.0, False)):
        job = Emulated(left_s)
        job.leads, rests = leads, []

        async def rest(for_s, rests=rests):
            rests.append(for_s)
            if len(rests) == 5:
                raise asyncio.CancelledError

        job.sleep = rest
        with pytest.raises(asyncio.CancelledError):
            job.run()
        assert (job.stopped, rests) == ([], [LOOK_S] * 5)


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
