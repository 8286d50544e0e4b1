"""Show that the command line has the agreed commands and options, and ends without a traceback."""

import errno
import os
import subprocess
import sys

import click.testing
import pytest

from holdfast.cli.main import COMMANDS, cli, main
from holdfast.core.errors import NotFound
from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_at, ledger_url


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


@pytest.mark.parametrize("command", ["runs ls", "nodes ls", "explain r", "incidents ls"])
def test_a_read_does_not_create_the_ledger_that_it_names(tmp_path, monkeypatch, command):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    missing = tmp_path / "a folder" / "my%2Fledger.db"
    url = ledger_at(str(missing))
    for ledger in (str(missing), url, url.replace("sqlite:", "sqlite+pysqlite:")):
        result = click.testing.CliRunner().invoke(cli, ["--ledger", ledger, *command.split()])
        assert isinstance(result.exception, NotFound)
        assert str(result.exception).startswith(f"There is no ledger {missing}.")
    assert list(tmp_path.iterdir()) == []
    helped = click.testing.CliRunner().invoke(cli, ["--ledger", str(missing), "runs", "--help"])
    assert helped.exit_code == 0
    empty = click.testing.CliRunner().invoke(cli, ["runs", "ls"])
    assert empty.exit_code == 0, "the default ledger is created"


def test_a_ledger_that_cannot_be_opened_is_said_without_a_traceback(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "holdfast.cli.main",
            "--ledger",
            "sqlite:////proc/no/ledger.db",
            "rules",
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


@pytest.mark.parametrize(
    ("command", "closed"),
    [
        (["rules", "ls"], (1,)),
        (["rules", "ls", "--json"], (1,)),
        (["runs", "ls"], (1,)),
        (["runs", "ls"], (0, 1, 2)),
        (["--help"], (0, 1, 2)),
    ],
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
