"""Processes: whose they are, how they begin and end. Exits said in words, trees killed, children tied to their parents.

Linux's prctl is used where it is there; elsewhere those calls do nothing and the guard's sweep is what remains.
"""

import atexit
import contextlib
import ctypes
import gc
import getpass
import os
import signal
import site
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
_LOOKS_BETWEEN_REQUESTS = 20
"""Attempts to read two counts between which no rank polls the store."""


def whoami() -> str:
    """Return the name of the user of this process, `unknown` where the system has none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user in this container
        return "unknown"


def module_command(module: str) -> tuple[list[str], dict[str, str]]:
    """What runs a module of this package in a process of its own: the first words of the command, and the environment.

    Files of the working directory are not taken for modules of the standard library, and the package is found where
    this process found it, also if that was by `sys.path` alone.
    """
    found_in = str(Path(__file__).parents[2])
    environment = dict(os.environ)
    paths = environment.pop("PYTHONPATH", "").split(os.pathsep)
    installed_in = [*sysconfig.get_paths().values(), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        installed_in.append(site.getusersitepackages())
    if found_in not in installed_in:  # else it is found, and behind the standard library
        paths.append(found_in)
    if any(paths):
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, paths)
        )  # an empty one is the working directory
    return [sys.executable, "-P", "-m", module], environment


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends, however that ends.

    `parent_pid`: of the parent, where it is known; if that is gone already, this process ends now.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid not in (None, os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Adopt every descendant whose own parent ends, so that none can escape `kill_descendants`."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_without_collecting() -> None:
    """Skip the last garbage collection of this process at its exit.

    In a process that has imported torch and transformers, that collection takes a second.
    """
    atexit.register(gc.freeze)  # the collector skips frozen objects


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def kill_descendants(
    of_pid: int | None = None,
    *,
    timeout_s: float = 10.0,
    spared: str | None = None,
    spared_s: float = 0.0,
    left: str | None = None,
    but: int | None = None,
) -> None:
    """Send SIGKILL to the descendants of a process until none is left. SIGKILL also ends stopped processes.

    Args:
        of_pid: the process; None: this one.
        timeout_s: the longest wait for those that SIGKILL does not end at once.
        spared: a word of the command lines of processes that may end by themselves.
        spared_s: the time that these have for it.
        left: the name of those among the spared ones that are left alone.
        but: a process that is left alone with its own descendants.

    A process that is stuck in the kernel may survive: nobody can end it.
    """
    import psutil

    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < timeout_s + spared_s:
        # Listed anew each round: a process may fork between being seen and being killed.
        living = [
            child
            for child in _descendants(of_pid, but)
            if _status(child) not in (None, psutil.STATUS_ZOMBIE)
            and not _is_left(child, spared, left)
        ]
        if not living:
            return
        for child in living:
            try:
                if passed_s > spared_s or spared not in child.cmdline():
                    child.kill()
            except psutil.Error:  # it has ended, or belongs to another user
                continue
        # Not psutil's own wait: it would reap a child whose exit somebody else is waiting for.
        time.sleep(0.02)


def reap_orphans(*, but: int | None = None) -> None:
    """Wait for the children of this process that have ended, which are orphans that it has adopted; not for `but`."""
    import psutil

    for child in psutil.Process().children():
        if child.pid != but and _status(child) in (None, psutil.STATUS_ZOMBIE):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def _descendants(of_pid: int | None, but: int | None) -> list[Any]:
    import psutil

    found = psutil.Process(of_pid).children(recursive=True)
    left: set[int] = set()
    if but is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            left = {one.pid for one in psutil.Process(but).children(recursive=True)}
    return [one for one in found if one.pid != but and one.pid not in left]


def _is_left(process: object, spared: str | None, left: str | None) -> bool:
    import psutil

    assert isinstance(process, psutil.Process)
    try:
        return left is not None and process.name() == left and spared in process.cmdline()
    except psutil.NoSuchProcess:
        return True


def process_state(pid: int) -> str | None:
    """Return the kernel's state of a process by psutil's name ("stopped", "disk-sleep", …).

    The state is "hidden" where it may not be read, and None once the process is gone.
    """
    import psutil

    try:
        return _status(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return None
    except (psutil.Error, OSError):
        return "hidden"


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None if the process is hidden or gone."""
    import psutil

    try:
        return int(psutil.Process(pid).ppid())
    except (psutil.Error, OSError):
        return None


def activity(pids: Mapping[int, int]) -> dict[int, tuple[float, int] | None]:
    """Return what the process of each rank has used so far, with its descendants; None if that is hidden or gone.

    What they have used is CPU seconds, and a count of bytes that grows with each read and write. Descendants that ended
    are in their parents' numbers, as far as the parents waited for them.

    Args:
        pids: the process of each rank.
    """
    import psutil

    hidden = (psutil.Error, OSError)  # psutil leaves some errors of /proc as they are
    children: dict[int, list[psutil.Process]] = {}
    try:
        for process in psutil.process_iter():
            with contextlib.suppress(*hidden):
                children.setdefault(process.ppid(), []).append(process)
    except hidden:
        return dict.fromkeys(pids)
    return {rank: _activity(pid, children) for rank, pid in pids.items()}


def _activity(pid: int, children: Mapping[int, Sequence[object]]) -> tuple[float, int] | None:
    import psutil

    try:
        cpu_s, size_bytes = _used(psutil.Process(pid))
    except (psutil.Error, OSError):
        return None
    below = list(children.get(pid, ()))
    while below:
        one = below.pop()
        assert isinstance(one, psutil.Process)
        below += children.get(one.pid, ())
        with contextlib.suppress(psutil.Error, OSError):
            used_s, used_bytes = _used(one)
            cpu_s, size_bytes = cpu_s + used_s, size_bytes + used_bytes
    return cpu_s, size_bytes


def _used(process: object) -> tuple[float, int]:
    import psutil

    assert isinstance(process, psutil.Process)
    io_bytes = 0
    if hasattr(process, "io_counters"):  # not on macOS
        servers = _store_threads(process.pid)
        for _ in range(_LOOKS_BETWEEN_REQUESTS):
            served_bytes, io = _io_bytes(servers), process.io_counters()
            # A mapped file's pages are read without a call that reads.
            io_bytes = (
                io.read_bytes
                + io.write_bytes
                + getattr(io, "read_chars", 0)
                + getattr(io, "write_chars", 0)
            )
            io_bytes -= served_bytes
            if _io_bytes(servers) == served_bytes:  # else the two counts are of different moments
                break
    return sum(process.cpu_times()[:4]), io_bytes


def _store_threads(pid: int) -> list[Path]:
    """Return the threads of a process that serve PyTorch's TCPStore, as folders of /proc.

    All ranks poll the store, also while they wait for the rank that serves it: this is no activity of that rank.
    """
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended
            if (thread / "comm").read_text().startswith("pt_tcpstore"):
                found.append(thread)
    return found


def _io_bytes(threads: Sequence[Path]) -> int:
    """Return the bytes that threads have read and written by system calls."""
    size_bytes = 0
    for thread in threads:
        with contextlib.suppress(OSError):  # the thread has ended
            numbers = dict(line.split(": ") for line in (thread / "io").read_text().splitlines())
            size_bytes += int(numbers["rchar"]) + int(numbers["wchar"])
    return size_bytes


def _status(process: object) -> str | None:
    import psutil

    assert isinstance(process, psutil.Process)
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return None


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_as(returncode: int) -> None:
    """End this process as another ended: with its code, or by its signal (`subprocess` writes that negative)."""
    if returncode >= 0:
        sys.exit(returncode)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core that matters was the other's
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-returncode})
    if returncode != -signal.SIGKILL:
        signal.signal(-returncode, signal.SIG_DFL)
    os.kill(os.getpid(), -returncode)
    sys.exit(128 - returncode)  # a signal that does not end a process
