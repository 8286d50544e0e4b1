"""Run the parent of all jails, which builds their file system once and forks their supervisors.

There are two processes. The owner of the sandbox starts the *launcher*. If namespaces are
available, the launcher creates namespaces, in which the *forkserver* is process 1. When the owner
closes its socket or dies, the forkserver ends, and the kernel then ends all processes in the
namespace. `holdfast.evaluate.metrics.sandbox.sandbox` starts this module as `python -c ... FD
MODE`.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import stat
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from holdfast.evaluate.metrics.sandbox import confine, supervisor, syscalls
from holdfast.evaluate.metrics.sandbox.codec import send
from holdfast.evaluate.metrics.sandbox.confine import WORKPLACE, Limits
from holdfast.evaluate.metrics.sandbox.supervisor import Setting

_ISOLATED = syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Modules that most programs import: imported once here instead of once for each trial.
_WARM = (
    "abc", "array", "bisect", "cmath", "collections.abc", "copy", "csv", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "io", "itertools", "math", "numbers", "operator", "random", "re",
    "statistics", "string", "textwrap", "threading", "types", "typing",
)  # fmt: skip
_USERS = 128


@dataclass(frozen=True, kw_only=True)
class _Site:
    """Describe this Python installation and the limits of jails, as the owner sent them."""

    limits: Limits
    readable: tuple[str, ...]
    site_packages: tuple[str, ...]


def main(control_fd: int, mode: str) -> None:
    """Serve the owner of the socket until the socket closes; `mode` is "namespaces" or "plain"."""
    control = socket.socket(fileno=control_fd)
    first = json.loads(control.recv(1 << 16))
    site = _Site(
        limits=Limits(**first["limits"]),
        readable=tuple(first["readable"]),
        site_packages=tuple(first["site_packages"]),
    )
    try:
        if mode == "plain":
            _serve(control, site, first_uid=_first_uid(), namespaces=False)
        else:
            _launch(control, site)
    except OSError as error:
        control.send(json.dumps({"refused": str(error)}).encode())


def _first_uid() -> int:
    """Return the first of a range of user ids for this sandbox, above the ids of real users."""
    return 0x40000000 + os.getpid() % (1 << 22) * _USERS


def _launch(control: socket.socket, site: _Site) -> None:
    is_root = os.geteuid() == 0
    first_uid = _first_uid()
    if not is_root:
        uid, gid = os.getuid(), os.getgid()
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    syscalls.unshare(syscalls.CLONE_NEWPID)
    ready, mapped = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(ready[0])
            os.close(mapped[1])
            _enter(site, is_root=is_root, ready=ready[1], mapped=mapped[0])
            _serve(control, site, first_uid=0, namespaces=True, maps_users=is_root)
        except OSError as error:
            control.send(json.dumps({"refused": str(error)}).encode())
        finally:
            os._exit(0)
    control.close()
    os.close(ready[1])
    if os.read(ready[0], 1) and is_root:
        for which in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{which}").write_text(f"0 {first_uid} {_USERS}")
    with contextlib.suppress(OSError):
        os.write(mapped[1], b"m")
    os.waitpid(pid, 0)


def _enter(site: _Site, *, is_root: bool, ready: int, mapped: int) -> None:
    """Enter namespaces with a root of their own, without network and without rights outside."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    _build_root(site.readable)
    syscalls.unshare(_ISOLATED | (syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS if is_root else 0))
    os.write(ready, b"r")
    if os.read(mapped, 1) != b"m":
        raise OSError("no users were mapped")
    if is_root:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


def _build_root(readable: tuple[str, ...]) -> None:
    """Build a read-only root file system with the interpreter and the system's libraries."""
    base = next(
        (folder for folder in map(Path, ("/sys", "/mnt", "/srv", "/media")) if folder.is_dir()),
        None,
    )
    if base is None:
        raise OSError("there is no folder to mount upon")
    syscalls.mount("tmpfs", str(base), "tmpfs", syscalls.MS_NOSUID, "size=1m,mode=755")
    for path in map(Path, readable):
        target = base / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target.symlink_to(path.readlink())
        elif path.is_dir():
            target.mkdir()
            _bind(path, target)
    for name in ("dev", "proc", WORKPLACE.strip("/")):
        (base / name).mkdir(exist_ok=True)  # exists if the interpreter's packages are below it
    for device in _DEVICES:
        (base / "dev" / device).touch()
        syscalls.mount(f"/dev/{device}", f"{base}/dev/{device}", "", syscalls.MS_BIND)
    (base / "dev" / "shm").symlink_to(WORKPLACE)  # for POSIX semaphores
    with contextlib.suppress(OSError):
        syscalls.mount(
            "proc",
            f"{base}/proc",
            "proc",
            syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC,
        )
    syscalls.pivot_to(str(base))
    syscalls.mount(
        "none",
        "/",
        "",
        syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID,
    )


def _bind(path: Path, target: Path) -> None:
    try:
        syscalls.mount(str(path), str(target), "", syscalls.MS_BIND)
    except OSError:  # a user namespace may not uncover inherited mounts below `path`
        syscalls.mount(str(path), str(target), "", syscalls.MS_BIND | syscalls.MS_REC)
    flags = (
        syscalls.MS_BIND
        | syscalls.MS_REMOUNT
        | syscalls.MS_RDONLY
        | syscalls.MS_NOSUID
        | syscalls.MS_NODEV
    )
    syscalls.mount("none", str(target), "", flags)


def _serve(
    control: socket.socket,
    site: _Site,
    *,
    first_uid: int,
    namespaces: bool,
    maps_users: bool = True,
) -> None:
    for name in _WARM:
        importlib.import_module(name)
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]
    setting = Setting(
        namespaces=namespaces,
        maps_users=maps_users,
        readable=("/",) if namespaces else site.readable,
        site_packages=site.site_packages,
        seccomp=_has_seccomp(),
    )
    facts = {
        "user": "another user" if maps_users else "a user namespace",
        "namespaces": namespaces,
        "seccomp": setting.seccomp,
        "landlock": confine.landlock_version(),
    }
    control.send(json.dumps(facts).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the wardens
    while True:
        message, fds, _, _ = socket.recv_fds(control, 4096, 2)
        if not message:
            return
        order, link = (socket.socket(fileno=fd) for fd in fds)
        if not os.fork():
            try:
                _become_warden(control, namespaces=namespaces)
                uid = first_uid + 1 + int(message)
                if not namespaces:
                    supervisor.kill_all_of(uid)
                supervisor.run(order, link, uid, site.limits, setting)
            except Exception:
                with contextlib.suppress(OSError):
                    send(order, {"broken": traceback.format_exc()})
            finally:
                os._exit(0)
        order.close()
        link.close()


def _become_warden(control: socket.socket, *, namespaces: bool) -> None:
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not namespaces:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    syscalls.unshare(syscalls.CLONE_NEWPID)
    if os.fork():
        # The child is process 1 of the new namespace, and ends with the forkserver's namespace.
        os._exit(0)


def _has_seccomp() -> bool:
    """Test in a child process whether this machine can forbid system calls; return True if so."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
            confine.forbid_calls()
            socket.socket()
        except PermissionError:
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def readable_paths(site_packages: tuple[str, ...]) -> tuple[str, ...]:
    """List the paths that jails may read: system, interpreter and packages, but no home folder."""
    system = [
        path
        for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
        if os.path.lexists(path)
    ]
    own = [os.path.realpath(path) for path in (sys.base_prefix, *site_packages)]
    inside = [
        path
        for path in own
        if not any(path == other or path.startswith(f"{other}/") for other in system)
    ]
    return tuple(dict.fromkeys((*system, *inside)))


def is_open_to_others(path: str) -> bool:
    """Return True if an unprivileged user can reach a folder through all its parent folders."""
    return all(each.stat().st_mode & stat.S_IXOTH for each in (Path(path), *Path(path).parents))
