"""Define a shared-memory buffer for one snapshot, which is reused only once that is durable.

The buffer is called an arena. An arena is one anonymous file (memfd) with three parts: a page for
its state; the image, which holds the snapshot's bytes; and the notes, which hold digests of the
live tensors. All processes that map the file share the state. So the writing process can continue
if the trainer is killed, and a restarted rank finds the sealed snapshot.

    FREE ─▶ COPYING ─▶ SEALED ─▶ WRITING ─▶ COMMITTED ─▶ COPYING …
              │            ▲        │ the writing process died
              ▼ given up   └────────┘
             FREE

The trainer moves the arena from FREE to SEALED, and the writing process moves it from there to
COMMITTED. During the copy, the state page counts the copied bytes, so that the writing process can
already write these. Only a sealed snapshot becomes a checkpoint. Each use of the arena has a
number, its generation, so that a late report about an earlier use has no effect.
"""

import ctypes
import enum
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, Self

from holdfast.checkpoint.format.rank_layout import PAGE_BYTES
from holdfast.checkpoint.ipc.memory_reservation import reserved
from holdfast.core.errors import HoldfastError

_MAGIC: Final = b"HFARENA3"
_MADE: Final = struct.Struct("<8sQ")
"""The magic and the capacity in bytes.

Both are written once, before the arena is shared, so they are read without a lock.
"""
_USE: Final = struct.Struct("<I4xQqQ")
"""The fields after `_MADE`, written for each use: state, generation, step, copied bytes."""
_STATE: Final = slice(_MADE.size, _MADE.size + 4)
_COPIED: Final = slice(_MADE.size + _USE.size - 8, _MADE.size + _USE.size)
_libc: Final = ctypes.CDLL(None, use_errno=True)
_PUNCH_HOLE: Final = 3
"""The flags FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of fallocate(2)."""
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
"""Allocate pages in advance (Linux 5.14); otherwise, the first copy takes five times as long."""


def arena_bytes(image_bytes: int, notes_bytes: int = 0) -> int:
    """Return the bytes of an arena for `image_bytes` of snapshot and `notes_bytes` of notes."""
    return PAGE_BYTES + _pages_bytes(image_bytes) + _pages_bytes(notes_bytes)


def _pages_bytes(count: int) -> int:
    return -(-max(count, 1) // PAGE_BYTES) * PAGE_BYTES


class ArenaError(HoldfastError):
    """Report that an arena's state does not allow the operation; the message names the state."""


class State(enum.IntEnum):
    """Name the phase of an arena's current use."""

    FREE = 0
    COPYING = 1
    SEALED = 2
    WRITING = 3
    COMMITTED = 4


_ENTERED_FROM: Final = {
    State.COPYING: (State.FREE, State.COMMITTED),
    State.SEALED: (State.COPYING, State.WRITING),
    State.WRITING: (State.SEALED,),
    State.COMMITTED: (State.WRITING,),
    State.FREE: (State.COPYING, State.SEALED, State.WRITING, State.COMMITTED),
}


class Progress(NamedTuple):
    """Describe how far the copy into an arena is.

    Attributes:
        state: the state of the arena.
        copied: the number of copied bytes while the arena is COPYING; the size of the whole image
            from SEALED on.
    """

    state: State
    copied: int


class Arena:
    """Map one arena into this process, and change its state."""

    def __init__(self, fd: int) -> None:
        """Map the arena whose file is open as `fd`; `close` closes this descriptor.

        Raises:
            ArenaError: the file is not an arena.
            OSError: the file cannot be mapped.
        """
        self.fd = fd
        self._threads = threading.Lock()
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        magic, self.capacity_bytes = _MADE.unpack_from(self._map)
        if magic != _MAGIC:
            raise ArenaError("This is not an arena. Restart the job.")

    @classmethod
    def make(cls, image_bytes: int, notes_bytes: int = 0, *, leave_bytes: int = 0) -> Self:
        """Make an empty arena, and allocate all its memory now.

        Args:
            image_bytes: the capacity for a snapshot, in bytes.
            notes_bytes: the capacity for notes, in bytes.
            leave_bytes: the bytes of the node's memory that must stay free.

        Raises:
            ArenaError: the node has not enough free memory.
            OSError: the kernel provides no shared memory.
        """
        capacity, notes = _pages_bytes(image_bytes), _pages_bytes(notes_bytes)
        size_bytes = capacity + notes
        # Check first: the kernel reacts to a lack of memory by killing some process.
        with reserved(size_bytes + leave_bytes) as free_bytes:
            if size_bytes + leave_bytes > free_bytes:
                raise ArenaError(
                    f"A snapshot needs {size_bytes:,} bytes of memory, and {max(free_bytes, 0):,} "
                    "are free on this node and in the job's control groups. Give the job more "
                    "memory, or save less of its state on this rank."
                )
            fd = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(fd, 0, PAGE_BYTES + size_bytes)
                os.pwrite(fd, _MADE.pack(_MAGIC, capacity) + _USE.pack(State.FREE, 0, -1, 0), 0)
                made = cls(fd)
            except BaseException:
                os.close(fd)
                raise
        for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
            try:
                made._map.madvise(advice)
            except (OSError, ValueError):  # an older kernel: the first copy takes longer
                continue
        return made

    @property
    def contents(self) -> memoryview:
        """Return the memory of the image, followed by the memory of the notes."""
        return memoryview(self._map)[PAGE_BYTES:]

    @property
    def image(self) -> memoryview:
        """Return the memory of the image, of `capacity_bytes`."""
        return memoryview(self._map)[PAGE_BYTES : PAGE_BYTES + self.capacity_bytes]

    @property
    def notes(self) -> memoryview:
        """Return the memory of the notes."""
        return memoryview(self._map)[PAGE_BYTES + self.capacity_bytes :]

    @property
    def state(self) -> State:
        """Return the current state of the arena."""
        return State(int.from_bytes(self._map[_STATE], "little"))

    @property
    def generation(self) -> int:
        """Return the number of the current use; the first copy has generation 1."""
        return int(_USE.unpack_from(self._map, _MADE.size)[1])

    @property
    def step(self) -> int:
        """Return the training step of the snapshot; valid once the arena is SEALED."""
        return int(_USE.unpack_from(self._map, _MADE.size)[2])

    def begin(self, step: int) -> int:
        """Begin a new use of the arena, and return the new generation, which numbers the use.

        Raises:
            ArenaError: the arena is not FREE or COMMITTED, so its snapshot is not durable yet.
        """
        with self._alone():
            self._check(State.COPYING)
            generation = self.generation + 1
            _USE.pack_into(self._map, _MADE.size, State.COPYING, generation, step, 0)
        return generation

    def advance(self, copied_bytes: int, generation: int) -> None:
        """Record that the first `copied_bytes` of the snapshot are copied.

        Raises:
            ArenaError: this use of the arena is no longer COPYING, or `generation` is another use.
        """
        with self._alone():  # the lock keeps processors from reordering the stores
            self._check_use(generation)
            if self.state is not State.COPYING:
                raise ArenaError(f"The arena is {self.state.name}, and nothing is copied into it.")
            self._map[_COPIED] = copied_bytes.to_bytes(8, "little")

    def progress(self, generation: int) -> Progress:
        """Return the state of a save's buffer, and how many bytes of the snapshot are copied.

        Raises:
            ArenaError: the arena's generation is no longer `generation`.
        """
        with self._alone():
            self._check_use(generation)
            return Progress(self.state, int.from_bytes(self._map[_COPIED], "little"))

    def move(self, state: State, generation: int) -> None:
        """Move to `state` if the arena still has this generation.

        Raises:
            ArenaError: `state` cannot follow the current state, or the arena has another
                generation.
        """
        with self._alone():
            self._check_use(generation)
            self._check(state)
            self._map[_STATE] = int(state).to_bytes(4, "little")

    def empty(self) -> None:
        """Release the memory, even if other processes still map the arena.

        Otherwise, a process forked by the training would keep the memory for as long as it runs.
        Processes that still map the arena read zeros.
        """
        with suppress(ArenaError):  # the arena is FREE already
            self.move(State.FREE, self.generation)
        length = os.fstat(self.fd).st_size - PAGE_BYTES
        _libc.fallocate(self.fd, _PUNCH_HOLE, ctypes.c_int64(PAGE_BYTES), ctypes.c_int64(length))

    def close(self) -> None:
        """Close the arena; its memory stays mapped while views of that memory exist."""
        try:
            self._map.close()
        except BufferError:
            del self._map
        os.close(self.fd)

    def _check_use(self, generation: int) -> None:
        if generation != self.generation:
            raise ArenaError(f"The arena is in its use {self.generation}; {generation} is over.")

    def _check(self, state: State) -> None:
        now = self.state
        if now not in _ENTERED_FROM[state]:
            raise ArenaError(f"The arena is {now.name}, and cannot become {state.name}.")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the arena's state against other threads and processes.

        If the process dies, the kernel releases the lock.
        """
        with self._threads:  # the file lock does not exclude threads of one process
            fcntl.lockf(self.fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)
