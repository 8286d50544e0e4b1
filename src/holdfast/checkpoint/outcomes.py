"""How a rank's saves ended: what is known from then on, who is told, and what a failure does."""

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

from holdfast.checkpoint.interval import Interval
from holdfast.checkpoint.lost_time import LostTime
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.save_handle import SaveHandle
from holdfast.checkpoint.saved_event import Saved, saved_event
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
        unseen: failures that the training is still to be told of.
        retry_due: whether one has failed since the last save, and is to be made up for.
        damaged: folders of checkpoints that were found damaged, and not saved again.
        newest: the newest checkpoint that this process knows of; storage, which may hang, is not asked.
        lost: what the saves cost the training.
    """

    def __init__(
        self, interval: Interval, *, on_failure: OnFailure, process_group: "dist.ProcessGroup | None" = None
    ) -> None:
        """`interval` is told what each save costs."""
        self._process_group = process_group
        self._interval = interval
        self._on_failure = on_failure
        self.unseen: list[HoldfastError] = []
        self.retry_due = False
        self.damaged: set[Path] = set()
        self.newest: Path | None = None
        self.lost = LostTime()
        self._differing: set[frozenset[str]] = set()

    def follow(self, outcome: Future[Saved | None], handle: SaveHandle) -> None:
        """Take note of how a save ends, and let `handle` know."""
        slowdown_s = self.lost.slowdown_s
        outcome.add_done_callback(lambda done: self._ended(done, handle, slowdown_s))

    def raise_unseen(self) -> None:
        """Tell of the first failure that nobody has heard of.

        Raises:
            HoldfastError: that one.
        """
        if self.unseen:
            raise self.unseen.pop(0)

    def _ended(self, done: Future[Saved | None], handle: SaveHandle, slowdown_before_s: float) -> None:
        """Whoever listens must not keep the one who waits from hearing it."""
        error = done.exception()
        saved = done.result() if error is None else None
        if isinstance(error, HoldfastError):
            self.retry_due = self._on_failure == "retry"
            if self._on_failure == "raise":
                self.unseen.append(error)
            else:
                _logger.warning("%s", error)
        try:
            if saved is not None:
                self.damaged.discard(saved.path)
                self.newest = saved.path
                self._tell(saved, self.lost.slowdown_s - slowdown_before_s if self.lost.can_tell else None)
            elif isinstance(error, SaveFailed) and Ranks(self._process_group).rank == 0:
                job_link().emit("save_failed", {"step": handle.step, "reason": str(error)})
        except Exception:
            _logger.exception("Nobody was told how the save of step %s ended.", handle.step)
        finally:
            if error is None:
                handle._outcome.set_result(None if saved is None else saved.path)
            else:
                handle._outcome.set_exception(error)

    def _tell_of_differing(self, saved: Saved) -> None:
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

    def _tell(self, saved: Saved, slowdown_s: float | None) -> None:
        if Ranks(self._process_group).rank != 0:  # whose clock does not count either
            return
        told = saved_event(saved, slowdown_s=slowdown_s)
        job_link().emit("checkpoint", told)
        self._tell_of_differing(saved)
        # Steps beside a save may have been faster than the usual one; what it is seen to cost it costs.
        self._interval.measured(lost_s=max(told["lost_s"], told["stall_s"]), durable_s=saved.durable_s)
