"""Start the attempts of a run, by new launchers on enough nodes or by the present launchers."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from holdfast.core.clock import Clock
from holdfast.core.failure_history import FailureHistory
from holdfast.core.paths import RunPaths
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.channel import Peer
from holdfast.recover.connected_node import Node
from holdfast.recover.launching.launch import attempt_environment, make_log_folder
from holdfast.recover.localise.in_run import NodeTests
from holdfast.recover.nodes import Nodes
from holdfast.recover.recorder import Recorder
from holdfast.recover.slurm.requeue import Requeue
from holdfast.recover.spec import RunSpec

NODES_S = 1800.0
"""The seconds that a launch waits for missing nodes."""
SPARE_S = 10.0
"""The seconds that a launch waits for another node before it uses a node that tests found bad."""
NEEDS_ALL = "needs_all_nodes"
"""The kind of the event that records that the job could not start on fewer nodes."""


class Launches:
    """The launches of one run."""

    def __init__(
        self,
        paths: RunPaths,
        nodes: Nodes,
        recorder: Recorder,
        observe: Callable[[str, Mapping[str, Any]], None],
        tests: NodeTests,
        spec: RunSpec,
        clock: Clock,
    ) -> None:
        """Store what launches need.

        Args:
            paths: the paths of the run.
            nodes: the nodes of the run.
            recorder: the recorder of the run.
            observe: a function that receives the events of the run.
            tests: the tests of the nodes.
            spec: the job and its limits.
            clock: the clock of this host.
        """
        self._paths = paths
        self._nodes = nodes
        self._recorder = recorder
        self._observe = observe
        self._tests = tests
        self._sizes = spec.sizes
        self._nnodes = self._sizes[0]
        self._requeue = Requeue(
            paths,
            spec.cwd,
            recorder,
            observe,
            clock,
            nnodes=self._nnodes,
            limit=spec.restarts.max_restarts,
        )
        self._order: dict[str, Any] | None = None
        """The message that started the present attempt below its old launchers; None if it has new
        launchers.
        """
        self.attempt = 0
        """The attempt for which the launchers were started."""
        self._moves_ranks = False
        self._needs_all = False
        """True if the job could not start on fewer nodes."""

    def move_ranks(self, *, moves: bool) -> bool:
        """If `moves`, run each rank of the next attempt on another node.

        Returns:
            True if the move needs new launchers, because there are several nodes. On a single node,
            the ranks move to other GPUs.
        """
        self._moves_ranks = moves
        return moves and len(self._nodes.launched) > 1

    def take_over(self, launched: int, number: int) -> None:
        """Continue with the attempt of an earlier supervisor.

        Args:
            launched: the attempt for which the launchers were started.
            number: the attempt.
        """
        self.attempt = launched
        self._order = None if launched == number else self._order_of(number)

    def is_present(self, peer: Peer, message: Mapping[str, Any], number: int) -> bool:
        """Return True if a message belongs to the attempt `number`; shims serve several attempts."""
        if peer.role == "shim" and peer.attempt >= self.attempt:
            return bool(message.get("attempt", number) == number)
        return peer.attempt == number

    def start_late(self, shim: Peer, message: Mapping[str, Any], view: AttemptView) -> None:
        """Send the order to start again to a shim whose agent was gone when the order was sent."""
        if (
            self._order is not None
            and (shim.role, message["kind"]) == ("shim", "swept")
            and message.get("attempt") == view.number - 1
            and shim.rank not in view.rank_pids
        ):
            self._nodes.send(self._order, only=shim)

    async def choose(
        self, given_up: asyncio.Event
    ) -> tuple[list[Node], int] | policy.JobExited | policy.NodesMissing:
        """Wait for enough nodes, and test the nodes if a test is due.

        Returns:
            The nodes for the launch, and a free port of the first node. Or, if the attempt was
            given up before it began or nodes were missing for too long, an event for the policy.
        """
        while True:
            found = await self._choose(given_up)
            if not isinstance(found, tuple) or given_up.is_set():
                return found
            if not self._tests.is_due_for(found[0]):
                return found
            await self._tests.run(given_up)

    async def _choose(
        self, given_up: asyncio.Event
    ) -> tuple[list[Node], int] | policy.JobExited | policy.NodesMissing:
        while True:
            await self._nodes.end_launchers()
            if self._nodes.stuck:
                self._observe("nodes", {"text": self._stuck})
            self._tests.leave_out()
            missing = self._nodes.missing(self._nnodes)
            if missing and self._nnodes > 1:
                there = f"{self._nnodes - missing} of {self._nnodes}"
                out = self._tests.left_out
                more = f"; cordoned: {', '.join(out)}" if out else ""
                self._observe("nodes", {"text": f"waiting for nodes: {there} are there{more}"})
            size = await self._gather(given_up)
            if size is None:
                break
            if size < self._nnodes:
                text = f"going on with {size} of {self._nnodes} nodes: run.accumulation is {self._nnodes // size}"
                self._observe("nodes", {"text": text})
            chosen = await self._nodes.choose(size, turn=int(self._moves_ranks))
            if chosen is not None:
                return chosen
        if given_up.is_set():
            return policy.JobExited(-9)
        if self._requeue.queued is not None:
            return policy.NodesMissing(self._requeue.queued, queued=True)
        missing = self._nodes.missing(self._nnodes)
        out = self._tests.left_out
        cordoned = (
            f" Cordoned: {', '.join(out)}; after a repair: `holdfast nodes return NODE`."
            if out
            else ""
        )
        stuck = f" {self._stuck}." if self._nodes.stuck else ""
        return policy.NodesMissing(
            f"{missing} of {self._nnodes} nodes are missing, and none came within {NODES_S / 60:.0f} minutes."
            f"{cordoned}{stuck}"
        )

    @property
    def _stuck(self) -> str:
        return (
            f"Processes on {', '.join(self._nodes.stuck)} do not end by SIGKILL, so nothing is launched there until "
            "they end: `ps -eo pid,stat,wchan,args` shows them in the state D"
        )

    async def _gather(self, given_up: asyncio.Event) -> int | None:
        """Wait for enough nodes; return the number of nodes to use, or None if there are too few.

        After some time, cordoned nodes are used again. If there are still too few, the job is
        launched on a smaller number of nodes, if allowed.
        """
        for _ in range(round(NODES_S / SPARE_S)):
            if await self._nodes.gather(self._nnodes, given_up, timeout_s=SPARE_S):
                self._requeue.enough()
                return self._nnodes
            self._tests.leave_out()  # a person may have returned a node meanwhile
            if given_up.is_set() or self._tests.readmit(self._nnodes):
                break
            # At the start of a run, its nodes may take longer to connect.
            size = self._size_for(self._nodes.missing) if self._recorder.any_step else None
            if size is not None:
                return size
            names = [node.name for node in self._nodes.connected]
            if await self._requeue.look(names, self._nodes.cordoned, given_up):
                return None
        return (
            self._nnodes
            if not self._nodes.missing(self._nnodes) and not given_up.is_set()
            else None
        )

    def _size_for(self, missing: Callable[[int], int]) -> int | None:
        sizes = self._sizes[:1] if self._needs_all else self._sizes
        return next((size for size in sizes if missing(size) == 0), None)

    @property
    def can_grow(self) -> bool:
        """Return True if there are enough nodes for more than the present number."""
        present = len(self._nodes.launched)
        if not 0 < present < self._nnodes:
            return False
        size = self._size_for(lambda size: max(0, self._nodes.missing(size) - present))
        return size is not None and size > present

    def remember(self) -> None:
        """Read what earlier supervisors have recorded since a person last started the run."""
        kinds = [kind for kind, _, _ in self._recorder.events("begun", NEEDS_ALL)]
        self._needs_all = kinds[-1:] == [NEEDS_ALL]

    def failed(self, failure: policy.Diagnosed) -> policy.Diagnosed:
        """Return the diagnosis of a failed attempt in the form that the policy needs.

        If the job cannot start on fewer nodes, because its state belongs to a number of ranks, it
        can still start on all nodes.
        """
        size = len(self._nodes.launched)
        has_started = failure.has_stepped or self._order is not None
        if has_started or failure.restart_helps or not 0 < size < self._nnodes:
            return failure
        self._needs_all = True
        self._recorder.event(NEEDS_ALL, {"size": size})
        why = (
            f"The job does not start on {size} of {self._nnodes} nodes, so the run waits for all nodes from now on; "
            "state under per_rank, as the position of run.batches, needs them: leave --min-nodes out."
        )
        self._observe("nodes", {"text": why})
        return replace(failure, restart_helps=True, because=why)

    def start(self, number: int, chosen: tuple[list[Node], int] | None) -> None:
        """Start an attempt on the chosen nodes; if `chosen` is None, below the present launchers."""
        if chosen is None:
            self._order = self._order_of(number)
            self._nodes.send(self._order, to="shim")
            return
        self._order = None
        self._nodes.launch(number, *chosen, self._environment(number, len(chosen[0])))
        self._recorder.launched({node.node_id: node.name for node in chosen[0]})

    def _order_of(self, number: int) -> dict[str, Any]:
        environment = self._environment(number, len(self._nodes.launched))
        environment["TORCHELASTIC_RESTART_COUNT"] = str(number - self.attempt)
        logs = str(make_log_folder(self._paths, number, launched=self.attempt))
        return {"kind": "start", "attempt": number, "logs": logs, "environment": environment}

    def _environment(self, number: int, size: int) -> dict[str, str]:
        history = self._recorder.failures() or FailureHistory()
        left_out = self._recorder.skipping.left_out
        turns = self._moves_ranks and self._nnodes == 1
        accumulation = self._nnodes // max(1, size)
        return attempt_environment(
            number, history, left_out, turns_gpus=turns, accumulation=accumulation
        )
