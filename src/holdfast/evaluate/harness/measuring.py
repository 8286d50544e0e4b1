"""Compute metrics in a bounded number of processes; each process serves one task and model."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from holdfast.core.processes import signal_name
from holdfast.evaluate.harness.jobs import read
from holdfast.evaluate.harness.nursery import Child, Nursery
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.wire.messages import MeasureSample, SampleMeasured

LIMIT_S = 30 * 60.0
"""The seconds that the metric of one sample may take.

The longest metric in the paper (section 6.2) took this long.
"""
_KEPT = 4096  # results kept for an absent coordinator

_Kind = tuple[int, int]


class Measuring:
    """Compute metrics in the order of their jobs, at most `slots` at the same time.

    Args:
        nursery: forks the processes.
        tell: receives each result.
        slots: the largest number of processes.
        limit_s: the seconds that one metric may take. The process of a slower metric is killed, and
            the metric counts as lost and is not tried again.
    """

    def __init__(
        self,
        nursery: Nursery,
        tell: Callable[[SampleMeasured], None],
        slots: int,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._nursery, self._report, self._slots, self._limit_s = nursery, tell, slots, limit_s
        self._waiting: deque[MeasureSample] = deque()
        self._requested: set[bytes] = set()
        self._idle: dict[_Kind, list[asyncio.Future[MeasureSample | None]]] = {}
        self._workers: set[asyncio.Task[None]] = set()
        self._kept: OrderedDict[bytes, SampleMeasured] = OrderedDict()
        self.pids: dict[bytes, int] = {}
        """Metric key to the id of the process that computes the metric."""

    def measure(self, job: MeasureSample) -> None:
        """Compute a metric unless it is being computed.

        If the metric was computed before, its result is reported again.
        """
        if job.metric_key in self._kept:
            self._report(self._kept[job.metric_key])
        elif job.metric_key not in self._requested:
            self._requested.add(job.metric_key)
            self._waiting.append(job)
            self._assign()

    def _assign(self) -> None:
        while self._waiting:
            kind = _kind(self._waiting[0])
            if idle := self._idle.get(kind):
                idle.pop().set_result(self._waiting.popleft())
            elif len(self._workers) < self._slots:
                worker = asyncio.create_task(self._work(kind, self._waiting.popleft()))
                self._workers.add(worker)
                worker.add_done_callback(self._worker_ended)
            else:
                # End an idle process of another task to make room.
                other = next((futures for futures in self._idle.values() if futures), None)
                if other is not None:
                    other.pop().set_result(None)
                return

    def _worker_ended(self, worker: "asyncio.Task[None]") -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and worker.exception() is None:
            self._assign()

    async def _work(self, kind: _Kind, first: MeasureSample) -> None:
        try:
            child = await self._nursery.fork()
        except EvaluationError:  # no zygote: the host ends
            return
        job: MeasureSample | None = first
        try:
            while job is not None:
                result = await self._one(child, job)
                self._record(job, result)
                if result.lost:
                    return
                turn: asyncio.Future[MeasureSample | None] = (
                    asyncio.get_running_loop().create_future()
                )
                self._idle.setdefault(kind, []).append(turn)
                self._assign()
                job = await turn
        finally:
            child.dismiss()
            await child.exited

    async def _one(self, child: Child, job: MeasureSample) -> SampleMeasured:
        child.send(job)
        self.pids[job.metric_key] = child.pid
        reading = asyncio.create_task(read(child.reader))
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            await asyncio.wait(
                (reading, child.exited), timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if reading.done() and reading.exception() is None:
                result = reading.result()
                assert isinstance(result, SampleMeasured), result
                return result
        finally:
            reading.cancel()
            del self.pids[job.metric_key]
        if child.exited.done() or reading.done():
            code = await child.exited
            error = f"The process that computed it was {'killed by ' + signal_name(-code) if code < 0 else 'ended'}."
        else:
            child.kill()
            error = f"It took longer than {self._limit_s:.0f} s and was stopped."
        return SampleMeasured(
            metric_key=job.metric_key, seconds=loop.time() - started_s, error=error, lost=True
        )

    def _record(self, job: MeasureSample, result: SampleMeasured) -> None:
        self._requested.discard(job.metric_key)
        # A metric that took too long is not tried again.
        if not result.lost or result.seconds >= self._limit_s:
            self._kept[job.metric_key] = result
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._report(result)


def _kind(job: MeasureSample) -> _Kind:
    return job.facts.model, job.task
