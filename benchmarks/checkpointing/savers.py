"""Save a state by Holdfast and by the peers, each as its own documentation uses it.

The savers need torch; a peer is imported when it is made.
"""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkpointing import raw
from checkpointing.workloads import Workload, size_bytes
from common.jobs import DoesNotWork


class Saver:
    """A way to save; the base class is for checkpoints that are durable when `save` returns."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        self._folder, self._workload = folder, workload

    def save(self, step: int) -> None:
        """Save the state; return when forward and backward may continue."""
        raise NotImplementedError

    def fence(self) -> None:
        """Wait until the state may change."""

    def wait(self) -> None:
        """Wait until the last save is durable; any thread may call this."""

    def clear(self) -> None:
        """Remove the checkpoints of a saver that deletes none."""
        for path in self._folder.iterdir():
            shutil.rmtree(path)

    def _place(self, step: int) -> Path:
        return self._folder / f"step-{step}"


class Ours(Saver):
    """Holdfast, with or without attestation."""

    def __init__(self, folder: Path, workload: Workload, *, attest: bool = False) -> None:
        import holdfast

        super().__init__(folder, workload)
        self._ckpt = holdfast.Checkpointer(folder, every=1, keep=2, attest=attest)

    def save(self, step: int) -> None:
        """See `Saver`."""
        self._handle = self._ckpt.save(step, self._workload.state)

    def fence(self) -> None:
        """Do the work of the hook before the optimizer's step, which then has no wait left."""
        self._ckpt.before_update()

    def wait(self) -> None:
        """See `Saver`."""
        self._handle.result()

    def clear(self) -> None:
        """Do nothing: Holdfast deletes old checkpoints."""

    def close(self) -> None:
        """Close after the last save."""
        self._ckpt.close()


class TorchSave(Saver):
    """`torch.save`, then fsync."""

    def save(self, step: int) -> None:
        """See `Saver`."""
        import torch

        self._place(step).mkdir()
        with (self._place(step) / "state.pt").open("wb") as file:
            torch.save(self._workload.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self._place(step))


class DcpSave(Saver):
    """`torch.distributed.checkpoint.save` with one thread; it calls fsync."""

    def save(self, step: int) -> None:
        """See `Saver`."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled", category=UserWarning
            )
            writer = FileSystemWriter(self._place(step), thread_count=1, sync_files=True)
            save(self._workload.state_dict(), storage_writer=writer, no_dist=True)
        _sync_folder(self._place(step))


class DcpAsync(Saver):
    """`torch.distributed.checkpoint.async_save`, in a thread or a process.

    `stage`: None uses DCP's own stager, made anew for each save. Otherwise one `DefaultStager` is
    kept: it copies in a thread, into "shared" memory, into "pinned" memory for a GPU's tensors, or
    into its "own" memory.
    """

    def __init__(
        self,
        folder: Path,
        workload: Workload,
        *,
        in_process: bool = False,
        stage: str | None = None,
    ) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        super().__init__(folder, workload)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        _one_rank(folder)
        self._staged: Any = None  # where copying is over when `save` returns
        self._saved: Any
        self._options: dict[str, Any] = {
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS
            if in_process
            else AsyncCheckpointerType.THREAD
        }
        if stage is not None:
            options = StagingOptions(
                use_pinned_memory=stage == "pinned",
                use_shared_memory=stage == "shared",
                use_async_staging=True,
                use_non_blocking_copy=stage == "pinned",
            )
            self._options["async_stager"] = DefaultStager(options)

    def save(self, step: int) -> None:
        """See `Saver`."""
        from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

        self._place(step).mkdir()
        answer = async_save(
            self._workload.state_dict(), checkpoint_id=self._place(step), **self._options
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._saved = answer.staging_completion, answer.upload_completion
        else:
            self._saved = answer

    def fence(self) -> None:
        """See `Saver`."""
        if self._staged is not None:
            self._staged.result()

    def wait(self) -> None:
        """See `Saver`."""
        self._saved.result()


class TorchCheckpointing(Saver):
    """Meta's `torch_checkpointing`, without fsync; buffered, since direct writes fail on ext4."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        from torch_checkpointing import CheckpointManager  # type: ignore[import-not-found]
        from torch_checkpointing.storage.filesystem import (  # type: ignore[import-not-found]
            LocalFileSystemStorageConfig,
        )

        super().__init__(folder, workload)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))

    def save(self, step: int) -> None:
        """See `Saver`."""
        self._saved = self._manager.save(str(self._place(step)), self._workload.state_dict())

    def fence(self) -> None:
        """See `Saver`."""
        with self._manager.lock():
            pass

    def wait(self) -> None:
        """See `Saver`."""
        self._saved.result()


class Nvrx(Saver):
    """The asynchronous `torch.save` of NVIDIA's resiliency extension, without fsync."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        import torch
        from torch.utils import _pytree

        super().__init__(folder, workload)
        leaves = _pytree.tree_leaves(workload.state_dict())
        if not any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves):
            raise DoesNotWork("it saves CUDA tensors only, and this state is in the CPU's memory")
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import (  # type: ignore[import-not-found]
            TorchAsyncCheckpoint,
        )

        _one_rank(folder)
        self._checkpoint = TorchAsyncCheckpoint()

    def save(self, step: int) -> None:
        """See `Saver`."""
        self._place(step).mkdir()
        self._checkpoint.async_save(self._workload.state_dict(), self._place(step) / "state.pt")

    def wait(self) -> None:
        """See `Saver`."""
        self._checkpoint.finalize_async_save(blocking=True)


class OnlyWritten(Saver):
    """No checkpoint: a process writes as many bytes to the same disk, without copy or hash."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        super().__init__(folder, workload)
        words = (sys.executable, "-m", raw.__name__, str(folder), str(size_bytes(workload)))
        self._writing = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.wait()  # until it has its memory

    def save(self, step: int) -> None:
        """See `Saver`."""
        assert self._writing.stdin is not None, "it is a pipe"
        print(step, file=self._writing.stdin, flush=True)

    def wait(self) -> None:
        """See `Saver`."""
        assert self._writing.stdout is not None, "it is a pipe"
        if not self._writing.stdout.readline():
            raise DoesNotWork("the process that writes has ended")


OURS, ATTESTED = "holdfast", "holdfast, attested"
WRITTEN = "the disk's writes alone"
SHORT = (OURS, ATTESTED, WRITTEN)
"""The savers that cost training the least; the others are the peers."""
TORCH_SAVE = "torch.save + fsync"
DCP_SHARED = "dcp.async_save, process, shared stager kept"
TORCH_CHECKPOINTING = "torch_checkpointing, no fsync"
DCP_PINNED = "dcp.async_save, pinned stager kept"
NVRX = "nvidia-resiliency-ext, no fsync"
SAVERS: dict[str, Callable[[Path, Workload], Saver]] = {
    OURS: Ours,
    ATTESTED: partial(Ours, attest=True),
    WRITTEN: OnlyWritten,
    TORCH_SAVE: TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save": DcpAsync,
    "dcp.async_save, stager kept": partial(DcpAsync, stage="own"),
    "dcp.async_save, process": partial(DcpAsync, in_process=True),
    DCP_SHARED: partial(DcpAsync, in_process=True, stage="shared"),
    DCP_PINNED: partial(DcpAsync, stage="pinned"),
    TORCH_CHECKPOINTING: TorchCheckpointing,
    NVRX: Nvrx,
}


def _one_rank(folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}.ranks", rank=0, world_size=1)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
