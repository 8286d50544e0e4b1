"""Let any rank request an action, such that all ranks act in the same call of `save`.

Ranks receive SIGTERM during different steps, and their clocks differ. So each rank's requests go
into a reduction that runs beside the training. All ranks read the result at the same later call of
`save`, since all ranks call `save` at the same steps. By then the result is ready, unless a rank is
far behind.
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
"""Seconds between two reductions, which take a few hundred milliseconds with thousands of ranks."""
_MOST_CALLS: Final = 20
"""The most calls between two reductions, since steps may become slower."""
_CLOSING_S: Final = 5.0


class Votes:
    """The requests of all ranks. All ranks must call `hear` equally often."""

    def __init__(
        self,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Start no reduction before the first `hear`."""
        self._process_group = process_group
        self._monotonic_s = monotonic_s
        self._ranks: Ranks | None = None
        self._group: dist.ProcessGroup | None = None
        self._ballot = torch.zeros(0, device="cpu")
        self._work: dist.Work | None = None
        self._calls_to_go = 0
        self._requested_at_s: float | None = None
        self._calls_between = 1

    @property
    def has_begun(self) -> bool:
        """True if `hear` was called before."""
        return self._ranks is not None

    def hear(self, wishes: Sequence[bool]) -> list[bool]:
        """Return, for each request, whether any rank made it before the last reduction. Collective.

        A rank must repeat a request until `hear` has returned True for the request. A single rank
        gets True at once.

        Raises:
            CheckpointError: another rank is gone.
        """
        if self._ranks is None:
            self._ranks = Ranks(self._process_group)
            # A separate group, so that its reductions stay apart from other collectives.
            self._group = self._ranks.new_group() if self._ranks.world_size > 1 else None
        if self._group is None:
            return list(wishes)
        self._calls_to_go -= 1
        if self._calls_to_go > 0:
            return [False] * len(wishes)
        answer = self._answer() if self._work is not None else [0.0] * len(wishes)
        granted = [each > 0 for each in answer]
        self._ask([wish and not done for wish, done in zip(wishes, granted, strict=True)])
        return granted

    def close(self) -> None:
        """Destroy the group, unless a rank has not joined the last reduction."""
        if self._work is not None:
            try:
                self._work.wait(timedelta(seconds=_CLOSING_S))
            except RuntimeError:
                return
            self._work = None
        if self._ranks is not None:
            self._ranks.release(self._group)

    def _answer(self) -> list[float]:
        assert self._work is not None, "a reduction was started"
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as error:
            raise CheckpointError(
                f"Another rank did not answer whether to save ({str(error).splitlines()[0]}). "
                "Look at its log."
            ) from error
        *answer, step_s = self._ballot.tolist()
        # The maximum is equal on all ranks, so they count the same number of calls.
        self._calls_between = max(1, min(_MOST_CALLS, int(ANSWER_EVERY_S / max(step_s, 1e-9))))
        return answer

    def _ask(self, wishes: Sequence[bool]) -> None:
        now_s = self._monotonic_s()
        step_s = (
            float("inf")
            if self._requested_at_s is None
            else (now_s - self._requested_at_s) / self._calls_between
        )
        self._requested_at_s = now_s
        self._calls_to_go = self._calls_between
        self._ballot = torch.tensor(
            [*map(float, wishes), step_s], dtype=torch.float64, device="cpu"
        )
        self._work = dist.all_reduce(
            self._ballot, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
