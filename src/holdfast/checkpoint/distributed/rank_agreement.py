"""What some rank wants done at a call of `save`, known to all ranks at the same call, and none waits for another.

Each rank is told a SIGTERM at a step of its own, and each has a clock of its own. What it wants goes into a reduction
that runs beside the training; the answer is taken at a later call, the same on all ranks since all call `save` at the
same steps. By then it is there, unless a rank is that far behind.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.core.errors import CheckpointError

ANSWER_EVERY_S: Final = 0.5
"""Ranks are asked about so often. Thousands of them take a few hundred milliseconds to answer."""
_MOST_CALLS: Final = 20
"""But at least once in so many calls: steps may become slower."""
_CLOSING_S: Final = 5.0


class Votes:
    """The wishes of all ranks. All of them call `hear` equally often."""

    def __init__(
        self,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Nothing is sent before the first `hear`."""
        self._process_group = process_group
        self._monotonic_s = monotonic_s
        self._ranks: Ranks | None = None
        self._group: dist.ProcessGroup | None = None
        self._ballot = torch.zeros(0, device="cpu")
        self._work: dist.Work | None = None
        self._calls_to_go = 0
        self._asked_at_s: float | None = None
        self._calls_between = 1

    @property
    def has_begun(self) -> bool:
        """Whether `hear` was called before."""
        return self._ranks is not None

    def hear(self, wishes: Sequence[bool]) -> list[bool]:
        """Which of the wishes any rank had when last all were asked; at once where there is one rank. Collective.

        A wish is to be kept up until it is heard.

        Raises:
            CheckpointError: another rank is gone.
        """
        if self._ranks is None:
            self._ranks = Ranks(self._process_group)
            # A group of its own: its reductions must not come between those of the training and the saves.
            self._group = self._ranks.new_group() if self._ranks.world_size > 1 else None
        if self._group is None:
            return list(wishes)
        self._calls_to_go -= 1
        if self._calls_to_go > 0:
            return [False] * len(wishes)
        answer = self._answer() if self._work is not None else [0.0] * len(wishes)
        heard = [each > 0 for each in answer]
        self._ask([wish and not done for wish, done in zip(wishes, heard, strict=True)])
        return heard

    def close(self) -> None:
        """Let go of the group, unless a rank has not voted yet: then it goes with the process."""
        if self._work is not None:
            try:
                self._work.wait(timedelta(seconds=_CLOSING_S))
            except RuntimeError:
                return
            self._work = None
        if self._ranks is not None:
            self._ranks.release(self._group)

    def _answer(self) -> list[float]:
        assert self._work is not None, "they were asked"
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as error:
            raise CheckpointError(
                f"Another rank did not answer whether to save ({str(error).splitlines()[0]}). Look at its log."
            ) from error
        *answer, step_s = self._ballot.tolist()
        # The slowest rank's seconds are the same number on all ranks.
        self._calls_between = max(1, min(_MOST_CALLS, int(ANSWER_EVERY_S / max(step_s, 1e-9))))
        return answer

    def _ask(self, wishes: Sequence[bool]) -> None:
        now_s = self._monotonic_s()
        step_s = (
            float("inf")
            if self._asked_at_s is None
            else (now_s - self._asked_at_s) / self._calls_between
        )
        self._asked_at_s = now_s
        self._calls_to_go = self._calls_between
        self._ballot = torch.tensor(
            [*map(float, wishes), step_s], dtype=torch.float64, device="cpu"
        )
        self._work = dist.all_reduce(
            self._ballot, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
