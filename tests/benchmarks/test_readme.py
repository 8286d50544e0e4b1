"""Check README.md: each figure of its first table is a recorded one, and its code runs as printed."""

import ast
import json
import re
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FIRST_KILL = "cold SIGKILL → first new step, median"
WARM_KILL = "warm SIGKILL → first new step, median"
SIX_KILLS = "6 kills in 600 steps: wall time, median"
ONE_PROCESS = "real: 60 tasks, {} (peer: one stock process for all)"


def recorded(name, measure):
    """Return ours and the peer's figure of the measure that begins with these words."""
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return next((row["ours"], row["peer"]) for row in rows if row["measure"].startswith(measure))


def shown(first_words):
    """Return the first two figures of a row of the table."""
    row = next(line for line in README.splitlines() if line.startswith(f"| {first_words}"))
    return [re.search(r"[\d.]+", cell)[0] for cell in row.split("|")[2:4]]


@pytest.mark.parametrize(
    ("row", "name", "measure", "digits"),
    [
        ("a rank is killed: the first new step, warm", "recover", WARM_KILL, (2, 1)),
        ("the same, right after the start", "recover", FIRST_KILL, (1, 1)),
        ("600 steps with 6 kills", "recover", SIX_KILLS, (0, 0)),
        ("60 evaluation tasks, the first checkpoint", "evaluate", ONE_PROCESS.format("cold"), (1, 1)),
        ("the same, the next checkpoint", "evaluate", ONE_PROCESS.format("warm"), (1, 1)),
    ],
)  # fmt: skip
def test_times_are_the_recorded_ones(row, name, measure, digits):
    figures = recorded(name, measure)
    assert shown(row) == [f"{figure:.{n}f}" for figure, n in zip(figures, digits, strict=True)]


@pytest.mark.parametrize(
    ("row", "noise"),
    [("the reason of 26 failures, from clean logs", "clean"), ("the same among routine", "noisy")],
)
def test_diagnoses_are_the_recorded_ones(row, noise):
    shares = recorded("diagnosis", f"dev: reason, {noise} (26 of 26)")
    assert shown(row) == [f"{share * 26:.0f}" for share in shares]


def test_two_hundred_kills_left_the_weights_identical():
    assert "After 200 kills at random instants a run ended with identical weights" in README
    assert recorded("chaos", "instants: faults that took effect")[0] == 200
    assert recorded("chaos", "instants: ends bit-identical")[0] == 1
    assert recorded("chaos", "instants: times that a person was needed")[0] == 0


def test_the_first_screen_says_what_it_cannot_do_and_has_a_picture():
    first = README[: README.index("## See it")]
    assert "**What it cannot do.**" in first
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", first)
    assert (ROOT / picture).exists()


def test_the_code_names_only_what_it_imports():
    """The three lines of Holdfast use names that the block itself binds."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    tree = ast.parse(block)
    imported = {
        name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names
    }
    assert imported == {"holdfast"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "holdfast"
    }
    assert used == {"attach", "Checkpointer"} <= set(holdfast.__all__)


def test_every_install_line_works_from_a_clone():
    lines = re.findall(r"^pip install (\S+)", README, re.MULTILINE)
    extras = (ROOT / "pyproject.toml").read_text()
    assert lines
    for line in lines:
        name = re.fullmatch(r"'\.\[(\w+)\]'", line)[1]
        assert re.search(rf"^{name} = \[", extras, re.MULTILINE)
