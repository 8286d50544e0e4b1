"""Supervise a jail as its first process: start the jailed process, limit it, end it and report.

The supervisor runs no generated code, and keeps the rights that the jailed process gives up. With
namespaces, the supervisor is process 1 of the jail's process namespace, so that the kernel ends all
other processes of the jail when the supervisor ends.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from holdfast.evaluate.metrics.sandbox import candidate, confine, syscalls, tester
from holdfast.evaluate.metrics.sandbox.codec import Malformed, receive, send
from holdfast.evaluate.metrics.sandbox.confine import WORKPLACE, Limits

NOT_WANTED = "not wanted any more"
_FIRST_LOOK_S, _LOOK_S = 0.005, 0.05


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe how jails are created on this machine.

    Attributes:
        namespaces: True if the supervisor is process 1 of a namespace and may mount file systems.
        maps_users: True if jails can use other users than the caller's.
        readable: the paths that Landlock lets a jail read.
        site_packages: the folders of packages that programs may import.
        seccomp: True if the kernel can forbid system calls.
    """

    namespaces: bool
    maps_users: bool
    readable: tuple[str, ...]
    site_packages: tuple[str, ...]
    seccomp: bool


def run(
    order: socket.socket, link: socket.socket, uid: int, limits: Limits, setting: Setting
) -> None:
    """Receive the order for one jail, run the jail, and send the report.

    The function returns after all processes of the jail have ended.
    """
    started_s = time.monotonic()
    try:
        wanted = receive(order)
    except (EOFError, Malformed):
        return
    folder = _workplace(uid, limits, setting)
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # process 1 of a namespace is one anyway
    printed, output = os.pipe()
    verdict, verdict_out = os.pipe()
    pid = os.fork()
    if not pid:
        _jailed(
            wanted,
            link,
            output,
            verdict_out,
            uid=uid,
            limits=limits,
            setting=setting,
            folder=folder,
        )
    for fd in (output, verdict_out):
        os.close(fd)
    link.close()
    jail = _Jail(pid, uid, printed, verdict, limits, setting)
    ended = jail.watch(order, started_s + float(wanted["wall_s"]))
    jail.end()
    if folder != WORKPLACE:
        shutil.rmtree(folder, ignore_errors=True)
    report = {
        "ended": ended,
        "verdict": bytes(jail.verdict).decode(errors="replace"),
        "output": bytes(jail.output).decode(errors="replace"),
    }
    with contextlib.suppress(OSError):  # the owner is gone
        send(order, report)


def _workplace(uid: int, limits: Limits, setting: Setting) -> str:
    if not setting.namespaces:
        folder = tempfile.mkdtemp(prefix="holdfast-jail-")
        os.chown(folder, uid, uid)
        return folder
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    options = f"size={limits.file_bytes},nr_inodes=4096,mode=1777"
    syscalls.mount("tmpfs", WORKPLACE, "tmpfs", flags, options)
    with contextlib.suppress(OSError):  # otherwise /proc shows the forkserver's processes
        syscalls.mount("proc", "/proc", "proc", flags | syscalls.MS_NOEXEC)
    return WORKPLACE


def _jailed(
    wanted: dict[str, str],
    link: socket.socket,
    output: int,
    verdict_out: int,
    *,
    uid: int,
    limits: Limits,
    setting: Setting,
    folder: str,
) -> None:
    """Confine this process and run the program or the tests; does not return."""
    code = 1
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(fd, target)
        is_tester = wanted["role"] == "tester"
        kept = sorted({link.fileno(), verdict_out} if is_tester else {link.fileno()})
        for low, high in zip((2, *kept), (*kept, 1 << 16), strict=True):
            os.closerange(low + 1, high)
        _confine(uid, limits, setting, folder)
        if is_tester:
            tester.main(wanted["source"], wanted["nonce"], link, verdict_out)
        else:
            candidate.main(wanted["source"], link)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _confine(uid: int, limits: Limits, setting: Setting, folder: str) -> None:
    os.environ.clear()
    os.environ.update(
        {"HOME": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TMPDIR": folder}
    )
    os.environ.update(
        dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    )
    sys.path.extend(setting.site_packages)
    tempfile.tempdir = None
    os.chdir(folder)
    os.umask(0o077)
    confine.limit(limits)
    confine.become(uid if setting.maps_users else None)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    # Let the warden count the memory; no other process has this user.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    confine.restrict_files(setting.readable, folder)
    if setting.seccomp:
        confine.forbid_calls()


class _Jail:
    """Watch over the processes of one jail."""

    def __init__(
        self, pid: int, uid: int, printed: int, verdict: int, limits: Limits, setting: Setting
    ) -> None:
        self._pid = pid
        self._uid = uid
        self._fds = {printed, verdict}
        self._verdict_fd = verdict
        self._limits = limits
        self._setting = setting
        self._status: int | None = None
        self.output = bytearray()
        self.verdict = bytearray()

    def watch(self, order: socket.socket, deadline_s: float) -> str:
        """Wait until the jailed process ends or must be ended; return the reason as text."""
        look_s = _FIRST_LOOK_S
        process = os.pidfd_open(self._pid)
        next_look_s = time.monotonic() + look_s
        while True:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return "timed out"
            if now_s >= next_look_s:
                if self._is_too_large():
                    return "killed: memory"
                look_s = min(_LOOK_S, 2 * look_s)
                next_look_s = now_s + look_s
            watched: list[int] = [order.fileno(), process, *self._fds]
            ready, _, _ = select.select(watched, [], [], min(next_look_s, deadline_s) - now_s)
            for fd in self._fds.intersection(ready):
                self._read(fd)
            self._reap()
            if self._status is not None:
                return _described(self._status)
            if order.fileno() in ready:
                return NOT_WANTED

    def _read(self, fd: int) -> None:
        part = os.read(fd, 1 << 16)
        if not part:
            self._fds.discard(fd)
        elif fd == self._verdict_fd:
            self.verdict = (self.verdict + part)[: 1 << 16]
        else:
            self.output = (self.output + part)[-self._limits.output_bytes :]

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self._pid:
                    self._status = status
                if not pid:
                    return

    def _is_too_large(self) -> bool:
        """Return True if the jail's processes together exceed the memory limit."""
        if self._resident_bytes("status", ("RssAnon:", "RssShmem:")) <= self._limits.memory_bytes:
            return False
        # The first sum counts shared memory once for each process. This slower sum counts it once.
        return (
            self._resident_bytes("smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
            > self._limits.memory_bytes
        )

    def _resident_bytes(self, file: str, fields: tuple[str, str]) -> int:
        proc = Path("/proc")
        size_kib = 0
        for process in proc.iterdir():
            if process.name.isdigit() and process.name != "1":
                # The process may have just ended.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    if not self._setting.namespaces and process.stat().st_uid != self._uid:
                        continue
                    for line in (process / file).read_text().splitlines():
                        if line.startswith(fields):
                            size_kib += int(line.split()[1])
        return size_kib << 10

    def end(self) -> None:
        """Kill and reap all processes of the jail, then read the rest of their output."""
        if self._setting.namespaces:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            kill_all_of(self._uid)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        while self._fds:
            ready, _, _ = select.select(list(self._fds), [], [], 0)
            if not ready:
                return
            for fd in ready:
                self._read(fd)


def kill_all_of(uid: int) -> None:
    """Kill all processes of a jail's own user in one system call.

    No process escapes by forking meanwhile. The caller must be root.
    """
    pid = os.fork()
    if not pid:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)  # does not reach the caller, which has another user
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _described(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return "killed: processor time"
        return f"killed: {signal.Signals(number).name}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"
