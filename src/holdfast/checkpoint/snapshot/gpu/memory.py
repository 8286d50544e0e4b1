"""Memory on a GPU that holds a part of a snapshot until it is copied to the host."""

from collections.abc import Sequence
from typing import Final

import torch

from holdfast.checkpoint.format.file_image import Blob, FileImage
from holdfast.checkpoint.snapshot.plan import OnDevice

_SPARE_SHARE: Final = 0.05
_SPARE_BYTES: Final = 1 << 30
"""Of a GPU's memory, what is left free."""
_ALIGNMENT: Final = 256
"""Bytes, of what is staged; kernels that copy read 16 at once."""
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
"""What a kernel that copies many tensors copies as it is: it turns shorter floats into float32 and back, which changes
NaNs, and knows no other integers."""


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as what is copied bit for bit; in a row."""
    if tensor.dtype in _EXACT:
        return tensor
    if tensor.dtype.itemsize in _WORDS:
        return tensor.view(_WORDS[tensor.dtype.itemsize])
    return torch.view_as_real(tensor)  # complex128


def room_bytes(device: torch.device) -> float:
    """How much of a GPU's memory is free now, but for a reserve."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return free_bytes - max(_SPARE_BYTES, _SPARE_SHARE * total_bytes)


class Packed:
    """Small tensors as they lie in the image, with what is around them: they reach the host as one copy.

    `offset`: where in the image `memory` begins.
    """

    def __init__(self, image: FileImage, part: OnDevice, sources: Sequence[torch.Tensor]) -> None:
        """Take the memory, and write into it what is around the tensors.

        Args:
            image: the whole one.
            part: of it, what is on this GPU.
            sources: its small tensors.

        Raises:
            torch.cuda.OutOfMemoryError: the GPU has none left.
        """
        own = image.cut(part.first, part.direct)
        self.offset = image.blobs[part.first].offset
        frames = bytearray(own.size_bytes)
        own.write_frames(memoryview(frames))
        self.memory = torch.frombuffer(frames, dtype=torch.uint8).to(part.device)
        # A kernel copies many tensors of one type that lie in a row; the others take one each.
        self._groups: dict[torch.dtype, _Copies] = {}
        self._each: list[tuple[torch.Tensor, int]] = []
        for place, (view, source) in enumerate(zip(own.views(self.memory), sources, strict=True)):
            assert view is not None, "what is on a GPU is a tensor"
            if source.is_contiguous() and not (source.is_conj() or source.is_neg()):
                views, places = self._groups.setdefault(source.dtype, ([], []))
                views.append(_as_words(view))
                places.append(place)
            else:
                self._each.append((view, place))

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy the tensors of a snapshot into it, in the current stream."""
        for dtype, (views, places) in self._groups.items():
            live = [sources[place] for place in places]
            torch._foreach_copy_(views, live if dtype in _EXACT else list(map(_as_words, live)))
        for view, place in self._each:
            view.copy_(sources[place], non_blocking=True)


class DeviceStaging:
    """Large tensors, from the blob `first` of the image on."""

    def __init__(
        self,
        blobs: Sequence[Blob],
        first: int,
        end: int,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        """Take the memory.

        Args:
            blobs: the image's.
            first: the first one that there is to be room for.
            end: the one behind the last.
            device: the GPU.
            stream: that what is here is copied on.

        Raises:
            torch.cuda.OutOfMemoryError: the GPU has none left.
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
        """The memory of a blob, as a tensor."""
        return self._views[number - self.first]

    def fill(self, first: int, sources: Sequence[torch.Tensor]) -> None:
        """Copy tensors into it, those of the blobs from `first` on, in the current stream."""
        groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for view, source in zip(self._views[first - self.first :], sources, strict=True):
            views, found = groups.setdefault(source.dtype, ([], []))
            views.append(_as_words(view))
            found.append(_as_words(source))
        for views, found in groups.values():
            torch._foreach_copy_(views, found)
