"""The process that keeps object storage in step with a checkpoint folder. It needs no torch, and outlives the trainer.

Started by `Pusher` for rank 0, with its process id. It looks at the folder, pushes the newest checkpoint that storage
does not have, and looks again: where saves come faster than storage takes them, those in between are left out. What
fails is tried again for as long as the trainer lives. Once that has said on its standard input that it ends, or is
dead, it pushes the newest one, also one that becomes durable just then, and ends: with 1 where the newest is not there.
What the trainer's successor saves is left to the process of that one, and what is being saved is not waited for any
more once there has been nothing to push for ten minutes.

It prints a line of JSON for each push: `{"step", "url", "size_bytes", "seconds"}`, or `{"step", "failed"}`; while it
gets on with one, `{"signs"}`; and what else there is to say, `{"warning"}`.
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
"""Also where no checkpoint has come or gone: one that was copied in by hand may have been completed."""
_LONGEST_PAUSE_S: Final = 60.0
_SIGN_EVERY_S: Final = 5.0
_WANTED_FOR_S: Final = 600.0
"""Renewed while it is pushed, so that a push that was killed does not keep its checkpoint for long."""
_SETTLED_S: Final = 5.0
"""What a trainer that was killed had ordered begins to be written within this time."""
_CLOCK_STEP_S: Final = 60.0
"""So far a clock may be set back without the trainer's last save being taken for one of its successor."""
_READ_TRIES: Final = 5
"""Of one that cannot be read, before it counts as damaged."""
_NICENESS: Final = 5
_logger = logging.getLogger("holdfast")
_saying = threading.Lock()


class Pushing:
    """The checkpoints to upload, and the state of the trainer that saves them."""

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
        """Push until the trainer is gone and nothing is left to push; 1 where the newest could not be pushed."""
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
            with self._warned_of(f"What is to be pushed from {self._folder} cannot be seen yet"):
                # Before the look: what becomes durable meanwhile is seen.
                is_saving = is_gone and has_unfinished(self._folder)
                newest = self._newest_unpushed() if is_gone or self._may_have_changed() else None
                is_idle = is_gone and newest is None
                is_quiet = is_idle and not is_saving
                is_done = newest is None or self._push(newest)
            now_s = time.monotonic()
            idle_since_s = min(idle_since_s, now_s) if is_idle else never
            quiet_since_s = min(quiet_since_s, now_s) if is_quiet else never
            # A successor may always be saving.
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
        """Whether the folder is not as it was when there was nothing to push."""
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
            if (
                not is_fit or (info.created_at_s or 0.0) > self._saved_until_s
            ):  # that is its successor's to push
                continue
            save = info.path, _save_of(info.path)
            if save not in self._damaged:
                return None if save == self._done else info
            self._has_given_up = True
        return None

    def _push(self, info: CheckpointInfo) -> bool:
        """Whether there is nothing more to do for this one."""
        self._nothing_in = None
        began_s, save = time.monotonic(), _save_of(info.path)
        # Before it is there: a kill, and a later step that goes next, would leave it unnoted.
        with (
            self._warned_of(f"That step {info.step} is pushed is not noted in {self._folder}"),
            contextlib.suppress(FileNotFoundError),  # a newer one took its place
        ):
            name = remote_name(info.step, (info.path / MANIFEST_NAME).read_bytes())
            note_pushed(self._folder, self._remote.url, name)
        try:
            with self._wanted(info.path):
                pushed = self._remote.push(info.path)
        except DamagedCheckpoint as error:
            _say({"step": info.step, "failed": str(error)})
            self._unread[info.path, save] += isinstance(error.__cause__, UnreadError)
            if 0 < self._unread[info.path, save] < _READ_TRIES:
                return False
            self._damaged.add(
                (info.path, save)
            )  # it will not heal: the one before is what can be pushed
            return True
        except (HoldfastError, OSError) as error:
            if not info.path.exists():  # a newer one took its place
                return True
            _say({"step": info.step, "failed": str(error)})
            return False
        self._done = info.path, save
        seconds = time.monotonic() - began_s
        _say(
            {
                "step": info.step,
                "url": pushed.url,
                "size_bytes": pushed.size_bytes,
                "seconds": seconds,
            }
        )
        with self._warned_of("Steps that are to be deleted stay in storage"):
            self._delete_old(info.step)
        return True

    @contextlib.contextmanager
    def _wanted(self, checkpoint: Path) -> Iterator[None]:
        """Nobody deletes it meanwhile; and the trainer hears that something goes on."""
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
                    _say({"signs": signs})
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
        """What fails here is said once, and keeps nothing from being pushed."""
        try:
            yield
        except (HoldfastError, OSError) as error:
            if consequence not in self._warned:
                self._warned.add(consequence)
                _logger.warning("%s: %s", consequence, error)

    def _delete_old(self, pushed: int) -> None:
        """Later steps are of a run that went on from elsewhere: what was pushed now does not go for them."""
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
        """Whether the trainer has closed it or is dead, which a child that it forked may keep from being its end."""
        said = sys.stdin.fileno()
        ended = readable([said, *self._trainer], timeout_s)
        if not ended and (self._trainer or os.getppid() == self._trainer_pid):
            return False
        if not (said in ended and os.read(said, 1)):  # not in good order
            self._settled_s = _SETTLED_S
        _release(2)  # whoever reads what the trainer said does not wait for this
        return True


def _pidfd(pid: int) -> list[int]:
    """What can be read once the process is dead."""
    try:
        return [os.pidfd_open(pid)]
    except OSError:  # an old kernel, or it is dead: then this process has another parent
        return []


def _save_of(path: Path) -> tuple[int, int]:
    """Return the identity of the save in a folder, which changes if the step is saved again."""
    try:
        found = (path / MANIFEST_NAME).stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _say(line: dict[str, Any]) -> None:
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
    """The trainer says it, to whom and how its own warnings are said."""

    def emit(self, record: logging.LogRecord) -> None:
        _say({"warning": self.format(record)})


def main() -> None:
    """Push what appears in the folder that the arguments name."""
    parser = argparse.ArgumentParser(prog=Path(__file__).stem)
    parser.add_argument("trainer_pid", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--keep", type=int)
    parser.add_argument("--give-up-s", type=float, default=600.0)
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's interrupt is the trainer's to act on
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
        _logger.exception("The process that pushes checkpoints ends by an error of its own.")
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
