"""Check the limits on this process: shared memory, ulimits, control groups."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.adopt.doctor.findings import Finding, good, unseen, wrong
from holdfast.core.control_groups import read_limits
from holdfast.core.memory import available_memory_bytes
from holdfast.core.system_limits import allowed_by_limit

GIB: Final = 1 << 30
MIN_SHARED_BYTES: Final = GIB
"""Data loaders and NCCL need at least this much; containers have 64 MiB by default."""
MIN_FREE_BYTES: Final = GIB
MIN_OPEN_FILES: Final = 1024
MIN_PROCESSES: Final = 4096
"""Threads count as processes; a rank with its data loaders and libraries has hundreds."""
WANTED_OPEN_FILES: Final = 65_536


def shared_memory(folder: Path) -> Iterator[Finding]:  # noqa: ARG001 - the form of all checks
    """Check the size of /dev/shm."""
    yield shared_memory_in(Path("/dev/shm"))


def shared_memory_in(folder: Path) -> Finding:
    """Check the size of the shared memory at a folder."""
    in_container = "docker run --shm-size=16g …  # in Kubernetes: an emptyDir of medium Memory"
    try:
        space = os.statvfs(folder)
    except OSError as error:
        return wrong(f"{folder}: {error.strerror}.", f"sudo mount -t tmpfs shm {folder}")
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    words = f"{folder} has {size / GIB:.1f} GiB, of which {free / GIB:.1f} GiB are free"
    if not os.access(folder, os.W_OK):
        return wrong(f"This user may not write to {folder}.", f"sudo chmod 1777 {folder}")
    if size < MIN_SHARED_BYTES:
        mend = f"sudo mount -o remount,size=50% {folder}  # in a container: {in_container}"
        return wrong(f"{words}: data loaders and NCCL need more.", mend)
    if free < MIN_SHARED_BYTES // 4:
        return wrong(f"{words}: left-overs fill it.", f"ls -la {folder}  # and remove left-overs")
    return good(f"{words}.")


def ulimits(folder: Path) -> Iterator[Finding]:  # noqa: ARG001 - the form of all checks
    """Check the limits on open files, file sizes, processes and locked memory."""
    faults = [
        *_too_low(resource.RLIMIT_NOFILE, "n", MIN_OPEN_FILES, WANTED_OPEN_FILES, errno.EMFILE),
        *_too_low(resource.RLIMIT_NPROC, "u", MIN_PROCESSES, 4 * MIN_PROCESSES),
    ]
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        faults.append(wrong(f"{allowed_by_limit(errno.EFBIG)}.", "ulimit -f unlimited"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        sentence = f"`ulimit -l` lets a process lock {locked:,} bytes, and InfiniBand needs more."
        faults.append(wrong(sentence, "ulimit -l unlimited  # in Docker: --ulimit memlock=-1"))
    yield from faults
    if not faults:
        yield good(f"{allowed_by_limit(errno.EMFILE)}; no limit is too low.")


def _too_low(
    limit: int, letter: str, least: int, wanted: int, code: int | None = None
) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY or soft >= least:
        return
    what = f"`ulimit -{letter}` is {soft:,}" if code is None else allowed_by_limit(code)
    if hard == resource.RLIM_INFINITY or hard >= least:
        mend = f"ulimit -{letter} {wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)}"
    else:
        option = {"n": "nofile", "u": "nproc"}[letter]
        mend = f"sudo prlimit --pid $$ --{option}={wanted}:{wanted}"
    yield wrong(f"{what}, and a training needs {least:,} at least.", mend)


def control_groups(folder: Path) -> Iterator[Finding]:  # noqa: ARG001 - the form of all checks
    """Check how much memory, how many processes and how much CPU time the control groups allow."""
    yield from groups_below(Path("/"))


def groups_below(root: Path) -> Iterator[Finding]:
    """Check the control groups; `root` is the folder that holds `proc` and the mount points."""
    free = available_memory_bytes(root)
    words = f"This process can still take {free / GIB:.1f} GiB of memory"
    if free < MIN_FREE_BYTES:
        mend = "sbatch --mem=0 …  # in Docker: --memory; in Kubernetes: resources.limits.memory"
        yield wrong(f"{words}.", mend)
    else:
        yield good(f"{words}.")
    try:
        yield from _processes(root)
        yield from _cpu_time(root)
    except (OSError, ValueError) as error:
        yield unseen(f"The control groups are not read: {error}.")


def _processes(root: Path) -> Iterator[Finding]:
    for group, limit in read_limits("pids", "pids.max", root):
        if limit == "max":
            continue
        left = int(limit) - int((group / "pids.current").read_text())
        if left < MIN_PROCESSES:
            yield wrong(
                f"The control group {group} allows {left:,} more processes and threads.",
                "systemctl set-property UNIT TasksMax=infinity  # in Docker: --pids-limit=-1",
            )


def _cpu_time(root: Path) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    for group, text in read_limits("cpu", "cpu.max", root):
        quota, period = text.split()
        if quota != "max" and (share := int(quota) / int(period)) < cores:
            yield wrong(
                f"The control group {group} gives the time of {share:.1f} cores to the {cores} cores "
                "of this process, whose threads then wait for each other.",
                f"export OMP_NUM_THREADS={max(1, int(share))}",
            )
