"""Commands for the tests: tasks that write their result as `holdfast.cluster` asks, and agents; what they leave."""

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
    """A task that runs `before` and then writes its result."""
    result = folder / f"{name}.result"
    return Task(
        name=name, command=(sys.executable, "-c", f"{before}\n{_WRITE}", str(result)), result=result
    )


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


def agent_command(folder: Path) -> list[str]:
    """An agent: notes its pid, that of a child in a session of its own and its SECRET, says so, and sleeps.

    The note is FOLDER/agent-INDEX.pids. With the file FOLDER/end-INDEX, holding an exit code, it ends instead.
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
    """The pids that an agent noted, once it has, and its SECRET; the note is gone afterwards."""
    note = folder / f"agent-{index}.pids"
    await_true(note.exists)
    pid, child, secret = note.read_text().split()
    note.unlink()
    return [int(pid), int(child)], secret


# Places an agent that may linger for long: it notes its pid, and ends a moment after this process has, with a note.
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
    """State and exit code of each place."""
    return [(place.state, place.exit_code) for place in placement.poll()]


def is_on_a_command_line(secret: str) -> bool:
    """Whether any process of this machine shows it to everybody."""
    for process in psutil.process_iter():
        try:
            if any(secret in word for word in process.cmdline()):
                return True
        except psutil.Error:
            continue
    return False


def is_in_a_file(secret: str, folder: Path) -> bool:
    """Whether any file under the folder holds it."""
    return any(secret.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def none_lives(pids: Iterable[int]) -> bool:
    """Whether all these processes have ended; one that nobody reaps counts as ended."""

    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(lives(pid) for pid in pids)


def await_true(condition: Callable[[], bool], *, timeout_s: float = 240) -> None:
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
