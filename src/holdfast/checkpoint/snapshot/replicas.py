"""Digest entries that several ranks have, so that the commit can find those that differ.

`format.replica_digests` compares the digests. A digest depends on the type, the shape and the bytes
of an entry, and on whether the entry is on a GPU. On a GPU, the digest is taken without a copy to
the host.
"""

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex

from holdfast.checkpoint.format.file_image import LARGE_BYTES
from holdfast.checkpoint.format.replica_digests import name_key, pack
from holdfast.checkpoint.state.tensors import is_in_a_row, local, part_of

_THREADS: Final = min(4, len(os.sched_getaffinity(0)))
_BATCH_BYTES: Final = 16 << 20
"""The bytes that one series of GPU kernels digests; the kernels need four times as much memory."""
_MASK: Final = (1 << 64) - 1
_FACTORS: Final = (-7046029288634856825, -4417276706812531889, 1609587929392839161)
"""Odd constants of xxHash, as signed 64-bit integers."""


def digest_replicas(
    replicated: Sequence[MetadataIndex],
    leaves: Mapping[str, Any],
    copied: Mapping[int, torch.Tensor],
    *,
    owned: frozenset[str],
    all_stand_still: bool,
) -> bytes:
    """Digest this rank's replicated entries, for comparison with the other ranks' digests.

    Args:
        replicated: the entries that other ranks have as well.
        leaves: the tensors and values of the state, by flat name.
        copied: the copies that the call made of some tensors, by the `id` of the live tensor.
        owned: the tensors that only an optimizer's step changes.
        all_stand_still: whether training waits, so that no tensor changes during this call. If not,
            tensors that are neither copied nor owned are left out, because forward may write to
            them.
    """
    values, tensors = [], []
    for index in replicated:
        leaf = leaves[index.fqn]
        if not isinstance(leaf, torch.Tensor):
            values.append((index, xxhash.xxh3_64_intdigest(_text(leaf).encode())))
        elif (copy := copied.get(id(leaf))) is not None:
            tensors.append((index, local(copy)))
        elif all_stand_still or index.fqn in owned:
            tensors.append((index, local(part_of(leaf, index))))
    digests = digest_tensors([tensor for _, tensor in tensors])
    found = [
        (index, digest)
        for (index, _), digest in zip(tensors, digests, strict=True)
        if digest is not None
    ]
    return pack((name_key(index.fqn), _place(index), digest) for index, digest in (*values, *found))


@torch.no_grad()
def digest_tensors(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return a digest of the type, the shape and the bytes of each tensor.

    The digest is None if PyTorch gives no access to the tensor's bytes.
    """
    digests: list[int | None] = [None] * len(tensors)
    with ThreadPoolExecutor(_THREADS) as pool:
        numbers = [number for number, each in enumerate(tensors) if each.is_cpu]
        large = {
            at: pool.submit(_digest_on_host, tensors[at])
            for at in numbers
            if tensors[at].nbytes >= LARGE_BYTES
        }
        for at in numbers:
            digests[at] = large[at].result() if at in large else _digest_on_host(tensors[at])
    on_devices: dict[torch.device, list[int]] = {}
    for number, each in enumerate(tensors):
        if not each.is_cpu:
            on_devices.setdefault(each.device, []).append(number)
    for device, numbers in on_devices.items():
        for number, total in zip(
            numbers, _sums_on(device, [tensors[each] for each in numbers]), strict=True
        ):
            digests[number] = xxhash.xxh3_64_intdigest(
                _kind(tensors[number]) + total.to_bytes(8, "little")
            )
    return digests


def position_sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a checksum for each tensor, computed on its own device.

    Each 8-byte word is mixed with its position in the tensor. The checksum is the sum of the mixed
    words, modulo 2 ** 64.
    """
    totals: list[int] = []
    batch: list[tuple[int, int, torch.Tensor]] = []
    sums: list[tuple[list[int], torch.Tensor]] = []
    batch_words = 0
    for number, tensor in enumerate(tensors):
        totals.append(0)
        data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for at in range(0, data.numel(), _BATCH_BYTES):
            part = data[at : at + _BATCH_BYTES]
            if lacking := -part.numel() % 8:
                part = torch.nn.functional.pad(part, (0, lacking))
            elif part.data_ptr() % 8:
                part = part.clone()
            words = part.view(torch.int64)
            if batch and (batch_words + words.numel()) * 8 > _BATCH_BYTES:
                sums.append(_mixed(batch))
                batch, batch_words = [], 0
            batch.append((number, at // 8, words))
            batch_words += words.numel()
    if batch:
        sums.append(_mixed(batch))
    if sums:
        numbers = [number for each, _ in sums for number in each]
        for number, total in zip(
            numbers, torch.cat([each for _, each in sums]).tolist(), strict=True
        ):
            totals[number] = (totals[number] + total) & _MASK
    return totals


def _mixed(batch: Sequence[tuple[int, int, torch.Tensor]]) -> tuple[list[int], torch.Tensor]:
    """Return the numbers of the tensors in a batch and the sum of each part's mixed words.

    All parts are summed together, to launch only a few kernels.
    """
    parts = [words for _, _, words in batch]
    device, lengths = parts[0].device, torch.tensor([len(each) for each in parts], device="cpu")
    ends = lengths.cumsum(0)
    shifts = torch.tensor([first for _, first, _ in batch], device="cpu") - (ends - lengths)
    total = int(ends[-1])
    mixed = torch.arange(total, device=device)
    mixed += shifts.to(device).repeat_interleave(lengths.to(device), output_size=total)
    mixed *= _FACTORS[0]
    mixed ^= torch.cat(parts) if len(parts) > 1 else parts[0]
    for factor in _FACTORS:
        mixed *= factor
        mixed ^= mixed >> 29
    if len(parts) == 1:
        sums = mixed.sum().reshape(1)
    else:  # a sum for each part, exact since it is modulo 2 ** 64
        sums = mixed.cumsum(0)[(ends - 1).to(device)]
        sums = sums - torch.nn.functional.pad(sums[:-1], (1, 0))
    return [number for number, _, _ in batch], sums


def _sums_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[int]:
    if device.type != "cuda":
        return position_sums(tensors)
    current = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        return position_sums(tensors)  # the results are on the host once the stream has finished


def _digest_on_host(tensor: torch.Tensor) -> int | None:
    held = tensor if is_in_a_row(tensor) else tensor.resolve_conj().resolve_neg().contiguous()
    hashed = xxhash.xxh3_64(_kind(tensor))
    if held.nbytes:
        if not held.data_ptr():
            return None
        hashed.update((ctypes.c_ubyte * held.nbytes).from_address(held.data_ptr()))
    return hashed.intdigest()


def _kind(tensor: torch.Tensor) -> bytes:
    return f"{tensor.dtype}{tuple(tensor.shape)}".encode()


def _place(index: MetadataIndex) -> int:
    return xxhash.xxh3_64_intdigest(
        repr(None if index.offset is None else tuple(index.offset)).encode()
    )


def _text(value: Any) -> str:
    """Return a text that is the same for equal plain values on all ranks.

    Pickles would not do, because pickles of equal values may differ: they depend on object
    identities and on hashes.
    """
    if isinstance(value, set):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    return repr(value)
