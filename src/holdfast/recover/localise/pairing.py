"""Choose the nodes to test together, and judge the nodes by the results.

The module is pure: it uses no I/O, no clock and no randomness.

A world is a set of nodes that are tested together. The first two rounds follow the study (Acme,
NSDI 2024, section 6.1). In the first round, the worlds are pairs of nodes, with one world of three
if the number of nodes is odd. In the second round, each suspect is tested with a healthy node.
These two rounds find a node that fails every test. However, a node that fails a test only with
probability p fails both rounds only with probability p². So more rounds follow, and each result
changes the beliefs, which are the probabilities that nodes are faulty.

This is the likelihood model. A node is either healthy or faulty. A faulty node makes each of its
tests fail with a fixed but unknown rate, which is one of `RATES`; before the tests, all rates are
equally likely. A test of only healthy nodes fails with probability `FALSE_FAILURE`, for example
because of a bad link. So a test passes with probability (1 - FALSE_FAILURE) · Π (1 - rate of each
node). A passed test is independent evidence for each of its nodes. After a failed test, the beliefs
about its nodes depend on each other: if one node is faulty, the others may be healthy. Failed tests
form a graph. Belief propagation on this graph is exact if it has no loop, and approximate
otherwise.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

RATES = (0.25, 0.5, 0.75, 1.0)
"""The possible probabilities with which a faulty node fails a test."""
FALSE_FAILURE = 0.001
BASE_PRIOR = 0.05
"""The prior probability that a node is faulty, if the only evidence is that the job failed."""
MAX_PRIOR = 0.5
"""The highest prior. It is low enough that a node is not judged only by earlier verdicts."""
HALF_LIFE_S = 14 * 24 * 3600.0
"""The half-life of an earlier suspicion in seconds, because hardware is repaired or replaced within
weeks."""
BAD = 0.97
"""A node is judged bad above this probability of a fault."""
GOOD = 0.002
"""A node is judged good below this probability of a fault. This needs about seven passed tests. A
node that fails every second test passes so many tests in one of a hundred cases."""
MAX_ROUNDS = 10
CORDON_SHARE = 0.2
"""At most this share of the nodes is cordoned, but one node always can be. If more nodes are bad at
the same time, they have a common cause, such as a switch. Cordoning does not help then, and the job
needs the nodes."""
HOPELESS_ROUNDS = 3
"""After this number of rounds without a passed test, testing nodes cannot find the cause."""
SWEEPS = 60
CONVERGED = 1e-6
DAMPING = 0.3
MAX_WORLD = 3

_HEALTHY = 0
_PASSES = (1.0, *(1.0 - rate for rate in RATES))
"""For each state of a node, the probability that the node does not fail a test. The first state is
healthy; the others are faulty with one of `RATES`."""


Outcome = Literal["good", "bad", "suspect"]


@dataclass(frozen=True, kw_only=True)
class WorldTest:
    """The result of one group test."""

    nodes: tuple[str, ...]
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The judgement about the nodes of a session.

    Attributes:
        probabilities: for each node, the probability that the node is faulty.
        outcomes: `bad`, `good`, or `suspect` if the tests did not settle the node.
        can_tell: False if most nodes look bad or no test passed, so that no node can be blamed.
        cordon: the bad nodes to cordon, the worst first. Together with the nodes that are already
            cordoned, there are at most `cordon_limit`.
        rounds: the number of rounds of group tests.
    """

    probabilities: Mapping[str, float]
    outcomes: Mapping[str, Outcome]
    can_tell: bool
    cordon: tuple[str, ...]
    rounds: int

    @property
    def bad(self) -> tuple[str, ...]:
        """The bad nodes, the worst first."""
        found = [name for name, outcome in self.outcomes.items() if outcome == "bad"]
        return tuple(sorted(found, key=lambda name: (-self.probabilities[name], name)))


def cordon_limit(count: int) -> int:
    """Return how many of `count` nodes may be cordoned."""
    return max(1, math.floor(CORDON_SHARE * count))


def prior_of(probability: float | None, age_s: float) -> float:
    """Return the prior of a node from an earlier verdict, or from none (`probability` is None).

    The excess over `BASE_PRIOR` halves every `HALF_LIFE_S` seconds of the verdict's age.
    """
    if probability is None:
        return BASE_PRIOR
    left = math.exp2(-max(0.0, age_s) / HALF_LIFE_S)
    return min(MAX_PRIOR, BASE_PRIOR + max(0.0, probability - BASE_PRIOR) * left)


@dataclass(kw_only=True)
class Pairing:
    """The tests of one session so far. Ties between nodes are broken by the order of their names.

    Attributes:
        priors: for each node to test, the probability that the node is faulty.
        failed_solo: the nodes that failed a solo check. They are bad, and take part in no group
            test.
        cordoned: the connected nodes that are already cordoned, whether they are tested or not.
        gone: the nodes that ended during the session. They take part in no further test, and are
            not judged.
    """

    priors: Mapping[str, float]
    failed_solo: frozenset[str] = frozenset()
    cordoned: Set[str] = frozenset()
    gone: set[str] = field(default_factory=set)
    rounds: int = 0
    tests: list[WorldTest] = field(default_factory=list)
    _beliefs: dict[str, tuple[float, ...]] | None = None

    def record(self, results: Sequence[WorldTest]) -> None:
        """Record the results of one round."""
        self.tests.extend(results)
        self.rounds += 1
        self._beliefs = None

    @property
    def nodes(self) -> list[str]:
        """The nodes that take part in group tests."""
        return [name for name in self.priors if name not in self.failed_solo]

    @property
    def probabilities(self) -> dict[str, float]:
        """Return, for each node, the probability that it is faulty, from all results so far."""
        beliefs = self._believed()
        found = {name: 1.0 - beliefs[name][_HEALTHY] for name in self.nodes}
        return {name: found.get(name, 1.0) for name in self.priors}

    def next_round(self) -> list[tuple[str, ...]]:
        """Return the worlds to test next; none if all nodes are judged, or if no test would help.

        The worlds are disjoint, so that they can be tested at the same time. The only exception is
        a session with three nodes, in which a round tests all three pairs. With one pair per round,
        ten rounds would not be enough to find an intermittent fault.
        """
        if self.rounds >= MAX_ROUNDS or self._is_hopeless or len(self._there) < 2:
            return []
        probabilities = self.probabilities
        open_nodes = [name for name in self._there if GOOD <= probabilities[name] <= BAD]
        if self.rounds and not open_nodes:
            return []
        return self._worlds(probabilities)

    def judge(self) -> Judgement:
        """Return the judgement from the results."""
        probabilities = self.probabilities
        outcomes: dict[str, Outcome] = {
            name: "bad" if value > BAD else "good" if value < GOOD else "suspect"
            for name, value in probabilities.items()
            if name not in self.gone
        }
        judged = [name for name, outcome in outcomes.items() if outcome == "bad"]
        most = len(self.priors) / 2
        nothing_passed = bool(self.tests) and not any(test.passed for test in self.tests)
        is_hopeless = len(judged) > most or sum(probabilities.values()) > most or nothing_passed
        # A solo check needs no comparison with other nodes. So a failed solo check is conclusive
        # even with a single node, or for one of two nodes.
        can_tell = not is_hopeless or (0 < len(self.failed_solo) <= max(1.0, most))
        if is_hopeless:
            outcomes = {
                name: "bad" if can_tell and name in self.failed_solo else "suspect"
                for name in outcomes
            }
        worst = sorted(
            (name for name, outcome in outcomes.items() if outcome == "bad"),
            key=lambda name: (name not in self.failed_solo, -probabilities[name], name),
        )
        fresh = [name for name in worst if name not in self.cordoned]
        limit = cordon_limit(len(self.cordoned | self.priors.keys())) - len(self.cordoned)
        kept = set(fresh[: max(0, limit)]) | self.cordoned
        return Judgement(
            probabilities=probabilities,
            outcomes=outcomes,
            can_tell=can_tell,
            cordon=tuple(name for name in worst if name in kept),
            rounds=self.rounds,
        )

    @property
    def _there(self) -> list[str]:
        return [name for name in self.nodes if name not in self.gone]

    @property
    def _is_hopeless(self) -> bool:
        """Return True if no test has passed in at least `HOPELESS_ROUNDS` rounds."""
        return self.rounds >= HOPELESS_ROUNDS and not any(test.passed for test in self.tests)

    def _worlds(self, probabilities: Mapping[str, float]) -> list[tuple[str, ...]]:
        met = Counter(
            frozenset(pair) for test in self.tests for pair in itertools.combinations(test.nodes, 2)
        )
        blamed = {frozenset(test.nodes) for test in self.tests if not test.passed}
        # A bad node is not tested any more, since each world with this node would fail.
        left = [name for name in self._there if probabilities[name] <= BAD]
        left.sort(key=lambda name: -_entropy(probabilities[name]))  # stable: ties keep their order
        if len(left) == MAX_WORLD:
            pairs = itertools.combinations(left, 2)
            return [pair for pair in pairs if frozenset(pair) not in blamed]
        worlds: list[tuple[str, ...]] = []
        alone: list[str] = []
        while left:
            first = left.pop(0)
            # A second failure of the same two nodes would not show which one is faulty.
            partners = [one for one in left if frozenset((first, one)) not in blamed]
            if not partners:
                alone.append(first)
                continue
            partner = min(
                partners,
                key=lambda one: (
                    round(probabilities[one], 6),
                    met[frozenset((first, one))],
                ),
            )
            left.remove(partner)
            worlds.append((first, partner))
        if len(alone) == 1:
            self._join(alone[0], worlds, probabilities)
        return worlds

    def _join(
        self, name: str, worlds: list[tuple[str, ...]], probabilities: Mapping[str, float]
    ) -> None:
        """Add a left-over node to the most trusted world, unless one of the nodes is a suspect."""
        trusted = min(
            worlds, key=lambda world: sum(probabilities[one] for one in world), default=None
        )
        if trusted is None:
            return
        if max(probabilities[one] for one in (name, *trusted)) <= 2 * BASE_PRIOR:
            worlds[worlds.index(trusted)] = (*trusted, name)

    # Beliefs

    def _believed(self) -> dict[str, tuple[float, ...]]:
        """Return, for each node, the probability of each state: healthy, or faulty with a rate."""
        if self._beliefs is None:
            self._beliefs = _propagated(self._alone(), self._failures())
        return self._beliefs

    def _alone(self) -> dict[str, list[float]]:
        """Return the weight of each state of each node, from the priors and the passed tests."""
        weights = {}
        for name in self.nodes:
            prior = self.priors[name]
            weights[name] = [1.0 - prior, *([prior / len(RATES)] * len(RATES))]
        for test in self.tests:
            for name in test.nodes if test.passed else ():
                weights[name] = [
                    weight * passes for weight, passes in zip(weights[name], _PASSES, strict=True)
                ]
        return weights

    def _failures(self) -> dict[tuple[str, ...], int]:
        """Return the number of failures of each world.

        Tests of the same world are counted together, so that they do not form a loop in the graph.
        """
        failures: dict[tuple[str, ...], int] = {}
        for test in self.tests:
            if not test.passed:
                world = tuple(sorted(test.nodes))
                failures[world] = failures.get(world, 0) + 1
        return failures


def _entropy(probability: float) -> float:
    """Return the entropy of a node's probability, in bits."""
    if not 0.0 < probability < 1.0:
        return 0.0
    other = 1.0 - probability
    return -probability * math.log2(probability) - other * math.log2(other)


def _propagated(
    alone: Mapping[str, Sequence[float]], failures: Mapping[tuple[str, ...], int]
) -> dict[str, tuple[float, ...]]:
    """Return the beliefs after the failed tests, by the sum-product algorithm (Pearl 1988)."""
    messages = {(world, name): [1.0] * len(_PASSES) for world in failures for name in world}
    of: dict[str, list[tuple[str, ...]]] = {name: [] for name in alone}
    for world, name in messages:
        of[name].append(world)

    def belief(name: str, without: tuple[str, ...] | None = None) -> list[float]:
        weights = list(alone[name])
        for world in of[name]:
            if world != without:
                message = messages[world, name]
                weights = [one * other for one, other in zip(weights, message, strict=True)]
        return _normed(weights)

    for _ in range(SWEEPS if failures else 0):
        change = 0.0
        for world, count in failures.items():
            for name in world:
                others = [belief(one, world) for one in world if one != name]
                fresh = _normed(_message(others, count))
                old = messages[world, name]
                messages[world, name] = [
                    DAMPING * before + (1.0 - DAMPING) * after
                    for before, after in zip(old, fresh, strict=True)
                ]
                change = max(change, *(abs(one - two) for one, two in zip(old, fresh, strict=True)))
        if change < CONVERGED:
            break
    return {name: tuple(belief(name)) for name in alone}


def _message(others: Sequence[Sequence[float]], count: int) -> list[float]:
    """Return the likelihood of `count` failures for each state of a node, from the others' beliefs."""
    # The distribution of the product of the probabilities with which the other nodes pass.
    products = [(1.0 - FALSE_FAILURE, 1.0)]
    for belief in others:
        products = [
            (product * passes, weight * believed)
            for product, weight in products
            for passes, believed in zip(_PASSES, belief, strict=True)
        ]
    return [
        sum(weight * (1.0 - product * passes) ** count for product, weight in products)
        for passes in _PASSES
    ]


def _normed(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
