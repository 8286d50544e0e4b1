"""Compare the digests of the GPU's kernel with the C library's.

Without a GPU, run the kernel in Triton's interpreter. As a script under `TRITON_INTERPRET=1`, this
file does the latter.
"""

import importlib.util
import os
import random
import subprocess
import sys

import pytest
import torch
import xxhash

from holdfast.checkpoint.format.rank_layout import CHUNK_BYTES
from holdfast.checkpoint.snapshot.gpu.xxh3_kernel import DeviceDigests, Tuning, available

CPU = torch.device("cpu")
EDGES = [
    *(
        241,
        255,
        256,
        257,
        319,
        320,
        321,
        1023,
        1024,
        1025,
        1087,
        1088,
        1089,
        1151,
        2047,
        2048,
        2049,
        8191,
        8192,
        8193,
    ),
    *(9216, 9217, 9280, 65_535, 65_536, 65_537, 65_600, 66_000),
]
"""Lengths around each end of a stripe, a block, a program's share or the chain's read-ahead."""
needs_gpu = pytest.mark.skipif(not available(), reason="needs a GPU and Triton")


class Pieces:
    """Random bytes on a device, and pieces of them at addresses divisible by 8."""

    def __init__(self, sizes_bytes, device, seed=0):
        seeded = random.Random(seed)
        self.sizes_bytes = list(sizes_bytes)
        self.offsets, end = [], 0
        for size_bytes in self.sizes_bytes:
            at = -(-end // 8) * 8 + 8 * seeded.randrange(9)
            self.offsets.append(at)
            end = at + size_bytes
        self.host = torch.randint(
            0, 256, (end,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        self.memory = self.host.to(device)

    @property
    def addresses(self):
        return [self.memory.data_ptr() + offset for offset in self.offsets]

    def expected(self):
        data = memoryview(self.host.numpy())
        places = zip(self.offsets, self.sizes_bytes, strict=True)
        return [xxhash.xxh3_64_intdigest(data[at : at + size_bytes]) for at, size_bytes in places]

    def digested(self, digests):
        out = torch.zeros(len(self.sizes_bytes), dtype=torch.int64, device=self.memory.device)
        digests.enqueue(self.addresses, out)
        return [digest % (1 << 64) for digest in out.tolist()]


def differing(pieces, digests):
    """Return the lengths whose digests differ."""
    both = zip(pieces.sizes_bytes, pieces.digested(digests), pieces.expected(), strict=True)
    return [size_bytes for size_bytes, found, expected in both if found != expected]


def interpreted():
    """Run the script's checks; several groups of pieces use both halves of the scratch memory."""
    seeded = random.Random(1)
    pieces = Pieces([*EDGES, *(seeded.randrange(241, 12_000) for _ in range(12)), 65_537, 241], CPU)
    digests = DeviceDigests(
        pieces.sizes_bytes, CPU, scratch_bytes=2 * 64 * 70, tuning=Tuning(ahead=4)
    )
    assert not differing(pieces, digests)

    moved = Pieces(pieces.sizes_bytes, CPU, seed=2)  # other bytes elsewhere
    assert not differing(moved, digests)

    few = Pieces([241, 1025, 3000], CPU)
    digests = DeviceDigests(few.sizes_bytes, CPU, tuning=Tuning(blocks=2, ahead=2))
    before = few.digested(digests)
    for piece in range(3):
        for at in (0, 240, few.sizes_bytes[piece] - 1):
            few.memory[few.offsets[piece] + at] ^= 1 << 5
            after = few.digested(digests)
            assert [one != other for one, other in zip(before, after, strict=True)] == [
                number == piece for number in range(3)
            ]
            few.memory[few.offsets[piece] + at] ^= 1 << 5
    assert few.digested(digests) == before


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(available(), reason="the GPU runs the kernel itself")
def test_the_interpreter_finds_the_digests_of_the_c_library():
    ended = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_lengths_that_xxh3_digests_in_another_way_are_refused():
    for size_bytes in (0, 240, CHUNK_BYTES + 1):
        with pytest.raises(ValueError, match="241 to 16,777,216 bytes"):
            DeviceDigests([1024, size_bytes], CPU)


def test_too_little_scratch_memory_is_refused():
    with pytest.raises(ValueError, match="too small"):
        DeviceDigests([CHUNK_BYTES], CPU, scratch_bytes=1 << 20)


@needs_gpu
def test_the_gpu_finds_the_digests_of_the_c_library():
    around = [size_bytes + by for size_bytes in (1 << 20, 5 << 20) for by in (-1, 0, 1, 63, 64, 65)]
    pieces = Pieces([*EDGES, *around, CHUNK_BYTES - 1, CHUNK_BYTES], "cuda")
    assert not differing(pieces, DeviceDigests(pieces.sizes_bytes, torch.device("cuda")))
    assert not differing(
        pieces, DeviceDigests(pieces.sizes_bytes, torch.device("cuda"), scratch_bytes=2 << 20)
    )


@needs_gpu
def test_the_gpu_digests_thousands_of_pieces_of_any_length():
    seeded = random.Random(3)
    pieces = Pieces([seeded.randrange(241, 200_000) for _ in range(2_000)], "cuda")
    digests = DeviceDigests(pieces.sizes_bytes, torch.device("cuda"), scratch_bytes=4 << 20)
    assert not differing(pieces, digests)
    moved = Pieces(pieces.sizes_bytes, "cuda", seed=4)
    assert not differing(moved, digests)


@needs_gpu
def test_the_gpu_finds_each_flipped_bit():
    seeded = random.Random(5)
    pieces = Pieces([300, 5_000, 100_001, 3 << 20], "cuda")
    digests = DeviceDigests(pieces.sizes_bytes, torch.device("cuda"))
    before = pieces.digested(digests)
    for _ in range(100):
        piece = seeded.randrange(4)
        at = pieces.offsets[piece] + seeded.randrange(pieces.sizes_bytes[piece])
        bit = 1 << seeded.randrange(8)
        pieces.memory[at] ^= bit
        after = pieces.digested(digests)
        pieces.memory[at] ^= bit
        assert [number for number in range(4) if before[number] != after[number]] == [piece]
    assert pieces.digested(digests) == before


@needs_gpu
def test_calls_in_two_streams_do_not_disturb_each_other():
    pieces = [Pieces([3 << 20] * 20, "cuda", seed=seed) for seed in range(6)]
    digests = DeviceDigests(pieces[0].sizes_bytes, torch.device("cuda"), scratch_bytes=2 << 20)
    out = [torch.zeros(20, dtype=torch.int64, device="cuda") for _ in pieces]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for number, one in enumerate(pieces):
        with torch.cuda.stream(streams[number % 2]):
            digests.enqueue(one.addresses, out[number])
    torch.cuda.synchronize()
    for one, found in zip(pieces, out, strict=True):
        assert [digest % (1 << 64) for digest in found.tolist()] == one.expected()


@needs_gpu
def test_addresses_and_results_that_do_not_fit_are_refused():
    pieces = Pieces([1024, 2048], "cuda")
    digests = DeviceDigests(pieces.sizes_bytes, torch.device("cuda"))
    out = torch.zeros(2, dtype=torch.int64, device="cuda")
    first, second = pieces.addresses
    for addresses in ([first], [first, second + 4]):
        with pytest.raises(ValueError, match="an address divisible by 8 for each"):
            digests.enqueue(addresses, out)
    for wrong in (
        out[:1],
        out.int(),
        out.cpu(),
        torch.zeros(4, dtype=torch.int64, device="cuda")[::2],
    ):
        with pytest.raises(ValueError, match="as many int64"):
            digests.enqueue(pieces.addresses, wrong)


if __name__ == "__main__":
    interpreted()
