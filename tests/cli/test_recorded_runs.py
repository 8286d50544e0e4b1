"""Show how commands present a recorded run, to people and to programs."""

import json

import pytest
from click.testing import CliRunner

from holdfast.cli.main import cli
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Attempt, Checkpoint, Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url


@pytest.fixture
def home(tmp_path, monkeypatch, diagnosis):
    """A home with one finished run that has an incident, logs and a checkpoint record."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    paths = RunPaths(tmp_path, "run-1")
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        ledger.add_run(
            Run(
                run_id="run-1",
                state="failed",
                command=["python", "train.py"],
                options={"nproc": 2},
                cwd="/w",
                host="h",
                pid=1,
                started_at_s=1000.0,
                ended_at_s=1010.0,
                exit_code=1,
                outcome="It failed. Mend it.",
            )
        )
        attempt = Attempt(
            run_id="run-1",
            number=1,
            started_at_s=1000.0,
            ended_at_s=1010.0,
            outcome="failed",
            start_step=0,
            last_step=7,
        )
        ledger.add_attempt(attempt)
        ledger.add_incident(
            Incident(
                run_id="run-1",
                attempt=1,
                kind="exit",
                rank=1,
                step=7,
                fault_at_s=1009.0,
                detected_at_s=1009.1,
                diagnosis=diagnosis,
                action="stop",
                explanation="A restart does not mend this.",
            )
        )
        ledger.add_checkpoint(
            Checkpoint(
                run_id="run-1",
                attempt=1,
                step=5,
                path="/c/step-5",
                state="written",
                size_bytes=10,
                stall_s=0.1,
                committed_at_s=1005.0,
            )
        )
    paths.attempt_logs(1).mkdir(parents=True)
    paths.rank_log(1, 0).write_text("zero\n")
    paths.rank_log(1, 1).write_text("one\n")
    paths.launcher_log(1).write_text("launcher\n")
    return tmp_path


def answer(*arguments):
    """Run a command; return its output, and raise its errors."""
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def answer_json(*arguments):
    lines = answer(*arguments, "--json").splitlines()
    assert len(lines) == 1, "one object and nothing else"
    return json.loads(lines[0])


JSON_ANSWERS = {
    ("runs", "ls"): ("holdfast.runs", "runs"),
    ("runs", "show", "run-1"): ("holdfast.run", "attempts"),
    ("explain",): ("holdfast.explanation", "chain"),
    ("explain", "run-1"): ("holdfast.explanation", "lost_time"),
    ("logs", "run-1"): ("holdfast.logs", "logs"),
    ("incidents", "ls"): ("holdfast.incidents", "incidents"),
    ("incidents", "show", "1"): ("holdfast.incident", "diagnosis"),
    ("runs", "rm", "run-1"): ("holdfast.rm", "removed"),
}


@pytest.mark.parametrize("command", JSON_ANSWERS, ids=" ".join)
def test_every_answer_has_a_json_form_with_schema_and_version(home, command):
    said = answer_json(*command)
    schema, key = JSON_ANSWERS[command]
    assert (said["schema"], said["version"]) == (schema, 1)
    assert said[key]


def test_runs_show_adds_up_the_records(home):
    said = answer_json("runs", "show", "run-1")
    assert (said["state"], said["exit_code"], said["wall_s"], said["checkpoints"]) == (
        "failed",
        1,
        10.0,
        1,
    )
    text = answer("runs", "show", "run-1")
    assert "It failed. Mend it." in text
    assert "python train.py" in text


def test_a_run_without_processes_is_not_called_running(home):
    with Ledger.open(ledger_url(home)) as ledger:
        ledger.set_run("run-1", state="running", ended_at_s=None, exit_code=None, outcome="")
    assert answer_json("runs", "ls")["runs"][0]["state"] == "lost"
    assert "holdfast run --resume run-1" in answer("runs", "show", "run-1")
    explained = answer("explain")
    assert ": lost after " in explained.splitlines()[0]
    assert "Continue with: holdfast run --resume run-1" in explained


def test_incidents_show_cites_lines_as_they_are(home):
    text = answer("incidents", "show", "1")
    assert "rank-1.log:3: KeyError: 'x' [bold]" in text
    assert "Correct the script." in text
    assert "KeyError" in answer("incidents", "ls", "--run", "run-1")


def test_explain_tells_the_chain_of_the_newest_run(home):
    text = answer("explain")
    assert text.startswith("Run run-1, 2 ranks, ")
    assert "Rank 1 failed, after step 7 (incident 1)." in text
    assert "evidence  root: rank-1.log:3: KeyError: 'x' [bold]" in text
    assert "The run ended: failed." in text
    assert "in all " in text
    said = answer_json("explain")
    (incident,) = said["chain"]
    assert (incident["kind"], incident["what"]) == ("incident", "Rank 1 failed")
    assert said["lost_time"]["rank_s"] == pytest.approx(2 * said["wall_s"])


def test_explain_without_a_run_says_how_to_start_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    with pytest.raises(HoldfastError, match="There is no run yet") as error:
        answer("explain")
    assert error.value.exit_code == 2


def test_logs_of_one_rank_of_all_and_of_the_launcher(home):
    assert answer("logs", "run-1", "--rank", "1") == "one\n"
    assert answer("logs", "run-1") == "==> rank-0.log <==\nzero\n==> rank-1.log <==\none\n"
    assert answer("logs", "run-1", "--launcher") == "launcher\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("logs", "run-1", "--rank", "7"), "there are ranks 0 to 1"),
        (("logs", "run-1", "--attempt", "3"), "there are attempts 1 to 1"),
        (("logs", "run-1", "-f", "--json"), "do not go together"),
        (("logs", "nope"), "holdfast runs ls"),
        (("runs", "show", "nope"), "There is no run 'nope'"),
        (("runs", "stop", "run-1"), "holdfast runs show run-1"),
        (("runs", "approve", "run-1"), "holdfast explain run-1"),
        (("explain", "nope"), "There is no run 'nope'"),
        (("runs", "rm", "nope"), "There is no run 'nope'"),
        (("incidents", "show", "9"), "holdfast incidents ls"),
        (("checkpoint", "ls", "/no/such/folder"), "There is no folder"),
    ],
)
def test_wrong_use_is_a_sentence_with_the_next_step(home, arguments, said):
    with pytest.raises(HoldfastError, match=r"\.") as error:
        answer(*arguments)
    assert said in str(error.value)
    assert error.value.exit_code == 2


def test_nothing_yet_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    assert "No runs yet" in answer("runs", "ls")
    assert answer_json("incidents", "ls")["incidents"] == []
    assert answer("incidents", "ls") == "No incidents.\n"
    assert answer("checkpoint", "ls", str(tmp_path)) == f"No checkpoints in {tmp_path}.\n"
