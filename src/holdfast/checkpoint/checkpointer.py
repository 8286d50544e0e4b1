"""The user's side: what is asked, when a save is due, and how it all ends."""

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from holdfast.checkpoint.arguments import (
    check_above_zero,
    check_from_zero,
    check_one_of,
    check_there,
    check_whole,
    make_writable,
)
from holdfast.checkpoint.catalog import scan, verify
from holdfast.checkpoint.contents import check_named
from holdfast.checkpoint.data_workers import spare_workers
from holdfast.checkpoint.engine import Engine
from holdfast.checkpoint.filling import per_rank_states
from holdfast.checkpoint.folders import step_path
from holdfast.checkpoint.interval import Every, make_interval
from holdfast.checkpoint.manifest import read_manifest
from holdfast.checkpoint.opening import open_checkpoint
from holdfast.checkpoint.outcomes import OnFailure, Outcomes
from holdfast.checkpoint.pushing import Pusher, fetch_instead, fetch_newer
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.restore import restore_newest
from holdfast.checkpoint.retention import Retention
from holdfast.checkpoint.save_handle import SaveHandle
from holdfast.checkpoint.shape import Busy, Options
from holdfast.checkpoint.sigterm import EXIT_CODE, Sigterm
from holdfast.checkpoint.votes import Votes
from holdfast.core.clock import SystemClock
from holdfast.core.errors import BadUse, CheckpointError, HoldfastError, NotFound, SaveFailed
from holdfast.core.link import Unsupervised, connected_link, job_link

_logger = logging.getLogger("holdfast")
State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


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
        every: Every = 1,
        keep: int | Retention | None = 3,
        on_failure: OnFailure = "raise",
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
    ) -> None:
        """Check the folder, which is made if need be.

        Args:
            dir: the folder of the checkpoints, shared by all ranks.
            every: when a save is due; `save` does nothing at other steps. A number: at steps divisible by it. A
                `datetime.timedelta`: so long after the last save began, by rank 0's clock. `auto`: as often as is
                worth it, from what saves cost and how often the job fails (`checkpoint.interval` has the formula).
            keep: how many whole checkpoints stay, or which; None: all.
            on_failure: of a save that turns out not to be durable. `raise`: the next call raises SaveFailed. `warn`:
                it is logged, training goes on. `retry`: likewise, and the next call of `save` saves, whatever its step.
            attest: digest every tensor when `save` is called, and commit only what has these digests.
            when_busy: when the two saves before it are not durable yet. `wait`: the optimizer's step waits for the
                first. `skip`: the save is left out, on all ranks. `replace`: of the two, the one whose writing has not
                begun is given up for this one.
            timeout_s: after so long without a byte written, or of waiting for other ranks, a save has failed.
            max_write_mib_s: a limit to the rate at which each rank writes; None: none.
            max_memory_gib: a limit to the memory that this rank's snapshots take. Two are kept, or one where it is too
                little for two; a save for which it is too little for one fails. None: none but the node's memory.
            max_device_memory_gib: a limit to the memory of a GPU that is taken for what the copy to the host has no
                time for before the optimizer's step; 0: that step waits for it. None: what is free, less a reserve.
            sigterm_grace_s: on SIGTERM to any rank the next call of `save` saves on all of them, waits until that is
                durable, and ends the process with exit code 143; so does the end of so many seconds, whatever is in
                the way. None: SIGTERM is left alone. `holdfast run` stops its ranks in a way of its own.
            keep_in_memory_s: for so long after this process has died, or a `with` block of this object was left by an
                exception, the snapshot that became durable last stays in memory, at most until `restore` or a first
                save of the process that takes its place. None: it does not.
            peer_memory: whether each durable snapshot is sent to a rank on another node, in the background, which holds
                the newest in its memory, for a rank that comes back on a new node. It takes as much memory again as
                one rank's snapshot, twice while one arrives; `max_memory_gib` counts it.
            push_to: object storage that the newest checkpoint is pushed to, by a process of its own, such as
                `s3://BUCKET/RUN`; `restore` fetches from there what is newer, unless it was pushed from `dir` and taken
                away there, or whole where it is damaged in `dir`.
            keep_pushed: how many stay there, of those up to the step that was pushed last; None: all.
            read_only: nothing is saved, only restored, from a run that may go on: `dir` need not be writable, and what
                that run left in memory stays there for it.

        Raises:
            BadUse: an argument is not allowed, or `dir` cannot be written.
            NotFound: `push_to` is a folder, and not there, or `dir` is not, which is `read_only`.
        """
        self._clock = SystemClock()
        self._interval = make_interval(every, self._clock, devices=lambda: Ranks().world_size)
        if keep is not None and not isinstance(keep, Retention):
            check_whole("keep", keep, least=1)
            keep = Retention(last=keep)
        check_one_of("on_failure", on_failure, ("raise", "warn", "retry"))
        check_one_of("when_busy", when_busy, ("wait", "skip", "replace"))
        check_above_zero("timeout_s", timeout_s)
        for name, limit in {
            "max_write_mib_s": max_write_mib_s,
            "max_memory_gib": max_memory_gib,
            "sigterm_grace_s": sigterm_grace_s,
            "keep_in_memory_s": keep_in_memory_s,
        }.items():
            if limit is not None:
                check_above_zero(name, limit)
        if max_device_memory_gib is not None:
            check_from_zero("max_device_memory_gib", max_device_memory_gib)
        if peer_memory and keep_in_memory_s is None:
            raise BadUse("peer_memory holds snapshots for keep_in_memory_s, which is None. Give it seconds.")
        if keep_pushed is not None:
            check_whole("keep_pushed", keep_pushed, least=1)
        if read_only and push_to is not None:
            raise BadUse("read_only writes nothing, and push_to is where checkpoints are pushed. Give one of them.")
        self._folder = Path(dir).absolute()
        self._keep = keep or Retention()
        self._on_failure = on_failure
        self._closed = False
        self._outcomes = Outcomes(self._interval, on_failure=on_failure)
        self._last = SaveHandle(None, [])
        self._votes = Votes()
        self._must_vote = self._interval.by_clock or on_failure == "retry" or sigterm_grace_s is not None
        self._pid: int | None = None
        """The process that it is at work in. One that is forked from that must not end what belongs there."""
        self._read_only = read_only
        (check_there if read_only else make_writable)(self._folder)
        self._pusher = None if push_to is None else Pusher(self._folder, push_to, keep=keep_pushed, told=_tell_of_push)
        atexit.register(self._at_exit)
        self._engine = Engine(
            self._folder,
            Options(
                attest=attest,
                when_busy=when_busy,
                timeout_s=timeout_s,
                max_write_bytes_s=None if max_write_mib_s is None else max_write_mib_s * 2**20,
                max_memory_bytes=None if max_memory_gib is None else max_memory_gib * 2**30,
                max_device_bytes=None if max_device_memory_gib is None else max_device_memory_gib * 2**30,
                keep_s=keep_in_memory_s or 0.0,
                peer_memory=peer_memory,
            ),
        )
        self._sigterm: Sigterm | None = None
        link = job_link() if read_only else connected_link()
        if sigterm_grace_s is not None and isinstance(link, Unsupervised):
            self._sigterm = Sigterm(sigterm_grace_s, self._newest_known)
            self._sigterm.install()
        if not isinstance(link, Unsupervised):
            spare_workers()

    def save(
        self, step: int, state: State, *, per_rank: Mapping[str, Any] | None = None, force: bool = False
    ) -> SaveHandle:
        """Save, if `step` is due or the job was asked to stop; in the latter case the process ends here.

        Call it after each step: that is when a stop and the time are noticed. Collective where torch.distributed is
        initialised. It returns while the state is still being copied: an optimizer's step waits for that by itself, and
        whoever changes the state otherwise calls `before_update` first. Until an update has waited so for the first
        time, each call returns only once the state is copied, and so does the first one. Python, NumPy and torch random
        generators of each rank are saved by themselves.

        Args:
            step: steps completed.
            state: a dict of state dicts (nested dicts and lists of tensors and plain values), tensors, plain
                values and objects with `state_dict` and `load_state_dict`; or a callable that returns it,
                which is not called when nothing is due. What is the same on all ranks is written once.
            per_rank: the like for what differs by rank, such as the position in the data.
            force: save whatever `every` and `when_busy` say, as at the end of training; the same on all ranks. A step
                that was saved or restored last is only waited for, and saved again if that failed.

        Returns:
            What tells when the checkpoint is durable.

        Raises:
            BadUse: closed, or read-only, or that of a process which this one was forked from; or something in the
                state cannot be saved, and the message names it.
            SaveFailed: an earlier save is not durable and `on_failure` is `raise`, or this one is not and the job is
                to stop.
        """
        if self._closed:
            raise BadUse("This Checkpointer is closed. Save before close(), or make another.")
        if self._read_only:
            raise BadUse("This Checkpointer is read_only. Save with another one, into a folder of this run.")
        check_whole("step", step, least=0)
        self._check_here()
        self._pid = os.getpid()
        self._outcomes.lost.step(self._clock.monotonic_s(), fence_s=self._engine.fence.waited_s)
        try:
            return self._save(step, state, per_rank, force=force)
        finally:
            in_flight, fence_s = self._engine.thread.in_flight, self._engine.fence.waited_s
            self._outcomes.lost.goes_on(self._clock.monotonic_s(), fence_s=fence_s, in_flight=in_flight)

    def before_update(self) -> None:
        """Wait until what the last save saves is copied. Optimizers of torch call it by themselves."""
        self._engine.fence.before_update()

    def restore(self, state: MutableMapping[str, Any], *, per_rank: MutableMapping[str, Any] | None = None) -> int:
        """Restore the newest checkpoint that verifies, and the random generators of each rank.

        It is taken from memory where all ranks died with it in memory, or peers hold what is lost, and from disk
        otherwise.

        Collective where torch.distributed is initialised. State dicts and tensors are filled in place, keys
        they lack are added; objects get `load_state_dict`; plain values are replaced. Entries of the
        checkpoint that `state` does not name at its top level are left out.

        Args:
            state: as for `save`, but not a callable.
            per_rank: as for `save`. Only where as many ranks restore as saved; else see `per_rank_states`.

        Returns:
            The step, 0 where there is no checkpoint.

        Raises:
            BadUse: `state` has no named entries, or NumPy's global generator is of another kind than when it was saved.
            NoVerifiedCheckpoint: there are checkpoints, here or in storage, and none verifies.
            StateMismatch: the state does not fit; nothing was changed, but for what it says of a damaged newer step.
            CheckpointError: something in it could not be read.
        """
        self._check_here()
        self.wait()
        ranks = Ranks()
        # Now, though there may be no checkpoint: else it would be known after the first failure alone.
        for part in (state, {} if per_rank is None else per_rank):
            ranks.together(functools.partial(check_named, part))
        link = job_link()
        with link.section("restore"):
            began_s = self._clock.monotonic_s()
            from_storage = None
            if self._pusher is not None:
                self._pid = os.getpid()
                remote = self._pusher.remote
                at_length = functools.partial(ranks.first_at_length, signs=lambda: remote.signs, section="restore")
                at_length(functools.partial(fetch_newer, remote, self._folder))

                def from_storage(step: int, above: int) -> int | None:
                    return at_length(functools.partial(fetch_instead, remote, self._folder, step, above))

            checkpoint, passed_over = restore_newest(
                ranks, self._folder, state, per_rank, from_storage, from_memory=not self._read_only
            )
            self._outcomes.damaged.update(item.path for item in passed_over)
            if checkpoint is None:
                return 0
            self._outcomes.newest, self._last = checkpoint.path, SaveHandle(checkpoint.manifest.step, [])
            self._last._outcome.set_result(checkpoint.path)
            self._interval.resumed(checkpoint.manifest.step)
            restore_s = self._clock.monotonic_s() - began_s
        if ranks.rank == 0:
            if self._pusher is not None:
                self._pusher.start()  # the newest may not be there yet, and no save may follow
            link.emit(
                "restored",
                {
                    "step": checkpoint.manifest.step,
                    "path": str(checkpoint.path),
                    "restore_s": restore_s,
                    "tier": checkpoint.files.tier,
                    "bytes_read": checkpoint.files.bytes_read,
                    "passed_over": [asdict(item) | {"path": str(item.path)} for item in passed_over],
                },
            )
        return checkpoint.manifest.step

    def has_any(self) -> bool:
        """Whether there is a checkpoint, whole or not, in `dir` or where `push_to` pushes. Not collective.

        Raises:
            NotFound, StorageFailed: `dir` has none, and storage cannot be looked at.
        """
        return bool(scan(self._folder) or (self._pusher is not None and self._pusher.remote.scan()))

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
        """Wait for every save in flight; in a process that was forked, for none.

        Raises:
            SaveFailed: one is not durable, and `on_failure` is `raise`.
        """
        if self._engine.thread.is_busy and not self._is_another_s():
            with job_link().section("save"):
                self._engine.thread.wait()
        self._outcomes.raise_unseen()

    def close(self) -> None:
        """Wait for every save in flight; none may follow. Closing twice, or in a process that was forked, does no harm.

        Raises:
            SaveFailed: one is not durable, and `on_failure` is `raise`.
        """
        self._close(in_good_order=True)

    def _close(self, *, in_good_order: bool) -> None:
        if self._is_another_s():
            return
        if not self._closed:
            self._closed = True
            atexit.unregister(self._at_exit)
            with job_link().section("save"):
                self._engine.close(in_good_order=in_good_order)
                if self._pusher is not None:
                    self._pusher.close(wait=in_good_order)
                self._votes.close()
            if self._sigterm is not None:
                self._sigterm.close()
            self._outcomes.raise_unseen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._close(in_good_order=_is_good_order(error))
        except HoldfastError as failed:
            if error is None:
                raise
            _logger.warning("%s", failed)  # what ends the block already matters more

    def _is_another_s(self) -> bool:
        return self._pid not in (None, os.getpid())

    def _check_here(self) -> None:
        if self._is_another_s():
            raise BadUse(
                "This Checkpointer is at work in the process that this one was forked from. Make another one here."
            )

    def _at_exit(self) -> None:
        """A script that ends without closing it has its last save, or is told."""
        try:
            self._close(in_good_order=_is_good_order(getattr(sys, "last_value", None)))
        except HoldfastError as error:
            _logger.error("%s", error)  # noqa: TRY400 - a sentence, not a traceback

    def _save(self, step: int, state: State, per_rank: Mapping[str, Any] | None, *, force: bool) -> SaveHandle:
        is_last, is_due = self._vote(step)
        if self._last.step is not None and step < self._last.step:
            self._last = SaveHandle(None, [])  # training has gone back: its steps are others
        if force:
            is_due = not self._is_saved(step)
        link = job_link()
        stopping = link.stop_due(step)
        if not stopping and not is_last:  # else the state is to be safe first
            self._outcomes.raise_unseen()
        handle = SaveHandle(None, self._outcomes.unseen)
        if not stopping and not is_last and not is_due:
            handle._outcome.set_result(None)
            return handle
        handle.step = step
        self._outcomes.retry_due = False
        with link.section("save"):
            if is_last and not stopping:
                self._save_and_leave(handle, step, state, per_rank)
            self._begin(handle, step, state, per_rank, must=stopping or force)
            if stopping or (handle.done() and self._on_failure == "raise"):
                handle.result()
        if stopping:
            link.leave(step)
        return handle

    def _is_saved(self, step: int) -> bool:
        """Whether what was saved, which is waited for, or restored last is of `step`. Collective."""
        last = self._last

        def is_durable() -> bool:
            is_it = last.step == step
            return is_it and last._outcome.exception() is None and last._outcome.result() is not None

        with job_link().section("save"):
            return all(Ranks().together(is_durable))

    def _vote(self, step: int) -> tuple[bool, bool]:
        """Whether all ranks save now and leave, and whether they save now."""
        by_step = self._interval.falls_on(step)
        if not self._must_vote:
            return False, by_step
        told = self._sigterm is not None and self._sigterm.received
        has_passed = self._interval.has_passed() and Ranks().rank == 0
        try:
            is_last, *others = self._votes.hear((told, has_passed, self._outcomes.retry_due))
        except CheckpointError as error:
            if self._sigterm is not None and told:
                _logger.error("SIGTERM: step %d is not saved: %s %s", step, error, self._newest_known())  # noqa: TRY400
                self._sigterm.leave()
            raise
        return is_last, by_step or any(others)

    def _save_and_leave(
        self, handle: SaveHandle, step: int, state: State, per_rank: Mapping[str, Any] | None
    ) -> NoReturn:
        assert self._sigterm is not None, "all ranks have been given the same arguments"
        self._sigterm.begin()  # another rank may have been told
        try:
            self._begin(handle, step, state, per_rank, must=True)
            _logger.warning("SIGTERM: step %d is saved, in %s.", step, handle.result())
        except Exception as error:  # whatever it is, the process ends
            _logger.error("SIGTERM: %s %s", error, self._newest_known())  # noqa: TRY400
        self._sigterm.leave()

    def _newest_known(self) -> str:
        """Without a look at the storage, which may hang."""
        if self._outcomes.newest is None:
            return (
                f"This process knows of no checkpoint; `holdfast checkpoint ls {self._folder}` lists those there are."
            )
        return f"The newest checkpoint is {self._outcomes.newest}."

    def _begin(
        self, handle: SaveHandle, step: int, state: State, per_rank: Mapping[str, Any] | None, *, must: bool
    ) -> None:
        self._interval.began()
        if self._pusher is not None and Ranks().rank == 0:
            self._pusher.start()
        try:
            outcome = self._engine.save(
                step,
                state,
                per_rank,
                now_s=self._clock.now_s(),
                keep=self._keep,
                damaged=self._outcomes.damaged,
                must=must,
            )
        except SaveFailed as error:
            outcome = Future()
            outcome.set_exception(error)
        self._last = handle
        self._outcomes.follow(outcome, handle)


def _tell_of_push(told: Mapping[str, Any]) -> None:
    job_link().emit("push_failed" if "failed" in told else "pushed", dict(told))


def _is_good_order(error: BaseException | None) -> bool:
    """Whether a training that ends with `error` has come to its end, or was asked to, and is not to be gone on with."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0, EXIT_CODE)
    return not isinstance(error, Exception)
