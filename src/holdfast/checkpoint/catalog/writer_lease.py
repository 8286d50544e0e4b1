"""Allow only one process at a time to save into a checkpoint folder.

The writer holds a lease on the folder. The file `.holdfast-writer` describes the writer by its run,
generation (the number of the attempt), host, process id, time of acquisition, and a token. The
writer holds flock(2) on this file, so the kernel releases the lease when the writer ends for any
reason. Linux forwards flock to the servers of NFS, and to the servers of Lustre and GPFS if they
are mounted with flock. On a file system without locks, a living writer is not detected, so a later
process takes over from it.

A process that takes over replaces the file by a new one that it has already locked. Before a save
is committed, its token is compared with the one in the file. So if a former writer wakes up later,
its saves fail. This module needs no torch.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from holdfast.checkpoint.catalog.staging_dir import has_unfinished, traces_of_unfinished
from holdfast.checkpoint.format.manifest import DAMAGED_JSON
from holdfast.checkpoint.format.paths import parse_name
from holdfast.core.atomic import fsync_folder
from holdfast.core.errors import BadUse
from holdfast.core.link import ENV_ATTEMPT, ENV_RUN

WRITER_NAME: Final = ".holdfast-writer"
PATIENCE_S: Final = 10.0
"""Seconds that a former writer may take to end, or that its last save may make no progress."""
PATIENCE_ACROSS_NODES_S: Final = 120.0
"""The same limit if the former writer is on another node: NFS holds a dead client's locks 90 s."""
_POLL_S: Final = 0.05
_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identify the run of a process, and the attempt (generation) of this run.

    `run` is empty if the run is unknown.
    """

    run: str = ""
    generation: int | None = None

    @classmethod
    def of_this_process(cls, run: str | None = None) -> Self:
        """Return the identity that the supervisor has set; without one, the run is named `run`."""
        supervised = os.environ.get(ENV_RUN, "")
        if not supervised:
            return cls(run=run or "")
        with contextlib.suppress(ValueError):
            return cls(run=supervised, generation=int(os.environ.get(ENV_ATTEMPT, "")))
        return cls(run=supervised)


@dataclass(frozen=True, kw_only=True)
class LeaseHolder:
    """Describe the writer of a folder, as stored in `.holdfast-writer`.

    `since_s` is the time of acquisition, in seconds since the Unix epoch.
    """

    run: str
    generation: int
    host: str
    pid: int
    since_s: float
    token: str

    def __str__(self) -> str:
        run = f"run {self.run!r}, attempt {self.generation}, " if self.run else ""
        since = datetime.fromtimestamp(self.since_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"{run}process {self.pid} on {self.host}, since {since}"


@dataclass(eq=False)
class WriterLease:
    """Hold this process's right to save into a folder, from `acquire` until `release`.

    All users in the process share one lease; `users` is their number.
    """

    path: Path
    holder: LeaseHolder
    fd: int
    users: int = 1

    def release(self) -> None:
        """End one user's share of the lease; after the last one, another process may acquire it."""
        with _registering:
            self.users -= 1
            if self.users or self.fd < 0:
                return
            os.close(self.fd)
            self.fd = -1
            if _held.get(str(self.path)) is self:
                del _held[str(self.path)]


_held: dict[str, WriterLease] = {}
"""The leases of this process, by the path of their file."""
_registering = threading.Lock()


def acquire(
    folder: Path,
    who: Identity,
    *,
    now_s: float,
    timeout_s: float = 600.0,
    set_aside: Callable[[], object] | None = None,
) -> WriterLease:
    """Acquire the exclusive right to save into a folder.

    This process takes over from a former writer that is dead, or that belongs to an earlier
    generation of the same run. If a save of the former writer is still being finished, this
    function first waits until that save has ended, or has made no progress for `PATIENCE_S`
    seconds.

    Args:
        folder: the checkpoint folder.
        who: the identity of this process.
        now_s: the time, in seconds since the Unix epoch.
        timeout_s: seconds to wait for that save at most.
        set_aside: a function that moves the checkpoints of another run away, so that they do not
            prevent a takeover. It is called when no other process saves into the folder any more,
            before the lease is written. It may also move the lease file away.

    Raises:
        BadUse: another process saves into the folder, or the folder has checkpoints of another run.
        OSError: the folder cannot be written.
    """
    path = Path(os.path.realpath(folder)) / WRITER_NAME
    with _registering:
        is_ours = (held := _held.get(str(path))) is not None and _is_at(held.fd, path)
    if is_ours and set_aside is not None:
        set_aside()
    with _registering:
        if (shared := _held.get(str(path))) is not None and _is_at(shared.fd, path):
            shared.users += 1
            return shared
    began_s, traces, is_logged = time.monotonic(), traces_of_unfinished(path.parent), False
    while True:
        with _former(path) as (former, fd):
            is_free = fd is None or _try_lock(fd)
            is_other_run = (
                former is not None and bool(former.run and who.run) and former.run != who.run
            )
            if not is_free:
                if not is_other_run and time.monotonic() < began_s + _patience_s(former, who):
                    if not is_logged:
                        _logger.warning(
                            "Waiting for the end of %s, which saves into %s.",
                            former or "a process",
                            folder,
                        )
                    is_logged = True
                    time.sleep(_POLL_S)
                    continue
                if former is None or not _is_newer(who, former):
                    raise BadUse(
                        f"Another process saves into {folder} ({former or 'unknown'}). End that process first, or "
                        "give this one another folder, or read_only=True if it only restores."
                    )
            elif former is not None and is_other_run and set_aside is None and has_steps(folder):
                raise BadUse(_of_another_run(folder, former, who))
            if fd is not None and not _is_at(fd, path):  # another process was faster
                continue
            if former is not None:
                _await_last_save(folder, former, traces, began_s=began_s, timeout_s=timeout_s)
            if set_aside is not None:
                set_aside()
            # A process without a run's name keeps the name of the run that saved the checkpoints,
            # unless these have been moved away.
            kept = former.run if former is not None and set_aside is None else ""
            lease = _take(path, former, replace(who, run=who.run or kept), now_s)
        if lease is not None:
            with _registering:
                _held[str(path)] = lease
            return lease


def read_holder(folder: Path) -> LeaseHolder | None:
    """Describe the present or last writer of a folder; return None if that is unreadable."""
    try:
        return _parse((folder / WRITER_NAME).read_bytes())
    except OSError:
        return None


def has_steps(folder: Path) -> bool:
    """Return True if a folder has an entry with the name of a checkpoint."""
    try:
        return any(parse_name(path.name) is not None for path in folder.iterdir())
    except FileNotFoundError:
        return False


def _of_another_run(folder: Path, former: LeaseHolder, who: Identity) -> str:
    return (
        f"{folder} has the checkpoints of another run ({former}), and this is run {who.run!r}. Go on "
        f"with that run (`holdfast run --resume {former.run}`, or run={former.run!r}), or give this one another "
        "folder, or set the checkpoints aside with Checkpointer(fresh=True) or `holdfast run --fresh`. To go on from "
        f"them as run {who.run!r}, delete {folder / WRITER_NAME} first."
    )


def _is_newer(who: Identity, former: LeaseHolder) -> bool:
    return (
        bool(who.run)
        and who.run == former.run
        and who.generation is not None
        and who.generation > former.generation
    )


def _patience_s(former: LeaseHolder | None, who: Identity) -> float:
    """Return the seconds to wait for the former writer to end."""
    if former is None or former.host == socket.gethostname() or _is_newer(who, former):
        return PATIENCE_S
    return PATIENCE_ACROSS_NODES_S


def _await_last_save(
    folder: Path,
    former: LeaseHolder,
    traces: frozenset[tuple[str, int, int]],
    *,
    began_s: float,
    timeout_s: float,
) -> None:
    """Wait for a former writer's unfinished save, as long as that save makes progress.

    `traces` is the result of `traces_of_unfinished` at the time `began_s`.
    """
    until_s, is_logged = began_s + PATIENCE_S, False
    while has_unfinished(folder):
        now_s = time.monotonic()
        if now_s >= until_s:
            before, traces = traces, traces_of_unfinished(folder)
            if traces == before or now_s >= began_s + timeout_s:
                _logger.warning("Stopped waiting for the last save of %s in %s.", former, folder)
                return
            until_s = min(now_s + PATIENCE_S, began_s + timeout_s)
        if not is_logged:
            _logger.warning("Waiting for the last save of %s in %s to end.", former, folder)
        is_logged = True
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _former(path: Path) -> Iterator[tuple[LeaseHolder | None, int | None]]:
    """Yield the writer that the lease file describes, and the file's descriptor.

    Yields None for both if there is no file, and None for the writer if the file is damaged.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None, None
        return
    try:
        yield _parse(os.pread(fd, 1 << 16, 0)), fd
    finally:
        os.close(fd)


def _take(
    path: Path, former: LeaseHolder | None, who: Identity, now_s: float
) -> WriterLease | None:
    """Replace the lease file by one for this process; return None if another process was faster."""
    last = 0 if former is None or former.run != who.run else former.generation
    holder = LeaseHolder(
        run=who.run,
        generation=last + 1 if who.generation is None else who.generation,
        host=socket.gethostname(),
        pid=os.getpid(),
        since_s=now_s,
        token=os.urandom(8).hex(),
    )
    _remove_leftovers(path)
    temporary = path.with_name(f"{path.name}.{holder.token}.tmp")
    with contextlib.ExitStack() as undo:
        writing = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        undo.callback(os.close, writing)
        undo.callback(temporary.unlink, missing_ok=True)
        fd = _locked(temporary, writing)
        undo.callback(os.close, fd)
        os.write(writing, json.dumps(asdict(holder)).encode() + b"\n")
        os.fsync(writing)
        if not _put(temporary, path, replaces=former is not None or path.exists()):
            return None
        fsync_folder(path.parent)
        undo.pop_all()
        os.close(writing)
    return WriterLease(path=path, holder=holder, fd=fd)


def _locked(path: Path, writing: int) -> int:
    """Lock the file, and return the descriptor that holds the lock.

    The descriptor is read-only if possible, because an open descriptor for writing would prevent
    the disk from being remounted read-only.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EBADF:  # NFS grants this lock only to a descriptor for writing
            os.close(fd)
            fd = os.dup(writing)
            _try_lock(fd)
    return fd


def _put(temporary: Path, path: Path, *, replaces: bool) -> bool:
    """Rename the file to its final name; return False if another process was faster."""
    if not replaces:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            _logger.debug("this file system has no hard links: %s", error)
        else:
            temporary.unlink()
            return True
    temporary.replace(path)
    return True


def _remove_leftovers(path: Path) -> None:
    """Delete the files of processes that were killed while they acquired the lease."""
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            fd = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _try_lock(fd):
                    left.unlink()
            finally:
                os.close(fd)


def _try_lock(fd: int) -> bool:
    """Lock a file; return False if another process holds the lock.

    On a file system without locks, the result is True.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _logger.debug("this file system has no locks: %s", error)
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return fd >= 0 and os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _parse(content: bytes) -> LeaseHolder | None:
    try:
        fields = json.loads(content)
        return LeaseHolder(
            run=str(fields["run"]),
            generation=int(fields["generation"]),
            host=str(fields["host"]),
            pid=int(fields["pid"]),
            since_s=float(fields["since_s"]),
            token=str(fields["token"]),
        )
    except DAMAGED_JSON:
        return None


def _after_fork() -> None:
    """Close the leases in a child process.

    Otherwise, a child such as a data loader worker would hold the lease after the trainer has died.
    """
    global _registering  # noqa: PLW0603 - the lock of this process
    for lease in _held.values():
        os.close(lease.fd)
        lease.fd = -1
    _held.clear()
    _registering = threading.Lock()  # another thread may have held the lock


os.register_at_fork(after_in_child=_after_fork)
