"""`holdfast runs --watch`: plain lines into a pipe, and a live table in a real terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from holdfast.cli import runs_watch
from holdfast.cli.main import cli
from holdfast.core.errors import BadUse, LedgerError
from holdfast.core.ledger import Attempt, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.telemetry import StepJournal, StepRecord

LIMIT_S = 240


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        ledger.add_run(
            Run(run_id="run-1", state="running", command=["x"], options={}, cwd="/", host="elsewhere", pid=1,
                started_at_s=1000.0)
        )  # fmt: skip
        ledger.add_attempt(Attempt(run_id="run-1", number=1, started_at_s=1000.0))
        step(tmp_path, 7)
        yield ledger


def step(home, number, loss=2.5):
    with StepJournal(RunPaths(home, "run-1").steps) as journal:
        journal.append(
            StepRecord(attempt=1, rank=0, step=number, at_s=1000.0 + number, step_s=0.5, loss=loss,
                       metrics={"tokens_per_s": 12345.0})
        )  # fmt: skip


def watched(rounds):
    """Return the output of a watch that does `rounds` between its looks, and then gets Ctrl-C."""
    left = list(rounds)

    def wait(seconds):
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    runner = CliRunner()
    original = runs_watch.watch_runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.cli.runs.watch_runs", lambda read: original(read, wait=wait))
        result = runner.invoke(cli, ["runs", "--watch"], standalone_mode=False)
    assert result.exception is None, result.exception
    return [re.sub(r"^\S+ \S+  ", "", line) for line in result.output.splitlines()]


def test_a_pipe_gets_a_line_a_change_and_none_without(ledger, tmp_path):
    lines = watched([lambda: None, lambda: step(tmp_path, 8), lambda: None])
    assert lines == [
        "run-1  running  step 7  loss 2.5  s/step 0.5  tokens/s 12,345  attempts 1  incidents 0",
        "run-1  running  step 8  loss 2.5  s/step 0.5  tokens/s 12,345  attempts 1  incidents 0",
    ]


def test_what_needs_a_person_is_said_with_the_command(ledger, tmp_path):
    ledger.set_run("run-1", host=os.uname().nodename)
    lines = watched([lambda: ledger.cordon("n1\x1b[31m", at_s=1.0, by="ada", why="[hot]")])
    assert lines[0].startswith("run-1  lost  step 7")
    assert lines[1:] == [
        "run-1 has lost its supervisor; continue with: holdfast run --resume run-1",
        "Node n1 is cordoned by ada: [hot]",
    ]


def test_a_ledger_that_fails_for_a_while_is_reported_and_read_again(capsys):
    row = dict.fromkeys(("step", "loss", "step_s", "tokens_per_s", "step_at_s", "healthy_step"))
    page = {"active": [{"run_id": "r", "state": "running", "attempts": 1, "incidents": 0, **row}]}
    answers = [LedgerError("The ledger cannot be read. Try again."), page]

    def read():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(seconds):
        if not answers:
            raise KeyboardInterrupt

    runs_watch.watch_runs(read, wait=wait)
    said = capsys.readouterr()
    assert said.err == "The ledger cannot be read. Try again.\n"
    assert said.out.endswith("r  running  attempts 1  incidents 0\n")


def test_the_option_goes_without_a_subcommand(ledger):
    with pytest.raises(BadUse, match="holdfast runs --watch"):
        CliRunner().invoke(
            cli, ["runs", "--watch", "ls"], standalone_mode=False, catch_exceptions=False
        )
    assert "Commands:" in CliRunner().invoke(cli, ["runs"]).output


def test_a_terminal_shows_the_runs_live_until_ctrl_c(ledger, tmp_path):
    theirs, ours = pty.openpty()
    command = [sys.executable, "-m", "holdfast.cli.main", "runs", "--watch"]
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],  # so that Ctrl-C is a signal
        stdin=ours, stdout=ours, stderr=ours,
        env={**os.environ, "COLUMNS": "160", "TERM": "xterm"},
    )  # fmt: skip
    os.close(ours)
    try:
        assert "run-1" in screen_until(theirs, process, r"running +7 ")
        ledger.set_run("run-1", state="failed", ended_at_s=2000.0)
        screen_until(theirs, process, r"failed +")
        os.write(theirs, b"\x03")
        screen_until(theirs, process, None)
        assert process.wait(timeout=LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(theirs)


def screen_until(fd, process, pattern):
    """Return what the terminal has shown up to a pattern, without its control sequences."""
    seen = ""
    for _ in range(LIMIT_S * 2):
        if select.select([fd], [], [], 0.5)[0]:
            try:
                seen += os.read(fd, 65536).decode(errors="replace")
            except OSError:  # the other side has closed the terminal
                break
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
        if pattern is not None and re.search(pattern, plain):
            return plain
        if process.poll() is not None:
            break
        time.sleep(0)
    assert pattern is None, seen
    return seen
