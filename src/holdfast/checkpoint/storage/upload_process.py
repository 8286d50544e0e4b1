"""Upload (push) new checkpoints to object storage, in a process separate from the trainer.

`Pusher` starts the process for rank 0, with the trainer's process id. The process continues after
the trainer has ended, until the newest checkpoint is pushed. The process needs no torch. While the
trainer runs, the process repeats three steps:

1. List the checkpoints in the folder.
2. Push the newest checkpoint that storage does not have. If saves are faster than pushes, some
   checkpoints are never pushed.
3. If the push fails, try again later.

Once the trainer has ended or closed the process's standard input, the process pushes the newest
checkpoint and ends. If a save is still in progress then, the process waits until it is durable and
pushes it, but it waits no more than ten minutes without anything to push. Checkpoints of a
replacement trainer are pushed by that trainer's own process. The exit status is 1 if the newest
checkpoint could not be pushed.

The process prints a line of JSON for each event:

| line | event |
|---|---|
| `{"step", "url", "size_bytes", "seconds"}` | a push has succeeded |
| `{"step", "failed"}` | a push has failed |
| `{"signs"}` | a push has made progress |
| `{"warning"}` | a warning to log |
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.catalog.annotations import release, want
from holdfast.checkpoint.catalog.catalog import CheckpointInfo, scan
from holdfast.checkpoint.catalog.lineage import is_abandoned, left_by_newest
from holdfast.checkpoint.catalog.staging_dir import has_unfinished
from holdfast.checkpoint.format.manifest import MANIFEST_NAME, UnreadError
from holdfast.checkpoint.storage.catalog import remote_name
from holdfast.checkpoint.storage.push import note_pushed
from holdfast.checkpoint.storage.remote import Remote
from holdfast.core.errors import DamagedCheckpoint, HoldfastError, NotFound
from holdfast.core.sockets import readable

_LOOK_EVERY_S: Final = 0.5
_LOOK_ANYWAY_S: Final = 30.0
"""Seconds after which an unchanged folder is read again: a copied checkpoint may be complete."""
_LONGEST_PAUSE_S: Final = 60.0
_SIGN_EVERY_S: Final = 5.0
_WANTED_FOR_S: Final = 600.0
"""Seconds of the lease that protects a checkpoint from deletion; it is renewed during the push."""
_SETTLED_S: Final = 5.0
"""Seconds after a trainer's death within which the writes that it requested have begun."""
_CLOCK_STEP_S: Final = 60.0
"""Seconds by which a clock may be set back; a later save is attributed to a replacement trainer."""
_READ_TRIES: Final = 5
"""The number of attempts to read a checkpoint before it is treated as damaged."""
_NICENESS: Final = 5
_logger = logging.getLogger("holdfast")
_saying = threading.Lock()


class Pushing:
    """Push the checkpoints that a trainer saves, until the trainer has ended and all is pushed."""

    def __init__(
        self, folder: Path, remote: Remote, *, trainer_pid: int, keep: int | None, give_up_s: float
    ) -> None:
        self._trainer_pid = trainer_pid
        self._trainer = _pidfd(trainer_pid)
        self._folder = folder
        self._remote = remote
        self._keep = keep
        self._give_up_s = give_up_s
        self._holder = f"push-{socket.gethostname()}-{os.getpid()}"
        self._done: tuple[Path, tuple[int, int]] | None = None
        self._damaged: set[tuple[Path, tuple[int, int]]] = set()
        self._unread: Counter[tuple[Path, tuple[int, int]]] = Counter()
        self._has_given_up = False
        self._settled_s = 0.0
        self._saved_until_s = float("inf")
        self._nothing_in: int | None = None
        self._look_again_s = 0.0
        self._warned: set[str] = set()

    def run(self) -> int:
        """Push until the trainer has ended and nothing is left to push.

        Returns:
            The exit status: 1 if the newest checkpoint could not be pushed.
        """
        never = float("inf")
        pause_s, gone_at_s, idle_since_s, quiet_since_s = _LOOK_EVERY_S, never, never, never
        while True:
            if gone_at_s == never and self._has_ended(pause_s):
                gone_at_s, pause_s = time.monotonic(), _LOOK_EVERY_S
                self._saved_until_s = time.time() + _CLOCK_STEP_S
            elif gone_at_s < never:
                time.sleep(pause_s)
            is_gone = gone_at_s < never
            is_idle = is_quiet = is_done = False
            with self._warned_of(
                f"The checkpoints to push from {self._folder} cannot be listed yet"
            ):
                # Check before the scan, so that the scan finds a save that ends in between.
                is_saving = is_gone and has_unfinished(self._folder)
                newest = self._newest_unpushed() if is_gone or self._may_have_changed() else None
                is_idle = is_gone and newest is None
                is_quiet = is_idle and not is_saving
                is_done = newest is None or self._push(newest)
            now_s = time.monotonic()
            idle_since_s = min(idle_since_s, now_s) if is_idle else never
            quiet_since_s = min(quiet_since_s, now_s) if is_quiet else never
            # A replacement trainer may always be saving, so the waits have limits.
            if now_s - quiet_since_s >= self._settled_s or now_s - idle_since_s > self._give_up_s:
                return int(self._has_given_up)
            if is_done:
                pause_s = _LOOK_EVERY_S
            elif now_s - gone_at_s > self._give_up_s:
                return 1
            else:
                self._nothing_in = None
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _may_have_changed(self) -> bool:
        """Return True if the folder may have new checkpoints since the last check found none."""
        changed_at_ns, now_s = self._folder.stat().st_mtime_ns, time.monotonic()
        if changed_at_ns == self._nothing_in and now_s < self._look_again_s:
            return False
        self._nothing_in, self._look_again_s = changed_at_ns, now_s + _LOOK_ANYWAY_S
        return True

    def _newest_unpushed(self) -> CheckpointInfo | None:
        self._has_given_up = False
        for info in scan(self._folder):
            is_fit = info.state in ("written", "verified") and not (
                info.marks.damaged or info.abandoned
            )
            # Later checkpoints are the replacement trainer's to push.
            if not is_fit or (info.created_at_s or 0.0) > self._saved_until_s:
                continue
            save = info.path, _save_of(info.path)
            if save not in self._damaged:
                return None if save == self._done else info
            self._has_given_up = True
        return None

    def _push(self, info: CheckpointInfo) -> bool:
        """Push a checkpoint; return False if the push should be tried again."""
        self._nothing_in = None
        began_s, save = time.monotonic(), _save_of(info.path)
        # Record before the push; else a kill after the push would leave the push unrecorded.
        with (
            self._warned_of(f"The push of step {info.step} cannot be recorded in {self._folder}"),
            contextlib.suppress(FileNotFoundError),  # a newer save replaced the checkpoint
        ):
            name = remote_name(info.step, (info.path / MANIFEST_NAME).read_bytes())
            note_pushed(self._folder, self._remote.url, name)
        try:
            with self._wanted(info.path):
                pushed = self._remote.push(info.path)
        except DamagedCheckpoint as error:
            _print_line({"step": info.step, "failed": str(error)})
            self._unread[info.path, save] += isinstance(error.__cause__, UnreadError)
            if 0 < self._unread[info.path, save] < _READ_TRIES:
                return False
            # The damage stays, so the checkpoint before this one is pushed.
            self._damaged.add((info.path, save))
            return True
        except (HoldfastError, OSError) as error:
            if not info.path.exists():  # a newer save replaced the checkpoint
                return True
            _print_line({"step": info.step, "failed": str(error)})
            return False
        self._done = info.path, save
        seconds = time.monotonic() - began_s
        _print_line(
            {
                "step": info.step,
                "url": pushed.url,
                "size_bytes": pushed.size_bytes,
                "seconds": seconds,
            }
        )
        with self._warned_of("Superfluous steps cannot be deleted from storage"):
            self._delete_old(info.step)
        return True

    @contextlib.contextmanager
    def _wanted(self, checkpoint: Path) -> Iterator[None]:
        """Protect the checkpoint from deletion by a lease, and report progress to the trainer."""
        over = threading.Event()

        def mark(change: Callable[[], object]) -> None:
            reason = "Checkpoints may be deleted while they are pushed, since they cannot be marked as wanted"
            with self._warned_of(reason), contextlib.suppress(NotFound):
                change()

        def want_it() -> None:
            now_s = time.time()
            want(checkpoint, self._holder, now_s=now_s, until_s=now_s + _WANTED_FOR_S)

        def accompany() -> None:
            signs, wanted_at_s = self._remote.signs, time.monotonic()
            while not over.wait(_SIGN_EVERY_S):
                if self._remote.signs != signs:
                    signs = self._remote.signs
                    _print_line({"signs": signs})
                if time.monotonic() - wanted_at_s > _WANTED_FOR_S / 3:
                    wanted_at_s = time.monotonic()
                    mark(want_it)

        mark(want_it)
        companion = threading.Thread(target=accompany, daemon=True)
        companion.start()
        try:
            yield
        finally:
            over.set()
            companion.join()
            mark(lambda: release(checkpoint, self._holder, now_s=time.time()))

    @contextlib.contextmanager
    def _warned_of(self, consequence: str) -> Iterator[None]:
        """Log a failure inside the block once, as the reason for `consequence`, and continue."""
        try:
            yield
        except (HoldfastError, OSError) as error:
            if consequence not in self._warned:
                self._warned.add(consequence)
                _logger.warning("%s: %s", consequence, error)

    def _delete_old(self, pushed: int) -> None:
        """Delete the oldest checkpoints in storage if there are more than `keep`.

        Steps above `pushed`, the step pushed last, belong to an abandoned line of the run. They are
        neither counted nor deleted. Lower steps of abandoned lines are counted separately.
        """
        if self._keep is not None:
            there = [
                each
                for each in self._remote.scan()
                if each.state == "written" and each.step <= pushed
            ]
            left = left_by_newest(each.manifest for each in there if each.manifest)
            line = {
                each.step
                for each in there
                if each.manifest and not is_abandoned(each.manifest, left)
            }
            for steps in (line, {each.step for each in there} - line):
                for step in sorted(steps, reverse=True)[self._keep :]:
                    self._remote.delete(step)

    def _has_ended(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return True if the trainer has closed its pipe or died.

        The process id is watched, too, because the pipe of a dead trainer may stay open in a child
        that it forked.
        """
        stdin_fd = sys.stdin.fileno()
        ended = readable([stdin_fd, *self._trainer], timeout_s)
        if not ended and (self._trainer or os.getppid() == self._trainer_pid):
            return False
        if not (stdin_fd in ended and os.read(stdin_fd, 1)):  # the trainer did not end normally
            self._settled_s = _SETTLED_S
        _release(2)  # a reader of the trainer's stderr must not wait for this process
        return True


def _pidfd(pid: int) -> list[int]:
    """Return a descriptor that becomes readable when the process ends."""
    try:
        return [os.pidfd_open(pid)]
    except OSError:  # an old kernel; or the process is dead, and this one has another parent
        return []


def _save_of(path: Path) -> tuple[int, int]:
    """Return a value that identifies the save in a folder, and changes with the next save."""
    try:
        found = (path / MANIFEST_NAME).stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _print_line(line: dict[str, Any]) -> None:
    with _saying:
        try:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        except OSError:  # the trainer is gone
            _release(sys.stdout.fileno(), 2)


def _release(*fds: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    for fd in fds:
        os.dup2(nothing, fd)
    os.close(nothing)


class _ByTheTrainer(logging.Handler):
    """Send log records to the trainer, whose own logging then handles them."""

    def emit(self, record: logging.LogRecord) -> None:
        _print_line({"warning": self.format(record)})


def main() -> None:
    """Push the checkpoints that appear in the folder given on the command line."""
    parser = argparse.ArgumentParser(prog=Path(__file__).stem)
    parser.add_argument("trainer_pid", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--keep", type=int)
    parser.add_argument("--give-up-s", type=float, default=600.0)
    arguments = parser.parse_args()
    # The trainer handles a terminal's interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    _logger.addHandler(_ByTheTrainer())
    _logger.propagate = False
    remote = Remote(arguments.url)
    pushing = Pushing(
        arguments.folder,
        remote,
        trainer_pid=arguments.trainer_pid,
        keep=arguments.keep,
        give_up_s=arguments.give_up_s,
    )
    try:
        code = pushing.run()
    except Exception:
        _logger.exception("The process that pushes checkpoints ends after an internal error.")
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
