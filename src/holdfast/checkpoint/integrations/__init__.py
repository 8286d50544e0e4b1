"""Integrate Holdfast into other trainers; each module replaces a part of a trainer.

| module | replaces |
|---|---|
| `huggingface_trainer` | the saving and resuming of `transformers.Trainer`, as a callback |
| `huggingface_data` | the order of the Trainer's batches, so that batches can be left out |
| `lightning` | Lightning's `ModelCheckpoint` and `CheckpointIO` |
| `fsdp2` | the optimizer in the saved state, if `fully_shard` has sharded its parameters |
| `torchtitan` | torchtitan's `CheckpointManager` |
| `dcp_storage` | the storage of `torch.distributed.checkpoint`, for saves and loads |
| `dcp_staging` | the stager of `torch.distributed.checkpoint.async_save` |

Each module imports only its own trainer, so the other trainers need not be installed.
"""

from holdfast.core.errors import BadUse


def missing(error: ImportError, extra: str) -> BadUse:
    """Return the error for a trainer that is not installed; it names Holdfast's extra `extra`."""
    return BadUse(
        f"This needs {error.name}, which is not installed. Run: pip install 'holdfast[{extra}]'"
    )
