"""Choose the nodes to test together, and judge the nodes by the results.

The module is pure: no I/O, no time, no randomness.

The first two rounds follow the study (Acme, NSDI 2024, section 6.1): worlds of two nodes, with one
world of three if the number is odd; then each suspect with a healthy node. The two rounds settle a
node that fails every test. A node that fails a test only with probability p fails both rounds only
with probability p². So the rounds go on, and each result changes the beliefs about the nodes.

The likelihood model: a node is healthy, or it fails each test in which it takes part with its own
unknown rate, one of `RATES`, all equally likely before the tests. A test of healthy nodes alone
fails with probability `FALSE_FAILURE`, as by a bad link. So a test passes with probability
(1 - FALSE_FAILURE) · Π (1 - rate of each node). A passed test is independent evidence for each of
its nodes. A failed test makes the beliefs about its nodes depend on each other: if one node is
faulty, the others may be healthy. Failed tests form a graph. Belief propagation is exact if this
graph has no loop, and approximate otherwise.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

RATES = (0.25, 0.5, 0.75, 1.0)
"""The probabilities with which a faulty node may fail a test."""
FALSE_FAILURE = 0.001
BASE_PRIOR = 0.05
"""The probability that a node is faulty if the failure of the job is the only evidence."""
MAX_PRIOR = 0.5
"""The highest prior, so that earlier verdicts alone judge no node."""
HALF_LIFE_S = 14 * 24 * 3600.0
"""Seconds after which half of an earlier suspicion is left: hardware is repaired and replaced
within weeks."""
BAD = 0.97
"""The probability above which a node is bad."""
GOOD = 0.002
"""The probability below which a node is good. A node needs about seven passed tests; a node that
fails every second test passes these tests in one case of a hundred."""
MAX_ROUNDS = 10
CORDON_SHARE = 0.2
"""The largest share of the nodes that is cordoned; one node may always be. More bad nodes at once
have a common cause, such as a switch, which cordoning does not mend; and the job needs the
nodes."""
HOPELESS_ROUNDS = 3
"""The rounds without a passed test after which the tests of nodes cannot find the cause."""
SWEEPS = 60
CONVERGED = 1e-6
DAMPING = 0.3
MAX_WORLD = 3

_HEALTHY = 0
_PASSES = (1.0, *(1.0 - rate for rate in RATES))
"""For each state of a node, the probability that the node does not fail a test; the first state is
healthy."""


Outcome = Literal["good", "bad", "suspect"]


@dataclass(frozen=True, kw_only=True)
class WorldTest:
    """The result of one group test."""

    nodes: tuple[str, ...]
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The judgement of a session on the nodes.

    Attributes:
        probabilities: for each node, the probability that the node is faulty.
        outcomes: `bad`, `good`, or `suspect` if the tests did not settle the node.
        can_tell: False if most nodes look bad, or no test passed: then no node is blamed.
        cordon: the bad nodes to cordon, the worst first; with the nodes that are cordoned already
            at most `cordon_limit`.
        rounds: the number of rounds of group tests.
    """

    probabilities: Mapping[str, float]
    outcomes: Mapping[str, Outcome]
    can_tell: bool
    cordon: tuple[str, ...]
    rounds: int

    @property
    def bad(self) -> tuple[str, ...]:
        """Return the bad nodes, the worst first."""
        found = [name for name, outcome in self.outcomes.items() if outcome == "bad"]
        return tuple(sorted(found, key=lambda name: (-self.probabilities[name], name)))


def cordon_limit(count: int) -> int:
    """Return the most nodes of `count` that may be cordoned."""
    return max(1, math.floor(CORDON_SHARE * count))


def prior_of(probability: float | None, age_s: float) -> float:
    """Return the prior of a node from an earlier verdict; `probability` is None without a verdict.

    The excess over `BASE_PRIOR` halves every `HALF_LIFE_S` seconds of the verdict's age.
    """
    if probability is None:
        return BASE_PRIOR
    left = math.exp2(-max(0.0, age_s) / HALF_LIFE_S)
    return min(MAX_PRIOR, BASE_PRIOR + max(0.0, probability - BASE_PRIOR) * left)


@dataclass(kw_only=True)
class Pairing:
    """The tests of one session so far. Names are in the order in which ties are settled.

    Attributes:
        priors: for each node to test, the probability that the node is faulty.
        failed_solo: the nodes that failed a solo check: they are bad, and take part in no group
            test.
        cordoned: the present nodes that are already cordoned, tested or not.
        gone: the nodes that ended during the session: they take part in no further test, and are
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
        """Return the nodes that take part in group tests."""
        return [name for name in self.priors if name not in self.failed_solo]

    @property
    def probabilities(self) -> dict[str, float]:
        """Return for each node the probability that the node is faulty, by all results so far."""
        beliefs = self._believed()
        found = {name: 1.0 - beliefs[name][_HEALTHY] for name in self.nodes}
        return {name: found.get(name, 1.0) for name in self.priors}

    def next_round(self) -> list[tuple[str, ...]]:
        """Return the worlds to test next; none if all nodes are judged or no test would help.

        The worlds are disjoint, so that they are tested at the same time. Only the pairs of three
        nodes overlap: with one of the three pairs a round, ten rounds would not settle an
        intermittent fault.
        """
        if self.rounds >= MAX_ROUNDS or self._is_hopeless or len(self._there) < 2:
            return []
        probabilities = self.probabilities
        open_nodes = [name for name in self._there if GOOD <= probabilities[name] <= BAD]
        if self.rounds and not open_nodes:
            return []
        return self._worlds(probabilities)

    def judge(self) -> Judgement:
        """Return the judgement by the results."""
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
        # One node alone, or two nodes with one failed solo check: a solo check needs no comparison.
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
        # A bad node is tested no more: each world with that node would fail.
        left = [name for name in self._there if probabilities[name] <= BAD]
        left.sort(key=lambda name: -_entropy(probabilities[name]))  # stable: ties in their order
        if len(left) == MAX_WORLD:
            pairs = itertools.combinations(left, 2)
            return [pair for pair in pairs if frozenset(pair) not in blamed]
        worlds: list[tuple[str, ...]] = []
        alone: list[str] = []
        while left:
            first = left.pop(0)
            # A second failure of two nodes together would not show the node at fault.
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
        """Add a node to the most trusted world; it stays alone if one of the nodes is a suspect."""
        trusted = min(
            worlds, key=lambda world: sum(probabilities[one] for one in world), default=None
        )
        if trusted is None:
            return
        if max(probabilities[one] for one in (name, *trusted)) <= 2 * BASE_PRIOR:
            worlds[worlds.index(trusted)] = (*trusted, name)

    # Beliefs

    def _believed(self) -> dict[str, tuple[float, ...]]:
        """Return the distribution of each node over its states: healthy, or one of `RATES`."""
        if self._beliefs is None:
            self._beliefs = _propagated(self._alone(), self._failures())
        return self._beliefs

    def _alone(self) -> dict[str, list[float]]:
        """Return the weight of each state of each node by the priors and the passed tests."""
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
        """Return the failures of each world.

        Equal worlds are one factor, so that they make no loop.
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
    """Return the likelihood of `count` failures by one node's state, given the others' beliefs."""
    # The distribution of the product of the other nodes' probabilities to pass.
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
