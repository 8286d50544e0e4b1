"""Plan the injected faults, their numbers and their places from a seed."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from checkpoint_faulting import cases, commits, files, forgeries, memory, processes, ranks, storage
from checkpoint_faulting.calls import CHANGING, SKIPPED
from checkpoint_faulting.forks import Failed, Fork
from checkpoint_faulting.ground import Ground
from checkpoint_faulting.oracle import Verdict

BATCH_PATIENCE_S: Final = 600.0
ANYWHERE: Final = (commits.KILLED, commits.KILLED_ONE_OF_TWO, commits.STALLED, commits.ANY_ERROR)
"""The strikes at any call; other strikes are at calls that change a file."""
Outcome = Verdict | tuple[Verdict, bool] | list[Verdict] | str
"""A verdict; a verdict and whether the fault happened; several; or why there can be none."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The number of faults of each kind.

    `every_call`: strike at each system call, else at a sample. `stall_s`: the time for which
    storage stands still.
    """

    injections: int
    damages: int
    harmless: int
    forgeries: int
    every_call: bool
    calls: int
    blows: int
    stops: int
    silent_s: float
    staged: int
    changes: int
    full_disks: int
    locked_disks: int
    stall_s: float
    requests: int
    disagreements: int


FULL: Final = Sizes(
    injections=10_000,
    damages=320,
    harmless=200,
    forgeries=150,
    every_call=True,
    calls=100,
    blows=0,
    stops=12,
    silent_s=15.0,
    staged=300,
    changes=150,
    full_disks=300,
    locked_disks=50,
    stall_s=60.0,
    requests=600,
    disagreements=60,
)
QUICK: Final = Sizes(
    injections=250,
    damages=8,
    harmless=4,
    forgeries=5,
    every_call=False,
    calls=5,
    blows=3,
    stops=2,
    silent_s=1.0,
    staged=5,
    changes=5,
    full_disks=10,
    locked_disks=5,
    stall_s=2.0,
    requests=30,
    disagreements=4,
)


class Job(Protocol):
    """One fault, or several that share their process."""

    @property
    def kind(self) -> str:
        """The kind's name in the table."""
        ...

    def run(self) -> Outcome:
        """Run in any process without children."""
        ...


@dataclass(frozen=True)
class Batch:
    """Several faults of one kind, in one process."""

    kind: str
    work: Callable[..., list[Verdict] | str]
    arguments: tuple[Any, ...]

    def run(self) -> list[Verdict] | str:
        """Run all of them."""
        try:
            answer: list[Verdict] | str = Fork(self.work, *self.arguments).answer(BATCH_PATIENCE_S)
        except Failed as error:
            return [Verdict("crash", str(error))]
        return answer


def jobs(ground: Ground, scratch: Path, sizes: Sizes) -> Iterator[Job]:
    """Yield all jobs, those with the longest waits first."""
    seed = ground.seed
    for number, kind in enumerate(storage.FROZEN):
        yield Batch(
            kind,
            storage.on_frozen_disk,
            (kind, ground, scratch / f"frozen-{number}", sizes.stall_s, 2),
        )
    for kind in processes.AT_TIMES:
        for number in range(sizes.stops):
            yield processes.Blow(kind, number, 0, ground, scratch, sizes.silent_s)
    for number, (kind, count) in enumerate(
        zip(storage.MOUNTED, (sizes.full_disks, sizes.locked_disks), strict=True)
    ):
        yield Batch(
            kind, storage.on_small_disk, (kind, ground, scratch / f"mounted-{number}", count)
        )
    yield Batch(
        storage.REQUESTS, storage.in_object_storage, (ground, scratch / "fetched", sizes.requests)
    )
    yield Batch(ranks.KIND, ranks.disagree, (scratch / "ranks", seed, sizes.disagreements))
    yield Batch(memory.HELD, memory.flip_in_arena, (scratch / "held", seed, sizes.changes))
    for number, kind in enumerate(memory.CHANGES):
        yield Batch(
            kind,
            memory.change_during_copy,
            (scratch / f"changed-{number}", seed, kind, sizes.changes),
        )
    for kind in memory.KINDS:
        for number in range(sizes.staged):
            yield memory.Staged(kind, number, ground, scratch)
    yield from _struck(ground, scratch, sizes)
    for kind in cases.KINDS:
        count = {
            **dict.fromkeys(files.HARMLESS, sizes.harmless),
            **dict.fromkeys(forgeries.FORGERIES, sizes.forgeries),
        }
        for number in range(count.get(kind, sizes.damages)):
            yield cases.Case(kind, number, ground, scratch)


def _struck(ground: Ground, scratch: Path, sizes: Sizes) -> Iterator[Job]:
    """Yield faults at system calls, as many as an undisturbed commit makes."""
    try:
        alone, with_another = (
            Fork(commits.calls_of, ground, scratch, count).answer() for count in (1, 2)
        )
        in_process = Fork(processes.Blow(processes.WRITER, -1, 0, ground, scratch).calls).answer()
    except Failed as error:
        reason = SKIPPED or f"processes cannot be traced here ({str(error).splitlines()[-1]})"
        for kind in (*commits.KINDS, *processes.AT_CALLS):
            yield Batch(kind, str, (reason,))
        return
    chance = random.Random(ground.seed)
    for kind in commits.KINDS:
        names = with_another if kind == commits.KILLED_ONE_OF_TWO else alone
        every = [
            call for call, name in enumerate(names, start=1) if kind in ANYWHERE or name in CHANGING
        ]
        is_few = kind in (commits.STALLED, commits.SHORT)
        count = len(every) if sizes.every_call and not is_few else min(sizes.calls, len(every))
        for number, call in enumerate(sorted(chance.sample(every, count))):
            yield commits.Commit(kind, number, call, ground, scratch)
    for place, kind in enumerate(processes.AT_CALLS):  # between them, they strike at every call
        mine = range(1 + place, in_process + 1, len(processes.AT_CALLS))
        for number, call in enumerate(
            mine if sizes.every_call else chance.sample(mine, sizes.blows)
        ):
            yield processes.Blow(kind, number, call, ground, scratch)
