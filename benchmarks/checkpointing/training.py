"""One case, in its process: training without saves and with them in turn, and what each save took."""

import itertools
import resource
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from checkpointing.savers import SAVERS, Saver
from checkpointing.workloads import WORKLOADS, Workload

WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps in a row: the seconds of a save's call, of each step, and from the last one until the save is durable.

    `stood_s`: the longest time that the thread of the training stood still, while the save was in flight.
    """

    parts_s: list[float]
    stood_s: float

    @property
    def wall_s(self) -> float:
        """Of all of it."""
        return sum(self.parts_s)


class Case:
    """A workload, a way to save it, and the times (s) of every save."""

    def __init__(self, workload: Workload, saver: Saver, amount: int) -> None:
        self._workload, self._saver, self._amount = workload, saver, amount
        self._watch = ThreadPoolExecutor(1)
        self._step = 0
        self.call_s: list[float] = []
        self.fence_s: list[float] = []
        self.durable_s: list[float] = []
        self.forward_backward_s: list[float] = []

    def train(self, steps: int, *, save: bool) -> Block:
        """So many steps, with a save before the first one or without, and to the end of that save."""
        self._workload.settle()
        marks_s = [time.perf_counter()]
        saving = self._begin() if save else None
        stood_s = self.call_s[-1] if save else 0.0
        marks_s.append(time.perf_counter())
        for number in range(steps):
            counts = saving is None or not saving.done()
            before_s = time.perf_counter()
            gap_s = self._workload.forward_backward(self._amount)
            self.forward_backward_s.append(time.perf_counter() - before_s)
            if saving is not None and number == 0:
                gap_s = max(gap_s, self._fence())
            self._workload.update()
            stood_s = max(stood_s, gap_s) if counts else stood_s
            marks_s.append(time.perf_counter())
        self._workload.settle()
        if saving is not None:
            saving.result()
        marks_s.append(time.perf_counter())
        self._saver.clear()
        return Block(parts_s=[end_s - begin_s for begin_s, end_s in itertools.pairwise(marks_s)], stood_s=stood_s)

    def save_alone(self) -> None:
        """A save with nothing beside it."""
        saving = self._begin()
        self._fence()
        self._workload.update()
        saving.result()
        self._saver.clear()

    def _begin(self) -> Future[None]:
        self._step += 1
        began_s = time.perf_counter()
        self._saver.save(self._step)
        self.call_s.append(time.perf_counter() - began_s)
        return self._watch.submit(self._until_durable, began_s)

    def _until_durable(self, began_s: float) -> None:
        self._saver.wait()
        self.durable_s.append(time.perf_counter() - began_s)

    def _fence(self) -> float:
        self._workload.settle()
        began_s = time.perf_counter()
        self._saver.fence()
        self._workload.settle()
        self.fence_s.append(time.perf_counter() - began_s)
        return self.fence_s[-1]


def measure(*, open_files: int | None, **options: Any) -> dict[str, Any]:
    """What `_measure` answers, where this process and those that it starts may have so many files open."""
    if open_files is None:
        return _measure(**options)
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, most))
    try:
        return _measure(**options)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))  # for the answer, which is a file


def _measure(
    *,
    folder: str,
    saver: str,
    workload: str,
    shape: dict[str, Any],
    amount: int,
    steps: int,
    pairs: int,
    calls: int,
) -> dict[str, Any]:
    """Blocks of `steps` steps: without a save, with one, without, …; then `calls` saves with nothing beside them.

    The first save, which fills caches and starts processes, is not among the times but in `first_s`.
    """
    trained: Workload = WORKLOADS[workload](**shape)
    place = Path(folder) / "checkpoints"
    place.mkdir()
    case = Case(trained, SAVERS[saver](place, trained), amount)
    case.train(WARM_UP_STEPS, save=False)
    case.train(WARM_UP_STEPS, save=True)
    first_s = case.durable_s[0]
    for times_s in (case.call_s, case.fence_s, case.durable_s):
        times_s.clear()
    files = _open_files()
    blocks = list(_blocks(case, steps, pairs))
    training = {"call_s": [*case.call_s], "fence_s": [*case.fence_s], "durable_s": [*case.durable_s]}
    for _ in range(calls):
        case.save_alone()
    without, saved = blocks[::2], blocks[1::2]
    return {
        **training,
        "first_s": first_s,
        "every_call_s": case.call_s,
        "lost_s": [
            block.wall_s - (before.wall_s + after.wall_s) / 2
            for before, block, after in zip(without, saved, without[1:], strict=False)
        ],
        "saved_parts_s": [block.parts_s for block in saved],
        "plain_parts_s": [block.parts_s for block in without],
        "plain_s": statistics.median(block.wall_s for block in without),
        "gap_s": [block.stood_s for block in saved],
        "plain_gap_s": statistics.median(block.stood_s for block in without),
        "forward_backward_s": statistics.median(case.forward_backward_s),
        "files": _open_files() - files,
        "state_bytes": _size_bytes(trained),
    }


def _blocks(case: Case, steps: int, pairs: int) -> Iterator[Block]:
    for number in range(2 * pairs + 1):
        yield case.train(steps, save=number % 2 == 1)


def calibrate(*, workload: str, shape: dict[str, Any], amount: int, seconds: float) -> int:
    """The amount of work for which forward and backward take so many seconds; `amount` is where the search begins."""
    trained: Workload = WORKLOADS[workload](**shape)
    for _ in range(4):
        taken_s = _forward_backward_s(trained, amount)
        amount = max(1, round(amount * seconds / taken_s))
    return amount


def _forward_backward_s(workload: Workload, amount: int) -> float:
    times_s = []
    for _ in range(3):
        workload.settle()
        began_s = time.perf_counter()
        workload.forward_backward(amount)
        workload.settle()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)


def _size_bytes(workload: Workload) -> int:
    import torch
    from torch.utils import _pytree

    leaves = _pytree.tree_leaves(workload.state_dict())
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def _open_files() -> int:
    """Those that stay open, of this process and of those that it started: what is deleted is open for a moment."""
    own = psutil.Process()
    looks = []
    for _ in range(10):
        time.sleep(0.1)
        looks.append(sum(process.num_fds() for process in (own, *own.children(recursive=True))))
    return min(looks)
