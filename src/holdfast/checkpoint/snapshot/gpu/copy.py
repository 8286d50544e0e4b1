"""Copy a snapshot's tensors from one GPU into a host buffer while training continues.

Tensors that cannot reach the host before the optimizer's step are staged, which means copied within
the GPU first. The GPU executes these steps in order:

| when | on the training's stream | on a separate stream |
|---|---|---|
| in the call of `save` | pack small tensors, digest all tensors, stage some | |
| during forward and backward | | copy the packed tensors at once, the large ones one by one |
| before the optimizer's step | wait for the copies of tensors that are not staged | |
| after that step | | copy the staged tensors |

On the CPU, only the thread that reports the progress waits for the copies.
"""

import bisect
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from holdfast.checkpoint.format.checksums import DIGEST_BYTES
from holdfast.checkpoint.snapshot.buffer_pool import Buffer
from holdfast.checkpoint.snapshot.gpu.memory import DeviceStaging, Packed, room_bytes
from holdfast.checkpoint.snapshot.gpu.xxh3_kernel import DeviceDigests
from holdfast.checkpoint.snapshot.plan import OnDevice, Plan
from holdfast.checkpoint.state.tensors import is_in_a_row

_logger = logging.getLogger("holdfast")
_MARK_BYTES: Final = 32 << 20
_MARK_COPIES: Final = 64
_AHEAD: Final = 8
"""The number of events that may be queued on the stream before the CPU waits for the oldest.

A stream holds about a thousand commands. A thread that adds one more to a full stream blocks all
threads that send commands to this GPU.
"""
_LATELY: Final = 5


def _event(*, timing: bool = False, blocking: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]


def _timed() -> torch.cuda.Event:
    return _event(timing=True)


def _between_s(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) / 1000


@dataclass(eq=False)
class Taken:
    """Hold one save's tensors on one GPU, and the events that mark the progress of their copy.

    Each CUDA event is recorded on a stream when the described moment is reached there.

    Attributes:
        sources: the live tensors, in the order of the plan's items on this GPU.
        staged: the number of the first item that is staged on the GPU.
        digests: the digests of the tensors; None if the GPU takes none.
        boundary: the event after the work that the call of `save` queued.
        went_on: the event at the return of the call.
        began: the event at the start of the copy.
        unstaged: the event after the copies of the tensors that are not staged.
        reached: the event before the training's stream waits for `unstaged`.
        passed: the event after this wait.
        drained: the event after all copies.
    """

    sources: list[torch.Tensor]
    staged: int
    digests: torch.Tensor | None
    boundary: torch.cuda.Event = field(default_factory=_event)
    went_on: torch.cuda.Event = field(default_factory=_timed)
    began: torch.cuda.Event = field(default_factory=_timed)
    unstaged: torch.cuda.Event = field(default_factory=_timed)
    reached: torch.cuda.Event = field(default_factory=_timed)
    passed: torch.cuda.Event = field(default_factory=_timed)
    drained: torch.cuda.Event = field(default_factory=_event)
    fenced: list[torch.cuda.Stream] = field(default_factory=list)
    """The streams of optimizer steps that wait for `unstaged`."""
    ordered: threading.Event = field(default_factory=threading.Event)
    """Set once all copies are queued, or once it is certain that they will not be queued."""

    def release(self) -> None:
        """End the copy: drop the references to the live tensors."""
        self.sources.clear()
        self.ordered.set()

    @property
    def fence_s(self) -> float:
        """Return the seconds that the training's stream waited for the copy before an update.

        Returns 0 if the wait has not ended, or if the GPU has failed.
        """
        with contextlib.suppress(RuntimeError):
            return _between_s(self.reached, self.passed) if self._is_past else 0.0
        return 0.0

    @property
    def window_s(self) -> float | None:
        """Return the seconds that training left for the copy, from the call of `save` to an update.

        The time is measured on the training's stream. Returns None if that stream's wait for the
        copy has not ended.
        """
        return _between_s(self.went_on, self.reached) if self._is_past else None

    @property
    def _is_past(self) -> bool:
        return bool(self.fenced) and bool(self.passed.query())  # type: ignore[no-untyped-call]

    @property
    def is_unstaged(self) -> bool:
        """Return True if an update can start, because all tensors not staged are copied."""
        return self.ordered.is_set() and bool(self.unstaged.query())  # type: ignore[no-untyped-call]


class _Marks:
    """Report the progress of the copies that are queued on a stream."""

    def __init__(self, copied: Callable[[int], None]) -> None:
        self._copied = copied
        self._ahead: deque[tuple[torch.cuda.Event, int]] = deque()
        self._since = (0, 0)

    def passed(self, end: int, size_bytes: int) -> None:
        """Record a queued copy of `size_bytes`, which completes the image up to byte `end`."""
        copies, count = self._since[0] + 1, self._since[1] + size_bytes
        self._since = copies, count
        if copies < _MARK_COPIES and count < _MARK_BYTES:
            return
        self._since = 0, 0
        event = _event(blocking=True)
        event.record()
        self._ahead.append((event, end))
        if len(self._ahead) > _AHEAD:
            self._wait()

    def finish(self) -> None:
        """Wait until all copies have ended."""
        while self._ahead:
            self._wait()
        torch.cuda.current_stream().synchronize()

    def _wait(self) -> None:
        event, end = self._ahead.popleft()
        event.synchronize()
        self._copied(end)


class DeviceCopy:
    """Copy and digest the tensors of a plan that are on one GPU."""

    def __init__(
        self,
        plan: Plan,
        part: OnDevice,
        sources: Sequence[torch.Tensor],
        *,
        attest: bool,
        max_bytes: float | None,
    ) -> None:
        """Allocate the GPU memory that every snapshot needs.

        Args:
            plan: the plan of the saves.
            part: the items of the plan that are on this GPU.
            sources: the live tensors of these items.
            attest: whether to digest the tensors.
            max_bytes: the limit on GPU memory for staging; None for the free memory less a reserve.

        Raises:
            torch.cuda.OutOfMemoryError: the GPU lacks memory for the small tensors.
        """
        self.device = part.device
        self.part = part
        self._blobs = plan.image.blobs
        self._max_bytes = max_bytes
        self._packed = (
            Packed(plan.image, part, sources[: part.direct - part.first])
            if part.first < part.direct
            else None
        )
        self._digests = LiveDigests(plan, part, self._packed) if attest else None
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._staging: DeviceStaging | None = None
        self._last: Taken | None = None
        self._window_s: deque[float] = deque(maxlen=_LATELY)
        self._bytes_per_s: float | None = None

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of GPU memory that hold the packed small tensors."""
        return 0 if self._packed is None else self._packed.memory.nbytes

    def suits(self, sources: Sequence[torch.Tensor]) -> bool:
        """Return True if the tensors that are copied one by one are still contiguous."""
        return all(map(is_in_a_row, sources[self.part.direct - self.part.first :]))

    @torch.inference_mode(mode=False)  # tensors made in inference mode cannot be written to outside
    def take(
        self, sources: list[torch.Tensor], stream: torch.cuda.Stream, *, overlaps: bool
    ) -> Taken:
        """Queue kernels on `stream` that pack, digest and stage the tensors.

        Args:
            sources: the live tensors of the items on this GPU.
            stream: the stream on which training runs.
            overlaps: whether training continues during the copy. If not, nothing is staged.
        """
        part = self.part
        with torch.cuda.stream(stream), torch.no_grad():
            self._await_last(stream)
            if self._packed is not None:
                self._packed.fill(sources)
            digests = None if self._digests is None else self._digests.take(sources)
            staged = self._stage(sources) if overlaps else part.end
            taken = Taken(sources, staged, digests)
            taken.boundary.record(stream)
            taken.went_on.record(stream)
        self._last = taken
        return taken

    def resume(self, taken: Taken) -> None:
        """Record on the stream that a call which waited for the copy returns now.

        The time until the optimizer's step is measured from here.
        """
        taken.went_on.record(torch.cuda.current_stream(self.device))

    def order(self, taken: Taken, seat: Buffer, copied: Callable[[int], None]) -> Iterator[None]:
        """Queue the copies: first those for which the optimizer's step waits, then the others.

        Run this generator in a separate thread. It yields once the first copies are queued. It ends
        once all copies have ended.

        Args:
            taken: the tensors to copy.
            seat: the buffer that receives the copies.
            copied: called with the number of bytes that are complete, counted from the start of the
                buffer.
        """
        part = self.part
        marks = _Marks(copied)
        with self._own_stream():
            self._stream.wait_event(taken.boundary)
            taken.began.record()
            if taken.digests is not None and self._digests is not None:
                begin = self._digests.first_piece * DIGEST_BYTES
                notes = seat.notes[begin : begin + taken.digests.nbytes]
                notes.copy_(taken.digests.view(torch.uint8), non_blocking=True)
            if self._packed is not None:
                end = self._packed.offset + self._packed.memory.nbytes
                seat.memory[self._packed.offset : end].copy_(self._packed.memory, non_blocking=True)
                marks.passed(end, self._packed.memory.nbytes)
            for number in range(part.direct, taken.staged):
                self._order_one(number, taken.sources[number - part.first], seat, marks)
            taken.unstaged.record()
        yield
        again, ended = _timed(), _timed()
        with self._own_stream():
            again.record()
            if self._staging is not None:
                for number in range(taken.staged, part.end):
                    self._order_one(number, self._staging.view(number), seat, marks)
            ended.record()
            taken.drained.record()
            taken.ordered.set()
            marks.finish()
        # Between the first copies and the others, the thread does other work. So the copy rate is
        # measured within the larger of the two series.
        first_bytes, rest_bytes = (
            self._bytes(part.first, taken.staged),
            self._bytes(taken.staged, part.end),
        )
        if first_bytes >= rest_bytes:
            self._bytes_per_s = first_bytes / max(_between_s(taken.began, taken.unstaged), 1e-9)
        else:
            self._bytes_per_s = rest_bytes / max(_between_s(again, ended), 1e-9)

    def pass_fence(self, taken: Taken) -> None:
        """Make the current stream wait until all tensors that are not staged are copied."""
        stream = torch.cuda.current_stream(self.device)
        if stream in taken.fenced:
            return
        if not taken.fenced:
            taken.reached.record(stream)
        stream.wait_event(taken.unstaged)
        if not taken.fenced:
            taken.passed.record(stream)
        taken.fenced.append(stream)

    def close(self) -> None:
        """Wait for the work on the GPU, so that no kernel writes into released memory."""
        with contextlib.suppress(RuntimeError):  # the GPU has failed and runs nothing
            if self._last is not None:
                self._last.boundary.synchronize()  # the kernels that pack and digest
            self._stream.synchronize()

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream), torch.no_grad():
            yield

    def _bytes(self, first: int, end: int) -> int:
        """Return the bytes that the items `first` to `end` (exclusive) take in the buffer."""
        if first == end:
            return 0
        last = self._blobs[end - 1]
        return last.offset + last.length - self._blobs[first].offset

    def _order_one(self, number: int, source: torch.Tensor, seat: Buffer, marks: _Marks) -> None:
        blob, view = self._blobs[number], seat.views[number]
        assert view is not None, "only tensors are on a GPU"
        view.copy_(source, non_blocking=True)
        marks.passed(blob.offset + blob.length, blob.data_bytes)

    def _await_last(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the last save's copy, since this save reuses its GPU memory."""
        if self._last is None:
            return
        self._last.ordered.wait()
        stream.wait_event(self._last.drained)
        window_s = self._last.window_s
        if window_s is not None:
            self._window_s.append(window_s)

    def _stage(self, sources: Sequence[torch.Tensor]) -> int:
        """Stage the tensors that cannot reach the host before the optimizer's step.

        Returns:
            The number of the first staged item.
        """
        part = self.part
        sizes_bytes = [blob.data_bytes for blob in self._blobs[part.direct : part.end]]
        window_s = min(self._window_s) if self._window_s else None
        in_time = in_time_bytes(window_s, self._bytes_per_s) - self.packed_bytes
        room = self._room_bytes() if sum(sizes_bytes) > in_time else 0.0
        first = part.direct + first_staged(sizes_bytes, in_time_bytes=in_time, room_bytes=room)
        if first == part.end:
            # Release memory that other allocations need by now.
            if self._staging is not None and room_bytes(self.device) < 0:
                self._staging = None
            return first
        if self._staging is None or first < self._staging.first:
            self._staging = None
            try:
                self._staging = DeviceStaging(
                    self._blobs, first, part.end, self.device, self._stream
                )
            except torch.cuda.OutOfMemoryError:
                return part.end
        self._staging.fill(first, sources[first - part.first :])
        return first

    def _room_bytes(self) -> float:
        held_bytes = 0 if self._staging is None else self._staging.memory.nbytes
        room = room_bytes(self.device) + held_bytes
        # Packed tensors use part of the limit; large ones that are packed because they are not
        # contiguous are already counted by the plan.
        return (
            room
            if self._max_bytes is None
            else min(room, max(self._max_bytes - self.packed_bytes, 0))
        )


# Choose which tensors of a GPU are copied to the host directly, and which are staged on the GPU
# first. The optimizer's step waits for direct copies, so a direct copy costs nothing only if it
# ends before that step. Staging takes a twentieth of the time of a copy to the host, but it takes
# this time in the call, and it takes GPU memory. So the first tensors are copied directly, as many
# as the time allows, and the next are staged, as many as the memory allows.

_SAFE: Final = 0.8
"""The share of the expected time before the optimizer's step that direct copies may use."""


def in_time_bytes(window_s: float | None, bytes_per_s: float | None) -> float:
    """Return the number of bytes that can be copied to the host before the optimizer's step.

    Args:
        window_s: seconds from the call of a recent save to that step, measured on the GPU's stream;
            None if unknown.
        bytes_per_s: the rate of recent copies to the host; None if unknown.
    """
    return 0.0 if window_s is None or bytes_per_s is None else _SAFE * window_s * bytes_per_s


def first_staged(sizes_bytes: Sequence[int], *, in_time_bytes: float, room_bytes: float) -> int:
    """Return the index of the first tensor to stage; the number of tensors if none is staged.

    Args:
        sizes_bytes: the sizes of the tensors, in the order in which they are copied.
        in_time_bytes: the bytes that can be copied to the host before the optimizer's step.
        room_bytes: the bytes that may be staged. Tensors that fit neither limit are copied to the
            host while the optimizer's step waits.
    """
    first = 0
    for size_bytes in sizes_bytes:
        in_time_bytes -= size_bytes
        if in_time_bytes < 0:
            break
        first += 1
    left_bytes = sum(sizes_bytes[first:])
    while first < len(sizes_bytes) and left_bytes > room_bytes:
        left_bytes -= sizes_bytes[first]
        first += 1
    return first


class LiveDigests:
    """Digest the saved bytes of the tensors on one GPU, piece by piece.

    `first_piece` is the number of this GPU's first piece in the plan. Large tensors are read where
    they are. Small tensors are read from the memory into which they were packed.
    """

    def __init__(self, plan: Plan, part: OnDevice, packed: Packed | None) -> None:
        """Compute the digests and tables that are the same in each save."""
        self._part = part
        self.first_piece = bisect.bisect_left(plan.pieces, part.first)
        end = bisect.bisect_left(plan.pieces, part.end)
        pieces = range(self.first_piece, end)
        digests = [
            int.from_bytes(plan.constant.get(place, b""), "little", signed=True) for place in pieces
        ]
        self._digests = torch.tensor(digests, dtype=torch.int64, device=part.device)
        taken = [place for place in pieces if place not in plan.constant]
        self._places = torch.tensor(
            [place - self.first_piece for place in taken], device=part.device
        )
        self._kernels = DeviceDigests(
            [plan.layout.pieces[place].length for place in taken], part.device
        )
        self._packed: list[int] = []
        self._direct: list[tuple[int, int]] = []
        for place in taken:
            number, offset = plan.pieces[place], plan.layout.pieces[place].offset
            if number < part.direct:
                assert packed is not None, "there are small ones"
                self._packed.append(packed.memory.data_ptr() + offset - packed.offset)
            else:
                self._direct.append(
                    (number - part.first, offset - plan.image.blobs[number].data_offset)
                )

    def take(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Digest the live tensors in the current stream.

        Args:
            sources: the live tensors of the items on this GPU; the small ones are packed already.

        Returns:
            An int64 for each piece; in memory, it has the same bytes as a digest that the CPU
            computes.
        """
        begins = {number: sources[number].data_ptr() for number, _ in self._direct}
        addresses = [*self._packed, *(begins[number] + offset for number, offset in self._direct)]
        taken = torch.empty_like(self._places)
        self._kernels.enqueue(addresses, taken)
        return self._digests.index_copy(0, self._places, taken)
