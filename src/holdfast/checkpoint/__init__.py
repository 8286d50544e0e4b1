"""STATE: save a training job's state and restore it; never restore a damaged part silently.

The input is the state that a script passes to `Checkpointer.save`. The output is a folder that
stock PyTorch reads, and from which `Checkpointer.restore` rebuilds the same state, bit for bit.
Packages import only packages below them in this table; an import linter checks the order.

| package or module | one idea |
|---|---|
| `batches` | save the position in the training data, and continue at the next batch |
| `integrations` | save and restore inside other trainers |
| `checkpointer` | the user's calls; `closing` ends a Checkpointer; `config` has its options |
| `save` | one rank's saves, from the call until they are durable |
| `snapshot` | copy live tensors into shared memory during training; `snapshot.gpu` copies those on GPUs |
| `convert` | inspect, compare, import, export, consolidate |
| `restore` | the newest checkpoint that verifies on all ranks, read into a live state |
| `writer` | the process that writes, attests and commits, and that outlives the trainer |
| `memory` | keep the newest durable snapshot in the memory of this node and of a peer |
| `storage` | checkpoints in object storage |
| `ipc` | the memory and messages that a trainer and its writing process share |
| `schedule` | decide when the next save is due |
| `catalog` | the checkpoints of a folder: their records, which ones stay, who may write |
| `distributed` | make all ranks agree on each decision |
| `state` | flatten a nested state into named tensors and values; match a saved state with the live one |
| `format` | the files of one checkpoint |

The other packages of Holdfast and its users import from `holdfast.checkpoint`; `integrations` is
the other public path.

`docs/internals.md` follows one save and one restore through the packages. Importing `catalog`,
`ipc`, `writer` and most of `storage` imports no torch, and importing `holdfast.checkpoint` imports
none of the packages.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.batches.batches import Batches
    from holdfast.checkpoint.catalog.annotations import (
        Annotations,
        ReadHold,
        held_for_reading,
        note_healthy,
        note_metrics,
        pin,
        release,
        unpin,
        want,
    )
    from holdfast.checkpoint.catalog.catalog import (
        CheckpointInfo,
        checkpoint_step,
        checkpoints_at,
        has_only_metadata,
        inspect_checkpoint,
        scan,
        verify,
        verify_and_note,
    )
    from holdfast.checkpoint.catalog.pruning import PruneResult, prune
    from holdfast.checkpoint.catalog.retention import Best, Retention
    from holdfast.checkpoint.catalog.rollback import newest_healthy, roll_back
    from holdfast.checkpoint.checkpointer import Checkpointer
    from holdfast.checkpoint.config import CheckpointerConfig
    from holdfast.checkpoint.convert.consolidate import consolidate_checkpoint
    from holdfast.checkpoint.convert.diff import (
        CheckpointComparison,
        EntryDifference,
        compare_checkpoints,
    )
    from holdfast.checkpoint.convert.export_hf import export_safetensors
    from holdfast.checkpoint.convert.hf_model import (
        HF_CONFIG_NAME,
        HF_INDEX_NAME,
        HF_WEIGHTS_NAME,
        conversion_command,
        hf_small_files,
        is_hf_small_file,
        write_hf_small_files,
    )
    from holdfast.checkpoint.convert.import_dcp import import_dcp
    from holdfast.checkpoint.convert.inspect import (
        CheckpointInventory,
        OpenedCheckpoint,
        open_for_reading,
        take_inventory,
    )
    from holdfast.checkpoint.convert.plain_dcp import PlainDcpInfo, is_plain_dcp, verify_plain_dcp
    from holdfast.checkpoint.convert.safetensors import settle_conversion
    from holdfast.checkpoint.format.dcp_metadata import (
        check_metadata_against_files,
        read_dcp_metadata,
    )
    from holdfast.checkpoint.format.manifest import (
        MANIFEST_NAME,
        FileEntry,
        ManifestError,
        check_file_contents,
        read_manifest,
    )
    from holdfast.checkpoint.ipc.messages import (
        ENV_SUPERVISOR_PID,
        SNAPSHOT_SERVER_PROCESS_NAME,
        WRITER_MODULE,
    )
    from holdfast.checkpoint.save.handle import SaveHandle
    from holdfast.checkpoint.schedule.data_workers import outlive_sigterm
    from holdfast.checkpoint.state.name_map import read_name_map
    from holdfast.checkpoint.storage.remote import Remote

__all__ = [
    "ENV_SUPERVISOR_PID",
    "HF_CONFIG_NAME",
    "HF_INDEX_NAME",
    "HF_WEIGHTS_NAME",
    "MANIFEST_NAME",
    "SNAPSHOT_SERVER_PROCESS_NAME",
    "WRITER_MODULE",
    "Annotations",
    "Batches",
    "Best",
    "CheckpointComparison",
    "CheckpointInfo",
    "CheckpointInventory",
    "Checkpointer",
    "CheckpointerConfig",
    "EntryDifference",
    "FileEntry",
    "ManifestError",
    "OpenedCheckpoint",
    "PlainDcpInfo",
    "PruneResult",
    "ReadHold",
    "Remote",
    "Retention",
    "SaveHandle",
    "check_file_contents",
    "check_metadata_against_files",
    "checkpoint_step",
    "checkpoints_at",
    "compare_checkpoints",
    "consolidate_checkpoint",
    "conversion_command",
    "export_safetensors",
    "has_only_metadata",
    "held_for_reading",
    "hf_small_files",
    "import_dcp",
    "inspect_checkpoint",
    "is_hf_small_file",
    "is_plain_dcp",
    "newest_healthy",
    "note_healthy",
    "note_metrics",
    "open_for_reading",
    "outlive_sigterm",
    "pin",
    "prune",
    "read_dcp_metadata",
    "read_manifest",
    "read_name_map",
    "release",
    "roll_back",
    "scan",
    "settle_conversion",
    "take_inventory",
    "unpin",
    "verify",
    "verify_and_note",
    "verify_plain_dcp",
    "want",
    "write_hf_small_files",
]

_HOMES = {
    "Annotations": "catalog.annotations",
    "Batches": "batches.batches",
    "Best": "catalog.retention",
    "CheckpointComparison": "convert.diff",
    "CheckpointInfo": "catalog.catalog",
    "CheckpointInventory": "convert.inspect",
    "Checkpointer": "checkpointer",
    "CheckpointerConfig": "config",
    "ENV_SUPERVISOR_PID": "ipc.messages",
    "EntryDifference": "convert.diff",
    "FileEntry": "format.manifest",
    "HF_CONFIG_NAME": "convert.hf_model",
    "HF_INDEX_NAME": "convert.hf_model",
    "HF_WEIGHTS_NAME": "convert.hf_model",
    "MANIFEST_NAME": "format.manifest",
    "ManifestError": "format.manifest",
    "OpenedCheckpoint": "convert.inspect",
    "PlainDcpInfo": "convert.plain_dcp",
    "PruneResult": "catalog.pruning",
    "ReadHold": "catalog.annotations",
    "Remote": "storage.remote",
    "Retention": "catalog.retention",
    "SNAPSHOT_SERVER_PROCESS_NAME": "ipc.messages",
    "SaveHandle": "save.handle",
    "WRITER_MODULE": "ipc.messages",
    "check_file_contents": "format.manifest",
    "check_metadata_against_files": "format.dcp_metadata",
    "checkpoint_step": "catalog.catalog",
    "checkpoints_at": "catalog.catalog",
    "compare_checkpoints": "convert.diff",
    "consolidate_checkpoint": "convert.consolidate",
    "conversion_command": "convert.hf_model",
    "export_safetensors": "convert.export_hf",
    "has_only_metadata": "catalog.catalog",
    "held_for_reading": "catalog.annotations",
    "hf_small_files": "convert.hf_model",
    "import_dcp": "convert.import_dcp",
    "inspect_checkpoint": "catalog.catalog",
    "is_hf_small_file": "convert.hf_model",
    "is_plain_dcp": "convert.plain_dcp",
    "note_healthy": "catalog.annotations",
    "note_metrics": "catalog.annotations",
    "open_for_reading": "convert.inspect",
    "outlive_sigterm": "schedule.data_workers",
    "pin": "catalog.annotations",
    "prune": "catalog.pruning",
    "newest_healthy": "catalog.rollback",
    "roll_back": "catalog.rollback",
    "read_dcp_metadata": "format.dcp_metadata",
    "read_manifest": "format.manifest",
    "read_name_map": "state.name_map",
    "release": "catalog.annotations",
    "scan": "catalog.catalog",
    "settle_conversion": "convert.safetensors",
    "take_inventory": "convert.inspect",
    "unpin": "catalog.annotations",
    "verify": "catalog.catalog",
    "verify_and_note": "catalog.catalog",
    "verify_plain_dcp": "convert.plain_dcp",
    "want": "catalog.annotations",
    "write_hf_small_files": "convert.hf_model",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.checkpoint' has no attribute {name!r}")
    if name == "Checkpointer":  # before torch.distributed.nn is imported
        from holdfast.checkpoint.distributed import no_default_group  # noqa: F401
    return getattr(import_module(f"holdfast.checkpoint.{_HOMES[name]}"), name)
