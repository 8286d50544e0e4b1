"""`holdfast run --on slurm` in process: wrong use, and a job that ends before its run."""

import io
import json
import os
import socket
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from holdfast.cli.main import Place, cli
from holdfast.cli.run import command as cli_run
from holdfast.cli.run.slurm import _ended, _Screen
from holdfast.cluster import JobState, SlurmJobs
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import ledger_url
from holdfast.recover.agent.rendezvous import Meeting


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a script, and a PATH with nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "job.py").touch()
    return tmp_path


def program(here, name, text):
    path = here / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(*arguments):
    result = CliRunner().invoke(
        cli, ["run", *arguments, "--", "python", "job.py"], standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "2"), "Give that too, or --nnodes instead"),
        (("--sbatch-option=--qos=x",), "are for --on slurm"),
        (("--on", "slurm", "--rendezvous", "n1:29500"), "Leave it out"),
        (("--on", "slurm", "--nodes", "0"), "at least 1 node"),
        (("--on", "slurm", "--spares", "-1"), "0 spares or more"),
        (("--on", "slurm"), "There is no sbatch on this machine"),
    ],
)
def test_wrong_use_is_a_sentence_and_records_nothing(here, arguments, said):
    with pytest.raises(HoldfastError, match=r"\.$") as error:
        run(*arguments)
    assert said in str(error.value)
    assert error.value.exit_code == 2
    if (here / "home").exists():
        with Ledger.open(ledger_url(here / "home")) as ledger:
            assert ledger.runs() == []


def test_what_slurm_refuses_is_told_in_slurms_words(here):
    program(
        here, "sbatch", "echo 'sbatch: error: Invalid account or account/partition' >&2; exit 1"
    )
    program(here, "squeue", "exit 0")
    with pytest.raises(HoldfastError, match="Invalid account or account/partition") as error:
        run("--on", "slurm", "--name", "r")
    assert "--sbatch-option=--partition=gpu" in str(error.value)
    with Ledger.open(ledger_url(here / "home")) as ledger:
        assert ledger.runs() == []


def test_a_detached_run_prints_its_job(here):
    program(here, "sbatch", "echo 17")
    program(here, "squeue", "exit 0")
    result = run("--on", "slurm", "--name", "r", "--nodes", "3", "--detach", "--json")
    said = json.loads(result.output)
    assert (said["id"], said["state"], said["slurm_job"]) == ("r", "queued", "17")
    with Ledger.open(ledger_url(here / "home")) as ledger:
        assert ledger.run("r").state == "queued"
        assert ledger.run("r").options["nnodes"] == 3


@pytest.mark.parametrize(
    ("state", "is_over", "expected", "said"),
    [
        ("completed", True, "completed", ""),
        ("queued", True, "stopped", "Slurm job 17 ended while the run waited (JobState=CANCELLED)"),
        ("running", True, "running", "Slurm job 17 ended, and ended the run"),
        ("running", False, "running", ""),  # the terminal leaves, and the run goes on
    ],
)
def test_a_job_that_ended_before_its_run_is_told_with_the_next_step(
    tmp_path, state, is_over, expected, said
):
    place = Place(tmp_path, ledger_url(tmp_path))
    with Ledger.open(place.ledger) as ledger:
        ledger.add_run(
            Run(
                run_id="r",
                state=state,
                command=["true"],
                options={},
                cwd="/",
                host="h",
                pid=1,
                started_at_s=1.0,
            )
        )
    job_state = JobState() if is_over else JobState(name="RUNNING")
    following = SimpleNamespace(job_id="17", state=job_state)
    jobs = SlurmJobs(lambda _argv: "JobId=17 JobState=CANCELLED")
    ended = _ended("r", place, following, jobs)
    assert ended.state == expected
    assert ended.outcome.startswith(said)
    assert bool(said) == ("holdfast run --on slurm --resume r" in ended.outcome)


def test_what_several_nodes_say_alike_is_shown_once(monkeypatch):
    out, err = (io.TextIOWrapper(io.BytesIO()) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    screen = _Screen(echo=True)
    screen.show(1, b"loss 1\nloss 1\n")
    screen.show(2, b"holdfast: The job completed.\nholdfast: The job completed.\n")
    screen.show(2, b"holdfast: The job completed.\n")
    screen.show(2, b"warning\nwarning\n")
    assert out.buffer.getvalue() == b"loss 1\nloss 1\n"
    assert err.buffer.getvalue() == b"holdfast: The job completed.\nwarning\nwarning\n"
    assert "The job completed." in screen.last_lines


@pytest.mark.parametrize(
    ("changes", "settled"),
    [({}, ["failed"]), ({"state": "running"}, []), ({"host": "another"}, [])],
)
def test_a_run_that_fails_on_the_node_that_came_to_lead_leaves_no_job(
    tmp_path, monkeypatch, changes, settled
):
    """Without its first node and its batch script, no other process would end the job."""
    place = Place(ledger=ledger_url(tmp_path), home=tmp_path)
    given = {"state": "failed", "host": socket.gethostname(), "pid": os.getpid(), **changes}
    fields = {"command": ["python"], "options": {}, "cwd": "/", "started_at_s": 1.0, **given}
    with Ledger.open(place.ledger) as ledger:
        ledger.add_run(Run(run_id="r", **fields))
    ended = []

    def fail(*_args, **_kwargs):
        raise HoldfastError("The supervisor cannot go on.")

    monkeypatch.setattr(cli_run, "join", fail)
    monkeypatch.setattr(
        cli_run, "settle", lambda _paths, outcome, _say: ended.append(outcome.state)
    )
    given = {"echo": False, "as_json": False, "notify": []}
    ledger, meeting = Ledger.open(place.ledger), Meeting(nnodes=2, key="slurm-1.0")
    with pytest.raises(HoldfastError, match="cannot go on"):
        cli_run._join(None, ledger, place, meeting, "r", **given)
    assert ended == settled
