"""Test nodes by solo checks and then group tests, until all are judged or the time is over."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from holdfast.core.clock import Clock
from holdfast.recover.localise import group, solo
from holdfast.recover.localise.group import GroupResult
from holdfast.recover.localise.orders import ANSWER_S
from holdfast.recover.localise.pairing import MAX_ROUNDS, Judgement, Pairing, WorldTest
from holdfast.recover.localise.solo import CheckResult
from holdfast.recover.localise.tester import START_S

SOLO_S = START_S + 2 * solo.LIMIT_S + ANSWER_S
"""The seconds that a node may take for its solo checks, including the repetition of a slow check.
"""
LIMIT_S = 90.0
"""The seconds that a session may take. The time is limited because a job waits for the session."""

T = TypeVar("T")


class Hosts(Protocol):
    """Carries orders to the nodes of a session."""

    async def ask(
        self, name: str, order: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any] | None:
        """Have a node carry out an order (see `Orders.ask`)."""

    def address_of(self, name: str) -> str:
        """Return the address at which other nodes reach a node."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The record of one group test."""

    nodes: tuple[str, ...]
    passed: bool | None
    reason: str = ""
    mb_per_s: float | None = None


@dataclass(kw_only=True)
class Report:
    """The findings of a session."""

    solo: dict[str, list[CheckResult]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    """The nodes whose agents ended during the session, so that there is no result about them."""
    judgement: Judgement
    seconds: float
    is_complete: bool
    """True if the session ended within its time limit."""

    @property
    def failed_solo(self) -> dict[str, CheckResult]:
        """Return a failed solo check for each node that has one; wrong results precede slow checks."""
        return _failed(self.solo)

    @property
    def hard(self) -> list[str]:
        """Return the nodes with a wrong result in a solo check.

        A slow check does not count, since other work on the node may be the cause.
        """
        return [name for name, result in self.failed_solo.items() if not result.is_slow]

    def passed(self, name: str) -> Literal["", "solo", "all"]:
        """Return the tests that a node passed without a failure (see `core.ledger.Verdict`)."""
        checks = self.solo.get(name, [])
        tests = [pair.passed for pair in self.pairs if name in pair.nodes]
        if not checks or any(one.outcome != "passed" for one in checks) or False in tests:
            return ""
        return "all" if True in tests else "solo"

    def evidence(self, name: str) -> str:
        """Return the reason for the judgement about a node, as a sentence without the subject."""
        if name in self.failed_solo:
            found = self.failed_solo[name]
            return f"fails its check of {found.name} ({found.evidence})"
        tests = [pair for pair in self.pairs if name in pair.nodes and pair.passed is not None]
        failed = [pair for pair in tests if not pair.passed]
        if not tests:
            return "was tested with no other node"
        reason = f" ({failed[-1].reason})" if failed and failed[-1].reason else ""
        return f"failed {len(failed)} of {len(tests)} tests with other nodes{reason}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON, for the ledger and the option `--json`."""
        judgement = self.judgement
        return {
            "can_tell": judgement.can_tell,
            "rounds": judgement.rounds,
            "seconds": round(self.seconds, 3),
            "is_complete": self.is_complete,
            "nodes": [
                {
                    "node": name,
                    "outcome": judgement.outcomes[name],
                    "probability": round(judgement.probabilities[name], 4),
                    "evidence": self.evidence(name),
                    "solo": [result.to_json() for result in self.solo.get(name, [])],
                }
                for name in judgement.outcomes
            ],
            "unanswered": self.unanswered,
            "pairs": [vars(pair) for pair in self.pairs],
        }


async def localise(
    hosts: Hosts,
    priors: Mapping[str, float],
    clock: Clock,
    *,
    cordoned: Set[str] = frozenset(),
    limit_s: float = LIMIT_S,
    max_rounds: int = MAX_ROUNDS,
) -> Report:
    """Test nodes and judge them.

    Args:
        hosts: carries the orders to the nodes.
        priors: for each node to test, the prior probability that it is faulty.
        clock: measures the duration of the session.
        cordoned: the names of connected nodes that are already cordoned, which count towards the
            limit on cordoned nodes.
        limit_s: the seconds that the session may take. Nodes are judged by the results until then.
        max_rounds: the largest number of rounds of group tests.
    """
    session = _Session(hosts, priors, cordoned)
    began_s, is_complete = clock.monotonic_s(), False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await session.run_solo()
            session.begin()
            await session.run_rounds(max_rounds)
            is_complete = True
    if session.pairing is None:
        session.begin()
    assert session.pairing is not None
    judgement = await _beside(session.pairing.judge)
    return Report(
        solo=session.solo,
        pairs=session.pairs,
        unanswered=session.unanswered,
        judgement=judgement,
        seconds=clock.monotonic_s() - began_s,
        is_complete=is_complete,
    )


class _Session:
    def __init__(self, hosts: Hosts, priors: Mapping[str, float], cordoned: Set[str]) -> None:
        self._hosts = hosts
        self._priors = priors
        self._cordoned = cordoned
        self._ports: dict[str, list[int]] = {}
        self._has_gpu: set[str] = set()
        self.solo: dict[str, list[CheckResult]] = {}
        self.pairs: list[Pair] = []
        self.unanswered: list[str] = []
        self.pairing: Pairing | None = None

    async def run_solo(self) -> None:
        await asyncio.gather(*(self._solo(name) for name in self._priors))

    async def _solo(self, name: str) -> None:
        timeout_s = SOLO_S
        try:
            answer = await self._hosts.ask(name, {"what": "solo"}, timeout_s)
            if answer is None:
                self.unanswered.append(name)
                return
            self.solo[name] = [CheckResult.from_json(one) for one in list(answer["solo"])[:16]]
            self._ports[name] = [int(port) for port in list(answer["ports"])[:256]]
            if answer["has_gpu"] is True:
                self._has_gpu.add(name)
        except TimeoutError:
            evidence = f"no answer within {timeout_s:g} s"
            self.solo[name] = [_no_answer(evidence)]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self.unanswered.append(name)  # the node runs another version of Holdfast

    def begin(self) -> None:
        known = {name: prior for name, prior in self._priors.items() if name not in self.unanswered}
        failed_solo = frozenset(_failed(self.solo))
        self.pairing = Pairing(priors=known, failed_solo=failed_solo, cordoned=self._cordoned)

    async def run_rounds(self, max_rounds: int) -> None:
        assert self.pairing is not None
        while self.pairing.rounds < max_rounds:
            if not (worlds := await _beside(self.pairing.next_round)):
                break
            pairs: list[Pair] = []
            while worlds:
                batch: list[tuple[str, ...]] = []
                for world in list(worlds):
                    if not any(set(world) & set(other) for other in batch):
                        batch.append(world)
                        worlds.remove(world)
                pairs += await asyncio.gather(*(self._test(world) for world in batch))
            self.pairs += pairs
            self.pairing.record(
                [
                    WorldTest(nodes=pair.nodes, passed=pair.passed)
                    for pair in pairs
                    if pair.passed is not None
                ]
            )

    async def _test(self, world: tuple[str, ...]) -> Pair:
        gone = [name for name in world if name in self.unanswered]
        if gone:
            return Pair(nodes=world, passed=None, reason=_ended(gone[0]))
        ports = self._ports.get(world[0])
        if not ports:
            return Pair(nodes=world, passed=None, reason=f"{world[0]} has no free port left")
        order = {
            "what": "group",
            "world_size": len(world),
            "address": self._hosts.address_of(world[0]),
            "port": ports.pop(),
            "use_gpu": self._has_gpu.issuperset(world),
        }
        results = await asyncio.gather(
            *(self._group(name, {**order, "rank": rank}) for rank, name in enumerate(world))
        )
        failed = [one for one in results if one.passed is False]
        unknown = [one for one in results if one.passed is None]
        speeds = [one.mb_per_s for one in results if one.mb_per_s is not None]
        # The other nodes waited in vain for a node that could not take part.
        if unknown:
            return Pair(nodes=world, passed=None, reason=unknown[0].reason)
        if failed:
            return Pair(nodes=world, passed=False, reason=failed[0].reason)
        return Pair(nodes=world, passed=True, mb_per_s=min(speeds, default=None))

    async def _group(self, name: str, order: Mapping[str, Any]) -> GroupResult:
        timeout_s = group.LIMIT_S + ANSWER_S
        try:
            answer = await self._hosts.ask(name, order, timeout_s)
            if answer is None:
                self._drop(name)
                return GroupResult(passed=None, reason=_ended(name))
            return GroupResult.from_json(answer["group"])
        except TimeoutError:
            return GroupResult(passed=False, reason=f"{name} gave no answer in {timeout_s:g} s")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return GroupResult(passed=None, reason=f"the answer of {name} is malformed")

    def _drop(self, name: str) -> None:
        if name not in self.unanswered:
            self.unanswered.append(name)
        assert self.pairing is not None
        self.pairing.gone.add(name)


async def _beside(work: Callable[[], T]) -> T:
    """Run `work` in a thread, so that it does not block the event loop.

    With a thousand nodes, the work takes seconds. A cancellation waits until the work has ended,
    since a thread cannot be interrupted.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def _ended(name: str) -> str:
    return f"the agent of {name} ended meanwhile"


def _no_answer(evidence: str) -> CheckResult:
    return CheckResult(name="the node", outcome="failed", evidence=evidence, is_slow=True)


def _failed(found: Mapping[str, Sequence[CheckResult]]) -> dict[str, CheckResult]:
    failed = {
        name: sorted(
            (one for one in results if one.outcome == "failed"), key=lambda one: one.is_slow
        )
        for name, results in found.items()
    }
    return {name: results[0] for name, results in failed.items() if results}
