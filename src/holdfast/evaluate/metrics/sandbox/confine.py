"""Drop all rights of a jailed process, irrevocably, before it runs a generated program."""

import contextlib
import ctypes
import os
import resource
import struct
from dataclasses import dataclass
from pathlib import Path

from holdfast.evaluate.metrics.sandbox import syscalls

WORKPLACE = "/tmp"  # the jail's working folder, a separate file system


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limit the resources of one jail.

    Attributes:
        wall_s: the seconds from the start to the verdict.
        cpu_s: the seconds of processor time of each process.
        memory_bytes: the address space of each process, and the resident memory of all processes
            together.
        processes: the number of processes and threads together.
        output_bytes: the size of the end of the output that is kept; the rest is read and dropped.
        file_bytes: the size of all files together; without a separate file system, the size of each
            file.
    """

    wall_s: float = 3.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 50
    output_bytes: int = 4096
    file_bytes: int = 16 << 20


def limit(limits: Limits) -> None:
    """Set the resource limits of this process, both soft and hard limits."""
    cpu_s = max(1, limits.cpu_s)
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 256),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ):
        hard = resource.getrlimit(what)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (bound, bound))


def become(uid: int | None) -> None:
    """Change to an unprivileged user without any capability.

    The user is `uid`. If `uid` is None, it is the user of a new user namespace, for callers that
    may not change to other users.

    Raises:
        OSError: the change failed, and no generated program may run.
    """
    syscalls.forget_bounding_set()
    if uid is None:
        # Processes are counted by user and namespace, so this jail has its own count.
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        syscalls.forget_bounding_set()
    else:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    syscalls.drop_capabilities()
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)


# Landlock (linux/landlock.h). Each pair has a version of Landlock and the write rights that this
# version added.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # equal on all architectures
_READ = 0b1101  # execute, read file, read folder
_WRITE_VERSIONS = ((1, 0x1FF2), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
_NO_TCP_SINCE, _NO_SCOPES_SINCE = 4, 6


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if the kernel has none."""
    try:
        return syscalls.system_call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def restrict_files(readable: tuple[str, ...], writable: str) -> None:
    """Allow reads only below `readable` and writes only below `writable`, by Landlock.

    Newer versions of Landlock also forbid TCP, and sockets of processes outside of the jail. On a
    kernel without Landlock, the function does nothing.

    Raises:
        OSError: Landlock refuses the rules.
    """
    version = landlock_version()
    if not version:
        return
    write = 0
    for since, rights in _WRITE_VERSIONS:
        write |= rights if version >= since else 0
    rules = struct.pack("<Q", _READ | write)
    if version >= _NO_TCP_SINCE:
        rules += struct.pack("<Q", 0b11)
    if version >= _NO_SCOPES_SINCE:
        rules += struct.pack("<Q", 0b11)
    rule_set = syscalls.system_call(
        _LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint(0)
    )
    for path, rights in (
        *((path, _READ) for path in readable),
        (writable, _READ | write),
        ("/dev/null", 0b110),
    ):
        with contextlib.suppress(FileNotFoundError):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = struct.pack("<Qi", rights if Path(path).is_dir() else rights & 0b110, folder)
            syscalls.system_call(
                _LANDLOCK_ADD, ctypes.c_int(rule_set), ctypes.c_int(1), allowed, ctypes.c_uint(0)
            )
            os.close(folder)
    syscalls.system_call(_LANDLOCK_RESTRICT, ctypes.c_int(rule_set), ctypes.c_uint(0))
    os.close(rule_set)


# Seccomp (linux/seccomp.h, linux/filter.h): system calls that fail with EPERM. socketpair stays
# allowed, since asyncio needs it.
_FORBIDDEN = {
    "x86_64": {
        "socket": 41, "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "setns": 308,
        "unshare": 272, "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "io_uring_setup": 425, "process_vm_readv": 310, "process_vm_writev": 311,
        "pidfd_getfd": 438, "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "msgget": 68, "semget": 64,
        "mq_open": 240, "open_by_handle_at": 304, "kexec_load": 246, "init_module": 175, "finit_module": 313,
        "open_tree": 428, "move_mount": 429, "fsopen": 430, "personality": 135, "mknod": 133, "mknodat": 259,
    },
    "aarch64": {
        "socket": 198, "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "setns": 268,
        "unshare": 97, "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "io_uring_setup": 425, "process_vm_readv": 270, "process_vm_writev": 271,
        "pidfd_getfd": 438, "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "msgget": 186, "semget": 190,
        "mq_open": 180, "open_by_handle_at": 265, "kexec_load": 104, "init_module": 105, "finit_module": 273,
        "open_tree": 428, "move_mount": 429, "fsopen": 430, "personality": 92, "mknodat": 33,
    },
}  # fmt: skip
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_X32 = 0x40000000  # the bit that marks calls of x86_64's x32 ABI, all forbidden
_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag that clone takes
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_FROM, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def forbid_calls() -> None:
    """Forbid system calls that reach out of the jail and that no program needs.

    Above all, no socket can be created.

    Raises:
        OSError: this kernel or machine has no seccomp.
    """
    if syscalls.MACHINE not in _FORBIDDEN:
        raise OSError(f"no list of system calls for {syscalls.MACHINE}")
    program = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURE[syscalls.MACHINE]),
        (_RETURN, 0, 0, _KILL),
    ]
    program += [(_LOAD, 0, 0, 0), (_JUMP_FROM, 0, 1, _X32), (_RETURN, 0, 0, _EPERM)]
    # Refuse clone3, whose flags are behind a pointer where no filter sees them. The C library then
    # uses clone.
    program += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
    for number in _FORBIDDEN[syscalls.MACHINE].values():
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    program += [(_JUMP_EQUAL, 1, 0, _CLONE[syscalls.MACHINE]), (_RETURN, 0, 0, _ALLOW)]
    program += [
        (_LOAD, 0, 0, 16),
        (_JUMP_SET, 0, 1, _NAMESPACES),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in program))
    header = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    seccomp = {"x86_64": 317, "aarch64": 277}[syscalls.MACHINE]
    syscalls.system_call(seccomp, ctypes.c_uint(1), ctypes.c_uint(0), header)
