"""STATE: saving a training job's state so that it is never silently wrong, and getting it back.

What enters is the state that a script passes to `Checkpointer.save`; what leaves is a folder that stock
PyTorch reads, and later the same state, bit for bit. The stages, in order, one module each:

| module | one idea |
|---|---|
| `checkpointer` | what the user calls, and what a failure does (`arguments`, `save_handle`) |
| `interval` | when a save is due: steps, seconds, or as often as is worth it (`lost_time`: what one costs) |
| `closing` | how it ends: closed, at exit, dropped, or taken over from |
| `sigterm` | the last save, when the process is asked to end (`data_workers`: they outlive that) |
| `votes` | what some rank wants, known to all at the same step |
| `retrying` | the call at which all ranks make a failed save again |
| `saved_event` | what is told of a save |
| `ranks` | every rank does its part, and all go on or all raise the same error |
| `meeting` | ranks that do not call `save` or `restore` together are found (`one_folder`: nor into one folder) |
| `contents` | what one rank puts into a checkpoint (`rng`: its random generators) |
| `tree` | a nested state as flat leaves and a skeleton of its shape (`skeletons`: those that are stored) |
| `engine` | one rank's saves (`save_job`: each), from the call until they are durable |
| `fence` | the optimizer's step waits until what is saved is copied |
| `shape` | what the saves of a state of one shape share |
| `plan` | who writes what, and where (`image`: as bytes; `layout`: what of it the writing process knows) |
| `ownership` | the tensors that only an optimizer's step changes |
| `early` | the tensors that are copied in the call of `save` |
| `replicas` | digests of what several ranks have (`replica_notes`: compared at the commit) |
| `stage` | live tensors into an `arena`, shared memory that holds one snapshot (`seats`: saves take turns in them) |
| `turns` | the thread that does it leaves Python's lock to the training |
| `devices` | what lies on GPUs, a `device_copy` each (`device_memory`, `device_staging`, `pinning`) |
| `device_live` | its digests, by the GPU (`device_digests`: the kernel) |
| `writer` | the trainer's side of the writing process (`messages`: what they say to each other) |
| `writing_process` | which outlives the trainer, and for each save does `persist`: write, attest, commit |
| `keeping` | what it committed last stays in memory when the trainer dies (`kept`: for the rank that takes its place) |
| `peers` | which rank of another node holds whose snapshot (`peer_meeting`: the ranks find each other) |
| `peer_memory` | what a writing process sends there and holds (`peer_sending`, `peer_holding`, `peer_messages`) |
| `peer_restoring` | ranks that lack their part in memory get it from where it is |
| `disk` | files at the disk's own speed, with `checksums` of each block |
| `commit` | the ranks' files become one checkpoint (`failures`: or why not, in words; `limits`: those of the system) |
| `dcp` | PyTorch Distributed Checkpoint behind two functions (`metadata`: its pickle, not trusted) |
| `manifest` | which files a checkpoint has, and their checksums |
| `folders` | folders appear whole and disappear at once (`retention`: which ones go) |
| `lineage` | which of them training has left behind (`lease`: one writer a folder; `aside`: what another run left) |
| `catalog` | which checkpoints a folder holds, and whether each is whole |
| `marks` | what became known of one later: verified, pinned, wanted (`metrics`; `marks_lock`: one writer at a time) |
| `pruning` | deleting by a policy, by hand |
| `foreign` | what can be checked of one that PyTorch alone wrote (`blobs`: its values) |
| `inventory` | what one holds (`comparing`: how two differ; `one_file`: the state as one file) |
| `importing` | what PyTorch alone wrote, made one of these |
| `restore` | the newest checkpoint that verifies |
| `opening` | what one says of itself, to one rank or to all together |
| `filling` | it comes into a state, which it has to `fit`, a `part` at a time (`judged`: not what own code judges) |
| `optimizer_order` | which parameter gets which saved state of an optimizer, by `parameter_names` |
| `renaming` | a checkpoint whose tensors have other names than the state |
| `ranges` | the bytes of the files that a rank needs (`reading`: each checked before it is handed out) |
| `remote` | checkpoints in object storage (`objects` and four `remote_…`: catalog, push, fetch, ranges) |
| `pushing` | what is fetched from there, and the `pushing_process` that brings it there (`pushed`: up to which step) |
| `export` | its model as a Hugging Face folder |
| `names` | which of its tensors is which of the model's (`huggingface`: what the model has) |
| `conversion` | those tensors, streamed as safetensors (`converting`: in a process of its own) |
| `integrations` | all of this inside of other people's trainers (`replacing`: their attributes, for a while) |

The catalog, the marks, the pruning and the writing process need no torch, and importing them imports none.
"""

from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.catalog import CheckpointInfo, scan, verify
from holdfast.checkpoint.data_workers import outlive_sigterm
from holdfast.checkpoint.retention import Best, Retention
from holdfast.checkpoint.save_handle import SaveHandle

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
        from holdfast.checkpoint import group_free  # noqa: F401, I001 - before anything imports torch.distributed.nn
        from holdfast.checkpoint import checkpointer

        return checkpointer.Checkpointer
    raise AttributeError(f"module 'holdfast.checkpoint' has no attribute {name!r}")
