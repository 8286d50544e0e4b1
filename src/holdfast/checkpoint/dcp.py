"""PyTorch Distributed Checkpoint behind two functions: write a state, read named parts of one."""

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.core.errors import CheckpointError, HoldfastError


def write(state: dict[str, Any], folder: Path, *, distributed: bool) -> Metadata:
    """Write `state`, each replicated value once, and fsync the files. Collective where `distributed`.

    Returns what DCP says it wrote. One writer thread: DCP reports success when another one fails.

    Raises:
        OSError: a file could not be written, on this rank or another.
        CheckpointError: DCP failed otherwise.
    """
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    with _as_one_process_would():
        metadata: Metadata = save(state, storage_writer=writer, no_dist=not distributed)
    return metadata


def read(folder: Path, metadata: Metadata, wanted: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
    """Read the parts of a checkpoint that `wanted` names, and nothing else. Not collective.

    Args:
        folder: the checkpoint.
        metadata: its metadata, read and checked by `holdfast.checkpoint.metadata`.
        wanted: flat name to the tensor to read into (a DTensor: its shard), None for a plain value.

    Returns:
        Flat name to the tensor given, or to the plain value, which was unpickled with `weights_only`.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: DCP failed otherwise, or a plain value would have run code.
    """
    planner = _Planner()
    with _as_one_process_would():
        load(dict(wanted), storage_reader=_Reader(folder, metadata), planner=planner, no_dist=True)
    return {name: planner.plain[name] if tensor is None else tensor for name, tensor in wanted.items()}


class _Writer(FileSystemWriter):
    """Says that the disk is full where PyTorch says that a file's position is unexpected."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # Here, because what an error came from does not travel to the other ranks.
            origin: BaseException | None = error
            while origin is not None and not isinstance(origin, OSError):
                origin = origin.__cause__ or origin.__context__
            if origin is None or origin is error:
                raise
            raise origin from None


class _Reader(FileSystemReader):
    """Hands out metadata that was read safely, where DCP's own reader would unpickle it."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Loads by flat names, and plain values with `weights_only`, where DCP's own planner trusts them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.plain: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            # Empty bytes are pickled as a call of `bytes`, which does no harm.
            with torch.serialization.safe_globals([bytes]):
                self.plain[name] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{name!r} is no plain value; reading it could run code from the file, so it was not read. "
                "Leave its top-level entry out of the state to restore the rest."
            ) from error


@contextmanager
def _as_one_process_would() -> Iterator[None]:
    """Without DCP's warning that there is only one process, and with the error itself, not DCP's wrapper."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:  # not an Exception: DCP derives it from BaseException
        failures = {rank: failure for rank, (failure, _traceback) in error.failures.items()}
        for failure in failures.values():
            if isinstance(failure, OSError | HoldfastError) or not isinstance(failure, Exception):
                raise failure from error  # the last is Ctrl-C or an exit, which DCP has caught
        rank, failure = next(iter(failures.items()))
        raise CheckpointError(f"rank {rank}: {type(failure).__name__}: {failure}") from error
