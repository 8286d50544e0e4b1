"""The arenas of one rank, as saves take turns in them."""

import threading
from dataclasses import dataclass
from typing import Final

import torch

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.checksums import DIGEST_BYTES
from holdfast.checkpoint.plan import Plan
from holdfast.checkpoint.writer import Writer

_ARENAS: Final = 2
"""One is written while the next step is copied into the other."""


@dataclass(eq=False)
class Seat:
    """An arena laid out by a plan; `number` is what the writing process calls it, `views` the image's tensors."""

    arena: Arena
    number: int
    views: list[torch.Tensor | None]
    used: bool = False


class Seats:
    """As many arenas as are allowed, each made when first it is needed."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._seats: list[Seat] = []
        self._freed = threading.Condition()

    def has_free(self) -> bool:
        """Whether `take` would not wait."""
        with self._freed:
            return len(self._seats) < _ARENAS or any(not seat.used for seat in self._seats)

    def take(self, plan: Plan) -> Seat:
        """One that may be copied into, once there is one.

        Raises:
            ArenaError: this node has no memory left for it.
            OSError: likewise.
        """
        with self._freed:
            while True:
                seat = next((each for each in self._seats if not each.used), None)
                if seat is None and len(self._seats) < _ARENAS:
                    seat = self._make(plan)
                if seat is not None:
                    seat.used = True
                    return seat
                self._freed.wait()

    def free(self, seat: Seat) -> None:
        """Its save has ended, well or not."""
        with self._freed:
            seat.used = False
            self._freed.notify_all()

    def forget(self) -> list[int]:
        """Let go of all of them, none of which is in use; their numbers."""
        numbers = []
        for seat in self._seats:
            seat.views.clear()
            numbers.append(seat.number)
        self._seats.clear()
        return numbers

    def _make(self, plan: Plan) -> Seat:
        arena = Arena.make(plan.image.size_bytes, DIGEST_BYTES * len(plan.pieces))
        plan.image.write_frames(arena.image)
        seat = Seat(arena, self._writer.share_arena(arena), plan.image.views(arena.image))
        self._seats.append(seat)
        return seat
