"""STATE: saving a training job's state so that it is never silently wrong, and getting it back.

What enters is the state that a script passes to `Checkpointer.save`; what leaves is a folder that stock
PyTorch reads, and later the same state, bit for bit. The stages, in order, one module each:

| module | one idea |
|---|---|
| `checkpointer` | when a save is due, what is told to whom, and what a failure does |
| `ranks` | every rank does its part, and all go on or all raise the same error |
| `contents` | what one rank puts into a checkpoint (`rng`: its random generators) |
| `tree` | a nested state as flat leaves and a skeleton of its shape |
| `save` | write, check, hash, commit |
| `dcp` | PyTorch Distributed Checkpoint behind two functions (`metadata`: its pickle, not trusted) |
| `manifest` | which files a checkpoint has, and their checksums |
| `folders` | folders appear whole and disappear at once (`retention`: which ones go) |
| `catalog` | which checkpoints a folder holds, and whether each is whole |
| `restore` | the newest checkpoint that verifies, into a state that fits (`fit`) |
| `export` | its model as a Hugging Face folder |
| `names` | which of its tensors is which of the model's (`huggingface`: what the model has) |
| `conversion` | those tensors, streamed as safetensors (`converting`: in a process of its own) |

The catalog needs no torch, and importing it imports none.
"""

from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.catalog import CheckpointInfo, scan, verify

if TYPE_CHECKING:
    from holdfast.checkpoint.checkpointer import Checkpointer, SaveHandle

__all__ = ["CheckpointInfo", "Checkpointer", "SaveHandle", "scan", "verify"]


def __getattr__(name: str) -> Any:
    if name in ("Checkpointer", "SaveHandle"):
        from holdfast.checkpoint import group_free  # noqa: F401, I001 - before anything imports torch.distributed.nn
        from holdfast.checkpoint import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module 'holdfast.checkpoint' has no attribute {name!r}")
