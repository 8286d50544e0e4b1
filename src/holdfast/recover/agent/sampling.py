"""Keep the sampler process of this node going, and send it the process ids of the ranks.

The sampler records counters of the node for a profile. It is a separate process, so its end does
not disturb training. If the sampler ends, it is started again, unless it has ended soon after each
of several starts.
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
        """Store what `begin` and `keep` need.

        Args:
            node: the name of the node.
            ranks: a function that returns the process id of each living rank on this node.
        """
        self._node = node
        self._ranks = ranks
        self._folder: Path | None = None
        self._is_wanted = asyncio.Event()
        self.pid: int | None = None

    def begin(self, folder: Path) -> None:
        """Start sampling into a folder, unless sampling was started before."""
        self._folder = self._folder or folder
        self._is_wanted.set()

    async def keep(self) -> None:
        """Run the sampler, and start it again whenever it ends, until the task is cancelled."""
        await self._is_wanted.wait()
        assert self._folder is not None
        limit = sampler_limit()
        while True:
            began_s = time.monotonic()
            try:
                returncode = await self._run(self._folder)
            except (OSError, RuntimeError):  # no process or thread can be started
                returncode = 1
            # A sampler that a signal ended has not failed by itself, so the next one may well
            # survive.
            ran_s = math.inf if returncode < 0 else time.monotonic() - began_s
            if not limit.allows_restart(ran_s):
                await asyncio.Event().wait()  # the agent continues without a sampler
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
        with contextlib.suppress(OSError):  # the sampler is just ending
            while True:
                ranks = dict(self._ranks())
                if ranks != sent:
                    process.stdin.write(json.dumps({"ranks": ranks}).encode() + b"\n")
                    await process.stdin.drain()
                    sent = ranks
                await asyncio.sleep(FEED_EVERY_S)
