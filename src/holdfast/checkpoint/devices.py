"""The GPUs that a plan's tensors lie on, each with its part of a snapshot."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint import device_digests
from holdfast.checkpoint.device_copy import DeviceCopy, Taken
from holdfast.checkpoint.plan import Plan
from holdfast.checkpoint.seats import Seat

_logger = logging.getLogger("holdfast")
Streams = Mapping[torch.device, torch.cuda.Stream]


class Devices:
    """Takes snapshots of what lies on GPUs; blobs from `first_on_host` on are the CPU's to copy and to digest.

    Without Triton the CPU digests all of them.
    """

    def __init__(self, plan: Plan, sources: Sequence[Any], *, attest: bool, max_bytes: float | None) -> None:
        """Take the memory that all snapshots need, or leave all to the CPU where there is none.

        Args:
            plan: of the image.
            sources: what it is of now, blob by blob.
            attest: whether to digest it.
            max_bytes: of each GPU's memory for staging; None: what is free, but for a reserve.
        """
        self._copies: list[DeviceCopy] = []
        self._plan = plan
        digests = attest and device_digests.available()
        try:
            for part in plan.on_devices:
                own = sources[part.first : part.end]
                self._copies.append(DeviceCopy(plan, part, own, attest=digests, max_bytes=max_bytes))
        except torch.cuda.OutOfMemoryError:
            self._copies.clear()
            _logger.warning("The GPU has no memory left to pack small tensors: snapshots of it are slow.")
        self.first_on_host = plan.on_devices[-1].end if self._copies else 0
        self.first_digested_on_host = self.first_on_host if digests else 0
        if attest and self._copies and not digests:
            _logger.warning(
                "Triton is not installed: each save reads the GPU's memory through the CPU to digest it, in the call. "
                "Install triton, or give Checkpointer attest=False."
            )

    def __bool__(self) -> bool:
        return bool(self._copies)

    def __iter__(self) -> Iterator[torch.device]:
        return (copy.device for copy in self._copies)

    def suits(self, sources: Sequence[Any]) -> bool:
        """Whether all tensors lie where they did when it was planned."""
        return all(copy.suits(sources[copy.part.first : copy.part.end]) for copy in self._copies)

    def take(self, sources: list[Any], streams: Streams, *, overlaps: bool) -> list[Taken]:
        """Take what is there now; see `DeviceCopy.take`."""
        return [
            copy.take(sources[copy.part.first : copy.part.end], _stream(copy.device, streams), overlaps=overlaps)
            for copy in self._copies
        ]

    def goes_on(self, taken: Sequence[Taken]) -> None:
        """The call returns, after it has waited for the copy."""
        for copy, one in zip(self._copies, taken, strict=False):
            copy.goes_on(one)

    def pass_fence(self, taken: Sequence[Taken]) -> None:
        """What follows on the current streams waits, on the GPUs, until all is copied or staged."""
        for copy, one in zip(self._copies, taken, strict=False):
            copy.pass_fence(one)

    def order(
        self, taken: Sequence[Taken], seat: Seat, copied: Callable[[int], None], ordered: Callable[[], None]
    ) -> None:
        """Copy it, in a thread of its own; returns once all is there.

        Args:
            taken: what to copy.
            seat: where to.
            copied: told how many bytes of the image are there, counted from its begin.
            ordered: called once all copies are ordered that the fence waits for.
        """
        # Of several, the later ones say how far they are once those before are there.
        running = [
            copy.order(one, seat, copied if number == 0 else _nothing)
            for number, (copy, one) in enumerate(zip(self._copies, taken, strict=True))
        ]
        for each in running:
            next(each)
        ordered()
        for each, copy in zip(running, self._copies, strict=True):
            next(each, None)
            copied(self._end(copy))

    def settled(self, taken: Sequence[Taken]) -> set[str]:
        """The names of the tensors whose bytes were taken at once: they may have changed since."""
        names: set[str] = set()
        for copy, one in zip(self._copies, taken, strict=False):
            numbers = (*range(copy.part.first, copy.part.direct), *range(one.staged, copy.part.end))
            names.update(self._plan.items[number].fqn for number in numbers)
        return names

    def close(self) -> None:
        """Nothing of it goes on."""
        for copy in self._copies:
            copy.close()
        self._copies.clear()

    def _end(self, copy: DeviceCopy) -> int:
        last = self._plan.image.blobs[copy.part.end - 1]
        return last.offset + last.length


def current_streams() -> Streams:
    """Of this thread, on the GPUs that are in use; those that are not listed are on their first stream."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return {}
    stream = torch.cuda.current_stream()
    return {stream.device: stream}


def _stream(device: torch.device, streams: Streams) -> torch.cuda.Stream:
    return streams.get(device) or torch.cuda.default_stream(device)


def _nothing(_: int) -> None:
    """Nobody is told."""
