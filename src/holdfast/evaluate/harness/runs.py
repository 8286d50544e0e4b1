"""Tasks of the suite on this host: a client process each, started again when it is killed."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable

from holdfast.core.processes import signal_name
from holdfast.evaluate.harness.child import log_name
from holdfast.evaluate.harness.jobs import Asked, read
from holdfast.evaluate.harness.nursery import Child, Nursery
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.wire.messages import RunTask, TaskEnded

STARTS = 3
"""How often a client is started at most: whatever kills it so often would kill it again."""
_KEPT = 256  # outcomes, for a coordinator that was away
_REST_S = 5.0  # for what an ended process had said to be read


class Runs:
    """Runs each task once, and keeps its outcome for a coordinator that was away when it came.

    Args:
        nursery: forks the clients.
        tell: hears of each end.
        building: clients that may build their requests at a time; those that wait for answers do not count.
    """

    def __init__(self, nursery: Nursery, tell: Callable[[TaskEnded], None], building: int) -> None:
        self._nursery, self._tell = nursery, tell
        self._building = asyncio.Semaphore(building)
        self._running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._ended: OrderedDict[tuple[int, int], TaskEnded] = OrderedDict()
        self.pids: dict[tuple[int, int], int] = {}
        """Of the clients that run, by model and task."""

    def run(self, job: RunTask) -> None:
        """Run a task, unless it runs; say what it came to, also if it did so before."""
        place = job.facts.model, job.task
        if place in self._ended:
            self._tell(self._ended[place])
        elif place not in self._running:
            self._running[place] = asyncio.create_task(self._run(job))

    async def _run(self, job: RunTask) -> None:
        place = job.facts.model, job.task
        ended = None
        exit_code = 0
        for _start in range(STARTS):
            try:
                ended, exit_code = await self._start(job)
            except EvaluationError:  # no zygote: the host ends
                return
            if ended is not None:
                break
        if ended is None:
            how = (
                f"killed by {signal_name(-exit_code)}"
                if exit_code < 0
                else f"with exit code {exit_code}"
            )
            error = (
                f"The process of the task {job.entry.name!r} ended {STARTS} times without a result, {how} the last "
                f"time. What it printed is in logs/{log_name(*place)}."
            )
            ended = TaskEnded(model=job.facts.model, task=job.task, error=error)
        if ended.result is not None:  # a task that failed is run again when it is asked for again
            self._ended[place] = ended
            if (
                len(self._ended) > _KEPT
            ):  # of one that is asked for after all, every answer is in the journal
                self._ended.popitem(last=False)
        del self._running[place]
        self._tell(ended)

    async def _start(self, job: RunTask) -> tuple[TaskEnded | None, int]:
        place = job.facts.model, job.task
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._building)
            child = await self._nursery.fork()
            child.send(job)
            listening = asyncio.create_task(self._listen(child, stack.pop_all()))
            try:
                exit_code = await child.exited
                ended = None
                with contextlib.suppress(TimeoutError):
                    ended = await asyncio.wait_for(listening, _REST_S)
            finally:
                listening.cancel()
                child.dismiss()
                self.pids.pop(place, None)
        return ended, exit_code

    async def _listen(self, child: Child, building: contextlib.AsyncExitStack) -> TaskEnded | None:
        async with building:
            while True:
                try:
                    match await read(child.reader):
                        case Asked():
                            await building.aclose()
                        case TaskEnded() as ended:
                            child.dismiss()
                            return ended
                        case _:
                            pass
                except EOFError:
                    return None
