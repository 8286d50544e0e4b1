"""The account of a period: what lies in the period, and its report in Markdown and HTML."""

import shutil
from pathlib import Path

import pytest
import sample_runs
from markdown_it import MarkdownIt
from sample_runs import EPOCH_S

from holdfast.core.accounting import summarize
from holdfast.core.errors import LedgerError
from holdfast.core.ledger import EvaluationRecord, Event, Ledger
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.ui import period_html, period_markdown, period_of

EVIL = (
    "<script>alert('x')</script> | [a](javascript:x) ![b](http://evil.example/x.png) \x1b[31m&lt;"
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    home = tmp_path_factory.mktemp("period")
    with sample_runs.open_home(home) as ledger:
        sample_runs.faulty_run(ledger, home)
        sample_runs.stopped_run(ledger, home)
    return home


@pytest.fixture
def home(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "home"))


@pytest.fixture
def ledger(home):
    with Ledger.open(ledger_url(home)) as ledger:
        yield ledger


def account(ledger, home, since_s=EPOCH_S - 1, until_s=EPOCH_S + 10_000):
    return period_of(ledger, home, since_s, until_s, state_of=lambda run: run.state)


def test_a_period_around_all_runs_adds_up_to_their_own_accounts(ledger, home):
    period = account(ledger, home)
    summaries = {run: summarize(ledger, home, run) for run in ("demo-1", "demo-2")}
    assert {one.run.run_id for one in period.runs} == set(summaries)
    for one in period.runs:
        summary = summaries[one.run.run_id]
        assert one.wall_s == pytest.approx(summary.wall_s)
        assert sum(one.seconds.values()) == pytest.approx(summary.wall_s)
        assert one.ettr == pytest.approx(summary.ettr, rel=1e-6)
        assert one.interventions == summary.interventions
        assert len(one.incidents) == len(summary.incidents)
    wall_s = sum(one.wall_s for one in summaries.values())
    assert period.gpu_hours == pytest.approx(2 * wall_s / 3600)
    productive_s = sum(one.breakdown.productive_s for one in summaries.values())
    assert period.ettr == pytest.approx(productive_s / wall_s, rel=1e-6)
    assert [one.is_recovered for one in period.incidents] == [True, True, True, False]


def test_two_halves_add_up_to_the_whole(ledger, home):
    edge_s = EPOCH_S + 41.7
    whole = account(ledger, home)
    halves = [account(ledger, home, until_s=edge_s), account(ledger, home, since_s=edge_s)]
    assert sum(one.gpu_hours for one in halves) == pytest.approx(whole.gpu_hours)
    for cause, seconds in whole.rank_seconds.items():
        parts = sum(one.rank_seconds.get(cause, 0.0) for one in halves)
        assert parts == pytest.approx(seconds), cause
    assert sum(len(one.incidents) for one in halves) == len(whole.incidents)
    assert all(one.incidents for one in halves)


def test_what_a_person_did_counts_in_its_own_period(ledger, home):
    ledger.add_event(
        Event(run_id="demo-1", attempt=1, at_s=EPOCH_S + 30, kind="stop_asked", data={"by": "ada"})
    )
    early, late = (
        account(ledger, home, until_s=EPOCH_S + 31),
        account(ledger, home, since_s=EPOCH_S + 31),
    )
    assert [one.interventions for one in early.runs] == [1]
    assert sum(one.interventions for one in late.runs) == 0


def test_a_run_before_the_period_is_left_out_also_if_nobody_ended_it(ledger, home):
    ledger.set_run("demo-1", state="running", ended_at_s=None)
    assert account(ledger, home, since_s=EPOCH_S + 5_000).runs == ()


def test_a_journal_that_is_damaged_or_elsewhere_hides_no_other_run(ledger, home):
    steps = RunPaths(home, "demo-1").steps
    steps.write_bytes(b"garbage\n" + steps.read_bytes())
    RunPaths(home, "demo-2").steps.unlink()
    ledger.set_attempt("demo-2", 1, last_step=33)
    period = account(ledger, home)
    found = {one.run.run_id: one for one in period.runs}
    assert "is not a step record" in found["demo-1"].why_unknown
    assert found["demo-2"].why_unknown == "the journal of steps is on node-17"
    assert [one.ettr for one in found.values()] == [None, None]
    assert len(found["demo-1"].incidents) == 3
    assert "is unknown" in period_markdown(period)


def test_a_ledger_that_cannot_be_read_is_an_error(ledger, home, monkeypatch):
    def fail(*_, **__):
        raise LedgerError("The ledger cannot be read. Try again.")

    monkeypatch.setattr(Ledger, "incidents", fail)
    with pytest.raises(LedgerError):
        account(ledger, home)


# The report


def test_both_forms_hold_the_same_cells(ledger, home):
    ledger.cordon("n1", at_s=EPOCH_S + 5, by="ada", why="wrong sums")
    ledger.add_evaluation(
        EvaluationRecord(evaluation_id="e-1", suite="mine", model="m", family="f", state="done",
                         started_at_s=EPOCH_S + 6, folder="/x", engines=1, nodes=1, makespan_s=61.0)
    )  # fmt: skip
    period = account(ledger, home)
    text, page = period_markdown(period), period_html(period)
    rendered = MarkdownIt("commonmark").enable("table").render(text)
    for said in (
        "demo-1",
        "demo-2",
        "killed from outside",
        "n1",
        "wrong sums",
        "e-1",
        "4 incidents",
        "steps that survive",
    ):
        assert said in text
        assert said in rendered
        assert said in page
    assert text.count("\n## ") == page.count("<h2>") == 6
    assert "3 recovered without a person" in text


def test_text_of_logs_and_names_is_no_markup(ledger, home):
    ledger.set_run("demo-2", outcome=EVIL, state="failed")
    ledger.cordon(EVIL, at_s=EPOCH_S + 5, by=EVIL, why=EVIL)
    ledger.set_incident(
        1, diagnosis=sample_runs.diagnosis(EVIL, EVIL, [("f", 1, EVIL, "root")]), explanation=EVIL
    )
    period = account(ledger, home)
    rendered = (
        MarkdownIt("commonmark", {"html": True}).enable("table").render(period_markdown(period))
    )
    for page in (rendered, period_html(period)):
        assert "<script" not in page
        assert "<img" not in page
        assert "<a " not in page
        assert "\x1b" not in page
    rows = [line for line in period_markdown(period).splitlines() if line.startswith("| demo-2")]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 9, "as many cells as columns"


def test_a_long_table_says_how_much_it_leaves_out(ledger, home):
    for number in range(35):
        ledger.cordon(f"n{number:02d}", at_s=EPOCH_S + 5, by="ada", why="hot")
    text = period_markdown(account(ledger, home))
    assert "5 more are left out." in text
    assert "n29" in text
    assert "n30" not in text


def test_a_period_without_runs_is_said(ledger, home):
    text = period_markdown(account(ledger, home, since_s=EPOCH_S - 20, until_s=EPOCH_S - 10))
    assert "No run was going on." in text
