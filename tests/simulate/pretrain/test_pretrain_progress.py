"""Training between events, by arithmetic: the same as second by second."""

import math
import random

import pytest

from holdfast.simulate.pretrain.progress import Progress
from holdfast.simulate.pretrain.scenario import DISK, Saves, Tier

MEMORY = Tier(name="memory", outlives=frozenset({"process", "none"}), restore_s=1.0)
PEER = Tier(name="peer", outlives=frozenset({"process", "node", "none"}), lag_s=3.0, restore_s=5.0)


def tier(**changes):
    return Tier(name="disk", outlives=DISK.outlives, **changes)


def ticked(saves, spans, tick_s=0.125):
    """Train tick by tick; return work, seconds trained and stalled, and saves as (work, begin)."""
    work = since = trained = stalled = now = stall_left = 0.0
    begun = []
    for _ in range(round(sum(spans) / tick_s)):
        if stall_left > 0:
            stall_left -= tick_s
            stalled += tick_s
        else:
            work += tick_s
            since += tick_s
            trained += tick_s
            if since >= saves.interval_s:
                since, stall_left = 0.0, saves.stall_s
                begun.append((work, now + tick_s))
        now += tick_s
    return work, trained, stalled, begun


@pytest.mark.parametrize("seed", range(20))
def test_arithmetic_is_what_ticks_give(seed):
    draw = random.Random(seed)
    saves = Saves(
        interval_s=draw.choice([2.0, 5.5, 30.0]),
        stall_s=draw.choice([0.0, 0.5, 4.0]),
        tiers=(tier(lag_s=draw.choice([0.0, 1.0, 17.0]), every=draw.choice([1, 3])),),
    )
    spans = [draw.randrange(1, 500) / 8 for _ in range(draw.randrange(1, 6))]
    progress, now_s, trained_s, stalled_s = Progress(saves), 0.0, 0.0, 0.0
    for span_s in spans:
        used = progress.advance(now_s, span_s)
        now_s += span_s
        trained_s += used.trained_s
        stalled_s += used.stalled_s
    work, trained, stalled, begun = ticked(saves, spans)
    assert (progress.work_s, trained_s, stalled_s) == pytest.approx((work, trained, stalled))
    # The newest save that is durable, and that goes to this tier.
    (kept,) = saves.tiers
    durable = [
        at
        for number, (at, begin_s) in enumerate(begun, start=1)
        if number % kept.every == 0 and begin_s + saves.stall_s + kept.lag_s <= now_s
    ]
    progress.settle(now_s, "node")
    assert progress.best()[0] == pytest.approx(durable[-1] if durable else 0.0)


@pytest.mark.parametrize("goal_s", [1.0, 9.999, 10.0, 10.5, 20.0, 123.0])
def test_seconds_to_a_goal_lead_to_the_goal(goal_s):
    progress = Progress(Saves(interval_s=10.0, stall_s=2.0))
    progress.speed = 0.5
    progress.advance(0.0, progress.seconds_to(goal_s))
    assert progress.work_s == pytest.approx(goal_s)


def test_an_asynchronous_save_that_lags_by_more_than_an_interval_leaves_older_ones():
    """The newest durable save is ceil(L / t) intervals old."""
    saves = Saves(interval_s=10.0, stall_s=0.0, tiers=(tier(lag_s=25.0),))
    progress = Progress(saves)
    progress.advance(0.0, 100.0)
    progress.settle(100.0, "process")
    assert progress.best()[0] == 100.0 - math.ceil(25.0 / 10.0) * 10.0


def test_a_save_in_flight_is_finished_where_the_trainers_alone_die():
    saves = Saves(interval_s=10.0, stall_s=0.0, tiers=(tier(lag_s=25.0, finishes=True),))
    for loses, state_s in (("process", 100.0), ("none", 100.0), ("node", 80.0)):
        progress = Progress(saves)
        progress.advance(0.0, 105.0)
        progress.settle(105.0, loses)
        assert progress.best()[0] == state_s
    stalls = Progress(Saves(interval_s=10.0, stall_s=2.0, tiers=saves.tiers))
    stalls.advance(0.0, 23.0)  # the second save began at 22 s
    stalls.settle(23.0, "process")
    assert stalls.best()[0] == 10.0


def test_what_a_failure_takes_decides_the_tier():
    saves = Saves(interval_s=10.0, stall_s=0.0, tiers=(MEMORY, PEER, tier(lag_s=40.0, every=3)))
    for loses, name, state_s in (("process", "memory", 100.0), ("node", "peer", 90.0)):
        progress = Progress(saves)
        progress.advance(0.0, 101.0)
        progress.settle(101.0, loses)
        state, kept = progress.best()
        assert (state, kept.name) == (state_s, name)
    # What the memory of a lost node held is gone for the next failure as well.
    assert progress.go_back(90.0) == pytest.approx(11.0)
    progress.settle(102.0, "process")
    assert progress.best()[1].name == "peer"


def test_a_healthy_state_lies_before_the_onset_and_damaged_saves_are_passed_over():
    progress = Progress(Saves(interval_s=10.0, stall_s=0.0, tiers=(tier(),)))
    progress.advance(0.0, 100.0)
    progress.settle(100.0, "none")
    assert progress.best(before_s=57.0)[0] == 50.0
    assert progress.best(older=2)[0] == 80.0
    assert progress.best(older=50)[0] == 0.0


def test_going_back_counts_the_seconds_that_the_work_took():
    progress = Progress(Saves(interval_s=1000.0, stall_s=0.0, tiers=(tier(),)))
    progress.advance(0.0, 100.0)
    progress.speed = 0.5
    progress.advance(100.0, 100.0)
    assert progress.work_s == 150.0
    assert progress.go_back(90.0) == pytest.approx(100.0 + 10.0)
    assert progress.work_s == 90.0
