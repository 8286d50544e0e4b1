"""Stop a process at each of its system calls on files: kill it, return an error, or delay it.

This uses Linux's ptrace without any tool, on x86-64 only. The process and its files are unchanged.
"""

import ctypes
import errno
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from checkpoint_faulting.forks import Failed

NAMES: Final = {
    0: "read",
    1: "write",
    2: "open",
    3: "close",
    4: "stat",
    5: "fstat",
    6: "lstat",
    17: "pread64",
    18: "pwrite64",
    72: "fcntl",
    73: "flock",
    74: "fsync",
    75: "fdatasync",
    77: "ftruncate",
    82: "rename",
    83: "mkdir",
    84: "rmdir",
    87: "unlink",
    217: "getdents64",
    257: "openat",
    258: "mkdirat",
    262: "newfstatat",
    263: "unlinkat",
    264: "renameat",
    285: "fallocate",
    295: "preadv",
}
"""The system calls of x86-64 that a commit makes or may make, by number."""
CHANGING: Final = frozenset(
    (
        "write",
        "pwrite64",
        "fsync",
        "ftruncate",
        "rename",
        "mkdir",
        "rmdir",
        "unlink",
        "unlinkat",
        "openat",
        "fallocate",
    )
)
SKIPPED: Final = (
    "" if platform.machine() == "x86_64" else "processes are stopped at their calls on x86-64 only"
)
_CONT, _GETREGS, _SETREGS, _SYSCALL, _SEIZE, _INTERRUPT, _LISTEN = (
    7,
    12,
    13,
    24,
    0x4206,
    0x4207,
    0x4208,
)
_GET_SYSCALL_INFO: Final = 0x420E
_OPTIONS: Final = 1 | 8 | 0x100000  # TRACESYSGOOD, TRACECLONE, EXITKILL
_EVENT_STOP: Final = 128
_WALL: Final = 0x40000000
_RAX, _RDX, _ORIG_RAX, _REGISTERS = 10, 12, 15, 27
_ENTRY, _EXIT = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class _Info(ctypes.Structure):
    """The used part of `struct ptrace_syscall_info`."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
        ("rest", ctypes.c_uint64 * 2),
    )


@dataclass(frozen=True)
class Strike:
    """The action at a call: a kill, an error instead of the call, or a `stall` before the call."""

    what: Literal["kill", "error", "short", "stall"]
    error: int = 0
    seconds: float = 0.0


Decide = Callable[[int, str], Strike | None]
"""Receives the number of a call, from 1 on, and the call's name."""


@dataclass
class Traced:
    """A process and its threads. Only the thread that made this object may call its methods."""

    pid: int
    decide: Decide
    kill: Callable[[], None]
    names: list[str] = field(default_factory=list)
    """The names of the calls so far."""
    injected: list[str] = field(default_factory=list)
    """The names of the calls with an action."""
    _answers: dict[int, int] = field(default_factory=dict)
    _killed: bool = False

    @classmethod
    def seize(cls, pid: int, decide: Decide, kill: Callable[[], None] | None = None) -> "Traced":
        """Trace a living process.

        Args:
            pid: the process.
            decide: chooses the action at each call.
            kill: carries out a strike of that name; by default, kills this process.

        Raises:
            PermissionError: tracing is not allowed here.
        """
        traced = cls(pid, decide, kill or (lambda: os.kill(pid, signal.SIGKILL)))
        for task in sorted(int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()):
            _ptrace(_SEIZE, task, _OPTIONS)
            _ptrace(_INTERRUPT, task)
        return traced

    def run(self, patience_s: float = 120.0) -> int:
        """Run the process to its end; return its status as `os.waitpid` does.

        Raises:
            Failed: the process hangs; the process has been killed.
        """
        late = threading.Event()

        def give_up() -> None:
            late.set()
            os.kill(self.pid, signal.SIGKILL)

        patience = threading.Timer(patience_s, give_up)
        patience.start()
        try:
            while True:
                tid, status = os.waitpid(-1, _WALL)
                if os.WIFSTOPPED(status):
                    self._go_on(tid, status)
                elif tid == self.pid:
                    break
        finally:
            patience.cancel()
            patience.join()
        if late.is_set():
            raise Failed(f"it was not over after {patience_s:g} s")
        return status

    def _go_on(self, tid: int, status: int) -> None:
        stop, event = os.WSTOPSIG(status), status >> 16
        if stop == signal.SIGTRAP | 0x80:
            self._at_call(tid)
            _ptrace(_SYSCALL, tid)
        elif event == _EVENT_STOP and stop in (
            signal.SIGSTOP,
            signal.SIGTSTP,
            signal.SIGTTIN,
            signal.SIGTTOU,
        ):
            _ptrace(_LISTEN, tid)
        else:
            _ptrace(_SYSCALL, tid, 0 if event else stop)

    def _at_call(self, tid: int) -> None:
        info = _Info()
        if _ptrace(_GET_SYSCALL_INFO, tid, ctypes.sizeof(info), ctypes.addressof(info)) is None:
            return
        if info.op == _EXIT and tid in self._answers:
            self._set(tid, _RAX, self._answers.pop(tid))
        if info.op != _ENTRY or info.number not in NAMES or self._killed or self._is_talk(info):
            return
        self.names.append(NAMES[info.number])
        strike = self.decide(len(self.names), self.names[-1])
        if strike is None:
            return
        self.injected.append(self.names[-1])
        if strike.what == "kill":
            self._killed = True
            self.kill()
        elif strike.what == "stall":
            time.sleep(strike.seconds)
        elif strike.what == "short":
            self._set(tid, _RDX, max(1, info.arguments[2] // 2))
        else:
            self._set(tid, _ORIG_RAX, -1)
            self._answers[tid] = -strike.error

    def _is_talk(self, info: _Info) -> bool:
        """Return True if the call reads or writes a pipe or a socket, not a file."""
        if NAMES[info.number] not in ("read", "write", "close"):
            return False
        try:
            opened = Path(f"/proc/{self.pid}/fd/{info.arguments[0]}").readlink()
        except OSError:
            return True
        return not str(opened).startswith("/")

    @staticmethod
    def _set(tid: int, register: int, value: int) -> None:
        registers = (ctypes.c_uint64 * _REGISTERS)()
        if _ptrace(_GETREGS, tid, 0, ctypes.addressof(registers)) is not None:
            registers[register] = value & (2**64 - 1)
            _ptrace(_SETREGS, tid, 0, ctypes.addressof(registers))


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> Any:
    """Call ptrace; return None if the thread is gone. Most requests have their number in `data`."""
    if request in (_SEIZE, _SYSCALL, _CONT):
        address, data = 0, address or data
    if _libc.ptrace(request, tid, address, data) == -1:
        code = ctypes.get_errno()
        if code == errno.ESRCH:
            return None
        raise OSError(code, f"ptrace: {os.strerror(code)}")
    return 0
