"""Call system calls of Linux that Python does not offer (linux/sched.h, mount.h, prctl.h)."""

import ctypes
import os
import platform
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

MACHINE = platform.machine()
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def system_call(number: int, *arguments: object) -> int:
    """Call `syscall(2)`; raise OSError if it fails."""
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def unshare(flags: int) -> None:
    """Call `unshare(2)`; raise OSError if it fails."""
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Call `setns(2)`; raise OSError if it fails."""
    _checked(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Call `mount(2)`; raise OSError if it fails."""
    texts = (source.encode(), target.encode(), kind.encode() or None)
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def pivot_to(new_root: str) -> None:
    """Make a mount point the root of this process, and detach the old root.

    Raises:
        OSError: a system call fails.
    """
    os.chdir(new_root)
    if MACHINE not in _PIVOT_ROOT:
        raise OSError(f"pivot_root has no number for {MACHINE}")
    system_call(_PIVOT_ROOT[MACHINE], b".", b".")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def prctl(option: int, value: int) -> None:
    """Call `prctl(2)`; raise OSError if it fails."""
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def forget_bounding_set() -> None:
    """Drop from the bounding set all capabilities that this process may drop."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            return  # after the kernel's last capability, or without the right to drop any


def drop_capabilities() -> None:
    """Drop all capabilities of this process; raise OSError on failure."""
    if MACHINE not in _CAPSET:
        raise OSError(f"capset has no number for {MACHINE}")
    header = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    system_call(_CAPSET[MACHINE], header, bytes(24))
