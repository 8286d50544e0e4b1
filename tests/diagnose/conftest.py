"""What several tests of the diagnosis share: labelled cases, a plain user, and a measure of memory."""

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
    """The labels of the labelled cases, with the paths of their logs as `clean` and `noisy`."""
    if not DEV.is_dir():
        pytest.skip("the labelled cases lie beside the repository of the project's makers")
    labels = [json.loads(line) for line in (DEV / "labels.jsonl").read_text().splitlines()]
    return [
        {**one, **{kind: DEV / kind / f"{one['id']}.log" for kind in ("clean", "noisy")}}
        for one in labels
    ]


@pytest.fixture(scope="session")
def dev_answers(dev_cases):
    """Of each kind of log: the labels of every case, and what `diagnose` says of it."""
    return {
        kind: [(case, diagnose(case[kind])) for case in dev_cases] for kind in ("clean", "noisy")
    }


@pytest.fixture
def public_folder():
    """A folder that every user may enter; pytest's own is its owner's alone."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def _as_plain_user():
    """Without root's right to read everything."""
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
    """A context in which the permissions of files count, whoever runs the tests."""
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
    """Diagnose in a process of its own: reason, number of notes, and MiB by which it grew."""

    def measure(*paths, limit_s=60):
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, *map(str, paths)],
            capture_output=True, text=True, check=True, timeout=limit_s,
        )  # fmt: skip
        reason, notes, grown_mib = done.stdout.split()
        return reason, int(notes), int(grown_mib)

    return measure
