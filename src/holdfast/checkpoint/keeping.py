"""The newest durable snapshot of a rank that died stays in memory, for the rank that takes its place.

The writing process outlives its trainer. Unless that ended in good order, the process keeps the arena that it committed
last and hands it out at a socket of this node (abstract, named by user, checkpoint folder and rank), one request a
connection, to processes of the same user only:

| request | answer |
|---|---|
| `{"want": "snapshot"}` | what save it is and the arena; then its notes: the layout and the digests of all blocks |
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.checkpoint.arena import Arena, State
from holdfast.checkpoint.commit import Order
from holdfast.checkpoint.layout import Layout
from holdfast.checkpoint.messages import receive, send
from holdfast.core.memory import available_memory_bytes

ENV_SUPERVISOR: Final = "HOLDFAST_SUPERVISOR_PID"
"""The process with which all that is kept ends."""
PROCESS_NAME: Final = "holdfast-kept"
"""What such a process calls itself, so that whoever clears away what a dead job left knows it."""
LEAST_FREE_BYTES: Final = 1 << 30
"""What is kept is given back where the node has less left: a job that runs needs it more than one that may come."""
_LOOK_EVERY_S: Final = 0.5
_PATIENCE_S: Final = 5.0
_LENGTH_BYTES: Final = 8
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group: `struct ucred` of unix(7)."""


def address(folder: Path, rank: int) -> str:
    """Where the snapshot of a rank that saved into `folder` is handed out.

    By the folder itself, not its path: containers that share a network may have different ones of one path.

    Raises:
        OSError: there is no such folder.
    """
    found = folder.stat()
    return f"\0holdfast-{os.geteuid()}-{found.st_dev:x}.{found.st_ino:x}-{rank}"


def is_of_this_user(line: socket.socket) -> bool:
    """Whether the process at the other side of a unix socket runs as the user that this one runs as."""
    _pid, uid, _gid = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A rank's part of a durable checkpoint, in memory; `blocks`: by file, the digests that its sidecar has too."""

    order: Order
    layout: Layout
    arena: Arena
    generation: int
    blocks: Mapping[str, bytes]

    def is_there(self) -> bool:
        """Whether the arena still holds it."""
        arena = self.arena
        return arena.generation == self.generation and arena.state is State.COMMITTED

    def pack_notes(self) -> bytes:
        """The layout, and the digests in the order of its files."""
        layout = self.layout.pack()
        digests = b"".join(self.blocks[shard.name] for shard in self.layout.shards)
        return len(layout).to_bytes(_LENGTH_BYTES, "little") + layout + digests


def unpack_notes(notes: bytes) -> tuple[Layout, bytes]:
    """What `Snapshot.pack_notes` packed."""
    end = _LENGTH_BYTES + int.from_bytes(notes[:_LENGTH_BYTES], "little")
    return Layout.unpack(notes[_LENGTH_BYTES:end]), notes[end:]


class Keeper:
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
    ) -> None:
        """Nothing is done before there is something to keep.

        Args:
            keep_s: how long it is kept; 0: not at all.
            trainer: the socket to the trainer; until it breaks whoever asks is turned away.
            trainer_pidfds: or until one of these can be read.
            ends_with: descriptors; once one of them can be read, nothing is kept any more.
            now_s: the time.
            free_bytes: how much memory the node has left.
        """
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
        self._newest: Snapshot | None = None
        self._listener: socket.socket | None = None

    @property
    def newest(self) -> Snapshot | None:
        """What would be kept now; None where there is nothing, or nothing is to be kept."""
        return self._newest if self._keep_s > 0 and self._newest is not None and self._newest.is_there() else None

    def ordered(self, order: Order, rank: int) -> None:
        """A save was ordered: from now on it is known who may come to ask."""
        if not self._address:
            with contextlib.suppress(OSError):
                self._address = address(order.folder, rank)
            self._listen()
            if self._listener is not None and self._has_trainer:
                self._trainer.register(self._listener, select.POLLIN)
                threading.Thread(target=self._turn_away, args=(self._listener,), daemon=True).start()

    def committed(self, snapshot: Snapshot) -> None:
        """A save is durable; what is not known by the digest of each block is not worth keeping."""
        if snapshot.blocks.keys() == {shard.name for shard in snapshot.layout.shards}:
            self._newest = snapshot

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
        except OSError:  # another one is still there
            listener.close()
        else:
            self._listener = listener

    def _turn_away(self, listener: socket.socket) -> None:
        """While the trainer lives nothing is left; whoever asks after its death waits for `keep`, or this one's end."""
        while all(fd == listener.fileno() for fd, _event in self._trainer.poll()):
            listener.accept()[0].close()

    def keep(self) -> None:
        """Hand out what is kept until it is to end; then the memory is free, as far as this process has it."""
        self._listen()
        snapshot, listener = self.newest, self._listener
        if snapshot is None or listener is None:
            return
        notes = os.memfd_create("holdfast-notes", os.MFD_CLOEXEC)
        last: socket.socket | None = None
        try:
            with os.fdopen(os.dup(notes), "wb") as file:
                file.write(snapshot.pack_notes())
            until_s = self._now_s() + self._keep_s
            while last is None and self._now_s() < until_s and self._free_bytes() >= LEAST_FREE_BYTES:
                ready, _, _ = select.select([listener.fileno(), *self._ends_with], [], [], _LOOK_EVERY_S)
                if any(fd in ready for fd in self._ends_with):
                    break
                if listener.fileno() in ready:
                    last = _answer(listener.accept()[0], snapshot, notes)
        finally:
            listener.close()
            os.close(notes)
            self._newest = None
            snapshot.arena.close()
            if last is not None:
                last.close()


def _answer(line: socket.socket, snapshot: Snapshot, notes: int) -> socket.socket | None:
    """Do as a successor asks; `line`, open, where it asked for the end."""
    wants_end = False
    try:
        line.settimeout(_PATIENCE_S)
        if is_of_this_user(line) and (received := receive(line)) is not None:
            wants_end = received[0] == {"want": "end"}
            if received[0] == {"want": "snapshot"}:
                send(line, {"step": snapshot.order.step, "save": snapshot.order.save}, snapshot.arena.fd)
                send(line, {}, notes)
    except (OSError, ValueError):  # it went away, or is none of ours
        wants_end = False
    if wants_end:
        return line
    line.close()
    return None
