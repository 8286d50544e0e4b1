"""Integrate Holdfast into other trainers: each module replaces a part of a trainer.

| module | replaces |
|---|---|
| `huggingface_trainer` | the saving and resuming of `transformers.Trainer`, as a callback |
| `huggingface_data` | the order of its batches, without those that are left out |
| `lightning` | Lightning's `ModelCheckpoint` and `CheckpointIO` |
| `fsdp2` | an optimizer whose parameters `fully_shard` has sharded |
| `torchtitan` | torchtitan's `CheckpointManager` |
| `dcp_storage` | the storage of `torch.distributed.checkpoint`, when it saves and when it loads |
| `dcp_staging` | its stager, for `async_save` |

Each trainer is imported by its own module alone: the other trainers need not be installed.
"""

from holdfast.core.errors import BadUse


def missing(error: ImportError, extra: str) -> BadUse:
    """Return the error for a trainer that is not installed; `extra` is the extra of Holdfast that installs it."""
    return BadUse(
        f"This needs {error.name}, which is not installed. Run: pip install 'holdfast[{extra}]'"
    )
