"""Measure a large job's supervisor: its cost and its delays, with 2,048 emulated ranks.

The supervisor is the real process with a real ledger. This process speaks the protocol of 256
agents with their own code (`agent.outbox`): each node has eight ranks, which make a step a second
with a loss each. A spare node waits. Ranks answer questions about their collectives as ranks with
CUDA do.

- CPU: the supervisor's CPU time for some steps of all ranks, over the time that these steps take.
  It is taken once all that was sent is acknowledged, so that a machine that is busy with other
  things changes nothing.
- Exit: a rank is killed. From there to the first order to end the others, and to the order for the
  next attempt.
- Silence: a rank is stopped, and all others wait for it. From the end of the limit, which is set to
  4 s, to the order.
- Node: the connection of an agent ends. From there to the first order.
- NaN: one rank reports losses that are not finite. From the second one, which makes it certain, to
  the first order.

The limit of a detection is the flight of one message there and back on this host, measured in the
same run.
"""

import asyncio
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from common.jobs import DoesNotWork, say
from common.machine import OthersLoad
from common.table import Must, Row, parse_arguments, report
from holdfast.core.clock import wall_offset_s
from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url
from holdfast.recover.agent.outbox import SUM_S, Outbox
from holdfast.recover.agent.rendezvous import loopback_listener
from holdfast.recover.agent.stream import Stream, proof
from holdfast.recover.channel import Peer
from holdfast.recover.detectors.hang import HangLimits
from holdfast.recover.policy import RestartLimits
from holdfast.recover.runs import begin_run
from holdfast.recover.spec import RunSpec

NODES, QUICK_NODES, RANKS_A_NODE = 256, 32, 8
STEP_S = 1.0
HANG_LIMIT_S = 4.0
TOKEN = "of-the-benchmark"
MAX_CORE = 0.30
SOON_S = 1.0
WAIT_S = 90.0
STACK = [
    {
        "main": True,
        "name": "MainThread",
        "daemon": False,
        "ours": False,
        "module": "__main__",
        "call": "",
        "frames": [["torch.distributed.distributed_c10d", "distributed_c10d.py", "all_reduce", 1]]
        + [["__main__", "train.py", f"function_{depth}", depth] for depth in range(20)],
    }
]


class Job:
    """All emulated nodes of one job."""

    def __init__(self, port: int, nodes: int) -> None:
        self.port = port
        self.agents = [Agent(self, number) for number in range(nodes + 1)]
        self.world_size = nodes * RANKS_A_NODE
        self.began_s = time.monotonic()
        self.step = 0
        self.ended_at_s: float | None = None
        """The moment of the first order to end ranks or launchers since `watch`."""
        self.started_at_s: float | None = None
        self.attempt = 0
        self.frozen = self.paused = False
        self.steps_made = 0
        self.broken: int | None = None
        """The rank that reports NaN."""
        self.trouble: BaseException | None = None

    def watch(self) -> None:
        """Forget the orders so far."""
        self.ended_at_s = self.started_at_s = None

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds."""
        deadline_s = time.monotonic() + WAIT_S
        while not holds():
            if self.trouble is not None:
                raise self.trouble
            if time.monotonic() > deadline_s:
                raise DoesNotWork(f"not within {WAIT_S:.0f} s: {what}")
            await asyncio.sleep(0.005)

    async def train(self) -> None:
        """Have every rank make a step each second, at nearly the same moment."""
        source = random.Random(0)
        while True:
            at_s = self.began_s + (self.step + 1) * STEP_S
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            self.step += 1
            if not self.frozen and not self.paused:
                self.steps_made += 1
                for agent in self.agents:
                    agent.make_step(self.step, source)

    async def pause(self) -> None:
        """Make no steps, and wait until the supervisor has received all messages."""
        self.paused = True
        await self.until(lambda: self.is_acknowledged, "all is acknowledged")

    @property
    def is_acknowledged(self) -> bool:
        """Return True if the supervisor has received all messages of ranks."""
        return all(agent.sent == agent.acknowledged for agent in self.agents)

    @property
    def is_training(self) -> bool:
        """Return True if every rank of a launch has made a step of the newest attempt."""
        ranks = sum(len(agent.ranks) for agent in self.agents if agent.has_stepped)
        return ranks == self.world_size


class Agent:
    """One node's agent with its ranks, as far as the supervisor sees them."""

    def __init__(self, job: Job, number: int) -> None:
        self._job, self.number = job, number
        self._stream: Stream | None = None
        self._outbox = Outbox(self._send)
        self._orders_seen = 0
        self._launched: int | None = None
        self._attempt = 0
        self.ranks: range = range(0)
        self.has_stepped = False
        self._living: set[int] = set()
        self.sent = self.acknowledged = 0

    def _send(self, message: dict[str, Any]) -> None:
        if self._stream is not None:
            self._stream.send(message)

    def _peer(self, role: str, rank: int) -> Peer:
        attempt = self._launched if role == "shim" else self._attempt
        assert attempt is not None
        pid = (1 if role == "shim" else 2) * 1_000_000 + attempt * 10_000 + rank
        local, world = rank % RANKS_A_NODE, self._job.world_size
        is_attached = role == "rank"
        return Peer(
            role=role,
            attempt=attempt,
            rank=rank,
            local_rank=local,
            world_size=world,
            pid=pid,
            is_attached=is_attached,
        )

    def put(self, role: str, rank: int, kind: str, **fields: object) -> None:
        """Send a message of a rank or shim."""
        message = {"kind": kind, **fields}
        envelope = self._outbox.put(self._peer(role, rank), message, time.monotonic(), 100)
        self.sent = envelope.seq

    async def serve(self) -> None:
        """Connect, and obey until the supervisor is gone."""
        while (stream := await self._connect()) is None:
            await asyncio.sleep(0.1)
        self._stream = stream
        stream.send({"kind": "states", "states": {}})
        beside = [asyncio.create_task(work) for work in (self._ping(), self._flush())]
        try:
            while (message := await stream.receive()) is not None:
                if "seq" in message and message["kind"] != "ack":
                    self._orders_seen = message["seq"]
                    stream.send({"kind": "ack", "seq": self._orders_seen})
                self._obey(message)
        except Exception as error:
            self._job.trouble = error
        finally:
            for one in beside:
                one.cancel()
            stream.close()

    async def _connect(self) -> Stream | None:
        """Return a connection that the supervisor has accepted; None if there is no room now."""
        try:
            stream = await Stream.connect("127.0.0.1", self._job.port)
        except OSError:
            return None
        challenge = await stream.receive()
        if challenge is None:
            stream.close()
            return None
        hello = {"nonce": "n", "proof": proof(TOKEN, "agent", challenge["nonce"])}
        name = f"n{self.number:03d}"
        hello |= {"node_id": name, "name": name, "incarnation": "1", "preferred_rank": self.number}
        hello |= {"launched": None, "last_end": None, "generation": 0, "orders_seen": 0}
        stream.send({"kind": "hello", **hello})
        if await stream.receive() is None:
            stream.close()
            return None
        return stream

    def vanish(self) -> None:
        """Hang up for good, as a node that dies does."""
        assert self._stream is not None
        self._stream.close()
        self._stream, self.ranks, self.has_stepped = None, range(0), False
        self._living = set()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._send({"kind": "ping"})

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(SUM_S)
            self._outbox.flush()

    def _obey(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "ack":
                self._outbox.acknowledged(message["seq"])
                self.acknowledged = message["seq"]
            case "port":
                self._send({"kind": "port", "port": 1})
            case "launch":
                first = int(message["node_rank"]) * RANKS_A_NODE
                self.ranks = range(first, first + RANKS_A_NODE)
                self._launched = int(message["attempt"])
                for rank in self.ranks:
                    self._outbox.put(self._shim(rank), {"kind": "hello", "again": False}, *_now())
                self._start(self._launched)
            case "kill":
                self._was_ended()
                if self._launched is not None:
                    self._end_launcher()
            case "look":
                used = {str(rank): [1.0, 1] for rank in map(int, message["pids"])}
                self._send({"kind": "looked", "look": message["look"], "used": used})
                for rank in self.ranks:
                    self.put("rank", rank, "stacks", threads=STACK)
                    self.put("rank", rank, "begun", collectives=None)
            case "pass":
                self._take(message["message"])

    def _end_launcher(self) -> None:
        ended = {"kind": "launcher_ended", "attempt": self._launched, "returncode": -9}
        self._launched, self.ranks, self.has_stepped, self._living = None, range(0), False, set()
        self._outbox.flush()
        self._send(ended)

    def _shim(self, rank: int) -> Peer:
        return self._peer("shim", rank)

    def _take(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "collectives":
                for rank in self.ranks:
                    self.put("rank", rank, "collectives", collectives=None)
            case "kill" | "terminate" if message["attempt"] == self._attempt:
                self._was_ended()
                self.has_stepped = False
                for rank in sorted(self._living):
                    self.exit(rank, -9)
            case "leave" if self._launched is not None:
                self._end_launcher()
            case "start":
                if self._job.started_at_s is None:
                    self._job.started_at_s = time.monotonic()
                self._start(int(message["attempt"]))

    def exit(self, rank: int, returncode: int) -> None:
        """Have the process of a rank end."""
        self._living.discard(rank)
        pid, at_s = self._peer("rank", rank).pid, time.monotonic()
        attempt = self._attempt
        told = {"pid": pid, "returncode": returncode, "at_monotonic_s": at_s}
        self.put("shim", rank, "exited", attempt=attempt, **told)
        self.put("shim", rank, "swept", attempt=attempt, log_dropped_bytes=0)

    def _was_ended(self) -> None:
        if self._job.ended_at_s is None:
            self._job.ended_at_s = time.monotonic()

    def _start(self, attempt: int) -> None:
        self._attempt = self._job.attempt = attempt
        self._job.broken, self._job.frozen = None, False
        self.has_stepped, self._living = False, set(self.ranks)
        for rank in self.ranks:
            pid = self._peer("rank", rank).pid
            self.put("shim", rank, "started", attempt=attempt, pid=pid, starts_again=True)
            self.put("rank", rank, "hello", again=False)
            self.put("rank", rank, "watch")

    def make_step(self, step: int, source: random.Random) -> None:
        """Have the ranks report a step."""
        if not self._living:
            return
        is_first, self.has_stepped = not self.has_stepped, True
        for rank in sorted(self._living):
            if is_first:
                self.put("rank", rank, "imported")
            loss: float | str = 2.0 + source.gauss(0, 0.05)
            if rank == self._job.broken:
                loss = "nan"
            told = {"step_s": STEP_S, "at_s": time.time(), "loss": loss, "metrics": {"lr": 1e-4}}
            self.put("rank", rank, "step", step=step, **told)

    def states(self, states: dict[int, str]) -> None:
        """Send the kernel's states of the ranks."""
        self._send({"kind": "states", "states": {str(rank): one for rank, one in states.items()}})


def _now() -> tuple[float, int]:
    return time.monotonic(), 100


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time that a process has used."""
    times = process.cpu_times()
    return times.user + times.system


async def measure(process: psutil.Process, job: Job, *, steady_s: float, rounds: int) -> list[Row]:
    """Have the job train, and fail in each way."""
    serving = [asyncio.create_task(agent.serve()) for agent in job.agents]
    training = asyncio.create_task(job.train())
    try:
        await job.until(lambda: job.is_training, "the first step")
        await asyncio.sleep(3 * STEP_S)
        await job.pause()
        before_s, first = cpu_s(process), job.steps_made
        job.paused = False
        await job.until(
            lambda: job.steps_made - first >= steady_s / STEP_S, f"steps for {steady_s} s"
        )
        await job.pause()
        share = (cpu_s(process) - before_s) / ((job.steps_made - first) * STEP_S)
        job.paused = False
        say(f"the supervisor uses {share:.1%} of a core")
        rows = [
            Row(
                measure=f"CPU of the supervisor, {job.world_size} ranks",
                ours=share,
                unit="cores",
                must=Must("<=", MAX_CORE),
            )
        ]
        failures: list[tuple[str, Callable[[], Awaitable[float]]]] = [
            ("rank killed", lambda: exit_of_rank(job)),
            ("rank silent, after the limit", lambda: silence(job)),
        ]
        for what, fail in failures:
            rows += await detection(job, what, fail, rounds)
        rows += await detection(job, "node lost", lambda: node_lost(job), 1)
        # Last, since without a checkpoint the run ends by that.
        rows += await detection(job, "loss is NaN", lambda: broken_loss(job), 1, ends=True)
        return rows
    finally:
        training.cancel()
        for one in serving:
            one.cancel()
        await asyncio.gather(training, *serving, return_exceptions=True)


async def detection(
    job: Job, what: str, fail: Callable[[], Awaitable[float]], rounds: int, *, ends: bool = False
) -> list[Row]:
    """Fail some times; return the delays of the supervisor's actions.

    If the run `ends` by the failure, there is no new attempt.
    """
    took_s, again_s = [], []
    for _ in range(rounds):
        attempt = job.attempt
        await job.until(lambda: job.is_training, "every rank trains")
        await asyncio.sleep(2 * STEP_S)
        job.watch()
        could_s = await fail()
        await job.until(lambda: job.ended_at_s is not None, f"{what}: no order")
        assert job.ended_at_s is not None
        took_s.append(job.ended_at_s - could_s)
        if ends:
            say(f"{what}: seen after {took_s[-1]:.3f} s")
            continue
        goal = attempt + 1
        await job.until(lambda g=goal: job.attempt >= g, f"{what}: no new attempt")
        again_s.append(time.monotonic() - could_s)
        say(f"{what}: seen after {took_s[-1]:.3f} s, started again after {again_s[-1]:.2f} s")
    measure, must = f"{what} → order, slowest of {rounds}", Must("<=", SOON_S)
    rows = [Row(measure=measure, ours=max(took_s), unit="s", must=must)]
    if again_s:
        measure = f"{what} → next attempt ordered, median"
        rows.append(Row(measure=measure, ours=statistics.median(again_s), unit="s"))
    return rows


def _agent_of(job: Job, place: int) -> Agent:
    running = [agent for agent in job.agents if len(agent.ranks)]
    return running[place % len(running)]


async def exit_of_rank(job: Job) -> float:
    """Kill a rank."""
    agent = _agent_of(job, 100)
    at_s = time.monotonic()
    agent.exit(agent.ranks[3], -9)
    return at_s


async def broken_loss(job: Job) -> float:
    """Have a rank report NaN from its next step on; return when the second report is sent."""
    agent = _agent_of(job, 200)
    job.broken = agent.ranks[5]
    return job.began_s + (job.step + 2) * STEP_S


async def silence(job: Job) -> float:
    """Stop a rank, and have all others wait; return when the limit has passed."""
    agent = _agent_of(job, 50)
    at_s, job.frozen = time.monotonic(), True
    agent.states({agent.ranks[1]: "stopped"})
    return at_s + HANG_LIMIT_S


async def node_lost(job: Job) -> float:
    """Have a node disappear."""
    at_s = time.monotonic()
    _agent_of(job, 150).vanish()
    return at_s


async def round_trip_s() -> float:
    """Return the time of a message there and back between two streams of this process."""
    ours, theirs = socket.socketpair()
    one, other = await Stream.of_socket(ours), await Stream.of_socket(theirs)
    took_s = []
    for _ in range(100):
        began_s = time.monotonic()
        one.send({"kind": "ping"})
        await other.receive()
        other.send({"kind": "pong"})
        await one.receive()
        took_s.append(time.monotonic() - began_s)
    one.close()
    other.close()
    return statistics.median(took_s)


async def supervised(home: Path, *, nodes: int, steady_s: float, rounds: int) -> list[Row]:
    """Start the supervisor of a recorded run, and measure."""
    script = home / "train.py"
    script.write_text("")
    spec = RunSpec(
        command=(sys.executable, str(script)),
        cwd=str(home),
        nproc=RANKS_A_NODE,
        nnodes=nodes,
        hangs=HangLimits(factor=1.0, floor_s=HANG_LIMIT_S),
        restarts=RestartLimits(max_restarts=100),
        test_nodes="never",
    )
    url = ledger_url(home)
    with Ledger.open(url) as ledger:
        begin_run(spec, ledger, home, name="r")
    listening = loopback_listener()
    ours, theirs = socket.socketpair()
    fds = (theirs.fileno(), listening.fileno())
    words = (sys.executable, "-m", "holdfast.recover.supervisor_process")
    with (home / "supervisor.log").open("wb") as log:
        process = subprocess.Popen(
            [*words, *map(str, fds), str(os.getpid())], pass_fds=fds, stdout=log, stderr=log
        )
    theirs.close()
    node = await Stream.of_socket(ours)
    begin = {"kind": "begin", "run_id": "r", "home": str(home), "ledger": url, "token": TOKEN}
    begin |= {"node_id": "n000", "after": None, "is_lost": False, "adopts": False}
    begin |= {"stop": None, "notify": [], "wall_offset_s": wall_offset_s()}
    node.send(begin)
    observed: list[str] = []
    reading = asyncio.create_task(_read_all(node, observed))
    try:
        job = Job(listening.getsockname()[1], nodes)
        listening.close()
        limit_s = await round_trip_s()
        rows = await measure(psutil.Process(process.pid), job, steady_s=steady_s, rounds=rounds)
    except DoesNotWork as error:
        said = "\n".join([*observed[-20:], (home / "supervisor.log").read_text()[-2000:]])
        raise DoesNotWork(f"{error}\n{said}") from error
    finally:
        reading.cancel()
        node.close()
        process.send_signal(signal.SIGKILL)
        process.wait()
    rows.append(Row(measure="a message there and back", ours=limit_s, limit=limit_s, unit="s"))
    return rows


async def _read_all(node: Stream, observed: list[str]) -> None:
    while (message := await node.receive()) is not None:
        if message.get("what") != "step":
            observed.append(str(message)[:300])


def main() -> int:
    args = parse_arguments(__doc__ or "", rounds=5, counts={"nodes": "emulated nodes"})
    nodes = args.nodes or (QUICK_NODES if args.quick else NODES)
    steady_s, rounds = (2.0, 1) if args.quick else (60.0, args.rounds)
    try:
        with (
            OthersLoad() as others,
            tempfile.TemporaryDirectory(prefix="holdfast-scale-") as home,
        ):
            rows = asyncio.run(
                supervised(Path(home), nodes=nodes, steady_s=steady_s, rounds=rounds)
            )
    except DoesNotWork as error:
        say(f"scale.py: {error}")
        return 1
    notes = [
        f"{nodes} emulated nodes with {RANKS_A_NODE} ranks each, and a spare; a step of {STEP_S:.0f} s, in step",
        "the emulated agents use the other core",
        others.sentence(),
    ]
    report("The supervisor of a large job", rows, notes=notes, json_file=args.json)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
