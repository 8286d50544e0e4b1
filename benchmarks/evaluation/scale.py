"""Measure the limits of one coordinator: its policy alone, its memory, the process over TCP.

The policy's throughput and memory are those of the simulator's run (`simulate.evaluate`) in a
separate process, so memory includes the simulator's. The real coordinator is connected with one
process that plays a node, a host, the tasks' clients and the engines over TCP. The figure includes
the time of that process.
"""

import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import psutil

from common.jobs import DoesNotWork, say
from common.machine import Quiet
from common.table import Must, Row
from holdfast.evaluate.coordinator.config import CoordinatorConfig, CoordinatorFiles, encode_config
from holdfast.evaluate.types.engine import Curve, EngineSpec
from holdfast.evaluate.types.requests import Answer, encode_answer, keyed
from holdfast.evaluate.types.suite import Suite
from holdfast.evaluate.wire import messages
from holdfast.simulate.evaluate import simulate
from holdfast.simulate.workload import SimCluster, SimTask, Workload
from holdfast.testing.harness import synthetic_entry, synthetic_samples

TIMEOUT_S = 900.0
GB = 1e9


def rows(folder: Path, quiet: Quiet, *, quick: bool, rounds: int, seed: int) -> Iterator[Row]:
    """Yield completions per second, and memory."""
    del rounds
    samples, engines = (10_000, 64) if quick else (1_000_000, 2_048)
    quiet.wait()
    say(f"simulating {samples:,} samples on {engines:,} engines")
    policy = _in_a_process("policy", str(samples), str(engines), str(seed))
    named = f"{samples:,} samples, {engines:,} engines"
    yield Row(
        measure=f"{named}: samples completed in a second of the policy's own time",
        ours=policy["samples"] / policy["decide_s"],
        unit="samples/s",
        must=None if quick else Must(">=", 20_000),
    )
    yield Row(measure=f"{named}: the same of its and the simulator's time", ours=policy["samples"] / policy["wall_s"],
              unit="samples/s")  # fmt: skip
    yield Row(
        measure=f"{named}: memory of policy and simulator",
        ours=policy["rss_bytes"] / GB,
        unit="GB",
        must=None if quick else Must("<=", 2),
    )
    samples, engines = (2_000, 8) if quick else (100_000, 64)
    quiet.wait()
    say(f"a real coordinator, {samples:,} samples")
    real = _in_a_process("coordinator", str(samples), str(engines), str(folder / "coordinator"))
    named = f"the real coordinator over TCP, {samples:,} samples, {engines:,} engines"
    yield Row(measure=f"{named}: completed, committed and delivered", ours=samples / real["wall_s"],
              unit="samples/s")  # fmt: skip
    yield Row(
        measure=f"{named}: its CPU time a sample", ours=1e6 * real["cpu_s"] / samples, unit="us"
    )
    yield Row(measure=f"{named}: its memory", ours=real["rss_bytes"] / GB, unit="GB")


def _in_a_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "evaluation.scale", *arguments]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise DoesNotWork(f"{' '.join(arguments)} took longer than {TIMEOUT_S:.0f} s") from error
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise DoesNotWork(f"{' '.join(command)} left with {process.returncode}")
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def _policy(samples: int, engines: int, seed: int) -> dict[str, float]:
    rng, tasks = random.Random(seed), 60
    workload = Workload(
        tasks=tuple(
            SimTask(
                name=f"task-{number}",
                prompt_tokens=array("i", (rng.randint(100, 1000) for _ in range(samples // tasks))),
                new_tokens=array(
                    "i",
                    (min(512, int(rng.lognormvariate(4.0, 0.8))) for _ in range(samples // tasks)),
                ),
                max_new_tokens=512,
                metric_s=array("f", bytes(4 * (samples // tasks))),
            )
            for number in range(tasks)
        )
    )
    cluster = SimCluster(nodes=engines // 8, engines_per_node=8)
    began_s = time.perf_counter()
    outcome = simulate(workload, cluster, timed=True, seed=seed)
    return {
        "samples": outcome.samples,
        "wall_s": time.perf_counter() - began_s,
        "decide_s": outcome.decide_s,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


# The real coordinator


def _coordinator(samples: int, engines: int, folder: Path) -> dict[str, float]:
    tasks = 20
    entries = tuple(
        synthetic_entry(
            f"task-{number}",
            prompt_tokens=[64] * (samples // tasks),
            new_tokens=[8] * (samples // tasks),
        )
        for number in range(tasks)
    )
    config = CoordinatorConfig(
        evaluation_id="scale",
        suite=Suite(name="scale", entries=entries),
        spec=EngineSpec(kind="simulated"),
        engines_per_node=engines,
        nodes=1,
        folder=str(folder),
        journals=str(folder / "answers"),
    )
    files = CoordinatorFiles(folder)
    files.folder.mkdir(parents=True)
    files.token.write_text("token")
    files.config.write_bytes(encode_config(config))
    command = [sys.executable, "-m", "holdfast.evaluate.coordinator.server", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        return asyncio.run(asyncio.wait_for(_play(process.pid, files.address, config), TIMEOUT_S))
    finally:
        process.kill()
        process.wait()


async def _play(pid: int, address: Path, config: CoordinatorConfig) -> dict[str, float]:
    """Play all other processes, from the first sample sent to the last one delivered."""
    while not address.exists():
        await asyncio.sleep(0.02)
    port = int(address.read_text().rsplit(":", 1)[1])
    play = _Players(port, config)
    command = await play.dial("command", "command")
    node = await play.dial("node", "node-0", node=0)
    node.write(
        messages.encode(messages.NodeReport(host="here", cores=2, memory_bytes=1, gpus=0, store=""))
    )
    await play.dial("host", "host-0", node=0)
    for index in range(config.engines_per_node):
        await play.dial("engine", f"node-0/{index}", node=0)
    command.write(messages.encode(messages.AddModel(model=0, name="model")))
    coordinator = psutil.Process(pid)
    await play.ready.wait()
    before, began_s = coordinator.cpu_times(), time.perf_counter()
    play.go.set()
    await play.done.wait()
    wall_s, after = time.perf_counter() - began_s, coordinator.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    return {"wall_s": wall_s, "cpu_s": used_s, "rss_bytes": float(coordinator.memory_info().rss)}


class _Players:
    """A node, a host, clients and engines, as far as the coordinator sees them."""

    def __init__(self, port: int, config: CoordinatorConfig) -> None:
        self._port, self._suite = port, config.suite
        self._parts: set[asyncio.Task[None]] = set()
        self._left = 0
        self._clients = 0
        self.ready, self.go, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def dial(self, role: str, name: str, **more: int) -> asyncio.StreamWriter:
        """Connect in a role, and play it from then on."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        writer.write(
            messages.encode(
                messages.Hello(token="token", role=role, name=name, pid=os.getpid(), **more)
            )
        )
        part = asyncio.create_task(self._play(reader, writer))
        self._parts.add(part)
        return writer

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, ConnectionError, asyncio.CancelledError):
            await self._hear(reader, writer)
        writer.close()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = encode_answer(
            Answer(tokens=b"\x05\x00\x00\x00" * 8, finish="stop", prompt_tokens=64, new_tokens=8)
        )
        curve = Curve(
            prefill_tokens_per_s=1e6,
            request_s=1e-5,
            step_base_s=1e-5,
            step_sequence_s=1e-6,
            max_batch=64,
        )
        number = 0
        while True:
            message = await messages.read(reader)
            match message:
                case messages.Prepare():
                    writer.write(messages.encode(messages.Prepared(versions={"synthetic": "1"})))
                case messages.RunTask():
                    self._clients += 1
                    run = asyncio.create_task(self._client(message.task))
                    self._parts.add(run)
                case messages.Serve():
                    writer.write(
                        messages.encode(
                            messages.Serving(model=message.model, how="load", seconds=0.0, numerics="played",
                                         max_length=4096, curve=curve, canary=[0.0])
                        )
                    )  # fmt: skip
                case messages.AnswerRequests():
                    now_s = time.monotonic()
                    number += 1
                    done = [
                        messages.DoneRequest(
                            key=key, body=body, new_tokens=8, started_s=now_s, finished_s=now_s
                        )
                        for key, _ in message.requests
                    ]
                    writer.write(
                        messages.encode(
                            messages.Done(
                                number=number, model=message.model, done=done, now_s=now_s
                            )
                        )
                    )
                case messages.Answers():
                    self._left -= len(message.samples)
                    if self._left == 0:
                        self.done.set()
                case messages.Stop() | messages.Refused():
                    return

    async def _client(self, task: int) -> None:
        samples = [
            messages.KeyedSample(
                sample=one.sample, requests=[keyed(request) for request in one.requests]
            )
            for one in synthetic_samples(self._suite.entries[task])
        ]
        self._left += len(samples)
        writer = await self.dial("client", f"client-0-{task}", model=0, task=task, node=0)
        if self._clients == len(self._suite.entries):
            await asyncio.sleep(2.0)
            self.ready.set()
        await self.go.wait()
        for first in range(0, len(samples), 512):
            part = samples[first : first + 512]
            writer.write(
                messages.encode(messages.Submit(samples=part, final=first + 512 >= len(samples)))
            )
            await writer.drain()


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "policy":
        found = _policy(*(int(one) for one in rest))
    else:
        found = _coordinator(int(rest[0]), int(rest[1]), Path(rest[2]))
    print(json.dumps(found))
