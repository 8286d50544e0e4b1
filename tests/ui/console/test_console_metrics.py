"""The metrics of the console: names, labels and values, who may read them, and the dashboard."""

import json
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from console_home import open_console, propose
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as text_format

from holdfast.core.errors import BadUse
from holdfast.core.ledger import Run, Verdict
from holdfast.core.telemetry import StepJournal, StepRecord
from holdfast.ui.console import scraper_token
from holdfast.ui.console.queries.now import ACTIVE_LIMIT, RECENT_LIMIT

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "monitoring.md"
DASHBOARD = ROOT / "src/holdfast/ui/console/static/grafana.json"


def bearer(home):
    return {"authorization": f"Bearer {(home / 'metrics-token').read_text().strip()}"}


@pytest.fixture
def console(home):
    """A console whose run goes on, waits for an approval, and has a cordoned node."""
    with open_console(home, signed_in=False) as console:
        console.ledger.set_run("demo-1", state="running", ended_at_s=None)
        propose(console.ledger, "demo-1", len(console.ledger.attempts("demo-1")))
        console.ledger.add_verdicts(
            [Verdict(name="n1", outcome="bad", probability=0.9, evidence="wrong sums")],
            at_s=1.0, by="demo-1",
        )  # fmt: skip
        console.ledger.cordon("n1", at_s=1.0, by="ada", why="hot")
        yield console


def scraped(console, home, parse=text_format, **headers):
    """Return the samples, by name and then by the labels as a sorted tuple."""
    answer = console.get("/metrics", headers={**bearer(home), **headers})
    assert answer.status_code == 200, answer.text
    found = {}
    for family in parse(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_the_metrics_are_those_of_the_page_now(console, home):
    found = scraped(console, home)
    console.sign_in()
    (row,) = console.get("/now.json").json()["active"]
    run = (("run", "demo-1"),)
    for name, field in (
        ("holdfast_run_step", "step"), ("holdfast_run_loss", "loss"), ("holdfast_run_step_duration_seconds", "step_s"),
        ("holdfast_run_last_step_timestamp_seconds", "step_at_s"), ("holdfast_run_attempts_total", "attempts"),
        ("holdfast_run_start_timestamp_seconds", "started_at_s"), ("holdfast_run_checkpoint_step", "checkpoint_step"),
    ):  # fmt: skip
        assert found[name][run] == pytest.approx(row[field]), name
    kinds = {labels[0][1]: value for labels, value in found["holdfast_run_incidents_total"].items()}
    counted = [one.kind for one in console.ledger.incidents("demo-1")]
    assert kinds == {kind: counted.count(kind) for kind in ("exit", "hang", "anomaly")}
    states = {
        labels[1][1]: value
        for labels, value in found["holdfast_run_state"].items()
        if labels[0] == run[0]
    }
    assert [name for name, value in states.items() if value] == ["running"]
    assert len(states) == 6
    assert found["holdfast_run_proposal_waiting"][run] == 1
    assert found["holdfast_node_cordoned"] == {(("node", "n1"),): 1}
    (probability,) = found["holdfast_node_fault_probability_ratio"].values()
    assert probability == console.ledger.nodes()[0].probability
    assert found["holdfast_runs"][(("state", "running"),)] == 1


def test_a_lost_run_is_not_counted_as_running(console, home):
    console.state = "lost"
    found = scraped(console, home)["holdfast_runs"]
    assert (found[(("state", "lost"),)], found[(("state", "running"),)]) == (1, 0)


def test_a_rate_and_a_broken_loss_are_reported(console, home):
    path = home / "runs" / "demo-1" / "telemetry" / "steps.jsonl"
    with StepJournal(path) as journal:
        last = journal.last()
        journal.append(
            StepRecord(attempt=last.attempt, rank=0, step=last.step + 1, at_s=last.at_s + 1, step_s=0.5,
                       loss=float("nan"), metrics={"tokens_per_s": 1234.5})
        )  # fmt: skip
    found = scraped(console, home)
    (loss,) = found["holdfast_run_loss"].values()
    assert loss != loss
    assert list(found["holdfast_run_tokens_per_second"].values()) == [1234.5]


def test_openmetrics_is_sent_to_who_accepts_it(console, home):
    accept = "application/openmetrics-text; version=1.0.0"
    found = scraped(console, home, open_metrics, accept=accept)
    assert found["holdfast_runs"][(("state", "running"),)] == 1


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus is not installed")
def test_promtool_has_no_objection(console, home):
    text = console.get("/metrics", headers=bearer(home)).text
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_names_with_quotes_and_line_ends_stay_labels(console, home):
    hostile = 'n"1\\\n# TYPE x counter'
    console.ledger.cordon(hostile, at_s=1.0, by="ada", why="hot")
    assert (("node", hostile),) in scraped(console, home)["holdfast_node_cordoned"]


def test_the_number_of_series_is_bounded(console, home):
    for number in range(ACTIVE_LIMIT + RECENT_LIMIT + 10):
        console.ledger.add_run(
            Run(run_id=f"r{number}", state="running" if number % 2 else "failed", command=["x"], options={}, cwd="/",
                host="h", pid=1, started_at_s=1000.0 + number)
        )  # fmt: skip
    found = scraped(console, home)
    runs = {labels for name, of in found.items() if name.endswith("run_info") for labels in of}
    assert len(runs) <= ACTIVE_LIMIT + RECENT_LIMIT
    assert len(runs) > RECENT_LIMIT
    allowed = {"run", "state", "kind", "node", "host", "version"}
    used = {name for of in found.values() for labels in of for name, _ in labels}
    assert used <= allowed, "a label such as a rank or a step has no bound"


# Who may read them


def test_the_token_opens_the_metrics_and_nothing_else(console, home):
    answer = console.get("/metrics")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert "holdfast_run" not in answer.text
    for wrong in ("Bearer wrong", "Bearer ", "Basic abc", bearer(home)["authorization"] + "x"):
        assert console.get("/metrics", headers={"authorization": wrong}).status_code == 401
    assert console.get("/now.json", headers=bearer(home)).status_code == 401
    form = {"target": "demo-1", "seen": "", "key": "a" * 32}
    headers = {"origin": "http://127.0.0.1:8470", "sec-fetch-site": "same-origin", **bearer(home)}
    assert console.act("stop", form, headers=headers).status_code == 401
    assert console.orders == []
    assert (
        console.get("/metrics", headers={**bearer(home), "host": "evil.example"}).status_code == 421
    )


def test_a_session_or_open_reading_opens_the_metrics_too(console, home):
    console.sign_in()
    assert console.get("/metrics").status_code == 200
    with open_console(home, signed_in=False, reading_is_open=True) as other:
        assert other.get("/metrics").status_code == 200


def test_the_token_is_made_once_and_is_for_its_owner_alone(tmp_path):
    token = scraper_token.scraper_token(tmp_path / "new")
    path = tmp_path / "new" / "metrics-token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) >= 32
    assert scraper_token.scraper_token(tmp_path / "new") == token
    assert [one.name for one in path.parent.iterdir()] == ["metrics-token"]
    path.write_text("\n")
    with pytest.raises(BadUse, match="Delete that file"):
        scraper_token.scraper_token(tmp_path / "new")


def test_two_consoles_that_start_at_once_have_one_token(tmp_path):
    (tmp_path / "metrics-token").write_text("theirs\n")
    scraper_token._create(tmp_path / "metrics-token")
    assert scraper_token.scraper_token(tmp_path) == "theirs"


def test_a_ledger_that_is_too_slow_is_a_failed_scrape(console, home, monkeypatch):
    monkeypatch.setattr("holdfast.ui.console.now_page.LIMIT_S", -1.0)
    monkeypatch.setattr("holdfast.core.ledger.reading._INSTRUCTIONS", 1)
    answer = console.get("/metrics", headers=bearer(home))
    assert answer.status_code == 503
    assert "holdfast_run" not in answer.text


# The guide and the dashboard


def test_the_guide_lists_every_metric_with_its_type(console, home):
    text = console.get("/metrics", headers=bearer(home)).text
    sent = dict(re.findall(r"# TYPE (\S+) (\S+)", text))
    told = dict(
        re.findall(
            r"^\| `(holdfast_\w+?)(?:\{[^}]*\})?` \| (\w+) \|", GUIDE.read_text(), re.MULTILINE
        )
    )
    assert told == sent


def expressions():
    """The queries of the dashboard and of the guide's alerts, with every run chosen."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += re.findall(r"^ +expr: (.*)$", GUIDE.read_text(), re.MULTILINE)
    return [query.replace("$run", ".*") for query in queries]


def test_the_dashboard_and_the_alerts_use_metrics_that_exist(console, home):
    found = set(scraped(console, home))
    named = {name for one in expressions() for name in re.findall(r"holdfast_\w+", one)}
    # Two gauges have no sample in this home, and the guide's list has their names.
    assert named - found <= {
        "holdfast_run_tokens_per_second",
        "holdfast_run_healthy_checkpoint_step",
    }
    assert named <= set(re.findall(r"holdfast_\w+", GUIDE.read_text()))
    variable = json.loads(DASHBOARD.read_text())["templating"]["list"][1]["query"]["query"]
    assert set(re.findall(r"holdfast_\w+", variable)) <= found


def test_the_dashboard_is_of_grafanas_schema():
    """The classes are generated from Grafana's schema: what the schema lacks gets lost on the way."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    ours = json.loads(DASHBOARD.read_text())
    known = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(ours)))
    assert missing(ours, known) == []
    assert missing({**ours, "refrehs": "5s"}, known) == ["/refrehs"], "the comparison sees a typo"


def missing(ours, known, place=""):
    """Return the places of values that the schema's classes did not keep."""
    if isinstance(ours, dict) and isinstance(known, dict):
        return [
            where
            for key, value in ours.items()
            for where in (
                missing(value, known[key], f"{place}/{key}")
                if key in known
                else [f"{place}/{key}"] * (value is not None)
            )
        ]
    if isinstance(ours, list) and isinstance(known, list) and len(ours) == len(known):
        pairs = enumerate(zip(ours, known, strict=True))
        return [where for at, (one, two) in pairs for where in missing(one, two, f"{place}/{at}")]
    return [] if ours == known else [place]


def test_the_dashboard_is_served(console):
    console.sign_in()
    served = console.get("/static/grafana.json")
    assert served.json() == json.loads(DASHBOARD.read_text())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus is not installed")
def test_promtool_accepts_the_alerts_of_the_guide(tmp_path):
    (rules,) = re.findall(r"```yaml\n(groups:.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "rules.yml").write_text(rules)
    done = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "rules.yml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
