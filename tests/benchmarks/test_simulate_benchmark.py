"""The tables from the simulator's benchmark: the package's times, and docs/simulation.md."""

import importlib
import json
import tomllib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulating(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: importlib.import_module(f"simulating.{name}")


def test_each_measured_time_of_the_package_comes_from_a_result(simulating):
    times = simulating("packaged_times")
    before = times.TABLE.read_text("utf-8")
    found = times.measured(times.RESULTS)
    assert set(found) == set(tomllib.loads(before)["measured"])
    after = times.rewritten(before, found)
    assert times.rewritten(after, found) == after
    assert tomllib.loads(after)["assumed"] == tomllib.loads(before)["assumed"]
    assert tomllib.loads(times.rewritten(before, {"exit_s": 0.5}))["measured"]["exit_s"] == 0.5


def test_tables_of_the_page_are_those_of_the_results(simulating):
    story = simulating("story")
    rows = json.loads(story.RESULTS.read_text())
    page = story.PAGE.read_text("utf-8")
    assert story.rewritten(page, story.tables(rows)) == page, (
        "python benchmarks/simulating/story.py writes them"
    )
    with pytest.raises(ValueError, match="no marks of 'other'"):
        story.rewritten(page, {"other": ""})
