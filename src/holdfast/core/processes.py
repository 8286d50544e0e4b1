"""Start, watch and kill processes.

On systems other than Linux, the functions that use prctl(2) do nothing. There, only
`kill_descendants` ends the processes that a parent leaves behind.
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
"""The most attempts to read two counters while no rank polls the store between the two reads."""


def whoami() -> str:
    """Return the name of this process's user; `unknown` if the system has no name for the user."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user in this container
        return "unknown"


def module_command(module: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment that run a module of Holdfast in a new process.

    The caller appends the module's arguments. Files of the working directory cannot shadow modules
    of the standard library. The new process imports Holdfast from the same place as this process,
    even if only `sys.path` contains that place.
    """
    found_in = str(Path(__file__).parents[2])
    environment = dict(os.environ)
    paths = environment.pop("PYTHONPATH", "").split(os.pathsep)
    installed_in = [*sysconfig.get_paths().values(), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        installed_in.append(site.getusersitepackages())
    if found_in not in installed_in:  # else Python finds the package without PYTHONPATH
        paths.append(found_in)
    if any(paths):
        # An empty entry means the working directory.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return [sys.executable, "-P", "-m", module], environment


def die_with_parent(parent_pid: int | None = None) -> None:
    """Let the kernel kill this process with SIGKILL when the parent process ends, for any reason.

    Args:
        parent_pid: the expected parent, if known; if that process has already ended, this process
            is killed now.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid not in (None, os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Adopt each descendant whose own parent ends, so that `kill_descendants` finds it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_without_collecting() -> None:
    """Skip the garbage collection at the exit of this process.

    In a process that has imported torch and transformers, this collection takes a second.
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
    """Send SIGKILL to the descendants of a process until none is left.

    SIGKILL also ends stopped processes. A process that is stuck in the kernel may survive.

    Args:
        of_pid: the process whose descendants are killed; None: this process.
        timeout_s: the longest wait, in seconds, for processes that do not end at once.
        spared: a word; processes with this word in their command line get time to end by
            themselves.
        spared_s: the time that these processes get, in seconds.
        left: a process name; a spared process with this name is never killed.
        but: a process that is not killed, and neither are its descendants.
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
            except psutil.Error:  # the child has ended, or belongs to another user
                continue
        # Not psutil's own wait: psutil would reap a child whose exit code other code waits for.
        time.sleep(0.02)


def reap_orphans(*, but: int | None = None) -> None:
    """Reap the children of this process that have ended, except the child `but`.

    These children are orphans that this process has adopted; see `become_subreaper`.
    """
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
    """Return the state of a process by psutil's name for it ("stopped", "disk-sleep", …).

    The state is "hidden" if this user may not read it. The result is None if the process has ended.
    """
    import psutil

    try:
        return _status(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return None
    except (psutil.Error, OSError):
        return "hidden"


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None if the process has ended or cannot be inspected."""
    import psutil

    try:
        return int(psutil.Process(pid).ppid())
    except (psutil.Error, OSError):
        return None


def activity(pids: Mapping[int, int]) -> dict[int, tuple[float, int] | None]:
    """Return the CPU seconds and I/O bytes that each rank has used, including its descendants.

    The bytes grow with each read and write. A descendant that has ended is included after its
    parent has reaped it.

    Args:
        pids: the process id of each rank.

    Returns:
        For each rank, the CPU seconds and the bytes; None if the process has ended or cannot be
        read.
    """
    import psutil

    hidden = (psutil.Error, OSError)  # psutil passes on some errors of /proc
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
            # `read_chars` lacks the pages of a mapped file, which are read without a system call.
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

    All ranks poll the store, even while they wait for the rank that serves it. So serving these
    polls does not count as activity of that rank.
    """
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended
            if (thread / "comm").read_text().startswith("pt_tcpstore"):
                found.append(thread)
    return found


def _io_bytes(threads: Sequence[Path]) -> int:
    """Return the bytes that the threads have read and written through system calls."""
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
    """Return the name of a signal, for example SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_as(returncode: int) -> None:
    """End this process in the same way as another process: with its exit code, or by its signal.

    Args:
        returncode: the other process's return code in `subprocess`'s form, negative for a signal.
    """
    if returncode >= 0:
        sys.exit(returncode)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # only the other process's core dump is of use
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-returncode})
    if returncode != -signal.SIGKILL:
        signal.signal(-returncode, signal.SIG_DFL)
    os.kill(os.getpid(), -returncode)
    sys.exit(128 - returncode)  # a signal that does not end a process
