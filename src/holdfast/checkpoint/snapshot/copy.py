"""A snapshot: the live tensors' bytes into an arena, while forward and backward run, and what tells that it is one.

What a forward pass changes (counters, the statistics of a batch norm) is copied before training goes on, see `early`.
Of the others only an optimizer's step changes the bytes, and it waits at the fence. Whoever breaks that is found out:
every in-place operation of PyTorch counts up a tensor's version, which must be the same before and after; and where a
save is attested, the digests taken before must be those of what was written.
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
"""A rank's that digest: one reads half as fast as the memory is, and a node has several ranks."""
_GROUP: Final = 256
"""Tensors copied in one call, which holds Python's lock while it looks at its arguments, and not while it copies."""


class ChangeTracker:
    """The tensors of one save, from the call on."""

    def __init__(
        self, tensors: LiveTensors, copied: dict[int, torch.Tensor], *, must_block: bool = False
    ) -> None:
        """Of `copied`, by their `id`, there are copies already; `must_block`: not of all that may change."""
        self._tensors = tensors
        self._versions = _versions(tensors)
        self.copied = copied
        """What those are copied as, by the `id` of what is live."""
        self.must_block = must_block
        """Whether the call waits until the rest is copied, too."""

    def changed(self) -> list[int]:
        """The places of the tensors that were written to since the call, but for those that it copied."""
        versions = _versions(self._tensors)
        if versions == self._versions:
            return []
        return [
            place
            for place, (before, now) in enumerate(zip(self._versions, versions, strict=True))
            if before != now and id(self._tensors[place]) not in self.copied
        ]


def sources(plan: Plan, leaves: dict[str, Any], snapshot: ChangeTracker) -> list[Any]:
    """What each blob of the image is copied from: a tensor, or a plain value as bytes."""
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
    """Whether a plain value has outgrown its slot."""
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
    """Copy `sources` into the memory of an image; Python's lock is free while bytes move.

    Args:
        plan: of the image.
        memory: the image's.
        views: its tensors, None for a plain value.
        sources: what to copy into each.
        copied: told from time to time how many bytes of the image are there, counted from its begin.
        first: blobs before this one are somebody else's to copy.
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
    """The digests of the blobs as they are to be, piece by piece, as the writing process takes those of what it writes.

    Tensors are read where they live; what is around them is known. Blobs before `first` are left out.
    """
    blobs = plan.image.blobs

    def digests(number: int) -> bytes:
        around, source = plan.around[number], sources[number]
        if (
            around is not None and source.is_cpu and is_in_a_row(source)
        ):  # there may be thousands of them
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
    with ThreadPoolExecutor(
        _THREADS
    ) as pool:  # on a GPU the order of streams is that of the calling thread
        large = {
            at: pool.submit(digests, at)
            for at in numbers
            if blobs[at].is_large and sources[at].is_cpu
        }
        return b"".join(large[at].result() if at in large else digests(at) for at in numbers)


def _expected(blob: Blob, source: Any) -> tuple[list[memoryview], Any]:
    """What a blob is made of, and what has to live as long."""
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
    """The flat names of the tensors that `pieces` are of, each once."""
    return list(dict.fromkeys(plan.items[plan.pieces[piece]].fqn for piece in pieces))


def _versions(tensors: LiveTensors) -> list[int]:
    """How often each was written to in place; 0 where PyTorch does not count."""
    try:
        if tensors.are_plain:
            return list(map(operator.attrgetter("_version"), tensors))
    except RuntimeError:  # one was made in inference mode
        pass
    # One that has no shape yet answers nothing; the plan refuses it by name.
    return [
        0 if is_lazy(tensor) or tensor.is_inference() else local(tensor)._version
        for tensor in tensors
    ]
