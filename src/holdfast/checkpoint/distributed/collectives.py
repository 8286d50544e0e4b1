"""Acting as one: every rank does its part, and all go on or all raise the same error."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Final, TypeVar

import torch.distributed as dist

from holdfast.core.errors import BadUse, CheckpointError, HoldfastError
from holdfast.core.link import job_link

_LOOK_EVERY_S: Final = 5.0
T = TypeVar("T")
U = TypeVar("U")


class Ranks:
    """The ranks of a process group, the default one if none is given; one rank where there is none.

    Only object collectives are used, which work on every backend.
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
                "This rank is not in process_group. Make the Checkpointer on the ranks of that group alone."
            )

    def new_group(
        self, members: Sequence[int] | None = None, *, timeout: timedelta | None = None
    ) -> dist.ProcessGroup:
        """Make a gloo group of `members`, or of all these ranks. Collective among these ranks."""
        made: dist.ProcessGroup
        if self.group is None:
            made = dist.new_group(members, timeout=timeout, backend="gloo")
        else:  # ranks outside the group make no such call
            among = [self.of_job(rank) for rank in members or range(self.world_size)]
            made = dist.new_group(
                among, timeout=timeout, backend="gloo", use_local_synchronization=True
            )
        return made

    def release(self, made: dist.ProcessGroup | None) -> None:
        """Destroy a group that `new_group` made."""
        # PyTorch names a group that only its ranks make by how many groups there are: the next group would find the
        # addresses of the destroyed one under its name. Such a group goes with the default group.
        if made is not None and self.group is None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # it went with the default group
                dist.destroy_process_group(made)

    def of_job(self, rank: int) -> int:
        """Return the number in the default group of a rank of this one."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def together(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return what each returned, in the order of ranks. Collective.

        Raises:
            Exception: the error of the lowest rank that failed, on every rank.
        """
        if not self.distributed:
            return [work()]
        own: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            own = error
        sent = own
        if own is not None and not isinstance(own, HoldfastError | OSError):
            sent = CheckpointError(
                f"{type(own).__name__}: {own}"
            )  # any other class may not be picklable
        outcomes: list[tuple[T, Exception | None]] = [None] * self.world_size  # type: ignore[list-item]
        dist.all_gather_object(outcomes, (result, sent), group=self.group)
        for rank, (_result, failure) in enumerate(outcomes):
            if failure is not None:
                raise own if own is not None and rank == self.rank else failure
        return [each for each, _failure in outcomes]

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its result on every rank. Collective.

        Raises:
            Exception: the error of rank 0, on every rank.
        """
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def together_at_length(
        self, work: Callable[[], T], *, signs: Callable[[], int] = lambda: 0, section: str = ""
    ) -> list[T]:
        """As `together`, for what takes longer than a collective may: no rank is in one for more than some seconds.

        `work` runs in a thread of its own, which goes on where this is interrupted. It gets on for as long as some
        rank's `signs` change; the time of the job's `section` that this is in then begins anew on all ranks.
        """
        working: Future[T] = Future()

        def run() -> None:
            try:
                working.set_result(work())
            except BaseException as error:
                working.set_exception(error)

        self.together(threading.Thread(target=run, name="holdfast-at-length", daemon=True).start)
        before: list[int] = []
        while True:
            told = self.together(
                lambda: (bool(wait([working], timeout=_LOOK_EVERY_S).done), signs())
            )
            if all(is_done for is_done, _ in told):
                return self.together(working.result)
            now = [each for _, each in told]
            if before and now != before:
                with job_link().section(section):
                    pass
            before = now

    def first_at_length(
        self, work: Callable[[], T], *, signs: Callable[[], int] = lambda: 0, section: str = ""
    ) -> T:
        """As `first`, for what takes longer than a collective may; see `together_at_length`."""
        told = self.together_at_length(
            lambda: work() if self.rank == 0 else None, signs=signs, section=section
        )
        return told[0]  # type: ignore[return-value]

    def exchange(self, own: Callable[[], T], share_out: Callable[[list[T]], list[U]]) -> U:
        """Run `own` on every rank and `share_out` on rank 0, with what all had; return this rank's share. Collective.

        Unlike with `together`, what a rank has goes to rank 0 alone.

        Raises:
            Exception: the error of the lowest rank that failed, on every rank.
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
