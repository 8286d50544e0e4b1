"""The supervisor's process, on the first node of a run: started by the node, and started again when it ends.

A supervisor that is gone ends no rank. The next one reads the ledger, listens at the same address, takes over the
attempt that is going on, and has a higher generation: agents obey no older one.
"""

import asyncio
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths
from holdfast.core.processes import die_with_parent
from holdfast.recover.agent.stream import Stream
from holdfast.recover.leadership import Superseded, next_generation
from holdfast.recover.outcome import Outcome
from holdfast.recover.spec import RunSpec
from holdfast.recover.supervisor import HERE, Supervisor

RETRIES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""How long a supervisor that follows on another one waits for the ledger, each time."""
WAITING_BYTES = 4 * 1024 * 1024
"""So much may wait for a node that does not read; then steps are not reported to it."""


def main() -> None:
    """`supervisor_process CONTROL_FD LISTENING_FD PARENT_PID`: the node has started this process."""
    control_fd, listening_fd, parent_pid = map(int, sys.argv[1:4])
    die_with_parent(parent_pid)
    asyncio.run(_run(socket.socket(fileno=control_fd), socket.socket(fileno=listening_fd)))


async def _run(control: socket.socket, listening: socket.socket) -> None:
    node = await Stream.of_socket(control)
    begin = await node.receive()
    if begin is None:
        return

    def observe(kind: str, data: Mapping[str, Any]) -> None:
        if kind != "step" or node.waiting_bytes < WAITING_BYTES:
            node.send({"kind": "observe", "what": kind, "data": dict(data)})

    try:
        outcome = await _supervise(begin, node, listening, observe)
        said = {"state": outcome.state, "exit_code": outcome.exit_code, "outcome": outcome.sentence}
        node.send({"kind": "ended", **said})
    except Superseded:
        node.send({"kind": "superseded"})
    except HoldfastError as error:
        node.send({"kind": "failed", "text": str(error)})
    except Exception as error:
        traceback.print_exc()
        node.send({"kind": "failed", "text": f"Holdfast itself failed: {error!r}."})
    await node.drained()
    node.close()


async def _supervise(
    begin: Mapping[str, Any], node: Stream, listening: socket.socket, observe: Any
) -> Outcome:
    paths = RunPaths(Path(begin["home"]), begin["run_id"])
    generation = await asyncio.to_thread(next_generation, paths)
    for wait_s in RETRIES_S if begin["adopts"] else ():
        try:
            with Ledger.open(begin["ledger"]) as ledger:
                ledger.run(paths.run_id)
            break
        except HoldfastError:  # a database that restarts ends no healthy job
            await asyncio.sleep(wait_s)
    with Ledger.open(begin["ledger"]) as ledger:
        run = ledger.run(paths.run_id)
        supervisor = Supervisor(
            RunSpec.from_options(run.command, run.cwd, run.options),
            paths,
            ledger,
            token=begin["token"],
            generation=generation,
            own_node=begin["node_id"],
            observer=observe,
        )
        obeying = asyncio.create_task(_obey(node, supervisor))
        try:
            return await supervisor.run(
                listening, is_lost=begin["is_lost"], adopts=begin["adopts"], stop=begin["stop"]
            )
        finally:
            obeying.cancel()


async def _obey(node: Stream, supervisor: Supervisor) -> None:
    while (message := await node.receive()) is not None:
        if message["kind"] == "ping":
            node.send({"kind": "pong"})
        elif message["kind"] == "stop":
            supervisor.stop_asked(str(message["by"]), HERE, int(message["count"]))


if __name__ == "__main__":
    main()
