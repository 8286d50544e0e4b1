"""Define shared fixtures: labelled cases, an unprivileged user and a measure of memory."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.diagnose import diagnose

DEV = Path(__file__).parents[3] / "shared" / "data" / "diagnosis_dev"


@pytest.fixture(scope="session")
def dev_cases():
    """Return the labels of the cases, with the paths of their logs as `clean` and `noisy`."""
    if not DEV.is_dir():
        pytest.skip("the labelled cases lie beside the repository of the project's makers")
    labels = [json.loads(line) for line in (DEV / "labels.jsonl").read_text().splitlines()]
    return [
        {**one, **{kind: DEV / kind / f"{one['id']}.log" for kind in ("clean", "noisy")}}
        for one in labels
    ]


@pytest.fixture(scope="session")
def dev_answers(dev_cases):
    """Return for each kind of log the labels of each case and its diagnosis."""
    return {
        kind: [(case, diagnose(case[kind])) for case in dev_cases] for kind in ("clean", "noisy")
    }


@pytest.fixture
def public_folder():
    """Make a folder that all users may enter; pytest's own folder is private."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def _as_plain_user():
    """Drop root's privilege to read all files."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def as_plain_user():
    """Return a context in which file permissions apply, even if root runs the tests."""
    return _as_plain_user


_MEASURE = """
import resource, sys
from holdfast.diagnose import diagnose
from holdfast.diagnose.rules.packaged import packaged_rules
packaged_rules()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = diagnose(sys.argv[1:])
print(found.reason, len(found.notes), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.fixture
def measured():
    """Diagnose in a separate process; return the reason, the number of notes, and MiB of growth."""

    def measure(*paths, limit_s=60):
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, *map(str, paths)],
            capture_output=True, text=True, check=True, timeout=limit_s,
        )  # fmt: skip
        reason, notes, grown_mib = done.stdout.split()
        return reason, int(notes), int(grown_mib)

    return measure
