"""Slow ranks in emulated trainings, whose ranks begin collectives and wait for each other."""

import random

import pytest

from holdfast.recover.detectors.collectives import STEPS, Begun, _thinned_out
from holdfast.recover.detectors.slow import SlowDetector, Throughput

STEP_S = 1.0
RANKS_A_NODE = 4


class Training:
    """Emulates ranks that compute for a time of their own and then wait for each other.

    Each step has `buckets` collectives of all ranks; a rank waits in the last one.
    """

    def __init__(self, ranks, *, seed=0, jitter=0.02, buckets=4, slow=None):
        self.random = random.Random(seed)
        self.ranks, self.jitter, self.buckets = ranks, jitter, buckets
        self.slow = slow or {}
        self.clocks = {
            rank // RANKS_A_NODE: self.random.uniform(-100, 100) for rank in range(ranks)
        }
        self.begun = {rank: {} for rank in range(ranks)}
        self.now_s, self.number, self.ended_s = 1000.0, 0, []

    def own_s(self, rank):
        part_s = STEP_S / self.buckets * self.slow.get(rank, 1.0)
        return part_s * max(0.5, self.random.gauss(1.0, self.jitter))

    def steps(self, count, *, pause=None):
        """Make steps; `pause` is a rank and seconds that it takes before one of them."""
        for step in range(count):
            at_s = dict.fromkeys(range(self.ranks), self.now_s)
            if pause is not None and step == count // 2:
                at_s[pause[0]] += pause[1]
            for _ in range(self.buckets):
                self.number += 1
                for rank in at_s:
                    at_s[rank] += self.own_s(rank)
                    self.begun[rank]["0", self.number] = at_s[rank]
            self.now_s = max(at_s.values())
            self.ended_s.append(self.now_s)

    def begun_by_rank(self):
        """Return the answer of each rank, of the last steps as `read_collectives` gives them."""
        steps_s = self.ended_s[-STEPS - 1 :]
        for rank in range(self.ranks):
            clock = self.clocks[rank // RANKS_A_NODE]
            last = [
                (*key, int(at_s * 1e9))
                for key, at_s in self.begun[rank].items()
                if at_s > steps_s[0]
            ]
            at_s = {
                (group, number): at_ns / 1e9 + clock for group, number, at_ns in _thinned_out(last)
            }
            yield (
                rank,
                Begun(
                    at_s=at_s,
                    last={"0": self.number},
                    waits=False,
                    steps_s=tuple(at_s + clock for at_s in steps_s),
                    read_at_s=self.now_s + clock,
                    cost_s=0.01,
                ),
            )

    def answer(self, detector):
        detector.request_sent(self.now_s)
        for rank, begun in self.begun_by_rank():
            arrived_s = self.now_s + self.random.uniform(0.0001, 0.01)
            detector.answered(rank, f"node{rank // RANKS_A_NODE}", begun, arrived_s)
        return detector.look(self.now_s, set(range(self.ranks)))


@pytest.mark.parametrize("buckets", [1, 4, 16])
@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_a_slow_rank_is_named_within_twenty_steps(ranks, buckets):
    for seed in range(20):
        slow = seed % ranks
        training = Training(ranks, seed=seed, buckets=buckets, slow={slow: 1.4})
        training.steps(20)
        found = training.answer(SlowDetector())
        assert found is not None
        assert list(found.shares) == [slow]
        # It needs 1.4 s where the others need 1 s, so they wait for 0.4 of 1.4 s.
        assert found.shares[slow] == pytest.approx(0.4 / 1.4, abs=0.08)
        assert found.node == (f"node{slow // RANKS_A_NODE}" if ranks > RANKS_A_NODE else None)


@pytest.mark.parametrize("buckets", [1, 4, 16])
def test_jitter_alone_names_nobody(buckets):
    for seed in range(200):
        training = Training(8, seed=seed, jitter=0.1, buckets=buckets)
        training.steps(20)
        assert training.answer(SlowDetector()) is None


def test_one_long_pause_of_one_rank_is_no_slow_rank():
    training = Training(8)
    training.steps(20, pause=(3, 30.0))
    assert training.answer(SlowDetector()) is None


def test_a_slow_node_is_named():
    training = Training(16, slow=dict.fromkeys(range(4, 8), 1.5))
    training.steps(20)
    found = training.answer(SlowDetector())
    assert (set(found.shares), found.node) == ({4, 5, 6, 7}, "node1")


def test_a_rank_that_is_fast_again_is_reported_once():
    detector, training = SlowDetector(), Training(4, slow={2: 1.5})
    training.steps(20)
    assert list(training.answer(detector).shares) == [2]
    training.steps(20)
    assert training.answer(detector) is None
    training.slow = {}
    training.steps(20)
    assert training.answer(detector).shares == {}


def test_who_waits_for_a_slow_rank_of_another_group_is_not_slow():
    # Two groups of two (tensor parallel: 0 1, 2 3), and two across them (data parallel: 0 2, 1 3).
    # Rank 1 is slow, so rank 0 comes late to its collective with rank 2, for which rank 1 is the
    # cause.
    detector = SlowDetector()
    begun = {rank: {} for rank in range(4)}
    now_s, steps_s = 0.0, []
    for number in range(1, 41):
        own_s = {0: 1.0, 1: 1.6, 2: 1.0, 3: 1.0}
        for rank in range(4):
            begun[rank][f"tp{rank // 2}", number] = now_s + own_s[rank]
        left_s = {rank: now_s + max(own_s[rank], own_s[rank ^ 1]) for rank in range(4)}
        for rank in range(4):
            begun[rank][f"dp{rank % 2}", number] = left_s[rank] + 0.01
        now_s = max(left_s.values()) + 0.02
        steps_s.append(now_s)
    detector.request_sent(now_s)
    for rank, at_s in begun.items():
        one = Begun(
            at_s=at_s, last={}, waits=False, steps_s=tuple(steps_s), read_at_s=now_s, cost_s=0.0
        )
        detector.answered(rank, "here", one, now_s)
    assert list(detector.look(now_s, set(range(4))).shares) == [1]


def test_a_rank_that_becomes_slow_in_the_middle_is_named_after_some_steps():
    for buckets in (1, 4, 16):
        detector, training = SlowDetector(), Training(8, buckets=buckets)
        training.steps(300)
        assert training.answer(detector) is None
        training.slow = {5: 1.5}
        steps = 0
        while (found := training.answer(detector)) is None:
            training.steps(4)
            steps += 4
        assert list(found.shares) == [5]
        assert steps <= 20
        training.steps(400)
        assert training.answer(detector) is None, "it is slow still"


def test_clocks_that_are_not_known_well_make_no_rank_slow():
    """One node's answers are late in the supervisor's queue, so its clock seems to be late."""
    detector, training = SlowDetector(), Training(8)
    training.steps(16)
    detector.request_sent(training.now_s)
    for rank, one in training.begun_by_rank():
        late_s = 0.4 if rank >= RANKS_A_NODE else 0.001
        detector.answered(rank, f"node{rank // RANKS_A_NODE}", one, training.now_s + late_s)
    assert detector.look(training.now_s + 1, set(range(8))) is None


def test_ranks_without_a_recorder_and_ranks_that_do_not_answer_end_the_look():
    detector = SlowDetector()
    detector.request_sent(10.0)
    detector.answered(0, "here", None, 10.0)
    assert detector.look(10.1, {0, 1}) is None
    assert not detector.due(60.0, 1.0)
    assert detector.look(16.0, {0, 1}) is None
    assert detector.due(60.0, 1.0)


def test_reading_takes_a_small_part_of_the_time():
    detector, training = SlowDetector(), Training(2)
    training.steps(20)
    training.answer(detector)  # each answer has cost 10 ms
    asked_s = training.now_s
    assert not detector.due(asked_s + 4.9, 0.1)
    assert detector.due(asked_s + 5.1, 0.1)
    assert not detector.due(asked_s + 5.1, 2.0)
    assert not detector.due(asked_s + 1000, None)


def test_a_training_that_becomes_slower_is_reported_and_so_is_its_end():
    throughput = Throughput()

    def changes(step_s, steps):
        return [one for _ in range(steps) if (one := throughput.stepped(step_s)) is not None]

    assert changes(1.0, 300) == []
    (slower,) = changes(1.5, 300)
    assert (slower.step_s, slower.before_s, slower.is_over) == (1.5, 1.0, False)
    assert changes(1.2, 300) == []
    (over,) = changes(1.02, 300)
    assert over.is_over
