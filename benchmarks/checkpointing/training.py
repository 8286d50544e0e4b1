"""Run one case in its process: train without saves and with them in turn, and time the saves."""

import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from checkpointing.savers import SAVERS, Saver
from checkpointing.workloads import WORKLOADS, Workload, size_bytes

WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps in a row, with a save before the first one or without.

    `wall_s` lasts until the save is durable. `stood_s` is the longest standstill of the training
    thread while the save was in flight.
    """

    steps: int
    wall_s: float
    stood_s: float

    @property
    def step_s(self) -> float:
        """The seconds of one step."""
        return self.wall_s / self.steps


class Case:
    """A workload, a saver, and the times of every save in seconds."""

    def __init__(self, workload: Workload, saver: Saver, amount: int) -> None:
        self._workload, self._saver, self._amount = workload, saver, amount
        self._watch = ThreadPoolExecutor(1)
        self._step = 0
        self.call_s: list[float] = []
        self.fence_s: list[float] = []
        self.durable_s: list[float] = []
        self.forward_backward_s: list[float] = []

    def train(self, steps: int, *, save: bool) -> Block:
        """Train for some steps, with a save up to one step after its end.

        Later steps are not affected by the save.
        """
        self._workload.settle()
        began_s = time.perf_counter()
        saving = self._begin() if save else None
        stood_s = self.call_s[-1] if save else 0.0
        done = was_done = False
        number = 0
        while number < steps and not was_done:
            was_done = done
            before_s = time.perf_counter()
            gap_s = self._workload.forward_backward(self._amount)
            self.forward_backward_s.append(time.perf_counter() - before_s)
            if saving is not None and number == 0:
                gap_s = max(gap_s, self._fence())
            self._workload.update()
            stood_s = stood_s if done else max(stood_s, gap_s)
            done = saving is not None and saving.done()
            number += 1
        self._workload.settle()
        if saving is not None:
            saving.result()
        wall_s = time.perf_counter() - began_s
        self._saver.clear()
        return Block(steps=number, wall_s=wall_s, stood_s=stood_s)

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
    """Return the answer of `_measure` under a limit of open files."""
    if open_files is None:
        return _measure(**options)
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, most))
    try:
        return _measure(**options)
    finally:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (before, most)
        )  # for the answer, which is a file


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
    """Measure blocks of at most `steps` steps: without a save, with one, without, and so on.

    Then measure `calls` steps with a save each. A block without a save is as long as the block
    before it. The first save fills caches and starts processes, so only `first_s` has it.
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
    training = {
        "call_s": [*case.call_s],
        "fence_s": [*case.fence_s],
        "durable_s": [*case.durable_s],
    }
    for _ in range(calls):
        case.train(1, save=True)
    without, saved = blocks[::2], blocks[1::2]
    return {
        **training,
        "first_s": first_s,
        "every_call_s": case.call_s,
        "lost_s": lost_s(without, saved),
        "plain_step_s": statistics.median(block.step_s for block in without),
        "gap_s": [block.stood_s for block in saved],
        "plain_gap_s": statistics.median(block.stood_s for block in without),
        "forward_backward_s": statistics.median(case.forward_backward_s),
        "files": _open_files() - files,
        "state_bytes": size_bytes(trained),
    }


def lost_s(without: Sequence[Block], saved: Sequence[Block]) -> list[float]:
    """Return how much longer each block with a save took than its neighbours without."""
    return [
        block.wall_s - block.steps * (before.step_s + after.step_s) / 2
        for before, block, after in zip(without, saved, without[1:], strict=False)
    ]


def _blocks(case: Case, steps: int, pairs: int) -> Iterator[Block]:
    yield case.train(WARM_UP_STEPS, save=False)
    for _ in range(pairs):
        block = case.train(steps, save=True)
        yield block
        yield case.train(block.steps, save=False)


def calibrate(*, workload: str, shape: dict[str, Any], amount: int, seconds: float) -> int:
    """Return the amount of work for which forward and backward take so many seconds.

    The search begins at `amount`.
    """
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


def _open_files() -> int:
    """Return the files that stay open in this process and its children.

    A file that is being deleted is open only for a moment.
    """
    own = psutil.Process()
    looks = []
    for _ in range(10):
        time.sleep(0.1)
        looks.append(sum(process.num_fds() for process in (own, *own.children(recursive=True))))
    return min(looks)
