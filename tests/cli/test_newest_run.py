"""Commands that take a run work on the newest run where none is named."""

import json

import pytest
import torch
from click.testing import CliRunner

from holdfast.checkpoint import Checkpointer
from holdfast.cli.main import cli
from holdfast.core.errors import NotFound
from holdfast.core.ledger import Attempt, Checkpoint, Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url


@pytest.fixture
def home(tmp_path, monkeypatch, diagnosis):
    """A home with an old and a new run; the new one has logs and two incidents."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        for run_id, began_s in (("z-old", 1000.0), ("a-new", 2000.0)):
            ledger.add_run(
                Run(run_id=run_id, state="failed", command=["python"], options={}, cwd=str(tmp_path), host="h", pid=1,
                    started_at_s=began_s, ended_at_s=began_s + 10, exit_code=1)
            )  # fmt: skip
            ledger.add_attempt(
                Attempt(run_id=run_id, number=1, started_at_s=began_s, outcome="failed")
            )
            for step in (3, 5):
                ledger.add_incident(
                    Incident(run_id=run_id, attempt=1, kind="exit", rank=0, step=step, fault_at_s=began_s,
                             detected_at_s=began_s, diagnosis=diagnosis)
                )  # fmt: skip
            paths = RunPaths(tmp_path, run_id)
            paths.attempt_logs(1).mkdir(parents=True)
            paths.rank_log(1, 0).write_text(f"{run_id} says\n")
    return tmp_path


def answer(*arguments):
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def said(*arguments):
    return json.loads(answer(*arguments, "--json"))


def test_runs_logs_and_explain_take_the_newest_run(home):
    assert said("runs", "show")["id"] == "a-new"
    assert said("explain")["id"] == "a-new"
    assert said("logs")["id"] == "a-new"
    assert answer("logs") == "a-new says\n"
    assert answer("logs", "z-old") == "z-old says\n"
    assert said("runs", "report")["path"] == str(RunPaths(home, "a-new").report)
    assert RunPaths(home, "a-new").report.is_file()


def test_incidents_show_takes_the_last_incident_of_the_newest_run(home):
    found = said("incidents", "show")
    assert (found["run_id"], found["step"], found["id"]) == ("a-new", 5, "4")
    assert found == said("incidents", "show", "4")


def test_a_newest_run_without_an_incident_or_a_checkpoint_says_so(home):
    with Ledger.open(ledger_url(home)) as ledger:
        ledger.remove_run("z-old")
        ledger.remove_run("a-new")
        ledger.add_run(
            Run(run_id="r", state="completed", command=["python"], options={}, cwd="/", host="h", pid=1,
                started_at_s=1.0)
        )  # fmt: skip
    with pytest.raises(NotFound, match="The newest run, r, has no incident"):
        answer("incidents", "show")
    with pytest.raises(NotFound, match="The newest run, r, has no checkpoint yet"):
        answer("checkpoint", "ls")


def test_checkpoint_takes_the_folder_of_the_newest_run_and_its_newest_checkpoint(home, monkeypatch):
    with Checkpointer(home / "ckpt", keep=None) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(2)})
    with Ledger.open(ledger_url(home)) as ledger:
        for step in (1, 2):  # a relative path is relative to the run's own folder
            ledger.add_checkpoint(
                Checkpoint(run_id="a-new", attempt=1, step=step, path=f"ckpt/step-{step:010}", state="written",
                           size_bytes=8, stall_s=0.0, committed_at_s=2000.0 + step)
            )  # fmt: skip
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert [one["step"] for one in said("checkpoint", "ls")["checkpoints"]] == [2, 1]
    assert {one["state"] for one in said("checkpoint", "verify")["checkpoints"]} == {"verified"}
    assert said("checkpoint", "show")["path"] == str(home / "ckpt" / "step-0000000002")
