"""Run one rank's saves, from the call of `save` until each is durable.

Where each step of a save runs:

| in the call of `save` | in a thread, during training | in the writing process |
|---|---|---|
| collect the state, copy tensors that may change, digest | agree on a plan, copy, seal | write, attest, commit |
"""

import contextlib
import gc
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.catalog.retention import Retention
from holdfast.checkpoint.config import CheckpointerConfig
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.meeting import Meeting
from holdfast.checkpoint.distributed.one_folder import check_shared
from holdfast.checkpoint.format.manifest import Save
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.memory import client as kept
from holdfast.checkpoint.memory.peer_discovery import meet
from holdfast.checkpoint.save.optimizer_fence import Fence
from holdfast.checkpoint.save.plan_cache import PlanCache
from holdfast.checkpoint.save.results import SaveReport
from holdfast.checkpoint.save.save_job import SaveJob
from holdfast.checkpoint.save.staging_thread import SaveThread, failed
from holdfast.checkpoint.snapshot.buffer_pool import BufferPool
from holdfast.checkpoint.snapshot.gpu.devices import current_streams
from holdfast.checkpoint.snapshot.ownership import OptimizerTensors
from holdfast.checkpoint.state.capture import collect
from holdfast.checkpoint.state.parameter_names import ParameterNames
from holdfast.checkpoint.writer.client import Writer
from holdfast.core.errors import BadUse, SaveFailed

_logger = logging.getLogger("holdfast")
_UNFENCED: Final = (
    "No optimizer of torch has made a step since the first save: save() returns when the state is copied. To train on "
    "meanwhile, call ckpt.before_update() before the state changes."
)
_RECENT: Final = 16
"""The number of recent saves that are candidates for the parent of the next save."""


class Engine:
    """Save the state of one rank, together with the other ranks."""

    def __init__(self, folder: Path, config: CheckpointerConfig) -> None:
        """Create the engine; its threads and its writing process start at the first save."""
        self._folder = folder
        self._config = config
        self._writer = Writer(
            timeout_s=config.timeout_s,
            max_write_bytes_s=config.max_write_bytes_s,
            keep_s=config.keep_s,
        )
        self._seats = BufferPool(
            self._writer, max_bytes=config.max_memory_bytes, spares_newest=config.keep_s > 0
        )
        self.optimizers = OptimizerTensors()
        self._shape = PlanCache(config, self._writer, self._seats, self.optimizers)
        self._training: Ranks | None = None  # the same ranks, in the training's process group
        self._ranks: Ranks | None = None
        self._session = ""
        self._named = ParameterNames()
        self._saves = 0
        self.run = self.lease = ""
        """The run's name, and the token of the writer lease; empty if there is none."""
        self.hold: Callable[[Ranks], None] = lambda _ranks: None
        """A collective function that acquires the writer lease, called before the first save."""
        self._restored: Save | None = None
        self._recent = deque[Save](maxlen=_RECENT)
        self.fence = Fence(self._shape)
        self.meeting = Meeting(config.process_group)
        self.thread = SaveThread(
            self._shape,
            self._seats,
            self._writer,
            self.meeting,
            when_busy=config.when_busy,
            replicas=config.replicas,
        )

    def descends_from(self, restored: Save) -> None:
        """Record the restored save `restored` as the parent of this rank's next saves."""
        self._recent.clear()
        self._restored = restored

    def save(
        self,
        step: int,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        per_rank: Mapping[str, Any] | None,
        *,
        now_s: float,
        keep: Retention,
        damaged: Collection[Path],
        must: bool,
        metrics: Mapping[str, Any],
    ) -> Future[SaveReport | None]:
        """Begin a save.

        The call waits for the copy of the state in two cases: the save makes a new plan, or no
        optimizer step has waited for a copy yet. In all other cases, the call returns before the
        copy.

        Returns:
            A future of the durable save's report. The result is None if the save was skipped. The
            future fails with SaveFailed or BadUse.

        Raises:
            BadUse: the call waited for the copy, and found that the state cannot be saved.
            SaveFailed: the call waited for the copy, and the copy failed, or no save can begin.
        """
        began_s = time.monotonic()
        self.fence.await_copy()
        self.fence.forget()
        ranks = self._begin(step) if self._ranks is None else self._ranks
        self._saves += 1
        if self._saves == 2 and not self.fence.was_passed and ranks.rank == 0:
            _logger.warning(_UNFENCED)
        order = SaveRequest(
            folder=self._folder,
            step=step,
            save=self.last_save,
            created_at_s=now_s,
            keep=keep,
            damaged=tuple(damaged),
            run=self.run,
            lease=self.lease,
            ancestors=(*self._recent, *([] if self._restored is None else [self._restored])),
        )
        self._recent.appendleft(Save(step=step, save=order.save))
        job = SaveJob(order, began_s, must, metrics)
        with _no_collection():
            self._take_stock(job, ranks, state, per_rank)
            self.fence.stage(job)
            staging = self.thread.stage(job, ranks)
        if job.blocking:
            staging.result()
            if (job.failure is not None or job.outcome.done()) and (
                error := job.outcome.exception()
            ) is not None:
                raise error
            if job.devices:
                job.devices.resume(job.taken)
            if job.seat is not None:
                self.fence.learn_from(job)
        job.call_s = time.monotonic() - began_s
        return job.outcome

    @property
    def last_save(self) -> str:
        """Return the name that all ranks share for the newest save, or "" before the first save."""
        return f"{self._session}-{self._saves}" if self._ranks is not None else ""

    def _take_stock(
        self,
        job: SaveJob,
        ranks: Ranks,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        per_rank: Mapping[str, Any] | None,
    ) -> None:
        try:
            job.contents = collect(ranks.rank, state, per_rank, self._named)
            job.snapshot = self._shape.snapshot(job.contents)
            # Called after the early copies were queued on these streams: later copies read them.
            job.began_on(current_streams(job.contents.tensors))
            # A save that must happen waits for the copy in this call. Otherwise, the staging thread
            # would skip the save if its plan is out of date.
            must_wait = (
                (job.must and self._shape.is_on_gpus)
                or not self.fence.was_passed
                or job.snapshot.must_block
            )
            job.blocking = not self._shape.take(job, overlaps=not must_wait) or must_wait
        except Exception as error:  # raised later, on all ranks together
            job.error, job.blocking = error, True
        except BaseException:  # Ctrl-C: end the copy, since another save may follow
            job.release()
            raise

    def close(self, *, in_good_order: bool = True) -> None:
        """Wait for every save; then release the buffers, the writing process and the group.

        See `Writer.close` for the arguments.
        """
        self.fence.close()
        self.optimizers.close()
        self.thread.wait()
        self.meeting.close()  # after the saves, since other ranks may wait in their meetings
        self.thread.close()
        self._shape.close(in_good_order=in_good_order)
        self._writer.close(in_good_order=in_good_order)
        if self._training is not None and self._ranks is not None:
            self._training.release(self._ranks.group)

    def _begin(self, step: int) -> Ranks:
        """Start the process group, the thread and the lease that saves need. Collective.

        Raises:
            SaveFailed: `step` cannot be saved; the next save tries again.
        """
        # The collectives of saves run in a thread beside training's collectives, so they need a
        # separate group.
        self.meeting.await_all("save", step)
        training = self._training = Ranks(self._config.process_group)
        ranks = Ranks(training.new_group()) if training.distributed else training
        try:
            self._begin_with(ranks)
        except Exception as error:
            if training.distributed:
                training.release(ranks.group)
            if isinstance(error, BadUse | SaveFailed):
                raise
            raise failed(step, error) from error
        self._ranks = ranks
        return ranks

    def _begin_with(self, ranks: Ranks) -> None:
        ranks.together(self.thread.start)  # a failure to start reaches all ranks
        check_shared(ranks, self._folder)
        self.hold(ranks)
        # If nothing was restored, snapshots that the previous process left in memory still take up
        # memory.
        ranks.together(lambda: kept.end(self._folder, ranks.rank))
        self._session = ranks.first(lambda: secrets.token_hex(4))
        if self._config.peer_memory and (pairing := meet(ranks)) is not None:
            self._writer.pair(pairing, max_bytes=self._config.max_memory_bytes)
        self.fence.install()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pause Python's garbage collector.

    A save makes many new objects at once, which would start a collection of 0.1 s. All ranks would
    wait for the rank that collects.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
