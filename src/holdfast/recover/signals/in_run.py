"""Collect the signals and notices of a run's nodes, and have the policy decide on them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.core.clock import Clock
from holdfast.core.ledger import NodeRecord
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.connected_node import Node
from holdfast.recover.detectors import external, node
from holdfast.recover.detectors.liveness import Liveness, Looks, blind
from holdfast.recover.localise.in_run import Case, NodeTests
from holdfast.recover.localise.pairing import MAX_PRIOR, cordon_limit
from holdfast.recover.nodes import Nodes
from holdfast.recover.policy.nodes import Circumstances, Finding, NodePlan, plan_for
from holdfast.recover.signals import slurm
from holdfast.recover.signals.facts import CannotSee, Fact, NodeSignal, Notice
from holdfast.recover.spec import RunSpec

LOOK_TICKS = 10
MAX_KEPT = 256
"""The largest number of signals that are kept of a node."""
FAULTY = 0.99
"""The probability that a node is faulty after a decisive signal."""
CANNOT_LAUNCH = (126, 127)
"""The exit codes of a guard if its launcher cannot be started. Shells use the same codes."""
POD_ENDS = "Kubernetes ends its pod"
DUE_S = 30.0
"""A margin in seconds between the end of a save and the time at which a node is taken away."""

Phase = policy.Phase


class SignalRecords(Protocol):
    """The interface of the recorder that this module needs."""

    def event(self, kind: str, data: dict[str, Any], rank: int | None = None) -> None:
        """Record an event before this method returns."""

    def event_soon(self, kind: str, data: dict[str, Any], rank: int | None = None) -> None:
        """Record an event soon, without waiting for the ledger."""

    def events(self, *kinds: str) -> list[tuple[str, int, dict[str, Any]]]:
        """Return the events of the given kinds."""


@dataclass(frozen=True)
class _Recorded:
    seen: node.Seen
    recorded_count: int
    """The count when the signal was last recorded; each doubling is recorded."""


class NodeHealth:
    """The health of one run's nodes, as far as it is known."""

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        nodes: Nodes,
        tests: NodeTests,
        records: SignalRecords,
        clock: Clock,
        observe: Callable[[str, Mapping[str, Any]], None],
        tell: Callable[[policy.NodeToLeave], None],
        states: slurm.SlurmStates | None = None,
    ) -> None:
        """Store the collaborators; there are no signals yet.

        Args:
            run_id: the run.
            spec: the specification of the run.
            nodes: the nodes of the run.
            tests: the tests of the nodes, which also leave nodes out of launches.
            records: the recorder of the run.
            clock: the clock of this host.
            observe: a function that receives the events of the run.
            tell: a function that passes an event to the policy.
            states: a function that reads the states of the nodes in the scheduler; called in a
                thread.
        """
        self._run_id = run_id
        self._spec = spec
        self._nodes = nodes
        self._tests = tests
        self._records = records
        self._clock = clock
        self._observe = observe
        self._pass_on = tell
        self._seen: dict[tuple[str, str, str, str], _Recorded] = {}
        self._notices: dict[str, dict[tuple[str, str, str], Notice]] = {}
        self._sources: dict[str, dict[str, str]] = {}
        """For each node that has reported, its sources, each with the reason why it cannot be read.
        The reason is empty if the source was read."""
        self._aside: dict[str, NodeRecord] = {}
        """The nodes on which this run launches nothing, although the ledger has no cordon for them.
        """
        self._broken: set[str] = set()
        """The nodes without a cordon whose launcher could not be started."""
        self._to_leave: set[str] = set()
        self._states = states
        self._states_due_s = clock.monotonic_s()
        self._reading: asyncio.Future[Mapping[str, Sequence[Fact]]] | None = None
        self._of_scheduler: dict[str, Sequence[Fact]] = {}
        self._sentences: list[str] = []
        """The sentences about the present incident."""
        self._liveness = Liveness()
        self._ticks = 0
        self._launched_s = clock.monotonic_s()
        self._attempt = 0
        self._could_see: set[tuple[str, str]] = set()
        """The nodes and sources that could be read at some time."""
        nodes.signalled = self.signalled
        tests.health = self

    def remember(self) -> None:
        """Leave out the nodes that an earlier supervisor left out.

        Only records since a person last started the run count. Only nodes with a broken launcher
        are read from the ledger. This is enough, since agents send the notices about all other
        nodes again.
        """
        for kind, _, data in self._records.events("begun", "node_set_aside"):
            if kind == "begun":
                self._broken.clear()
                self._aside.clear()
            elif data.get("is_broken") is True:
                self._broken.add(str(data["node"]))
                self._leave_out(str(data["node"]), str(data["why"]))

    # Messages of the agents

    def signalled(self, name: str, message: Mapping[str, Any]) -> None:
        """Record a message `node_signal`, `notice` or `cannot_see` from the node `name`.

        Raises:
            KeyError, TypeError, ValueError: the message is malformed.
        """
        if message["kind"] == "cannot_see":
            known = self._sources.setdefault(name, {})
            known |= {str(source): str(why) for source, why in message["sources"].items()}
            return
        is_over = message["is_over"] is True
        if message["kind"] == "notice":
            self._notice(
                name, Notice.of_json(message["fact"], self._clock.now_s()), is_over=is_over
            )
            return
        signal = NodeSignal.of_json(message["fact"])
        at_s = self._clock.monotonic_s() - max(0.0, float(message["age_s"]))
        self._signal(name, signal, at_s, is_over=is_over)

    def _signal(self, name: str, signal: NodeSignal, at_s: float, *, is_over: bool) -> None:
        key = (name, *signal.key)
        before = self._seen.get(key)
        if before is not None and (is_over or before.seen.signal == signal):
            if not is_over:  # the signal still holds; a past signal keeps its time
                later = replace(before.seen, at_s=max(at_s, before.seen.at_s))
                self._seen[key] = replace(before, seen=later)
            return
        if is_over or sum(known[0] == name for known in self._seen) >= MAX_KEPT:
            return
        meaning = node.meaning_of(signal)
        seen = node.Seen(node=name, signal=signal, meaning=meaning, at_s=at_s)
        is_news = before is None or signal.count >= 2 * before.recorded_count
        recorded = signal.count if before is None or is_news else before.recorded_count
        self._seen[key] = _Recorded(seen, recorded)
        if not is_news or self._was_recorded(name, signal):
            return
        data = {
            "node": name,
            "weight": meaning.weight,
            "reason": meaning.reason,
            **signal.to_json(),
        }
        self._records.event_soon("node_signal", data)
        if meaning.weight != "record":
            self._observe("nodes", {"text": f"node {name}: {signal.text} ({signal.source})"})

    def _was_recorded(self, name: str, signal: NodeSignal) -> bool:
        """Return True if an earlier supervisor has recorded the signal.

        The agents repeat all signals to the next supervisor.
        """
        known = (data for _, _, data in self._records.events("node_signal"))
        recorded = {"node": name, **signal.to_json()}
        return any(all(data.get(key) == recorded[key] for key in recorded) for data in known)

    def _notice(self, name: str, notice: Notice, *, is_over: bool) -> None:
        known = self._notices.setdefault(name, {})
        if is_over:
            known.pop(notice.key, None)
            if not known and name in self._aside and name not in self._broken:
                del self._aside[name]
                self._to_leave.discard(name)
            return
        if notice.key not in known:
            data = {"node": name, **notice.to_json(self._clock.now_s())}
            self._records.event_soon("notice", data)
            self._observe("nodes", {"text": f"node {name}: {notice.text} ({notice.source})"})
        known[notice.key] = notice

    # States of the scheduler

    def _look_at_scheduler(self) -> None:
        """Read the states of the nodes in the scheduler, in a thread, if it is time."""
        now_s = self._clock.monotonic_s()
        if self._states is None:
            return
        names = [one.name for one in self._nodes.connected]
        if self._reading is None:
            if now_s >= self._states_due_s:
                loop = asyncio.get_running_loop()
                self._reading = loop.run_in_executor(None, self._states, names)
            return
        if not self._reading.done():
            return
        reading, self._reading = self._reading, None
        self._states_due_s = now_s + slurm.PERIOD_S
        why = ""
        try:
            self.take_states(reading.result())
        except CannotSee as error:
            why = str(error)
        for name in names:
            self._sources.setdefault(name, {})[slurm.NAME] = why

    def take_states(self, by_node: Mapping[str, Sequence[Fact]]) -> None:
        """Record the facts about the nodes that follow from their states in the scheduler."""
        now_s = self._clock.monotonic_s()
        for name in {*by_node, *self._of_scheduler}:
            facts = by_node.get(name, ())
            present = {fact.key for fact in facts}
            over = [one for one in self._of_scheduler.get(name, ()) if one.key not in present]
            for fact, is_over in [*((one, False) for one in facts), *((one, True) for one in over)]:
                if isinstance(fact, Notice):
                    self._notice(name, fact, is_over=is_over)
                else:
                    self._signal(name, fact, now_s, is_over=is_over)
        self._of_scheduler = dict(by_node)

    # Decisions

    def tick(self, view: AttemptView, state: policy.State) -> None:
        """Decide on the health of the nodes while a job runs."""
        self._ticks += 1
        if self._ticks % LOOK_TICKS or state.phase is not Phase.RUNNING:
            return
        self._look_at_scheduler()
        self._look_at_liveness(view)
        here = {one.name: one for one in self._nodes.launched if one.launched is not None}
        for name, finding, evidence, left_s in self._findings():
            if name not in here or name in self._to_leave:
                continue
            grace_s = policy.move_grace_s(self._spec.restarts, state.save_s or 0.0) + DUE_S
            is_due = left_s is not None and left_s <= grace_s
            plan = plan_for(finding, "healthy", self._circumstances(is_due=is_due))
            if plan == "exclude":
                self._set_aside(name, evidence)
            elif plan == "move":
                self._to_leave.add(name)
                if finding == "confirmed":
                    self._cordon(name, evidence)
                else:
                    self._set_aside(name, evidence)
                self._pass_on(policy.NodeToLeave(node=name, why=evidence, rule=f"node-{finding}"))
                return

    def leave(self, node_id: str) -> bool:
        """Have the policy leave the node of an ending pod; return False if there is no spare."""
        one = next((one for one in self._nodes.launched if one.node_id == node_id), None)
        if one is None or one.launched is None or not self._circumstances().has_spare:
            return False
        one.is_leaving = True
        self._observe("nodes", {"text": f"node {one.name} is left: {POD_ENDS}"})
        self._pass_on(policy.NodeToLeave(node=one.name, why=POD_ENDS, rule="node-leaving_at"))
        return True

    def failed(self, failure: policy.Diagnosed, case: Case) -> policy.Diagnosed:
        """Return the diagnosis of a failed job, adapted for the policy to the health of the nodes."""
        self._sentences = []
        failure = self._without_broken_launchers(failure)
        found = list(self._findings())
        is_script = (
            case.incident is not None and case.incident.diagnosis.get("category") == "Script"
        )
        limit = cordon_limit(len(self._nodes.connected))
        for name, finding, evidence, _ in found:
            alike = sum(other == finding for _, other, _, _ in found)
            around = replace(self._circumstances(), is_only_one=alike == 1)
            plan: NodePlan = plan_for(finding, "failed", around)
            if plan == "test" and not is_script and self._spec.test_nodes != "never":
                self._tests.is_due = True
                self._sentences.append(
                    f"Node {name} is suspect ({evidence}): the nodes are tested first."
                )
            elif plan == "exclude" and finding.startswith("leaving"):
                self._set_aside(name, evidence)
                self._to_leave.add(name)
            elif plan == "exclude" and limit > 0 and name not in self._nodes.cordoned:
                limit -= 1
                self._to_leave.add(name)
                self._cordon(name, evidence)
                is_only_seen = self._spec.mode == "observe"
                done = "would be cordoned in the mode act" if is_only_seen else "is cordoned"
                self._sentences.append(f"Node {name} is faulty ({evidence}) and {done}.")
        return failure

    def explain(self, case: Case) -> None:
        """Add the findings about nodes to the incident's explanation, once an action is decided."""
        case.add(self._sentences)

    def _without_broken_launchers(self, failure: policy.Diagnosed) -> policy.Diagnosed:
        """Leave out nodes whose launcher could not be started, if other nodes can replace them."""
        broken = [
            one
            for one in self._nodes.launched
            if one.launched is None
            and one.last_end is not None
            and one.last_end[1] in CANNOT_LAUNCH
        ]
        others = [
            one for one in self._nodes.connected if one not in broken and self._is_usable(one)
        ]
        if not broken or len(others) < self._spec.nnodes:
            return failure
        for one in broken:
            evidence = "the launcher cannot be started there; see the launcher's log"
            self._broken.add(one.name)
            self._set_aside(one.name, evidence)
            self._to_leave.add(one.name)
            self._sentences.append(f"Node {one.name} is left out: {evidence}.")
        return replace(failure, restart_helps=True)

    def _is_usable(self, one: Node) -> bool:
        return one.name not in self._nodes.cordoned and one.name not in self._aside

    def _circumstances(self, *, is_due: bool = False) -> Circumstances:
        spares = [one for one in self._nodes.spares if self._is_usable(one)]
        return Circumstances(
            has_spare=bool(spares), is_single=self._spec.nnodes == 1, is_due=is_due
        )

    def _findings(self) -> list[tuple[str, Finding, str, float | None]]:
        """Return all findings, each with its node, evidence and seconds left, the worst first."""
        found: list[tuple[str, Finding, str, float | None]] = []
        seen = [one.seen for one in self._seen.values()]
        for one in node.look(seen, self._clock.monotonic_s()):
            kind: Finding = "confirmed" if one.is_confirmed else one.kind
            found.append((one.culprit, kind, "; ".join(one.evidence[:2]), None))
        notices = {name: list(known.values()) for name, known in self._notices.items()}
        for leaving in external.look(notices, self._clock.now_s()):
            kind = "leaving" if leaving.left_s is None else "leaving_at"
            found.append((leaving.culprit, kind, "; ".join(leaving.evidence[:2]), leaving.left_s))
        order: dict[Finding, int] = {"confirmed": 0, "faulty": 1, "leaving_at": 2, "leaving": 3}
        return sorted(found, key=lambda one: (order.get(one[1], 4), one[0]))

    def _set_aside(self, name: str, why: str) -> None:
        if name not in self._aside:
            self._leave_out(name, why)
            data = {"node": name, "why": why, "is_broken": name in self._broken}
            self._records.event("node_set_aside", data)
            self._observe("nodes", {"text": f"node {name} is left out from now on: {why}"})
            self._tests.leave_out()

    def _leave_out(self, name: str, why: str) -> None:
        self._aside[name] = NodeRecord(
            name=name,
            cordoned_at_s=self._clock.now_s(),
            cordoned_by=self._run_id,
            cordon_kind="soft",
            why=why,
            probability=0.0,
        )

    def _cordon(self, name: str, why: str) -> None:
        if self._spec.mode == "observe":
            return
        self._observe("nodes", {"text": f"node {name} is cordoned: {why}"})
        self._records.event("node_cordoned", {"node": name, "why": why})
        self._tests.cordon(name, why, FAULTY)

    @property
    def must_leave(self) -> bool:
        """Return True if the next launch must leave a node, and another node can replace it."""
        is_there = any(one.is_leaving or one.name in self._to_leave for one in self._nodes.launched)
        return is_there and self._circumstances().has_spare

    def aside(self) -> Mapping[str, NodeRecord]:
        """Return the nodes that this run leaves out although the ledger has no cordon for them."""
        return self._aside

    def suspicion(self) -> Mapping[str, float]:
        """Return, for each node with signals, the minimum of its prior probability of a fault."""
        return {name: MAX_PRIOR for name, kind, _, _ in self._findings() if "leaving" not in kind}

    # Coverage

    def _look_at_liveness(self, view: AttemptView) -> None:
        now_s = self._clock.monotonic_s()
        if view.number != self._attempt:
            self._attempt, self._launched_s = view.number, now_s
        looks = Looks(
            launched_s=self._launched_s,
            steps_s=now_s if view.watched else None,
            losses_s=None if view.loss_leader is None else now_s,
            collectives_s=view.collectives_s,
            watches_losses=self._spec.healthy_after > 0,
            several_ranks=(view.world_size or 1) > 1,
            in_section=view.detector.in_section,
        )
        hidden = blind(looks, now_s)
        for name, sources in self._sources.items():
            for source, why in sources.items():
                if not why:
                    self._could_see.add((name, source))
                elif (name, source) in self._could_see:  # ignore a source that was never read
                    hidden[f"{source} on {name}"] = why
        for detector, why in self._liveness.changes(hidden).items():
            self._records.event_soon("cannot_see", {"detector": detector, "why": why})
            text = f"{detector} cannot be seen: {why}" if why else f"{detector} can be seen again"
            self._observe("trouble", {"text": f"{text[:1].upper()}{text[1:]}."})

    def coverage(self) -> dict[str, list[str]]:
        """Return the sources of the job's nodes: the read ones (`looked_at`), and the others."""
        names = [one.name for one in self._nodes.launched]
        silent = [name for name in names if name not in self._sources]
        looked_at, not_seen = [], []
        for source in dict.fromkeys(each for name in names for each in self._sources.get(name, {})):
            by_why: dict[str, list[str]] = {}
            for name in names:
                if source in self._sources.get(name, {}):
                    by_why.setdefault(self._sources[name][source], []).append(name)
            for why, where in by_why.items():
                on = "on all nodes" if where == names else f"on {_named(where)}"
                if why:
                    not_seen.append(f"{source} {on}: {why}")
                else:
                    looked_at.append(f"{source} {on}")
        if silent:
            not_seen.append(f"the health of {_named(silent)}: no report has come")
        return {"looked_at": looked_at, "not_seen": not_seen}


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{len(names)} nodes"
