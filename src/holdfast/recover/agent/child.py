"""Keep a child process of the node's process going: the agent, or the supervisor.

If a child ends or stops answering, the next child is started. The node's process holds the socket
on which the child listens, so that new connections wait until the next child accepts them.
"""

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.core.child_process import RestartLimit
from holdfast.core.errors import HoldfastError
from holdfast.recover.agent.stream import Stream

RESTARTS = 1000
QUICK_END_S = 5.0
QUICK_ENDS = 5
"""The node gives up if this number of children in a row end within `QUICK_END_S` of their start."""
RESTART_WAIT_S = 0.2
PING_S = 2.0
UNANSWERED = 10
"""A child counts as frozen if it sends no message during this number of pings."""
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(kw_only=True)
class KeptProcess:
    """A process that is kept going. Call all methods from one event loop."""

    module: str
    listening: socket.socket
    begin: Callable[[], dict[str, Any]]
    """A function that returns the first message to send to a new process."""
    receive: Callable[[dict[str, Any]], None]
    complain: Callable[[str], None]
    """A function that reports a sentence to people."""
    starting: asyncio.Lock
    """A lock that is held while a process is started with blocked signals, so that no other process
    inherits the blocked signals.
    """
    inherits: tuple[int, ...] = ()
    """Additional file descriptors that the process inherits."""
    stream: Stream | None = None
    starts: int = 0
    missed: int | None = None
    """The number of pings since the last message; None before the first message, since imports may
    take long.
    """

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, if the process is running."""
        if self.stream is not None:
            self.stream.send(message)

    async def keep(self, is_over: Callable[[], bool]) -> None:
        """Run the process, and start it again whenever it ends, until `is_over` is True.

        Raises:
            HoldfastError: the process has ended soon after each of several starts.
        """
        limit = RestartLimit(restarts=RESTARTS, quick_end_s=QUICK_END_S, quick_ends=QUICK_ENDS)
        while not is_over():
            began_s = time.monotonic()
            try:
                returncode = await self._run()
            except OSError as error:  # the host has no process or memory to spare
                self.complain(f"{self.module} cannot be started: {error}.")
                returncode = -1
                await asyncio.sleep(QUICK_END_S)
            if is_over():
                return
            # A process that a signal ended has not failed by itself, so the next one may well
            # survive.
            ran_s = math.inf if returncode < 0 else time.monotonic() - began_s
            if not limit.allows_restart(ran_s):
                raise HoldfastError(
                    f"{self.module} ended {limit.quick_ends} times in a row, the last time with code {returncode}. "
                    "See what was printed above."
                )
            await asyncio.sleep(RESTART_WAIT_S)

    async def _run(self) -> int:
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self.listening.fileno(), *self.inherits)
        arguments = [*map(str, fds), str(os.getpid())]
        # The signals stay blocked in the child, because a scheduler may send SIGTERM to all
        # processes of a job, but only the node's process must act on it.
        async with self.starting:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", self.module, *arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=fds,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                theirs.close()
        self.starts += 1
        self.stream = stream = await Stream.of_socket(ours)
        self.missed = None
        watching = asyncio.create_task(self._watch(process))
        try:
            stream.send(self.begin())
            while (message := await stream.receive()) is not None:
                self.missed = 0
                self.receive(message)
            return await process.wait()
        finally:
            watching.cancel()
            self.stream = None
            stream.close()
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process that stops answering, such as a suspended one, so that the next can start."""
        while self.missed is None or self.missed < UNANSWERED:
            await asyncio.sleep(PING_S)
            if self.missed is not None:
                self.missed += 1
            self.send({"kind": "ping"})
        process.kill()
