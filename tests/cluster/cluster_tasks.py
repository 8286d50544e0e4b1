"""Tasks for the tests: small commands that write their result as `holdfast.cluster` asks, and what they leave."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from holdfast.cluster import Finished, Task

# Writes its result through a rename, as a task must.
_WRITE = "import os, sys; open(sys.argv[1] + '.tmp', 'w').write('done'); os.rename(sys.argv[1] + '.tmp', sys.argv[1])"


def python_task(folder: Path, name: str, before: str = "") -> Task:
    """A task that runs `before` and then writes its result."""
    result = folder / f"{name}.result"
    return Task(name=name, command=(sys.executable, "-c", f"{before}\n{_WRITE}", str(result)), result=result)


def sleeping_task(folder: Path, name: str, *, seconds: float = 600) -> Task:
    """A task that notes its own pid and that of a child in a session of its own, and then sleeps."""
    note = folder / f"{name}.pids"
    return python_task(
        folder,
        name,
        "import os, subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '{seconds}'], start_new_session=True)\n"
        f"with open({str(note)!r}, 'w') as file: file.write(f'{{os.getpid()}} {{child.pid}}\\n')\n"
        f"time.sleep({seconds})",
    )


def noted_pids(folder: Path, name: str) -> list[int]:
    """The pids that a sleeping task noted, once it has."""
    note = folder / f"{name}.pids"
    await_true(lambda: note.exists() and note.read_text().endswith("\n"))
    return [int(pid) for pid in note.read_text().split()]


def none_lives(pids: Iterable[int]) -> bool:
    """Whether all these processes have ended; one that nobody reaps counts as ended."""

    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(lives(pid) for pid in pids)


def await_true(condition: Callable[[], bool], *, timeout_s: float = 60) -> None:
    """Wait for something that another process does."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true"
        time.sleep(0.02)


def exit_codes(finished: Iterable[Finished]) -> dict[str, int]:
    return {each.task.name: each.exit_code for each in finished}


@contextmanager
def started(argv: list[str], **options) -> Iterator[subprocess.Popen]:
    """A process that is gone on leaving, also when the test failed in between."""
    with subprocess.Popen(argv, **options) as process:
        try:
            yield process
        finally:
            process.kill()
