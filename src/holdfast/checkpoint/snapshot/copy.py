"""Copy live tensors into a buffer while training continues, and detect changes during the copy.

Tensors that a forward pass changes (counters, the statistics of a batch norm) are copied before
training continues; see `early_copy`. The other tensors should be changed only by an optimizer's
step, and that step waits until they are copied. If other code changes them during the copy, the
change is detected in two ways:

- Every in-place operation of PyTorch increments a tensor's version, and the version must be the
  same before and after the copy.
- If the save is attested, digests of the live tensors, taken in the call of `save`, must match
  digests of the written bytes.
"""

import bisect
import ctypes
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
import xxhash
from torch.nn.parameter import is_lazy

from holdfast.checkpoint.format.checksums import DIGEST_BYTES
from holdfast.checkpoint.format.file_image import Blob, template
from holdfast.checkpoint.format.plain_values import serialized
from holdfast.checkpoint.format.rank_layout import CHUNK_BYTES
from holdfast.checkpoint.snapshot.plan import Plan
from holdfast.checkpoint.state.tensors import is_in_a_row, local, part_of
from holdfast.checkpoint.state.tree import PLAIN_TENSORS, LiveTensors
from holdfast.core.errors import BadUse

_THREADS: Final = min(4, len(os.sched_getaffinity(0)))
"""The number of threads that digest tensors; one thread reads at half the memory's rate."""
_GROUP: Final = 256
"""The number of tensors that one call copies.

The call holds Python's lock only while it parses its arguments, not while it copies.
"""


class ChangeTracker:
    """Detect which of a save's tensors are written to after the call of `save`."""

    def __init__(
        self, tensors: LiveTensors, copied: dict[int, torch.Tensor], *, must_block: bool = False
    ) -> None:
        """Record the present version of each tensor, to find later writes.

        Args:
            tensors: the live tensors.
            copied: the copies that exist already, by the `id` of the live tensor.
            must_block: whether the call must wait for the whole copy, because some tensors that may
                change are not copied yet.
        """
        self._tensors = tensors
        self._versions = _versions(tensors)
        self.copied = copied
        """The copies made in the call, by the `id` of the live tensor."""
        self.must_block = must_block
        """True if the call of `save` waits until all other tensors are copied, too."""

    def changed(self) -> list[int]:
        """Return the indices of tensors written to since the call, unless the call copied them."""
        versions = _versions(self._tensors)
        if versions == self._versions:
            return []
        return [
            place
            for place, (before, now) in enumerate(zip(self._versions, versions, strict=True))
            if before != now and id(self._tensors[place]) not in self.copied
        ]


def sources(plan: Plan, leaves: dict[str, Any], snapshot: ChangeTracker) -> list[Any]:
    """Return for each item of the plan the tensor to copy, or the serialized plain value.

    A copy that the call has made takes the place of its live tensor.
    """
    live = list(map(leaves.__getitem__, plan.names))
    found: list[Any] = list(map(snapshot.copied.get, map(id, live), live))
    for number in plan.slots:
        found[number] = plan.fixed.get(plan.names[number]) or serialized(found[number])
    if set(map(type, found)) <= {*PLAIN_TENSORS, bytes}:
        return found
    return [
        source
        if type(source) in PLAIN_TENSORS or blob.need.dtype is None
        else part_of(source, index)
        for source, index, blob in zip(found, plan.items, plan.image.blobs, strict=True)
    ]


def overlong(plan: Plan, sources: Sequence[Any]) -> bool:
    """Return True if a plain value no longer fits the space that the plan has reserved for it."""
    return any(len(sources[number]) > plan.image.blobs[number].data_bytes for number in plan.slots)


def copy_into(
    plan: Plan,
    memory: memoryview,
    views: list[Any],
    sources: list[Any],
    copied: Callable[[int], None] = lambda _: None,
    *,
    first: int = 0,
) -> None:
    """Copy `sources` into a snapshot's memory, without holding Python's lock during the copy.

    Args:
        plan: the plan, which gives each item its place in the memory.
        memory: the memory of the snapshot.
        views: for each item, a tensor whose memory is the item's place; None for a plain value.
        sources: for each item, the tensor or the bytes to copy.
        copied: called during the copy with the number of bytes that are complete, counted from the
            start of the memory.
        first: the index of the first item to copy; GPUs copy the items before it.
    """
    blobs = plan.image.blobs

    def copy_one(number: int) -> None:
        blob, view, source = blobs[number], views[number], sources[number]
        if view is None:
            end = blob.data_offset + len(source)
            memory[blob.data_offset : end] = source
            memory[end : blob.data_offset + blob.data_bytes] = bytes(blob.data_bytes - len(source))
        elif source.is_cpu and is_in_a_row(source):
            for at in range(0, blob.data_bytes, CHUNK_BYTES):
                size_bytes = min(CHUNK_BYTES, blob.data_bytes - at)
                ctypes.memmove(view.data_ptr() + at, source.data_ptr() + at, size_bytes)
                copied(blob.data_offset + at + size_bytes)
        else:
            view.copy_(source)

    begin = first
    with torch.no_grad():
        for single in (*plan.singles[bisect.bisect_left(plan.singles, first) :], len(sources)):
            for at in range(begin, single, _GROUP):
                end = min(at + _GROUP, single)
                torch._foreach_copy_(views[at:end], sources[at:end])
                copied(blobs[end - 1].offset + blobs[end - 1].length)
            if single < len(sources):
                copy_one(single)
            begin = single + 1


def live_digests(plan: Plan, sources: Sequence[Any], *, first: int = 0) -> bytes:
    """Digest the live tensors as they would be written, for comparison with the written bytes.

    Each item is digested in the same pieces as in the file, including the bytes that the file
    format adds around a tensor. Tensors are read where they are, without a copy. Items before
    `first` are left out.

    Returns:
        The digests of all pieces, 8 bytes each, in order.
    """
    blobs = plan.image.blobs

    def digests(number: int) -> bytes:
        around, source = plan.around[number], sources[number]
        # The fast way, since there may be thousands of these blobs.
        if around is not None and source.is_cpu and is_in_a_row(source):
            hashed = xxhash.xxh3_64(around.head)
            hashed.update((ctypes.c_ubyte * around.data_bytes).from_address(source.data_ptr()))
            hashed.update(around.tail)
            return hashed.intdigest().to_bytes(DIGEST_BYTES, "little")
        expected, _held = _expected(blobs[number], sources[number])
        return b"".join(
            plan.constant.get(place) or digest(place, expected) for place in plan.places[number]
        )

    def digest(place: int, expected: list[memoryview]) -> bytes:
        offset, length = plan.layout.pieces[place]
        hashed, at = xxhash.xxh3_64(), blobs[plan.pieces[place]].offset
        for part in expected:
            hashed.update(part[max(offset - at, 0) : max(offset + length - at, 0)])
            at += len(part)
        return hashed.intdigest().to_bytes(DIGEST_BYTES, "little")

    numbers = range(first, len(blobs))
    # On a GPU, only the calling thread has the right stream.
    with ThreadPoolExecutor(_THREADS) as pool:
        large = {
            at: pool.submit(digests, at)
            for at in numbers
            if blobs[at].is_large and sources[at].is_cpu
        }
        return b"".join(large[at].result() if at in large else digests(at) for at in numbers)


def _expected(blob: Blob, source: Any) -> tuple[list[memoryview], Any]:
    """Return the bytes of one item in the file, and an object that keeps their memory alive."""
    if blob.need.dtype is None:
        return [memoryview(source), memoryview(bytes(blob.length - len(source)))], None
    held = source.resolve_conj().resolve_neg().cpu().contiguous()
    if blob.data_bytes and not held.data_ptr():
        raise BadUse(
            f"A tensor of shape {tuple(source.shape)} is a {type(source).__name__}, which has no memory of its own and "
            "cannot be attested. Save the tensors that it is made of, or give Checkpointer attest=False."
        )
    around = template(blob.need.dtype, blob.need.shape)
    data = memoryview((ctypes.c_ubyte * blob.data_bytes).from_address(held.data_ptr() or 1)).cast(
        "B"
    )
    return [memoryview(around.head), data, memoryview(around.tail)], held


def names_of(plan: Plan, pieces: Iterable[int]) -> list[str]:
    """Return the flat names of the tensors that contain the digested `pieces`, each name once."""
    return list(dict.fromkeys(plan.items[plan.pieces[piece]].fqn for piece in pieces))


def _versions(tensors: LiveTensors) -> list[int]:
    """Return for each tensor how often it was written to in place; 0 if PyTorch does not count."""
    try:
        if tensors.are_plain:
            return list(map(operator.attrgetter("_version"), tensors))
    except RuntimeError:  # a tensor was made in inference mode
        pass
    # An uninitialized tensor has no version; the plan rejects it by name.
    return [
        0 if is_lazy(tensor) or tensor.is_inference() else local(tensor)._version
        for tensor in tensors
    ]
