"""Run the tests of one node in processes that are killed at a limit, and that die with this one."""

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.processes import module_command
from holdfast.core.sockets import free_ports
from holdfast.recover.localise import group, solo
from holdfast.recover.localise.group import GroupOrder, GroupResult
from holdfast.recover.localise.solo import CheckResult

PORTS = 32
"""Free ports of a node for its group tests: it may need two a round."""
MAX_ANSWER_BYTES = 64 * 1024


class Tester:
    """The tests of one node. Call all of it from one event loop."""

    def __init__(self) -> None:
        self._worker: asyncio.subprocess.Process | None = None
        self._checks: set[asyncio.subprocess.Process] = set()

    async def carry_out(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an order `check` of the supervisor; return the answer as it is sent.

        Raises:
            KeyError, TypeError, ValueError: the order is malformed.
        """
        if order["what"] == "solo":
            results = await self.solo()
            ports = await asyncio.to_thread(free_ports, PORTS)
            told = [result.to_json() for result in results]
            return {"solo": told, "ports": ports, "has_gpu": _has_gpu()}
        result = await self.group(GroupOrder.from_json(order))
        return {"group": vars(result)}

    async def solo(self, *, limit_s: float = solo.LIMIT_S) -> list[CheckResult]:
        """Run all solo checks at the same time; return their results."""
        await self._start_worker()  # its import of torch goes on meanwhile
        return list(await asyncio.gather(*(self.check(name, limit_s) for name in solo.CHECKS)))

    async def check(
        self, name: str, limit_s: float, *, module: str = "holdfast.recover.localise.solo"
    ) -> CheckResult:
        """Run one solo check; one that takes longer than `limit_s` has failed."""
        began_s = time.monotonic()
        process = await _start(module, name, tempfile.gettempdir(), str(os.getpid()))
        self._checks.add(process)
        said = b""
        try:
            async with asyncio.timeout(limit_s):
                said, _ = await process.communicate()
            return CheckResult.from_json(json.loads(said[:MAX_ANSWER_BYTES]))
        except TimeoutError:
            evidence = f"no answer within {limit_s:g} s"
        except (KeyError, TypeError, ValueError, AttributeError):
            evidence = f"the check ended with code {process.returncode} and no result"
        finally:
            self._checks.discard(process)
            _kill(process)
        seconds = time.monotonic() - began_s
        return CheckResult(name=name, outcome="failed", evidence=evidence, seconds=seconds)

    async def group(self, order: GroupOrder, *, limit_s: float = group.LIMIT_S) -> GroupResult:
        """Take part in a group test; one that takes longer than `limit_s` has failed."""
        await self._start_worker()
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                worker.stdin.write(json.dumps(vars(order)).encode() + b"\n")
                await worker.stdin.drain()
                result = GroupResult.from_json(json.loads(await worker.stdout.readline()))
        except TimeoutError:
            result = GroupResult(passed=False, reason=f"no answer within {limit_s:g} s")
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            await _ended(worker)
            reason = f"the test process ended with code {worker.returncode}"
            result = GroupResult(passed=False, reason=reason)
        if result.passed is not True:
            self._stop_worker()
        return result

    def close(self) -> None:
        """Kill what still runs."""
        self._stop_worker()
        for process in list(self._checks):
            _kill(process)

    async def _start_worker(self) -> None:
        if self._worker is None or self._worker.returncode is not None:
            self._worker = await _start("holdfast.recover.localise.group", str(os.getpid()))

    def _stop_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            _kill(worker)


async def _start(module: str, *arguments: str) -> asyncio.subprocess.Process:
    words, environment = module_command(module)
    # The launcher's variables would lead torch.distributed to the job's own store.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return await asyncio.create_subprocess_exec(
        *words,
        *arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        limit=MAX_ANSWER_BYTES,
    )


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def _ended(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await process.wait()


def _has_gpu() -> bool:
    """Return whether the driver of a GPU is there; without torch, whose import takes seconds."""
    return any(Path("/dev").glob("nvidia[0-9]*"))
