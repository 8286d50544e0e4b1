"""Start and end the jobs of a benchmark: no process outlives the benchmark."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from holdfast.core.processes import become_subreaper, kill_descendants

BIN = Path(sys.executable).parent
HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
WORKERS = Path(__file__).parents[1] / "workers"
POLL_S = 0.01


class DoesNotWork(Exception):
    """A measured program does not work at all; the benchmark ends with code 1."""


def adopt_orphans() -> None:
    """Keep orphans below this process, and clean up at SIGTERM.

    Call this once, first. Orphaned descendants then become children of this process.
    """
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))


@contextmanager
def job(
    command: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in `folder`; in the end kill it and every process below this one.

    The output goes to `folder/output.txt`. The Holdfast home is `folder/.holdfast`. Jobs run one at
    a time, or nested in one function that ends them together.
    """
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Linux shares a busy machine out among sessions (autogroups), and torchrun gives each
            # worker one of its own: ranks that we start ourselves would get half as much, and seem
            # up to 1.5 times as slow.
            start_new_session=True,
            env={
                **os.environ,
                "HOLDFAST_HOME": str(folder / ".holdfast"),
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            },
        )
    try:
        yield process
    finally:
        kill_descendants()
        process.wait()
        _reap_adopted()


def _reap_adopted() -> None:
    for child in psutil.Process().children():
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue


def wait_until(holds: Callable[[], bool], *, timeout_s: float) -> bool:
    """Poll until `holds` returns true; return False after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def last_words(folder: Path, lines: int = 15) -> str:
    """Return the end of a job's output, for an error message."""
    output = folder / "output.txt"
    text = output.read_text(errors="replace") if output.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
