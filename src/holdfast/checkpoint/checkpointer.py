"""The user's side: when a save is due, what is told to whom, and what a failure does."""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from holdfast.checkpoint.catalog import scan, verify
from holdfast.checkpoint.folders import discard, remove_leftovers, step_path
from holdfast.checkpoint.manifest import read_manifest
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.restore import open_checkpoint, open_newest, per_rank_states, restore_into
from holdfast.checkpoint.retention import superfluous
from holdfast.checkpoint.save import Saved, save_checkpoint
from holdfast.core.clock import SystemClock
from holdfast.core.errors import BadUse, CheckpointError, HoldfastError, NotFound, SaveFailed
from holdfast.core.link import job_link

_logger = logging.getLogger("holdfast")
State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class SaveHandle:
    """One call of `Checkpointer.save`. `step` is the step it saves, None where nothing was due."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self._outcome: Future[Path | None] = Future()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._outcome.done()

    def result(self, timeout_s: float | None = None) -> Path | None:
        """Wait until the checkpoint is durable; its folder, or None where nothing was due.

        Raises:
            SaveFailed: it is not durable.
            TimeoutError: it has not ended within `timeout_s` seconds.
        """
        return self._outcome.result(timeout_s)


class Checkpointer:
    """Saves and restores the state of a training job.

    Each checkpoint is a folder `step-NUMBER` that stock `torch.distributed.checkpoint.load` reads, with a
    manifest of checksums. A crash at any instant leaves every earlier checkpoint restorable.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],  # noqa: A002 - the word a user would look for
        *,
        every: int = 1,
        keep: int | None = 3,
        on_failure: Literal["raise", "warn"] = "raise",
    ) -> None:
        """Check the folder, which is made if need be.

        Args:
            dir: the folder of the checkpoints, shared by all ranks.
            every: save at steps divisible by it; `save` does nothing at others.
            keep: how many whole checkpoints stay; None: all.
            on_failure: `raise`: a failed save raises SaveFailed. `warn`: it is logged, training goes on.

        Raises:
            BadUse: an argument is not allowed, or `dir` cannot be written.
        """
        _check_whole("every", every, least=1)
        if keep is not None:
            _check_whole("keep", keep, least=1)
        if on_failure not in ("raise", "warn"):
            raise BadUse(f"on_failure is {on_failure!r}; allowed are 'raise' and 'warn'.")
        self._folder = Path(dir).absolute()
        self._every = every
        self._keep = keep
        self._on_failure = on_failure
        self._clock = SystemClock()
        self._closed = False
        self._leftovers_removed = False
        self._damaged: set[Path] = set()
        _make_writable(self._folder)

    def save(self, step: int, state: State, *, per_rank: Mapping[str, Any] | None = None) -> SaveHandle:
        """Save, if `step` is due or the job was asked to stop; in the latter case the process ends here.

        Collective where torch.distributed is initialised. Returns once the checkpoint is durable; Python,
        NumPy and torch random generators of each rank are saved by themselves.

        Args:
            step: steps completed.
            state: a dict of state dicts (nested dicts and lists of tensors and plain values), tensors, plain
                values and objects with `state_dict` and `load_state_dict`; or a callable that returns it,
                which is not called when nothing is due. What is the same on all ranks is written once.
            per_rank: the like for what differs by rank, such as the position in the data.

        Raises:
            BadUse: closed, or something in the state cannot be saved; the message names it.
            SaveFailed: the checkpoint is not durable, and `on_failure` is `raise` or the job is to stop.
        """
        if self._closed:
            raise BadUse("This Checkpointer is closed. Save before close(), or make another.")
        _check_whole("step", step, least=0)
        link = job_link()
        stopping = link.stop_due(step)
        if not stopping and step % self._every:
            handle = SaveHandle(None)
            handle._outcome.set_result(None)
            return handle
        handle = SaveHandle(step)
        with link.section("save"):
            try:
                handle._outcome.set_result(self._save(step, state, per_rank))
            except SaveFailed as error:
                if Ranks().rank == 0:
                    link.emit("save_failed", {"step": step, "reason": str(error)})
                # A job that is to stop must not do so as if its state were safe.
                if stopping or self._on_failure == "raise":
                    raise
                _logger.warning("%s", error)
                handle._outcome.set_exception(error)
        if stopping:
            link.leave(step)
        return handle

    def restore(self, state: MutableMapping[str, Any], *, per_rank: MutableMapping[str, Any] | None = None) -> int:
        """Restore the newest checkpoint that verifies, and the random generators of each rank.

        Collective where torch.distributed is initialised. State dicts and tensors are filled in place, keys
        they lack are added; objects get `load_state_dict`; plain values are replaced. Entries of the
        checkpoint that `state` does not name at its top level are left out.

        Args:
            state: as for `save`, but not a callable.
            per_rank: as for `save`. Only where as many ranks restore as saved; else see `per_rank_states`.

        Returns:
            The step, 0 where there is no checkpoint.

        Raises:
            NoVerifiedCheckpoint: there are checkpoints, and none verifies.
            StateMismatch: the state does not fit; nothing was changed.
            CheckpointError: something in it could not be read.
        """
        ranks = Ranks()
        link = job_link()
        with link.section("restore"):
            began_s = self._clock.monotonic_s()
            checkpoint, passed_over = open_newest(ranks, self._folder)
            self._damaged.update(item.path for item in passed_over)
            if checkpoint is None:
                return 0
            restore_into(ranks, checkpoint, state, per_rank)
            restore_s = self._clock.monotonic_s() - began_s
        if ranks.rank == 0:
            link.emit(
                "restored",
                {
                    "step": checkpoint.manifest.step,
                    "path": str(checkpoint.path),
                    "restore_s": restore_s,
                    "passed_over": [asdict(item) | {"path": str(item.path)} for item in passed_over],
                },
            )
        return checkpoint.manifest.step

    def per_rank_states(self, step: int) -> list[dict[str, Any]]:
        """What each rank had saved under `per_rank` at `step`, in the order of ranks. Not collective.

        To share it out among another number of ranks.

        Raises:
            NotFound: there is no checkpoint of `step`.
            CheckpointError: it does not verify.
        """
        path = step_path(self._folder, step)
        if not path.is_dir():
            raise NotFound(f"There is no checkpoint of step {step} in {self._folder}. See `holdfast checkpoint ls`.")
        info = verify(path)
        if info.state != "verified":
            raise CheckpointError(f"The checkpoint of step {step} is damaged: {info.reason}. Take another step.")
        return per_rank_states(open_checkpoint(path, read_manifest(path, step=step)))

    def wait(self) -> None:
        """Wait for every save in flight. Saves are durable when `save` returns, so there is none."""

    def close(self) -> None:
        """Wait for every save in flight; none may follow. Closing twice does no harm."""
        self.wait()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _save(self, step: int, state: State, per_rank: Mapping[str, Any] | None) -> Path:
        ranks = Ranks()
        began_s = self._clock.monotonic_s()
        if ranks.rank == 0 and not self._leftovers_removed:
            remove_leftovers(self._folder)
            self._leftovers_removed = True
        saved = save_checkpoint(
            ranks, self._folder, step, state, per_rank, now_s=self._clock.now_s(), damaged=self._damaged
        )
        self._damaged.discard(saved.path)
        if ranks.rank == 0:
            self._delete_superfluous(saved)
        stall_s = max(ranks.together(lambda: self._clock.monotonic_s() - began_s))
        if ranks.rank == 0:
            job_link().emit(
                "checkpoint",
                {"step": step, "path": str(saved.path), "size_bytes": saved.size_bytes, "stall_s": stall_s},
            )
        return saved.path

    def _delete_superfluous(self, saved: Saved) -> None:
        try:
            found = scan(self._folder)
        except (OSError, HoldfastError) as error:  # the save itself is durable
            _logger.warning("Old checkpoints were not deleted: %s", error)
            return
        for path in superfluous(found, committed=saved.path, damaged=self._damaged, keep=self._keep):
            discard(path)


def _check_whole(name: str, value: Any, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise BadUse(f"{name} is {value!r}; allowed is a whole number from {least} on.")


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # mode bits do not tell of a read-only mount, nor stop root
    except OSError as error:
        raise BadUse(
            f"The checkpoint folder {folder} cannot be written ({error.strerror or error}). "
            "Make it writable, or give Checkpointer another one."
        ) from error
