"""Watch the losses of the ranks, and mark checkpoints as healthy for a later rollback."""

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core.clock import Clock
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.detectors.anomaly import Anomaly, AnomalyDetector
from holdfast.recover.gate import Candidate, CheckpointGate, hold, let_go, mark_healthy
from holdfast.recover.recorder import Recorder
from holdfast.recover.replay.classes import Finding
from holdfast.recover.replay.replays import Replays
from holdfast.recover.skipping.trail import Trail

WITHOUT_LOSS_STEPS = 100
"""A rank reports no losses if it has reported this number of steps without one."""


class Losses:
    """The losses of one run, and the checkpoints that are healthy according to them."""

    def __init__(
        self, recorder: Recorder, clock: Clock, replays: Replays, *, healthy_after: int
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self.replays = replays
        self._is_watched = healthy_after > 0
        self._anomalies = AnomalyDetector()
        self._trail = Trail()
        self._gate = CheckpointGate(
            healthy_after=healthy_after, folders=recorder.checkpoint_folders() or set()
        )
        self._without_loss: Counter[int] = Counter()
        """For each rank, the steps of this attempt that it has reported without a loss."""
        self._marking: set[asyncio.Task[None]] = set()
        """Tasks that change the marks of a checkpoint."""
        self._marks_lock = asyncio.Lock()

    def look(
        self, view: AttemptView, rank: int, message: Mapping[str, Any], *, is_held: bool = False
    ) -> Anomaly | None:
        """Record a rank's report of a step; return an anomaly if it becomes certain.

        Args:
            view: the view of the attempt.
            rank: the reporting rank.
            message: the report.
            is_held: True if a broken loss waits for a person's decision. Until then, no checkpoint
                becomes healthy.

        Raises:
            KeyError, TypeError, ValueError: the report is malformed.
        """
        if not self._is_watched:
            return None
        if message["loss"] is None:
            self._without_loss[rank] += 1
            return None
        step, loss = int(message["step"]), float(message["loss"])
        self._trail.took(rank, message)
        leads = view.leads_losses(rank)
        ranks = functools.partial(self._ranks_with_losses, view)
        found = self._anomalies.look(rank, step, loss, leads=leads, ranks=ranks)
        if found is None:
            is_calm = leads and self._anomalies.is_calm and not is_held
            if is_calm:
                self.replays.passed(step)
            for candidate in self._gate.passed(step) if is_calm else ():
                self._mark_healthy(candidate, step)
            return None
        led = self._trail.leading_to(rank, found.first_step, found.step)
        return replace(found, batches=led)

    def _ranks_with_losses(self, view: AttemptView) -> set[int]:
        """Return the ranks that report losses, perhaps not at each step."""
        return {rank for rank in view.watched if self._without_loss[rank] < WITHOUT_LOSS_STEPS}

    @property
    def not_finite_since(self) -> int | None:
        """See `AnomalyDetector.not_finite_since`."""
        return self._anomalies.not_finite_since

    def accept(self, anomaly: Anomaly) -> None:
        """Accept the present losses, including this anomaly, as ordinary."""
        self._anomalies.accept()
        self.replays.accepted(anomaly)

    def restarted(self, start_step: int) -> None:
        """Record, at the first step of an attempt, the step from which it continues."""
        self._anomalies.restarted(start_step)
        self._without_loss.clear()
        self._trail.restarted()

    def saved(self, view: AttemptView, path: Path, step: int) -> None:
        """Record that a checkpoint is durable."""
        if view.loss_leader is None:
            self._gate.folders.add(path.parent)  # without losses, no checkpoint becomes healthy
        elif self._gate.saved(path, step):
            self._change_marks(path, functools.partial(hold, path))

    def restored(self, step: int) -> None:
        """Record the step of the checkpoint from which an attempt continues."""
        for left in self._gate.restored(step):
            self._change_marks(left, functools.partial(let_go, left))

    def broken(self, anomaly: Anomaly) -> policy.LossBroken:
        """Convert a broken loss to the event on which the policy decides."""
        is_spike = anomaly.kind == "spike"
        # A loss that stays broken is found again and again, each time with a later first step.
        since = None if is_spike else self.not_finite_since
        return policy.LossBroken(
            step=anomaly.step,
            is_spike=is_spike,
            can_go_back=self._gate.can_go_back(anomaly.first_step),
            batches=anomaly.batches,
            since=anomaly.first_step if since is None else min(since, anomaly.first_step),
        )

    async def go_back(self, anomaly: Anomaly, finding: Finding) -> int | None:
        """Roll back to a healthy checkpoint; return its step, or None if there is none.

        Newer checkpoints are abandoned, since they may contain a broken state. If batches before
        the anomaly are also left out, a checkpoint before these batches is preferred, because a
        newer state has already trained on some of them. If the checkpoint may be damaged, an older
        one is used if possible.

        Args:
            anomaly: the broken loss.
            finding: the class of the broken loss, or the replay that is needed.

        Raises:
            HoldfastError, OSError: the folder of the checkpoints cannot be changed.
        """
        if self._marking:
            await asyncio.wait(self._marking)
        for before_step in self._steps_to_go_back_below(anomaly, finding):
            step = await asyncio.to_thread(self._gate.go_back, before_step)
            if step is not None:
                return step
        return None

    async def go_back_to(self, step: int) -> int | None:
        """Abandon the checkpoints that are newer than a step.

        Returns:
            The step of the healthy checkpoint to go on from; None if there is none.

        Raises:
            HoldfastError, OSError: the folder of the checkpoints cannot be changed.
        """
        if self._marking:
            await asyncio.wait(self._marking)
        return await asyncio.to_thread(self._gate.go_back, step + 1)

    def _steps_to_go_back_below(self, anomaly: Anomaly, finding: Finding) -> list[int]:
        if finding.kind == "checkpoint" and finding.before_step is not None:
            return [finding.before_step]
        if finding.before_step is not None:
            return [finding.before_step, anomaly.first_step]
        skip = self._recorder.skipping.next_skip(anomaly.batches)
        if skip is None or anomaly.batches is None or skip.first >= anomaly.batches[0]:
            return [anomaly.first_step]
        # The batches that led to the anomaly begin one step before it, and each step has at least
        # one batch.
        earlier = anomaly.batches[0] - skip.first
        return [anomaly.first_step - 1 - earlier, anomaly.first_step]

    async def close(self, *, leads: bool) -> None:
        """Stop all tasks that change marks; see `Replays.close`."""
        await self.replays.close(leads=leads)
        for task in self._marking:
            task.cancel()

    def _mark_healthy(self, candidate: Candidate, step: int) -> None:
        path = candidate.path

        def marked() -> None:
            self._gate.marked(candidate)
            self._recorder.healthy(path)

        change = functools.partial(mark_healthy, path, step)
        self._change_marks(path, change, then=marked, may_fail=not candidate.is_held)

    def _change_marks(
        self,
        path: Path,
        change: Callable[[float], str | None],
        *,
        then: Callable[[], None] = lambda: None,
        may_fail: bool = False,
    ) -> None:
        async def mark() -> None:
            async with self._marks_lock:  # a hold must not follow its release
                error = await asyncio.to_thread(change, self._clock.now_s())
            if error is None:
                then()
            elif not may_fail:
                self._gate.lost(path)
                self._recorder.event("not_marked", {"path": str(path), "error": error})

        self._marking.add(marking := asyncio.create_task(mark()))
        marking.add_done_callback(self._marking.discard)
