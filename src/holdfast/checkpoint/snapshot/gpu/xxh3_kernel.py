"""Digest GPU memory on the GPU, with the XXH3-64 that the writing process also computes.

A piece is a byte range that is digested separately. XXH3 (https://github.com/Cyan4973/xxHash,
doc/xxhash_spec.md) splits a piece into blocks of 1,024 bytes. In each block, it sums values of the
64-byte stripes, and it scrambles the running sums before the next block. The order within a block
does not matter, so the sums of all blocks of all pieces are computed in parallel, at the speed of
memory. Scrambling must follow the order of a piece's blocks, which forms a chain. A chain reads
only the block sums, a sixteenth of the bytes, and the chains of all pieces run in parallel.

One kernel computes both. The pieces are divided into groups whose block sums fit the scratch
memory. Each launch sums the blocks of one group and runs the chains of the previous group. Chains
wait for memory most of the time, so they would leave the GPU idle if they ran without other work.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy
import torch

from holdfast.checkpoint.format.rank_layout import CHUNK_BYTES

try:
    jit: Callable[..., Callable[[Callable[..., Any]], Any]] = import_module("triton").jit
    tl: Any = import_module("triton.language")
except ImportError:  # the kernel below is then never launched

    def jit(**_: Any) -> Callable[[Callable[..., Any]], Any]:
        """Return a decorator that does nothing, used in place of Triton's if Triton is missing."""
        return lambda function: function

    tl = None

if TYPE_CHECKING:
    tensor = Any
    constexpr = Any
else:  # Triton reads annotations, and recognizes a constant by the name of its type
    tensor, constexpr = getattr(tl, "tensor", None), getattr(tl, "constexpr", None)

MIN_BYTES: Final = 241
"""The smallest piece in bytes, because XXH3 hashes shorter input by other algorithms."""
_BLOCK_BYTES: Final = 1024
_SUMS_BYTES: Final = 64
"""The size in bytes of one block's sums, which are eight sums of 8 bytes."""
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The default secret of the XXH3 specification."""
_PRIMES_32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIMES_64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_INITIAL: Final = (_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0])
_CONSTANTS: Final = (
    _SECRET
    + _SECRET[121:185]
    + _SECRET[11:75]
    + b"".join(word.to_bytes(8, "little") for word in _INITIAL)
)
"""The constants of the kernel, as 48 words of 8 bytes.

| first word | content |
|---|---|
| 0 | the secret; stripe N uses the words from N on, scrambling uses those from 16 on |
| 24 | the part of the secret for the last stripe |
| 32 | the part of the secret for merging the sums |
| 40 | the initial sums |
"""


class Tuning(NamedTuple):
    """Set how the kernel divides its work into programs (Triton's unit of parallel work).

    Attributes:
        blocks: the number of blocks that one program sums.
        warps: the number of warps of a program.
        ahead: the number of block sums that a chain reads in advance.
    """

    blocks: int = 8
    warps: int = 1
    ahead: int = 48

    @property
    def pieces(self) -> int:
        """Return the number of pieces whose chains one program computes, each in eight lanes."""
        return 4 * self.warps


_BEST: Final = Tuning()


class _Group(NamedTuple):
    """Number the pieces whose block sums are in scratch memory together, and their tiles.

    A tile is the group of blocks that one program sums.
    """

    first_piece: int
    end_piece: int
    first_tile: int
    end_tile: int


_NO_GROUP: Final = _Group(0, 0, 0, 0)


def available() -> bool:
    """Return True if this process has a GPU, and a Triton that can compile the kernel."""
    can_compile = hasattr(tl, "tuple")  # added in Triton 3.3
    return can_compile and torch.version.cuda is not None and torch.cuda.is_available()


class DeviceDigests:
    """Digest byte ranges (pieces) of one GPU's memory by kernels in the current stream.

    Keep the object alive until the kernels of its last call have ended, because they use its tables
    and its scratch memory.
    """

    def __init__(
        self,
        pieces_bytes: Sequence[int],
        device: torch.device,
        scratch_bytes: int = 256 << 20,
        tuning: Tuning = _BEST,
    ) -> None:
        """Make the tables and compile the kernel, which takes seconds unless Triton has cached it.

        Args:
            pieces_bytes: the length of each piece, 241 bytes to 16 MiB.
            device: the device of the pieces; the CPU with Triton's interpreter.
            scratch_bytes: the limit on scratch memory on the device; a sixteenth of the pieces'
                bytes is enough.
            tuning: how the kernel divides its work.

        Raises:
            ValueError: a length is out of range, or half of `scratch_bytes` is too small for one
                piece's sums.
        """
        for size_bytes in pieces_bytes:
            if not MIN_BYTES <= size_bytes <= CHUNK_BYTES:
                raise ValueError(
                    f"A piece has {MIN_BYTES} to {CHUNK_BYTES:,} bytes, not {size_bytes:,}."
                )
        self._tuning = tuning
        # The last block is never scrambled.
        counts = [(size_bytes - 1) // _BLOCK_BYTES for size_bytes in pieces_bytes]
        tiles = [-(-count // tuning.blocks) for count in counts]
        # One group's sums are read while those of the next group are written.
        half = scratch_bytes // 2 // _SUMS_BYTES
        if max(counts, default=0) > half:
            raise ValueError(
                f"Scratch memory of {scratch_bytes:,} bytes is too small for these pieces: give 2 MiB."
            )
        self._groups, rows = _grouped(counts, tiles, half)
        ends = [row + count for row, count in zip(rows, counts, strict=True)]
        tile_pieces = torch.arange(len(tiles), dtype=torch.int32, device=device).repeat_interleave(
            torch.tensor(tiles, dtype=torch.int64, device=device)
        )
        self._tables = (
            torch.tensor(pieces_bytes, dtype=torch.int64, device=device),
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor([0, *tiles], device=device).cumsum(0)[:-1],
            tile_pieces,
            torch.empty(max(ends, default=0) * 8, dtype=torch.uint64, device=device),
            torch.frombuffer(bytearray(_CONSTANTS), dtype=torch.uint64).to(device),
        )
        self._given = torch.zeros(len(pieces_bytes), dtype=torch.int64, device="cpu")
        self._addresses = torch.zeros_like(self._given, device=device)
        self._device = self._addresses.device
        self._upload()  # allocates the pinned memory
        self._launch(
            1, _NO_GROUP, _NO_GROUP, torch.empty(1, dtype=torch.int64, device=self._device)
        )
        self._idle = (
            None
            if self._device.type == "cpu"
            else torch.cuda.current_stream(self._device).record_event()
        )

    def enqueue(self, addresses: Sequence[int], out: torch.Tensor) -> None:
        """Digest the pieces in the current stream; the host does not wait.

        Args:
            addresses: the device address of each piece's first byte, divisible by 8. The memory
                must not change until the stream has executed the kernels.
            out: a contiguous int64 tensor on the device, which receives the XXH3-64 of each piece.

        Raises:
            ValueError: an address or `out` does not meet these conditions.
        """
        # torch.tensor takes ten times as long.
        given = torch.from_numpy(numpy.array(addresses, dtype=numpy.int64))
        if given.shape != self._given.shape or bool((given & 7).any()):
            raise ValueError(
                f"Digests of {len(self._given):,} pieces need an address divisible by 8 for each."
            )
        if (out.dtype, out.shape, out.device) != (torch.int64, given.shape, self._device) or (
            not out.is_contiguous()
        ):
            raise ValueError(
                f"Digests of {len(given):,} pieces need as many int64 on {self._device}, in a row."
            )
        if self._idle is not None:  # the previous call may have used another stream
            self._idle.wait(torch.cuda.current_stream(self._device))
        if not torch.equal(given, self._given):
            self._given = given
            self._upload()
        before = _NO_GROUP
        for group in (*self._groups, _NO_GROUP):
            chains = -(-(before.end_piece - before.first_piece) // self._tuning.pieces)
            self._launch(chains, before, group, out)
            before = group
        if self._idle is not None:
            self._idle.record(torch.cuda.current_stream(self._device))

    def _upload(self) -> None:
        """Copy the addresses of the pieces to the device.

        A new pinned tensor is safe here, because PyTorch reuses its memory only after the copy has
        ended.
        """
        pinned = torch.empty_like(self._given, pin_memory=self._device.type != "cpu")
        self._addresses.copy_(pinned.copy_(self._given), non_blocking=True)

    def _launch(self, chains: int, before: _Group, group: _Group, out: torch.Tensor) -> None:
        """Launch one kernel that runs the chains of the group `before` and sums `group`.

        The first `chains` programs run the chains. Each further program sums one tile of `group`.
        """
        programs = chains + group.end_tile - group.first_tile
        if not programs:
            return
        # Without a GPU, this context does nothing.
        with torch.cuda.device(self._addresses.get_device()):
            _digest[(programs,)](
                self._addresses,
                *self._tables,
                out,
                chains,
                before.first_piece,
                before.end_piece,
                group.first_tile,
                blocks=self._tuning.blocks,
                pieces=self._tuning.pieces,
                ahead=self._tuning.ahead,
                num_warps=self._tuning.warps,
            )


def _grouped(
    counts: Sequence[int], tiles: Sequence[int], half: int
) -> tuple[list[_Group], list[int]]:
    """Divide the pieces into groups; return these and the place of each piece's sums.

    The place is an index in the scratch memory. Consecutive groups use different halves of that
    memory, since one group's sums are read while the next group's are written.
    """
    groups: list[_Group] = []
    rows: list[int] = []
    first_piece = first_tile = end_tile = used = 0
    for piece, (count, own) in enumerate(zip(counts, tiles, strict=True)):
        if used + count > half:
            groups.append(_Group(first_piece, piece, first_tile, end_tile))
            first_piece, first_tile, used = piece, end_tile, 0
        rows.append(len(groups) % 2 * half + used)
        used += count
        end_tile += own
    if counts:
        groups.append(_Group(first_piece, len(counts), first_tile, end_tile))
    return groups, rows


# Triton would otherwise compile the kernel again for special values of these arguments, such as 1.
@jit(do_not_specialize=("out", "chains", "first_piece", "end_piece", "first_tile"))
def _digest(
    addresses: tensor,
    sizes: tensor,
    rows: tensor,
    first_tiles: tensor,
    tile_pieces: tensor,
    scratch: tensor,
    constants: tensor,
    out: tensor,
    chains: tensor,
    first_piece: tensor,
    end_piece: tensor,
    first_tile: tensor,
    blocks: constexpr,
    pieces: constexpr,
    ahead: constexpr,
) -> None:
    """Run one program, which computes either the chains of some pieces or the sums of a tile."""
    program = tl.program_id(0)
    if program < chains:
        piece = first_piece + program * pieces + tl.arange(0, pieces)
        _follow(
            addresses, sizes, rows, scratch, constants, out, piece, piece < end_piece, pieces, ahead
        )
    else:
        tile = first_tile + program - chains
        _sum_up(addresses, sizes, rows, first_tiles, tile_pieces, scratch, constants, tile, blocks)


@jit()
def _sum_up(
    addresses: tensor,
    sizes: tensor,
    rows: tensor,
    first_tiles: tensor,
    tile_pieces: tensor,
    scratch: tensor,
    constants: tensor,
    tile: tensor,
    blocks: constexpr,
) -> None:
    """Compute and store the eight sums of each block in one tile."""
    piece = tl.load(tile_pieces + tile)
    block = (tile - tl.load(first_tiles + piece).to(tl.int32)) * blocks + tl.arange(0, blocks)
    there = block < (tl.load(sizes + piece).to(tl.int32) - 1) // 1024
    data = tl.load(addresses + piece).to(tl.pointer_type(tl.uint64))
    sums = scratch + tl.load(rows + piece) * 8
    word = tl.arange(0, 128)[None, :]  # indices in a block; a warp reads 256 contiguous bytes
    words = tl.load(
        data + block[:, None] * 128 + word,
        mask=there[:, None],
        other=0,
        eviction_policy="evict_first",
    )
    products = _products(words, tl.load(constants + word // 8 + word % 8))
    added = tl.sum(tl.reshape(products, (blocks, 16, 8)), axis=1)
    added += _swapped(tl.sum(tl.reshape(words, (blocks, 16, 8)), axis=1), blocks)
    tl.store(sums + block[:, None] * 8 + tl.arange(0, 8)[None, :], added, mask=there[:, None])


@jit()
def _follow(
    addresses: tensor,
    sizes: tensor,
    rows: tensor,
    scratch: tensor,
    constants: tensor,
    out: tensor,
    piece: tensor,
    there: tensor,
    pieces: constexpr,
    ahead: constexpr,
) -> None:
    """Compute the digests of some pieces from their block sums.

    Follow each piece's chain through its block sums, add its last block, and merge the eight sums.
    """
    size = tl.load(sizes + piece, mask=there, other=1)
    count = ((size - 1) // 1024).to(tl.int32)
    data = tl.load(addresses + piece, mask=there, other=0)
    row = tl.load(rows + piece, mask=there, other=0)
    lane = tl.arange(0, 8)[None, :]
    sums = scratch + row[:, None] * 8 + lane
    acc = tl.load(constants + 40 + lane) + tl.zeros((pieces, 8), dtype=tl.uint64)

    scramble = tl.load(constants + 16 + lane)
    queue: tensor = ()
    for turn in tl.static_range(ahead):
        queue += (tl.load(sums + turn * 8, mask=(turn < count)[:, None], other=0),)
    longest = tl.max(count, axis=0)
    begin = 0
    while begin < longest:  # `range` fails for a tensor in Triton's interpreter with NumPy 2.4
        refilled: tensor = ()
        for turn in tl.static_range(ahead):
            scrambled = acc + queue[turn]
            scrambled = (scrambled ^ (scrambled >> 47) ^ scramble) * 0x9E3779B1
            acc = tl.where((begin + turn < count)[:, None], scrambled, acc)
            later = begin + turn + ahead
            refilled += (tl.load(sums + later * 8, mask=(later < count)[:, None], other=0),)
        queue = refilled
        begin += ahead

    rest = (data + count.to(tl.int64) * 1024).to(tl.pointer_type(tl.uint64))[:, None] + lane
    stripes = ((size - 1) % 1024 // 64).to(tl.int32)
    plain = tl.zeros((pieces, 8), dtype=tl.uint64)
    most = tl.max(stripes, axis=0)
    stripe = 0
    while stripe < most:
        words = tl.load(rest + stripe * 8, mask=(there & (stripe < stripes))[:, None], other=0)
        mixed = _products(words, tl.load(constants + stripe + lane))
        acc += tl.where((stripe < stripes)[:, None], mixed, tl.zeros_like(mixed))
        plain += words
        stripe += 1
    # The last stripe may begin at any byte, so it is read byte by byte.
    byte = tl.arange(0, 8)[None, None, :]
    last = (
        (data + size - 64).to(tl.pointer_type(tl.uint8))[:, None, None]
        + lane[:, :, None] * 8
        + byte
    )
    words = tl.load(last, mask=there[:, None, None], other=0).to(tl.uint64) << (byte * 8).to(
        tl.uint64
    )
    words = tl.sum(words, axis=2)
    acc += _products(words, tl.load(constants + 24 + lane)) + _swapped(plain + words, pieces)

    even, odd = tl.split(tl.reshape(acc ^ tl.load(constants + 32 + lane), (pieces, 4, 2)))
    merged = (
        tl.sum((even * odd) ^ tl.umulhi(even, odd), axis=1)
        + size.to(tl.uint64) * 0x9E3779B185EBCA87
    )
    merged = (merged ^ (merged >> 37)) * 0x165667919E3779F9
    tl.store(out + piece, (merged ^ (merged >> 32)).to(tl.int64), mask=there)


@jit()
def _products(words: tensor, secret: tensor) -> tensor:
    """Mix each word with the secret, and return the product of the two halves of the result.

    XXH3 adds this product to the word's own sum.
    """
    mixed = words ^ secret
    return (mixed & 0xFFFFFFFF) * (mixed >> 32)


@jit()
def _swapped(words: tensor, count: constexpr) -> tensor:
    """Exchange the words of each pair of neighbouring lanes.

    XXH3 adds each word, without mixing, to its neighbour's sum.
    """
    pairs = tl.reshape(words, (count, 4, 2))
    # A pair's sum less each word is the other word.
    return tl.reshape(tl.sum(pairs, axis=2, keep_dims=True) - pairs, (count, 8))
