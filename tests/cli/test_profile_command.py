"""`holdfast profile`: any command is recorded, and missing sources are reported."""

import json
import subprocess
import sys
from pathlib import Path

import click.testing
import pytest

from holdfast.cli.main import Place, cli
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import ledger_url
from holdfast.profile import Recording

LOGS_STEPS = (
    "import time\nfor step in (10, 20, 30): print(f'step {step}/30 loss 1.0'); time.sleep(0.5)"
)
RECORDS = """
import torch
from holdfast.profile import record
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with record(modules=[model]):
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
raise SystemExit(7)
"""


def profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "holdfast.cli.main", "profile", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


def test_a_command_without_instruments_has_counters_and_the_steps_of_its_log(
    tmp_path: Path,
) -> None:
    done = profile("--folder", str(tmp_path), "--json", "--", sys.executable, "-uc", LOGS_STEPS)

    assert done.returncode == 0, done.stderr
    assert "step 20/30" in done.stderr
    answer = json.loads(done.stdout)
    assert answer["schema"] == "holdfast.profile.recording"
    assert (answer["steps"], answer["steps_from"], answer["exit_code"]) == (20, "log", 0)
    assert 0.004 < answer["step_s"] < 1
    assert "proc" in answer["sources"]
    recording = Recording.read(tmp_path)
    assert len(recording.of("host_memory_used")) == 1
    assert [one.step for one in recording.spans] == list(range(11, 31))


def test_a_command_that_records_has_phases_and_passes_on_its_exit_code(tmp_path: Path) -> None:
    done = profile("--folder", str(tmp_path), "--", sys.executable, "-c", RECORDS)

    assert done.returncode == 7, done.stderr
    assert "3 iterations, median step" in done.stdout
    assert "from the ranks' phases" in done.stdout
    assert f"holdfast profile report {tmp_path}" in done.stdout
    phases = [one.phase for one in Recording.read(tmp_path).spans]
    assert phases == ["forward", "backward", "optimizer"] * 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Give either a command after `--`, or --attach RUN."),
        (["--attach", "r", "--", "true"], "Give either a command after `--`, or --attach RUN."),
        (["--deep", "--", "true"], "--deep and --memory go with --attach RUN."),
        (["--interval-s", "0.01", "--", "true"], "--interval-s is 0.01; it must be at least 0.1."),
        (["--max-mib", "0", "--attach", "r"], "--max-mib is 0; it must be at least 1."),
        (["--", "no-such-program"], "There is no program 'no-such-program' to run."),
        (["--attach", "r"], "Run r is over: completed."),
        (["--attach", "r", "--deep"], "Run r is over: completed."),
    ],
)
def test_wrong_use_is_said_in_one_sentence(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    url = ledger_url(tmp_path)
    with Ledger.open(url) as ledger:
        run = Run(
            run_id="r",
            state="completed",
            command=["true"],
            options={},
            cwd="/",
            host="h",
            pid=1,
            started_at_s=1.0,
        )
        ledger.add_run(run)
    words = ["--ledger", url, "profile", "record", *arguments]
    result = click.testing.CliRunner().invoke(cli, words, obj=Place(tmp_path, url))

    assert sentence in str(result.exception)
