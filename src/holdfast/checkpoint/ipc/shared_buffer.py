"""Memory that holds one snapshot: shared with the process that writes it, mapped once, reused, never too early.

An arena is one anonymous file (memfd): a page that says what it holds, the image, and the digests of the live tensors
that it was copied from. Whoever has the descriptor sees the same state, so the writing process goes on when the trainer
is killed, and a restarted rank finds what was sealed.

    FREE ─▶ COPYING ─▶ SEALED ─▶ WRITING ─▶ COMMITTED ─▶ COPYING …
              │            ▲        │ its writer died
              ▼ given up   └────────┘
             FREE

The trainer moves it up to SEALED, the writing process from there to COMMITTED. While it is copied, a mark tells how
far, so that what is there can be written already; whether it becomes a checkpoint is known once it is sealed. Each use
has a generation: a report on an earlier one changes nothing.
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
"""Magic, and capacity in bytes: written once, before another process knows it, and read without the lock."""
_USE: Final = struct.Struct("<I4xQqQ")
"""Behind it, anew for each use: state, generation, step, how many bytes are copied."""
_STATE: Final = slice(_MADE.size, _MADE.size + 4)
_COPIED: Final = slice(_MADE.size + _USE.size - 8, _MADE.size + _USE.size)
_libc: Final = ctypes.CDLL(None, use_errno=True)
_PUNCH_HOLE: Final = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of fallocate(2)."""
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: the pages are there before the first copy, which takes five times as long into fresh ones."""


def arena_bytes(image_bytes: int, notes_bytes: int = 0) -> int:
    """How much memory an arena for images of up to `image_bytes`, and notes beside them, takes."""
    return PAGE_BYTES + _pages_bytes(image_bytes) + _pages_bytes(notes_bytes)


def _pages_bytes(count: int) -> int:
    return -(-max(count, 1) // PAGE_BYTES) * PAGE_BYTES


class ArenaError(HoldfastError):
    """An arena is not in the state that a step needs; the message says which."""


class State(enum.IntEnum):
    """What an arena is used for now."""

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
    """`copied`: so many bytes of the image are there while it is COPYING, all from SEALED on."""

    state: State
    copied: int


class Arena:
    """One arena, as one process maps it."""

    def __init__(self, fd: int) -> None:
        """Map the arena behind `fd`, which is closed with it.

        Raises:
            ArenaError: it is none.
            OSError: it cannot be mapped.
        """
        self.fd = fd
        self._threads = threading.Lock()
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        magic, self.capacity_bytes = _MADE.unpack_from(self._map)
        if magic != _MAGIC:
            raise ArenaError("This is no arena. Start the job anew.")

    @classmethod
    def make(cls, image_bytes: int, notes_bytes: int = 0, *, leave_bytes: int = 0) -> Self:
        """An empty arena for images of up to `image_bytes` and notes beside them, its memory taken at once.

        `leave_bytes`: of the node's memory, what must be left then.

        Raises:
            ArenaError: this node has not so much memory left.
            OSError: the system gives it no shared memory.
        """
        capacity, notes = _pages_bytes(image_bytes), _pages_bytes(notes_bytes)
        size_bytes = capacity + notes
        # Asked for beforehand: where there is too little, the kernel says so by killing some process.
        with reserved(size_bytes + leave_bytes) as free_bytes:
            if size_bytes + leave_bytes > free_bytes:
                raise ArenaError(
                    f"A snapshot needs {size_bytes:,} bytes of memory, and {max(free_bytes, 0):,} are free on this "
                    "node and in the job's control groups. Give the job more memory, or save less of its "
                    "state on this rank."
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
        """The memory of the image, and behind it that of the notes."""
        return memoryview(self._map)[PAGE_BYTES:]

    @property
    def image(self) -> memoryview:
        """The memory of the image, `capacity_bytes` of it."""
        return memoryview(self._map)[PAGE_BYTES : PAGE_BYTES + self.capacity_bytes]

    @property
    def notes(self) -> memoryview:
        """The memory beside it."""
        return memoryview(self._map)[PAGE_BYTES + self.capacity_bytes :]

    @property
    def state(self) -> State:
        """What it is used for now."""
        return State(int.from_bytes(self._map[_STATE], "little"))

    @property
    def generation(self) -> int:
        """Which use this is; the first copy is of generation 1."""
        return int(_USE.unpack_from(self._map, _MADE.size)[1])

    @property
    def step(self) -> int:
        """Of which step the image is; meaningful from SEALED on."""
        return int(_USE.unpack_from(self._map, _MADE.size)[2])

    def begin(self, step: int) -> int:
        """FREE or COMMITTED to COPYING; the new generation.

        Raises:
            ArenaError: what it holds is not durable yet.
        """
        with self._alone():
            self._check(State.COPYING)
            generation = self.generation + 1
            _USE.pack_into(self._map, _MADE.size, State.COPYING, generation, step, 0)
        return generation

    def advance(self, copied_bytes: int, generation: int) -> None:
        """Say that the first `copied_bytes` of the image are there.

        Raises:
            ArenaError: it is not being copied into any more, in this use.
        """
        with self._alone():  # a processor that reorders stores does not do so across the lock
            self._check_use(generation)
            if self.state is not State.COPYING:
                raise ArenaError(f"The arena is {self.state.name}, and nothing is copied into it.")
            self._map[_COPIED] = copied_bytes.to_bytes(8, "little")

    def progress(self, generation: int) -> Progress:
        """How far the copy is.

        Raises:
            ArenaError: it is used for something else by now.
        """
        with self._alone():
            self._check_use(generation)
            return Progress(self.state, int.from_bytes(self._map[_COPIED], "little"))

    def move(self, state: State, generation: int) -> None:
        """Enter `state`, in the use that `generation` tells.

        Raises:
            ArenaError: it may not be entered from the state it is in, or the arena is used for something else by now.
        """
        with self._alone():
            self._check_use(generation)
            self._check(state)
            self._map[_STATE] = int(state).to_bytes(4, "little")

    def empty(self) -> None:
        """Give back the memory of what is no longer needed: who else has it mapped finds nothing there.

        A child that the training has forked has it mapped for as long as it lives, and another process for a while.
        """
        with suppress(ArenaError):  # it is free
            self.move(State.FREE, self.generation)
        length = os.fstat(self.fd).st_size - PAGE_BYTES
        _libc.fallocate(self.fd, _PUNCH_HOLE, ctypes.c_int64(PAGE_BYTES), ctypes.c_int64(length))

    def close(self) -> None:
        """Let go of it. Where views of its memory are left, it stays mapped until the last of them is gone."""
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
        """While another process or thread moves it, this one waits; the lock of a process that dies is let go."""
        with self._threads:  # the file's lock is the process's
            fcntl.lockf(self.fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)
