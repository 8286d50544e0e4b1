"""Set up all tests."""

import contextlib
import gc
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import json_schemas

# Packages of the benchmarks that tests use as well, such as the failure laboratory.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

# Hypothesis would time each example, and a machine that is busy is no fault.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("holdfast")

# Tests may run in a pod, or beside a person's cluster: none of them may change anything there.
for variable in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG", "JOB_COMPLETION_INDEX"):
    os.environ.pop(variable, None)

# A shell starts what goes on in the background, and nohup its command, with Ctrl-C ignored, and children inherit that:
# tests that press it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Several tests run at once on few cores: a pool of threads in each process only adds waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In front of what is there: a process that a test starts with a PYTHONPATH of its own goes without it.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Where nothing answers, a question to Hugging Face's Hub is asked again for 23 s. Its libraries read this when they
# are imported, by whichever test comes first.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

LONGEST = {
    "test_demo.py",
    "test_many_nodes.py",
    "test_runs_that_hang.py",
    "test_runs_with_checkpoints.py",
    "test_supervised_runs.py",
    "test_unmodified_scripts.py",
}
"""Files of a minute or more that would come last in the order of folders."""


def pytest_collection_modifyitems(items):
    """Put the longest files first: at the end the other workers would wait for the one that runs such a file."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    """Leave all objects of this moment out of later searches for cycles: they stay to the end."""
    gc.freeze()


@pytest.fixture(autouse=True)
def answers_follow_their_schemas(monkeypatch):
    """Check each JSON answer that a command prints in this process against its published schema."""
    from holdfast.cli import output

    named = output._named
    monkeypatch.setattr(output, "_named", lambda *parts: json_schemas.check(named(*parts)))


@pytest.fixture
def small_disk(tmp_path, request):
    """A real file system of 3 MiB, or of the size that is the parameter."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small-disk"
    folder.mkdir()
    size = getattr(request, "param", "3m")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def fill():
    """A function that appends to a file until its disk is full."""

    def pour(file):
        while True:
            file.write(b"x" * 4096)

    def write(path):
        with path.open("ab", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            pour(file)

    return write


@pytest.fixture(params=["v1", "v2"])
def limited_group(request):
    """A function that makes a real control group of a memory limit, and runs commands two groups below it."""
    if os.geteuid() != 0:
        pytest.skip("making control groups needs root")
    made = []

    def make(limit_bytes):
        made.append(LimitedGroup(request.param, limit_bytes))
        return made[-1]

    yield make
    for group in made:
        group.remove()


class LimitedGroup:
    """`run` starts a command in a group without a limit of its own, two groups below one that has it."""

    def __init__(self, version, limit_bytes):
        parent = _parent_v1() if version == "v1" else _parent_v2()
        self._folder = parent / f"holdfast-test-{secrets.token_hex(4)}"
        self._inner = self._folder / "job" / "step"
        for folder in (self._folder, self._folder / "job", self._inner):
            folder.mkdir()
            if version == "v2" and folder != self._inner:
                (folder / "cgroup.subtree_control").write_text("+memory")
        limit = "memory.limit_in_bytes" if version == "v1" else "memory.max"
        (self._folder / limit).write_text(str(limit_bytes))

    def run(self, command, **options):
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', self._inner / "cgroup.procs", *command]
        return subprocess.run(enter, capture_output=True, text=True, check=False, **options)

    def remove(self):
        until_s = time.monotonic() + 60
        for folder in (self._inner, self._inner.parent, self._folder):
            while True:
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                try:
                    folder.rmdir()
                    break
                except OSError:  # a process has not ended yet
                    assert time.monotonic() < until_s, f"{folder} is still in use"
                    time.sleep(0.01)


def _parent_v1():
    """This process's own group, so that what its children take counts there."""
    of = {
        line.split(":")[1]: line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
    }
    for mount in _mounts("cgroup"):
        if (mount / "memory.limit_in_bytes").exists() and os.access(mount, os.W_OK):
            own = mount / of.get("memory", "/")[1:]
            return own if own.is_dir() else mount
    pytest.skip("no writable mount of the memory controller of version 1")


def _parent_v2():
    for mount in _mounts("cgroup2"):
        with contextlib.suppress(OSError):
            if "memory" in (mount / "cgroup.controllers").read_text().split():
                (mount / "cgroup.subtree_control").write_text("+memory")
                return mount
    pytest.skip(
        "no writable mount of the memory controller of version 2, whose root may have limited groups"
    )


def _mounts(kind):
    lines = map(str.split, Path("/proc/self/mounts").read_text().splitlines())
    return [Path(point) for _source, point, its_kind, *_ in lines if its_kind == kind]
