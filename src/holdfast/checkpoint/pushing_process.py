"""The process that keeps object storage in step with a checkpoint folder. It needs no torch, and outlives the trainer.

Started by `Pusher` for rank 0, with its process id. It looks at the folder, pushes the newest checkpoint that storage
does not have, and looks again: where saves come faster than storage takes them, those in between are left out. What
fails is tried again for as long as the trainer lives. Once that has said on its standard input that it ends, or is
dead, it pushes the newest one, also one that becomes durable just then, and ends: with 1 where the newest is not there.

It prints a line of JSON for each push: `{"step", "url", "size_bytes", "seconds"}`, or `{"step", "failed"}`.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.catalog import CheckpointInfo, scan
from holdfast.checkpoint.folders import has_unfinished
from holdfast.checkpoint.manifest import MANIFEST_NAME, UnreadError
from holdfast.checkpoint.marks import release, want
from holdfast.checkpoint.messages import readable
from holdfast.checkpoint.remote import Remote
from holdfast.core.errors import DamagedCheckpoint, HoldfastError

_LOOK_EVERY_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
_HOLDER: Final = "push"
_WANTED_FOR_S: Final = 24 * 3600.0
"""A push that was killed does not keep its checkpoint for ever."""
_SETTLED_S: Final = 5.0
"""What a trainer that was killed had ordered begins to be written within this time."""
_READ_TRIES: Final = 5
"""Of one that cannot be read, before it counts as damaged."""
_NICENESS: Final = 5
_logger = logging.getLogger("holdfast")


class Pushing:
    """What is pushed, and whether the trainer is still there."""

    def __init__(self, folder: Path, remote: Remote, *, trainer_pid: int, keep: int | None, give_up_s: float) -> None:
        self._trainer_pid = trainer_pid
        self._trainer = _pidfd(trainer_pid)
        self._folder = folder
        self._remote = remote
        self._keep = keep
        self._give_up_s = give_up_s
        self._done: tuple[Path, tuple[int, int]] | None = None
        self._damaged: set[tuple[Path, tuple[int, int]]] = set()
        self._unread: Counter[tuple[Path, tuple[int, int]]] = Counter()
        self._settled_s = 0.0

    def run(self) -> int:
        """Push until the trainer is gone and nothing is left to push; 1 where the newest could not be pushed."""
        never = float("inf")
        pause_s, gone_at_s, quiet_since_s = _LOOK_EVERY_S, never, never
        while True:
            if gone_at_s == never and self._has_ended(pause_s):
                gone_at_s, pause_s = time.monotonic(), _LOOK_EVERY_S
            elif gone_at_s < never:
                time.sleep(pause_s)
            # Before the look: what becomes durable meanwhile is seen.
            is_quiet = gone_at_s < never and not has_unfinished(self._folder)
            newest = self._newest_unpushed()
            quiet_since_s = min(quiet_since_s, time.monotonic()) if is_quiet and newest is None else never
            if newest is None:
                if time.monotonic() - quiet_since_s >= self._settled_s:
                    return int(self._has_given_up())
                pause_s = _LOOK_EVERY_S
            elif self._push(newest):
                pause_s = _LOOK_EVERY_S
            elif time.monotonic() - gone_at_s > self._give_up_s:
                return 1
            else:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _newest_unpushed(self) -> CheckpointInfo | None:
        newest = next((info for info in self._fit() if (info.path, _save_of(info.path)) not in self._damaged), None)
        return None if newest is None or (newest.path, _save_of(newest.path)) == self._done else newest

    def _has_given_up(self) -> bool:
        """Whether the newest is one that could not be pushed."""
        newest = next(self._fit(), None)
        return newest is not None and (newest.path, _save_of(newest.path)) in self._damaged

    def _fit(self) -> Iterator[CheckpointInfo]:
        return (info for info in scan(self._folder) if info.state in ("written", "verified") and not info.marks.damaged)

    def _push(self, info: CheckpointInfo) -> bool:
        """Whether there is nothing more to do for this one."""
        began_s, save = time.monotonic(), _save_of(info.path)
        try:
            now_s = time.time()
            want(info.path, _HOLDER, now_s=now_s, until_s=now_s + _WANTED_FOR_S)
            try:
                pushed = self._remote.push(info.path)
            finally:
                release(info.path, _HOLDER, now_s=time.time())
            self._delete_old(info.step)
        except DamagedCheckpoint as error:
            _say({"step": info.step, "failed": str(error)})
            self._unread[info.path, save] += isinstance(error.__cause__, UnreadError)
            if 0 < self._unread[info.path, save] < _READ_TRIES:
                return False
            self._damaged.add((info.path, save))  # it will not heal: the one before is what can be pushed
            return True
        except (HoldfastError, OSError) as error:
            if not info.path.exists():  # a newer one took its place
                return True
            _say({"step": info.step, "failed": str(error)})
            return False
        self._done = info.path, save
        seconds = time.monotonic() - began_s
        _say({"step": info.step, "url": pushed.url, "size_bytes": pushed.size_bytes, "seconds": seconds})
        return True

    def _delete_old(self, pushed: int) -> None:
        """Later steps are of a run that went on from elsewhere: what was pushed now does not go for them."""
        if self._keep is not None:
            there = {each.step for each in self._remote.scan() if each.state == "written" and each.step <= pushed}
            for step in sorted(there, reverse=True)[self._keep :]:
                self._remote.delete(step)

    def _has_ended(self, timeout_s: float) -> bool:
        """Whether the trainer has closed it or is dead, which a child that it forked may keep from being its end."""
        said = sys.stdin.fileno()
        ended = readable([said, *self._trainer], timeout_s)
        if not ended and (self._trainer or os.getppid() == self._trainer_pid):
            return False
        if not (said in ended and os.read(said, 1)):  # not in good order
            self._settled_s = _SETTLED_S
        return True


def _pidfd(pid: int) -> list[int]:
    """What can be read once the process is dead."""
    try:
        return [os.pidfd_open(pid)]
    except OSError:  # an old kernel, or it is dead: then this process has another parent
        return []


def _save_of(path: Path) -> tuple[int, int]:
    """What tells a step that was saved again from what it was."""
    try:
        found = (path / MANIFEST_NAME).stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _say(line: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    except OSError:  # the trainer is gone
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.dup2(nothing, sys.stderr.fileno())
        os.close(nothing)


def main() -> None:
    """Push what appears in the folder that the arguments name."""
    parser = argparse.ArgumentParser(prog=Path(__file__).stem)
    parser.add_argument("trainer_pid", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--keep", type=int)
    parser.add_argument("--give-up-s", type=float, default=600.0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is the trainer's to act on
    os.nice(_NICENESS)
    remote = Remote(arguments.url)
    pushing = Pushing(
        arguments.folder,
        remote,
        trainer_pid=arguments.trainer_pid,
        keep=arguments.keep,
        give_up_s=arguments.give_up_s,
    )
    sys.exit(pushing.run())


if __name__ == "__main__":
    main()
