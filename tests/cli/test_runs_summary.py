"""`holdfast runs summary`: the period, the forms, and the files."""

import json

import pytest
from click.testing import CliRunner

from holdfast.cli.main import cli
from holdfast.cli.runs import begin_of
from holdfast.core.errors import BadUse
from holdfast.core.ledger import Attempt, Ledger, Run
from holdfast.core.paths import ledger_url

NOW_S = 1_790_000_000.0


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.setattr("holdfast.core.clock.time.time", lambda: NOW_S)
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        for name, days in (("new", 1), ("old", 10)):
            start_s = NOW_S - days * 86400
            ledger.add_run(
                Run(run_id=name, state="completed", command=["x"], options={"nproc": 4}, cwd="/", host="h", pid=1,
                    started_at_s=start_s, ended_at_s=start_s + 3600.0)
            )  # fmt: skip
            ledger.add_attempt(Attempt(run_id=name, number=1, started_at_s=start_s))
    return tmp_path


def answer(*arguments):
    result = CliRunner().invoke(cli, ["runs", "summary", *arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_last_week_is_the_default(home):
    text = answer()
    assert "1 run, 4 GPU-hours" in text
    assert "| new |" in text
    assert "| old |" not in text
    assert "| old |" in answer("--since", "2w")


def test_the_name_of_the_file_chooses_the_form(home):
    page, text = home / "reports" / "week.html", home / "week.md"
    assert answer("-o", str(page)) == f"{page}\n"
    assert page.read_text().startswith("<!DOCTYPE html>")
    answer("-o", str(text))
    assert text.read_text() == answer()


def test_programs_get_one_object(home):
    fields = json.loads(answer("--json"))
    assert (fields["schema"], fields["version"], fields["path"]) == ("holdfast.summary", 1, None)
    assert [one["id"] for one in fields["runs"]] == ["new"]
    assert fields["gpu_hours"] == pytest.approx(4.0)
    assert fields["incidents"] == []


@pytest.mark.parametrize(
    ("since", "begin_s"),
    [("7d", NOW_S - 604_800), ("12h", NOW_S - 43_200), ("2w", NOW_S - 1_209_600),
     ("2026-09-20", 1_789_862_400.0), ("2026-09-20T02:00:00+02:00", 1_789_862_400.0)],
)  # fmt: skip
def test_ages_and_dates_are_read(since, begin_s):
    assert begin_of(since, NOW_S) == begin_s


@pytest.mark.parametrize(
    "since", ["", "d", "0d", "-1d", "7", "1e3d", "99999d", "²d", "soon", "2027-01-01"]
)
def test_another_begin_is_refused_with_the_next_step(since):
    with pytest.raises(BadUse, match="Give "):
        begin_of(since, NOW_S)
