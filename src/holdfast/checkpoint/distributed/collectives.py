"""Run work on all ranks so that all ranks either continue or raise the same error."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Generic, Self, TypeVar

import torch.distributed as dist

from holdfast.core.errors import BadUse, CheckpointError, HoldfastError
from holdfast.core.link import job_link

_LOOK_EVERY_S: Final = 5.0
T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """Hold the result of a rank's work, or the error that the work raised."""

    result: T
    error: Exception | None = None

    @classmethod
    def of(cls, work: Callable[[], T]) -> Self:
        """Run `work`, and keep its result or its error."""
        try:
            return cls(work())
        except Exception as error:
            return cls(None, error)  # type: ignore[arg-type]

    @property
    def sent(self) -> tuple[T, Exception | None]:
        """Return the result and the error, in a form that can be sent to other ranks."""
        error = self.error
        if error is not None and not isinstance(error, HoldfastError | OSError):
            # Other classes may not be picklable.
            error = CheckpointError(f"{type(error).__name__}: {error}")
        return self.result, error


class Ranks:
    """Run collective work on the ranks of a process group.

    The group is torch's default group unless another one is given. Without torch.distributed, there
    is one rank.

    All data is sent as Python objects, since every backend supports that.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        try:
            self.rank = dist.get_rank(group) if self.distributed else 0
        except ValueError as error:
            raise BadUse(
                "process_group has been destroyed. Close the Checkpointer before its group."
            ) from error
        self.world_size = dist.get_world_size(group) if self.distributed else 1
        if self.rank < 0:
            raise BadUse(
                "This rank is not in process_group. Make the Checkpointer on the ranks of that "
                "group alone."
            )

    def new_group(
        self, members: Sequence[int] | None = None, *, timeout: timedelta | None = None
    ) -> dist.ProcessGroup:
        """Make a gloo group of the ranks `members`; None for all. Collective among these ranks."""
        made: dist.ProcessGroup
        if self.group is None:
            made = dist.new_group(members, timeout=timeout, backend="gloo")
        else:  # ranks outside the process group do not make this call
            among = [self.of_job(rank) for rank in members or range(self.world_size)]
            made = dist.new_group(
                among, timeout=timeout, backend="gloo", use_local_synchronization=True
            )
        return made

    def release(self, made: dist.ProcessGroup | None) -> None:
        """Destroy a group that `new_group` made."""
        # If only its members make a group, PyTorch names it after the number of existing groups. If
        # this group were destroyed now, the next group would get the same name and find stale
        # addresses. So this group is left to be destroyed with the default group.
        if made is not None and self.group is None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # destroyed with the default group already
                dist.destroy_process_group(made)

    def of_job(self, rank: int) -> int:
        """Return the number in torch's default group of the group's rank `rank`."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def together(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results, by rank. Collective.

        Raises:
            Exception: on every rank, the error of the lowest rank that failed.
        """
        if not self.distributed:
            return [work()]
        outcome = _Outcome.of(work)
        return self._results(outcome, self._gather(outcome.sent))

    def _gather(self, own: V) -> list[V]:
        """Return the object of each rank, by rank. Collective."""
        gathered: list[V] = [own] * self.world_size
        if self.distributed:
            dist.all_gather_object(gathered, own, group=self.group)
        return gathered

    def _results(
        self, own: "_Outcome[T]", gathered: Sequence[tuple[T, Exception | None]]
    ) -> list[T]:
        for rank, (_result, failure) in enumerate(gathered):
            if failure is not None:
                raise own.error if own.error is not None and rank == self.rank else failure
        return [result for result, _failure in gathered]

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` only on rank 0, and return its result on every rank. Collective.

        Raises:
            Exception: on every rank, the error of rank 0.
        """
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def together_at_length(
        self, work: Callable[[], T], *, signs: Callable[[], int] = lambda: 0, section: str = ""
    ) -> list[T]:
        """Run `work` like `together`, even if `work` takes longer than a collective's timeout.

        `work` runs in a separate thread. Until all ranks are done, they call a short collective
        every few seconds, so that none of them times out. If this call is interrupted, the thread
        continues.

        Args:
            work: the work of this rank.
            signs: returns a number that changes while `work` makes progress. Whenever the number of
                some rank has changed, the supervisor's time limit for `section` restarts on all
                ranks.
            section: the name of the section of the job that includes this call, see `core.link`.
        """
        working: Future[T] = Future()

        def run() -> None:
            try:
                working.set_result(work())
            except BaseException as error:
                working.set_exception(error)

        outcome: _Outcome[T] | None = None
        try:
            threading.Thread(target=run, name="holdfast-at-length", daemon=True).start()
        except RuntimeError as error:  # no further thread can be started
            working.set_exception(error)
        before: list[int] = []
        while True:
            if outcome is None and wait([working], timeout=_LOOK_EVERY_S).done:
                outcome = _Outcome.of(working.result)
            # The results travel with the progress, which saves a collective for short work.
            progress = self._gather((None if outcome is None else outcome.sent, signs()))
            results = [sent for sent, _ in progress if sent is not None]
            if outcome is not None and len(results) == self.world_size:
                return self._results(outcome, results)
            now = [each for _, each in progress]
            if before and now != before:
                with job_link().section(section):
                    pass
            before = now

    def first_at_length(
        self, work: Callable[[], T], *, signs: Callable[[], int] = lambda: 0, section: str = ""
    ) -> T:
        """Run `work` on rank 0 like `first`, even if it takes longer than a collective's timeout.

        See `together_at_length` for `signs` and `section`.
        """
        results = self.together_at_length(
            lambda: work() if self.rank == 0 else None, signs=signs, section=section
        )
        return results[0]  # type: ignore[return-value]

    def exchange(self, own: Callable[[], T], share_out: Callable[[list[T]], list[U]]) -> U:
        """Gather data on rank 0, and return this rank's share of the result. Collective.

        `own` runs on every rank, and `share_out` runs on rank 0. Unlike in `together`, the ranks
        send their results only to rank 0.

        Args:
            own: returns the data that this rank sends to rank 0.
            share_out: receives the data of all ranks, by rank; returns the share of each rank, by
                rank.

        Raises:
            Exception: on every rank, the error of the lowest rank that failed.
        """
        if not self.distributed:
            return share_out([own()])[0]
        had: list[T] = []
        self.together(lambda: had.append(own()))
        gathered: list[T] | None = [had[0]] * self.world_size if self.rank == 0 else None
        dist.gather_object(had[0], gathered, dst=self.of_job(0), group=self.group)
        shares: list[U] | None = None

        def share() -> None:
            nonlocal shares
            if gathered is not None:
                shares = share_out(gathered)

        self.together(share)
        received: list[U | None] = [None]
        dist.scatter_object_list(received, shares, src=self.of_job(0), group=self.group)
        return received[0]  # type: ignore[return-value]
