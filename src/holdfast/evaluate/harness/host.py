"""The harness host of a node: runs tasks' clients and computes metrics, as the coordinator says.

`python -m holdfast.evaluate.harness.host --node N --slots K`, with the coordinator's address and the token in the
environment. It imports no harness itself: its zygote does, and forks a process for each task and for the metrics. It
ends when the coordinator says so or has been away for a minute, and everything that it started ends with it.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.processes import become_subreaper, die_with_parent, kill_descendants
from holdfast.evaluate.harness.measuring import LIMIT_S, Measuring
from holdfast.evaluate.harness.nursery import Nursery
from holdfast.evaluate.harness.runs import Runs
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.client import NOT_NOW, dial, waits_s

AWAY_S = 60.0
_ALIVE_EVERY_S = 1.0


class Host:
    """See the module.

    Args:
        address: host:port of the coordinator.
        token: of the evaluation.
        node: where this is.
        slots: metrics at a time.
        building: clients that build their requests at a time.
        away_s: how long the coordinator may be away.
        metric_limit_s: of one sample's metric.
        clock: to tell how long the coordinator was away.
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
        self._runs = Runs(self._nursery, self._tell, building)
        self._measuring = Measuring(self._nursery, self._tell, slots, metric_limit_s)
        self._writer: asyncio.StreamWriter | None = None
        self._prepared: tuple[messages.Prepare, asyncio.Task[messages.Prepared]] | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Do what the coordinator says until it wants no more.

        Raises:
            EvaluationError: it refuses or was away for too long, or the zygote died.
        """
        await self._nursery.start()
        try:
            line = asyncio.create_task(self._stay_connected())
            lost = asyncio.create_task(self._nursery.gone.wait())
            await asyncio.wait((line, lost), return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                line.cancel()
                raise EvaluationError(
                    "The parent of the harness's processes died; this host is to be started anew."
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
                living = asyncio.create_task(self._say_alive())
                try:
                    while not isinstance(message := await messages.read(reader), messages.Stop):
                        self._heard(message)
                    return
                finally:
                    living.cancel()
                    self._writer, gone_since_s = None, self._clock.monotonic_s()
                    writer.close()
            away_s = self._clock.monotonic_s() - gone_since_s
            if away_s > self._away_s:
                raise EvaluationError(
                    f"The coordinator at {self._address} has been away for {away_s:.0f} s."
                )
            await asyncio.sleep(next(waits))

    def _heard(self, message: messages.Message) -> None:
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
        """Once: a coordinator that comes back asks for the same again."""
        if self._prepared is None or self._prepared[0] != order:
            self._prepared = order, asyncio.create_task(self._nursery.prepare(order))
        self._tell(await asyncio.shield(self._prepared[1]))

    def _tell(self, message: messages.Message) -> None:
        """Say something if the line is up. Who is away asks again when it is back."""
        if self._writer is not None:
            self._writer.write(messages.encode(message))

    async def _say_alive(self) -> None:
        while True:
            self._tell(messages.Alive())
            await asyncio.sleep(_ALIVE_EVERY_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the host."""
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
