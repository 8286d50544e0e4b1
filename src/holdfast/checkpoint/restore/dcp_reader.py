"""Read named tensors and plain values of a checkpoint with PyTorch Distributed Checkpoint (DCP)."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from holdfast.checkpoint.format.manifest import ManifestError
from holdfast.checkpoint.format.plain_values import load_plain
from holdfast.checkpoint.format.verified_files import VerifiedFiles
from holdfast.checkpoint.restore.tensor_reads import read_items
from holdfast.core.errors import CheckpointError, HoldfastError


def read(
    folder: Path,
    metadata: Metadata,
    wanted: Mapping[str, torch.Tensor | None],
    files: VerifiedFiles | None = None,
) -> dict[str, Any]:
    """Read the tensors and plain values of a checkpoint that `wanted` names. Not collective.

    Args:
        folder: the folder of the checkpoint.
        metadata: the checkpoint's metadata, from `holdfast.checkpoint.format.dcp_metadata`.
        wanted: for each flat name, the tensor to read into, or None for a plain value. Of a
            DTensor, the local shard is read.
        files: the object that reads and verifies the wanted bytes. None to read with PyTorch,
            without verification.

    Returns:
        For each flat name, the given tensor, or the plain value, which is unpickled with
        `weights_only`.

    Raises:
        ManifestError: `files` found damage.
        OSError: a file cannot be read.
        CheckpointError: DCP failed, or unpickling a plain value would have run code.
    """
    planner = _Planner()
    try:
        # These are the steps of DCP's `load` for a single process. `load` itself would unpickle the
        # metadata, and takes longer than the read of a few plain values.
        planner.set_up_planner(dict(wanted), metadata, is_coordinator=True)
        plan = planner.finish_plan(planner.create_local_plan())
        if files is None:
            reader = FileSystemReader(folder)
            reader.set_up_storage_reader(metadata, is_coordinator=True)
            reader.read_data(plan, planner).wait()
        else:
            read_items(plan.items, planner, metadata, files)
    except (OSError, HoldfastError, ManifestError):
        raise
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{type(error).__name__}: {why} Take another checkpoint, see `holdfast checkpoint ls`."
        ) from error
    return {
        name: planner.plain[name] if tensor is None else tensor for name, tensor in wanted.items()
    }


class _Planner(DefaultLoadPlanner):
    """Read plain values with `weights_only`, since DCP's own planner would trust any pickle.

    Names are not nested again after the read.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.plain: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.plain[name] = load_plain(name, value)
