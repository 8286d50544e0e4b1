"""Keep this node's sampler going, and send it the processes of the ranks.

The sampler is a process of its own. No end of the sampler touches training. A sampler that ends is
started again, and one that ends soon after each start is given up.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from holdfast.core.child_process import end_soon
from holdfast.profile import sampler_command, sampler_limit

FEED_EVERY_S: Final = 1.0
RESTART_WAIT_S: Final = 1.0


class Sampling:
    """The sampler of one node, for its agent. All methods are called from one event loop."""

    def __init__(self, node: str, ranks: Callable[[], Mapping[int, int]]) -> None:
        """Start nothing yet.

        Args:
            node: the name of the node.
            ranks: returns the process of each rank that lives on this node.
        """
        self._node = node
        self._ranks = ranks
        self._folder: Path | None = None
        self._is_wanted = asyncio.Event()
        self.pid: int | None = None

    def begin(self, folder: Path) -> None:
        """Start sampling into a folder, unless that has been requested before."""
        self._folder = self._folder or folder
        self._is_wanted.set()

    async def keep(self) -> None:
        """Run the sampler, again each time it ends, until this is cancelled."""
        await self._is_wanted.wait()
        assert self._folder is not None
        limit = sampler_limit()
        while True:
            began_s = time.monotonic()
            try:
                returncode = await self._run(self._folder)
            except (OSError, RuntimeError):  # no process, or no thread for its end, can be started
                returncode = 1
            # A sampler that a signal ended has not failed by itself, so the next one may well live.
            ran_s = math.inf if returncode < 0 else time.monotonic() - began_s
            if not limit.allows_restart(ran_s):
                await asyncio.Event().wait()  # the agent goes on without
            await asyncio.sleep(RESTART_WAIT_S)

    async def _run(self, folder: Path) -> int:
        command, environment = sampler_command(folder, self._node)
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        self.pid = process.pid
        feeding = asyncio.create_task(self._feed(process))
        try:
            return await process.wait()
        finally:
            self.pid = None
            feeding.cancel()
            await end_soon(process, 0.0)

    async def _feed(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        sent: dict[int, int] = {}
        with contextlib.suppress(OSError):  # it ends just now
            while True:
                ranks = dict(self._ranks())
                if ranks != sent:
                    process.stdin.write(json.dumps({"ranks": ranks}).encode() + b"\n")
                    await process.stdin.drain()
                    sent = ranks
                await asyncio.sleep(FEED_EVERY_S)
