"""The command line in process over a prepared ledger: output for people and for programs."""

import errno
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from holdfast.cli.main import COMMANDS, cli, main
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Attempt, Checkpoint, Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url

DIAGNOSIS = {
    "schema": "holdfast.diagnosis",
    "version": 1,
    "reason": "KeyError",
    "category": "Script",
    "root_line": {"file": "rank-1.log", "line": 3, "text": "KeyError: 'x'"},
    "evidence": [{"file": "rank-1.log", "line": 3, "text": "KeyError: 'x' [bold]", "role": "root"}],
    "scope": {"rank": 1},
    "action": "user_must_fix",
    "restart_helps": False,
    "mitigation": "Correct the script.",
    "confidence": 0.85,
    "decided_by": ["python-key-error"],
}


@pytest.fixture
def home(tmp_path, monkeypatch):
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
                diagnosis=DIAGNOSIS,
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
    assert "go on with: holdfast run --resume run-1" in explained


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


def test_a_ledger_that_cannot_be_opened_is_said_without_a_traceback(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "holdfast.cli.main",
            "--ledger",
            "sqlite:////proc/no/ledger.db",
            "runs",
            "ls",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast: The ledger")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "step"),
    [
        (errno.ENOSPC, "Free some space there"),
        (errno.EACCES, "Check that path and its permissions"),
    ],
)
def test_what_the_system_refuses_is_told_with_its_place_and_a_next_step(
    monkeypatch, capsys, code, step
):
    def refused(**_):
        raise OSError(code, "Refused", "/where/it/was")

    monkeypatch.setattr(cli, "main", refused)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.startswith(
        f"holdfast: [Errno {code}] Refused: '/where/it/was'. {step}"
    )


def test_help_imports_nothing_heavy():
    script = (
        "import sys\nsys.argv = ['holdfast', '--help']\nfrom holdfast.cli.main import main\ntry:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'torch', 'sqlalchemy', 'rich', 're2', 'psutil', 'yaml', 'alembic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def options(command):
    return sorted(
        option
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    )


READING = [
    "--bad-rows", "--capacity", "--durations", "--fetched", "--format", "--map", "--memory", "--metrics", "--reasons",
    "--since", "--step", "--types", "--until", "--zone",
]  # fmt: skip
"""The options of every command that reads job records."""


EVALUATING = [
    "--base",
    "--chat-template",
    "--confirm-unsafe-code",
    "--device",
    "--dtype",
    "--engine",
    "--engine-option",
    "--engines-per-node",
    "--family",
    "--hf-config",
    "--include-path",
    "--judge-api-key-env",
    "--judge-concurrency",
    "--judge-cost-limit",
    "--judge-input-price",
    "--judge-output-price",
    "--judge-requests-per-minute",
    "--judge-tokens-per-minute",
    "--judge-url",
    "--limit",
    "--linger-s",
    "--max-batch",
    "--max-length",
    "--max-read-mib-s",
    "--metric-slots",
    "--mode",
    "--model-name",
    "--name-map",
    "--nodes",
    "--num-fewshot",
    "--on",
    "--output",
    "--run",
    "--sbatch-option",
    "--silent-s",
    "--step",
    "--threads",
    "--tp",
    "--url",
]
"""The options of every command that evaluates."""


def test_the_command_line_is_what_was_agreed():
    """A changed list breaks users' scripts: change it on purpose, and record it in CHANGELOG.md."""
    found = {}
    for name in COMMANDS:
        command = cli.get_command(None, name)
        if hasattr(command, "commands") and options(command):
            found[name] = options(command)
        for sub, one in getattr(command, "commands", {"": command}).items():
            found[f"{name} {sub}".strip()] = options(one)
    assert found == {
        "run": [
            "--detach",
            "--eval-drop-stale",
            "--eval-option",
            "--eval-suite",
            "--first-step-limit-s",
            "--fresh",
            "--hang-factor",
            "--hang-floor-s",
            "--healthy-after",
            "--json",
            "--log-max-mib",
            "--max-restarts",
            "--min-nodes",
            "--mode",
            "--name",
            "--nnodes",
            "--no-echo",
            "--no-profile",
            "--nodes",
            "--notify",
            "--nproc",
            "--on",
            "--rendezvous",
            "--resume",
            "--sbatch-option",
            "--section-limit-s",
            "--silence-limit-s",
            "--spares",
            "--stop-grace-s",
            "--test-nodes",
            "--window-s",
        ],
        "init": ["--json", "--write"],
        "doctor": ["--json"],
        "ledger downgrade": ["--force", "--json"],
        "demo": ["--json", "--out", "--seed", "--steps"],
        "runs": ["--watch"],
        "runs ls": ["--json"],
        "runs show": ["--json"],
        "runs stop": ["--json", "--timeout-s"],
        "runs approve": ["--json", "--timeout-s"],
        "runs rm": ["--json"],
        "runs report": ["--json", "--output"],
        "runs export": ["--json", "--output", "--to"],
        "runs summary": ["--json", "--output", "--since"],
        "explain": ["--json"],
        "logs": ["--attempt", "--follow", "--json", "--launcher", "--rank"],
        "diagnose": [
            "--compressed",
            "--each",
            "--explain",
            "--json",
            "--model",
            "--remember",
            "--rules",
        ],
        "incidents ls": ["--json", "--run"],
        "incidents show": ["--json"],
        "incidents confirm": ["--action", "--json"],
        "incidents correct": ["--action", "--json", "--line", "--reason"],
        "nodes check": ["--cordon", "--json", "--nnodes", "--rendezvous"],
        "nodes ls": ["--json"],
        "nodes cordon": ["--json", "--why"],
        "nodes return": ["--force", "--json"],
        "profile record": [
            "--attach",
            "--deep",
            "--folder",
            "--interval-s",
            "--json",
            "--max-mib",
            "--memory",
        ],
        "profile report": [
            "--compare",
            "--job",
            "--json",
            "--output",
            "--peak-tflops",
            "--perfetto",
        ],
        "rules ls": ["--json", "--learned"],
        "rules show": ["--json"],
        "rules withdraw": ["--json"],
        "rules check": ["--json"],
        "rules good": [],
        **{
            f"trace {name}": sorted([*READING, *own])
            for name, own in {
                "report": [
                    "--carbon-free",
                    "--compare",
                    "--grid-intensity",
                    "--json",
                    "--on",
                    "--output",
                    "--paper",
                    "--parts",
                    "--pue",
                    "--title",
                    "--workers",
                ],
                "check": ["--json", "--strict"],
                "convert": ["--json", "--output"],
                "query": ["--csv", "--json"],
                "export": ["--json", "--output", "--to"],
            }.items()
        },
        "ui": [
            "--allow-host",
            "--host",
            "--json",
            "--ledger",
            "--open-reading",
            "--port",
            "--proxy",
        ],
        "trace twin": [
            "--gpus",
            "--jobs",
            "--json",
            "--like",
            "--map",
            "--output",
            "--seed",
            "--telemetry",
        ],
        "trace formats": ["--json"],
        **{
            f"eval {name}": sorted([*EVALUATING, "--suite", "--json", *own])
            for name, own in {
                "run": ["--id", "--model", "--no-progress"],
                "lm_eval": ["--id", "--model", "--no-progress"],
                "plan": ["--arrivals", "--device-memory-gib", "--model", "--page"],
                "watch": ["--drop-stale", "--no-progress", "--once", "--until-file"],
            }.items()
        },
        "eval resume": [
            "--engines-per-node",
            "--json",
            "--no-progress",
            "--nodes",
            "--on",
            "--output",
            "--sbatch-option",
        ],
        "eval rescore": ["--json", "--no-progress"],
        "eval why": ["--json"],
        "eval compare": ["--json", "--output", "--run", "--suite"],
        "eval ls": ["--family", "--json", "--run", "--suite"],
        "eval show": ["--json", "--output"],
        "checkpoint ls": ["--json"],
        "checkpoint verify": ["--json"],
        "checkpoint show": ["--json", "--tensors"],
        "checkpoint diff": ["--json"],
        "checkpoint pin": ["--json", "--why"],
        "checkpoint unpin": ["--json"],
        "checkpoint prune": ["--best", "--dry-run", "--every", "--json", "--last", "--within"],
        "checkpoint import": ["--json", "--step", "--to"],
        "checkpoint export": ["--hf-config", "--json", "--name-map", "--safetensors"],
        "checkpoint restore": ["--entry", "--json", "--to"],
        "simulate evaluate": sorted(
            [
                *EVALUATING,
                "--suite",
                "--json",
                "--arrivals",
                "--device-memory-gib",
                "--model",
                "--page",
            ]
        ),
        "simulate cluster": [
            "--bad-rows",
            "--capacity",
            "--decoupled",
            "--durations",
            "--evaluation",
            "--fetched",
            "--format",
            "--json",
            "--limit",
            "--map",
            "--memory",
            "--metrics",
            "--page",
            "--reasons",
            "--reserve",
            "--seed",
            "--since",
            "--step",
            "--types",
            "--until",
            "--zone",
        ],
        "simulate pretrain": [
            "--days",
            "--gpus",
            "--interval-s",
            "--json",
            "--rates",
            "--replications",
            "--scenario",
            "--search",
            "--seed",
            "--set",
            "--spares",
            "--trace",
        ],
        "plan": ["--days", "--gpus", "--json", "--page", "--replications", "--seed", "--trace"],
    }


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
@pytest.mark.parametrize(
    "command", [["rules", "ls"], ["rules", "ls", "--json"], ["runs", "ls"], ["--help"]]
)
def test_closed_streams_print_no_traceback_and_the_ledger_does_not_take_their_place(
    tmp_path, command, closed
):
    redirections = " ".join(f"{fd}>&-" for fd in closed)
    shell = f'exec "$@" {redirections}'
    done = subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, "-m", "holdfast.cli.main", *command],
        env={**os.environ, "HOLDFAST_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        assert ledger.runs() == []


def test_a_pipe_whose_reader_leaves_prints_no_traceback(tmp_path):
    shell = f"{sys.executable} -m holdfast.cli.main rules ls --json | true"
    done = subprocess.run(
        ["bash", "-c", shell],
        env={**os.environ, "HOLDFAST_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


def test_run_without_torch_says_what_to_install_before_anything_is_recorded(tmp_path):
    program = (
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *package: None if name == 'torch' else find(name, *package)\n"
        "from holdfast.cli.main import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "--", sys.executable, "-c", "print(1)"],
        env={**os.environ, "HOLDFAST_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "holdfast: `holdfast run` needs torch: pip install 'holdfast[train]'\n"
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        assert ledger.runs() == []
