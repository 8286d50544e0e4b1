"""The newest durable snapshot of a rank that died stays in memory, for the rank that takes its place.

The writing process outlives its trainer. Unless that ended in good order, the process keeps the arena that it committed
last, and what it holds for ranks of peer nodes, and hands them out at a socket of this node (abstract, named by user,
checkpoint folder and rank), one request a connection, to processes of the same user only:

| request | answer |
|---|---|
| `{"want": "list"}` | `{"images": […]}`: what is kept, see `SnapshotInfo` |
| `{"want": "snapshot", "rank": R}` | what save it is and its memory; then its notes: layout and digests |
| `{"want": "end"}` | the end of the connection, once the memory is given back |

It ends after a stated time, when it is told to, when its supervisor ends, and when memory is short. No torch here.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from holdfast.checkpoint.distributed.place import ENV_NODE
from holdfast.checkpoint.ipc.durable_snapshot import DurableSnapshot, image_bytes
from holdfast.checkpoint.ipc.messages import receive, send
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.ipc.shared_buffer import Arena
from holdfast.core.memory import available_memory_bytes
from holdfast.core.sockets import readable

ENV_SUPERVISOR_PID: Final = "HOLDFAST_SUPERVISOR_PID"
"""The process with which all that is kept ends."""
SNAPSHOT_SERVER_PROCESS_NAME: Final = "holdfast-kept"
"""What such a process calls itself, so that whoever clears away what a dead job left knows it."""
LEAST_FREE_BYTES: Final = 1 << 30
"""What is kept is given back where the node has less left: a job that runs needs it more than one that may come."""
_LOOK_EVERY_S: Final = 0.5
_PATIENCE_S: Final = 5.0
LAST_SAVE_S: Final = 8.0
"""Seconds after the death of the trainer for which a client waits for the last save, before it gets what there is."""
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group: `struct ucred` of unix(7)."""


def address(folder: Path, rank: int) -> str:
    """Where the snapshot of a rank that saved into `folder` is handed out.

    By the folder itself, not its path: containers that share a network may have different ones of one path. And by the
    node, where it was given a name of its own.

    Raises:
        OSError: there is no such folder.
    """
    found = folder.stat()
    node = f"-{name}" if (name := os.environ.get(ENV_NODE)) else ""
    return f"\0holdfast-{os.geteuid()}-{found.st_dev:x}.{found.st_ino:x}-{rank}{node}"


def is_of_this_user(line: socket.socket) -> bool:
    """Whether the process at the other side of a unix socket runs as the user that this one runs as."""
    _pid, uid, _gid = _CREDENTIALS.unpack(
        line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(uid == os.geteuid())


class SnapshotInfo(NamedTuple):
    """The description of a snapshot in memory; `world_size` is the number of ranks that saved it."""

    rank: int
    world_size: int
    step: int
    save: str
    image_bytes: int
    notes_bytes: int


@dataclass(frozen=True, kw_only=True)
class ServedSnapshot:
    """One that can be handed out: `fd` is laid out as an arena, `notes` are what `DurableSnapshot.pack_notes` packs."""

    info: SnapshotInfo
    fd: int
    notes: int


class Others(Protocol):
    """What is held for ranks of peer nodes."""

    def images(self) -> list[ServedSnapshot]:
        """All of it; the descriptors stay open as long as what is returned is used."""

    def give_back(self) -> None:
        """Let go of all of it."""


class SnapshotServer:
    """Keeps what one writing process committed last."""

    def __init__(
        self,
        keep_s: float,
        *,
        trainer: int | None = None,
        trainer_pidfds: Sequence[int] = (),
        ends_with: Sequence[int] = (),
        now_s: Callable[[], float] = time.monotonic,
        free_bytes: Callable[[], int] = available_memory_bytes,
        others: Others | None = None,
    ) -> None:
        """Nothing is done before there is something to keep.

        Args:
            keep_s: how long it is kept; 0: not at all.
            trainer: the socket to the trainer; until it breaks whoever asks is turned away.
            trainer_pidfds: or until one of these can be read.
            ends_with: descriptors; once one of them can be read, nothing is kept any more.
            now_s: the time.
            free_bytes: how much memory the node has left.
            others: what is held for ranks of peer nodes, and kept as well.
        """
        self._others = others
        self._keep_s = keep_s
        self._trainer = select.poll()
        self._has_trainer = trainer is not None
        if trainer is not None:
            self._trainer.register(trainer, select.POLLRDHUP)
        for fd in trainer_pidfds:
            self._trainer.register(fd, select.POLLIN)
        self._ends_with = ends_with
        self._now_s = now_s
        self._free_bytes = free_bytes
        self._address = ""
        self._newest: DurableSnapshot | None = None
        self._listener: socket.socket | None = None
        self._is_through = threading.Event()
        self._is_unwanted = False
        self._serving = threading.Lock()

    @property
    def newest(self) -> DurableSnapshot | None:
        """What would be kept now; None where there is nothing, or nothing is to be kept."""
        return (
            self._newest
            if self._keep_s > 0 and self._newest is not None and self._newest.is_there()
            else None
        )

    @property
    def has_any(self) -> bool:
        """Whether there is something to keep, of this rank or of a peer node's."""
        if self._keep_s <= 0 or self._is_unwanted:
            return False
        return self.newest is not None or bool(self._others is not None and self._others.images())

    def ordered(self, order: SaveRequest, rank: int) -> None:
        """A save was ordered: from now on it is known who may come to ask."""
        if not self._address:
            with contextlib.suppress(OSError):
                self._address = address(order.folder, rank)
            self._listen()
            if self._listener is not None and self._has_trainer:
                self._trainer.register(self._listener, select.POLLIN)
                threading.Thread(
                    target=self._serve_meanwhile, args=(self._listener,), daemon=True
                ).start()

    def committed(self, snapshot: DurableSnapshot) -> bool:
        """A save is durable. Whether it is worth keeping: what is not known by the digest of each block is not."""
        is_known = snapshot.blocks.keys() == {shard.name for shard in snapshot.layout.shards}
        if is_known:
            self._newest = snapshot
        return is_known

    def forget(self, arena: Arena) -> None:
        """It is used no more."""
        if self._newest is not None and self._newest.arena is arena:
            self._newest = None

    def _listen(self) -> None:
        if self._listener is not None or not self._address or self._keep_s <= 0:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(self._address)
            listener.listen()
            listener.setblocking(False)
        except OSError:  # another one is still there
            listener.close()
        else:
            self._listener = listener

    def _serve_meanwhile(self, listener: socket.socket) -> None:
        """Until `keep`, or the end of the process.

        While the trainer lives nothing is left. After its death its last save may wait for a rank that died with its
        node, and never be: what was durable before is handed out then.
        """
        while all(fd == listener.fileno() for fd, _event in self._trainer.poll()):
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
        if self._is_through.wait(LAST_SAVE_S):
            return
        while not (self._is_unwanted or self._is_through.is_set() or self._is_over()):
            if not readable([listener.fileno()], _LOOK_EVERY_S):
                continue
            with self._serving:
                if self._is_through.is_set():
                    return
                snapshot = self.newest
                own = [] if snapshot is None else [_image_of(snapshot)]
                last = self._serve(listener, own)
                _close_notes(own)
                if last is not None:
                    self._is_unwanted = True
                    listener.close()
                    self._release(snapshot)
                    last.close()

    def keep(self) -> None:
        """Hand out what is kept until it is to end; then the memory is free, as far as this process has it."""
        self._is_through.set()
        with self._serving:
            self._listen()
            listener = self._listener
        if not self.has_any or listener is None:
            return
        snapshot = self.newest
        own = [] if snapshot is None else [_image_of(snapshot)]
        last: socket.socket | None = None
        try:
            until_s = self._now_s() + self._keep_s
            while (
                last is None and self._now_s() < until_s and self._free_bytes() >= LEAST_FREE_BYTES
            ):
                if self._is_over():
                    break
                last = self._serve(listener, own)
        finally:
            listener.close()
            _close_notes(own)
            self._release(snapshot)
            if last is not None:
                last.close()

    def _serve(
        self, listener: socket.socket, own: Sequence[ServedSnapshot]
    ) -> socket.socket | None:
        """Answer one request, if one comes soon; its line, open, where it is for the end."""
        ready = readable([listener.fileno(), *self._ends_with], _LOOK_EVERY_S)
        if listener.fileno() not in ready:
            return None
        try:
            line, _address = listener.accept()
        except BlockingIOError:  # another thread has it
            return None
        return _answer(line, [*own, *([] if self._others is None else self._others.images())])

    def _is_over(self) -> bool:
        return bool(readable(self._ends_with, 0))

    def _release(self, snapshot: DurableSnapshot | None) -> None:
        self._newest = None
        if snapshot is not None:
            snapshot.arena.close()
        if self._others is not None:
            self._others.give_back()


def _close_notes(images: Sequence[ServedSnapshot]) -> None:
    for image in images:
        os.close(image.notes)


def _image_of(snapshot: DurableSnapshot) -> ServedSnapshot:
    order, layout, notes = snapshot.order, snapshot.layout, snapshot.pack_notes()
    info = SnapshotInfo(
        layout.rank, layout.world_size, order.step, order.save, image_bytes(layout), len(notes)
    )
    return ServedSnapshot(info=info, fd=snapshot.arena.fd, notes=notes_file(notes))


def notes_file(notes: bytes) -> int:
    """The descriptor of a file in memory that holds them."""
    fd = os.memfd_create("holdfast-notes", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(notes)
    return fd


def _answer(line: socket.socket, images: Sequence[ServedSnapshot]) -> socket.socket | None:
    """Do as a successor asks; `line`, open, where it asked for the end."""
    wants_end = False
    try:
        line.settimeout(_PATIENCE_S)
        if is_of_this_user(line) and (received := receive(line)) is not None:
            asked = received[0]
            wants_end = asked == {"want": "end"}
            if asked == {"want": "list"}:
                send(line, {"images": [image.info for image in images]})
            for image in images:
                if asked == {"want": "snapshot", "rank": image.info.rank}:
                    send(line, {"step": image.info.step, "save": image.info.save}, image.fd)
                    send(line, {}, image.notes)
                    break
    except (OSError, ValueError):  # it went away, or is none of ours
        wants_end = False
    if wants_end:
        return line
    line.close()
    return None
