"""Keep a dead rank's newest durable snapshot in memory, and serve it to the restarted rank.

The server runs in the writing process, which continues after its trainer has died. If the trainer
died without closing its Checkpointer, the server keeps two kinds of snapshots: the last durable one
of this rank, and those that it holds for ranks of peer nodes. It serves them at an abstract unix
socket of this node, whose name contains the user, the checkpoint folder and the rank. Only
processes of the same user are served. Each connection carries one request:

| request | answer |
|---|---|
| `{"want": "list"}` | `{"images": […]}`: a `SnapshotInfo` for each snapshot |
| `{"want": "snapshot", "rank": R}` | step, save and memory of a snapshot; then its layout and digests |
| `{"want": "end"}` | none; the connection is closed once all memory is released |

The server ends after `keep_s` seconds, on the request `end`, when its supervisor ends, or when the
node is short of memory. This module needs no torch.
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

MIN_FREE_BYTES: Final = 1 << 30
"""The free memory below which snapshots are released, because the running job needs it more."""
_LOOK_EVERY_S: Final = 0.5
_PATIENCE_S: Final = 5.0
LAST_SAVE_S: Final = 8.0
"""Seconds after the trainer's death for which clients wait for its last save to become durable."""
_CREDENTIALS: Final = struct.Struct("3i")
"""The process, user and group ids of a peer: `struct ucred` of unix(7)."""


def address(folder: Path, rank: int) -> str:
    """Return the socket address at which the snapshots of `rank`, saved in `folder`, are served.

    Raises:
        OSError: the folder does not exist.
    """
    # The folder is identified by device and inode, not by path: containers that share a network may
    # mount different folders at one path. The node's name is part of the address, because several
    # nodes may share a network namespace.
    found = folder.stat()
    node = f"-{name}" if (name := os.environ.get(ENV_NODE)) else ""
    return f"\0holdfast-{os.geteuid()}-{found.st_dev:x}.{found.st_ino:x}-{rank}{node}"


def is_of_this_user(line: socket.socket) -> bool:
    """Return True if the process at the other end of a unix socket runs as the same user."""
    _pid, uid, _gid = _CREDENTIALS.unpack(
        line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(uid == os.geteuid())


class SnapshotInfo(NamedTuple):
    """Describe a snapshot in memory; `world_size` is the number of ranks that made the save."""

    rank: int
    world_size: int
    step: int
    save: str
    image_bytes: int
    notes_bytes: int


@dataclass(frozen=True, kw_only=True)
class ServedSnapshot:
    """Hold the descriptors of a snapshot that is served.

    Attributes:
        info: the description of the snapshot.
        fd: the descriptor of the snapshot's memory, laid out like an `Arena`.
        notes: the descriptor of a file with the bytes of `DurableSnapshot.pack_notes`.
    """

    info: SnapshotInfo
    fd: int
    notes: int


class Others(Protocol):
    """Give access to the snapshots that this process holds for ranks of peer nodes."""

    def images(self) -> list[ServedSnapshot]:
        """Return all held snapshots; the descriptors stay open while the result is in use."""

    def give_back(self) -> None:
        """Release all held snapshots."""


class SnapshotServer:
    """Keep the newest durable snapshot of one writing process, and serve it after a crash."""

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
        """Create the server; it begins to listen at the first save.

        Args:
            keep_s: seconds to keep snapshots after the trainer's death; 0 to keep none.
            trainer: the descriptor of the socket to the trainer. Clients are turned away until the
                trainer's end is closed.
            trainer_pidfds: descriptors that become readable when the trainer dies.
            ends_with: descriptors; the server ends as soon as one of them becomes readable.
            now_s: returns the time in seconds.
            free_bytes: returns the node's free memory in bytes.
            others: the snapshots held for ranks of peer nodes, which are served, too.
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
        """Return the snapshot to keep; None if there is none, or if `keep_s` is 0."""
        return (
            self._newest
            if self._keep_s > 0 and self._newest is not None and self._newest.is_there()
            else None
        )

    @property
    def has_any(self) -> bool:
        """Return True if there is a snapshot to keep, of this rank or of a peer node's rank."""
        if self._keep_s <= 0 or self._is_unwanted:
            return False
        return self.newest is not None or bool(self._others is not None and self._others.images())

    def ordered(self, order: SaveRequest, rank: int) -> None:
        """Begin to listen for clients at the first save, whose folder determines the address."""
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
        """Record a durable snapshot to serve; return False if the digests of a file are missing."""
        has_digests = snapshot.blocks.keys() == {shard.name for shard in snapshot.layout.shards}
        if has_digests:
            self._newest = snapshot
        return has_digests

    def forget(self, arena: Arena) -> None:
        """Drop the recorded snapshot if it is in `arena`, which will be reused or closed."""
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
        except OSError:  # a previous server still uses the address
            listener.close()
        else:
            self._listener = listener

    def _serve_meanwhile(self, listener: socket.socket) -> None:
        """Serve clients after the trainer's death, until `keep` takes over or the process ends."""
        # Turn clients away while the trainer lives. After its death, its last save may wait forever
        # for a rank that died with its node. So after `LAST_SAVE_S` seconds, the snapshot that was
        # durable before is served.
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
        """Serve the snapshots until the server must end, and then release their memory."""
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
            while last is None and self._now_s() < until_s and self._free_bytes() >= MIN_FREE_BYTES:
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
        """Serve one request if one arrives within half a second.

        Returns:
            The open connection if the request is `end`, else None.
        """
        ready = readable([listener.fileno(), *self._ends_with], _LOOK_EVERY_S)
        if listener.fileno() not in ready:
            return None
        try:
            line, _address = listener.accept()
        except BlockingIOError:  # another thread accepted the connection
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
    """Write the notes into an anonymous file in memory; return its descriptor."""
    fd = os.memfd_create("holdfast-notes", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(notes)
    return fd


def _answer(line: socket.socket, images: Sequence[ServedSnapshot]) -> socket.socket | None:
    """Answer one request and close the connection.

    If the request is `end`, the connection is returned open, to be closed once memory is released.
    """
    wants_end = False
    try:
        line.settimeout(_PATIENCE_S)
        if is_of_this_user(line) and (received := receive(line)) is not None:
            request = received[0]
            wants_end = request == {"want": "end"}
            if request == {"want": "list"}:
                send(line, {"images": [image.info for image in images]})
            for image in images:
                if request == {"want": "snapshot", "rank": image.info.rank}:
                    send(line, {"step": image.info.step, "save": image.info.save}, image.fd)
                    send(line, {}, image.notes)
                    break
    except (OSError, ValueError):  # the client is gone, or sent an invalid request
        wants_end = False
    if wants_end:
        return line
    line.close()
    return None
