"""Take a snapshot of tensors that are spread over several GPUs."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint.snapshot.buffer_pool import Buffer
from holdfast.checkpoint.snapshot.gpu import xxh3_kernel
from holdfast.checkpoint.snapshot.gpu.copy import DeviceCopy, Taken
from holdfast.checkpoint.snapshot.plan import Plan
from holdfast.checkpoint.state.capture import Contents
from holdfast.checkpoint.state.tensors import local
from holdfast.checkpoint.state.tree import KIND, PLAIN_TENSORS

_logger = logging.getLogger("holdfast")
Streams = Mapping[torch.device, torch.cuda.Stream]


class Devices:
    """Copy and digest the tensors of a plan that are on GPUs.

    The CPU copies and digests the plan's items from `first_on_host` on. If Triton cannot be used,
    the CPU digests all items.
    """

    def __init__(
        self, plan: Plan, contents: Contents, *, attest: bool, max_bytes: float | None
    ) -> None:
        """Allocate the GPU memory that every snapshot needs.

        If a GPU lacks the memory, the CPU copies all tensors.

        Args:
            plan: the plan of the saves.
            contents: the live state.
            attest: whether to digest the state.
            max_bytes: the limit on each GPU's memory for staging; None for the free memory less a
                reserve.
        """
        leaves = contents.leaves(plan.structure)
        places = {id(tensor): place for place, tensor in enumerate(contents.tensors)}
        end = plan.on_devices[-1].end if plan.on_devices else 0
        # The call of `save` finds tensors by their index in the state, since looking up thousands
        # of names takes milliseconds.
        self._places = [places[id(leaves[index.fqn])] for index in plan.items[:end]]
        on_host = [id(leaves[index.fqn]) for index in plan.items[end:]]
        self._host_places = [places[each] for each in on_host if each in places]
        self._count = len(contents.tensors)
        live = self._live(contents.tensors, {})
        self._kinds = list(map(KIND, live))
        self._plan = plan

        def copies(*, attest: bool) -> list[DeviceCopy]:
            try:
                return [
                    DeviceCopy(
                        plan, part, live[part.first : part.end], attest=attest, max_bytes=max_bytes
                    )
                    for part in plan.on_devices
                ]
            except torch.cuda.OutOfMemoryError:
                if attest:  # the digests take memory, too, so the caller tries without them
                    raise
                _logger.warning(
                    "The GPU has no memory left to pack small tensors: snapshots of it are slow."
                )
                return []

        digests = attest and xxh3_kernel.available()
        try:
            self._copies = copies(attest=digests)
        except Exception as error:
            if not digests:
                raise
            _logger.warning("The GPU cannot digest its memory: %s", error)
            digests = False
            self._copies = copies(attest=False)
        self.first_on_host = plan.on_devices[-1].end if self._copies else 0
        self._digests = digests
        self.first_digested_on_host = self.first_on_host if digests else 0
        if attest and self._copies and not digests:
            _logger.warning(
                "Each save reads the GPU's memory through the CPU to digest it, in the call. See that Triton is "
                "installed and works, or give Checkpointer attest=False."
            )

    def packed_places(self) -> set[int]:
        """Return the indices of the tensors that a GPU packs in the call of `save`."""
        return {
            place
            for part in self._plan.on_devices
            for place in self._places[part.first : part.direct]
        }

    def packed_bytes(self, device: torch.device) -> int:
        """Return the bytes of a GPU's memory that hold packed small tensors."""
        return sum(copy.packed_bytes for copy in self._copies if copy.device == device)

    def leaves_none(
        self, tensors: Sequence[torch.Tensor], copied: Mapping[int, torch.Tensor]
    ) -> bool:
        """Return True if the CPU need not digest any live tensor in the call of `save`.

        This is the case if all tensors that no GPU digests are copied to CPU memory already, and
        the state has as many tensors as the plan.
        """
        if not self._digests or len(tensors) != self._count:
            return False
        copies = [copied.get(id(tensors[place])) for place in self._host_places]
        return all(one is not None and one.is_cpu for one in copies)

    def __bool__(self) -> bool:
        return bool(self._copies)

    def __iter__(self) -> Iterator[torch.device]:
        return (copy.device for copy in self._copies)

    def take(
        self,
        tensors: Sequence[torch.Tensor],
        copied: Mapping[int, torch.Tensor],
        streams: Streams,
        *,
        overlaps: bool,
    ) -> list[Taken]:
        """Pack, digest and stage the tensors on each GPU; see `DeviceCopy.take`.

        Args:
            tensors: the tensors of the state.
            copied: copies to use in place of some tensors, by the `id` of the live tensor.
            streams: the streams on which training runs, by GPU.
            overlaps: whether training continues during the copy.

        Returns:
            One item for each GPU; an empty list if the tensors differ from the plan's tensors in
            their order, type, shape or device.
        """
        live = self._live(tensors, copied)
        if list(map(KIND, live)) != self._kinds:
            return []
        parts = [live[copy.part.first : copy.part.end] for copy in self._copies]
        if self._digests and not all(map(DeviceCopy.suits, self._copies, parts)):
            return []
        taken: list[Taken] = []
        try:
            for copy, part in zip(self._copies, parts, strict=True):
                taken.append(copy.take(part, streams[copy.device], overlaps=overlaps))
        except BaseException:
            for one in taken:
                one.release()
            raise
        return taken

    def has_taken(self, taken: Sequence[Taken], sources: Sequence[Any]) -> bool:
        """Return True if the tensors that `take` copied are the plan's tensors, in its order.

        `take` finds tensors by their index, and the order of the state's tensors may have changed
        since the plan was made.
        """
        return len(taken) == len(self._copies) and all(
            copy.suits(each.sources)
            and all(
                one is source or one.data_ptr() == source.data_ptr()
                for one, source in zip(
                    each.sources, sources[copy.part.first : copy.part.end], strict=True
                )
            )
            for copy, each in zip(self._copies, taken, strict=True)
        )

    def resume(self, taken: Sequence[Taken]) -> None:
        """Record on each GPU that a call which waited for the copy returns now."""
        for copy, one in zip(self._copies, taken, strict=False):
            copy.resume(one)

    def pass_fence(self, taken: Sequence[Taken]) -> None:
        """Make each GPU's current stream wait until every tensor is copied or staged."""
        for copy, one in zip(self._copies, taken, strict=False):
            copy.pass_fence(one)

    def order(
        self,
        taken: Sequence[Taken],
        seat: Buffer,
        copied: Callable[[int], None],
        ordered: Callable[[], None],
    ) -> None:
        """Copy the tensors to the host; return once all copies have ended.

        Call this method in a separate thread.

        Args:
            taken: the tensors to copy.
            seat: the buffer that receives the copies.
            copied: called with the number of bytes that are complete, counted from the start of the
                buffer.
            ordered: called once the copies for which the optimizer's step waits are queued.
        """
        # `copied` counts bytes from the start of the buffer. So a later GPU reports its progress
        # only after the earlier ones have ended.
        running = [
            copy.order(one, seat, copied if number == 0 else _nothing)
            for number, (copy, one) in enumerate(zip(self._copies, taken, strict=True))
        ]
        try:
            for each in running:
                next(each)
            ordered()
            for each, copy in zip(running, self._copies, strict=True):
                next(each, None)
                copied(self._end(copy))
        except BaseException:  # wait for the running copies, since their sources are released next
            for copy in self._copies:
                copy.close()
            raise

    def settled(self, taken: Sequence[Taken]) -> set[str]:
        """Return the names of tensors copied in the call, whose later changes do no harm."""
        names: set[str] = set()
        for copy, one in zip(self._copies, taken, strict=False):
            numbers = (*range(copy.part.first, copy.part.direct), *range(one.staged, copy.part.end))
            names.update(self._plan.items[number].fqn for number in numbers)
        return names

    def close(self) -> None:
        """Wait for the work on the GPUs, and release their memory."""
        for copy in self._copies:
            copy.close()
        self._copies.clear()

    def _live(
        self, tensors: Sequence[torch.Tensor], copied: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the tensors of the plan's items on GPUs; none if the state has too few tensors."""
        try:
            found = [tensors[place] for place in self._places]
        except IndexError:
            return []
        if any(one.device in self for one in copied.values()):
            found = [copied.get(id(tensor), tensor) for tensor in found]
        return found if set(map(type, found)) <= PLAIN_TENSORS else list(map(local, found))

    def _end(self, copy: DeviceCopy) -> int:
        last = self._plan.image.blobs[copy.part.end - 1]
        return last.offset + last.length


def current_streams(tensors: Sequence[torch.Tensor]) -> Streams:
    """Return this thread's current stream on each GPU that holds some of `tensors`."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return {}
    devices = {tensor.device for tensor in tensors}
    return {
        device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"
    }


def _nothing(_: int) -> None:
    """Ignore a progress report of the copy."""
