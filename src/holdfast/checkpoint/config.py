"""Define the options of a `Checkpointer`, document each, and check them before any work."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.checkpoint.catalog.retention import Retention
from holdfast.checkpoint.schedule.interval import Every, check_every
from holdfast.core.arguments import (
    check_above_zero,
    check_from_zero,
    check_limits,
    check_one_of,
    check_whole,
    local_path,
)
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.system_limits import advice_on, in_words

if TYPE_CHECKING:
    import torch.distributed as dist

OnFailure = Literal["raise", "warn", "retry"]
Busy = Literal["wait", "skip"]
Replicas = Literal["spread", "check", "rank0"]


@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig:
    """The keyword arguments of a `Checkpointer`, checked when the object is made.

    Raises:
        BadUse: an option has a value that is not allowed, or two options exclude each other.
    """

    every: Every = 1
    """The steps at which a save is due; `save` does nothing at other steps.

    - A number: at steps divisible by that number.
    - A `datetime.timedelta`: once this time has passed since the last save began, by rank 0's
      clock.
    - `auto`: at the interval that loses the least training time, computed from the cost of a save
      and the job's rate of failures (`schedule.interval` has the formula).
    """
    keep: int | Retention | None = 3
    """The number of whole checkpoints to keep, or a policy that selects them; None keeps all."""
    on_failure: OnFailure = "retry"
    """The reaction when a save fails.

    - `retry`: log the failure and continue. The next call of `save` saves at any step, on all
      ranks. After three failures in a row, only due steps are tried. If no later save succeeds,
      `wait`, `close`, the end of the `with` block or a forced save raises the failure.
    - `warn`: log the failure and continue.
    - `raise`: raise SaveFailed in the next call.
    """
    attest: bool = True
    """Compare the written bytes with digests of the live tensors before the commit.

    The call of `save` takes these digests. Without `attest`, the call copies tensors that no
    optimizer owns. A change of another tensor before the optimizer's step is then detected only by
    PyTorch's version counters.
    """
    when_busy: Busy = "wait"
    """The behavior if a save is due while the two saves before it are not durable yet.

    - `wait`: the optimizer's step waits for the first of them.
    - `skip`: the new save is left out, on all ranks.
    """
    timeout_s: float = 600.0
    """Seconds without a byte written, or of waiting for other ranks, after which a save fails."""
    max_write_mib_s: float | None = None
    """The limit on each rank's write rate, in MiB/s; None for no limit."""
    max_memory_gib: float | None = None
    """The limit on this rank's snapshot memory, in GiB; None: limited only by the node's memory.

    This rank holds two snapshots, or one if the limit is too small for two. A save fails if the
    limit is too small for one.
    """
    max_device_memory_gib: float | None = None
    """The limit on each GPU's memory for snapshots, in GiB; None: free memory less a reserve.

    The memory holds tensors that cannot be copied to the host before the optimizer's step. With 0,
    that step waits for the copy.
    """
    sigterm_grace_s: float | None = None
    """Seconds allowed for the save after SIGTERM; None: SIGTERM is not handled.

    After SIGTERM to any rank, the next call of `save` saves on all ranks, waits until the save is
    durable, and ends the process with exit code 143. If these seconds pass first, the process ends
    with 143 without waiting for the save. Under `holdfast run`, the supervisor stops the ranks
    instead.
    """
    keep_in_memory_s: float | None = 600.0
    """Seconds to keep the last durable snapshot in memory after a crash; None: not kept.

    A crash is the death of the process, or an exception that leaves the `with` block. The snapshot
    is kept at most until the replacement process restores or first saves.
    """
    peer_memory: bool = False
    """Send each durable snapshot to a rank on another node, too, in the background.

    That rank holds the newest snapshot in its memory, for a rank that restarts on a new node. The
    memory for one more snapshot is needed, for two while one arrives; `max_memory_gib` includes it.
    """
    push_to: str | None = None
    """Object storage to push the newest checkpoint to, such as `s3://BUCKET/RUN`.

    A separate process uploads the checkpoint. `restore` fetches a checkpoint that is newer than
    those in the folder, unless that checkpoint was pushed from this folder and then deleted from
    it. If a checkpoint in the folder is damaged, `restore` also fetches an undamaged copy from
    storage.
    """
    keep_pushed: int | None = None
    """The number of checkpoints to keep in `push_to`; None keeps all.

    Only checkpoints up to the step pushed last are counted and deleted.
    """
    read_only: bool = False
    """Only restore; the run that writes the folder may still be training.

    The folder need not be writable, and snapshots that the run left in memory stay there.
    """
    replicas: Replicas = "spread"
    """The rank that writes an entry of `state` that several ranks have.

    - `spread`: entries that an optimizer owns are spread over the ranks that have them. All other
      entries, such as buffers, averages and plain values, come from the lowest of these ranks. The
      first save and every tenth compare the replicas, and a warning names those that differ.
    - `check`: like `spread`, but each save compares, and fails if replicas differ.
    - `rank0`: like `spread`, but all replicated entries come from the lowest rank.
    """
    process_group: "dist.ProcessGroup | None" = None
    """The process group of the ranks that save; None for all ranks of the job.

    Ranks are numbered as in the group. Ranks outside the group must make no Checkpointer of this
    folder.
    """
    run: str | None = None
    """The name of the run, used if no supervisor sets one.

    Checkpoints of another run are not restored.
    """
    fresh: bool = False
    """Move existing checkpoints into `aside-N` in the folder, before the first restore or save.

    Checkpoints of the same `run` stay, so that a restart continues.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", check_every(self.every))
        if self.keep is not None and not isinstance(self.keep, Retention):
            object.__setattr__(self, "keep", check_whole("keep", self.keep, least=1))
        check_one_of("on_failure", self.on_failure, ("raise", "warn", "retry"))
        check_one_of("replicas", self.replicas, ("spread", "check", "rank0"))
        if str(self.when_busy) == "replace":
            raise BadUse('when_busy="replace" no longer exists. Use when_busy="skip".')
        check_one_of("when_busy", self.when_busy, ("wait", "skip"))
        check_above_zero("timeout_s", self.timeout_s)
        check_limits(
            max_write_mib_s=self.max_write_mib_s,
            max_memory_gib=self.max_memory_gib,
            sigterm_grace_s=self.sigterm_grace_s,
            keep_in_memory_s=self.keep_in_memory_s,
        )
        if self.max_device_memory_gib is not None:
            check_from_zero("max_device_memory_gib", self.max_device_memory_gib)
        if self.peer_memory and self.keep_in_memory_s is None:
            raise BadUse(
                "peer_memory needs keep_in_memory_s, which is None. Give a number of seconds."
            )
        if self.keep_pushed is not None:
            object.__setattr__(
                self, "keep_pushed", check_whole("keep_pushed", self.keep_pushed, least=1)
            )
        if self.read_only and self.push_to is not None:
            raise BadUse(
                "read_only and push_to exclude each other: read_only writes nothing. Give one of them."
            )
        if self.run is not None and not (isinstance(self.run, str) and self.run):
            raise BadUse(f"run is {self.run!r}; allowed is a name of the run, or None.")
        if self.read_only and self.fresh:
            raise BadUse(
                "read_only and fresh exclude each other: fresh moves checkpoints. Give one of them."
            )

    @property
    def retention(self) -> Retention:
        """Return `keep` as a policy."""
        return self.keep if isinstance(self.keep, Retention) else Retention(last=self.keep)

    @property
    def max_write_bytes_s(self) -> float | None:
        """Return `max_write_mib_s` in bytes per second."""
        return None if self.max_write_mib_s is None else self.max_write_mib_s * 2**20

    @property
    def max_memory_bytes(self) -> float | None:
        """Return `max_memory_gib` in bytes."""
        return None if self.max_memory_gib is None else self.max_memory_gib * 2**30

    @property
    def max_device_bytes(self) -> float | None:
        """Return `max_device_memory_gib` in bytes."""
        return None if self.max_device_memory_gib is None else self.max_device_memory_gib * 2**30

    @property
    def keep_s(self) -> float:
        """Return `keep_in_memory_s`, or 0 if the snapshot is not kept."""
        return self.keep_in_memory_s or 0.0


def checkpoint_folder(given: Any) -> Path:
    """Return the absolute path of `dir` as given to a Checkpointer; see `local_path`."""
    return local_path(
        given, instead_of_url="Give a local folder, and push_to={url!r} to have a copy there."
    )


def make_writable(folder: Path) -> None:
    """Make a folder if it is missing, and check that it can be written.

    Raises:
        BadUse: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # mode bits do not show a read-only mount, nor restrict root
    except (FileExistsError, NotADirectoryError) as error:
        raise BadUse(f"{error.filename} is a file. Give Checkpointer a folder.") from error
    except OSError as error:
        advice = advice_on(error) or (
            "Make it writable, or give Checkpointer another one, or read_only=True where it only restores."
        )
        reason = in_words(error) if advice_on(error) else error.strerror or error
        raise BadUse(
            f"The checkpoint folder {folder} cannot be written ({reason}). {advice}"
        ) from error


def check_there(folder: Path) -> None:
    """Check that a folder exists.

    Raises:
        NotFound: the folder does not exist.
    """
    if not folder.is_dir():
        raise NotFound(
            f"There is no checkpoint folder {folder}. Give Checkpointer the one that a run has saved into."
        )
