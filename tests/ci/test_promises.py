"""Check that each test that docs/promises.md and docs/security.md name exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("promises", "security")
NAMED = re.compile(r"`(tests/[^`]*)`")
AREAS = {
    "Checkpoints",
    "Recovery",
    "Records",
    "Diagnosis",
    "Evaluation",
    "Traces",
    "Simulation",
    "The console",
}
PROMISES_LEAST = 20


@cache
def names_in(file):
    """Return the names of the tests that pytest collects from a file."""
    if not file.is_file() or not file.name.startswith("test_"):
        return frozenset()
    body = ast.parse(file.read_text()).body
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name for node in body if isinstance(node, functions) and node.name.startswith("test_")
    )


def absent(text):
    """Return the tests that a text names and that do not exist."""
    names = [name.partition("::") for name in NAMED.findall(text)]
    return [f"{file}::{test}" for file, _, test in names if test not in names_in(ROOT / file)]


def page(name):
    return (ROOT / f"docs/{name}.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_every_named_test_exists(name):
    assert NAMED.search(page(name))
    assert absent(page(name)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("::test_a_kill", "::test_no_kill"),
        ("tests/checkpoint/test_crashes", "tests/checkpoint/test_no_crashes"),
        ("::test_a_kill_at_any_instant_leaves_a_whole_checkpoint`", "`"),
        ("test_crashes.py::test_a_kill_at_any_instant_leaves_a_whole_checkpoint",
         "killed_saver.py::state_of"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_found(old, new):
    right = next(line for line in page("promises").splitlines() if "test_crashes.py" in line)
    assert absent(right) == []
    assert old in right
    assert absent(right.replace(old, new)) != []


def test_every_promise_names_its_test():
    text = page("promises")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "proved by" not in line]
    assert len(rows) >= PROMISES_LEAST
    assert [row for row in rows if not NAMED.search(row)] == []
    assert set(re.findall(r"^## (.*)$", text, re.MULTILINE)) == AREAS
