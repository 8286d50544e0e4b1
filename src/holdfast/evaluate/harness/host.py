"""Run a node's harness host: start task clients and metrics as the coordinator orders.

The command is `python -m holdfast.evaluate.harness.host --node N --slots K`, with the coordinator's
address and token in the environment. The host imports no harness. Its zygote imports the harnesses,
and forks a process for each task and processes for the metrics. The host ends when the coordinator
orders it, or after a minute without a connection to the coordinator, and ends all its processes.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.processes import become_subreaper, die_with_parent, kill_descendants, signal_name
from holdfast.evaluate.harness.child import log_name
from holdfast.evaluate.harness.jobs import AllSent, read
from holdfast.evaluate.harness.measuring import LIMIT_S, Measuring
from holdfast.evaluate.harness.nursery import Child, Nursery
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.client import NOT_NOW, dial, waits_s
from holdfast.evaluate.wire.messages import RunTask, TaskEnded

STARTS = 3
"""The largest number of starts of one client, since the same cause would kill it again."""
_KEPT = 256  # outcomes kept for an absent coordinator
_REST_S = 5.0  # for reading an ended process's last messages


class Runs:
    """Run each task once, in a client, and keep its outcome until the coordinator has received it.

    A client is a child process that builds the requests of one task, waits for the answers and
    computes the scores.

    Args:
        nursery: forks the clients.
        tell: a function that sends an outcome to the coordinator.
        building: the largest number of clients that build requests at the same time; clients that
            wait for answers do not count.
    """

    def __init__(self, nursery: Nursery, tell: Callable[[TaskEnded], None], building: int) -> None:
        self._nursery, self._send = nursery, tell
        self._building = asyncio.Semaphore(building)
        self._running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._ended: OrderedDict[tuple[int, int], TaskEnded] = OrderedDict()
        self.pids: dict[tuple[int, int], int] = {}
        """(model, task) to the process id of the running client."""

    def run(self, job: RunTask) -> None:
        """Run a task unless it is running.

        If the task has already ended, its outcome is reported again.
        """
        place = job.facts.model, job.task
        if place in self._ended:
            self._send(self._ended[place])
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
                f"The process of the task {job.entry.name!r} ended {STARTS} times without a "
                f"result, {how} the last "
                f"time. Its output is in logs/{log_name(*place)}."
            )
            ended = TaskEnded(model=job.facts.model, task=job.task, error=error)
        if ended.result is not None:  # a failed task runs again on the next order
            self._ended[place] = ended
            if len(self._ended) > _KEPT:
                # If such a task is ordered again, every answer is in the journal.
                self._ended.popitem(last=False)
        del self._running[place]
        self._send(ended)

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
                        case AllSent():
                            await building.aclose()
                        case TaskEnded() as ended:
                            child.dismiss()
                            return ended
                        case _:
                            pass
                except EOFError:
                    return None


AWAY_S = 60.0
_ALIVE_EVERY_S = 1.0


class Host:
    """Run the harness host of a node.

    Args:
        address: host:port of the coordinator.
        token: the evaluation's token.
        node: the number of this node.
        slots: the number of metrics that are computed at the same time.
        building: the largest number of clients that build requests at the same time.
        away_s: the seconds for which the coordinator may be unreachable.
        metric_limit_s: the seconds that the metric of one sample may take.
        clock: measures the coordinator's absence.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        node: int,
        slots: int,
        building: int,
        away_s: float = AWAY_S,
        metric_limit_s: float = LIMIT_S,
        clock: Clock | None = None,
    ) -> None:
        self._address, self._away_s = address, away_s
        self._clock: Clock = clock or SystemClock()
        self._hello = messages.Hello(
            token=token, role="host", name=f"host-{node}", node=node, pid=os.getpid()
        )
        self._nursery = Nursery(node)
        self._runs = Runs(self._nursery, self._send, building)
        self._measuring = Measuring(self._nursery, self._send, slots, metric_limit_s)
        self._writer: asyncio.StreamWriter | None = None
        self._prepared: tuple[messages.Prepare, asyncio.Task[messages.Prepared]] | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Carry out the coordinator's orders until it sends `Stop`.

        Raises:
            EvaluationError: the coordinator refuses this host, was unreachable for too long, or the
                zygote died.
        """
        await self._nursery.start()
        try:
            line = asyncio.create_task(self._stay_connected())
            lost = asyncio.create_task(self._nursery.gone.wait())
            await asyncio.wait((line, lost), return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                line.cancel()
                raise EvaluationError(
                    "The parent of the harness's processes died; this host must be restarted."
                )
            lost.cancel()
            line.result()
        finally:
            await self._nursery.close()

    async def _stay_connected(self) -> None:
        waits, gone_since_s = waits_s(), self._clock.monotonic_s()
        while True:
            with contextlib.suppress(*NOT_NOW):
                reader, writer = await dial(self._address, self._hello)
                waits, self._writer = waits_s(), writer
                living = asyncio.create_task(self._send_alive())
                try:
                    while not isinstance(message := await messages.read(reader), messages.Stop):
                        self._handle(message)
                    return
                finally:
                    living.cancel()
                    self._writer, gone_since_s = None, self._clock.monotonic_s()
                    writer.close()
            away_s = self._clock.monotonic_s() - gone_since_s
            if away_s > self._away_s:
                raise EvaluationError(
                    f"The coordinator at {self._address} was unreachable for {away_s:.0f} s."
                )
            await asyncio.sleep(next(waits))

    def _handle(self, message: messages.Message) -> None:
        match message:
            case messages.Prepare():
                preparing = asyncio.create_task(self._prepare(message))
                self._background.add(preparing)
                preparing.add_done_callback(self._background.discard)
            case messages.RunTask():
                self._runs.run(message)
            case messages.MeasureSample():
                self._measuring.measure(message)
            case messages.Refused(why=why):
                raise EvaluationError(why)
            case _:
                pass

    async def _prepare(self, order: messages.Prepare) -> None:
        """Prepare the harnesses once; a coordinator that reconnects sends the same order again."""
        if self._prepared is None or self._prepared[0] != order:
            self._prepared = order, asyncio.create_task(self._nursery.prepare(order))
        self._send(await asyncio.shield(self._prepared[1]))

    def _send(self, message: messages.Message) -> None:
        """Send a message if connected.

        A message that is lost needs no repetition here: a coordinator that reconnects sends its
        orders again.
        """
        if self._writer is not None:
            self._writer.write(messages.encode(message))

    async def _send_alive(self) -> None:
        while True:
            self._send(messages.Alive())
            await asyncio.sleep(_ALIVE_EVERY_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the host with these command-line arguments."""
    parser = argparse.ArgumentParser(prog="holdfast.evaluate.harness.host")
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument(
        "--slots", type=int, default=0, help="metrics at a time; 0 for a slot a core"
    )
    parser.add_argument("--away-s", type=float, default=AWAY_S)
    parser.add_argument("--metric-limit-s", type=float, default=LIMIT_S)
    options = parser.parse_args(arguments)
    die_with_parent()
    become_subreaper()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )

    async def serve() -> None:
        await Host(
            os.environ[messages.ENV_ADDRESS],
            os.environ[messages.ENV_TOKEN],
            node=options.node,
            slots=options.slots or cores,
            building=cores,
            away_s=options.away_s,
            metric_limit_s=options.metric_limit_s,
        ).serve()

    try:
        asyncio.run(serve())
    except EvaluationError as error:
        print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201  into the log
        sys.exit(1)
    finally:
        kill_descendants()


if __name__ == "__main__":
    main()
