"""Build tasks and agents for the tests of `holdfast.cluster`, and inspect their traces."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from holdfast.cluster import Finished, Placement, Task

# Writes its result through a rename, as a task must.
_WRITE = "import os, sys; open(sys.argv[1] + '.tmp', 'w').write('done'); os.rename(sys.argv[1] + '.tmp', sys.argv[1])"


def python_task(folder: Path, name: str, before: str = "") -> Task:
    """Return a task that runs `before` and then writes its result."""
    result = folder / f"{name}.result"
    return Task(
        name=name, command=(sys.executable, "-c", f"{before}\n{_WRITE}", str(result)), result=result
    )


def sleeping_task(folder: Path, name: str, *, seconds: float = 600) -> Task:
    """Return a task that records its pid and a child's pid, and then sleeps.

    The child has a session of its own.
    """
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
    """Wait until a sleeping task has recorded its pids, and return them."""
    note = folder / f"{name}.pids"
    await_true(lambda: note.exists() and note.read_text().endswith("\n"))
    return [int(pid) for pid in note.read_text().split()]


def agent_command(folder: Path) -> list[str]:
    """Return the command of an agent that records pids and SECRET, and then sleeps.

    The pids are the agent's and a child's, which has its own session. The record is
    FOLDER/agent-INDEX.pids. If the file FOLDER/end-INDEX exists, the agent exits with the code
    in that file.
    """
    script = (
        "import os, pathlib, subprocess, sys, time\n"
        f"folder, index = pathlib.Path({str(folder)!r}), os.environ['HOLDFAST_PLACE']\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "note = folder / f'agent-{index}.pids'\n"
        "note.with_suffix('.new').write_text(f\"{os.getpid()} {child.pid} {os.environ['SECRET']}\\n\")\n"
        "note.with_suffix('.new').rename(note)\n"
        "print('agent', index, 'is here', flush=True)\n"
        "while not (end := folder / f'end-{index}').exists(): time.sleep(0.05)\n"
        "sys.exit(int(end.read_text()))"
    )
    return [sys.executable, "-c", script]


def agent_note(folder: Path, index: int) -> tuple[list[int], str]:
    """Wait for an agent's record; return the pids and the SECRET, and delete the record."""
    note = folder / f"agent-{index}.pids"
    await_true(note.exists)
    pid, child, secret = note.read_text().split()
    note.unlink()
    return [int(pid), int(child)], secret


# Places an agent that may linger for long. The agent records its pid, and ends a moment after this
# process, with a second record.
OWNER_THAT_LINGERS = """
import os, sys
from pathlib import Path
from holdfast.cluster import places
folder = Path(sys.argv[1])
agent = '''
import os, pathlib, time
folder, owner = pathlib.Path(os.environ["FOLDER"]), pathlib.Path("/proc", os.environ["OWNER"])
(folder / "pid").write_text(str(os.getpid()))
while owner.exists():
    time.sleep(0.05)
time.sleep(0.3)
(folder / "ended").touch()
'''
environment = {"FOLDER": str(folder), "OWNER": str(os.getpid())}
placed = places(sys.argv[2], nodes=1, linger_s=3600.0).start(
    [sys.executable, "-c", agent], environment=environment, folder=folder / "f"
)
sys.stdin.read()
placed.stop()
"""


def states(placement: Placement) -> list[tuple[str, int | None]]:
    """Return the state and exit code of each place."""
    return [(place.state, place.exit_code) for place in placement.poll()]


def is_on_a_command_line(secret: str) -> bool:
    """Return True if a secret is on the command line of any process of this machine."""
    for process in psutil.process_iter():
        try:
            if any(secret in word for word in process.cmdline()):
                return True
        except psutil.Error:
            continue
    return False


def is_in_a_file(secret: str, folder: Path) -> bool:
    """Return True if any file below a folder contains a secret."""
    return any(secret.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def none_lives(pids: Iterable[int]) -> bool:
    """Return True if all these processes have ended; a zombie counts as ended."""

    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(lives(pid) for pid in pids)


def await_true(condition: Callable[[], bool], *, timeout_s: float = 240) -> None:
    """Wait until another process has made a condition true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true"
        time.sleep(0.02)


def exit_codes(finished: Iterable[Finished]) -> dict[str, int]:
    return {each.task.name: each.exit_code for each in finished}


@contextmanager
def started(argv: list[str], **options) -> Iterator[subprocess.Popen]:
    """Start a process, and kill the process at the end of the block, even if the test fails."""
    with subprocess.Popen(argv, **options) as process:
        try:
            yield process
        finally:
            process.kill()
