"""Define `Checkpointer`, the class that users call to save and restore the state of a job."""

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self

from holdfast.checkpoint.catalog.catalog import CheckpointInfo, scan, verify
from holdfast.checkpoint.catalog.retention import Best, Retention, best_first
from holdfast.checkpoint.catalog.set_aside import is_of_others
from holdfast.checkpoint.catalog.writer_lease import Identity
from holdfast.checkpoint.closing import Work, close_at_exit, close_when_dropped, is_good_order
from holdfast.checkpoint.config import (
    Busy,
    CheckpointerConfig,
    OnFailure,
    Replicas,
    check_there,
    checkpoint_folder,
    make_writable,
)
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.one_folder import FolderPlace, check_alike
from holdfast.checkpoint.distributed.rank_agreement import Votes
from holdfast.checkpoint.format.manifest import Save, read_manifest
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.restore.load import Terms, per_rank_states
from holdfast.checkpoint.restore.open import open_checkpoint
from holdfast.checkpoint.restore.select import RestoredStep, restore_newest, restored_event
from holdfast.checkpoint.save.engine import Engine
from holdfast.checkpoint.save.handle import NotPicklable, SaveHandle
from holdfast.checkpoint.save.results import Outcomes
from holdfast.checkpoint.schedule.data_workers import spare_workers
from holdfast.checkpoint.schedule.interval import Every, make_interval
from holdfast.checkpoint.schedule.sigterm import Sigterm
from holdfast.checkpoint.state.capture import check_named
from holdfast.checkpoint.state.metrics import check_metrics
from holdfast.checkpoint.storage.uploader import FetchChoice, Pusher, fetch_together, has_any
from holdfast.core.arguments import check_whole
from holdfast.core.clock import SystemClock
from holdfast.core.errors import (
    BadUse,
    CheckpointError,
    HoldfastError,
    NotFound,
    SaveFailed,
    StateMismatch,
)
from holdfast.core.link import ENV_FRESH, Unsupervised, connected_link, job_link, numbers_of
from holdfast.core.phases import note_phase
from holdfast.core.system_limits import naming_limits

if TYPE_CHECKING:
    import torch.distributed as dist

    from holdfast.checkpoint.state.renaming import Rename

_logger = logging.getLogger("holdfast")
_WAYS_OUT: Final = (
    "Restore into the state that was saved there, or give this job another folder, or set the checkpoints aside with "
    "fresh=True."
)
State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class Checkpointer(NotPicklable):
    """Save and restore the state of a training job.

    Each checkpoint is a folder `step-NUMBER` that stock `torch.distributed.checkpoint.load` reads,
    with a manifest of checksums. A crash at any instant leaves every earlier checkpoint restorable.

    Use a Checkpointer as a context manager, or call `close`.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],  # noqa: A002 - the word a user would look for
        *,
        every: Every = 1,
        keep: int | Retention | None = 3,
        on_failure: OnFailure = "retry",
        attest: bool = True,
        when_busy: Busy = "wait",
        timeout_s: float = 600.0,
        max_write_mib_s: float | None = None,
        max_memory_gib: float | None = None,
        max_device_memory_gib: float | None = None,
        sigterm_grace_s: float | None = None,
        keep_in_memory_s: float | None = 600.0,
        peer_memory: bool = False,
        push_to: str | None = None,
        keep_pushed: int | None = None,
        read_only: bool = False,
        replicas: Replicas = "spread",
        process_group: "dist.ProcessGroup | None" = None,
        run: str | None = None,
        fresh: bool = False,
    ) -> None:
        """Check the options, and make the folder if it is missing.

        `dir` is the folder of the checkpoints, shared by all ranks; `~` and variables (`$NAME`) are
        expanded. The keyword arguments are the fields of `holdfast.checkpoint.CheckpointerConfig`,
        which documents each.

        Raises:
            BadUse: an argument is not allowed, this rank is not in `process_group`, or `dir` cannot
                be written.
            NotFound: `push_to` is a folder that does not exist, or `dir` does not exist with
                `read_only`.
        """
        self._process_group = process_group
        _ = self._ranks  # raises BadUse if this rank is not in the group
        config = self._config = CheckpointerConfig(
            every=every,
            keep=keep,
            on_failure=on_failure,
            attest=attest,
            when_busy=when_busy,
            timeout_s=timeout_s,
            max_write_mib_s=max_write_mib_s,
            max_memory_gib=max_memory_gib,
            max_device_memory_gib=max_device_memory_gib,
            sigterm_grace_s=sigterm_grace_s,
            keep_in_memory_s=keep_in_memory_s,
            peer_memory=peer_memory,
            push_to=push_to,
            keep_pushed=keep_pushed,
            read_only=read_only,
            replicas=replicas,
            process_group=process_group,
            run=run,
            fresh=fresh,
        )
        self._clock = SystemClock()
        self._interval = make_interval(
            config.every, self._clock, devices=lambda: Ranks(process_group).world_size
        )
        self._folder = checkpoint_folder(dir)
        self._identity = Identity.of_this_process(run)
        self._fresh = not read_only and (fresh or os.environ.get(ENV_FRESH) == "1")
        self._outcomes = Outcomes(
            self._interval, on_failure=on_failure, process_group=process_group
        )
        self._last = SaveHandle(None, [])
        self._votes = Votes(process_group=process_group)
        self._must_vote = self._interval.by_clock or sigterm_grace_s is not None
        (check_there if read_only else make_writable)(self._folder)
        self._pusher = (
            None
            if push_to is None
            else Pusher(self._folder, push_to, keep=config.keep_pushed, on_message=_emit_push)
        )
        self._engine = Engine(self._folder, config)
        self._sigterm: Sigterm | None = None
        link = job_link() if read_only else connected_link()
        if sigterm_grace_s is not None and isinstance(link, Unsupervised):
            self._sigterm = Sigterm(
                sigterm_grace_s, functools.partial(self._outcomes.newest_known, self._folder)
            )
            self._sigterm.install()
        if not isinstance(link, Unsupervised):
            spare_workers()
        self._work = Work(
            folder=self._folder,
            identity=self._identity,
            is_fresh=self._fresh,
            timeout_s=timeout_s,
            engine=self._engine,
            votes=self._votes,
            outcomes=self._outcomes,
            pusher=self._pusher,
            sigterm=self._sigterm,
        )
        self._engine.hold = self._work.hold
        self._at_exit = close_at_exit(self._work)
        close_when_dropped(self, self._work, self._at_exit)

    def save(
        self,
        step: int,
        state: State,
        *,
        per_rank: Mapping[str, Any] | None = None,
        force: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Save if `step` is due or a stop is requested. After a save for a stop, the process ends.

        Call `save` after each step; the call is collective if torch.distributed is initialized. The
        call returns while the state is still being copied. An optimizer's step waits for the copy;
        call `before_update` before any other change of the state. Until an optimizer's step has
        waited for the first time, each call returns after the copy. The random generators of
        Python, NumPy and torch are saved for each rank.

        Args:
            step: the number of completed steps; any whole number, also of NumPy or in a tensor.
            state: a dict of state dicts (nested dicts and lists of tensors and plain values),
                tensors, plain values, and objects with `state_dict` and `load_state_dict`; or a
                callable that returns this dict, called only if a save is due. Entries that all
                ranks share are written once.
            per_rank: a dict like `state` of entries that differ by rank, such as the data position.
            force: save regardless of `every` and `when_busy`, as at the end of training; the same
                on all ranks. For the step saved or restored last, wait for that save instead,
                unless it failed.
            metrics: rank 0's numbers by name to record on the checkpoint, for `keep`, `best_step`
                and `prune --best`. Another thread reads a tensor of one element later; do not
                change the tensor in place. None: the numbers passed to `run.step` for this step.

        Returns:
            A handle that reports when the checkpoint is durable.

        Raises:
            BadUse: the Checkpointer is closed, read-only, or made before this process was forked;
                or an entry of `state` or `metrics` cannot be saved, and the message names the
                entry.
            SaveFailed: this save failed, and it was forced or was for a stop; or an earlier save
                failed, and that save was forced or `on_failure` is `raise`.
        """
        began_ns = time.monotonic_ns()
        self._work.check_not_taken_over()
        if self._work.is_closed:
            raise BadUse("This Checkpointer is closed. Save before close(), or make another.")
        if self._config.read_only:
            raise BadUse(
                "This Checkpointer is read_only. Save with another one, into a folder of this run."
            )
        step = check_whole("step", step, least=0)
        numbers = numbers_of(step) if metrics is None else check_metrics(metrics)
        self._check_here()
        self._work.pid = os.getpid()
        self._engine.meeting.called(step)
        self._outcomes.lost.step(self._clock.monotonic_s(), fence_s=self._engine.fence.waited_s)
        try:
            return self._save(step, state, per_rank, numbers, force=force)
        finally:
            in_flight, fence_s = self._engine.thread.in_flight, self._engine.fence.waited_s
            self._outcomes.lost.resume(
                self._clock.monotonic_s(), fence_s=fence_s, in_flight=in_flight
            )
            note_phase("checkpoint_stall", began_ns)

    def before_update(self) -> None:
        """Wait until the last save is copied; torch's optimizers call this method automatically."""
        self._engine.fence.before_update()

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        per_rank: MutableMapping[str, Any] | None = None,
        step: int | None = None,
        strict: bool = True,
        rng: bool = True,
        rename: "Rename | None" = None,
    ) -> int:
        """Restore the newest undamaged checkpoint, and the random generators of each rank.

        The checkpoint is read from memory if the nodes still hold the parts of all ranks,
        otherwise from disk. The call is collective if torch.distributed is initialized.

        - State dicts and tensors are filled in place, and missing keys are added.
        - The `load_state_dict` of an object is called. An implementation other than PyTorch's
          receives the state exactly as saved, even if the object's present state has other names.
        - Plain values are replaced.
        - An optimizer's state is assigned to the parameters of the same names.
        - Entries that `state` does not name at its top level are left out.

        Args:
            state: as for `save`, but not a callable.
            per_rank: as for `save`; for another number of ranks see `per_rank_states`.
            step: the step to restore; None for the newest that verifies.
            strict: whether state and checkpoint must have the same names and types. If False, names
                in only one of them are ignored, and the returned step lists them as `missing` and
                `unexpected`. Floating-point tensors are converted to the state's type. Shapes must
                match.
            rng: whether to restore the random generators.
            rename: for a checkpoint with other tensor names: a dict from its names to those of the
                state, or a name map of `holdfast checkpoint export`, also as a file. A name may
                begin with its entry's name or leave it out.

        Returns:
            The step, 0 if there is no checkpoint; a `RestoredStep` if `strict` is False.

        Raises:
            BadUse: `state` has no named entries, `rename` is not a name map or has names that the
                checkpoint lacks, or NumPy's global generator is of another kind than at the save.
            NotFound: there is no checkpoint of `step`.
            NoVerifiedCheckpoint: there are checkpoints, here or in storage, and none verifies.
            StateMismatch: the checkpoint does not fit the state, which is unchanged. If a newer
                checkpoint was partly read before its damage was found, tensors may hold parts of
                it, and the message names its step.
            CheckpointError: a part of the checkpoint could not be read.
        """
        self._check_here()
        self._await_saves()
        self._outcomes.raise_unseen()
        self._outcomes.unmade.clear()  # these steps are trained again
        ranks, link = self._ranks, job_link()
        if step is not None:
            step = check_whole("step", step, least=0)
        with link.section("restore"), naming_limits("The state was not restored"):
            self._engine.meeting.await_all("restore", step)
            terms = Terms(strict=strict, rng=rng)

            def check() -> FolderPlace:
                terms.rename_by(rename)
                # Check the state even if there is no checkpoint. Without this check, a wrong state
                # would be found only at the restore after the first failure.
                for part in (state, {} if per_rank is None else per_rank):
                    check_named(part)
                return FolderPlace.of(self._folder)

            check_alike(ranks.together(check))
            began_s = self._clock.monotonic_s()
            from_storage = None
            if not self._config.read_only:
                self._work.hold(ranks)
            if self._pusher is not None and (self._identity.run or not self._fresh):
                self._work.pid, wanted = (
                    os.getpid(),
                    FetchChoice(self._identity.run, self._fresh, newer=step is None),
                )
                from_storage = fetch_together(ranks, self._pusher.remote, self._folder, wanted)
            try:
                checkpoint, passed_over = restore_newest(
                    *(ranks, self._folder, state, per_rank, from_storage),
                    from_memory=not self._config.read_only,
                    step=step,
                    terms=terms,
                )
            except StateMismatch as error:
                raise StateMismatch(f"{error} {_WAYS_OUT}") from error
            self._outcomes.damaged.update(item.path for item in passed_over)
            if checkpoint is None:
                return 0 if strict else RestoredStep(0)
            manifest = checkpoint.manifest
            self._engine.descends_from(Save(step=manifest.step, save=manifest.save))
            self._outcomes.newest, self._last = checkpoint.path, SaveHandle(manifest.step, [])
            self._last.complete(checkpoint.path)
            self._interval.resumed(manifest.step)
            restore_s = self._clock.monotonic_s() - began_s
        if ranks.rank == 0:
            saved_at = datetime.fromtimestamp(manifest.created_at_s, UTC).strftime(
                "%Y-%m-%d %H:%M:%S UTC"
            )
            of_run = f" of run {manifest.run!r}" if manifest.run else ""
            _logger.info(
                "Restored step %d%s, saved at %s, from %s.",
                manifest.step,
                of_run,
                saved_at,
                checkpoint.path,
            )
            if self._pusher is not None:
                self._pusher.start()  # push the newest checkpoint even if no save follows
            link.emit("restored", restored_event(checkpoint, passed_over, restore_s=restore_s))
        if strict:
            return manifest.step
        restored = RestoredStep(manifest.step)
        restored.missing, restored.unexpected = terms.missing, terms.unexpected
        return restored

    def all_steps(self) -> list[int]:
        """Return the steps of the whole checkpoints in `dir`, in order. Not collective.

        No file content is checked, and checkpoints only in object storage are not included.
        """
        return sorted({info.step for info in self._whole()})

    def latest_step(self) -> int | None:
        """Return the last of `all_steps`, or None if there is none. Not collective."""
        return max(self.all_steps(), default=None)

    def best_step(self, metric: str, mode: Literal["min", "max"] = "min") -> int | None:
        """Return the step with the least or largest value of `metric`; None if no step has one.

        Of two steps with equal values, the newer is returned. `save`, `run.step` and evaluations
        record metrics. Not collective.

        Raises:
            BadUse: `metric` is empty, or `mode` is neither `min` nor `max`.
        """
        ranked = best_first(self._whole(), Best(metric=metric, count=1, mode=mode))
        return ranked[0].step if ranked else None

    def _whole(self) -> list[CheckpointInfo]:
        found = (info for info in scan(self._folder) if not info.abandoned)
        return [info for info in found if info.state == "written" and info.marks.damaged is None]

    def has_any(self) -> bool:
        """Return True if `dir` or `push_to` has a checkpoint, even a damaged one. Not collective.

        Raises:
            NotFound, StorageFailed: `dir` has none, and storage cannot be reached.
        """
        if self._fresh and is_of_others(self._folder, self._identity):  # a save moves these aside
            return False
        return bool(scan(self._folder)) or has_any(
            self._pusher, FetchChoice(self._identity.run, self._fresh)
        )

    def per_rank_states(self, step: int) -> list[dict[str, Any]]:
        """Return the `per_rank` entries of all ranks at `step`, by rank. Not collective.

        Raises:
            NotFound: there is no checkpoint of `step`.
            CheckpointError: the checkpoint does not verify.
        """
        step = check_whole("step", step, least=0)
        path = step_path(self._folder, step)
        if not path.is_dir():
            raise NotFound(
                f"There is no checkpoint of step {step} in {self._folder}. See `holdfast checkpoint ls`."
            )
        info = verify(path)
        if info.state != "verified":
            raise CheckpointError(
                f"The checkpoint of step {step} is damaged: {info.reason}. Take another step."
            )
        return per_rank_states(open_checkpoint(path, read_manifest(path, step=step)))

    def wait(self) -> None:
        """Wait for every save in flight; in a forked process, return at once.

        Raises:
            SaveFailed: the last save failed; or an earlier save failed, and `on_failure` is
                `raise`.
        """
        self._await_saves()
        self._outcomes.raise_unseen()
        self._outcomes.raise_unmade()

    def _await_saves(self) -> None:
        if self._engine.thread.is_busy and not self._work.is_another_s:
            with job_link().section("save"):
                self._engine.thread.wait()

    def close(self) -> None:
        """Wait for every save in flight, and close; no save may follow. A second call does nothing.

        Raises:
            SaveFailed: the last save failed; or an earlier save failed, and `on_failure` is
                `raise`.
        """
        self._work.close(in_good_order=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._work.close(in_good_order=is_good_order(error))
        except HoldfastError as failed:
            if error is None:
                raise
            _logger.warning("%s", failed)  # the error that ends the block matters more

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self._process_group)

    def _check_here(self) -> None:
        if self._work.is_another_s:
            raise BadUse(
                "This Checkpointer belongs to the parent process. Create another one in this process."
            )

    def _save(
        self,
        step: int,
        state: State,
        per_rank: Mapping[str, Any] | None,
        metrics: Mapping[str, Any],
        *,
        force: bool,
    ) -> SaveHandle:
        is_last, is_due = self._vote(step)
        if self._last.step is not None and step < self._last.step:
            self._last = SaveHandle(None, [])  # training went back, so this step is a new one
        saved = self._saved_as(step) if force else None
        if force:
            is_due = saved is None
        link = job_link()
        stopping = link.stop_due(step)
        if not stopping and not is_last:  # an earlier failure must not prevent the last save
            self._outcomes.raise_unseen()
        handle = SaveHandle(None, self._outcomes.unseen, self._outcomes.unmade)
        if not stopping and not is_last and not is_due:
            handle.complete(saved)
            return handle
        handle.step = step
        with link.section("save"):
            if is_last and not stopping:
                self._save_and_leave(handle, step, state, per_rank, metrics)
            self._begin(handle, step, state, per_rank, metrics, must=stopping or force)
            raises = self._config.on_failure == "raise" or (
                force and self._config.on_failure == "retry"
            )
            if stopping or (handle.done() and raises):
                handle.result()
        if stopping:
            link.leave(step)
        return handle

    def _saved_as(self, step: int) -> Path | None:
        """Return the folder of `step` if it is the step saved (once durable) or restored last."""
        last = self._last

        def durable() -> Path | None:
            return last.durable_path() if last.step == step else None

        with job_link().section("save"):
            self._engine.meeting.await_all("save", step)
            found = self._ranks.together(durable)
        return None if None in found else found[0]

    def _vote(self, step: int) -> tuple[bool, bool]:
        """Return whether all ranks save at `step` and then exit, and whether they save at all."""
        by_step = self._interval.falls_on(step)
        by_step |= self._outcomes.retry.begin_call()
        if not self._must_vote:
            return False, by_step
        if not self._votes.has_begun:
            with job_link().section("save"):
                self._engine.meeting.await_all("save", step)
        got_sigterm = self._sigterm is not None and self._sigterm.received
        has_passed = self._interval.has_passed() and self._ranks.rank == 0
        try:
            is_last, has_passed = self._votes.agree((got_sigterm, has_passed))
        except CheckpointError as error:
            if self._sigterm is not None and got_sigterm:
                newest = self._outcomes.newest_known(self._folder)
                _logger.error("SIGTERM: step %d is not saved: %s %s", step, error, newest)  # noqa: TRY400
                self._sigterm.leave()
            raise
        return is_last, by_step or has_passed

    def _save_and_leave(
        self,
        handle: SaveHandle,
        step: int,
        state: State,
        per_rank: Mapping[str, Any] | None,
        metrics: Mapping[str, Any],
    ) -> NoReturn:
        assert self._sigterm is not None, "all ranks have been given the same arguments"
        self._sigterm.begin()  # the signal may have come to another rank
        try:
            self._begin(handle, step, state, per_rank, metrics, must=True)
            _logger.warning("SIGTERM: step %d is saved, in %s.", step, handle.result())
        except Exception as error:  # the process ends after any error
            _logger.error("SIGTERM: %s %s", error, self._outcomes.newest_known(self._folder))  # noqa: TRY400
        self._sigterm.leave()

    def _begin(
        self,
        handle: SaveHandle,
        step: int,
        state: State,
        per_rank: Mapping[str, Any] | None,
        metrics: Mapping[str, Any],
        *,
        must: bool,
    ) -> None:
        self._work.begin_writing()
        self._interval.began()
        if self._pusher is not None and self._ranks.rank == 0:
            self._pusher.start()
        try:
            outcome = self._engine.save(
                step,
                state,
                per_rank,
                now_s=self._clock.now_s(),
                keep=self._config.retention,
                damaged=self._outcomes.damaged,
                must=must,
                metrics=metrics,
            )
        except SaveFailed as error:
            outcome = Future()
            outcome.set_exception(error)
        self._last = handle
        self._outcomes.follow(outcome, handle, save=self._engine.last_save, must=must)


def _emit_push(report: Mapping[str, Any]) -> None:
    job_link().emit("push_failed" if "failed" in report else "pushed", dict(report))
