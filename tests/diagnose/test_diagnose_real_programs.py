"""Test the real output of Python programs that fail."""

import os
import subprocess
import sys

import pytest

from holdfast.diagnose import diagnose

PROGRAMS = {
    "key": ("config = {}\nconfig['missing']\n", "KeyError"),
    "syntax": ("def f(:\n    pass\n", "SyntaxError"),
    "indent": ("def f():\npass\n", "SyntaxError"),
    "import": ("import no_such_module_at_all\n", "ImportError"),
    "own": (
        "class DataBad(Exception):\n    pass\n\nraise DataBad('shard 7 is corrupt')\n",
        "Others",
    ),
    "argparse": (
        "import argparse\nargparse.ArgumentParser().parse_args(['--lrr', '3'])\n",
        "ArgumentError",
    ),
    "file": ("open('/no/such/file')\n", "FileNotFoundError"),
    "called": ("import subprocess\nsubprocess.run(['false'], check=True)\n", "CalledProcessError"),
    "assert": ("assert 1 == 2, 'loss is nan'\n", "AssertionError"),
    "zero": ("try:\n    {}['a']\nexcept KeyError:\n    1 / 0\n", "ZeroDivisionError"),
    "cause": (
        "try:\n    {}['a']\nexcept KeyError as e:\n    raise RuntimeError('wrapped') from e\n",
        "KeyError",
    ),
    "memory": ("bytearray(10**16)\n", "OutOfMemoryError"),
    "deep": ("def f():\n    f()\nf()\n", "RuntimeError"),
    "thread": ("import threading\nthreading.Thread(target=lambda: [][3]).start()\n", "IndexError"),
}


def run_and_diagnose(log, *arguments):
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with log.open("wb") as file:
        subprocess.run(
            [sys.executable, *arguments],
            stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=240, check=False,
        )  # fmt: skip
    return diagnose(log)


@pytest.mark.parametrize("name", PROGRAMS)
def test_failing_program(tmp_path, name):
    source, reason = PROGRAMS[name]
    script = tmp_path / "train.py"
    script.write_text(source)
    found = run_and_diagnose(tmp_path / "rank-0.log", str(script))
    assert (found.reason, found.action != "restart", found.restart_helps) == (reason, True, False)
    assert found.root_line is not None
    assert (tmp_path / "rank-0.log").read_text().splitlines()[
        found.root_line.line - 1
    ].strip() == found.root_line.text


def test_missing_script(tmp_path):
    found = run_and_diagnose(tmp_path / "rank-0.log", str(tmp_path / "no_such.py"))
    assert (found.reason, found.decided_by, found.restart_helps) == (
        "FileNotFoundError",
        ("script-missing",),
        False,
    )


def test_segmentation_fault_with_the_fault_handler(tmp_path):
    found = run_and_diagnose(
        tmp_path / "rank-0.log", "-X", "faulthandler", "-c", "import ctypes; ctypes.string_at(0)"
    )
    assert (found.reason, found.category, found.restart_helps) == ("Others", "Framework", True)


def test_a_program_that_says_nothing(tmp_path):
    found = run_and_diagnose(
        tmp_path / "rank-0.log", "-c", "import sys; print('hello'); sys.exit(3)"
    )
    assert (found.outcome, found.reason, found.action, found.root_line) == (
        "unknown",
        "Unknown",
        "none",
        None,
    )
    assert found.confidence == pytest.approx(0.2)
