"""Run a node's tests in processes that are killed at a time limit, and die with this process."""

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
from holdfast.recover.localise.solo import READY, CheckResult
from holdfast.recover.localise.worker import PRODUCT

PORTS = 32
"""The number of free ports that a node reserves for group tests. It may need two per round."""
MAX_ANSWER_BYTES = 64 * 1024
START_S = 30.0
"""The seconds that the import of torch may take, which are many on a busy node or a slow file
system."""
MARGIN_S = 2.0
END_S = 5.0


class NodeTester:
    """Run the tests on one node. Call all methods from one event loop."""

    def __init__(self) -> None:
        self._worker: asyncio.subprocess.Process | None = None
        self._checks: set[asyncio.subprocess.Process] = set()
        self._ending: list[asyncio.subprocess.Process] = []
        self._working = asyncio.Lock()

    async def carry_out(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an order of the kind `check`; return the answer to send.

        Raises:
            KeyError, TypeError, ValueError: the order is malformed.
        """
        if order["what"] == "solo":
            results = await self.solo()
            ports = await asyncio.to_thread(free_ports, PORTS)
            checks = [result.to_json() for result in results]
            return {"solo": checks, "ports": ports, "has_gpu": _has_gpu()}
        result = await self.group(GroupOrder.from_json(order))
        return {"group": vars(result)}

    async def solo(self, *, limit_s: float = solo.LIMIT_S) -> list[CheckResult]:
        """Run all solo checks at the same time; return their results."""
        checks = [self.check(name, limit_s=limit_s) for name in solo.CHECKS]
        return list(await asyncio.gather(self.product(limit_s=limit_s), *checks))

    async def check(
        self, name: str, *, limit_s: float, module: str = "holdfast.recover.localise.solo"
    ) -> CheckResult:
        """Run one solo check; a check that takes longer than `limit_s` twice has failed."""
        result = await self._checked(name, limit_s, module)
        return await self._checked(name, limit_s, module) if result.is_slow else result

    async def _checked(self, name: str, limit_s: float, module: str) -> CheckResult:
        process = await _start(module, name, tempfile.gettempdir(), str(os.getpid()))
        self._checks.add(process)
        began_s = time.monotonic()
        outcome: solo.Outcome = "failed"
        is_slow = False
        try:
            if not await _is_ready(process):
                outcome, evidence = "not looked at", f"the check did not start in {START_S:g} s"
            else:
                began_s = time.monotonic()
                async with asyncio.timeout(limit_s):
                    output, _ = await process.communicate()
                if not output:
                    evidence = f"the check ended with code {process.returncode} and no result"
                else:
                    return CheckResult.from_json(json.loads(output[:MAX_ANSWER_BYTES]))
        except TimeoutError:
            evidence, is_slow = f"no answer within {limit_s:g} s", True
        except (KeyError, TypeError, ValueError, AttributeError):
            outcome, evidence = "not looked at", "the answer of the check is malformed"
        finally:
            self._checks.discard(process)
            await _end(process)
        seconds = time.monotonic() - began_s
        return CheckResult(
            name=name, outcome=outcome, evidence=evidence, seconds=seconds, is_slow=is_slow
        )

    async def product(self, *, limit_s: float) -> CheckResult:
        """Run the matrix product. A slow import of torch does not count as a failure."""
        result = await self._product(limit_s)
        return await self._product(limit_s) if result.is_slow else result

    async def _product(self, limit_s: float) -> CheckResult:
        began_s = time.monotonic()
        outcome: solo.Outcome = "failed"
        is_slow = False
        try:
            answer = await self._worked({"what": PRODUCT}, limit_s)
            if "error" not in answer:
                return CheckResult.from_json(answer)
            evidence, is_slow = str(answer["error"]), answer.get("is_slow") is True
        except NotReady as error:
            outcome, evidence = "not looked at", str(error)
        except (KeyError, TypeError, ValueError, AttributeError):
            evidence = "the test process gave no answer"
        seconds = time.monotonic() - began_s
        return CheckResult(
            name=PRODUCT, outcome=outcome, evidence=evidence, seconds=seconds, is_slow=is_slow
        )

    async def group(self, order: GroupOrder, *, limit_s: float = group.LIMIT_S) -> GroupResult:
        """Take part in a group test; a test that takes longer than `limit_s` has failed."""
        try:
            answer = await self._worked({"what": "group", **vars(order)}, limit_s)
            if "error" not in answer:
                return GroupResult.from_json(answer)
            return GroupResult(passed=False, reason=str(answer["error"])[: group.MAX_REASON])
        except NotReady as error:
            return GroupResult(passed=None, reason=str(error))
        except (KeyError, TypeError, ValueError, AttributeError):
            return GroupResult(passed=False, reason="the test process gave no answer")

    async def _worked(self, order: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Have the worker process carry out an order.

        Raises:
            NotReady: torch could not be imported in time, or the answer is malformed.
            ValueError: the worker gave no answer in time, and was killed.
        """
        async with self._working:
            worker = await self._ready_worker()
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                async with asyncio.timeout(limit_s + MARGIN_S):  # the worker answers by `limit_s`
                    worker.stdin.write(json.dumps({**order, "limit_s": limit_s}).encode() + b"\n")
                    await worker.stdin.drain()
                    line = await worker.stdout.readline()
                return _answer(line)
            except TimeoutError:
                await self._end_worker()
                return {"error": f"no answer within {limit_s:g} s", "is_slow": True}
            except NotReady:
                await self._end_worker()
                raise
            except (OSError, ValueError) as error:
                await self._end_worker()
                raise ValueError("no answer") from error
            except asyncio.CancelledError:
                await self._end_worker()
                raise

    async def _ready_worker(self) -> asyncio.subprocess.Process:
        if self._worker is not None and self._worker.returncode is None:
            return self._worker
        self._worker = worker = await _start("holdfast.recover.localise.worker", str(os.getpid()))
        if not await _is_ready(worker):
            await self._end_worker()
            raise NotReady(f"the import of torch did not succeed within {START_S:g} s")
        return worker

    def close(self) -> None:
        """Kill all processes that still run."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._ending.append(worker)
        for process in [*self._checks, *self._ending]:
            _kill(process)

    async def ended(self) -> None:
        """Kill all processes that still run, and wait until they have ended."""
        self.close()
        for process in [*self._checks, *self._ending]:
            await _end(process)

    async def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await _end(worker)


class NotReady(Exception):
    """The worker did not start, or sent a malformed answer."""


def _answer(line: bytes) -> dict[str, Any]:
    if not line:
        raise ValueError("no answer")
    try:
        return dict(json.loads(line))
    except (TypeError, ValueError) as error:
        raise NotReady("the answer of the test process is malformed") from error


async def _is_ready(process: asyncio.subprocess.Process) -> bool:
    """Wait until a process has finished its imports; return True if they succeeded in time."""
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError, ValueError):
        async with asyncio.timeout(START_S):
            while line := await process.stdout.readline():
                if line == READY:  # a library may print while it is imported
                    return True
    return False


async def _start(module: str, *arguments: str) -> asyncio.subprocess.Process:
    words, environment = module_command(module)
    # The variables of the launcher would connect torch.distributed to the store of the job.
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


async def _end(process: asyncio.subprocess.Process) -> None:
    _kill(process)
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(TimeoutError):  # a process blocked in the kernel may not end
        async with asyncio.timeout(END_S):
            await process.wait()


def _has_gpu() -> bool:
    """Return True if the driver of a GPU is present, without importing torch, which takes seconds."""
    return any(Path("/dev").glob("nvidia[0-9]*"))
