"""Test nodes before a launch if a node may have caused the last failure, and cordon bad nodes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from holdfast.cluster import mark
from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Incident, Ledger, NodeRecord, Verdict
from holdfast.core.ledger.records import CordonKind
from holdfast.recover.attempt import KILLED, AttemptView
from holdfast.recover.connected_node import Node
from holdfast.recover.localise.across import NodeHosts
from holdfast.recover.localise.session import Report, localise
from holdfast.recover.localise.verdicts import keep_verdicts, priors_of
from holdfast.recover.nodes import Nodes
from holdfast.recover.spec import RunSpec, TestNodes

SUSPECT_CATEGORY = "Infrastructure"
SUSPECT_PRIOR = 0.2
"""The minimum of the prior probability that a node is faulty, if a loss broke on the node but not
on other nodes.
"""


class NodeTestRecords(Protocol):
    """The interface of the recorder that the tests need."""

    def event(self, kind: str, data: dict[str, Any], rank: int | None = None) -> None:
        """Record an event for the incident."""

    def complain(self, text: str) -> None:
        """Report a record that could not be written."""


class Case(Protocol):
    """The interface of the present incident that the tests need."""

    @property
    def incident(self) -> Incident | None:
        """Return the incident; None if there is none."""

    def add(self, sentences: Sequence[str]) -> None:
        """Add sentences to the incident's explanation."""


class Health(Protocol):
    """The interface to the health that nodes report which the tests need."""

    def aside(self) -> Mapping[str, NodeRecord]:
        """Return the nodes that are left out although the ledger has no cordon for them."""

    def suspicion(self) -> Mapping[str, float]:
        """Return, for each suspect node, the minimum of its prior probability of a fault."""


def is_due(mode: TestNodes, view: AttemptView, incident: Incident | None, *, several: bool) -> bool:
    """Return True if nodes must be tested after a failure.

    Args:
        mode: the value of `--test-nodes`.
        view: the view of the failed attempt.
        incident: the incident of the attempt; None if there is none.
        several: True if the run has several nodes.
    """
    if mode != "auto":
        return mode == "always"
    if view.lost_node is not None:
        return False  # the lost node is the cause, and is tested when it is used again
    if view.frozen is not None and view.frozen.rank is None:
        return several
    if view.frozen is not None and view.frozen.is_of_software:
        return False
    diagnosis = {} if incident is None else incident.diagnosis
    # A signal from outside, for example from a person or for lack of memory, is no sign of broken
    # hardware.
    is_killed = tuple(diagnosis.get("decided_by", ())[:1]) in KILLED
    return diagnosis.get("category") == SUSPECT_CATEGORY and not is_killed


class NodeTests:
    """The tests of one run's nodes."""

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        nodes: Nodes,
        ledger: Ledger,
        records: NodeTestRecords,
        clock: Clock,
        observe: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._run_id = run_id
        self._mode = mode = spec.test_nodes
        self._nodes = nodes
        self._ledger = ledger
        self._records = records
        self._clock = clock
        self._observe = observe
        self._several = spec.nnodes > 1
        self._case: Case | None = None
        self._cordoned: dict[str, NodeRecord] = {}
        self._unwritten: dict[str, NodeRecord] = {}
        """The nodes that tests of this run cordoned while the ledger could not be written."""
        self._readmitted: set[str] = set()
        """The cordoned nodes that the next launch uses, because there are too few other nodes."""
        self.health: Health | None = None
        self._lost: set[str] = set()
        """The names of nodes that were lost, and have not been tested since."""
        self._suspects: set[str] = set()
        """The names of nodes that may have broken a loss, and have not been tested since."""
        self.is_due = mode == "always"
        """True if the nodes must be tested before the next launch, even if no lost node is among
        them.
        """

    def suspect(self, names: Sequence[str]) -> None:
        """Have these nodes tested before the next launch; one of them may have broken a loss."""
        if self._mode != "never" and self._several:
            self._suspects.update(names)

    def failed(self, view: AttemptView, case: Case) -> None:
        """Record that an attempt has failed and was diagnosed."""
        self._case = case
        self.is_due = is_due(self._mode, view, case.incident, several=self._several)
        self.is_due |= bool(self._suspects)
        if view.lost_node is not None and self._mode != "never":
            self._lost.add(view.lost_node)

    def is_due_for(self, nodes: Sequence[Node]) -> bool:
        """Return True if a test is due before a launch on `nodes`.

        For example, a node that was lost must be tested first.
        """
        return self.is_due or any(node.name in self._lost for node in nodes)

    def leave_out(self) -> None:
        """Leave out of the launches the nodes that are cordoned in the ledger now."""
        try:
            known = {one.name: one for one in self._ledger.nodes() if one.is_cordoned}
            aside = {} if self.health is None else self.health.aside()
            self._cordoned = {**aside, **self._unwritten, **known}
        except HoldfastError as error:
            self._records.complain(str(error))
        self._nodes.cordoned = frozenset(self._cordoned) - self._readmitted

    def cordon(self, name: str, why: str, probability: float) -> None:
        """Cordon a node because of its own signals, which mean a fault with the given probability."""
        at_s = self._clock.now_s()
        verdict = Verdict(
            name=name, outcome="bad", probability=probability, evidence=f"{name}: {why}."
        )
        try:
            self._ledger.add_verdicts([verdict], at_s=at_s, by=self._run_id, cordons=[name])
        except HoldfastError as error:
            self._records.complain(str(error))
            self._keep(name, at_s, "soft", probability)
        self.leave_out()

    def _keep(self, name: str, at_s: float, kind: CordonKind, probability: float) -> None:
        """Leave a node out even though the ledger cannot be written."""
        self._unwritten[name] = NodeRecord(
            name=name, cordoned_at_s=at_s, cordon_kind=kind, probability=probability
        )

    def readmit(self, count: int) -> bool:
        """Use the least suspect cordoned nodes, if there are fewer than `count` other nodes.

        A node that a person has cordoned, or that failed a solo check, stays out, unless the run
        has only one node.

        Returns:
            True if there are enough nodes now.
        """
        needed = self._nodes.missing(count)
        there = {node.name for node in self._nodes.connected if node.launched is None}
        usable = [
            one
            for name, one in self._cordoned.items()
            if name in there
            and name not in self._readmitted
            and (not one.is_hard or not self._several)
        ]
        usable.sort(key=lambda one: (one.probability or 0.0, one.name))
        if needed == 0 or len(usable) < needed:
            return needed == 0
        taken = [one.name for one in usable[:needed]]
        self._readmitted.update(taken)
        self._nodes.cordoned = frozenset(self._cordoned) - self._readmitted
        text = f"too few nodes without {', '.join(taken)}: the run goes on there, though cordoned"
        self._observe("nodes", {"text": text})
        self._records.event("nodes_readmitted", {"nodes": taken})
        return True

    @property
    def left_out(self) -> list[str]:
        """Return the names of the connected nodes that are left out."""
        return [node.name for node in self._nodes.connected if node.name in self._nodes.cordoned]

    async def run(self, given_up: asyncio.Event) -> bool:
        """Test the connected nodes; return True if a node was cordoned.

        The tests end at the time limit of a session, or when `given_up` is set.
        """
        self.is_due = False
        self._lost.clear()
        self._readmitted.clear()
        self.leave_out()
        members = {
            node.name: node
            for node in self._nodes.connected
            if node.name not in self._nodes.cordoned
        }
        if not members:
            return False
        self._observe("nodes", {"text": f"testing {', '.join(members)}"})
        self._records.event("nodes_test_began", {"nodes": list(members)})
        self._nodes.is_testing = True
        known = await self._known()
        priors = priors_of(members, known, self._clock.now_s())
        suspicion = {} if self.health is None else dict(self.health.suspicion())
        suspicion |= dict.fromkeys(self._suspects, SUSPECT_PRIOR)
        priors = {name: max(prior, suspicion.get(name, 0.0)) for name, prior in priors.items()}
        self._suspects.clear()
        hosts, cordoned = NodeHosts(self._nodes, members), set(self.left_out)
        session = asyncio.create_task(localise(hosts, priors, self._clock, cordoned=cordoned))
        stop = asyncio.create_task(given_up.wait())
        try:
            await asyncio.wait((session, stop), return_when=asyncio.FIRST_COMPLETED)
            if not session.done():
                self._records.event("nodes_not_tested", {"why": "they were broken off."})
                return False
            try:
                report = session.result()
            except Exception as error:  # a job must not end because nodes could not be tested
                self._records.event("nodes_not_tested", {"why": f"{error!r}."})
                self._records.complain(f"The tests of the nodes failed: {error!r}.")
                return False
            return await self._take(report)
        finally:
            self._nodes.is_testing = False
            for task in (session, stop):
                task.cancel()
            for node in members.values():
                node.order({"kind": "check", "what": "end"})

    async def _known(self) -> list[NodeRecord]:
        try:
            return await asyncio.to_thread(self._ledger.nodes)
        except HoldfastError as error:
            self._records.complain(str(error))
            return []

    async def _take(self, report: Report) -> bool:
        judgement = report.judgement
        cordoned = list(judgement.cordon) if self._several else []
        self._records.event("nodes_tested", {**report.to_json(), "cordoned": cordoned})
        try:
            await asyncio.to_thread(
                keep_verdicts,
                report,
                self._ledger,
                by=self._run_id,
                at_s=self._clock.now_s(),
                cordons=self._several,
            )
        except HoldfastError as error:
            self._records.complain(str(error))
            for name in cordoned:
                kind: CordonKind = "hard" if name in report.hard else "soft"
                probability = judgement.probabilities[name]
                self._keep(name, self._clock.now_s(), kind, probability)
        self.leave_out()
        reasons = {name: report.evidence(name) for name in cordoned}
        marks = await asyncio.to_thread(mark, reasons, by=self._run_id)
        if marks:
            self._observe("nodes", {"text": " ".join(marks)})
            self._records.event("nodes_marked", {"sentences": marks})
        notes = [
            f"Node {name} {report.evidence(name)}"
            + (" and is cordoned." if name in cordoned else ".")
            for name in judgement.bad
        ]
        text = " ".join(notes) or (
            "no node was found to be bad"
            if judgement.can_tell
            else "the tests cannot tell which node is bad"
        )
        self._observe("nodes", {"text": f"{text} ({report.seconds:.0f} s of tests)"})
        if self._case is not None:
            self._case.add(notes)
        return bool(cordoned)
