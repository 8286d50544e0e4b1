"""Plan which rank writes each tensor, and at which offset of which file.

PyTorch's DCP plans the checkpoint, and this module assigns bytes to that plan. One plan serves all
saves until the shape of the state changes on some rank. Making a plan is collective. Checking that
a plan still fits is not collective.
"""

import functools
import io
import itertools
import logging
import math
import operator
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.format.checksums import DIGEST_BYTES
from holdfast.checkpoint.format.dcp_metadata import check_metadata_against_files
from holdfast.checkpoint.format.file_image import (
    LARGE_BYTES,
    FileImage,
    Need,
    Template,
    lay_out,
    slot_bytes,
    template,
)
from holdfast.checkpoint.format.plain_values import load_plain, serialized
from holdfast.checkpoint.format.rank_layout import Layout, pieces_of
from holdfast.checkpoint.state.capture import Contents, Outline, structures
from holdfast.checkpoint.state.tensors import is_in_a_row, local
from holdfast.checkpoint.state.tree import KIND, PLAIN_TENSORS, irregular, merge_skeletons
from holdfast.core.errors import BadUse

_logger = logging.getLogger("holdfast")
_Stored = tuple[MetadataIndex, str, int, int]
"""The place of one saved item, as in DCP's metadata: index, file name, offset, length in bytes."""


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """Select the saved items `first` to `end` (exclusive) of a plan, which are tensors on one GPU.

    Items from `direct` on are copied one by one. The items before `direct` are small, or not
    contiguous in memory, so they are packed together and copied at once.
    """

    device: torch.device
    first: int
    direct: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Describe one rank's part of a checkpoint: its items and their places in the files.

    The image is the content of the rank's files, held in one buffer. A blob is the part of the
    image that holds one saved item. A piece is a byte range with its own digest.

    Attributes:
        image: the layout of the image.
        layout: the layout as the writing process receives it.
        items: the index of each saved item, in the order of the blobs; items on GPUs come first.
        pieces: for each piece, the number of its blob.
        constant: the digests of pieces whose bytes are the same in each save, by the number of the
            piece.
        on_devices: the blobs on each GPU.
        structure: the nesting of all ranks' state without its tensors (skeletons), by flat name; on
            rank 0 only.
        outline: the outline of this rank's containers.
        shapes: the type, shape and other attributes of this rank's leaves on which the plan
            depends, in order.
        fixed: the serialized skeletons, by flat name.
        replicated: the items that other ranks have as well.
        owned: the names of the tensors that an optimizer owns.
    """

    image: FileImage
    layout: Layout
    items: tuple[MetadataIndex, ...]
    pieces: tuple[int, ...]
    constant: dict[int, bytes]
    on_devices: tuple[OnDevice, ...]
    structure: dict[str, Any] | None
    outline: Outline
    shapes: list[Any]
    fixed: dict[str, bytes]
    replicated: tuple[MetadataIndex, ...]
    owned: frozenset[str]

    def fits(self, contents: Contents) -> bool:
        """Return True if this rank's state still has the shape for which the plan was made."""
        # No objects are kept, since thousands of them would start Python's garbage collector.
        return self.outline == contents.outline and all(
            map(operator.eq, _shapes(contents.leaves(self.structure)), self.shapes)
        )

    @functools.cached_property
    def names(self) -> list[str]:
        """Return for each blob the flat name of its tensor or value."""
        return [index.fqn for index in self.items]

    @functools.cached_property
    def written(self) -> frozenset[str]:
        """Return the flat names of the tensors and values that this rank writes."""
        return frozenset(self.names)

    @functools.cached_property
    def places(self) -> list[range]:
        """Return for each blob (saved item) the range of the numbers of its digested pieces."""
        ends = itertools.accumulate(len(list(group)) for _, group in itertools.groupby(self.pieces))
        return [range(*pair) for pair in itertools.pairwise((0, *ends))]

    @functools.cached_property
    def around(self) -> list[Template | None]:
        """Return, for each saved item, the template of the bytes before and after its data in a file.

        The entry is None for plain values and for tensors whose digest is computed in several
        pieces: only a tensor that is digested as one piece has a template.
        """
        return [
            template(blob.need.dtype, blob.need.shape)
            if blob.need.dtype is not None and len(places) == 1
            else None
            for blob, places in zip(self.image.blobs, self.places, strict=True)
        ]

    @functools.cached_property
    def slots(self) -> list[int]:
        """Return the numbers of the blobs (saved items) that hold plain values."""
        return [number for number, blob in enumerate(self.image.blobs) if blob.need.dtype is None]

    @functools.cached_property
    def singles(self) -> list[int]:
        """Return the numbers of items copied one by one: plain values and large tensors."""
        return [
            number
            for number, blob in enumerate(self.image.blobs)
            if blob.need.dtype is None or blob.is_large
        ]


def make_plan(
    ranks: Ranks,
    contents: Contents,
    *,
    shard_bytes: int,
    room_bytes: Callable[[torch.device], float] = lambda _: math.inf,
    owned: Callable[[], frozenset[str]] = frozenset,
    is_spread: bool = True,
) -> Plan:
    """Agree with all ranks on a plan for saves of this state. Collective.

    Args:
        ranks: the ranks that take part.
        contents: the state of this rank.
        shard_bytes: the largest size of a file in bytes; only a file with a single larger tensor
            exceeds it.
        room_bytes: returns the bytes of a GPU's memory that may hold packed copies of large tensors
            that are not contiguous. Further such tensors are copied through the host.
        owned: returns the names of the tensors that an optimizer owns.
        is_spread: whether the writing of replicated tensors that an optimizer owns is spread over
            their ranks. The lowest rank writes all other replicated entries, because their replicas
            may differ.

    Raises:
        BadUse: the ranks' states contradict each other, or a tensor cannot be saved.
        CheckpointError: PyTorch cannot plan the save.
    """
    merged_structures = _merged_structures(ranks, contents)
    structure = merged_structures if ranks.rank == 0 else None
    planner = DefaultSavePlanner()
    merged: Metadata | None = None

    own_names: frozenset[str] = frozenset()
    own_items: list[WriteItem] = []
    replicated_names: tuple[str, ...] = ()

    def plan_all(plans: list[tuple[SavePlan, frozenset[str]]]) -> list[tuple[SavePlan, bytes]]:
        nonlocal merged, replicated_names
        planned, merged = planner.create_global_plan(_from_lowest(plans))
        counts = Counter(item.index for plan, _ in plans for item in plan.items)
        replicated_names = tuple(
            sorted({index.fqn for index, count in counts.items() if count > 1})
        )
        # The items themselves are too large to send to all ranks, so each rank receives one byte
        # for each of its items.
        return [
            (mine, bytes(counts[item.index] > 1 for item in plan.items))
            for mine, (plan, _) in zip(planned, plans, strict=True)
        ]

    def own_plan() -> tuple[SavePlan, frozenset[str]]:
        nonlocal own_names, own_items
        _check_regular(contents.leaves(None))
        planner.set_up_planner(contents.for_dcp(structure), is_coordinator=ranks.rank == 0)
        own_names = owned()
        plan = planner.create_local_plan()
        own_items = plan.items
        return plan, own_names if is_spread else frozenset()

    received, replicated = ranks.exchange(own_plan, plan_all)
    image: FileImage | None = None
    items: list[WriteItem] = []
    stored: list[_Stored] = []
    leaves: dict[str, Any] = {}
    places: dict[MetadataIndex, tuple[str, bool]] = {}

    def lay_out_own() -> tuple[list[_Stored], dict[str, int]]:
        nonlocal image, items, stored, leaves, places
        leaves = contents.leaves(structure)
        planned = planner.finish_plan(received).items
        places = _places(planned, leaves, room_bytes)
        items = sorted(planned, key=lambda item: places[item.index])
        needs = [_need(item, leaves[item.index.fqn]) for item in items]
        image = lay_out(needs, prefix=f"__{ranks.rank}_", shard_bytes=shard_bytes)
        stored = [
            (item.index, blob.file, blob.file_offset, blob.length)
            for item, blob in zip(items, image.blobs, strict=True)
        ]
        return stored, {shard.name: shard.size_bytes for shard in image.shards}

    def describe_all(described: list[tuple[list[_Stored], dict[str, int]]]) -> list[bytes]:
        assert merged is not None, "rank 0 has planned"
        return [_metadata(merged, described)] + [b""] * (len(described) - 1)

    metadata = ranks.exchange(lay_out_own, describe_all)
    assert image is not None, "this rank has laid out its part"
    parts = [(number, part) for number, blob in enumerate(image.blobs) for part in blob.parts]
    cut = pieces_of([part for _, part in parts], image.shards)
    pieces = tuple(parts[part][0] for _, part in cut)
    layout = Layout(
        rank=ranks.rank,
        world_size=ranks.world_size,
        torch=str(torch.__version__),
        shards=image.shards,
        pieces=tuple(piece for piece, _ in cut),
        metadata=metadata,
        replicated=replicated_names,
    )
    return Plan(
        image=image,
        layout=layout,
        items=tuple(item.index for item in items),
        pieces=pieces,
        constant=_constant(image, layout, pieces),
        on_devices=_on_devices([places[item.index] for item in items]),
        structure=structure,
        outline=contents.outline,
        shapes=list(_shapes(leaves)),
        fixed={
            name: serialized(leaves[name]) for name in (*contents.described, *(structure or {}))
        },
        replicated=tuple(item.index for item in itertools.compress(own_items, replicated)),
        owned=own_names,
    )


def _from_lowest(own_plans: Sequence[tuple[SavePlan, frozenset[str]]]) -> list[SavePlan]:
    """Return all ranks' plans, where each item that is not spread stays on its lowest rank only."""
    kinds: dict[str, tuple[WriteItemType, int]] = {}
    lowest: set[str] = set()
    for rank, (plan, spread) in enumerate(own_plans):
        for item in plan.items:
            kind, first = kinds.setdefault(item.index.fqn, (item.type, rank))
            if kind != item.type:
                raise BadUse(
                    f"Ranks {first} and {rank} disagree about {item.index.fqn!r}: on one it is a {kind.name}, on the "
                    f"other a {item.type.name}. Give it one type on all ranks, or put it under per_rank."
                )
        lowest.update(item.index.fqn for item in plan.items if item.index.fqn not in spread)
    taken: set[MetadataIndex] = set()
    plans = []
    for plan, _ in own_plans:
        items = [
            item for item in plan.items if item.index.fqn not in lowest or item.index not in taken
        ]
        taken.update(item.index for item in items if item.index.fqn in lowest)
        plans.append(replace(plan, items=items))
    return plans


_GPU: Final = "cuda"
"""PyTorch's name of the device type, also of AMD's GPUs."""
_ON_HOST: Final = ("~", False)
"""The place of items in host memory; it sorts after the names of all devices."""


def _place(item: WriteItem, leaf: Any) -> tuple[str, bool]:
    """Return the key by which an item is placed: its device, and whether it is copied singly."""
    if type(leaf) not in (*PLAIN_TENSORS, DTensor):
        return _ON_HOST
    part = local(leaf)
    if part.device.type != _GPU or type(part) not in PLAIN_TENSORS:
        return _ON_HOST
    if item.tensor_data is None or item.tensor_data.chunk.sizes != part.shape:
        return _ON_HOST
    return str(part.device), part.nbytes >= LARGE_BYTES and is_in_a_row(part)


def _places(
    items: Sequence[WriteItem],
    leaves: Mapping[str, Any],
    room_bytes: Callable[[torch.device], float],
) -> dict[MetadataIndex, tuple[str, bool]]:
    """Return for each item its device, and whether it is copied singly.

    Large tensors that are not contiguous are packed together on their GPU, up to the bytes that
    `room_bytes` returns. Further ones are placed among the items in host memory.
    """
    places = {item.index: _place(item, leaves[item.index.fqn]) for item in items}
    to_pack: dict[str, list[tuple[int, MetadataIndex]]] = {}
    for index, (device, is_direct) in places.items():
        if (
            device != _ON_HOST[0]
            and not is_direct
            and (size := local(leaves[index.fqn]).nbytes) >= LARGE_BYTES
        ):
            to_pack.setdefault(device, []).append((size, index))
    for device, found in to_pack.items():
        left_bytes = room_bytes(torch.device(device))
        for size_bytes, index in sorted(found, key=operator.itemgetter(0)):
            left_bytes -= size_bytes
            if left_bytes < 0:
                places[index] = _ON_HOST
        if left_bytes < 0:
            _logger.warning(
                "%s has no room for large tensors that are not in a row in memory: saving them holds up training. "
                "Make them contiguous.",
                device,
            )
    return places


def _on_devices(places: list[tuple[str, bool]]) -> tuple[OnDevice, ...]:
    found, first = [], 0
    for name, group in itertools.groupby(device for device, _ in places):
        end = first + len(list(group))
        if name != _ON_HOST[0]:
            direct = first + places[first:end].count((name, False))
            found.append(OnDevice(device=torch.device(name), first=first, direct=direct, end=end))
        first = end
    return tuple(found)


def _constant(image: FileImage, layout: Layout, pieces: tuple[int, ...]) -> dict[int, bytes]:
    """Digest the bytes around large tensors, which are the same in each save.

    Returns:
        The digests, by the number of the piece.
    """
    found = {}
    for number, (piece, index) in enumerate(zip(layout.pieces, pieces, strict=True)):
        blob = image.blobs[index]
        if (
            not blob.is_large
            or blob.data_offset <= piece.offset < blob.data_offset + blob.data_bytes
        ):
            continue
        made = template(blob.need.dtype, blob.need.shape)
        at = piece.offset - blob.offset
        around, at = (
            (made.head, at)
            if piece.offset < blob.data_offset
            else (made.tail, at - len(made.head) - made.data_bytes)
        )
        found[number] = xxhash.xxh3_64_intdigest(around[at : at + piece.length]).to_bytes(
            DIGEST_BYTES, "little"
        )
    return found


def _shapes(leaves: Mapping[str, Any]) -> Iterator[Any]:
    """Return the attributes of each leaf on which a plan depends, such as type and shape."""
    for leaf in leaves.values():
        if isinstance(leaf, DTensor):
            yield leaf.shape, KIND(leaf._local_tensor), leaf.placements, leaf.device_mesh
        elif isinstance(leaf, torch.Tensor):
            yield KIND(leaf)
        else:
            yield None


_DENSE: Final = "Save the dense tensors that it is made of"


def _check_regular(leaves: Mapping[str, Any]) -> None:
    for name, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            continue
        if isinstance(leaf, ShardedTensor) or hasattr(local(leaf), "__create_write_items__"):
            raise BadUse(
                f"Cannot save {name!r}: a {type(local(leaf)).__name__} has parts of its own. Use DTensors."
            )
        kind = irregular(leaf) or irregular(local(leaf))
        if kind is not None:
            then = {
                "meta": "Give it memory first",
                "uninitialized": "Run the model once first",
                "partial": "Save its full_tensor()",
            }
            article = "an" if kind[0] in "aeiou" else "a"
            raise BadUse(
                f"Cannot save {name!r}: it is {article} {kind} tensor. {then.get(kind, _DENSE)}."
            )
        if not _is_stored(leaf.dtype):
            raise BadUse(
                f"Cannot save {name!r}: PyTorch stores no tensor of {leaf.dtype}. Save it as another type, such as its "
                "bytes, by view(torch.uint8)."
            )


@functools.cache
def _is_stored(dtype: torch.dtype) -> bool:
    """Return True if DCP can store the type; it cannot store types of less than a byte."""
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return True
    try:
        torch.iinfo(dtype)
    except TypeError:
        return False
    return True


def _need(item: WriteItem, leaf: Any) -> Need:
    if isinstance(leaf, torch.Tensor):
        assert item.tensor_data is not None, "DCP plans a tensor as a tensor"
        shape = tuple(item.tensor_data.chunk.sizes)
        # DCP computes a shard's shape from its placement, without looking at the local tensor.
        if isinstance(leaf, DTensor) and tuple(leaf._local_tensor.shape) != shape:
            raise BadUse(
                f"{item.index.fqn!r} is not sharded as its placement {leaf.placements} states: this rank has "
                f"{tuple(leaf._local_tensor.shape)} of {tuple(leaf.shape)}, not {shape}. Use distribute_tensor for it."
            )
        return Need(dtype=item.tensor_data.properties.dtype, shape=shape)
    written = serialized(leaf)
    # Whether `weights_only` can load a value depends on the version of PyTorch, so this is checked
    # now and not only at the restore.
    load_plain(item.index.fqn, io.BytesIO(written))
    return Need(dtype=None, slot_bytes=slot_bytes(len(written)))


def _merged_structures(ranks: Ranks, contents: Contents) -> dict[str, Any]:
    digests = ranks.together(
        lambda: xxhash.xxh3_128_hexdigest(repr((contents.skeleton, contents.names)).encode())
    )
    if len(set(digests)) == 1:
        return structures(contents.skeleton, contents.names)
    # The structures are large, so they are exchanged only if they differ.
    skeletons, names = zip(
        *ranks.together(lambda: (contents.skeleton, contents.names)), strict=True
    )
    return structures(
        merge_skeletons(skeletons), {name: each[name] for each in reversed(names) for name in each}
    )


def _metadata(merged: Metadata, described: list[tuple[list[_Stored], dict[str, int]]]) -> bytes:
    """Return the content of the file `.metadata`, as PyTorch's own writer would write it."""
    merged.storage_data = {
        index: filesystem._StorageInfo(file, offset, length)
        for stored, _ in described
        for index, file, offset, length in stored
    }
    merged.storage_meta = StorageMeta()
    merged.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    check_metadata_against_files(
        merged, {name: size for _, sizes in described for name, size in sizes.items()}
    )
    return pickle.dumps(merged)
