"""How a rank's saves ended: what is known from then on, who is told, and what a failure does."""

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.retry import TRIES, Retry
from holdfast.checkpoint.save.handle import SaveHandle
from holdfast.checkpoint.save.lost_time import LostTime
from holdfast.checkpoint.save.saved_event import SaveReport, saved_event
from holdfast.checkpoint.schedule.interval import Interval
from holdfast.core.errors import HoldfastError, SaveFailed
from holdfast.core.link import job_link

if TYPE_CHECKING:
    from pathlib import Path

    import torch.distributed as dist

_logger = logging.getLogger("holdfast")
OnFailure = Literal["raise", "warn", "retry"]


class Outcomes:
    """Of all saves of one Checkpointer.

    Attributes:
        unseen: failures that the next call raises.
        unmade: with `retry`, the failure that no later save has made up for yet: the end of the training raises it.
        retry: when a failed save is made again.
        damaged: folders of checkpoints that were found damaged, and not saved again.
        newest: the newest checkpoint that this process knows of; storage, which may hang, is not asked.
        lost: what the saves cost the training.
    """

    def __init__(
        self,
        interval: Interval,
        *,
        on_failure: OnFailure,
        process_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        """`interval` is told what each save costs."""
        self._process_group = process_group
        self._ranks: Ranks | None = None
        self._interval = interval
        self._on_failure = on_failure
        self.unseen: list[HoldfastError] = []
        self.unmade: list[HoldfastError] = []
        self.retry = Retry()
        self._begun = self._made = self._unmade = 0
        """How many saves have begun, and which of them became durable last, and failed last."""
        self.damaged: set[Path] = set()
        self.newest: Path | None = None
        self.lost = LostTime()
        self._differing: set[frozenset[str]] = set()

    def follow(
        self, outcome: Future[SaveReport | None], handle: SaveHandle, *, save: str, must: bool
    ) -> None:
        """Take note of how a save ends, and let `handle` know.

        Args:
            outcome: how it ends.
            handle: what the training has of it.
            save: what all ranks call it, see `Retry.failed`.
            must: it was forced, so the training is told of a failure in any case.
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
        """Name the newest checkpoint without a look at the storage, which may hang."""
        if self.newest is None:
            return f"This process knows of no checkpoint; `holdfast checkpoint ls {folder}` lists those there are."
        return f"The newest checkpoint is {self.newest}."

    def raise_unseen(self) -> None:
        """Tell of the first failure that nobody has heard of.

        Raises:
            HoldfastError: that one.
        """
        if self.unseen:
            raise self.unseen.pop(0)

    def raise_unmade(self) -> None:
        """Raise the failure that no later save has made up for, once.

        Raises:
            HoldfastError: that one.
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
        """Whoever listens must not keep the one who waits from hearing it."""
        error = done.exception()
        saved = done.result() if error is None else None
        try:
            if isinstance(error, HoldfastError):
                self._failed(error, number, save, ranks, must=must)
            if saved is not None:
                self._made = max(self._made, number)
                if number > self._unmade:  # one that was begun later may have failed first
                    self.unmade.clear()
                self.retry.succeeded()
                self.damaged.discard(saved.path)
                self.newest = saved.path
                if ranks.rank == 0:  # the others' clocks do not count either
                    self._tell(
                        saved,
                        self.lost.slowdown_s - slowdown_before_s if self.lost.can_tell else None,
                    )
            elif isinstance(error, SaveFailed) and ranks.rank == 0:
                told = {"step": handle.step, "reason": str(error), "errno": error.errno}
                job_link().emit("save_failed", told)
        except Exception:
            _logger.exception("Nobody was told how the save of step %s ended.", handle.step)
        finally:
            if error is None:
                handle._outcome.set_result(None if saved is None else saved.path)
            else:
                handle._outcome.set_exception(error)

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
                _logger.warning("%s It is made again at the next call of save.", error)
            elif in_a_row.bit_count() == 1:  # 4, 8, 16 and so on: each would fill the log
                _logger.warning(
                    "%s %d saves in a row have failed; each due one is tried.", error, in_a_row
                )

    def _tell_of_differing(self, saved: SaveReport) -> None:
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

    def _tell(self, saved: SaveReport, slowdown_s: float | None) -> None:
        told = saved_event(saved, slowdown_s=slowdown_s)
        job_link().emit("checkpoint", told)
        self._tell_of_differing(saved)
        # Steps beside a save may have been faster than the usual one; what it is seen to cost it costs.
        self._interval.measured(
            lost_s=max(told["lost_s"], told["stall_s"]), durable_s=saved.durable_s
        )
