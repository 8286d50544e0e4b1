"""Keep one node's part of a run going, in the foreground process of `holdfast run`.

    holdfast run (this) ─┬─ agent
                         ├─ supervisor, on the first node
                         └─ guard ── torchrun ── shims ── ranks

If the agent or the supervisor ends, this process starts it again, while the ranks continue to
train. This process also holds the sockets on which the agent and the supervisor listen, so that new
connections wait until the restarted process accepts them. When this process ends, even by SIGKILL,
the kernel ends the agent and the supervisor, and the guard ends the job.
"""

import asyncio
import contextlib
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.cluster import is_in_pod
from holdfast.core.clock import wall_offset_s
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths
from holdfast.core.tasks import Tasks
from holdfast.recover.agent.board import Board, board_of
from holdfast.recover.agent.child import KeptProcess
from holdfast.recover.agent.held_connection import HeldConnection
from holdfast.recover.agent.kept_memory import end_kept_memory
from holdfast.recover.agent.rendezvous import Meeting, loopback_listener, node_name
from holdfast.recover.agent.time_limit import stop_in_time
from holdfast.recover.connected_node import LEFT
from holdfast.recover.launching.launch import Job, Place, can_stand_by, launch, stand_by
from holdfast.recover.leadership import LeaderWatch, Sign, Superseded, leadership_of
from holdfast.recover.outcome import Outcome
from holdfast.recover.run_lock import RunLock
from holdfast.recover.spec import RunSpec

STOP_NOW_S = 15.0
"""The seconds that an immediate stop may take, before this process ends the job itself."""
UNPUBLISHED_S = 20.0
"""The seconds after a node's start after which it complains if it has not found the run's token."""
LOCK_S = 5.0
"""The seconds to wait for the run's lock, which processes of the first node may still hold after
that node is gone.
"""
HAND_OVER_S = 60.0
"""The seconds to wait for the run's lock if the supervisor has handed the lead over to this node.
"""
ALONE_S = 600.0
"""A node gives up after this number of seconds without a supervisor, if its ranks do not train,
either.
"""
READY_AFTER_S = 8.0
"""The seconds from a launch until the next launcher is started in advance. The delay is there so
that the start of the ranks is not slowed down.
"""

Observer = Callable[[str, Mapping[str, Any]], None]
"""A function that is called with the kind and the data of each event. It must return quickly.

The kinds are launch, step, restored, checkpoint, save_failed, disk_full, incident, resolved,
resumed, proposal, observed, stopping, nodes, trouble and ended.
"""


class NodeProcess:
    """This node's part of a run."""

    def __init__(
        self,
        spec: RunSpec,
        home: Path,
        *,
        meeting: Meeting | None = None,
        observer: Observer = lambda _kind, _data: None,
        echo: bool = False,
        notify: Sequence[str] = (),
    ) -> None:
        self._spec = spec
        self._home = home
        self._meeting = meeting
        self._observer: Observer | None = observer
        self._echo = echo
        self._notify = list(notify)
        """The URLs for messages to people, which contain secrets. A supervisor on this node needs
        them.
        """
        self._name = node_name()
        self._began_s = time.monotonic()
        self._wall_offset_s = wall_offset_s()
        self._node_id = f"{self._name}-{os.getpid()}-{secrets.token_hex(3)}"
        self._channel = loopback_listener()
        self._channel_token = secrets.token_hex(16)
        self._paths: RunPaths | None = None
        self._lock: RunLock | None = None
        """The lock that the processes of this node's job hold, too."""
        self._locks: list[RunLock] = []
        """The locks that only this process has taken."""
        self._job: Job | None = None
        self._standby: Job | None = None
        """A started launcher, in reserve for the next launch on this node."""
        self._launched: int | None = None
        self._last_end: tuple[int, int] | None = None
        """The attempt and the return code of the launcher that ended last."""
        self._is_kill_due = False
        self._starting = asyncio.Lock()
        """A lock that is held while a process is started with blocked signals, so that no other
        process inherits the blocked signals.
        """
        self._stop: dict[str, Any] | None = None
        """The last request to the supervisor to stop the run, with the number of requests on this
        node.
        """
        self._away: tuple[float, str] | None = None
        """The time since when the agent has had no supervisor, and the reason."""
        self._idle_s = 0.0
        """The seconds since the last step on this node, as of the agent's last search for the
        supervisor.
        """
        self._launched_s = -math.inf
        """The time of the last launch on this node."""
        self._has_joined = False
        self._tasks = Tasks(self._failed)
        self._ended: asyncio.Future[Outcome] | None = None
        self._held = HeldConnection()
        self._agent = KeptProcess(
            module="holdfast.recover.agent.agent",
            listening=self._channel,
            begin=self._agent_begins,
            receive=self._from_agent,
            complain=self._complain,
            starting=self._starting,
            inherits=(self._held.sending.fileno(),),
        )
        self._supervisor: KeptProcess | None = None
        self._known: dict[str, Any] | None = None
        """The address of the supervisor on this node, and the run's token."""
        self._is_successor = False
        """True if the supervisor of the run has handed the lead over to this node."""
        self._leads = True
        """False after a supervisor on another node has taken over from the one on this node."""
        self._generation: int | None = None
        """The number of the last supervisor on this node, or of the supervisor that it replaces."""
        self._ledger_url = ""

    async def lead(
        self,
        paths: RunPaths,
        lock: RunLock,
        *,
        ledger_url: str,
        listening: socket.socket | None,
        is_lost: bool,
    ) -> Outcome:
        """Run this node, and also the supervisor; return the outcome of the run.

        Args:
            paths: the paths of the run.
            lock: the lock of the run.
            ledger_url: the ledger to which the supervisor writes.
            listening: the socket on which agents of other nodes connect; None if there are no other
                nodes.
            is_lost: True if an earlier supervisor of this run was lost.

        Raises:
            HoldfastError: the supervisor cannot be kept going.
        """
        self._paths, self._lock, self._has_joined = paths, lock, True
        self._ledger_url = ledger_url
        listening = listening or loopback_listener()
        await asyncio.to_thread(self._lead, listening, is_lost=is_lost, adopts=False)
        return await self._run()

    async def join(self, *, ledger_url: str) -> Outcome:
        """Take part in a run that another node leads; return the outcome of the run.

        If the other node is lost, this node may take over the lead.

        Args:
            ledger_url: the ledger to which the supervisor would write, if this node takes over.

        Raises:
            HoldfastError: no supervisor is found.
        """
        assert self._meeting is not None
        self._ledger_url = ledger_url
        try:
            return await self._run()
        finally:
            for lock in self._locks:
                lock.release()

    @property
    def _board(self) -> Board:
        assert self._meeting is not None
        return board_of(self._home, self._meeting.key, self._ledger_url)

    def _lead(self, listening: socket.socket, *, is_lost: bool, adopts: bool) -> None:
        """Prepare the supervisor on this node, which `KeptProcess.keep` starts."""
        assert self._paths is not None
        paths, token = self._paths, secrets.token_hex(16)
        if self._meeting is not None:
            self._meeting.publish(self._board, listening, token, run_id=paths.run_id)
        port = listening.getsockname()[1]
        self._known = {"hosts": ["127.0.0.1"], "port": port, "token": token}

        def begin() -> dict[str, Any]:
            return {
                "kind": "begin",
                "run_id": paths.run_id,
                "home": str(paths.home),
                "ledger": self._ledger_url,
                "token": token,
                "node_id": self._node_id,
                "after": self._generation,
                "is_lost": is_lost,
                "adopts": adopts or supervisor.starts > 1,
                "stop": self._stop,
                "notify": self._notify,
                "wall_offset_s": self._wall_offset_s,
            }

        supervisor = self._supervisor = KeptProcess(
            module="holdfast.recover.supervisor_process",
            listening=listening,
            begin=begin,
            receive=self._from_supervisor,
            complain=self._complain,
            starting=self._starting,
        )

    def stop(self, by: str) -> None:
        """Make the run save its state and stop; a second call stops at once.

        If this node is an idle pod, only this node stops and the run continues. The reason is that
        Kubernetes may end a single pod, for example to drain its node.
        """
        is_idle = self._supervisor is None and self._launched is None and self._job is None
        if by == "SIGTERM" and is_idle and is_in_pod():
            self._stop_here(by)
            return
        count = 1 if self._stop is None else self._stop["count"] + 1
        self._stop = message = {"kind": "stop", "by": by, "count": count}
        if self._supervisor is not None:
            self._supervisor.send(message)
        elif self._has_joined and (self._away is None or count == 1):
            self._agent.send(message)
        else:
            self._stop_here(by)
        if count == 2:
            loop = asyncio.get_running_loop()
            loop.call_later(STOP_NOW_S, self._stop_here, by)

    def _stop_once(self, by: str) -> None:
        if self._stop is None:
            self.stop(by)

    def is_leading(self) -> bool:
        """True if the supervisor on this node leads the run."""
        return self._supervisor is not None and self._leads

    def _stop_here(self, by: str) -> None:
        """End this node's part of the run without waiting for the supervisor."""
        if self._ended is not None and not self._ended.done():
            outcome = Outcome(state="stopped", exit_code=4, sentence=f"Stopped by {by}.")
            self._ended.set_result(outcome)

    async def _run(self) -> Outcome:
        self._ended = asyncio.get_running_loop().create_future()
        self._held.watch()
        children = [self._agent, *([] if self._supervisor is None else [self._supervisor])]
        for child in children:
            self._tasks.spawn(child.keep(self._is_over))
        self._tasks.spawn(self._watch_for_supervisor())
        if self._meeting is not None and can_stand_by(self._spec):
            self._tasks.spawn(self._keep_launcher_ready())
        if (job_id := os.environ.get("SLURM_JOB_ID")) is not None:
            grace_s = self._spec.restarts.stop_grace_s
            self._tasks.spawn(
                stop_in_time(
                    job_id,
                    grace_s,
                    self._stop_once,
                    leads=self.is_leading,
                    complain=self._complain,
                )
            )
        try:
            return await self._ended
        finally:
            await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)
            jobs = (self._job, self._standby)
            self._job = self._standby = None
            for job in jobs:
                if job is not None:
                    job.kill()
                    await job.wait()
            await asyncio.to_thread(end_kept_memory)
            self._channel.close()
            self._held.close()
            if self._supervisor is not None:
                self._supervisor.listening.close()
                if self._meeting is not None and self._leads:
                    await asyncio.to_thread(self._board.remove)

    def _failed(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _is_over(self) -> bool:
        return self._ended is None or self._ended.done()

    # The agent and the supervisor

    def _agent_begins(self) -> dict[str, Any]:
        meeting = self._meeting
        return {
            "kind": "begin",
            "node_id": self._node_id,
            "name": self._name,
            "channel_token": self._channel_token,
            "supervisor": self._known,
            "board": [str(self._home), "" if meeting is None else meeting.key, self._ledger_url],
            "preferred_rank": None if meeting is None else meeting.preferred_rank,
            "launched": self._launched,
            "last_end": self._last_end,
            "began_s": self._began_s,
            "is_profiled": self._spec.profile,
            "stop": None if self._supervisor is not None else self._stop,
        }

    def _from_agent(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "joined":
                self._join(str(message["run_id"]))
            case "away":
                why = str(message["why"])
                self._away = (time.monotonic(), why) if self._away is None else (self._away[0], why)
                self._idle_s = float(message["idle_s"])
            case "launch":
                self._launched, self._is_kill_due = int(message["attempt"]), False
                self._tasks.spawn(self._launch(message))
            case "kill":
                self._is_kill_due = True
                if self._job is not None:
                    self._job.kill()
            case "lead":
                self._is_successor = True
            case "end" if self._supervisor is None:
                self._end(message)

    def _from_supervisor(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "observe":
                self._observe(str(message["what"]), message["data"])
            case "ended":
                self._end(message)
            case "generation":
                self._generation = int(message["number"])
            case "handed_over":
                self._leads = False
                self._end(LEFT)
            case "superseded":
                self._leads = False
                assert self._ended is not None
                if not self._ended.done():
                    self._ended.set_exception(Superseded())
            case "failed":
                assert self._ended is not None
                if not self._ended.done():
                    self._ended.set_exception(HoldfastError(str(message["text"])))

    def _end(self, message: Mapping[str, Any]) -> None:
        assert self._ended is not None
        if not self._ended.done():
            outcome = Outcome(
                state=str(message["state"]),
                exit_code=int(message["exit_code"]),
                sentence=str(message["outcome"]),
            )
            self._ended.set_result(outcome)

    def _join(self, run_id: str) -> None:
        self._away = None
        if self._paths is not None and self._paths.run_id != run_id:
            reason = f"Another run, {run_id}, is led at this rendezvous now."
            raise HoldfastError(f"{reason} Restart this command on this node.")
        if self._paths is not None:
            return
        self._paths = RunPaths(self._home, run_id)
        self._lock = RunLock.acquire(self._paths.node_lock(self._node_id))
        self._locks.append(self._lock)
        self._has_joined = True
        self._observe("nodes", {"text": f"{self._name} takes part in run {run_id}"})
        if self._stop is not None:
            self._agent.send(self._stop)

    async def _watch_for_supervisor(self) -> None:
        """Complain if no supervisor is found; end this node's part after `ALONE_S` without one."""
        began_s, has_complained, watch = time.monotonic(), False, None
        while True:
            await asyncio.sleep(1.0)
            away = self._away
            if away is None or self._supervisor is not None:
                watch = None
                continue
            if self._paths is not None:
                watch = watch or LeaderWatch(leadership_of(self._ledger_url, self._paths))
                try:
                    await self._follow(watch)
                except (HoldfastError, OSError) as error:
                    self._complain(f"{self._name} cannot take over from the first node: {error}")
            away = self._away
            if away is None:  # another node has taken over meanwhile
                continue
            now_s, (since_s, why) = time.monotonic(), away
            if not has_complained and now_s - began_s > UNPUBLISHED_S and not self._has_joined:
                has_complained = True
                self._complain(self._complaint(why))
            if now_s - since_s > ALONE_S and self._idle_s > ALONE_S:
                raise HoldfastError(
                    f"No supervisor was found for {ALONE_S / 60:.0f} minutes. {self._complaint(why)}"
                )

    async def _follow(self, watch: LeaderWatch) -> None:
        """Start a supervisor here if the last one was lost with its node, and if this node may lead."""
        assert self._meeting is not None
        is_successor, self._is_successor = self._is_successor, False
        sign = await asyncio.to_thread(watch.gone, is_successor=is_successor)
        if sign is None:
            return
        # After a handover, wait longer for the lock, which the old supervisor holds until its end.
        lock_s = HAND_OVER_S if is_successor else LOCK_S
        taken = await asyncio.to_thread(self._take_over, sign, asyncio.get_running_loop(), lock_s)
        if taken is None:
            return
        self._generation, lock = taken
        try:
            listening = self._meeting.follow()
            try:
                await asyncio.to_thread(self._lead, listening, is_lost=False, adopts=True)
            except BaseException:
                listening.close()
                raise
        except BaseException:
            lock.release()  # this or another node tries again later
            raise
        assert self._supervisor is not None
        self._locks.append(lock)
        self._observe("nodes", {"text": f"{self._name} takes over from the first node"})
        async with self._starting:
            self._lock = lock
            if self._standby is not None:
                self._standby.kill()  # the standby holds only this node's former lock
                self._standby = None
        self._tasks.spawn(self._supervisor.keep(self._is_over))

    def _take_over(
        self, sign: Sign, loop: asyncio.AbstractEventLoop, lock_s: float
    ) -> tuple[int, RunLock] | None:
        """Claim the lead of the run for this node.

        Returns:
            The number of the supervisor that this node replaces, and the run's lock; None if this
            node may not lead.
        """
        assert self._paths is not None
        with Ledger.open(self._ledger_url) as ledger:
            run = ledger.run(self._paths.run_id)
            if run.state != "running":
                code = 1 if run.exit_code is None else run.exit_code
                end = {"state": run.state, "exit_code": code, "outcome": run.outcome}
                loop.call_soon_threadsafe(self._end, end)
                return None
            after = leadership_of(ledger.url, self._paths, ledger).claim(sign, self._node_id)
            if after is None:
                return None
            try:
                lock = RunLock.acquire(self._paths.lock, timeout_s=lock_s)
            except HoldfastError:  # a process of the first node is still alive
                return None
            host = {"pid": os.getpid(), "host": socket.gethostname()}
            ledger.set_run(self._paths.run_id, **host)
        return after, lock

    def _complaint(self, why: str) -> str:
        assert self._meeting is not None
        if why == "unpublished":
            return (
                f"This node waits for the first node, which must write {self._board.place}. Start `holdfast run` there "
                "too; HOLDFAST_HOME must be one folder that all nodes share, or --ledger one PostgreSQL."
            )
        place = self._meeting.host or "the first node"
        return f"This node cannot join the run at {place} ({why}). Check that `holdfast run` runs there."

    def _observe(self, kind: str, data: Mapping[str, Any]) -> None:
        """Pass an event on to the observer.

        If the observer fails once, it receives no further events, so that a closed terminal does
        not end a run.
        """
        if kind == "step":
            data = {**data, "pids": {int(rank): pid for rank, pid in data["pids"].items()}}
        if self._observer is None:
            return
        try:
            self._observer(kind, data)
        except OSError:
            self._observer = None

    def _complain(self, text: str) -> None:
        self._observe("trouble", {"text": text})

    # The job

    async def _keep_launcher_ready(self) -> None:
        """Keep a started launcher in reserve, since a node may be lost at any time."""
        while True:
            await asyncio.sleep(1.0)
            is_there = self._standby is not None and self._standby.guard.returncode is None
            is_early = time.monotonic() - self._launched_s < READY_AFTER_S
            if self._lock is None or is_there or is_early:
                continue
            async with self._starting:
                lock_fd = self._lock.fd
                with contextlib.suppress(OSError):  # no process can be started now
                    self._standby = await stand_by(self._spec, lock_fd=lock_fd, echo=self._echo)

    async def _launch(self, message: Mapping[str, Any]) -> None:
        assert self._paths is not None
        assert self._lock is not None
        attempt = int(message["attempt"])
        former, self._job = self._job, None
        if former is not None:
            former.kill()
            await former.wait()
        place = Place(
            node_rank=int(message["node_rank"]),
            address=str(message["address"]),
            port=int(message["port"]),
        )
        async with self._starting:
            standby, self._standby = self._standby, None
            self._launched_s = time.monotonic()
            self._job = job = await launch(
                self._spec.of_size(int(message["nnodes"])),
                self._paths,
                attempt,
                address="{}:{}".format(*self._channel.getsockname()[:2]),
                token=self._channel_token,
                lock_fd=self._lock.fd,
                echo=self._echo,
                environment=message["environment"],
                place=place,
                standby=standby,
            )
        if self._is_kill_due:
            job.kill()
        returncode = await job.wait()
        if self._job is job:
            self._job = self._launched = None
            self._last_end = attempt, returncode
            self._agent.send(
                {"kind": "launcher_ended", "attempt": attempt, "returncode": returncode}
            )
