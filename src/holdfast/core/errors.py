"""Define the tree of errors.

HoldfastError                     exit code 1
├── BadUse                        2: wrong arguments, paths or state; nothing was done
│   ├── NotFound                  2: no such run, incident, script or folder
│   └── StateMismatch             2: the given state does not fit the checkpoint
├── LedgerError                   2: the ledger cannot be opened or has another version
│   └── LedgerUnreachable         2: the ledger's server does not run, or the network is cut
├── CheckpointError               1
│   ├── SaveFailed                1: this save is not durable; earlier checkpoints are untouched
│   ├── NoVerifiedCheckpoint      1: checkpoints exist, but none verifies
│   ├── DamagedCheckpoint         1: the named checkpoint does not match its manifest
│   └── StorageFailed             1: object storage refused, or failed in all attempts
└── ChannelError                  1: the control channel to the supervisor was refused or broke

Each message has one sentence that states the error with its values, and one that states the next
step. The command line prints the message without a traceback, and exits with `exit_code`.
"""

from typing import ClassVar


class HoldfastError(Exception):
    """Any error that Holdfast raises on purpose."""

    exit_code: ClassVar[int] = 1


class BadUse(HoldfastError, ValueError):
    """Wrong arguments, paths or state; raised before any work is done."""

    exit_code = 2


class NotFound(BadUse):
    """The named run, incident, script or folder does not exist."""


class StateMismatch(BadUse):
    """The state passed to `restore` does not fit the checkpoint.

    The state is unchanged, unless the message states a change.
    """


class LedgerError(HoldfastError):
    """The ledger cannot be opened, or has another version."""

    exit_code = 2


class LedgerUnreachable(LedgerError):
    """The ledger's server cannot be reached; a later try may succeed.

    A write that was in progress may have been recorded, because the connection may have broken
    after the commit and before the answer.
    """


class CheckpointError(HoldfastError):
    """An operation on a checkpoint failed."""


class SaveFailed(CheckpointError):
    """A save did not become durable; every earlier checkpoint is untouched.

    Attributes:
        errno: the system's error number, if there is one.
        is_final: True if another try would fail as well.
    """

    errno: int | None = None
    is_final: bool = False


class NoVerifiedCheckpoint(CheckpointError):
    """Checkpoints exist, but none verifies."""


class DamagedCheckpoint(CheckpointError):
    """The named checkpoint does not match its manifest; none of its data were loaded."""


class StorageFailed(CheckpointError):
    """Object storage refused a request, or failed in all attempts.

    The error does not mean that stored objects are missing or damaged.
    """


class ChannelError(HoldfastError):
    """The control channel to the supervisor was refused or broke."""
