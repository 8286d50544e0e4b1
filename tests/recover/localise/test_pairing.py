"""The pairs of nodes that are tested together, and the verdicts from their results."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.recover.localise.pairing import (
    BAD,
    BASE_PRIOR,
    GOOD,
    HALF_LIFE_S,
    HOPELESS_ROUNDS,
    MAX_PRIOR,
    MAX_ROUNDS,
    Pairing,
    WorldTest,
    cordon_limit,
    prior_of,
)
from holdfast.testing.bad_nodes import EmulatedNodes


def session(cluster, priors=None, max_rounds=MAX_ROUNDS):
    """Test emulated nodes until they are judged; return the pairing."""
    pairing = Pairing(priors=priors or dict.fromkeys(cluster.names, BASE_PRIOR))
    while pairing.rounds < max_rounds and (worlds := pairing.next_round()):
        pairing.record([WorldTest(nodes=world, passed=cluster.passes(world)) for world in worlds])
    return pairing


def statistics(count, bad, rate, *, trials, seed=0):
    source = random.Random(seed)
    hit = named = 0
    for _ in range(trials):
        cluster = EmulatedNodes.drawn(count, bad=bad, rate=rate, source=source)
        pairing = session(cluster)
        assert pairing.rounds <= MAX_ROUNDS
        judgement = pairing.judge()
        hit += len(set(judgement.bad) & set(cluster.rates))
        named += len(judgement.bad)
    return hit / (trials * bad), hit / max(1, named)


@pytest.mark.parametrize(
    ("count", "bad", "trials"), [(3, 1, 75), (4, 1, 75), (9, 1, 40), (16, 2, 20), (64, 4, 6)]
)
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_faulty_nodes_are_found_and_healthy_ones_are_not_blamed(count, bad, trials, rate):
    recall, precision = statistics(count, bad, rate, trials=trials)
    assert recall >= (0.95 if rate == 0.5 else 1.0)
    assert precision >= 0.99


@pytest.mark.parametrize("count", [3, 4, 5, 8, 33, 64])
def test_a_dead_node_is_found_in_two_rounds(count):
    cluster = EmulatedNodes(count, {"n2": 1.0}, random.Random(0))
    assert session(cluster, max_rounds=2).judge().bad == ("n2",)


@pytest.mark.parametrize("count", [2, 3, 5, 8, 64])
def test_healthy_nodes_are_judged_good_before_the_rounds_are_used_up(count):
    pairing = session(EmulatedNodes(count, {}, random.Random(0)))
    assert set(pairing.judge().outcomes.values()) == {"good"}
    assert pairing.rounds < MAX_ROUNDS


def test_of_two_nodes_a_failing_pair_does_not_tell_which():
    judgement = session(EmulatedNodes(2, {"n1": 1.0}, random.Random(0))).judge()
    assert not judgement.can_tell
    assert judgement.cordon == judgement.bad == ()
    assert judgement.rounds == 1, "the same pair once more would say nothing new"


def test_of_two_nodes_a_failed_solo_check_tells_which():
    pairing = Pairing(priors={"a": BASE_PRIOR, "b": BASE_PRIOR}, failed_solo=frozenset("b"))
    assert pairing.next_round() == []
    judgement = pairing.judge()
    assert judgement.can_tell
    assert judgement.cordon == judgement.bad == ("b",)


def test_memory_tells_which_node_of_a_failing_pair_is_more_likely():
    def after_a_failure(prior):
        pairing = Pairing(priors={"a": prior, "b": BASE_PRIOR})
        pairing.record([WorldTest(nodes=("a", "b"), passed=False)])
        return pairing.probabilities

    without, by_memory = after_a_failure(BASE_PRIOR), after_a_failure(MAX_PRIOR)
    assert without["a"] == pytest.approx(without["b"])
    assert by_memory["a"] > 0.9 > 0.2 > by_memory["b"]


def test_suspicion_halves_with_time_and_never_judges_by_itself():
    assert prior_of(None, 0.0) == BASE_PRIOR
    assert prior_of(1.0, 0.0) == MAX_PRIOR < BAD
    assert prior_of(0.001, 0.0) == BASE_PRIOR, "a passed test does not last"
    assert prior_of(0.45, HALF_LIFE_S) == pytest.approx(BASE_PRIOR + 0.2)
    assert prior_of(0.45, 1000 * HALF_LIFE_S) == pytest.approx(BASE_PRIOR)
    assert prior_of(0.45, -5.0) == pytest.approx(0.45), "a clock that went back"


@pytest.mark.parametrize("bad", [5, 6, 8])
def test_where_most_nodes_look_bad_nobody_is_blamed(bad):
    for seed in range(6):
        cluster = EmulatedNodes.drawn(8, bad=bad, rate=1.0, source=random.Random(seed))
        judgement = session(cluster).judge()
        assert not judgement.can_tell
        assert judgement.cordon == judgement.bad == ()


def test_a_link_between_two_healthy_nodes_blames_neither():
    names = [f"n{number}" for number in range(1, 9)]
    pairing = Pairing(priors=dict.fromkeys(names, BASE_PRIOR))
    while worlds := pairing.next_round():
        results = [WorldTest(nodes=one, passed=not {"n1", "n2"} <= set(one)) for one in worlds]
        pairing.record(results)
    assert pairing.judge().bad == ()


def test_at_most_a_fifth_is_cordoned_the_worst_first():
    assert [cordon_limit(count) for count in (1, 2, 5, 9, 10, 64)] == [1, 1, 1, 1, 2, 12]
    cluster = EmulatedNodes(8, {"n2": 1.0, "n5": 1.0}, random.Random(0))
    judgement = session(cluster).judge()
    assert set(judgement.bad) == {"n2", "n5"}
    assert judgement.cordon == judgement.bad[:1]


def test_nodes_that_are_cordoned_already_count_for_the_share():
    def judged(cordoned):
        pairing = Pairing(
            priors=dict.fromkeys(map(str, range(10)), BASE_PRIOR),
            failed_solo=frozenset({"1", "2", "3"}),
            cordoned=frozenset(cordoned),
        )
        return set(pairing.judge().cordon)

    assert len(judged(())) == 2
    assert len(judged({"gone bad"})) == 1, "one of eleven is cordoned, and is not tested"
    assert judged({"a", "b"}) == set()
    assert judged({"2", "3"}) == {"2", "3"}, "of those that are tested all the same"


def test_a_node_that_is_gone_is_tested_and_judged_no_more():
    pairing = Pairing(priors=dict.fromkeys("abcd", BASE_PRIOR))
    pairing.gone.add("b")
    assert not any("b" in world for world in pairing.next_round())
    assert set(pairing.judge().outcomes) == set("acd")


def test_where_nothing_passes_the_rounds_end_soon():
    cluster = EmulatedNodes(64, {}, random.Random(0))
    cluster.passes = lambda _: False
    pairing = session(cluster)
    assert pairing.rounds == HOPELESS_ROUNDS
    assert not pairing.judge().can_tell


def test_a_single_node_is_judged_by_its_own_checks():
    for failed in (frozenset(), frozenset("a")):
        pairing = Pairing(priors={"a": BASE_PRIOR}, failed_solo=failed)
        assert pairing.next_round() == []
        assert pairing.judge().bad == tuple(failed)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), count=st.integers(2, 12))
def test_worlds_are_disjoint_of_two_or_three_and_probabilities_are_some(data, count):
    """The bounds hold for all results and all priors."""
    names = [f"n{number}" for number in range(count)]
    priors = {name: data.draw(st.floats(0.001, MAX_PRIOR)) for name in names}
    pairing = Pairing(priors=priors)
    while worlds := pairing.next_round():
        assert all(len(set(world)) == len(world) in (2, 3) for world in worlds)
        assert set().union(*worlds) <= set(names)
        overlap = sum(map(len, worlds)) > len(set().union(*worlds))
        assert not overlap or len(set().union(*worlds)) == 3
        pairing.record([WorldTest(nodes=one, passed=data.draw(st.booleans())) for one in worlds])
    assert pairing.rounds <= MAX_ROUNDS
    judgement = pairing.judge()
    assert all(0.0 <= value <= 1.0 for value in judgement.probabilities.values())
    assert len(judgement.bad) <= count / 2
    assert set(judgement.cordon) <= set(judgement.bad)
    assert len(judgement.cordon) <= cordon_limit(count)
    if judgement.can_tell:
        for name, outcome in judgement.outcomes.items():
            value = judgement.probabilities[name]
            assert outcome == ("bad" if value > BAD else "good" if value < GOOD else "suspect")


@settings(max_examples=30, deadline=None)
@given(failures=st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_failed_test_raises_and_a_passed_one_lowers_suspicion(failures):
    pairing = Pairing(priors=dict.fromkeys(("a", "b", "c", "d"), BASE_PRIOR))
    for failed in failures:
        before = pairing.probabilities
        pairing.record([WorldTest(nodes=("a", "b"), passed=not failed)])
        after = pairing.probabilities
        for name in ("a", "b"):
            assert (after[name] > before[name]) == failed
        assert after["c"] == before["c"]
