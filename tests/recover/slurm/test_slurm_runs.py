"""Runs that a real Slurm of several nodes starts, and starts again."""

import time

import pytest

from holdfast.core.link import ENV_ATTEMPT
from holdfast.recover.slurm.submission import Submission
from holdfast.testing.slurm import PrivateSlurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PrivateSlurm.missing() is not None, reason=str(PrivateSlurm.missing())),
]
AWAY_S = 60.0
"""The seconds without slurmctld."""
UNTIL_FINISHED = f"""
import os, pathlib, time
import holdfast

run = holdfast.attach()
step = 1000 * int(os.environ["{ENV_ATTEMPT}"])
told = pathlib.Path(f"rank-{{os.environ['RANK']}}")
told.with_suffix(f".{{os.getpid()}}").write_text(f"{{os.environ['SLURM_JOB_ID']}} {{os.environ['SLURMD_NODENAME']}}")
told.with_suffix(f".{{os.getpid()}}").replace(told)
print("rank", os.environ["RANK"], "trains")
while not pathlib.Path("finish").exists():
    step += 1
    time.sleep(0.02)
    run.step(step)
"""


@pytest.fixture
def slurm(tmp_path_factory):
    with PrivateSlurm(tmp_path_factory.mktemp("s"), nodes=4) as slurm:
        yield slurm


def environment_of(place, slurm):
    return {**slurm.environment, **place.environment}


def nodes_of(place, job_id):
    """Return the nodes of the ranks once all of them train in a job; else None."""
    files = [place.folder / f"rank-{rank}" for rank in range(2)]
    told = [one.read_text().split() for one in files if one.exists()]
    there = len(told) == len(files) and all(job == job_id for job, _ in told)
    return {node for _, node in told} if there else None


def wait_for(place, terminal, holds):
    """Wait until `holds()`; fail at once where the command has ended."""

    def is_there():
        assert terminal.poll() is None, terminal.communicate()
        return holds()

    place.wait_until(is_there, timeout_s=240)


def test_a_spare_replaces_a_dead_node_and_the_next_job_follows_where_nodes_are_missing(
    place, slurm
):
    """Before that, slurmctld itself is away for a minute."""
    job = place.job(UNTIL_FINISHED)
    arguments = ["--on", "slurm", "--nodes", "2", "--spares", "1", "--name", "r"]
    environment = environment_of(place, slurm)
    with place.start("run", *arguments, "--", "python", job, environment=environment) as terminal:
        wait_for(place, terminal, lambda: nodes_of(place, "1"))
        place.wait_for_step("r", 1003)
        first = nodes_of(place, "1")
        before = place.last_step("r")
        slurm.kill_controller()
        time.sleep(AWAY_S)
        slurm.restart_controller()
        wait_for(place, terminal, lambda: slurm.run(["squeue", "--noheader", "--states=R"]).strip())
        after = place.last_step("r")
        assert after > before
        place.wait_for_step("r", after + 10)
        with place.ledger() as ledger:
            assert ledger.incidents("r") == [], "the job is not touched while slurmctld is away"
            assert len(ledger.attempts("r")) == 1
        lost = max(first)  # not the node of the batch script
        (spare,) = {"n1", "n2", "n3"} - first
        slurm.kill_node(lost)
        wait_for(place, terminal, lambda: nodes_of(place, "1") == first - {lost} | {spare})
        place.wait_for_step("r", 2003)
        left = first - {lost} | {spare}
        also_lost = max(left)
        slurm.kill_node(also_lost)
        # Slurm itself would notice a minute later, or more.
        down = ",".join([lost, also_lost])
        slurm.run(["scontrol", "update", f"nodename={down}", "state=down", "reason=dead"])
        wait_for(place, terminal, lambda: nodes_of(place, "2") == left - {also_lost} | {"n4"})
        place.wait_for_step("r", 3003)
        (place.folder / "finish").touch()
        out, err = terminal.communicate(timeout=120)
    assert terminal.returncode == 0, err
    assert "rank 1 trains" in out
    assert "Slurm job 1 runs on n1, n2, n3" in err
    without = ", ".join(sorted([lost, also_lost]))
    assert f"queued again as Slurm job 2 without {without}" in err
    assert err.count("holdfast: The job completed.") == 1
    with place.ledger() as ledger:
        assert ledger.run("r").state == "completed"
        assert [one.diagnosis["scope"] for one in ledger.incidents()] == [
            {"node": lost},
            {"node": also_lost},
        ]
        assert len(ledger.attempts("r")) == 3
    assert Submission.read(place.paths("r")).jobs == ("1", "2")
    assert not slurm.run(["squeue", "--noheader"]).strip()


def test_a_queued_run_is_listed_as_such_and_stopped(place, slurm):
    """No node may be used, so that the job waits."""
    slurm.run(["scontrol", "update", "partition=main", "state=down"])
    job = place.job(UNTIL_FINISHED)
    environment = environment_of(place, slurm)

    def holdfast(*arguments):
        with place.start(*arguments, environment=environment) as process:
            out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    arguments = ["--on", "slurm", "--name", "r", "--detach"]
    code, out, err = holdfast("run", *arguments, "--", "python", job)
    assert code == 0, err
    assert "Run r is queued as Slurm job 1." in out
    assert "queued" in holdfast("runs", "ls")[1]
    code, out, err = holdfast("runs", "stop", "r")
    assert (code, out) == (0, "Stopped while it waited as Slurm job 1.\n"), err
    assert not slurm.run(["squeue", "--noheader"]).strip()
    code, _, err = holdfast(
        "run", "--on", "slurm", "--sbatch-option=--partition=none", "--", "python", job
    )
    assert code == 2
    assert "invalid partition" in err
    assert "--sbatch-option" in err
