"""One rank's saves from the call until they are durable: snapshot, agreement, staging, the writing process.

What happens where:

| in the call | in a thread, while forward and backward run | in the writing process |
|---|---|---|
| take stock, copy small tensors, digest all | see that all ranks' plans fit, copy, seal | follow it, check, commit |

The optimizer's step waits for the thread (the fence), nothing waits for the writing process but the save that finds no
arena free, and whoever asks for the result.
"""

import contextlib
import gc
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from holdfast.checkpoint import kept
from holdfast.checkpoint.arena import ArenaError, State
from holdfast.checkpoint.checksums import DIGEST_BYTES
from holdfast.checkpoint.commit import Order
from holdfast.checkpoint.contents import collect
from holdfast.checkpoint.devices import current_streams
from holdfast.checkpoint.fence import Fence
from holdfast.checkpoint.peer_meeting import meet
from holdfast.checkpoint.persist import abandon
from holdfast.checkpoint.plan import Plan
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.retention import Retention
from holdfast.checkpoint.save_job import SaveJob
from holdfast.checkpoint.saved_event import Saved
from holdfast.checkpoint.seats import Seat, Seats
from holdfast.checkpoint.shape import Options, Shape
from holdfast.checkpoint.stage import copy_into, names_of
from holdfast.checkpoint.turns import short_turns
from holdfast.checkpoint.writer import NotAttestedError, Writer, Written
from holdfast.core.errors import BadUse, HoldfastError, SaveFailed

_logger = logging.getLogger("holdfast")
_ADVICE: Final = (
    "Only an optimizer's step may change it before the copy is made; a loop without one calls ckpt.before_update() "
    "first. From now on it is copied in the call."
)
_UNFENCED: Final = (
    "No optimizer of torch has made a step since the first save: save() returns when the state is copied. To train on "
    "meanwhile, call ckpt.before_update() before the state changes."
)


class Engine:
    """Saves the state of one rank, with those of the others."""

    def __init__(self, folder: Path, options: Options) -> None:
        """Nothing is started before the first save."""
        self._folder = folder
        self._options = options
        self._writer = Writer(
            timeout_s=options.timeout_s, max_write_bytes_s=options.max_write_bytes_s, keep_s=options.keep_s
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-stage")
        self._seats = Seats(self._writer, max_bytes=options.max_memory_bytes, spares_newest=options.keep_s > 0)
        self._shape = Shape(options, self._writer, self._seats)
        self._ranks: Ranks | None = None
        self._session = ""
        self._saves = 0
        self._in_flight: set[SaveJob] = set()
        self._preparing: Future[None] | None = None
        self._landed = threading.Condition()
        self.fence = Fence(self._shape)

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
    ) -> "Future[Saved | None]":
        """Begin a save. It returns once the state is copied, if it plans or no update has ever waited; else at once.

        Returns:
            What was saved, once it is durable; None: it was skipped; SaveFailed or BadUse otherwise.

        Raises:
            BadUse: the first save, or the state has another shape, and it cannot be saved.
            SaveFailed: likewise, where it could not be staged, or nothing can be begun.
        """
        began_s = time.monotonic()
        self.fence.await_copy()
        self.fence.forget()
        ranks = self._begin(step) if self._ranks is None else self._ranks
        self._saves += 1
        if self._saves == 2 and not self.fence.was_passed and ranks.rank == 0:
            _logger.warning(_UNFENCED)
        order = Order(
            folder=self._folder,
            step=step,
            save=f"{self._session}-{self._saves}",
            created_at_s=now_s,
            keep=keep,
            damaged=tuple(damaged),
        )
        job = SaveJob(order, began_s, must)
        with _no_collection():
            self._take_stock(job, ranks, state, per_rank)
            staging = self._hand_over(job, ranks)
        if job.blocking:
            staging.result()
            if (job.failure is not None or job.outcome.done()) and (failed := job.outcome.exception()) is not None:
                raise failed
            if job.devices:
                job.devices.goes_on(job.taken)
            if job.seat is not None:
                self.fence.learn_from(job)
        job.call_s = time.monotonic() - began_s
        return job.outcome

    def _take_stock(
        self,
        job: SaveJob,
        ranks: Ranks,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        per_rank: Mapping[str, Any] | None,
    ) -> None:
        try:
            job.contents = collect(ranks.rank, state, per_rank)
            job.snapshot = self._shape.snapshot(job.contents)
            # After what the snapshot has copied early on these streams: it is copied on from there.
            job.began_on(current_streams(job.contents.tensors))
            # What must be saved is not skipped for want of a plan.
            must_wait = (job.must and self._shape.is_on_gpus) or not self.fence.was_passed or job.snapshot.must_block
            job.blocking = not self._shape.take(job, overlaps=not must_wait) or must_wait
        except Exception as error:  # the other ranks are to know
            job.error, job.blocking = error, True
        except BaseException:  # Ctrl-C, after which there may be another save
            job.let_go()
            raise

    def _hand_over(self, job: SaveJob, ranks: Ranks) -> Future[None]:
        """To the thread, which stages it.

        Raises:
            SaveFailed: there is none.
        """
        self.fence.stage(job)
        self._in_flight.add(job)
        try:
            staging = self._thread.submit(self._stage, job, ranks)
        except RuntimeError as error:  # the interpreter ends, or no thread is left
            job.let_go()
            self._land(job)
            raise SaveFailed(f"Step {job.order.step} was not saved: {error}. Save before the script ends.") from error
        self._preparing = self._thread.submit(self._shape.prepare)
        return staging

    @property
    def is_busy(self) -> bool:
        """Whether `wait` would wait."""
        return bool(self._in_flight) or (self._preparing is not None and not self._preparing.done())

    @property
    def in_flight(self) -> int:
        """How many saves have not ended yet."""
        return len(self._in_flight)

    def wait(self) -> None:
        """Wait until every save has ended, well or not, and nothing is done for the next one either."""
        with self._landed:
            self._landed.wait_for(lambda: not self._in_flight)
        if self._preparing is not None:
            wait([self._preparing])

    def close(self, *, in_good_order: bool = True) -> None:
        """Wait for every save, and let go of memory, process and group; see `Writer.close`."""
        self.fence.close()
        self.wait()
        self._thread.shutdown(cancel_futures=True)
        self._shape.close(in_good_order=in_good_order)
        self._writer.close(in_good_order=in_good_order)
        if self._ranks is not None and self._ranks.group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # it went with the default group
                dist.destroy_process_group(self._ranks.group)

    def _begin(self, step: int) -> Ranks:
        """What the first save needs. Collective.

        Raises:
            SaveFailed: `step` cannot be saved; the next save tries again.
        """
        # A group of its own: its collectives run in a thread, beside those of the training.
        ranks = Ranks(dist.new_group(backend="gloo") if Ranks().distributed else None)
        try:
            self._begin_with(ranks)
        except Exception as error:
            if ranks.group is not None:
                dist.destroy_process_group(ranks.group)
            if isinstance(error, BadUse | SaveFailed):
                raise
            raise _failed(step, error) from error
        self._ranks = ranks
        return ranks

    def _begin_with(self, ranks: Ranks) -> None:
        ranks.together(lambda: self._thread.submit(_nothing, 0).result())  # all hear where no thread can be started
        # Where nothing was restored: the memory is needed.
        ranks.together(lambda: kept.end(self._folder, ranks.rank))

        self._session = ranks.first(lambda: secrets.token_hex(4))
        if self._options.peer_memory and (pairing := meet(ranks)) is not None:
            self._writer.pair(pairing, max_bytes=self._options.max_memory_bytes)
        self.fence.install()

    def _stage(self, job: SaveJob, ranks: Ranks) -> None:
        """Order one save to be written, and copy its state, which the writing follows. Collective, in the thread."""
        seat: Seat | None = None
        generation = 0

        def begin() -> None:
            nonlocal seat, generation
            plan = self._shape.agreed
            self._shape.digest_rest(job)
            seat = self._seats.take(plan)
            generation = seat.arena.begin(job.order.step, plan.digest)
            if job.digests is not None:  # those before them come from GPUs
                end = len(plan.pieces) * DIGEST_BYTES
                seat.arena.notes[end - len(job.digests) : end] = job.digests

        ended: Future[Written] | None = None
        try:
            with short_turns:
                if not self._agree(job, ranks):
                    job.outcome.set_result(None)
                    return
                ranks.together(begin)
                assert seat is not None, "it was taken"
                ended = self._order(job, self._shape.agreed, seat, generation)
                self._copy(job, self._shape.agreed, seat, generation)
        except Exception as error:
            failure = error if isinstance(error, BadUse | SaveFailed) else _failed(job.order.step, error)
            if ended is not None and not isinstance(error, ArenaError):  # else the writing has failed, and says why
                job.failure = failure
            if seat is not None:
                with contextlib.suppress(ArenaError):  # it is free already
                    seat.arena.move(State.FREE, generation)
            if ended is None:
                if seat is not None:
                    self._seats.free(seat)
                job.outcome.set_exception(failure)
        finally:
            job.let_go()
            if ended is None:
                self._land(job)
        if ended is not None and seat is not None:
            plan = self._shape.agreed
            # Only now: a save that has failed already ends in this very call.
            ended.add_done_callback(lambda done: self._ended(job, seat, plan, done))

    def _agree(self, job: SaveJob, ranks: Ranks) -> bool:
        """Have a plan that fits on every rank, and the sources by it; False: all ranks skip this save."""
        waiting = self._waiting()

        def look() -> tuple[int, bool, bool, bool, bool, str]:
            if job.error is not None:
                raise job.error
            job.await_boundary()
            return (
                job.order.step,
                self._shape.fits(job),
                job.blocking or not self._shape.is_on_gpus,
                self._seats.has_free(),
                job.must,
                waiting.order.save if waiting else "",
            )

        steps, fits, may_plan, seats, musts, saves = zip(*ranks.together(look), strict=True)
        if len(set(steps)) > 1:
            raise BadUse(f"Ranks disagree about the step to save: {list(steps)}. Call save at the same step on all.")
        if self._options.when_busy == "skip" and not all(seats) and not any(musts):
            _logger.warning("Step %d is not saved: the saves before it are not durable yet.", job.order.step)
            return False
        if self._options.when_busy == "replace" and not all(seats) and waiting is not None and len(set(saves)) == 1:
            self._give_up(waiting, job)
        if not all(fits) and not all(may_plan):
            # The training goes on there, and what GPUs have to do may wait for a rank that waits for the plan.
            _logger.warning("Step %d is not saved: the state has another shape on some rank.", job.order.step)
            self._shape.is_outdated = True
            return False
        if not all(fits):
            with self._landed:
                self._landed.wait_for(lambda: self._in_flight <= {job})
            self._shape.plan_anew(job, ranks)
        return True

    def _waiting(self) -> SaveJob | None:
        """The save that may be given up: staged, and its writing has not begun, as far as is known here."""
        for job in list(self._in_flight):
            if not job.must and job.seat is not None and self._writer.is_waiting(job.seat.number, job.generation):
                return job
        return None

    def _give_up(self, waiting: SaveJob, newer: SaveJob) -> None:
        """All ranks have agreed to. Where its writing has begun after all, it fails for want of another rank's part."""
        _logger.warning(
            "Step %d is given up for step %d: its writing has not begun.", waiting.order.step, newer.order.step
        )
        waiting.given_up = True
        assert waiting.seat is not None, "it was staged"
        if self._writer.take_back(waiting.seat.number, waiting.generation):
            self._seats.free(waiting.seat)
            waiting.outcome.set_result(None)
            self._land(waiting)

    def _copy(self, job: SaveJob, plan: Plan, seat: Seat, generation: int) -> None:
        """Copy and seal; where that fails, whoever writes it hears of it by the arena's state.

        Raises:
            ArenaError: the writing has failed meanwhile.
            SaveFailed: something changed while it was copied.
        """
        arena, devices = seat.arena, job.devices
        began_on = devices.first_on_host if devices else 0

        def copied(count: int) -> None:
            arena.advance(count, generation)

        told = _nothing if began_on else copied

        def copy_rest() -> None:
            """What is on the host lies behind the rest in the image, and is copied while GPUs copy that."""
            copy_into(plan, arena.image, seat.views, job.sources, told, first=began_on)
            self._check_unchanged(job, plan, job.changed())
            if devices:  # else the state changes once it is sealed: a trainer that dies then leaves it to the writing
                job.staged.set()

        if devices:
            devices.order(job.taken, seat, copied, copy_rest)
            self._check_unchanged(job, plan, job.changed_until_now())
        else:
            copy_rest()
        arena.move(State.SEALED, generation)

    def _order(self, job: SaveJob, plan: Plan, seat: Seat, generation: int) -> "Future[Written]":
        job.seat, job.generation = seat, generation
        try:
            return self._writer.save(
                job.order,
                arena=seat.number,
                generation=generation,
                layout=self._shape.layout,
                attested_bytes=0 if job.digests is None else len(plan.pieces) * DIGEST_BYTES,
            )
        except (OSError, RuntimeError) as error:  # the other ranks' orders are given: they wait for this one's part
            abandon(job.order, plan.layout, f"the process that writes it cannot be started ({error})")
            raise

    def _ended(self, job: SaveJob, seat: Seat, plan: Plan, done: "Future[Written]") -> None:
        try:
            self._settle(job, seat, plan, done)
        except Exception as error:  # whoever waits is to hear of it
            if not job.outcome.done():
                job.outcome.set_exception(
                    SaveFailed(f"Step {job.order.step}: nobody can tell whether it is saved: {error}")
                )
        finally:
            self._land(job)

    def _settle(self, job: SaveJob, seat: Seat, plan: Plan, done: "Future[Written]") -> None:
        self._seats.free(seat)  # first: whoever hears that it has ended finds room for the next save
        error = job.failure or done.exception()
        if isinstance(error, NotAttestedError):
            names = names_of(plan, error.pieces)
            self._shape.copy_early(job.contents, names)
            error = SaveFailed(
                f"Step {job.order.step} was not saved: what was staged of {_some(names)} is not what it was when save "
                f"was called. {_ADVICE}"
            )
        if error is not None and job.given_up:
            job.outcome.set_result(None)
        elif error is not None:
            job.outcome.set_exception(error)
        else:
            job.forget()
            job.outcome.set_result(
                Saved(
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
        """Count it as ended: its outcome is known, and whoever asked to be told has been told."""
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


def _failed(step: int, error: Exception) -> SaveFailed:
    advice = "" if isinstance(error, HoldfastError) else ". Look at the log of this rank."
    return SaveFailed(f"Step {step} was not saved: {error}{advice}")


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python looks for garbage after so many new objects: a tenth of a second that all ranks would wait for."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _nothing(_: int) -> None:
    """Nobody is told how far the copy is."""
