"""Record how a rank's saves ended: events, failures to raise, retries and lost training time."""

import logging
import statistics
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.checkpoint.config import OnFailure
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.retry import TRIES, Retry
from holdfast.checkpoint.save.handle import SaveHandle
from holdfast.checkpoint.schedule.interval import Interval
from holdfast.checkpoint.writer.client import WriteResult
from holdfast.core.errors import HoldfastError, SaveFailed
from holdfast.core.link import job_link

if TYPE_CHECKING:
    import torch.distributed as dist

_logger = logging.getLogger("holdfast")


# A save costs training time: the seconds of the call, the seconds that the optimizer waits for the
# copy, and a slowdown of the steps while the save is written. The slowdown is estimated by
# comparing these steps with the median of recent steps without a save. The estimate therefore needs
# one call of `save` at each step, and some steps without a save.

_RECENT_STEPS: Final = 31
_ENOUGH_STEPS: Final = 3
_STRANGE_STEP: Final = 2.0
"""The limit on a step's excess over the usual time, as a multiple of the usual time.

A longer step is not measured, since it contains other work, such as an evaluation.
"""


class LostTime:
    """Estimate how much saves slow down the training steps.

    The estimate uses the times of the calls of `save`. All times are seconds of one clock.
    """

    def __init__(self) -> None:
        self._usual_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._since_s: float | None = None
        self._fence_s = 0.0
        self._in_flight = 0
        self.slowdown_s = 0.0
        """Seconds lost to all saves so far; saves written at the same time share the loss."""

    @property
    def can_tell(self) -> bool:
        """Return True if enough steps without a save were measured for an estimate."""
        return len(self._usual_s) >= _ENOUGH_STEPS

    def step(self, now_s: float, *, fence_s: float) -> None:
        """Measure the step that ends now, when a call of `save` begins.

        Args:
            now_s: the current time in seconds.
            fence_s: total seconds that optimizer steps have waited for copies so far.
        """
        if self._since_s is None:
            return
        worked_s = now_s - self._since_s - (fence_s - self._fence_s)
        if not self._in_flight:
            self._usual_s.append(worked_s)
        elif self.can_tell:
            usual_s = statistics.median(self._usual_s)
            if worked_s <= (1 + _STRANGE_STEP) * usual_s:
                self.slowdown_s += (worked_s - usual_s) / self._in_flight

    def resume(self, now_s: float, *, fence_s: float, in_flight: int) -> None:
        """Begin to measure the next step, when a call of `save` returns.

        Args:
            now_s: the current time in seconds.
            fence_s: total seconds that optimizer steps have waited for copies so far.
            in_flight: the number of saves that are not durable yet.
        """
        self._since_s, self._fence_s, self._in_flight = now_s, fence_s, in_flight


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """Describe a durable checkpoint and its cost.

    Attributes:
        step: the step of the checkpoint.
        path: the folder of the checkpoint.
        own_bytes: the size of this rank's files in bytes.
        written: the result that the writing process reported.
        call_s: seconds that the call of `save` took.
        fence_s: seconds that optimizer steps waited for the copy of this save.
        durable_s: seconds from the call until the checkpoint was durable.
        attested: whether the written bytes were compared with the digests of the live tensors.
    """

    step: int
    path: Path
    own_bytes: int
    written: WriteResult
    call_s: float
    fence_s: float
    durable_s: float
    attested: bool


def saved_event(saved: SaveReport, *, slowdown_s: float | None) -> dict[str, Any]:
    """Build the data of the `checkpoint` event, as plain JSON values.

    Args:
        saved: the save, as rank 0 saw it.
        slowdown_s: seconds by which steps were slower while the save was written (`LostTime`); None
            if unknown.

    Returns:
        A dict with these keys:

        - `step`, `path`, `tier`
        - `size_bytes`: the size of all ranks' files; of rank 0's files only, if the writing process
          died before its report
        - `digest`: the manifest's digest, which covers every byte; None if there was no report
        - `attested`
        - `call_s`, `fence_s`, `stall_s` (their sum), `slowdown_s`, `lost_s` (stall and slowdown)
        - `durable_s`: seconds from the call until the checkpoint was durable
        - `write_gb_per_s`: size of rank 0's files divided by the time until all ranks' files were
          durable; None if there was no report
    """
    written = saved.written
    stall_s = saved.call_s + saved.fence_s
    return {
        "step": saved.step,
        "path": str(saved.path),
        "tier": "disk",
        "size_bytes": saved.own_bytes if written.size_bytes is None else written.size_bytes,
        "digest": written.digest,
        "attested": saved.attested,
        "call_s": saved.call_s,
        "fence_s": saved.fence_s,
        "stall_s": stall_s,
        "slowdown_s": slowdown_s,
        "lost_s": stall_s + (slowdown_s or 0.0),
        "durable_s": saved.durable_s,
        "write_gb_per_s": saved.own_bytes / written.seconds / 1e9 if written.seconds else None,
    }


class Outcomes:
    """Record the outcomes of all saves of one Checkpointer.

    Attributes:
        unseen: failures that the next calls of the Checkpointer raise, one each.
        unmade: with `on_failure="retry"`, the last failure that no durable save has followed.
            Closing the Checkpointer raises this failure.
        retry: decides when a failed save is tried again.
        damaged: folders of checkpoints that were found damaged, until the same step is saved again.
        newest: the newest checkpoint that this process saved or restored.
        lost: the estimate of the training time that the saves cost.
    """

    def __init__(
        self,
        interval: Interval,
        *,
        on_failure: OnFailure,
        process_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        """Create the record; `interval` receives the cost of each save."""
        self._process_group = process_group
        self._ranks: Ranks | None = None
        self._interval = interval
        self._on_failure = on_failure
        self.unseen: list[HoldfastError] = []
        self.unmade: list[HoldfastError] = []
        self.retry = Retry()
        self._begun = self._made = self._unmade = 0
        """The number of saves begun, and the numbers of the last durable and the last failed save.
        """
        self.damaged: set[Path] = set()
        self.newest: Path | None = None
        self.lost = LostTime()
        self._differing: set[frozenset[str]] = set()

    def follow(
        self, outcome: Future[SaveReport | None], handle: SaveHandle, *, save: str, must: bool
    ) -> None:
        """Record how a save ends, and complete `handle` when it has ended.

        Args:
            outcome: the future of the save.
            handle: the handle that the caller of `save` holds.
            save: the name of the save, the same on all ranks; see `Retry.failed`.
            must: whether the save was forced; if so, its failure is raised even with
                `on_failure="retry"`.
        """
        slowdown_s = self.lost.slowdown_s
        self._begun += 1
        number = self._begun
        if self._ranks is None:  # now: the group may be destroyed before the save has ended
            self._ranks = Ranks(self._process_group)
        ranks = self._ranks
        outcome.add_done_callback(
            lambda done: self._ended(done, handle, slowdown_s, number, save, ranks, must=must)
        )

    def newest_known(self, folder: "Path") -> str:
        """Describe the newest checkpoint that this process saved or restored, for an error message.

        Storage is not read, because storage may hang.
        """
        if self.newest is None:
            return (
                f"This process has found no checkpoint. List them: holdfast checkpoint ls {folder}"
            )
        return f"The newest checkpoint is {self.newest}."

    def raise_unseen(self) -> None:
        """Raise the oldest failure that no call has raised yet, if there is one.

        Raises:
            HoldfastError: the failure.
        """
        if self.unseen:
            raise self.unseen.pop(0)

    def raise_unmade(self) -> None:
        """Raise the last failure once if no durable save has followed it.

        Raises:
            HoldfastError: the failure.
        """
        if self.unmade:
            raise self.unmade.pop()

    def _ended(
        self,
        done: Future[SaveReport | None],
        handle: SaveHandle,
        slowdown_before_s: float,
        number: int,
        save: str,
        ranks: Ranks,
        *,
        must: bool,
    ) -> None:
        """Record the end of a save, and complete the handle even if the recording fails."""
        error = done.exception()
        saved = done.result() if error is None else None
        try:
            if isinstance(error, HoldfastError):
                self._failed(error, number, save, ranks, must=must)
            if saved is not None:
                self._made = max(self._made, number)
                if number > self._unmade:  # a save that began later may have failed first
                    self.unmade.clear()
                self.retry.succeeded()
                self.damaged.discard(saved.path)
                self.newest = saved.path
                if ranks.rank == 0:  # as for the interval, only rank 0's measurements count
                    self._emit(
                        saved,
                        self.lost.slowdown_s - slowdown_before_s if self.lost.can_tell else None,
                    )
            elif isinstance(error, SaveFailed) and ranks.rank == 0:
                data = {"step": handle.step, "reason": str(error), "errno": error.errno}
                job_link().emit("save_failed", data)
        except Exception:
            _logger.exception("The end of the save of step %s was not reported.", handle.step)
        finally:
            if error is None:
                handle.complete(None if saved is None else saved.path)
            else:
                handle.fail(error)

    def _failed(
        self, error: HoldfastError, number: int, save: str, ranks: Ranks, *, must: bool
    ) -> None:
        if self._on_failure == "raise":
            self.unseen.append(error)
        elif self._on_failure == "warn":
            _logger.warning("%s", error)
        elif not isinstance(error, SaveFailed) or error.is_final:  # another try would fail as well
            self.unseen.append(error)
        else:
            in_a_row = self.retry.failed(save, ranks)
            if must:
                self.unseen.append(error)
            elif number > self._made:
                self.unmade[:] = [error]
                self._unmade = number
            if in_a_row <= TRIES:
                _logger.warning("%s The next call of save tries again.", error)
            elif in_a_row.bit_count() == 1:  # 4, 8, 16 and so on, to keep the log short
                _logger.warning(
                    "%s %d saves in a row have failed; the next due save is tried.", error, in_a_row
                )

    def _emit_differing(self, saved: SaveReport) -> None:
        differing = saved.written.differing
        names = frozenset(name for name, _ in differing.entries)
        if not differing.count or names in self._differing:
            return
        self._differing.add(names)
        _logger.warning(
            "The state differs by rank, and the checkpoint of step %d holds one rank's value of each: %s. Put "
            "what each rank needs of its own under per_rank.",
            saved.step,
            differing,
        )
        job_link().emit("replicas_differ", {"step": saved.step, **differing.as_json()})

    def _emit(self, saved: SaveReport, slowdown_s: float | None) -> None:
        data = saved_event(saved, slowdown_s=slowdown_s)
        job_link().emit("checkpoint", data)
        self._emit_differing(saved)
        # Steps during the save may have been faster than usual by chance, which would make the
        # slowdown negative. So the cost is never less than the stall.
        self._interval.measured(
            lost_s=max(data["lost_s"], data["stall_s"]), durable_s=saved.durable_s
        )
