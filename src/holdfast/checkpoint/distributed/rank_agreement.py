"""Let any rank request an action that all ranks then do in the same call of `save`.

Ranks receive SIGTERM during different steps, and their clocks differ. So the ranks combine their
requests in an all-reduce that runs in the background. All ranks call `save` at the same steps, so
all of them can read the result in the same later call of `save`. By then the result is ready,
unless a rank is far behind.
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
"""Seconds between two all-reduces; one takes a few hundred milliseconds with thousands of ranks."""
_MAX_CALLS: Final = 20
"""The limit on calls of `save` between two all-reduces, since steps may become slower."""
_CLOSING_S: Final = 5.0


class Votes:
    """Combine the requests of all ranks. All ranks must call `agree` equally often."""

    def __init__(
        self,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create the object; the first `agree` starts the first all-reduce."""
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
        """Return True if `agree` was called before."""
        return self._ranks is not None

    def agree(self, wishes: Sequence[bool]) -> list[bool]:
        """Make this rank's requests, and return which requests all ranks now fulfill. Collective.

        The argument has, for each kind of request, whether this rank makes it. The result is True,
        on all ranks, for each kind that some rank made before the last all-reduce began. A rank
        must repeat a request until the result is True. With a single rank, the result is True at
        once.

        Raises:
            CheckpointError: another rank does not respond.
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
        """Destroy the group, unless some rank never joined the last all-reduce."""
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
        self._calls_between = max(1, min(_MAX_CALLS, int(ANSWER_EVERY_S / max(step_s, 1e-9))))
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
