"""Stage saves in a background thread: agree with all ranks, copy, and request the write.

The thread stages one save after another. The optimizer's step waits until the copy is complete.
Only two calls wait for the writing process: a call of `save` that finds no free buffer, and
`SaveHandle.result`.
"""

import contextlib
import logging
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Final

import torch

from holdfast.checkpoint.config import Busy, Replicas
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.meeting import Meeting
from holdfast.checkpoint.format.checksums import DIGEST_BYTES
from holdfast.checkpoint.ipc.shared_buffer import ArenaError, State
from holdfast.checkpoint.save.plan_cache import PlanCache
from holdfast.checkpoint.save.results import SaveReport
from holdfast.checkpoint.save.save_job import SaveJob
from holdfast.checkpoint.snapshot.buffer_pool import Buffer, BufferPool
from holdfast.checkpoint.snapshot.copy import copy_into, names_of
from holdfast.checkpoint.snapshot.plan import Plan
from holdfast.checkpoint.snapshot.replicas import digest_replicas
from holdfast.checkpoint.state.metrics import read_metrics
from holdfast.checkpoint.writer.client import NotAttestedError, Writer, WriteResult
from holdfast.checkpoint.writer.persist import abandon
from holdfast.core.errors import BadUse, HoldfastError, SaveFailed
from holdfast.core.system_limits import advice_on, in_words

_logger = logging.getLogger("holdfast")
_COMPARE_EVERY: Final = 10
_ADVICE: Final = (
    "Only an optimizer's step may change it before the copy is made; a loop without one calls ckpt.before_update() "
    "first. From now on it is copied in the call."
)


class SaveThread:
    """Stage one rank's saves, one at a time, in a background thread."""

    def __init__(
        self,
        shape: PlanCache,
        seats: BufferPool,
        writer: Writer,
        meeting: Meeting,
        *,
        when_busy: Busy,
        replicas: Replicas,
    ) -> None:
        """Create the object; the first save starts the thread."""
        self._replicas = replicas
        self._agreed = 0
        self._meeting = meeting
        self._shape = shape
        self._seats = seats
        self._writer = writer
        self._when_busy = when_busy
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="holdfast-stage")
        self._in_flight: set[SaveJob] = set()
        self._preparing: Future[None] | None = None
        self._landed = threading.Condition()

    def start(self) -> None:
        """Start the background thread that stages saves.

        Raises:
            RuntimeError: the thread cannot be started.
        """
        self._pool.submit(_nothing, 0).result()

    def stage(self, job: SaveJob, ranks: Ranks) -> Future[None]:
        """Queue one save for the thread; the future `job.outcome` receives the result.

        Raises:
            SaveFailed: the thread has ended.
        """
        self._in_flight.add(job)
        try:
            staging = self._pool.submit(self._stage, job, ranks)
        except RuntimeError as error:  # the interpreter is ending, or no thread can be started
            job.release()
            self._land(job)
            raise SaveFailed(
                f"Step {job.order.step} was not saved: {error}. Save before the script ends."
            ) from error
        self._preparing = self._pool.submit(self._shape.prepare)
        return staging

    @property
    def is_busy(self) -> bool:
        """Return True if `wait` would block."""
        return bool(self._in_flight) or (self._preparing is not None and not self._preparing.done())

    @property
    def in_flight(self) -> int:
        """Return the number of saves that have not ended."""
        return len(self._in_flight)

    def wait(self) -> None:
        """Wait until every save has ended and the buffer of the next save is allocated."""
        with self._landed:
            self._landed.wait_for(lambda: not self._in_flight)
        if self._preparing is not None:
            wait([self._preparing])

    def close(self) -> None:
        """Stop the thread; no save may be in flight."""
        self._pool.shutdown(cancel_futures=True)

    def _stage(self, job: SaveJob, ranks: Ranks) -> None:
        """Request the write of one save, and copy its state.

        The writing process writes the bytes as they are copied. Collective; runs in the thread.
        """
        seat: Buffer | None = None
        generation = 0
        replicas = b""

        def begin() -> None:
            nonlocal seat, generation, replicas
            plan = self._shape.agreed
            self._shape.digest_rest(job)
            seat = self._seats.take(plan)
            generation = seat.arena.begin(job.order.step)
            if job.digests is not None:  # these follow the digests that GPUs write
                end = len(plan.pieces) * DIGEST_BYTES
                seat.arena.notes[end - len(job.digests) : end] = job.digests
            replicas = self._digest_replicas(job)

        ended: Future[WriteResult] | None = None
        try:
            with short_turns:
                if not self._agree(job, ranks):
                    job.outcome.set_result(None)
                    return
                self._agreed += 1  # the same count on all ranks
                ranks.together(begin)
                assert seat is not None, "it was taken"
                if ranks.rank == 0:  # rank 0's writing process records the metrics
                    job.order = replace(
                        job.order, metrics=read_metrics(job.metrics, job.boundaries)
                    )
                ended = self._order(job, self._shape.agreed, seat, generation, replicas)
                self._copy(job, self._shape.agreed, seat, generation)
        except Exception as error:
            failure = (
                error if isinstance(error, BadUse | SaveFailed) else failed(job.order.step, error)
            )
            # After an ArenaError, the writing process reports its own failure.
            if ended is not None and not isinstance(error, ArenaError):
                job.failure = failure
            if seat is not None:
                with contextlib.suppress(ArenaError):  # the buffer is free already
                    seat.arena.move(State.FREE, generation)
            if ended is None:
                if seat is not None:
                    self._seats.free(seat)
                job.outcome.set_exception(failure)
        finally:
            job.release()
            if ended is None:
                self._land(job)
        if ended is not None and seat is not None:
            plan = self._shape.agreed
            # Last, because the callback of a save that has failed already runs within this call.
            ended.add_done_callback(lambda done: self._ended(job, seat, plan, done))

    def _agree(self, job: SaveJob, ranks: Ranks) -> bool:
        """Agree with all ranks on a plan that fits the state of each; make a new plan if needed.

        Returns:
            False if all ranks skip this save.
        """
        self._meeting.await_all("save", job.order.step, group=ranks.group)

        def look() -> tuple[int, bool, bool, bool, bool]:
            if job.error is not None:
                raise job.error
            job.await_boundary()
            return (
                job.order.step,
                self._shape.fits(job),
                job.blocking or not self._shape.is_on_gpus,
                self._seats.has_free(),
                job.must,
            )

        steps, fits, may_plan, seats, musts = zip(*ranks.together(look), strict=True)
        if len(set(steps)) > 1:
            raise BadUse(
                f"Ranks disagree about the step to save: {list(steps)}. Call save at the same step on all."
            )
        if self._when_busy == "skip" and not all(seats) and not any(musts):
            _logger.warning(
                "Step %d is not saved: the saves before it are not durable yet.", job.order.step
            )
            return False
        if not all(fits) and not all(may_plan):
            # Training continues on the ranks that cannot plan now. Making a plan here would
            # deadlock: their GPU work may wait for a rank that itself waits for the new plan.
            _logger.warning(
                "Step %d is not saved: the state has another shape on some rank.", job.order.step
            )
            self._shape.is_outdated = True
            return False
        if not all(fits):
            with self._landed:
                self._landed.wait_for(lambda: self._in_flight <= {job})
            self._shape.plan_anew(job, ranks)
        return True

    def _copy(self, job: SaveJob, plan: Plan, seat: Buffer, generation: int) -> None:
        """Copy the state into the buffer, and seal the buffer, so that it can become a checkpoint.

        Raises:
            ArenaError: the writing process has given up this save during the copy.
            SaveFailed: a tensor changed while it was copied.
        """
        arena, devices = seat.arena, job.devices
        began_on = devices.first_on_host if devices else 0

        def copied(count: int) -> None:
            arena.advance(count, generation)

        progress = _nothing if began_on else copied

        def copy_rest() -> None:
            """Copy the tensors in host memory, which follow the GPU tensors in the buffer."""
            copy_into(plan, arena.image, seat.views, job.sources, progress, first=began_on)
            self._check_unchanged(job, plan, job.changed())
            # Without GPUs, updates wait until the buffer is sealed: from then on, the save
            # survives the death of the trainer.
            if devices:
                job.staged.set()

        if devices:
            devices.order(job.taken, seat, copied, copy_rest)
            self._check_unchanged(job, plan, job.changed_until_now())
        else:
            copy_rest()
        arena.move(State.SEALED, generation)

    def _digest_replicas(self, job: SaveJob) -> bytes:
        """Digest the entries that several ranks have, if this save compares them.

        Returns:
            The digests; empty if this save does not compare.
        """
        plan = self._shape.agreed
        if not plan.replicated or (
            self._replicas != "check" and self._agreed % _COMPARE_EVERY != 1
        ):
            return b""
        try:
            return digest_replicas(
                plan.replicated,
                job.contents.leaves(plan.structure),
                job.snapshot.copied,
                owned=plan.owned,
                all_stand_still=job.blocking,
            )
        except torch.cuda.OutOfMemoryError:
            _logger.warning(
                "A GPU has no memory to compare the state of the ranks: step %d is not.",
                job.order.step,
            )
            return b""

    def _order(
        self, job: SaveJob, plan: Plan, seat: Buffer, generation: int, replicas: bytes
    ) -> "Future[WriteResult]":
        job.seat, job.generation = seat, generation
        try:
            return self._writer.save(
                job.order,
                arena=seat.number,
                generation=generation,
                layout=self._shape.layout,
                attested_bytes=0 if job.digests is None else len(plan.pieces) * DIGEST_BYTES,
                replicas=replicas,
                refuses=self._replicas == "check",
            )
        # The other ranks' requests are sent, and their processes wait for this rank's part.
        except (OSError, RuntimeError) as error:
            why = f"the process that writes it cannot be started ({in_words(error)})"
            abandon(job.order, plan.layout, why, errno=getattr(error, "errno", None))
            raise

    def _ended(self, job: SaveJob, seat: Buffer, plan: Plan, done: "Future[WriteResult]") -> None:
        try:
            self._settle(job, seat, plan, done)
        except Exception as error:  # the caller that waits must receive an outcome
            if not job.outcome.done():
                job.outcome.set_exception(
                    SaveFailed(
                        f"Step {job.order.step}: it is unknown whether the save is durable: {error}"
                    )
                )
        finally:
            self._land(job)

    def _settle(self, job: SaveJob, seat: Buffer, plan: Plan, done: "Future[WriteResult]") -> None:
        # First, so that a caller that waits for this save finds room for the next save.
        self._seats.free(seat)
        error = job.failure or done.exception()
        if isinstance(error, NotAttestedError):
            names = names_of(plan, error.pieces)
            self._shape.copy_early(job.contents, names)
            error = SaveFailed(
                f"Step {job.order.step} was not saved: the staged copy of {_some(names)} differs from the state at "
                f"the call of save. {_ADVICE}"
            )
        if error is not None:
            job.outcome.set_exception(error)
        else:
            job.forget()
            job.outcome.set_result(
                SaveReport(
                    step=job.order.step,
                    path=job.order.final,
                    own_bytes=plan.layout.size_bytes,
                    written=done.result(),
                    call_s=job.call_s,
                    fence_s=job.fence_seconds(),
                    durable_s=time.monotonic() - job.began_s,
                    attested=job.digests is not None,
                )
            )

    def _land(self, job: SaveJob) -> None:
        """Remove an ended save from the set of saves in flight; its outcome is already set."""
        with self._landed:
            self._in_flight.discard(job)
            self._landed.notify_all()

    def _check_unchanged(self, job: SaveJob, plan: Plan, changed: list[str]) -> None:
        changed = [name for name in changed if name in plan.written]
        if changed:
            self._shape.copy_early(job.contents, changed)
            raise SaveFailed(
                f"Step {job.order.step} was not saved: {_some(changed)} changed while it was copied. {_ADVICE}"
            )


def failed(step: int, error: Exception) -> SaveFailed:
    """Return the error for a save that failed before its write was requested."""
    advice = (
        ""
        if isinstance(error, HoldfastError)
        else f". {advice_on(error) or 'Look at the log of this rank.'}"
    )
    return SaveFailed(f"Step {step} was not saved: {in_words(error)}{advice}")


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _nothing(_: int) -> None:
    """Ignore a progress report of the copy."""


# Python's switch interval is the time after which a thread must hand over the GIL. While the
# staging thread copies beside the training, it is set to 0.2 ms instead of the default of 5 ms. The
# training releases the GIL in each operation of PyTorch and would then wait 5 ms to get it back, so
# it would complete only one operation in 5 ms.

_TURN_S: Final = 0.0002
_HALF_S: Final = 0.5e-6
"""Half a microsecond added against truncation: Python reports an interval of 70 us as 69 us."""


class ShortTurns:
    """Set Python's switch interval to 0.2 ms while any thread is inside the `with` block."""

    def __init__(self) -> None:
        """Create the lock and set the number of threads inside to 0."""
        self._entering = threading.Lock()
        self._inside = 0
        self._before_s = self._here_s = 0.0

    def __enter__(self) -> None:
        with self._entering:
            self._inside += 1
            if self._inside == 1:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(_TURN_S, self._before_s) + _HALF_S)
                self._here_s = sys.getswitchinterval()

    def __exit__(self, *_error: object) -> None:
        with self._entering:
            self._inside -= 1
            # If the interval has another value, the training has set it meanwhile.
            if self._inside == 0 and sys.getswitchinterval() == self._here_s:
                sys.setswitchinterval(self._before_s + _HALF_S)


short_turns: Final = ShortTurns()
"""The only instance in this process, because the switch interval applies to the whole process."""
