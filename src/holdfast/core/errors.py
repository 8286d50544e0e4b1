"""The one tree of errors.

HoldfastError                     exit code 1
├── BadUse                        2: wrong arguments, paths or state; nothing was done
│   ├── NotFound                  2: no such run, incident, script or folder
│   └── StateMismatch             2: the state given does not fit the checkpoint
├── LedgerError                   2: the ledger cannot be opened or is of another version
├── CheckpointError               1
│   ├── SaveFailed                1: this save is not durable; earlier checkpoints are untouched
│   ├── NoVerifiedCheckpoint      1: checkpoints exist and none verifies
│   ├── DamagedCheckpoint         1: one that was named is not what its manifest says
│   └── StorageFailed             1: object storage refused, or failed in all attempts
└── ChannelError                  1: the control channel to the supervisor refused or broke

Messages are for the person who reads them at night: one sentence of what is wrong, with the values, and one
with the next step. The command line prints them without a traceback and leaves with `exit_code`.
"""

from typing import ClassVar


class HoldfastError(Exception):
    """Anything Holdfast raises on purpose."""

    exit_code: ClassVar[int] = 1


class BadUse(HoldfastError, ValueError):
    """Wrong arguments, paths or state; raised before any work is done."""

    exit_code = 2


class NotFound(BadUse):
    """A run, incident, script or folder that was named does not exist."""


class StateMismatch(BadUse):
    """The state passed to `restore` does not fit what the checkpoint holds; nothing was changed, or it says so."""


class LedgerError(HoldfastError):
    """The ledger cannot be opened, or was written by another version."""

    exit_code = 2


class CheckpointError(HoldfastError):
    """Something went wrong with a checkpoint."""


class SaveFailed(CheckpointError):
    """A save did not become durable; every earlier checkpoint is untouched.

    `errno`: where the system gave one. `is_final`: another try would fail as well.
    """

    errno: int | None = None
    is_final: bool = False


class NoVerifiedCheckpoint(CheckpointError):
    """Checkpoints exist and none of them verifies."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that was named is not what its manifest says; nothing of it was taken over."""


class StorageFailed(CheckpointError):
    """Object storage refused a request, or failed in all attempts; it says nothing of what lies there."""


class ChannelError(HoldfastError):
    """The control channel to the supervisor was refused or broke."""
