"""Compare two checkpoints value by value.

Only one value of each is in memory at a time.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from holdfast.checkpoint.catalog.catalog import Progress
from holdfast.checkpoint.convert.inspect import OpenedCheckpoint
from holdfast.checkpoint.restore import dcp_reader
from holdfast.core.errors import CheckpointError

_AT_ONCE = 1 << 22
"""The number of elements that are compared at once."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EntryDifference:
    """Describe a value that differs between two checkpoints.

    Attributes:
        name: the flat name of the value.
        a: the dtype and shape in the first checkpoint, or `plain value`.
        b: the dtype and shape in the second checkpoint, or `plain value`.
        elements: the number of elements of the tensor; None for plain values, or if `a` and `b`
            differ.
        differing: the number of elements with different bits; None if `elements` is None.
        max_abs_difference: the largest absolute difference between two elements; nan if one of the
            elements that differ is nan. None if `elements` is None, and for dtypes other than
            floating-point or complex ones.
    """

    name: str
    a: str
    b: str
    elements: int | None = None
    differing: int | None = None
    max_abs_difference: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointComparison:
    """List the differences, sorted by name; `same` is the number of values with equal bits."""

    same: int
    only_in_a: list[str]
    only_in_b: list[str]
    different: list[EntryDifference]

    @property
    def is_same(self) -> bool:
        """Return True if the checkpoints do not differ."""
        return not (self.only_in_a or self.only_in_b or self.different)


def compare_checkpoints(
    a: OpenedCheckpoint, b: OpenedCheckpoint, *, progress: Progress = lambda _done, _total: None
) -> CheckpointComparison:
    """Compare the values of two checkpoints bit for bit.

    The checkpoints may have been saved by different numbers of ranks.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: a value cannot be read.
    """
    names_a, names_b = (set(each.metadata.state_dict_metadata) for each in (a, b))
    both = sorted(names_a & names_b)
    total_bytes = sum(_size_bytes(a.tensor(name)) for name in both)
    done_bytes = 0
    different = []
    for name in both:
        difference = _compare_value(a, b, name)
        if difference is not None:
            different.append(difference)
        done_bytes += _size_bytes(a.tensor(name))
        progress(done_bytes, total_bytes)
    return CheckpointComparison(
        same=len(both) - len(different),
        only_in_a=sorted(names_a - names_b),
        only_in_b=sorted(names_b - names_a),
        different=different,
    )


def _compare_value(a: OpenedCheckpoint, b: OpenedCheckpoint, name: str) -> EntryDifference | None:
    forms = [_form(each.tensor(name)) for each in (a, b)]
    if forms[0] != forms[1]:
        return EntryDifference(name=name, a=forms[0], b=forms[1])
    saved = a.tensor(name)
    if saved is None:
        return (
            None if _same_plain(a, b, name) else EntryDifference(name=name, a=forms[0], b=forms[1])
        )
    left, right = (
        dcp_reader.read(
            each.path,
            each.metadata,
            {name: torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")},
        )[name]
        for each in (a, b)
    )
    differing, largest = _count(left, right)
    if not differing:
        return None
    return EntryDifference(
        name=name,
        a=forms[0],
        b=forms[1],
        elements=left.numel(),
        differing=differing,
        max_abs_difference=largest,
    )


def _count(left: torch.Tensor, right: torch.Tensor) -> tuple[int, float | None]:
    """Count the elements with different bits, and find the largest absolute difference."""
    dtype = left.dtype
    # torch has no arithmetic for bytes that hold two 4-bit numbers.
    has_difference = (dtype.is_floating_point or dtype.is_complex) and "float4" not in str(dtype)
    differing, largest = 0, 0.0
    for one, other in zip(_pieces(left), _pieces(right), strict=True):
        other_bits = _bits(one).ne(_bits(other)).any(dim=1)
        count = int(other_bits.sum())
        if count and has_difference and not math.isnan(largest):
            wide = torch.complex128 if dtype.is_complex else torch.float64
            gap = (one.to(wide) - other.to(wide)).abs()[other_bits]
            largest = math.nan if gap.isnan().any() else max(largest, float(gap.max()))
        differing += count
    return differing, largest if differing and has_difference else None


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().contiguous().reshape(-1)
    return (flat[at : at + _AT_ONCE] for at in range(0, flat.numel(), _AT_ONCE))


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as a row of one or more integers."""
    width = flat.element_size()
    unit = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(width, torch.int64)
    return flat.view(unit).reshape(flat.numel(), -1)


def _same_plain(a: OpenedCheckpoint, b: OpenedCheckpoint, name: str) -> bool:
    if _stored(a, name) == _stored(b, name):
        return True
    try:
        left, right = (
            dcp_reader.read(each.path, each.metadata, {name: None})[name] for each in (a, b)
        )
    except CheckpointError:  # the values cannot be unpickled safely, and their bytes differ
        return False
    return _same(left, right)


def _stored(opened: OpenedCheckpoint, name: str) -> bytes:
    stored = opened.metadata.storage_data[MetadataIndex(name)]
    fd = os.open(opened.path / Path(str(stored.relative_path)), os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, stored.length, stored.offset)
    finally:
        os.close(fd)


def _same(left: Any, right: Any) -> bool:
    """Return True if two values have equal types and bits at every depth; nan is equal to nan."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype and left.shape == right.shape and not _count(left, right)[0]
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(
            _same(one, other) for one, other in zip(left, right, strict=True)
        )
    if isinstance(left, set | frozenset):
        return sorted(map(repr, left)) == sorted(map(repr, right))
    return repr(left) == repr(right)


def _form(saved: TensorStorageMetadata | None) -> str:
    if saved is None:
        return "plain value"
    return f"{str(saved.properties.dtype).removeprefix('torch.')}{list(saved.size)}"


def _size_bytes(saved: TensorStorageMetadata | None) -> int:
    return 0 if saved is None else math.prod(saved.size) * saved.properties.dtype.itemsize
