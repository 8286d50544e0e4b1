"""Answers in JSON that no test of their own command prints; each is checked against its schema."""

import json

import pytest
from click.testing import CliRunner

from holdfast.cli import runs
from holdfast.cli.main import cli
from holdfast.cli.run.command import _print_outcome
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import ledger_url
from holdfast.recover import Outcome


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    """The ledger of an empty home."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    with Ledger.open(ledger_url(tmp_path)) as opened:
        yield opened


def said(*arguments):
    result = CliRunner().invoke(cli, [*arguments, "--json"], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout)


@pytest.mark.usefixtures("ledger")
def test_a_node_is_named_by_one_key():
    assert said("nodes", "cordon", "n7", "--why", "fan")["id"] == "n7"
    assert [one["id"] for one in said("nodes", "ls")["nodes"]] == ["n7"]
    assert said("nodes", "return", "n7", "--force")["id"] == "n7"


def test_a_stopped_run_is_named_with_its_outcome(ledger, monkeypatch):
    """The stop itself is a matter of tests/recover; this is what its end prints."""
    ledger.add_run(
        Run(run_id="r", state="running", command=["python"], options={}, cwd="/", host="h", pid=1, started_at_s=1.0)
    )  # fmt: skip

    def stop(run_id, ledger, _home, **_):
        ledger.set_run(run_id, state="stopped", outcome="Stopped by holdfast runs stop.")

    monkeypatch.setattr(runs, "stop_run", stop)
    found = said("runs", "stop", "r")
    assert (found["id"], found["outcome"]) == ("r", "Stopped by holdfast runs stop.")


def test_the_outcome_of_a_run_names_the_run(capsys):
    assert _print_outcome("r", Outcome("failed", 1, "It failed. Mend it."), as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "schema": "holdfast.outcome", "version": 1,
        "id": "r", "state": "failed", "exit_code": 1, "outcome": "It failed. Mend it.",
    }  # fmt: skip


@pytest.mark.usefixtures("ledger")
def test_rules_that_are_right_are_told_so(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(RULES)
    found = said("rules", "check", str(file))
    assert (found["rules"], found["faults"]) == (1, [])


RULES = """
order: 1
hot: [flux capacitor]
defaults:
  kind: exception
  action: user_must_fix
  restart_helps: false
  mitigation: Charge it.
  confidence: 0.95
  source: ours
rules:
  - id: flux
    pattern: 'flux capacitor (?:empty|dry)'
    reason: OSError
    match: ["flux capacitor empty"]
    no_match: ["flux capacitor full"]
"""
