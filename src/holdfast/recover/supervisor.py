"""Keep one run going, from its launch to its end.

The supervisor is an event loop. It receives the messages of ranks and shims, which the nodes'
agents forward, and checks everything else at regular ticks. `conduct` decides on actions and
carries them out.

If a supervisor ends, the next one reads the ledger and takes over the present attempt.
"""

import asyncio
import json
import math
import socket
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.left_out import SKIPPED
from holdfast.core.paths import RunPaths
from holdfast.core.telemetry import StepRecord
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.channel import Peer
from holdfast.recover.conduct import HERE, Conduct
from holdfast.recover.connected_node import Node
from holdfast.recover.leadership import BEAT_S, Superseded, leadership_of
from holdfast.recover.losses import Losses
from holdfast.recover.nodes import Nodes
from holdfast.recover.outcome import Outcome
from holdfast.recover.people import modes
from holdfast.recover.recorder import RecordedLaunch, Recorder
from holdfast.recover.replay.replays import Replays
from holdfast.recover.spec import RunSpec

TICK_S = 0.1
REPORT_S = 1.0
ACCEPTED = "The loss jumped, and a restart would not mend that: the training goes on from there"
STANDSTILL_S = 2.0
"""If a tick is late by this number of seconds, the supervisor itself stood still, for example
because it was suspended.
"""
WARM_AFTER_S = 5.0
"""The seconds after a rank's first step before a warm process starts its imports. The delay is
there so that the start is not slowed down.
"""
ADOPT_TICKS = 100
"""The number of ticks that the agents of the present attempt have to connect to the next
supervisor.
"""
RANK_EVENTS = ("restored", "checkpoint", "save_failed", "disk_full", SKIPPED)
"""The kinds of events from ranks that the observer receives. Other events, from the script, are
only recorded.
"""

MAX_KIND = 64
"""The largest number of characters in the kind of an event."""
MAX_NESTED = 20
"""The largest depth of nested lists and objects in the data of an event."""

Observer = Callable[[str, Mapping[str, Any]], None]
"""A function that receives each event (see `agent.node.Observer`)."""


class Supervisor:
    """Supervise one run until its end, from its first launch or from the end of a supervisor on."""

    def __init__(
        self,
        spec: RunSpec,
        paths: RunPaths,
        ledger: Ledger,
        *,
        token: str,
        generation: int,
        own_node: str = "",
        observer: Observer = lambda _kind, _data: None,
        clock: Clock | None = None,
    ) -> None:
        self._spec = spec
        self._paths = paths
        self._observe = observer
        self._clock = clock or SystemClock()
        self._recorder = Recorder(
            paths,
            ledger,
            self._clock,
            complain=lambda text: observer("trouble", {"text": text}),
        )
        self._nodes = Nodes(
            self,
            self._clock,
            run_id=paths.run_id,
            token=token,
            generation=generation,
            own_node=own_node,
        )
        replays = Replays(self._recorder, paths.steps, observe=observer)
        self._losses = Losses(
            self._recorder, self._clock, replays, healthy_after=spec.healthy_after
        )
        self._conduct = Conduct(
            spec,
            paths,
            self._recorder.ledger,
            nodes=self._nodes,
            recorder=self._recorder,
            losses=self._losses,
            clock=self._clock,
            observe=observer,
        )
        self._decide_on = self._conduct.decide_on
        self._leadership = leadership_of(ledger.url, paths, ledger)
        self._running: RecordedLaunch | None = None
        """The launch of an earlier supervisor, which may still be running."""
        self._over: tuple[str, int, str] | None = None
        """The state, the exit code and the outcome of the run, if an earlier supervisor recorded
        its end.
        """

    async def run(
        self,
        listening: socket.socket,
        *,
        adopts: bool = False,
        stop: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Supervise until the run is over.

        Args:
            listening: the socket for the agents.
            adopts: True to take over the job of an earlier supervisor that has ended.
            stop: the last stop request that the earlier supervisor received; None if there was
                none.
        """
        ended = self._conduct.begin()
        self._recorder.start_thread()
        farewell: dict[str, Any] = {"kind": "end", "state": "failed", "exit_code": 1}
        farewell["outcome"] = "Holdfast itself failed; see the node that leads the run."
        leads = True
        try:
            if stop is not None:
                self.request_stop(str(stop["by"]), HERE, int(stop["count"]))
            await self._begin(listening, adopts=adopts)
            self._conduct.stopping.begin()
            outcome = await ended
        except Superseded:
            leads = False
            raise
        except Exception as error:
            reason = f"Holdfast itself failed: {type(error).__name__}: {error}."
            self._recorder.run_ended(state="failed", exit_code=1, outcome=reason)
            if isinstance(error, OSError):  # the host is at its limit; this is no bug
                raise HoldfastError(
                    f"{reason} Mend that, then `holdfast run --resume {self._paths.run_id}`."
                ) from error
            raise
        else:
            farewell |= {"state": outcome.state, "exit_code": outcome.exit_code}
            farewell["outcome"] = outcome.sentence
            return outcome
        finally:
            if leads:
                await self._conduct.end_launchers()
            self._conduct.close()
            await self._losses.close(leads=leads)
            await self._nodes.close(farewell if leads else None)
            self._recorder.close()

    async def _begin(self, listening: socket.socket, *, adopts: bool) -> None:
        launch, over = self._running, self._over
        await self._nodes.start(listening, adopting=None if launch is None else launch.attempt)
        self._conduct.tasks.spawn(self._tick_forever())
        if over is not None:
            await asyncio.sleep(REPORT_S)  # the agents must be connected to receive the end
            self._conduct.over(Outcome(*over))
        elif launch is not None and await self._adopt(launch):
            pass
        elif adopts and launch is None and self._view.kind_of_failure != "exit":
            self._go_on_with_incident()
        else:
            self._recorder.close_lost_attempts()
            self._decide_on(policy.Begin())

    def _go_on_with_incident(self) -> None:
        """Diagnose the failure because of which an earlier supervisor ended the job."""
        self._view.killed = True
        self._conduct.adopted(in_place=False)
        self._decide_on(policy.JobFrozen())
        self._decide_on(policy.JobExited(-9))

    @property
    def generation(self) -> int:
        """The number of this supervisor."""
        return self._nodes.generation

    def remember(self, *, is_lost: bool, adopts: bool) -> None:
        """Read the records of earlier supervisors of the run. Call this once, before `run`.

        Args:
            is_lost: True if the run was lost together with its node, and continues from its
                records.
            adopts: True to take over the job of an earlier supervisor that has ended.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        if not is_lost and not adopts:
            self._recorder.event("begun", {})
            return
        self._conduct.remember()
        if not adopts:
            return
        self._over = self._recorder.recorded_end()
        self._running = launch = self._recorder.running_launch()
        self._conduct.take_up(launch)

    async def _adopt(self, launch: RecordedLaunch) -> bool:
        """Take over the present attempt; return False if this is not possible."""
        number, launched, ids = self._view.number, launch.attempt, list(launch.nodes)
        for _ in range(ADOPT_TICKS):
            nodes = self._nodes.left_of(launched, ids)
            if len(nodes) == len(ids) and (number == launched or self._view.shims):
                break
            await asyncio.sleep(TICK_S)
        if not nodes or (number != launched and not self._view.shims):
            return False  # no node of the attempt is left, or its start was not sent
        self._nodes.adopt(nodes, ids)
        present = {node.node_id for node in nodes}
        self._conduct.adopted(in_place=number != launched)
        self._recorder.event("supervisor_followed", {"generation": self._nodes.generation})
        self._observe(
            "trouble", {"text": "The supervisor ended and was started again: training goes on."}
        )
        self._conduct.go_on_watching()
        ended = len(self._view.exits)
        for node_id, name in launch.nodes.items():
            if node_id not in present:
                self._lose(name, self._view.without_a_shim)
        self._took_in(ended)
        for node in nodes:
            if node.launched is None and node.last_end is not None:
                self._view.launcher_ended(node.last_end[1])
        if self._view.kind_of_failure != "exit":
            self._decide_on(policy.JobFrozen())
        elif (
            self._view.first_failure is not None  # the next tick handles a rank that left
            or self._view.lost_node
            or self._nodes.launcher_failed
        ):
            self._decide_on(policy.RankFailed())
        return True

    @property
    def _view(self) -> AttemptView:
        """The view of the present attempt."""
        return self._conduct.view

    @property
    def _now_s(self) -> float:
        return self._clock.monotonic_s()

    def request_stop(self, by: str, where: str, count: int) -> None:
        """See `Conduct.request_stop`."""
        self._conduct.request_stop(by, where, count)

    # What happens

    def received(
        self, peer: Peer, message: dict[str, Any], at_monotonic_s: float, *, again: bool
    ) -> None:
        """See `nodes.Listener`."""
        if not self._conduct.launches.is_present(peer, message, self._view.number):
            self._conduct.launches.start_late(peer, message, self._view)
            return  # the attempt of the message is over
        began, ended = self._view.world_size is None, len(self._view.exits)
        try:
            if message["kind"] == "exited":
                message["at_monotonic_s"] = at_monotonic_s  # by this host's clock
            self._view.on_message(peer, message, at_monotonic_s)
            match "" if again else message["kind"]:  # repeated messages were recorded before
                case "hello" | "started" if began:
                    self._recorder.event_soon("started", {"world_size": peer.world_size})
                case "imported":
                    self._warm_later(peer)
                case "step":
                    if peer.rank == self._view.lowest_watched:
                        self._stepped(peer, message, at_monotonic_s)
                    self._look_at_loss(peer, message)
                case "cut_off":
                    self._cut_off(peer, str(message["why"]))
                case "collectives":
                    self._conduct.speed.answered(peer, message, at_monotonic_s)
                case "event":
                    self._event(peer, str(message["event"]), dict(message["data"]))
                case "vote" | "sigterm" | "stopped":
                    number = self._view.number
                    self._conduct.stopping.received(
                        peer, message, self._view, is_present=lambda: self._view.number == number
                    )
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
            # The ranks run the user's code, so a malformed message is recorded as malformed, and
            # must not end anything.
            wrong = {"message": str(message)[:500], "error": repr(error)}
            self._recorder.event_soon("malformed_message", wrong, peer.rank)
        self._took_in(ended)

    def _took_in(self, ended: int) -> None:
        """Act on new ends of ranks in the view, which are those after the first `ended`."""
        if self._view.all_ended:
            self._conduct.all_ended()
        for end in self._view.exits[ended:]:
            if end.exit_code != 0:
                if self._conduct.decisions.holds_hang:
                    self._view.frozen = None  # the rank was not ended because of a hang
                how = {"pid": end.pid, "exit_code": end.exit_code, "signal": end.signal}
                self._recorder.event_soon("rank_exited", how, end.rank)
                self._decide_on(policy.RankFailed())

    def states(self, states: Mapping[int, str | None]) -> None:
        """See `nodes.Listener`."""
        self._view.states |= states

    def launcher_ended(self, returncode: int) -> None:
        """See `nodes.Listener`."""
        self._view.launcher_ended(returncode)
        if returncode != 0:
            self._decide_on(policy.RankFailed())

    def node_lost(self, node: Node) -> None:
        """See `nodes.Listener`."""
        ended = len(self._view.exits)
        self._lose(node.name, {peer.rank for peer in node.peers})
        self._took_in(ended)
        self._decide_on(policy.RankFailed())

    def _lose(self, name: str, ranks: Collection[int]) -> None:
        self._recorder.event("node_lost", {"node": name})
        self._observe("nodes", {"text": f"node {name} is lost"})
        self._view.node_lost(name, ranks, self._now_s)

    def _cut_off(self, peer: Peer, why: str) -> None:
        if self._view.rank_pids.get(peer.rank) == peer.pid:
            self._view.attached.discard(peer.rank)  # do not wait for the vote of the rank
        self._recorder.event_soon("rank_cut_off", {"why": why, "pid": peer.pid}, peer.rank)
        text = f"Rank {peer.rank} is cut off: {why}. The training goes on, without a watch over this rank."
        self._observe("trouble", {"text": text})

    def _warm_later(self, peer: Peer) -> None:
        def warm() -> None:
            if peer.attempt == self._view.number:
                self._nodes.send({"kind": "warm"}, to="shim", rank=peer.rank)

        asyncio.get_running_loop().call_later(WARM_AFTER_S, warm)

    def _stepped(self, peer: Peer, message: dict[str, Any], at_monotonic_s: float) -> None:
        at_s = self._clock.now_s() - self._now_s + at_monotonic_s
        record = StepRecord.of_report(self._view.number, peer.rank, message, at_s)
        if self._view.start_step is None:
            self._first_step(record)
        self._recorder.step(record)
        self._conduct.speed.stepped(record.step_s)
        data = {"step": record.step, "loss": record.loss, "pids": dict(self._view.rank_pids)}
        self._observe("step", {**data, "at_s": record.at_s, **record.metrics})

    def _look_at_loss(self, peer: Peer, message: Mapping[str, Any]) -> None:
        if self._conduct.state.phase is not policy.Phase.RUNNING:
            return
        is_held = self._conduct.decisions.holds_loss
        if message["loss"] is not None:
            self._conduct.decisions.looked_at(int(message["step"]))
        found = self._losses.look(self._view, peer.rank, message, is_held=is_held)
        if found is None:
            return
        self._view.anomaly = found
        self._decide_on(self._losses.broken(found))
        if self._conduct.state.phase is policy.Phase.RUNNING:
            self._view.anomaly = None
            if self._conduct.decisions.holds_loss:
                return
            self._losses.accept(found)
            self._recorder.event("loss_accepted", found.to_json(), peer.rank)
            self._observe("trouble", {"text": f"{ACCEPTED} (step {found.step})."})

    def _first_step(self, record: StepRecord) -> None:
        restored = self._view.restored
        start_step = record.step - 1
        if restored is not None:  # larger steps are from another training
            start_step = min(start_step, int(restored["step"]))
        self._view.start_step = start_step
        self._losses.restarted(start_step)
        self._conduct.check_rollback(record.step)
        self._recorder.first_step(start_step, record.at_s)
        self._conduct.casework.stepped(record, start_step)

    def _event(self, peer: Peer, kind: str, data: dict[str, Any]) -> None:
        if len(kind) > MAX_KIND or not kind.isprintable():
            raise ValueError("an event of a kind that cannot be recorded")
        # If an event did not fit into the database, all events in the same transaction would be
        # lost.
        if _nests_deeper(data, MAX_NESTED):
            raise ValueError("an event that nests too deeply")
        json.dumps(data, allow_nan=False)
        if kind == SKIPPED and not self._view.is_first_to_skip(data):
            return  # all ranks leave out the same batches: one event is enough
        if kind == "restored" and self._view.start_step is None:
            self._losses.restored(int(data["step"]))
        if kind == "checkpoint":
            self._losses.saved(self._view, Path(str(data["path"])), int(data["step"]))
            self._recorder.checkpoint(data)
            save_s = float(data.get("durable_s") or 0.0)
            if math.isfinite(save_s):
                self._decide_on(policy.Saved(save_s))
        else:
            self._recorder.event_soon(kind, data, peer.rank)
        if kind in RANK_EVENTS:
            self._observe(kind, data)

    async def _tick_forever(self) -> None:
        last_s = self._clock.monotonic_s()
        last_beat_s, beating = last_s, self._conduct.tasks.spawn(self._beat())
        looking: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._clock.monotonic_s()
            # A look at all ranks may take long. This is no standstill.
            if now_s - last_s > STANDSTILL_S and looking is None:
                self._view.detector.resumed(now_s - last_s)
            last_s = now_s
            if looking is not None and looking.done():
                looking = None
            elif looking is None and self._watching and self._view.detector.look_due(now_s):
                # The look runs in a separate task, since a lost node may delay it for seconds.
                looking = self._conduct.tasks.spawn(self._look())
            if self._watching and looking is None:
                if self._view.check(now_s) is not None:
                    self._decide_on(policy.JobFrozen())
                elif self._conduct.decisions.holds_hang:
                    self._decide_on(modes.WentOn())
                elif self._view.left is not None:
                    self._decide_on(policy.RankFailed(others_run=True))
                self._conduct.speed.tick(self._view, now_s)
            await self._nodes.tick()
            self._conduct.health.tick(self._view, self._conduct.state)
            self._conduct.grow_if_possible()
            self._conduct.roll_back_if_requested()
            self._conduct.hand_over_if_due()
            self._recorder.flush()
            self._conduct.stopping.look()
            if self._conduct.decisions.is_approved():
                self._decide_on(modes.Approved())
            if now_s - last_beat_s > BEAT_S and beating.done():
                last_beat_s = now_s
                beating = self._conduct.tasks.spawn(self._beat())
            self._decide_on(policy.Tick())

    async def _beat(self) -> None:
        """Record a sign of life of this supervisor; end it if another supervisor leads."""
        if not await asyncio.to_thread(self._leadership.beat, self._nodes.generation):
            raise Superseded

    @property
    def _watching(self) -> bool:
        return self._conduct.state.phase in (policy.Phase.RUNNING, policy.Phase.STOPPING)

    async def _look(self) -> None:
        view = self._view
        pids = {rank: view.rank_pids[rank] for rank in view.detector.living}
        view.looked(await self._nodes.look(pids), self._now_s)


def _nests_deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _nests_deeper(one, levels - 1) for one in inner)
