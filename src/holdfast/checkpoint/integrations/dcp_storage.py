"""Let `torch.distributed.checkpoint` (DCP) write and read Holdfast's verified checkpoints.

    dcp.save(state, checkpoint_id=step_path(DIR, 100), storage_writer=HoldfastWriter())
    dcp.load(state, checkpoint_id=step_path(DIR, 100), storage_reader=HoldfastReader())

PyTorch plans the save, and this module writes the files. The checkpoint is durable, has checksums
and a manifest, and appears under its name only when it is complete.
"""

import mmap
import os
import pickle
import time
import weakref
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holdfast.checkpoint.catalog import staging_dir
from holdfast.checkpoint.catalog.retention import Retention
from holdfast.checkpoint.catalog.staging_dir import Staging, remove_leftovers
from holdfast.checkpoint.config import checkpoint_folder
from holdfast.checkpoint.format import paths
from holdfast.checkpoint.format.file_image import ALIGNMENT, Blob, Need, lay_out, template
from holdfast.checkpoint.format.manifest import ManifestError, read_manifest
from holdfast.checkpoint.format.paths import parse_name
from holdfast.checkpoint.format.plain_values import load_plain
from holdfast.checkpoint.format.rank_layout import PAGE_BYTES, Layout, Shard
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.restore.open import OpenCheckpoint, open_checkpoint
from holdfast.checkpoint.restore.tensor_reads import read_items
from holdfast.checkpoint.writer.commit import RankFailed, commit, leave_note
from holdfast.checkpoint.writer.persist import RankWrite, write_shard
from holdfast.core.arguments import check_whole, local_path
from holdfast.core.errors import BadUse, CheckpointError, DamagedCheckpoint, NotFound
from holdfast.core.rate_limit import RateLimit

__all__ = ["HoldfastReader", "HoldfastWriter", "step_path"]
_SAVE: Final = "dcp"
"""The id of every save; it must not vary, since PyTorch may reuse a plan with its file names."""
_SHARD_BYTES: Final = 1 << 30
"""The largest size of a file, unless one tensor is larger. A save needs this much extra memory."""


def step_path(dir: str | os.PathLike[str], step: int) -> Path:  # noqa: A002 - as of Checkpointer
    """Return the path of the checkpoint of `step` in `dir`, to pass as `checkpoint_id`."""
    return paths.step_path(checkpoint_folder(dir), check_whole("step", step, least=0))


class HoldfastWriter(StorageWriter):
    """Write the saves of `dcp.save` and `dcp.async_save` as checkpoints of Holdfast.

    A failed save leaves every earlier checkpoint unchanged.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, max_write_mib_s: float | None = None
    ) -> None:
        """Create the writer for a path and a rate limit.

        Args:
            path: the path of the checkpoint, from `step_path(DIR, step)`; None to use the
                `checkpoint_id` of each save.
            max_write_mib_s: the limit on each rank's write rate in MiB/s; None for no limit.

        Raises:
            BadUse: the path does not name a step.
        """
        self._path = None if path is None else _checked(path)
        self._max_write_bytes_s = None if max_write_mib_s is None else max_write_mib_s * 2**20
        self._staging: Staging | None = None
        self._abandon: weakref.finalize[[], HoldfastWriter] | None = None
        self._memory: mmap.mmap | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the path of the next checkpoint, if one is given."""
        if checkpoint_id is not None:
            self._path = _checked(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:
        """On the coordinator rank, make the hidden folder into which all ranks write.

        Raises:
            BadUse: there is no path, another process saves this step, or `use_collectives` is
                False.
        """
        if not kwargs.get("use_collectives", True):
            raise BadUse(
                "A checkpoint that appears whole needs its ranks to coordinate. Leave "
                "use_collectives=True."
            )
        order = self._order()
        if not is_coordinator:
            return
        self._give_up()
        order.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(order.folder)
        if staging_dir.is_being_written(order.staging):
            raise BadUse(
                f"Step {order.step} is being saved into {order.folder} already. Wait for that "
                "save first."
            )
        if order.staging.exists():  # left by a dead process, on a file system without locks
            staging_dir.discard(order.staging)
        self._staging = Staging(order.folder, order.step, _SAVE)
        # PyTorch does not report another rank's failure to this object. So the folder of a failed
        # save is removed when this object is dropped, or by its next save.
        self._abandon = weakref.finalize(self, self._staging.abandon)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return each plan with the number of its rank."""
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files durably, and then a note that lists them.

        Raises:
            BadUse: a plain value could not be read back without running code from the file.
            OSError: a file cannot be written.
        """
        ended: Future[list[WriteResult]] = Future()
        try:
            ended.set_result(self._write(plan, planner))
        except BaseException:
            self._give_up()
            raise
        return ended

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, after all ranks have written; called on the coordinator rank.

        Raises:
            OSError: a file cannot be written.
        """
        assert self._staging is not None, "the coordinator has set up"
        metadata.storage_data = {
            result.index: result.storage_data for each in results for result in each
        }
        metadata.storage_meta = StorageMeta()
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        try:
            commit(
                self._order(),
                self._staging,
                world_size=len(results),
                torch=str(torch.__version__),
                metadata=pickle.dumps(metadata),
                wait=_never_waits,
            )
        except BaseException:
            self._give_up()
            raise
        assert self._abandon is not None, "it came with the folder"
        self._abandon.detach()
        self._staging = self._abandon = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if the path ends with the name of a step."""
        return _step(Path(checkpoint_id)) is not None

    def _order(self) -> SaveRequest:
        path = _required(self._path)
        step = _step(path)
        assert step is not None, "it was checked"
        return SaveRequest(
            folder=path.parent, step=step, save=_SAVE, created_at_s=time.time(), keep=Retention()
        )

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        rank: int = plan.storage_data
        order = self._order()
        planned = [(item, *_need(item, planner)) for item in plan.items]
        image = lay_out(
            [need for _, need, _ in planned], prefix=f"__{rank}_", shard_bytes=_SHARD_BYTES
        )
        contents: dict[str, list[tuple[Blob, WriteItem, bytes | None]]] = {
            shard.name: [] for shard in image.shards
        }
        for blob, (item, _, written) in zip(image.blobs, planned, strict=True):
            contents[blob.file].append((blob, item, written))
        memory = self._room(max((shard.size_bytes for shard in image.shards), default=0))
        part = RankWrite(
            order=order,
            layout=Layout(
                rank=rank, world_size=0, torch="", shards=image.shards, pieces=(), metadata=b""
            ),
            image=memory,
            live=None,
            await_copy=lambda _: None,
            wait=lambda: None,
            pace=RateLimit(self._max_write_bytes_s),
            progress=lambda _: None,
        )
        files = []
        for shard in image.shards:
            for blob, item, written in contents[shard.name]:
                _put(memory, blob, _tensor(item, planner) if written is None else written)
            entry, _ = write_shard(part, Shard(shard.name, 0, shard.size_bytes))
            files.append(entry)
        leave_note(order, rank, files)
        return [
            WriteResult(
                item.index,
                blob.length,
                filesystem._StorageInfo(blob.file, blob.file_offset, blob.length),
            )
            for item, blob in zip(plan.items, image.blobs, strict=True)
        ]

    def _room(self, size_bytes: int) -> memoryview:
        """Return page-aligned memory of at least `size_bytes` for one file.

        The same memory is used for all files, since the first write to a new page takes five times
        as long as a later one.
        """
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = mmap.mmap(-1, max(-(-size_bytes // PAGE_BYTES), 1) * PAGE_BYTES)
        return memoryview(self._memory)

    def _give_up(self) -> None:
        if self._abandon is not None:
            self._abandon()
        self._staging = self._abandon = None


class HoldfastReader(StorageReader):
    """Read and verify checkpoints of Holdfast for `dcp.load`; read only the needed bytes.

    PyTorch unpickles plain values without `weights_only`. So each value is first unpickled here
    with `weights_only`, which rejects values that could run code.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Create the reader for a path.

        Args:
            path: the path of the checkpoint; None to use the `checkpoint_id` of each load.

        Raises:
            BadUse: the path does not name a step.
        """
        self._path = None if path is None else _checked(path)
        self._checkpoint: OpenCheckpoint | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Close the last checkpoint, and set the path of the next one, if one is given."""
        self._checkpoint = None
        if checkpoint_id is not None:
            self._path = _checked(checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Read and verify the checkpoint's metadata, without running code from it.

        Raises:
            NotFound: there is no such folder.
            DamagedCheckpoint: the checkpoint does not match its manifest, or has none.
        """
        return self._opened().metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing, since `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan together with the digest of the manifest that this rank has read."""
        return replace(plan, storage_data=self._opened().manifest.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks read the same save, and return the plans unchanged.

        Raises:
            DamagedCheckpoint: ranks have read different saves of the step.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise _damaged(
                _required(self._path),
                ManifestError("its step was saved again meanwhile; load it again"),
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify the data that this rank needs.

        Raises:
            DamagedCheckpoint: a block is damaged. Some tensors may already be filled.
            CheckpointError: unpickling a plain value would run code.
        """
        opened = self._opened()
        try:
            read_items(
                plan.items, cast("LoadPlanner", _Vetting(planner)), opened.metadata, opened.files
            )
        except (ManifestError, OSError) as error:
            raise _damaged(opened.path, error) from error
        ended: Future[None] = Future()
        ended.set_result(None)
        return ended

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if the path ends with the name of a step."""
        return _step(Path(checkpoint_id)) is not None

    def _opened(self) -> OpenCheckpoint:
        if self._checkpoint is None:
            path = _required(self._path)
            step = _step(path)
            assert step is not None, "it was checked"
            if not path.is_dir():
                raise NotFound(
                    f"There is no checkpoint {path}. See `holdfast checkpoint ls {path.parent}`."
                )
            try:
                self._checkpoint = open_checkpoint(path, read_manifest(path, step=step))
            except (ManifestError, OSError) as error:
                raise _damaged(path, error) from error
        return self._checkpoint


class _Vetting:
    """Forward data to a planner, after checking that plain values can be unpickled safely."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        load_plain(read_item.dest_index.fqn, BytesIO(value.getbuffer()))
        self._planner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._planner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._planner.commit_tensor(read_item, tensor)


def _need(item: WriteItem, planner: SavePlanner) -> tuple[Need, bytes | None]:
    """Return the space that an item needs in a file.

    Also return the item's bytes if it is not a tensor whose data is copied later.
    """
    if item.type == WriteItemType.BYTE_IO:
        written = planner.resolve_data(item)
        assert isinstance(written, BytesIO), "PyTorch hands out plain values in it"
        content = written.getvalue()
        try:
            load_plain(item.index.fqn, BytesIO(content))
        except CheckpointError as error:
            raise BadUse(
                f"{item.index.fqn!r} is not a plain value: it could not be read back without running "
                "code from the file. Leave it out of the state, or save its state_dict()."
            ) from error
        return Need(dtype=None, slot_bytes=len(content)), content
    assert item.tensor_data is not None, "PyTorch plans a tensor as a tensor"
    properties, shape = item.tensor_data.properties, tuple(item.tensor_data.chunk.sizes)
    if properties.layout is torch.strided:
        try:
            template(properties.dtype, shape)
            return Need(dtype=properties.dtype, shape=shape), None
        except RuntimeError:  # dtype and shape do not describe this tensor
            pass
    whole = BytesIO()
    torch.save(_tensor(item, planner).cpu(), whole)
    return Need(dtype=None, slot_bytes=len(whole.getbuffer())), whole.getvalue()


def _tensor(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor), "PyTorch hands out tensors as such"
    return tensor.detach()


def _put(memory: memoryview, blob: Blob, source: torch.Tensor | bytes) -> None:
    """Write one item into `memory`, the content of one file, and zeros up to the next item."""
    begin, end = blob.file_offset, blob.file_offset + blob.length
    if isinstance(source, bytes):
        memory[begin:end] = source
    else:
        assert blob.need.dtype is not None, "a tensor has a type"
        made = template(blob.need.dtype, blob.need.shape)
        data = begin + len(made.head)
        memory[begin:data] = made.head
        if made.data_bytes:
            flat = torch.frombuffer(memory, dtype=torch.uint8, offset=data, count=made.data_bytes)
            flat.view(blob.need.dtype).view(blob.need.shape).copy_(source)
        memory[data + made.data_bytes : end] = made.tail
    padded = min(-(-end // ALIGNMENT) * ALIGNMENT, len(memory))
    memory[end:padded] = bytes(padded - end)


def _checked(path: str | os.PathLike[str]) -> Path:
    absolute = local_path(
        path,
        instead_of_url="Give a local path; `holdfast.checkpoint.Remote` pushes it there.",
    )
    if _step(absolute) is None:
        raise BadUse(
            f"A checkpoint of Holdfast cannot be called {absolute.name!r}: its name must state "
            "its step. Use holdfast.checkpoint.integrations.dcp_storage.step_path(DIR, step)."
        )
    return absolute


def _required(path: Path | None) -> Path:
    if path is None:
        raise BadUse("There is no path to the checkpoint. Pass checkpoint_id=step_path(DIR, step).")
    return path


def _step(path: Path) -> int | None:
    parsed = parse_name(path.name)
    return None if parsed is None or parsed[1] else parsed[0]


def _damaged(path: Path, error: Exception) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{path} cannot be restored: {error}. `holdfast checkpoint verify` lists the others that "
        "can."
    )


def _never_waits() -> None:
    raise RankFailed("a rank left no note of its files")
