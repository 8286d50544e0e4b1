"""Run the processes of an evaluation from the command.

A session starts the coordinator's process, and restarts it when it dies. The session also starts an
agent on each node, and replaces agents that died. If the command's process dies, the coordinator
keeps the finished work and ends all other processes. The next session of the evaluation waits until
they have ended.
"""

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.cluster import Placement, places
from holdfast.core.atomic import write_atomic
from holdfast.core.child_process import RestartLimit, end_soon
from holdfast.evaluate.coordinator.config import (
    DONE,
    FAILED,
    LEFT,
    UNWRITABLE,
    CoordinatorConfig,
    CoordinatorFiles,
    encode_config,
)
from holdfast.evaluate.run.check_tasks import check_tasks
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.wire.client import Line
from holdfast.evaluate.wire.folder_lock import wait_for_the_others
from holdfast.evaluate.wire.messages import (
    ENV_ADDRESS,
    ENV_OF_HOSTS,
    ENV_TOKEN,
    AddModel,
    Finish,
    Hello,
    Message,
    ModelOutcome,
    Welcome,
)

_POLL_S = 0.2
_PATIENT_S = 10.0  # then the log shows why nodes are missing
_MAX_RESTARTS = 50  # of the coordinator or of one node's agent; more frequent faults are bugs
# After so many quick ends in a row, the next start would fail in the same way.
_QUICK_END_S, _MAX_QUICK_ENDS = 5.0, 8
_START_TIMEOUT_S = 30.0
_ENDS = (DONE, FAILED, LEFT)  # the exit codes of a coordinator that ended on purpose
_STOP_TIMEOUT_S = 20.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodesNeeded:
    """Describe the nodes on which agents run.

    Attributes:
        on: where the nodes are, for example "local" or "slurm".
        nodes: the number of nodes.
        gpus_per_node: the number of GPUs to request on each node, if engines run.
        sbatch_options: options of sbatch; only for Slurm.
        agent_flags: the options of `holdfast.evaluate.run.node_agent`.
        environment: the environment variables of the harness hosts.
        note: a note to show when nodes are requested.
    """

    on: str = "local"
    nodes: int = 1
    gpus_per_node: int = 0
    sbatch_options: tuple[str, ...] = ()
    agent_flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


class Session:
    """Run one coordinator and the agents on its nodes.

    `on_message` is called in the event loop with each message from the coordinator.
    """

    def __init__(
        self, config: CoordinatorConfig, wanted: NodesNeeded, on_message: Callable[[Message], None]
    ) -> None:
        self._config, self._wanted, self._on_message = config, wanted, on_message
        self._files = CoordinatorFiles(Path(config.folder))
        self._models: dict[int, AddModel] = {}
        self._finishing = False
        self._line: Line | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left = asyncio.Event()

    # Any thread may call these methods at any time. Each new coordinator receives their messages
    # again.

    def add(self, model: AddModel) -> None:
        """Evaluate one more model."""
        self._models[model.model] = model
        self._send(model)

    def finish(self) -> None:
        """Declare that no more models come: the session ends when the present models have ended."""
        self._finishing = True
        self._send(Finish())

    def leave(self) -> None:
        """End the session now.

        Engines finish the requests that they have begun; all other requests are dropped.
        """
        if self._loop is None:  # the session does not run yet
            self._left.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._left.set)

    def _send(self, message: Message) -> None:
        if self._line is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._line.send, message)

    # Processes

    async def run(self) -> int:
        """Run until `finish` was called and all models have ended, or until `leave` was called.

        Returns:
            The coordinator's exit code.

        Raises:
            BadUse: the nodes cannot be requested, or a task does not exist.
            EvaluationError: the coordinator or all agents fail repeatedly; the message names their
                logs.
        """
        self._loop = asyncio.get_running_loop()
        has_engines = not self._config.rescore
        nodes = places(
            self._wanted.on,
            nodes=self._wanted.nodes,
            gpus_per_node=self._wanted.gpus_per_node if has_engines else 0,
            sbatch_options=self._wanted.sbatch_options,
            linger_s=self._config.linger_s + _STOP_TIMEOUT_S,
        )
        if self._wanted.note and has_engines:
            _log.warning("%s", self._wanted.note)
        if self._wanted.on != "local":  # a local host reports a wrong name at once
            await check_tasks(self._config.suite, Path(self._config.folder) / "logs" / "tasks.log")
        self._files.folder.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(
            wait_for_the_others,
            self._files.folder,
            self._config.linger_s + 2 * _STOP_TIMEOUT_S,
            _show_waiting,
        )
        host = await asyncio.to_thread(nodes.address_host)
        token = self._prepare()
        coordinating = asyncio.create_task(self._coordinate())
        placement: Placement | None = None
        try:
            port = await self._port(coordinating)
            # Set these variables only for harness hosts, since an engine may use another
            # OpenAI-compatible server.
            environment = {
                f"{ENV_OF_HOSTS}{name}": value for name, value in self._wanted.environment.items()
            }
            environment |= {ENV_ADDRESS: f"{host}:{port}", ENV_TOKEN: token}
            placement = await asyncio.to_thread(
                nodes.start,
                self._agent(host),
                environment=environment,
                folder=Path(self._config.folder) / "logs",
            )
            speaking = asyncio.create_task(self._speak(f"127.0.0.1:{port}", token))
            minding = asyncio.create_task(self._mind(placement))
            leaving = asyncio.create_task(self._left.wait())
            helpers = {speaking, minding, leaving}
            try:
                done, _ = await asyncio.wait(
                    {coordinating, *helpers}, return_when=asyncio.FIRST_COMPLETED
                )
                if coordinating in done:
                    return coordinating.result()
                for task in done:
                    task.result()  # raises the cause
                return LEFT
            finally:
                for task in helpers:
                    task.cancel()
        finally:
            if not coordinating.done():
                if placement is not None:
                    _log.warning(
                        "Stopping: engines finish their requests, in %.0f s at most.",
                        self._config.linger_s,
                    )
                coordinating.cancel()
                await asyncio.wait({coordinating})
            if placement is not None:
                await self._end(placement)

    def _prepare(self) -> str:
        """Write the coordinator's configuration and a new token, and return the token.

        The address of an earlier coordinator is deleted.
        """
        token = secrets.token_hex(16)
        self._files.token.touch(mode=0o600)
        self._files.token.write_text(token)
        self._files.address.unlink(missing_ok=True)
        write_atomic(self._files.config, encode_config(self._config))
        return token

    def _agent(self, host: str) -> list[str]:
        config = self._config
        agent = [
            sys.executable,
            "-m",
            "holdfast.evaluate.run.node_agent",
            "--folder",
            config.folder,
        ]
        agent += ["--journals", config.journals]
        agent += ["--metric-slots", str(config.metric_slots), "--linger-s", str(config.linger_s)]
        if host != "127.0.0.1":
            # Peers are on other machines; connections need the token.
            agent += ["--listen-host", "0.0.0.0"]
        return [*agent, *self._wanted.agent_flags]

    async def _coordinate(self) -> int:
        """Run a coordinator, and restart it until one ends on purpose; return its exit code."""
        log = Path(self._config.folder) / "logs" / "coordinator.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        limit = RestartLimit(
            restarts=_MAX_RESTARTS, quick_end_s=_QUICK_END_S, quick_ends=_MAX_QUICK_ENDS
        )
        while True:
            began_s = time.monotonic()
            with log.open("ab") as output:
                child = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "holdfast.evaluate.coordinator.server",
                    self._config.folder,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C reaches only the session, which closes the input
                )
            try:
                code = await child.wait()
            except asyncio.CancelledError:
                assert child.stdin is not None
                child.stdin.close()
                await end_soon(child, self._config.linger_s + _STOP_TIMEOUT_S)
                raise
            if code == UNWRITABLE:
                raise EvaluationError(
                    f"{self._config.folder} cannot be written: its disk is full or failing. Finished "
                    "answers are kept. "
                    "Free space there."
                )
            if code in _ENDS:
                return code
            if not limit.allows_restart(time.monotonic() - began_s):
                raise EvaluationError(f"The coordinator failed repeatedly. Its log is {log}.")
            _log.warning(
                "The coordinator ended with %d and is started again; its log is %s.", code, log
            )

    async def _port(self, coordinating: "asyncio.Task[int]") -> int:
        for _ in range(int(_START_TIMEOUT_S / 0.02)):
            if self._files.address.exists():
                return int(self._files.address.read_text().rsplit(":", 1)[1])
            if coordinating.done():
                coordinating.result()  # raises the cause
                break
            await asyncio.sleep(0.02)
        raise EvaluationError(
            "The coordinator does not start. Its log is "
            f"{self._config.folder}/logs/coordinator.log."
        )

    async def _speak(self, address: str, token: str) -> None:
        def hello() -> Hello:
            return Hello(token=token, role="command", name="command", pid=os.getpid())

        self._line = Line(address, hello, patience_s=_START_TIMEOUT_S)
        async for message in self._line.messages():
            if isinstance(message, Welcome):
                for model in list(self._models.values()):
                    self._line.send(model)
                if self._finishing:
                    self._line.send(Finish())
                continue
            if isinstance(message, ModelOutcome):
                self._models.pop(message.model, None)
            self._on_message(message)
        raise AssertionError("a line's messages end by an error")

    async def _mind(self, placement: Placement) -> None:
        """Watch the agents, and replace agents that ended."""
        limits = [RestartLimit(restarts=_MAX_RESTARTS) for _ in range(self._wanted.nodes)]
        began_s, shown = time.monotonic(), set[str]()
        while True:
            found = await asyncio.to_thread(placement.poll)
            if time.monotonic() - began_s >= _PATIENT_S:
                for why in {
                    place.why for place in found if place.state == "waiting" and place.why
                } - shown:
                    _log.warning("Waiting for nodes: %s.", why)
                    shown.add(why)
            ended = [place for place in found if place.state == "ended" and place.exit_code != 0]
            for place in ended:
                if limits[place.index].allows_restart():
                    await asyncio.to_thread(placement.restart, place.index)
            lost = [place for place in ended if limits[place.index].is_exceeded]
            if len(lost) == self._wanted.nodes:
                why = lost[0].why or f"exit code {lost[0].exit_code}"
                raise EvaluationError(
                    f"Every node's agent keeps ending ({why}). Their logs are in "
                    f"{self._config.folder}/logs."
                )
            await asyncio.sleep(_POLL_S)

    async def _end(self, placement: Placement) -> None:
        """Wait until the agents end, as the coordinator ordered; then stop the remaining agents."""
        for _ in range(int(_STOP_TIMEOUT_S / _POLL_S)):
            if all(place.state == "ended" for place in await asyncio.to_thread(placement.poll)):
                break
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(placement.stop)


def _show_waiting() -> None:
    _log.warning(
        "Processes of an earlier command are finishing their requests; this command continues then."
    )
