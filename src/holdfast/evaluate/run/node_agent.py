"""Run the agent of a node: `python -m holdfast.evaluate.run.node_agent`.

The agent keeps the models' weights in this node's memory and exchanges them with the agents of the
other nodes. It starts the harness host and, as the coordinator orders, the engines' workers, and
reports the end of each. All these processes end with the agent. The agent frees the memory and ends
if the coordinator orders it, or if the coordinator is unreachable for longer than `linger_s`.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from holdfast.cluster import core_count
from holdfast.core.child_process import end_soon
from holdfast.core.clock import SystemClock
from holdfast.core.errors import HoldfastError
from holdfast.core.phases import ENV_PROFILE
from holdfast.core.processes import become_subreaper, kill_descendants
from holdfast.evaluate.coordinator.config import CoordinatorFiles
from holdfast.evaluate.run.node_kind import node_kind
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.model_manifest import DamagedModel
from holdfast.evaluate.weights.fetch import NodeStore
from holdfast.evaluate.weights.store import MemoryFull
from holdfast.evaluate.wire.client import Line, address_and_token
from holdfast.evaluate.wire.folder_lock import at_work
from holdfast.evaluate.wire.messages import (
    ENV_OF_HOSTS,
    Alive,
    ChildExited,
    FetchFailed,
    FetchModel,
    Hello,
    Message,
    ModelFetched,
    NodeReport,
    ReleaseModel,
    StartEngine,
    Stop,
    StopEngine,
    Welcome,
)
from holdfast.profile import LocalSampler, own_node

ENV_PLACE = "HOLDFAST_PLACE"
_TAIL_BYTES = 4000
_STOP_GRACE_S = 3.0
_HOST_RESTART_WAIT_S = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Hold the options of an agent's command line.

    Attributes:
        place: the number of the node, from 0.
        folder: the evaluation's folder, which all nodes share.
        store_root: the folder for weights; empty for this machine's shared memory.
        store_bytes: the largest size of all weights together, in bytes; 0 for the free memory.
        nic_mib_s: the limit in MiB/s on the exchange with peers; 0 for no limit.
        listen_host: the address on which this agent serves chunks to peers.
        metric_slots: the number of metrics that are computed at the same time; 0 for the number of
            cores.
        journals: the folder of journals, for answers that an engine could not deliver.
        linger_s: the seconds for which engines continue without the coordinator.
        has_host: True if the agent starts a harness host.
    """

    place: int
    folder: Path
    journals: Path
    store_root: str = ""
    store_bytes: int = 0
    nic_mib_s: float = 0.0
    listen_host: str = "127.0.0.1"
    metric_slots: int = 0
    linger_s: float = 60.0
    has_host: bool = True


@dataclass
class Agent:
    """Run the processes of one node, and keep the models' weights in the node's memory."""

    options: NodeOptions
    token: str
    address: str
    _children: dict[tuple[str, str], asyncio.subprocess.Process] = field(default_factory=dict)
    _waits: set[asyncio.Task[None]] = field(default_factory=set)
    _fetches: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _fetched: dict[int, ModelFetched] = field(default_factory=dict)
    _stopping: bool = False

    async def run(self) -> int:
        """Serve until the coordinator orders the end.

        Returns:
            The exit code.
        """
        options = self.options
        self._line = Line(self.address, self._hello, patience_s=options.linger_s + _STOP_GRACE_S)
        self._store = NodeStore(
            Path(options.store_root) if options.store_root else None,
            session=f"{os.getpid()}-{options.place}",
            budget_bytes=options.store_bytes,
            token=self.token,
            clock=SystemClock(),
            nic_mib_s=options.nic_mib_s or None,
        )
        memory = self._store.memory
        if not options.store_bytes:
            memory.budget_bytes = shutil.disk_usage(memory.folder).free
        if memory.note:
            _log.warning("%s", memory.note)
        report = NodeReport(
            host=socket.gethostname(),
            cores=core_count(),
            memory_bytes=psutil.virtual_memory().total,
            gpus=gpu_count(),
            store=await self._store.start(options.listen_host),
            kind=node_kind(),
        )
        loop = asyncio.get_running_loop()
        me = asyncio.current_task()
        assert me is not None
        loop.add_signal_handler(signal.SIGTERM, me.cancel)
        if options.has_host:
            await self._start_host()
        alive = asyncio.create_task(self._send_alive())
        sampling = asyncio.create_task(self._sample())
        try:
            async for message in self._line.messages():
                if isinstance(message, Stop):
                    return 0
                if isinstance(message, Welcome):
                    self._line.send(report)
                    for fetched in self._fetched.values():
                        self._line.send(fetched)
                else:
                    await self._heed(message)
        except EvaluationError as error:
            _log.warning("%s All processes of this node are ended.", error)
            return 4
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
        finally:
            alive.cancel()
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            self._stopping = True
            await self._end_children()
            for fetch in self._fetches.values():
                fetch.cancel()
            await self._store.close()
        return 0

    def _hello(self) -> Hello:
        return Hello(
            token=self.token,
            role="node",
            name=f"node-{self.options.place}",
            node=self.options.place,
            pid=os.getpid(),
        )

    async def _send_alive(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._line.send(Alive())

    async def _sample(self) -> None:
        """Record this node's utilisation during the evaluation.

        If the sampler cannot start, the evaluation continues without records, since scores do not
        depend on records.
        """
        try:
            sampler = LocalSampler(self.options.folder / "profile", own_node())
        except OSError:
            return
        try:
            while True:
                sampler.look({})
                await asyncio.sleep(1.0)
        finally:
            await asyncio.to_thread(sampler.close)

    async def _heed(self, message: Message) -> None:
        match message:
            case FetchModel():
                self._fetch(message)
            case ReleaseModel(model=model):
                self._fetches.pop(model, None)
                self._fetched.pop(model, None)
                await self._store.release(model)
            case StartEngine():
                await self._start_engine(message)
            case StopEngine(name=name):
                await self._end_child(("engine", name))

    # Weights

    def _fetch(self, wanted: FetchModel) -> None:
        """Fetch a model, or pass new owners and peers to the fetch in progress."""
        self._fetches[wanted.model] = asyncio.create_task(self._fetch_whole(wanted))

    async def _fetch_whole(self, wanted: FetchModel) -> None:
        try:
            got = await self._store.fetch(
                wanted.model,
                wanted.manifest,
                owners=wanted.owners,
                peers=wanted.peers,
                node=self.options.place,
                max_read_mib_s=wanted.max_read_mib_s or None,
            )
        except (HoldfastError, OSError) as error:
            # Report the failure only if the model is still wanted and no later fetch will report.
            if self._fetches.get(wanted.model) is asyncio.current_task():
                del self._fetches[wanted.model]
                self._line.send(self._failure(wanted.model, error))
            return
        if wanted.model in self._fetched:
            return
        fetched = ModelFetched(
            model=wanted.model,
            folder=str(got.folder),
            digest=got.digest,
            remote_bytes=got.remote_bytes,
            peer_bytes=got.peer_bytes,
            seconds=got.seconds,
        )
        self._fetched[wanted.model] = fetched
        self._line.send(fetched)

    def _failure(self, model: int, error: Exception) -> FetchFailed:
        return FetchFailed(
            model=model,
            why=str(error),
            final=isinstance(error, DamagedModel),
            beside=sorted(self._fetches) if isinstance(error, MemoryFull) else [],
        )

    # Children

    async def _start_host(self) -> None:
        slots = self.options.metric_slots or core_count()
        module = [
            "-m",
            "holdfast.evaluate.harness.host",
            "--node",
            str(self.options.place),
            "--slots",
            str(slots),
        ]
        own = {
            name.removeprefix(ENV_OF_HOSTS): it
            for name, it in os.environ.items()
            if name.startswith(ENV_OF_HOSTS)
        }
        await self._start("host", f"host-{self.options.place}", module, own)

    async def _start_engine(self, wanted: StartEngine) -> None:
        if ("engine", wanted.name) in self._children:
            return
        spec = msgspec.json.encode(wanted.spec).decode()
        module = ["-m", "holdfast.evaluate.engines.worker", "--name", wanted.name, "--spec", spec]
        module += ["--node", str(self.options.place), "--linger", str(self.options.linger_s)]
        module += ["--keep", str(self.options.journals)]
        await self._start("engine", wanted.name, module, _gpus_of(wanted))

    async def _start(
        self, role: str, name: str, module: list[str], environment: Mapping[str, str] | None = None
    ) -> None:
        log = self.options.folder / "logs" / f"{name.replace('/', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        profile = str(self.options.folder / "profile")
        with log.open("ab") as output:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *module,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, ENV_PROFILE: profile, **(environment or {})},
            )
        self._children[role, name] = child
        wait = asyncio.create_task(self._await_end(role, name, child, log))
        self._waits.add(wait)
        wait.add_done_callback(self._waits.discard)

    async def _await_end(
        self, role: str, name: str, child: asyncio.subprocess.Process, log: Path
    ) -> None:
        code = await child.wait()
        if self._children.get((role, name)) is not child or self._stopping:
            return
        del self._children[role, name]
        self._line.send(ChildExited(role=role, name=name, exit_code=code, tail=_tail(log)))
        if role == "host":
            _log.warning("The harness host ended with %d and is restarted.", code)
            await asyncio.sleep(_HOST_RESTART_WAIT_S)
            await self._start_host()

    async def _end_child(self, child: tuple[str, str]) -> None:
        process = self._children.pop(child, None)
        if process is not None:
            await _end(process)

    async def _end_children(self) -> None:
        children, self._children = list(self._children.values()), {}
        await asyncio.gather(*(_end(child) for child in children))
        kill_descendants()


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await end_soon(process, _STOP_GRACE_S)


def gpu_count() -> int:
    """Return the number of this node's GPUs.

    These are the GPUs in CUDA_VISIBLE_DEVICES; without this variable, the NVIDIA GPUs of the
    driver.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    return len(
        [
            path
            for path in Path("/dev").glob("nvidia[0-9]*")
            if path.name.removeprefix("nvidia").isdigit()
        ]
    )


def _gpus_of(wanted: StartEngine) -> dict[str, str]:
    """Return the environment variable that assigns GPUs to an engine; empty without GPUs.

    An engine gets the `index`-th set of `tensor_parallel` GPUs of its node.
    """
    if not (count := gpu_count()) or wanted.spec.device == "cpu":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_of_them = visible.split(",") if visible else [str(number) for number in range(count)]
    size = wanted.spec.tensor_parallel
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(
            all_of_them[wanted.index * size : (wanted.index + 1) * size]
        )
    }


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def main() -> None:
    """Run an agent with the options of the command line."""
    parser = argparse.ArgumentParser(prog="holdfast.evaluate.run.node_agent")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--journals", type=Path, required=True)
    parser.add_argument("--place", type=int, default=int(os.environ.get(ENV_PLACE, "0")))
    parser.add_argument("--store-root", default="")
    parser.add_argument("--store-bytes", type=int, default=0)
    parser.add_argument("--nic-mib-s", type=float, default=0.0)
    parser.add_argument("--listen-host", default="127.0.0.1")
    parser.add_argument("--metric-slots", type=int, default=0)
    parser.add_argument("--linger-s", type=float, default=60.0)
    parser.add_argument("--no-host", dest="has_host", action="store_false")
    options = NodeOptions(**vars(parser.parse_args()))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    address, token = address_and_token()
    become_subreaper()
    with at_work(CoordinatorFiles(options.folder).folder):
        sys.exit(asyncio.run(Agent(options=options, token=token, address=address).run()))


if __name__ == "__main__":
    main()
