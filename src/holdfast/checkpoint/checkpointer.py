"""The user's side: when a save is due, what is told to whom, and what a failure does."""

import atexit
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from holdfast.checkpoint.catalog import verify
from holdfast.checkpoint.engine import Busy, Engine, Options, Saved
from holdfast.checkpoint.folders import step_path
from holdfast.checkpoint.manifest import ManifestError, read_manifest
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.restore import open_checkpoint, per_rank_states, restore_newest
from holdfast.checkpoint.retention import Retention
from holdfast.core.clock import SystemClock
from holdfast.core.errors import BadUse, CheckpointError, HoldfastError, NotFound, SaveFailed
from holdfast.core.link import job_link

_logger = logging.getLogger("holdfast")
State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class SaveHandle:
    """One call of `Checkpointer.save`. `step` is the step it saves, None where nothing was due."""

    def __init__(self, step: int | None, unseen: list[HoldfastError]) -> None:
        self.step = step
        self._unseen = unseen
        self._outcome: Future[Path | None] = Future()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._outcome.done()

    def result(self, timeout_s: float | None = None) -> Path | None:
        """Wait until the checkpoint is durable; its folder, or None where nothing was due or the save was skipped.

        Raises:
            SaveFailed: it is not durable.
            TimeoutError: it has not ended within `timeout_s` seconds.
        """
        try:
            return self._outcome.result(timeout_s)
        except HoldfastError as error:
            if error in self._unseen:
                self._unseen.remove(error)
            raise


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
        keep: int | Retention | None = 3,
        on_failure: Literal["raise", "warn", "retry"] = "raise",
        attest: bool = True,
        when_busy: Busy = "wait",
        timeout_s: float = 600.0,
        max_write_mib_s: float | None = None,
    ) -> None:
        """Check the folder, which is made if need be.

        Args:
            dir: the folder of the checkpoints, shared by all ranks.
            every: save at steps divisible by it; `save` does nothing at others.
            keep: how many whole checkpoints stay, or which; None: all.
            on_failure: of a save that turns out not to be durable. `raise`: the next call raises SaveFailed. `warn`:
                it is logged, training goes on. `retry`: likewise, and the next call of `save` saves, whatever its step.
            attest: digest every tensor when `save` is called, and commit only what has these digests.
            when_busy: when the two saves before it are not durable yet. `wait`: the optimizer's step waits for the
                first. `skip`: the save is left out, on all ranks.
            timeout_s: after so long without a byte written, or of waiting for other ranks, a save has failed.
            max_write_mib_s: a limit to the rate at which each rank writes; None: none.

        Raises:
            BadUse: an argument is not allowed, or `dir` cannot be written.
        """
        _check_whole("every", every, least=1)
        if keep is not None and not isinstance(keep, Retention):
            _check_whole("keep", keep, least=1)
            keep = Retention(last=keep)
        _check_one_of("on_failure", on_failure, ("raise", "warn", "retry"))
        _check_one_of("when_busy", when_busy, ("wait", "skip"))
        _check_above_zero("timeout_s", timeout_s)
        if max_write_mib_s is not None:
            _check_above_zero("max_write_mib_s", max_write_mib_s)
        self._folder = Path(dir).absolute()
        self._every = every
        self._keep = keep or Retention()
        self._on_failure = on_failure
        self._clock = SystemClock()
        self._closed = False
        self._damaged: set[Path] = set()
        self._unseen: list[HoldfastError] = []
        self._retry_due = False
        self._pid = os.getpid()
        _make_writable(self._folder)
        atexit.register(self._at_exit)
        self._engine = Engine(
            self._folder,
            Options(
                attest=attest,
                when_busy=when_busy,
                timeout_s=timeout_s,
                max_write_bytes_s=None if max_write_mib_s is None else max_write_mib_s * 2**20,
            ),
        )

    def save(self, step: int, state: State, *, per_rank: Mapping[str, Any] | None = None) -> SaveHandle:
        """Save, if `step` is due or the job was asked to stop; in the latter case the process ends here.

        Collective where torch.distributed is initialised. It returns while the state is still being copied: an
        optimizer's step waits for that by itself, and whoever changes the state otherwise calls `before_update`
        first. The first call returns once the state is copied. Python, NumPy and torch random generators of each rank
        are saved by themselves.

        Args:
            step: steps completed.
            state: a dict of state dicts (nested dicts and lists of tensors and plain values), tensors, plain
                values and objects with `state_dict` and `load_state_dict`; or a callable that returns it,
                which is not called when nothing is due. What is the same on all ranks is written once.
            per_rank: the like for what differs by rank, such as the position in the data.

        Returns:
            What tells when the checkpoint is durable.

        Raises:
            BadUse: closed, or something in the state cannot be saved; the message names it.
            SaveFailed: an earlier save is not durable and `on_failure` is `raise`, or this one is not and the job is
                to stop.
        """
        if self._closed:
            raise BadUse("This Checkpointer is closed. Save before close(), or make another.")
        _check_whole("step", step, least=0)
        link = job_link()
        stopping = link.stop_due(step)
        if not stopping:  # else the state is to be safe first
            self._raise_unseen()
        handle = SaveHandle(None, self._unseen)
        if not stopping and step % self._every and not self._retry_due:
            handle._outcome.set_result(None)
            return handle
        handle.step = step
        self._retry_due = False
        with link.section("save"):
            self._begin(handle, step, state, per_rank, must=stopping)
            if stopping or (handle.done() and self._on_failure == "raise"):
                handle.result()
        if stopping:
            link.leave(step)
        return handle

    def before_update(self) -> None:
        """Wait until what the last save saves is copied. Optimizers of torch call it by themselves."""
        with job_link().section("save"):
            self._engine.before_update()

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
        self.wait()
        ranks = Ranks()
        link = job_link()
        with link.section("restore"):
            began_s = self._clock.monotonic_s()
            checkpoint, passed_over = restore_newest(ranks, self._folder, state, per_rank)
            self._damaged.update(item.path for item in passed_over)
            if checkpoint is None:
                return 0
            restore_s = self._clock.monotonic_s() - began_s
        if ranks.rank == 0:
            link.emit(
                "restored",
                {
                    "step": checkpoint.manifest.step,
                    "path": str(checkpoint.path),
                    "restore_s": restore_s,
                    "tier": "disk",
                    "bytes_read": checkpoint.files.bytes_read,
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
        """Wait for every save in flight.

        Raises:
            SaveFailed: one is not durable, and `on_failure` is `raise`.
        """
        if self._engine.is_saving:
            with job_link().section("save"):
                self._engine.wait()
        self._raise_unseen()

    def close(self) -> None:
        """Wait for every save in flight; none may follow. Closing twice does no harm.

        Raises:
            SaveFailed: one is not durable, and `on_failure` is `raise`.
        """
        if not self._closed:
            self._closed = True
            atexit.unregister(self._at_exit)
            with job_link().section("save"):
                self._engine.close()
            self._raise_unseen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except HoldfastError as failed:
            if error is None:
                raise
            _logger.warning("%s", failed)  # what ends the block already matters more

    def _at_exit(self) -> None:
        """A script that ends without closing it has its last save, or is told."""
        if os.getpid() != self._pid:  # forked: the saves are another process's
            return
        try:
            self.close()
        except HoldfastError as error:
            _logger.error("%s", error)  # noqa: TRY400 - a sentence, not a traceback

    def _begin(
        self, handle: SaveHandle, step: int, state: State, per_rank: Mapping[str, Any] | None, *, must: bool
    ) -> None:
        try:
            outcome = self._engine.save(
                step, state, per_rank, now_s=self._clock.now_s(), keep=self._keep, damaged=self._damaged, must=must
            )
        except SaveFailed as error:
            outcome = Future()
            outcome.set_exception(error)
        outcome.add_done_callback(lambda done: self._ended(handle, done))

    def _ended(self, handle: SaveHandle, done: "Future[Saved | None]") -> None:
        """Take note of how a save ended; whoever listens must not keep the one who waits from hearing it."""
        error = done.exception()
        saved = done.result() if error is None else None
        if isinstance(error, HoldfastError):
            self._retry_due = self._on_failure == "retry"
            if self._on_failure == "raise":
                self._unseen.append(error)
            else:
                _logger.warning("%s", error)
        try:
            if saved is not None:
                self._damaged.discard(saved.path)
                self._tell(saved)
            elif isinstance(error, SaveFailed) and Ranks().rank == 0:
                job_link().emit("save_failed", {"step": handle.step, "reason": str(error)})
        except Exception:
            _logger.exception("Nobody was told how the save of step %s ended.", handle.step)
        finally:
            if error is None:
                handle._outcome.set_result(None if saved is None else saved.path)
            else:
                handle._outcome.set_exception(error)

    def _tell(self, saved: Saved) -> None:
        if Ranks().rank != 0:
            return
        try:
            size_bytes = read_manifest(saved.path, step=saved.step).size_bytes
        except (OSError, ManifestError):  # deleted already: a later one is durable too
            size_bytes = saved.size_bytes
        job_link().emit(
            "checkpoint",
            {
                "step": saved.step,
                "path": str(saved.path),
                "size_bytes": size_bytes,
                "stall_s": saved.call_s + saved.fence_s,
                "call_s": saved.call_s,
                "fence_s": saved.fence_s,
                "durable_s": saved.durable_s,
                "write_gb_per_s": saved.size_bytes / max(saved.write_s, 1e-9) / 1e9,
                "tier": "disk",
                "attested": saved.attested,
            },
        )

    def _raise_unseen(self) -> None:
        if self._unseen:
            raise self._unseen.pop(0)


def _check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadUse(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed[:-1]))} and {allowed[-1]!r}.")


def _check_above_zero(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not value > 0:
        raise BadUse(f"{name} is {value!r}; allowed is a number above 0.")


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
