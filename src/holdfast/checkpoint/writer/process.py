"""Run the process that writes one rank's checkpoints, even after the trainer has died.

`Writer` starts the process with the number of a socket, the trainer's process id, and the seconds
to keep the newest snapshot for a replacement trainer. The process carries out one request after
another. Once the trainer has exited, the process completes its requests, keeps the snapshot, and
ends. The process needs no torch.
"""

import argparse
import contextlib
import errno
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.catalog.catalog import scan
from holdfast.checkpoint.format.manifest import ManifestError, read_manifest
from holdfast.checkpoint.format.rank_layout import Layout
from holdfast.checkpoint.format.replica_digests import Differing
from holdfast.checkpoint.ipc.durable_snapshot import DurableSnapshot
from holdfast.checkpoint.ipc.messages import (
    ENV_SUPERVISOR_PID,
    SNAPSHOT_SERVER_PROCESS_NAME,
    receive,
    send,
)
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.ipc.shared_buffer import Arena, ArenaError, State
from holdfast.checkpoint.memory.peer import PeerMemory
from holdfast.checkpoint.memory.server import SnapshotServer
from holdfast.checkpoint.writer.commit import FULL, RankFailed, check_lease
from holdfast.checkpoint.writer.persist import (
    NotAttested,
    RankWrite,
    delete_leftovers,
    delete_superfluous,
    make_room,
    persist,
)
from holdfast.core.errors import HoldfastError
from holdfast.core.rate_limit import RateLimit
from holdfast.core.sockets import readable
from holdfast.core.system_limits import advice_on, in_words

ALIVE_EVERY_S: Final = 0.5
_LOOK_EVERY_S: Final = 0.01
_LOOK_SELDOM_S: Final = 0.5
"""The longest pause in seconds between checks for other ranks' files.

Pauses grow to this length, because all ranks of a job read the same folder.
"""
_FOLLOW_EVERY_S: Final = 0.001
"""Seconds between checks of the copy's progress; copying 16 MiB takes a few milliseconds."""
_PIECES: Final = 1000
"""The number of differing pieces that the report of a failure lists at most."""
_TAKE_TURNS_S: Final = 0.0002
"""Python's switch interval in seconds. The default of 5 ms is as long as the write of a chunk."""
_NICENESS: Final = 5
"""The niceness of the process, which lets the trainer run first if CPU cores are short.

The kernel derives the I/O priority from the niceness, as (5 + 20) / 5. The result is one below the
trainer's priority of 4 (ioprio_set(2)).
"""
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LEFT_TO_TRAINER: Final = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the trainer handles and this process ignores.

A terminal or a scheduler sends these signals to all processes of a job. The trainer may save in
response, and this process must still write that save.
"""


class Service:
    """Carry out the requests of one trainer in the writing process."""

    def __init__(self, trainer: socket.socket, trainer_pid: int, keep_s: float) -> None:
        self._trainer = trainer
        self._trainer_pidfds = _pidfd(trainer_pid)
        named = os.environ.get(ENV_SUPERVISOR_PID)
        supervisor = _pidfd(int(named)) if named else []
        self._peer = PeerMemory(
            own_bytes=self._arena_bytes, held=lambda step: self._send({"held": step})
        )
        self._keeper = SnapshotServer(
            keep_s if supervisor or not named else 0.0,
            trainer=trainer.fileno(),
            trainer_pidfds=self._trainer_pidfds,
            ends_with=supervisor,
            others=self._peer,
        )
        self._in_good_order = self._has_tidied = False
        self._arenas: dict[int, Arena] = {}
        self._layouts: dict[int, Layout] = {}
        self._pace = RateLimit(None)
        self._moves = 0
        self._messages = queue.SimpleQueue[tuple[dict[str, Any], int | None] | None]()
        self._saying = threading.Lock()

    def serve(self) -> None:
        """Carry out requests until the trainer has exited."""
        self._send_alive()  # before any request, so that a hang in the first write is detected
        threading.Thread(target=self._keep_saying, daemon=True).start()
        threading.Thread(target=self._receive, daemon=True).start()
        while (received := self._messages.get()) is not None:
            self._take(*received)

    def _receive(self) -> None:
        """Queue the trainer's messages as they arrive, even while a save is being written."""
        try:
            # Watch the trainer's pidfd, too, because a process forked by the trainer may hold the
            # socket open after the trainer has died.
            while self._trainer.fileno() in readable(
                [self._trainer.fileno(), *self._trainer_pidfds], None
            ):
                try:
                    received = receive(self._trainer)
                # The trainer died with unread messages; earlier requests can still be received.
                except ConnectionResetError:
                    continue
                if received is None:
                    break
                self._messages.put(received)
        except OSError:  # the trainer is gone
            pass
        finally:
            self._messages.put(None)

    def _take(self, message: dict[str, Any], fd: int | None) -> None:
        if "save" in message:
            self._save(message, b"" if fd is None else _read_file(fd))
        elif fd is not None and "arena" in message:
            self._arenas[message["arena"]] = Arena(fd)
        elif fd is not None and "peer" in message:
            self._peer.paired(message["peer"], fd)
        elif fd is not None:
            self._layouts[message["layout"]] = Layout.unpack(_read_file(fd))
        elif "forget" in message:
            for number in message["forget"]["arenas"]:
                self._keeper.forget(self._arenas[number])
                self._arenas.pop(number).close()
            for number in message["forget"]["layouts"]:
                del self._layouts[number]
        elif "closed" in message:
            self._in_good_order = True

    def keep(self) -> None:
        """Keep the newest snapshot in memory after the trainer's death, for a restarted trainer.

        Nothing is kept if the trainer has closed its Checkpointer.
        """
        if self._in_good_order or not self._keeper.has_any:
            return
        newest = self._keeper.newest
        for arena in self._arenas.values():
            if newest is None or arena is not newest.arena:
                arena.close()
        self._arenas.clear()
        self._layouts.clear()
        _release_stderr()
        os.chdir("/")
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(SNAPSHOT_SERVER_PROCESS_NAME)
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        self._keeper.keep()

    def _save(self, message: dict[str, Any], replicas: bytes) -> None:
        arena, generation = self._arenas[message["arena"]], message["generation"]
        layout, order = self._layouts[message["layout"]], SaveRequest.of_json(message["save"])
        ended: dict[str, Any] = {"arena": message["arena"], "generation": generation}
        self._send({"began": ended})
        began_s = time.monotonic()
        # A former process committed the save and died before its report.
        if (arena.generation, arena.state) == (generation, State.COMMITTED):
            self._send(
                {"ended": {**ended, "seconds": 0.0, **_committed(order, layout.rank, Differing())}}
            )
            return
        until_s = began_s + message["timeout_s"]
        self._pace.max_bytes_s = message["max_write_bytes_s"]

        def claim() -> None:
            if arena.progress(generation).state is State.SEALED:
                arena.move(State.WRITING, generation)

        def await_copy(count: int | None) -> None:
            while (now := arena.progress(generation)).state is State.COPYING and (
                count is None or now.copied < count
            ):
                if self._is_trainer_gone():
                    raise RankFailed("its trainer ended while the snapshot was copied")
                if time.monotonic() > until_s:
                    raise TimeoutError(
                        f"the snapshot was not copied after {message['timeout_s']:g} s"
                    )
                self._moved(1)
                time.sleep(_FOLLOW_EVERY_S)
            if now.state is State.FREE:
                raise RankFailed("its snapshot was discarded")
            if count is None:
                claim()

        blocks: dict[str, bytes] = {}
        self._keeper.ordered(order, layout.rank)
        live = arena.notes[: message["attested_bytes"]] if message["attested_bytes"] else None
        try:
            # If the trainer has freed the buffer, `claim` may fail here. `_persist` then fails,
            # too, and leaves a note for the other ranks.
            with contextlib.suppress(ArenaError):
                claim()
            if layout.rank == 0 and not self._has_tidied and _may_write(order):
                delete_leftovers(order, self._moved)
                self._has_tidied = True
            differing = self._persist(
                RankWrite(
                    order=order,
                    layout=layout,
                    image=arena.image,
                    live=live,
                    await_copy=await_copy,
                    wait=self._waits(message["timeout_s"]),
                    pace=self._pace,
                    progress=self._moved,
                    blocks=blocks,
                    replicas=replicas,
                    refuses=message["refuses"],
                )
            )
        except Exception as error:
            ended |= {
                "failed": explain(order, layout.size_bytes, error),
                "errno": getattr(error, "errno", None),
                "is_final": getattr(error, "is_final", False),
            }
            if isinstance(error, NotAttested):
                ended["pieces"] = error.pieces[:_PIECES]
            with contextlib.suppress(ArenaError):  # the trainer has freed the buffer
                arena.move(State.FREE, generation)
        else:
            arena.move(State.COMMITTED, generation)
            snapshot = DurableSnapshot(
                order=order, layout=layout, arena=arena, generation=generation, blocks=blocks
            )
            if self._keeper.committed(snapshot):
                self._peer.offer(snapshot)
            ended |= _committed(order, layout.rank, differing)
        self._send({"ended": {**ended, "seconds": time.monotonic() - began_s}})
        if layout.rank == 0 and _may_write(order):
            self._tidy(order, layout, ended)

    def _tidy(self, order: SaveRequest, layout: Layout, ended: dict[str, Any]) -> None:
        """Delete checkpoints that need not be kept, or make room after a full disk.

        Call this method after the outcome is sent, since deleting may take long.
        """
        if "failed" not in ended:
            delete_superfluous(order, self._moved)
        elif layout.world_size > 1:  # with one rank, `_persist` has tried to make room
            self._make_room(order, layout, ended["errno"])

    def _persist(self, part: RankWrite) -> Differing:
        while True:
            try:
                return persist(part)
            except OSError as error:
                # With several ranks, the save fails, since some ranks may have completed their
                # parts; the trainers then save again.
                if part.layout.world_size > 1 or not self._make_room(
                    part.order, part.layout, error.errno
                ):
                    raise

    def _make_room(self, order: SaveRequest, layout: Layout, code: int | None) -> bool:
        if not _may_write(order):
            return False
        deleted = make_room(order, code, layout.size_bytes, self._moved)
        if deleted is not None:
            event = {
                "folder": str(order.folder),
                "deleted": str(deleted.path),
                "size_bytes": deleted.size_bytes,
            }
            self._send({"made_room": event})
        return deleted is not None

    def _waits(self, timeout_s: float) -> Callable[[], None]:
        """Return a poll function that raises TimeoutError after `timeout_s` of waiting.

        The time is counted from the first call, so the time of this rank's own writing is not
        included.
        """
        since_s: float | None = None

        def wait() -> None:
            nonlocal since_s
            since_s = since_s or time.monotonic()
            waited_s = time.monotonic() - since_s
            if waited_s > timeout_s:
                raise TimeoutError(f"the other ranks had not finished after {timeout_s:g} s")
            self._moved(1)
            time.sleep(pause_s(waited_s))

        return wait

    def _arena_bytes(self) -> int:
        return sum(arena.capacity_bytes for arena in list(self._arenas.values()))

    def _is_trainer_gone(self) -> bool:
        return bool(readable(self._trainer_pidfds, 0))

    def _moved(self, count: int) -> None:
        """Count progress, by which the trainer distinguishes a slow process from a stalled one."""
        self._moves += count

    def _send_alive(self) -> None:
        self._send({"alive": self._moves}, may_drop=True)

    def _keep_saying(self) -> None:
        while True:
            time.sleep(ALIVE_EVERY_S)
            self._send_alive()

    def _send(self, message: dict[str, Any], *, may_drop: bool = False) -> None:
        with self._saying:
            while True:
                try:
                    return send(self._trainer, message, may_wait=False)
                except BlockingIOError:  # the socket's buffer is full
                    if may_drop:
                        return None
                    # A child of a dead trainer may hold the socket open and never read.
                    if not self._is_trainer_gone():
                        time.sleep(_LOOK_EVERY_S)
                        continue
                except OSError:
                    pass
                # The trainer is gone; its requests are carried out all the same.
                return _release_stderr()


def _may_write(order: SaveRequest) -> bool:
    """Return True if this process may write and delete in the folder.

    It may not if another process has acquired the right to write there.
    """
    with contextlib.suppress(RankFailed):
        check_lease(order)
        return True
    return False


def _committed(order: SaveRequest, rank: int, differing: Differing) -> dict[str, Any]:
    """Return the digest and size of the checkpoint for rank 0's report; {} on other ranks.

    The trainer then need not read them from storage.
    """
    if rank:
        return {}
    report = {"differing": differing.as_json()} if differing.count else {}
    try:
        manifest = read_manifest(order.final, step=order.step)
    except (ManifestError, OSError):  # the checkpoint was deleted or moved away
        return report
    return report | {"digest": manifest.digest, "size_bytes": manifest.size_bytes}


def _read_file(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()


def pause_s(waited_s: float) -> float:
    """Return the pause in seconds before the next check for other ranks' files.

    The pause is a tenth of `waited_s`, the seconds waited so far, within fixed limits.
    """
    return min(max(_LOOK_EVERY_S, waited_s / 10), _LOOK_SELDOM_S)


def _release_stderr() -> None:
    """Release stderr, because a program that reads the trainer's stderr waits for its end.

    The end is reached only when all processes that hold the stream have closed it.
    """
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)


def _pidfd(pid: int) -> list[int]:
    try:
        return [os.pidfd_open(pid)]
    except OSError:  # the process is gone, or the kernel is older than 5.3
        return []


def main() -> None:
    """Serve the trainer that is connected to the socket given on the command line."""
    parser = argparse.ArgumentParser(prog=Path(__file__).stem)
    parser.add_argument("socket", type=int)
    parser.add_argument("trainer_pid", type=int)
    parser.add_argument("keep_s", type=float)
    arguments = parser.parse_args()
    for number in _LEFT_TO_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_TAKE_TURNS_S)
    os.nice(_NICENESS)
    service = Service(
        socket.socket(fileno=arguments.socket), arguments.trainer_pid, arguments.keep_s
    )
    service.serve()
    service.keep()


def explain(order: SaveRequest, needed_bytes: int, error: Exception) -> str:
    """Describe a failed save: its reason, the last good checkpoint, and what the user can do.

    Call this function after the files of the failed save are deleted.

    Args:
        order: the save that failed.
        needed_bytes: the number of bytes that this rank had to write.
        error: the error that ended the save.
    """
    folder = order.folder
    # An error that is final, without advice, is not about the storage.
    if getattr(error, "is_final", False) and not getattr(error, "advice", ""):
        return f"Step {order.step} was not saved: {error}."
    try:
        good = next(
            (info for info in scan(folder) if info.state == "written" and not info.abandoned), None
        )
        free_bytes = shutil.disk_usage(folder).free
    except (OSError, HoldfastError) as gone:
        if advice := advice_on(error) or advice_on(gone):
            return f"Step {order.step} was not saved: {in_words(error)}. {advice}"
        return f"Step {order.step} was not saved: {error}; {gone} Mount or make the folder again."
    code = getattr(error, "errno", None)
    if code in FULL:
        reason = (
            f"{folder} is full: about {needed_bytes:,} bytes are needed and {free_bytes:,} are free"
        )
        advice = "Free space there, keep fewer checkpoints, or give Checkpointer another folder."
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = f"{folder} cannot be written ({error})"
        advice = "Make it writable, or give Checkpointer another folder."
    elif advice := advice_on(error):
        reason = in_words(error)
    else:
        reason = f"{error} (in {folder})"
        advice = getattr(error, "advice", "") or "Look at that folder's storage and save again."
    last = (
        "There is no earlier checkpoint."
        if good is None
        else f"The last good step is {good.step} ({good.path})."
    )
    return f"Step {order.step} was not saved: {reason}. {last} {advice}"


if __name__ == "__main__":
    main()
