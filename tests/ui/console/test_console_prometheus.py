"""A real Prometheus scrapes a real console, and answers every query of the dashboard."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager

import pytest
from test_console_metrics import expressions

from holdfast.core.ledger import Ledger, Verdict
from holdfast.core.paths import ledger_url
from holdfast.core.telemetry import StepJournal, StepRecord

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Debian's prometheus is not installed"
)
LIMIT_S = 240


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def program(*command, log, **more):
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, **more)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(found, process, log):
    """Return the first true answer of `found`."""
    for _ in range(LIMIT_S * 10):
        if answer := found():
            return answer
        assert process.poll() is None, log.read_text()[-2000:]
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


def test_prometheus_scrapes_the_console_and_answers_the_dashboard(home, tmp_path):
    with Ledger.open(ledger_url(home)) as ledger:
        # Another host's run: this host does not ask for its processes.
        ledger.set_run("demo-1", state="running", ended_at_s=None)
        verdict = Verdict(name="n1", outcome="bad", probability=0.9, evidence="wrong sums")
        ledger.add_verdicts([verdict], at_s=1.0, by="demo-1", cordons=["n1"])
        first = ledger.checkpoints("demo-1")[0]
        ledger.add_checkpoint(type(first)(**{**vars(first), "state": "healthy", "step": 1}))
    with StepJournal(home / "runs" / "demo-1" / "telemetry" / "steps.jsonl") as journal:
        last = journal.last()
        journal.append(
            StepRecord(attempt=last.attempt, rank=0, step=last.step + 1, at_s=last.at_s + 1, step_s=0.5, loss=2.0,
                       metrics={"tokens_per_s": 1234.5})
        )  # fmt: skip
    console_log, log = tmp_path / "console.log", tmp_path / "prometheus.log"
    command = (sys.executable, "-m", "holdfast.cli.main", "ui", "--port", "0", "--json")
    with program(
        *command, log=console_log, env={**os.environ, "HOLDFAST_HOME": str(home)}
    ) as console:
        link = until(
            lambda: re.search(r"http://(127\.0\.0\.1:\d+)/enter", console_log.read_text()),
            console, console_log,
        )  # fmt: skip
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: holdfast\n"
            f"  authorization: {{credentials_file: {home / 'metrics-token'}}}\n"
            f"  static_configs: [{{targets: ['{link[1]}']}}]\n"
        )
        port = free_port()
        command = (
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        )  # fmt: skip
        with program(*command, log=log) as prometheus:

            def answer(query):
                text = urllib.parse.urlencode({"query": query})
                try:
                    url = f"http://127.0.0.1:{port}/api/v1/query?{text}"
                    with urllib.request.urlopen(url, timeout=60) as said:
                        return json.load(said)["data"]["result"]
                except OSError:
                    return []  # it starts, or refuses the query

            until(lambda: answer('up{job="holdfast"} == 1'), prometheus, log)
            # `increase` needs two scrapes.
            until(lambda: answer("count_over_time(holdfast_runs[5m]) > 1"), prometheus, log)
            alerts = {one for one in expressions() if re.search(r"(==|>) \d+$", one)}
            # After a scrape that failed, all answers are empty until the next one.
            empty = {one for one in expressions() if one not in alerts}

            def all_answered():
                empty.difference_update([one for one in empty if answer(one)])
                return not empty

            until(all_answered, prometheus, log)
            until(lambda: answer("holdfast_run_loss"), prometheus, log)
            (loss,) = answer("last_over_time(holdfast_run_loss[5m])")
            assert (loss["metric"]["run"], loss["value"][1]) == ("demo-1", "2")
            # As the alerts compare.
            until(lambda: answer('holdfast_run_state{state="running"} == 1'), prometheus, log)
