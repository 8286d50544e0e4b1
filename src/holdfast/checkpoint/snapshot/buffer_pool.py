"""Hold the shared-memory buffers of one rank and lend each to one save at a time."""

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.checkpoint.format.checksums import DIGEST_BYTES
from holdfast.checkpoint.ipc.shared_buffer import Arena, ArenaError, State, arena_bytes
from holdfast.checkpoint.memory.server import MIN_FREE_BYTES
from holdfast.checkpoint.snapshot.plan import Plan
from holdfast.checkpoint.writer.client import Writer
from holdfast.core.errors import SaveFailed
from holdfast.core.memory import available_memory_bytes

_logger = logging.getLogger("holdfast")
_ARENAS: Final = 2
"""The largest number of buffers.

The writing process writes one buffer to disk while the next step is copied into the other.
"""


@dataclass(eq=False)
class Buffer:
    """Hold one shared-memory buffer, which is laid out as the plan requires.

    Attributes:
        arena: the shared memory of the buffer.
        number: the number by which the writing process identifies the buffer.
        views: for each saved item, a tensor whose memory is the item's place in the buffer; None
            for a plain value.
        is_pinned: whether the memory is page-locked.
        used: whether a save is using the buffer now.
    """

    arena: Arena
    number: int
    views: list[torch.Tensor | None]
    is_pinned: bool = False
    used: bool = False

    @property
    def memory(self) -> torch.Tensor:
        """Return a tensor over the snapshot's bytes; the tensor keeps the memory mapped."""
        return torch.frombuffer(self.arena.image, dtype=torch.uint8)

    @property
    def notes(self) -> torch.Tensor:
        """Return a tensor over the notes, which hold the digests; it keeps the memory mapped."""
        return torch.frombuffer(self.arena.notes, dtype=torch.uint8)


class BufferPool:
    """Lend shared buffers to saves; create up to two, each when it is first needed."""

    def __init__(
        self, writer: Writer, *, max_bytes: float | None = None, spares_newest: bool = False
    ) -> None:
        """Create an empty pool.

        Args:
            writer: the client of the writing process, which receives each buffer.
            max_bytes: the limit on the memory of all buffers together. If two buffers do not fit,
                the pool has one.
            spares_newest: whether to make the second buffer in advance, so that the newest durable
                snapshot stays in memory while the next one is copied.
        """
        self._writer = writer
        self._spares_newest = spares_newest
        self._max_bytes = max_bytes
        self._most = _ARENAS
        self._seats: list[Buffer] = []
        self._lacked_bytes = 0
        """The free memory that was missing for a second buffer; 0 if none was missing.

        While it is not 0, only `prepare` makes the second buffer.
        """
        self._has_warned = False
        self._freed = threading.Condition()

    def has_free(self) -> bool:
        """Return True if a buffer is unused or can still be made, so that `take` need not wait."""
        with self._freed:
            return self._may_make() or any(not seat.used for seat in self._seats)

    def take(self, plan: Plan) -> Buffer:
        """Return a buffer to copy into; wait until one is free.

        Raises:
            ArenaError: this node lacks the memory.
            OSError: this node lacks the memory.
            SaveFailed: `max_bytes` is too small for one buffer.
        """
        with self._freed:
            while True:
                seat = self._unused(plan)
                if seat is not None:
                    seat.used = True
                    return seat
                self._freed.wait()

    def free(self, seat: Buffer) -> None:
        """Return a buffer to the pool, after its save has ended."""
        with self._freed:
            seat.used = False
            self._seats.remove(seat)
            self._seats.append(seat)  # so that the oldest is used first
            self._freed.notify_all()

    def forget(self) -> list[int]:
        """Release all buffers and return their numbers; no save may be using a buffer."""
        numbers = []
        for seat in self._seats:
            seat.views.clear()
            if seat.is_pinned:
                unpin(torch.frombuffer(seat.arena.contents, dtype=torch.uint8))
            numbers.append(seat.number)
        self._seats.clear()
        self._most = _ARENAS
        self._lacked_bytes = 0
        return numbers

    def prepare(self, plan: Plan) -> None:
        """Make the second buffer, if the pool should have one and the node has enough memory.

        The pool should have a second buffer if it was created with `spares_newest`, or if an
        earlier attempt to make one failed for lack of memory.
        """
        if len(self._seats) >= self._most or not (self._spares_newest or self._lacked_bytes):
            return
        if self._seats and available_memory_bytes() < self._lacked_bytes:
            return
        try:
            seat = self._make(plan)
        # One buffer is enough for a save. If there is no buffer, the next save tries again and
        # raises the error.
        except (ArenaError, OSError) as error:
            self._lacks(plan, error)
            return
        with self._freed:
            self._seats.append(seat)
            self._lacked_bytes = 0
            self._freed.notify_all()

    def _unused(self, plan: Plan) -> Buffer | None:
        unused = [seat for seat in self._seats if not seat.used]
        if not unused and self._may_make():
            try:
                self._seats.append(self._make(plan))
            except (ArenaError, OSError) as error:
                if not self._seats:
                    raise
                self._lacks(plan, error)
                return None
            return self._seats[-1]
        return min(unused, key=lambda seat: seat.arena.state is State.COMMITTED, default=None)

    def _may_make(self) -> bool:
        """Return True if a save may make another buffer.

        If the node lacked the memory for a second buffer, saves do not try again, so that no save
        waits for the attempt. Only `prepare` tries again.
        """
        return len(self._seats) < self._most and not (self._seats and self._lacked_bytes)

    def _lacks(self, plan: Plan, error: Exception) -> None:
        self._lacked_bytes = _needed_bytes(plan) + MIN_FREE_BYTES
        if self._seats and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "There is no memory for a second snapshot: until there is, each save waits until the last one is "
                "durable. %s",
                error,
            )

    def _make(self, plan: Plan) -> Buffer:
        notes_bytes = DIGEST_BYTES * len(plan.pieces)
        if self._max_bytes is not None:
            self._most = self._allowed(_needed_bytes(plan), self._max_bytes)
        # The first buffer is mandatory; a second must leave headroom for the job.
        leave_bytes = MIN_FREE_BYTES if self._seats else 0
        arena = Arena.make(plan.image.size_bytes, notes_bytes, leave_bytes=leave_bytes)
        plan.image.write_frames(arena.image)
        seat = Buffer(arena, self._writer.share_arena(arena), [])
        seat.views = plan.image.views(seat.memory)
        seat.is_pinned = bool(plan.on_devices) and pin(
            torch.frombuffer(arena.contents, dtype=torch.uint8)
        )
        return seat

    def _allowed(self, each_bytes: int, max_bytes: float) -> int:
        count = min(_ARENAS, int(max_bytes // each_bytes))
        if count == 0:
            raise SaveFailed(
                f"A snapshot needs {each_bytes:,} bytes of memory, and max_memory_gib allows {int(max_bytes):,}. "
                "Allow more, or save less of the state on this rank."
            )
        if count < _ARENAS and not self._seats:
            _logger.warning(
                "max_memory_gib allows one snapshot of %s bytes, not two: each save waits until the last is durable.",
                f"{each_bytes:,}",
            )
        return count


def _needed_bytes(plan: Plan) -> int:
    return arena_bytes(plan.image.size_bytes, DIGEST_BYTES * len(plan.pieces))


# Page-locked memory: a GPU writes into it directly, at the rate of its bus.

_PORTABLE: Final = 1
"""The flag `cudaHostRegisterPortable`: lock the pages for all GPUs of the process."""


def pin(memory: torch.Tensor) -> bool:
    """Lock the pages of `memory`, a CPU tensor of bytes, so that a GPU writes into it directly.

    Without locked pages, copies from a GPU are slower, and each copy blocks the thread that starts
    it. `unpin` unlocks the pages.

    Returns:
        True if the pages are locked; False if the system refused, which is logged.
    """
    began_s = time.monotonic()
    try:
        code = _runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
        torch.cuda.check_error(int(code))
    except RuntimeError as error:
        _forget_error()
        _logger.warning(
            "%s bytes of a snapshot's memory cannot be pinned (%s): copies from the GPU will be slow. Give the job "
            "more memory, or save less of its state on this rank.",
            f"{memory.nbytes:,}",
            error,
        )
        return False
    _logger.debug("%d bytes were pinned in %.2f s", memory.nbytes, time.monotonic() - began_s)
    return True


def unpin(memory: torch.Tensor) -> None:
    """Unlock the pages that `pin` locked; call this function before the memory is unmapped."""
    with contextlib.suppress(RuntimeError):  # the GPU has failed, and holds no lock
        torch.cuda.check_error(int(_runtime().cudaHostUnregister(memory.data_ptr())))
        return
    _forget_error()


def _forget_error() -> None:
    """Clear this thread's last CUDA error, which PyTorch's next kernel would otherwise raise.

    Running a small kernel clears the error.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
