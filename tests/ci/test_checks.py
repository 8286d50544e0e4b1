"""`make ci` runs failed checks once more: real make, real pytest, in a small project made for the purpose."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parents[2] / ".ci/checks.py"

MAKEFILE = """
good:
	@echo good output
bad:
	@echo bad output; exit 3
holds:
	@echo held output; setsid sleep 120 & echo $$! > held; sleep 60
shaky:
	@mkdir made-once || exit 0; echo first try; exit 1
"""
TESTS = """
import os, pathlib, threading, pytest

def first_time(name):
    path = pathlib.Path(name)
    existed = path.exists()
    path.touch()
    return not existed

def test_good(): pass
def test_bad(): assert False
def test_shaky(): assert not first_time("shaky")
@pytest.mark.timeout(60 if pathlib.Path("hangs").exists() else 3)
def test_hangs_once():
    if first_time("hangs"): threading.Event().wait()
def test_kills_its_worker_once():
    if first_time("dies"): os._exit(1)
@pytest.mark.parametrize("name", ["a::b[c]"])
def test_is_skipped_then(name):
    if not first_time("skipped"): pytest.skip("not again")
    assert False
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 60\ntimeout_method = thread\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def check(project, *arguments):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MAKE"))
    }
    environment["PYTEST_ADDOPTS"] = "-p no:kmock"  # see pyproject.toml
    return subprocess.run(
        [sys.executable, str(CHECKS), *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def names_under(title, output):
    _, found, after = output.partition(f"\n{title}")
    return (
        [line.strip() for line in after.splitlines()[1:] if line.startswith("  ")] if found else []
    )


def test_what_fails_once_is_flaky_and_green(project):
    done = check(
        project,
        "--once",
        "good",
        "--again",
        "shaky",
        "--",
        "-k",
        "not bad and not skipped",
        "--numprocesses",
        "1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = ("shaky", "hangs_once", "kills_its_worker_once")
    assert sorted(names_under("Flaky", done.stdout)) == sorted(
        ["shaky", *(f"test_it.py::test_{name}" for name in names)]
    )
    assert "Red" not in done.stdout
    assert "good output" in done.stdout
    assert "first try" in done.stdout


def test_what_fails_twice_or_does_not_run_in_the_second_try_is_red(project):
    done = check(project, "--again", "bad", "good", "--", "-k", "bad or shaky or skipped")
    assert done.returncode == 1
    red = ["bad", "test_it.py::test_bad", "test_it.py::test_is_skipped_then[a::b[c]]"]
    assert sorted(names_under("Red", done.stdout)) == red
    assert names_under("Flaky", done.stdout.partition("\nRed")[0]) == ["test_it.py::test_shaky"]
    assert done.stdout.count("bad output") == 2


def test_a_target_is_ended_at_its_limit_whatever_holds_its_output(project):
    done = check(project, "--once", "holds", "--limit-s", "10")
    os.kill(int((project / "held").read_text()), signal.SIGKILL)
    assert done.returncode == 1
    assert "held output" in done.stdout
    assert names_under("Red", done.stdout) == ["holds"]


def test_lint_is_not_tried_again(project):
    done = check(project, "--once", "shaky")
    assert done.returncode == 1
    assert done.stdout.count("first try") == 1
    assert names_under("Red", done.stdout) == ["shaky"]


@pytest.mark.parametrize("arguments", [["-k", "no_such_test"], ["no_such_file.py"]])
def test_a_run_that_tested_nothing_is_red(project, arguments):
    done = check(project, "--", *arguments)
    assert done.returncode == 1
    assert "pytest ended with exit code" in names_under("Red", done.stdout)[0]
