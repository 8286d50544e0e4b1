"""Allocate GPU memory that holds a part of a snapshot until the part is copied to the host."""

from collections.abc import Sequence
from typing import Final

import torch

from holdfast.checkpoint.format.file_image import Blob, FileImage
from holdfast.checkpoint.snapshot.plan import OnDevice

_SPARE_SHARE: Final = 0.05
_SPARE_BYTES: Final = 1 << 30
"""Snapshots leave this share of a GPU's memory free, but no less than these bytes."""
_ALIGNMENT: Final = 256
"""The alignment of staged tensors in bytes; copy kernels read 16 bytes at once."""
_Copies = tuple[list[torch.Tensor], list[int]]
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT: Final = {
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
}
"""The types that `torch._foreach_copy_` copies bit for bit.

The function converts shorter floats to float32 and back, which changes NaNs. It does not support
other integers.
"""


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` in a type that `torch._foreach_copy_` copies bit for bit."""
    if tensor.dtype in _EXACT:
        return tensor
    if tensor.dtype.itemsize in _WORDS:
        return tensor.view(_WORDS[tensor.dtype.itemsize])
    return torch.view_as_real(tensor)  # complex128


def room_bytes(device: torch.device) -> float:
    """Return the free bytes of a GPU's memory, less a reserve that snapshots leave free."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return free_bytes - max(_SPARE_BYTES, _SPARE_SHARE * total_bytes)


class Packed:
    """Hold small tensors in one piece of GPU memory, so that one copy sends all to the host.

    The memory also holds the bytes that the file format adds before and after each tensor.

    Attributes:
        offset: the offset of `memory` in the snapshot buffer, in bytes.
        memory: the packed tensors, as bytes.
    """

    def __init__(self, image: FileImage, part: OnDevice, sources: Sequence[torch.Tensor]) -> None:
        """Allocate the memory, and write the bytes before and after each tensor into it.

        Args:
            image: the layout of the whole snapshot buffer.
            part: the items of the snapshot that are on this GPU.
            sources: the small tensors of these items.

        Raises:
            torch.cuda.OutOfMemoryError: the GPU lacks memory.
        """
        own = image.cut(part.first, part.direct)
        self.offset = image.blobs[part.first].offset
        frames = bytearray(own.size_bytes)
        own.write_frames(memoryview(frames))
        self.memory = torch.frombuffer(frames, dtype=torch.uint8).to(part.device)
        # One kernel copies many contiguous tensors of one type. Each other tensor needs a kernel of
        # its own.
        self._groups: dict[torch.dtype, _Copies] = {}
        self._each: list[tuple[torch.Tensor, int]] = []
        for place, (view, source) in enumerate(zip(own.views(self.memory), sources, strict=True)):
            assert view is not None, "only tensors are on a GPU"
            if source.is_contiguous() and not (source.is_conj() or source.is_neg()):
                views, places = self._groups.setdefault(source.dtype, ([], []))
                views.append(_as_words(view))
                places.append(place)
            else:
                self._each.append((view, place))

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy a snapshot's small tensors into the memory, in the current stream."""
        for dtype, (views, places) in self._groups.items():
            live = [sources[place] for place in places]
            torch._foreach_copy_(views, live if dtype in _EXACT else list(map(_as_words, live)))
        for view, place in self._each:
            view.copy_(sources[place], non_blocking=True)


class DeviceStaging:
    """Hold copies of large tensors on the GPU until they are copied to the host."""

    def __init__(
        self,
        blobs: Sequence[Blob],
        first: int,
        end: int,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        """Allocate memory for the items `first` to `end` (exclusive).

        Args:
            blobs: the items of the snapshot, with their sizes.
            first: the number of the first item to hold.
            end: the number after the last item to hold.
            device: the GPU.
            stream: the stream that copies the tensors to the host.

        Raises:
            torch.cuda.OutOfMemoryError: the GPU lacks memory.
        """
        self.first = first
        sizes_bytes = [-(-blob.data_bytes // _ALIGNMENT) * _ALIGNMENT for blob in blobs[first:end]]
        self.memory = torch.empty(sum(sizes_bytes), dtype=torch.uint8, device=device)
        self.memory.record_stream(stream)
        self._views: list[torch.Tensor] = [
            whole[: blob.data_bytes].view(blob.need.dtype).view(blob.need.shape)
            for blob, whole in zip(
                blobs[first:end], torch.split(self.memory, sizes_bytes), strict=True
            )
            if blob.need.dtype is not None
        ]

    def view(self, number: int) -> torch.Tensor:
        """Return the staged copy of the item with this number."""
        return self._views[number - self.first]

    def fill(self, first: int, sources: Sequence[torch.Tensor]) -> None:
        """Copy the tensors of the items from `first` on into the memory, in the current stream."""
        groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for view, source in zip(self._views[first - self.first :], sources, strict=True):
            views, found = groups.setdefault(source.dtype, ([], []))
            views.append(_as_words(view))
            found.append(_as_words(source))
        for views, found in groups.values():
            torch._foreach_copy_(views, found)
