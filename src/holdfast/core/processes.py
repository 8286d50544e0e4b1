"""Processes: whose they are, how they begin and end. Exits said in words, trees killed, children tied to their parents.

Linux's prctl is used where it is there; elsewhere those calls do nothing and the guard's sweep is what remains.
"""

import ctypes
import getpass
import os
import signal
import site
import sys
import sysconfig
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def whoami() -> str:
    """Who says so: the user of this process."""
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
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # an empty one is the working directory
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
) -> None:
    """SIGKILL every descendant of a process, by default this one, until none is left; it reaches stopped ones too.

    Those whose command line has the word `spared` are given `spared_s` seconds to end by themselves; of these, those
    that call themselves `left` are left alone.

    Returns without success only when one survives `timeout_s` of it, stuck in the kernel: nobody can end those.
    """
    import psutil

    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < timeout_s + spared_s:
        # Listed anew each round: a process may fork between being seen and being killed.
        living = [
            child
            for child in psutil.Process(of_pid).children(recursive=True)
            if _status(child) not in (None, psutil.STATUS_ZOMBIE) and not _is_left(child, spared, left)
        ]
        if not living:
            return
        for child in living:
            try:
                if passed_s > spared_s or spared not in child.cmdline():
                    child.kill()
            except psutil.NoSuchProcess:
                continue
        # Not psutil's own wait: it would reap a child whose exit somebody else is waiting for.
        time.sleep(0.02)


def _is_left(process: object, spared: str | None, left: str | None) -> bool:
    import psutil

    assert isinstance(process, psutil.Process)
    try:
        return left is not None and process.name() == left and spared in process.cmdline()
    except psutil.NoSuchProcess:
        return True


def process_state(pid: int) -> str | None:
    """What the kernel says of a process, as psutil names it ("stopped", "disk-sleep", …); None if it is gone."""
    import psutil

    try:
        return _status(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return None


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None if the process is gone."""
    import psutil

    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return None


def activity(pid: int) -> tuple[float, int] | None:
    """Return the CPU seconds, and the bytes read and written, of a process and its descendants; None if hidden or gone.

    Each counts what it has used so far. Descendants that ended are in their parents' numbers, as far as the parents
    waited for them.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        cpu_s, size_bytes = _used(process)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    for one in family[1:]:
        try:
            used_s, used_bytes = _used(one)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        cpu_s, size_bytes = cpu_s + used_s, size_bytes + used_bytes
    return cpu_s, size_bytes


def _used(process: object) -> tuple[float, int]:
    import psutil

    assert isinstance(process, psutil.Process)
    io_bytes = 0
    if hasattr(process, "io_counters"):  # not on macOS
        io = process.io_counters()
        io_bytes = getattr(io, "read_chars", io.read_bytes) + getattr(io, "write_chars", io.write_bytes)
    return sum(process.cpu_times()[:4]), io_bytes


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
