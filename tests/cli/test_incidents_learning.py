"""`holdfast incidents confirm | correct` and `holdfast rules`, over a prepared ledger."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.cli.incidents import command as incidents
from holdfast.cli.main import Place
from holdfast.cli.rules import command as rules
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.diagnose import diagnose
from holdfast.diagnose.memory import remember
from holdfast.testing.model_endpoint import ModelServer, Words

STRANGE = "the frobnicator of shard 12 could not be entangled: vortex unavailable"


@pytest.fixture
def place(tmp_path):
    """A home with a run's incident whose logs are there."""
    paths = RunPaths(tmp_path, "run-1")
    paths.attempt_logs(1).mkdir(parents=True)
    paths.rank_log(1, 0).write_text(f"step 1 loss 2\n{STRANGE}\n")
    found = diagnose([paths.attempt_logs(1)])
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        ledger.add_run(
            Run(
                run_id="run-1",
                state="failed",
                command=["x"],
                options={},
                cwd="/",
                host="h",
                pid=1,
                started_at_s=1.0,
            )
        )
        ledger.add_incident(
            Incident(
                run_id="run-1",
                attempt=1,
                kind="exit",
                rank=0,
                step=1,
                fault_at_s=2.0,
                detected_at_s=3.0,
                diagnosis=found.to_json(),
                action="restart",
                explanation="It may pass.",
            )
        )
    return Place(tmp_path, ledger_url(tmp_path))


def answer(place, group, *arguments):
    """Run a command; return its output, and raise its errors."""
    result = CliRunner().invoke(group, arguments, obj=place, standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def as_json(place, group, *arguments):
    lines = answer(place, group, *arguments, "--json").splitlines()
    assert len(lines) == 1, "one object and nothing else"
    said = json.loads(lines[0])
    assert said["version"] == 1
    return said


def test_a_correction_is_learned_shown_and_withdrawn(place):
    with pytest.raises(HoldfastError, match="left Unknown"):
        answer(place, incidents, "confirm", "1")
    said = answer(
        place, incidents, "correct", "1", "--reason", "NetworkError", "--action", "wait_and_retry"
    )
    assert "Incident 1 is corrected: NetworkError." in said
    learned = as_json(place, rules, "ls", "--learned")["rules"]
    assert learned[0]["reason"] == "NetworkError"
    assert learned[0]["from"] == "1"
    assert "corrected: NetworkError" in answer(place, incidents, "ls")
    shown = as_json(place, incidents, "show", "1")
    assert (shown["verdict"], shown["true_action"]) == ("corrected", "wait_and_retry")
    assert "verdict" in answer(place, incidents, "show", "1")
    rule_id = learned[0]["id"]
    assert "wait_and_retry" in answer(place, rules, "show", rule_id)
    assert as_json(place, rules, "show", rule_id)["sources"] == ["1"]
    for one in learned:
        assert as_json(place, rules, "withdraw", one["id"]) == {
            "schema": "holdfast.withdraw", "version": 1, "id": one["id"],
        }  # fmt: skip
    assert as_json(place, rules, "ls", "--learned")["rules"] == []
    assert "withdrawn_at_s" in answer(place, rules, "show", rule_id), "kept for the record"


def test_a_line_may_be_named(place, tmp_path):
    log = tmp_path / "kernel.log"
    log.write_text("nothing\nthe quorum lease was revoked: fencing failed\n")
    said = as_json(
        place, incidents, "correct", "1", "--reason", "NodeFailure", "--line", f"{log}:2"
    )
    assert said["roots"] == ["the quorum lease was revoked: fencing failed"]
    assert said["learned"]
    for wrong in (f"{log}:9", f"{log}", "nowhere.log:1", f"{log}:0"):
        with pytest.raises(HoldfastError, match="--line"):
            answer(place, incidents, "correct", "1", "--reason", "NodeFailure", "--line", wrong)


def test_incidents_without_a_run_have_names_of_their_own(place, tmp_path):
    log = tmp_path / "job.log"
    log.write_text("KeyError: 'a'\n")
    with Ledger.open(place.ledger) as ledger:
        remember(ledger, diagnose(log), "1: KeyError: 'a'\n")
        name = as_json(place, incidents, "ls")["remembered"][0]["id"]
    assert name.startswith("m")
    assert "KeyError: 'a'" in answer(place, incidents, "show", name)
    assert "is confirmed: KeyError" in answer(place, incidents, "confirm", name)
    assert as_json(place, incidents, "show", name)["verdict"] == "confirmed"
    with pytest.raises(HoldfastError, match="incidents ls"):
        answer(place, incidents, "show", "x1")


def test_good_runs_are_listed_and_their_filters_too(place, tmp_path):
    log = tmp_path / "good.log"
    log.write_text("".join(f"opened shard {n} of blend corpus-{n} in {n}.2 s\n" for n in range(30)))
    assert "No good runs" in answer(place, rules, "good", "ls")
    done = as_json(place, rules, "good", "add", str(log))
    assert len(done["filters"]) == 1
    assert as_json(place, rules, "good", "ls")["good_runs"][0]["name"] == str(log)
    assert done["filters"][0] in answer(place, rules, "ls", "--learned")
    assert "Withdrew" in answer(place, rules, "withdraw", done["filters"][0])


def test_packaged_rules_are_listed_shown_and_a_file_is_checked(place, tmp_path):
    listed = as_json(place, rules, "ls")["rules"]
    assert {"python-key-error"} <= {one["id"] for one in listed}
    assert as_json(place, rules, "show", "python-key-error")["reason"] == "KeyError"
    file = Path(tmp_path) / "mine.yaml"
    file.write_text(
        "order: 50\nhot: [flux]\ndefaults: {kind: service, action: restart, restart_helps: true, confidence: 0.9,"
        " source: ours}\nrules:\n  - {id: flux-gone, pattern: 'flux gone', reason: NetworkError, mitigation: Start it.,"
        " match: ['flux gone'], no_match: ['flux well']}\n"
    )
    assert "all examples right" in answer(place, rules, "check", str(file))
    file.write_text(file.read_text().replace("match: ['flux gone']", "match: ['flux lost']"))
    with pytest.raises(HoldfastError, match="does not match"):
        answer(place, rules, "check", str(file))
    assert as_json(place, rules, "check", str(file))["faults"]
    with pytest.raises(HoldfastError, match="holdfast rules ls"):
        answer(place, rules, "show", "no-such-rule")


def test_a_model_may_be_asked_what_of_a_good_run_is_routine(place, tmp_path, monkeypatch):
    log = tmp_path / "good.log"
    log.write_text(
        "".join(f"gateway heartbeat {n} ok from shelf {n}\n" for n in range(3))
        + "step 3 loss 2.0\n"
    )

    def votes(asked):
        if "numbered candidates" in asked.body["messages"][0]["content"]:
            return Words(json.dumps({"keep": [1]}))
        (number,) = (
            line.partition(": ")[0]
            for line in asked.text.splitlines()
            if ": gateway heartbeat" in line
        )
        return Words(
            json.dumps(
                {"filters": [{"pattern": r"^gateway heartbeat \d+ ok", "lines": [int(number)]}]}
            )
        )

    with ModelServer(votes) as server:
        monkeypatch.setenv("HOLDFAST_LLM_URL", server.url)
        monkeypatch.setenv("HOLDFAST_LLM_MODEL", "stub")
        assert as_json(place, rules, "good", "add", str(log))["filters"] == []
        assert not server.asked, "not unless it is asked for"
        done = as_json(place, rules, "good", "add", str(log), "--model")
    (added,) = done["filters"]
    (shown,) = [
        one for one in as_json(place, rules, "ls", "--learned")["rules"] if one["id"] == added
    ]
    assert (shown["author"], shown["kind"], shown["reason"]) == ("model stub", "filter", "routine")
    assert shown["what"] == r"^gateway heartbeat \d+ ok"


def test_a_model_must_be_named_before_a_good_run_is_recorded(place, tmp_path, monkeypatch):
    monkeypatch.delenv("HOLDFAST_LLM_URL", raising=False)
    (tmp_path / "good.log").write_text("all well\n")
    with pytest.raises(HoldfastError, match="HOLDFAST_LLM_URL"):
        answer(place, rules, "good", "add", str(tmp_path / "good.log"), "--model")
    assert "No good runs" in answer(place, rules, "good", "ls")


VERSION_2 = {"id", "outcome", "end_line"}


def test_incidents_of_version_1_are_read_and_learned_from(place):
    with Ledger.open(place.ledger) as ledger:
        first = ledger.incident(1)
        old = {key: value for key, value in first.diagnosis.items() if key not in VERSION_2}
        ledger.add_incident(
            replace(first, incident_id=None, attempt=2, diagnosis={**old, "version": 1})
        )
    said = answer(place, incidents, "show", "2")
    assert "Incident 2 of run run-1, attempt 2" in said
    assert "outcome" not in said
    assert as_json(place, incidents, "show", "2")["diagnosis"]["version"] == 1
    answer(place, incidents, "correct", "2", "--reason", "NetworkError")
    assert as_json(place, incidents, "show", "2")["verdict"] == "corrected"
