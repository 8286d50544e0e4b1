"""Check docs/comparison.md: each figure is the one that a benchmark has recorded."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/comparison.md").read_text()
AREAS = 6
"""The tables of the page: restarts, checkpoints, diagnosis, evaluations, traces, simulations."""


def rows_of(page):
    """Return the cells of each row of a page's tables."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "measure" and not row[0].startswith("---")]


def recorded(record):
    """Return ours and the peer's figure of a record, which is named by its file and its measure."""
    file, _, measure = record.partition(": ")
    path = ROOT / "benchmarks/results" / f"{file.strip('`')}.json"
    found = [row for row in json.loads(path.read_text()) if row["measure"].strip() == measure]
    assert len(found) == 1, record
    return found[0]["ours"], found[0]["peer"]


def differs(row):
    """Return True if a row shows other figures than its record, at the digits that the row shows."""
    _, ours, peer, _, record = row
    digits = [len(shown.partition(".")[2]) for shown in (ours, peer)]
    expected = [f"{value:.{n}f}" for value, n in zip(recorded(record), digits, strict=True)]
    return [ours, peer] != expected


@pytest.mark.parametrize("row", rows_of(PAGE), ids=lambda row: row[-1])
def test_figures_are_the_recorded_ones(row):
    assert not differs(row)


def test_a_figure_that_is_not_the_recorded_one_is_found():
    row = rows_of(PAGE)[0]
    for column in (1, 2):
        changed = [*row[:column], "9" + row[column], *row[column + 1 :]]
        assert differs(changed)


def test_every_area_is_compared():
    assert PAGE.count("\n| measure | Holdfast | other | other program | record |\n") == AREAS
    assert len(rows_of(PAGE)) > 5 * AREAS
