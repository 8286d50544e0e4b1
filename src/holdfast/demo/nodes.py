"""Start the nodes of a run of the demonstration, each in a process that works like `holdfast run`.

    python -m holdfast.demo.nodes PARENT_PID HOME RUN NNODES HOST:PORT

The process of the first node prints each event of the supervisor as a line with a JSON array. The
processes of other nodes print nothing. A node's process, with all processes of the node, ends when
the demonstration ends, even if the demonstration is killed.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.processes import die_with_parent, module_command
from holdfast.core.sockets import free_ports
from holdfast.recover import Meeting, RunSpec, board_of, join, meeting_of, supervise
from holdfast.testing.hosts import Hosts

JOIN_S = 60.0
"""Seconds within which the first node must publish its meeting place."""
END_S = 60.0
"""Seconds within which the other nodes must end after the first node."""
STOP_S = 90.0
"""Seconds within which a run must end after Ctrl-C."""
POLL_S = 0.05

Observed = tuple[str, Mapping[str, Any]]
"""An event of the supervisor, with its kind and its data."""


class Nodes:
    """The nodes of one run, as a context manager; at the end of the block all nodes have ended."""

    def __init__(
        self,
        run: str,
        home: Path,
        *,
        nnodes: int,
        rendezvous: str,
        hosts: Hosts | None,
        log: Path,
    ) -> None:
        """Store what each node's process needs; `start` starts the nodes.

        Args:
            run: the id of the run, which is recorded in the ledger in `home`.
            home: `$HOLDFAST_HOME`.
            nnodes: the number of nodes that train.
            rendezvous: the address and port at which the nodes meet.
            hosts: the hosts of the nodes; None if all nodes are on this host.
            log: the file for the error messages of the nodes' processes.
        """
        self._run = run
        self._home = home
        self._nnodes = nnodes
        self._rendezvous = rendezvous
        self._hosts = hosts
        self._log = log
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._observed: queue.SimpleQueue[Observed | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that all nodes' processes share."""
        return module_command("holdfast.demo.nodes")[1]

    def start(self, name: str, variables: Mapping[str, str] | None = None) -> None:
        """Start a node; the node that is started first leads the run.

        Args:
            name: the name of the node.
            variables: further environment variables of the node's processes.
        """
        words, environment = module_command("holdfast.demo.nodes")
        place = {"HOLDFAST_NODE_NAME": name}
        words += [str(os.getpid()), str(self._home), self._run]
        words += [str(self._nnodes), self._rendezvous]
        if self._hosts is not None:
            words, place = self._hosts.command(name, words), self._hosts.environment(name)
        place["HOLDFAST_HOME"] = str(self._home)  # the injector finds the node by this variable
        is_first = not self._processes
        with self._log.open("ab") as log:
            self._processes[name] = process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_first else subprocess.DEVNULL,
                stderr=log,
                env={**environment, **place, **(variables or {})},
                # Ctrl-C in the terminal goes to the demonstration alone, which stops the run.
                start_new_session=True,
            )
        if is_first:
            threading.Thread(target=self._receive, args=(process,), daemon=True).start()

    def meet(self) -> None:
        """Wait until the first node has published its meeting place, which other nodes need.

        Raises:
            HoldfastError: the first node ended, or did not publish a meeting place in time.
        """
        first = next(iter(self._processes.values()))
        place = self._home / "rendezvous"
        deadline_s = time.monotonic() + JOIN_S
        while not any(place.glob("*.json")):
            if first.poll() is not None or time.monotonic() > deadline_s:
                raise HoldfastError(f"The first node did not start: see {self._log}.")
            time.sleep(POLL_S)

    def observed(self) -> Iterator[Observed]:
        """Yield the events that the supervisor observes, until the run has ended.

        On Ctrl-C the run saves its state and stops.
        """
        is_stopping = False
        while True:
            try:
                one = self._observed.get(timeout=STOP_S if is_stopping else None)
            except KeyboardInterrupt:
                is_stopping = True
                first = next(iter(self._processes.values()))
                with contextlib.suppress(ProcessLookupError):
                    first.send_signal(signal.SIGINT)
                continue
            except queue.Empty:
                return
            if one is None:
                return
            yield one

    def wait(self) -> dict[str, int]:
        """Wait until all nodes have ended; return their exit codes.

        Raises:
            HoldfastError: a node did not end in time.
        """
        deadline_s = time.monotonic() + END_S
        codes = {}
        for name, process in self._processes.items():
            try:
                codes[name] = process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise HoldfastError(
                    f"Node {name} did not end within {END_S:g} s of the run's end: see {self._log}."
                ) from None
        return codes

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # a last line that was cut off
                    kind, data = json.loads(line)
                    self._observed.put((kind, data))
        self._observed.put(None)


def main() -> int:
    """Run one node; return the exit code."""
    parent_pid, home, run, nnodes, rendezvous = sys.argv[1:6]
    die_with_parent(int(parent_pid))
    paths = RunPaths(Path(home), run)
    with Ledger.open(ledger_url(paths.home)) as ledger:
        recorded = ledger.run(run)
        meeting = meeting_of(
            recorded.command, nnodes=int(nnodes), rendezvous=rendezvous, spares=0, stem=run
        )
        try:
            return _take_part(paths, ledger, meeting)
        except HoldfastError as error:
            print(error, file=sys.stderr)  # noqa: T201 - the log of the node
            return 1


def _take_part(paths: RunPaths, ledger: Ledger, meeting: Meeting | None) -> int:
    is_led = meeting is not None and meeting.is_led(board_of(paths.home, meeting.key, ledger.url))
    listening = None if meeting is None or is_led else meeting.listen()
    if meeting is None or listening is not None:
        outcome = supervise(
            paths.run_id,
            ledger,
            paths.home,
            observer=_print_observed,
            echo=False,
            meeting=meeting,
            listening=listening,
        )
        return outcome.exit_code
    run = ledger.run(paths.run_id)
    spec = RunSpec.from_options(run.command, run.cwd, run.options)
    outcome = join(
        spec,
        ledger,
        paths.home,
        meeting=meeting,
        observer=lambda _kind, _data: None,
        echo=False,
    )
    return outcome.exit_code


def _print_observed(kind: str, data: Mapping[str, Any]) -> None:
    print(json.dumps([kind, data]), flush=True)  # noqa: T201 - the demonstration reads it


def rendezvous_of(hosts: Hosts | None, names: Sequence[str]) -> str:
    """Return the address at which the nodes meet: the first node's address, with a free port."""
    if hosts is not None:
        return f"{hosts.addresses[names[0]]}:29500"  # no other program is on that host
    return f"127.0.0.1:{free_ports(1)[0]}"


if __name__ == "__main__":
    sys.exit(main())
