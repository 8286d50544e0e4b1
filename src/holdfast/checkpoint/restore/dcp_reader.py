"""Read named tensors and plain values of a checkpoint with PyTorch Distributed Checkpoint (DCP)."""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

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
    with _as_one_process_would():
        load(
            dict(wanted),
            storage_reader=_Reader(folder, metadata, files),
            planner=planner,
            no_dist=True,
        )
    return {
        name: planner.plain[name] if tensor is None else tensor for name, tensor in wanted.items()
    }


class _Reader(FileSystemReader):
    """Give DCP metadata that was read safely, since DCP's own reader would unpickle it."""

    def __init__(self, folder: Path, metadata: Metadata, files: VerifiedFiles | None) -> None:
        super().__init__(folder)
        self._metadata = metadata
        self._files = files

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._files is None:
            return super().read_data(plan, planner)
        read_items(plan.items, planner, self._metadata, self._files)
        ended: Future[None] = Future()
        ended.set_result(None)
        return ended


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


@contextmanager
def _as_one_process_would() -> Iterator[None]:
    """Make DCP's read behave like a call in a single process.

    DCP's warning about a single process is suppressed. If DCP raises a CheckpointException, the
    error inside it is raised instead.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled", category=UserWarning
            )
            yield
    except CheckpointException as error:  # not an Exception: DCP derives it from BaseException
        failures = {rank: failure for rank, (failure, _traceback) in error.failures.items()}
        for failure in failures.values():
            if isinstance(failure, OSError | HoldfastError | ManifestError) or not isinstance(
                failure, Exception
            ):
                # DCP also catches KeyboardInterrupt and SystemExit: raise them again.
                raise failure from error
        rank, failure = next(iter(failures.items()))
        why = (str(failure) or type(failure).__name__).splitlines()[0]
        raise CheckpointError(
            f"{type(failure).__name__} on rank {rank}: {why} Take another checkpoint, see "
            "`holdfast checkpoint ls`."
        ) from error
