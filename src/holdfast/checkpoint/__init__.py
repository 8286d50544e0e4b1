"""STATE: save a training job's state so that it is never silently wrong, and restore it.

The input is the state that a script passes to `Checkpointer.save`. The output is a folder that stock PyTorch reads,
and later the same state, bit for bit. Packages import only packages below them; an import linter holds that.

| package or module | one idea |
|---|---|
| `integrations` | saving and restoring inside other people's trainers |
| `checkpointer` | the calls of the user; `closing`: how a Checkpointer ends; `config`: its options, checked |
| `save` | one rank's saves, from the call until they are durable |
| `snapshot` | the live tensors copied into shared memory while training goes on; `snapshot.gpu`: those on GPUs |
| `convert` | inspect, compare, import, export, consolidate |
| `restore` | the newest checkpoint that verifies on all ranks, read into a live state |
| `writer` | the process that writes, attests and commits, and that outlives the trainer |
| `memory` | the newest durable snapshot in the memory of this node and of a peer |
| `storage` | checkpoints in object storage |
| `ipc` | what a trainer and its writing process share |
| `schedule` | when the next save is due |
| `catalog` | which checkpoints a folder holds, what is recorded about them, which ones stay, who may write |
| `distributed` | ranks that act as one |
| `state` | a nested state as flat tensors and values, and the saved one matched with the live one |
| `format` | the files of one checkpoint |

`docs/internals.md` follows one save and one restore through them. Importing `catalog`, `ipc`, `writer` and most of
`storage` imports no torch.
"""

from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.catalog.catalog import CheckpointInfo, scan, verify
from holdfast.checkpoint.catalog.retention import Best, Retention
from holdfast.checkpoint.save.handle import SaveHandle
from holdfast.checkpoint.schedule.data_workers import outlive_sigterm

if TYPE_CHECKING:
    from holdfast.checkpoint.checkpointer import Checkpointer

__all__ = [
    "Best",
    "CheckpointInfo",
    "Checkpointer",
    "Retention",
    "SaveHandle",
    "outlive_sigterm",
    "scan",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from holdfast.checkpoint.distributed import no_default_group  # noqa: F401, I001 - before anything imports torch.distributed.nn
        from holdfast.checkpoint import checkpointer

        return checkpointer.Checkpointer
    raise AttributeError(f"module 'holdfast.checkpoint' has no attribute {name!r}")
