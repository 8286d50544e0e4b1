"""Run the supervisor in a separate process on the node that leads a run.

If this process ends, the node's process starts it again, while the ranks keep running. The next
supervisor reads the ledger, listens on the same address, and takes over the present attempt. It has
a higher generation; agents ignore orders from lower ones.
"""

import asyncio
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.clock import SteadyClock
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths
from holdfast.core.processes import die_with_parent
from holdfast.recover.agent.stream import Stream
from holdfast.recover.conduct import HERE
from holdfast.recover.leadership import HandedOver, Superseded, leadership_of
from holdfast.recover.outcome import Outcome
from holdfast.recover.people.notifier import Notifier
from holdfast.recover.spec import RunSpec
from holdfast.recover.supervisor import Observer, Supervisor

RETRY_S = 6.0
"""If the start of a supervisor fails, the process ends after this number of seconds, so that the
node starts another one.
"""
WAITING_BYTES = 4 * 1024 * 1024
"""The largest number of bytes that wait for a node's process that does not read. Beyond it, steps
are not reported.
"""


def main() -> None:
    """Run the command `supervisor_process CONTROL_FD LISTENING_FD PARENT_PID`."""
    control_fd, listening_fd, parent_pid = map(int, sys.argv[1:4])
    die_with_parent(parent_pid)
    asyncio.run(_run(socket.socket(fileno=control_fd), socket.socket(fileno=listening_fd)))


async def _run(control: socket.socket, listening: socket.socket) -> None:
    node = await Stream.of_socket(control)
    begin = await node.receive()
    if begin is None:
        return

    notifier: Notifier | None = None

    def observe(kind: str, data: Mapping[str, Any]) -> None:
        if notifier is not None:
            notifier.observed(kind)
        if kind != "step" or node.waiting_bytes < WAITING_BYTES:
            node.send({"kind": "observe", "what": kind, "data": dict(data)})

    try:
        supervisor, ledger = await asyncio.to_thread(_prepare, begin, observe)
    except Superseded:
        node.send({"kind": "superseded"})
        await node.drained()
        return
    except (HoldfastError, OSError) as error:
        if begin["adopts"]:  # a temporary failure of database or disk must not end a healthy job
            observe("trouble", {"text": f"The next supervisor cannot start yet: {error}"})
            await asyncio.sleep(RETRY_S)
            sys.exit(1)
        node.send({"kind": "failed", "text": str(error)})
        await node.drained()
        return
    node.send({"kind": "generation", "number": supervisor.generation})
    try:
        with ledger:
            paths = RunPaths(Path(begin["home"]), begin["run_id"])
            notifier = Notifier(begin["notify"], paths, ledger, observe, clock=_clock(begin))
            notifier.start(anew=not begin["is_lost"] and not begin["adopts"])
            outcome = await _supervise(begin, node, listening, supervisor, notifier)
        result = {
            "state": outcome.state,
            "exit_code": outcome.exit_code,
            "outcome": outcome.sentence,
        }
        node.send({"kind": "ended", **result})
    except HandedOver:
        node.send({"kind": "handed_over"})
    except Superseded:
        node.send({"kind": "superseded"})
    except HoldfastError as error:
        node.send({"kind": "failed", "text": str(error)})
    except Exception as error:
        traceback.print_exc()
        node.send({"kind": "failed", "text": f"Holdfast itself failed: {error!r}."})
    await node.drained()
    node.close()


def _clock(begin: Mapping[str, Any]) -> SteadyClock:
    """Return a clock that is the same for all supervisors that the node starts."""
    return SteadyClock(float(begin["wall_offset_s"]))


def _prepare(begin: Mapping[str, Any], observe: Observer) -> tuple[Supervisor, Ledger]:
    """Take the supervisor's generation, and read the records of the run."""
    paths = RunPaths(Path(begin["home"]), begin["run_id"])
    ledger = Ledger.open(begin["ledger"])
    try:
        leadership = leadership_of(ledger.url, paths, ledger)
        generation = leadership.take(begin["node_id"], begin["after"])
        leadership.beat(generation)
        run = ledger.run(paths.run_id)
        supervisor = Supervisor(
            RunSpec.from_options(run.command, run.cwd, run.options),
            paths,
            ledger,
            token=begin["token"],
            generation=generation,
            own_node=begin["node_id"],
            observer=observe,
            clock=_clock(begin),
        )
        supervisor.remember(is_lost=begin["is_lost"], adopts=begin["adopts"])
    except BaseException:
        ledger.close()
        raise
    return supervisor, ledger


async def _supervise(
    begin: Mapping[str, Any],
    node: Stream,
    listening: socket.socket,
    supervisor: Supervisor,
    notifier: Notifier,
) -> Outcome:
    obeying = asyncio.create_task(_obey(node, supervisor))
    leads = True
    try:
        return await supervisor.run(listening, adopts=begin["adopts"], stop=begin["stop"])
    except Superseded:
        leads = False
        raise
    finally:
        await notifier.close(leads=leads)
        obeying.cancel()


async def _obey(node: Stream, supervisor: Supervisor) -> None:
    while (message := await node.receive()) is not None:
        if message["kind"] == "ping":
            node.send({"kind": "pong"})
        elif message["kind"] == "stop":
            supervisor.request_stop(str(message["by"]), HERE, int(message["count"]))


if __name__ == "__main__":
    main()
