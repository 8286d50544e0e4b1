import itertools
import math
import random
import statistics
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from started_ranks import RANK, run_ranks

from holdfast.checkpoint import Checkpointer, checkpointer
from holdfast.checkpoint.save.results import LostTime
from holdfast.checkpoint.schedule.interval import (
    FIRST_S,
    LONGEST_S,
    PRIOR_GPU_S,
    Auto,
    EverySeconds,
    EverySteps,
    best_interval_s,
    make_interval,
    mean_time_between_failures_s,
)
from holdfast.core.errors import BadUse
from holdfast.core.failure_history import ENV_FAILURES, FailureHistory
from holdfast.core.ledger import Attempt, Incident
from holdfast.testing import FakeClock

LONG_S = 60.0
HOUR_S = 3600.0


def wasted(interval_s, loss_s, mtbf_s, seconds=4e5, seed=5):
    """Simulate a job; return the share of its time that saves and failures cost."""
    source = random.Random(seed)
    kept_s = now_s = since_s = 0.0
    fails_at_s = source.expovariate(1 / mtbf_s)
    while now_s < seconds:
        saved_at_s = now_s + interval_s + loss_s
        if fails_at_s < saved_at_s:
            now_s, since_s = fails_at_s, 0.0
            fails_at_s += source.expovariate(1 / mtbf_s)
        else:
            now_s, kept_s = saved_at_s, kept_s + interval_s + since_s
    return 1 - kept_s / now_s


@pytest.mark.parametrize(("loss_s", "mtbf_s"), [(1.0, 500.0), (10.0, 1000.0), (60.0, 900.0)])
def test_the_interval_loses_least(loss_s, mtbf_s):
    best_s = best_interval_s(loss_s, mtbf_s)
    least = statistics.fmean(wasted(best_s, loss_s, mtbf_s, seed=seed) for seed in range(5))
    for factor in (0.5, 0.7, 1.5, 2.0):
        other = statistics.fmean(
            wasted(best_s * factor, loss_s, mtbf_s, seed=seed) for seed in range(5)
        )
        assert least < other, factor


def test_the_formula_is_dalys():
    assert best_interval_s(0.1, 86_400) == pytest.approx(math.sqrt(2 * 0.1 * 86_400), rel=1e-3)
    # Daly 2006, equation 37, computed by hand: C = 300, M = 6 h.
    root = math.sqrt(300 / 43_200)
    assert best_interval_s(300, 21_600) == pytest.approx(
        math.sqrt(2 * 300 * 21_600) * (1 + root / 3 + root**2 / 9) - 300
    )
    assert best_interval_s(300, 150) == best_interval_s(301, 150) == 150


def test_the_failure_rate_is_the_prior_at_first_and_the_jobs_own_later():
    def mtbf_s(failures=0, trained_s=0.0, devices=8):
        return mean_time_between_failures_s(
            FailureHistory(failures=failures, trained_s=trained_s), devices=devices
        )

    assert mtbf_s() == mtbf_s(devices=1) == 24 * HOUR_S
    assert mtbf_s(devices=4704) == PRIOR_GPU_S / 4704 == pytest.approx(2.51 * HOUR_S, rel=0.01)
    # Two failures an hour for a day, or none for a year.
    assert mtbf_s(failures=48, trained_s=24 * HOUR_S) == pytest.approx(HOUR_S, rel=0.05)
    assert mtbf_s(trained_s=365 * 24 * HOUR_S) == pytest.approx(366 * 24 * HOUR_S)


def test_the_prior_is_what_the_papers_table_says():
    """Rows: number, GPUs, minutes to failure, for infrastructure without ConnectionError."""
    rows = [
        (54, 800, 868.1),
        (21, 847, 923.2),
        (16, 712, 1288.8),
        (12, 680, 1303.4),
        (12, 758, 549.6),
        (10, 422, 2317.8),
        (6, 596, 159.7),
        (3, 1152, 50.5),
    ]
    gpu_s = sum(number * gpus * minutes * 60 for number, gpus, minutes in rows)
    assert gpu_s / HOUR_S == pytest.approx(1.58e6, rel=0.01)
    assert gpu_s / sum(row[0] for row in rows) == pytest.approx(PRIOR_GPU_S, rel=0.01)


def test_the_history_counts_failures_of_starts_that_trained():
    def attempt(number, first_step_at_s, ended_at_s):
        return Attempt(
            run_id="r",
            number=number,
            started_at_s=0.0,
            first_step_at_s=first_step_at_s,
            ended_at_s=ended_at_s,
        )

    def incident(number):
        return Incident(
            run_id="r",
            attempt=number,
            kind="exit",
            rank=0,
            step=1,
            fault_at_s=0.0,
            detected_at_s=0.0,
            diagnosis={},
        )

    attempts = [
        attempt(1, 100.0, 400.0),
        attempt(2, None, 500.0),
        attempt(3, 600.0, 700.0),
        attempt(4, 800.0, None),
    ]
    found = FailureHistory.of_run(attempts, [incident(1), incident(2), incident(3)])
    assert found == FailureHistory(failures=2, trained_s=400.0)


def test_the_history_reaches_a_rank_by_its_environment(monkeypatch):
    monkeypatch.delenv(ENV_FAILURES, raising=False)
    assert FailureHistory.of_environment() == FailureHistory()
    told = FailureHistory(failures=3, trained_s=7.5)
    monkeypatch.setenv(ENV_FAILURES, told.as_environment()[ENV_FAILURES])
    assert FailureHistory.of_environment() == told
    clock = FakeClock()
    auto = make_interval("auto", clock, devices=lambda: 1)
    assert auto.mtbf_s == pytest.approx((24 * HOUR_S + 7.5) / 4)


def test_what_every_may_be():
    clock = FakeClock()
    assert isinstance(make_interval(5, clock, devices=lambda: 1), EverySteps)
    assert make_interval(timedelta(minutes=10), clock, devices=lambda: 1).interval_s == 600
    for wrong in (0, -1, True, 2.5, "10min", "", None, timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(
            BadUse, match=r"every is .*; allowed is a whole number of steps from 1 on, a datetime"
        ):
            make_interval(wrong, clock, devices=lambda: 1)


def test_seconds_run_from_the_begin_of_the_last_save():
    clock = FakeClock()
    interval = EverySeconds(10.0, clock)
    assert not interval.has_passed()
    clock.advance(9.0)
    assert not interval.has_passed()
    clock.advance(1.0)
    assert interval.has_passed()
    assert interval.has_passed()
    interval.began()
    assert not interval.has_passed()


def auto(clock, *, failures=0, trained_s=0.0, devices=1):
    return Auto(
        clock,
        history=FailureHistory(failures=failures, trained_s=trained_s),
        devices=lambda: devices,
    )


def test_auto_learns_from_two_saves_and_then_saves_as_often_as_is_worth_it():
    interval = auto(FakeClock())
    assert interval.interval_s == FIRST_S
    interval.measured(lost_s=9.0, durable_s=12.0)  # the first save, which planned
    assert interval.interval_s == FIRST_S
    interval.measured(lost_s=0.1, durable_s=2.0)
    assert interval.interval_s == pytest.approx(best_interval_s(0.1, 24 * HOUR_S))
    for _ in range(5):
        interval.measured(lost_s=0.4, durable_s=2.0)
    assert interval.interval_s == pytest.approx(best_interval_s(0.4, 24 * HOUR_S))


def test_a_due_step_that_is_passed_by_is_made_up_for_at_the_next():
    """Several optimizers may count so; a step below the last one begins anew."""
    interval = make_interval(10, FakeClock(), devices=lambda: 1)
    told = [0, 3, 9, 12, 15, 20, 20, 41, 44, 38, 39, 42, 50]
    assert [step for step in told if interval.falls_on(step)] == [0, 12, 20, 20, 41, 42, 50]


def test_auto_takes_a_save_that_cost_less_than_nothing_for_one_that_cost_nothing():
    """In a measured case, the steps beside the save were faster than usual."""
    auto = make_interval("auto", FakeClock(), devices=lambda: 1)
    for lost_s in (1.0, -0.01, -0.02):
        auto.measured(lost_s=lost_s, durable_s=3.0)
    assert auto.interval_s == 3.0


def test_auto_saves_more_often_where_the_job_fails_more_often():
    intervals = []
    for failures in (0, 3, 30):
        interval = auto(FakeClock(), failures=failures, trained_s=24 * HOUR_S)
        for _ in range(2):
            interval.measured(lost_s=0.5, durable_s=1.0)
        intervals.append(interval.interval_s)
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] / intervals[2] == pytest.approx(math.sqrt(31), rel=0.05)


def test_auto_never_asks_for_more_than_the_disk_can_take_nor_waits_for_ever():
    interval = auto(FakeClock(), failures=1000)
    for _ in range(2):
        interval.measured(lost_s=0.1, durable_s=300.0)
    assert interval.interval_s == 300.0
    interval = auto(FakeClock())
    for _ in range(2):
        interval.measured(lost_s=1000.0, durable_s=1.0)
    assert interval.interval_s == LONGEST_S


def test_auto_counts_its_own_time_without_a_failure():
    clock = FakeClock()
    interval = auto(clock)
    clock.advance(24 * HOUR_S)
    assert interval.mtbf_s == 48 * HOUR_S


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr(checkpointer, "SystemClock", lambda: fake)
    return fake


def steps_saved(ckpt, clock, steps, *, step_s):
    saved = []
    for step in range(1, steps + 1):
        clock.advance(step_s)
        handle = ckpt.save(step, {"t": torch.ones(3)})
        handle.result(LONG_S)
        saved += [] if handle.step is None else [handle.step]
    return saved


def test_a_checkpointer_saves_by_the_clock(tmp_path, clock):
    with Checkpointer(tmp_path, every=timedelta(seconds=10)) as ckpt:
        assert steps_saved(ckpt, clock, 40, step_s=1.0) == [11, 21, 31]


def test_a_checkpointer_finds_its_interval(tmp_path, clock, link):
    with Checkpointer(tmp_path, every="auto") as ckpt:
        saved = steps_saved(ckpt, clock, 200, step_s=10.0)
    assert saved[:2] == [7, 13]
    gaps = [later - former for former, later in itertools.pairwise(saved)]
    # From then on by the cost of the second save on this machine, at least the first minute's cost
    # apart.
    lost_s = [event["lost_s"] for event in link.of("checkpoint")][1:]
    worth_s = [best_interval_s(each, 24 * HOUR_S + 2000) for each in (min(lost_s), max(lost_s))]
    assert all(0.9 * worth_s[0] <= gap * 10 <= worth_s[1] + 20 for gap in gaps[1:]), (gaps, worth_s)


def test_ranks_whose_clocks_go_apart_save_at_the_same_steps(tmp_path):
    run_ranks(2, Path(__file__).with_name("interval_ranks.py"), tmp_path, RANK)


def told(lost, steps, *, in_flight, fence_s=0.0):
    """Make steps of the given seconds, each with a call of 1 s and `in_flight` saves afterwards."""
    for step_s in steps:
        told.now_s += step_s
        lost.step(told.now_s, fence_s=fence_s)
        told.now_s += 1.0
        lost.resume(told.now_s, fence_s=fence_s, in_flight=in_flight)


told.now_s = 0.0


def test_the_slow_down_is_what_steps_take_longer_while_a_save_is_written():
    lost = LostTime()
    assert not lost.can_tell
    told(lost, [2.0] * 6, in_flight=0)
    assert (lost.can_tell, lost.slowdown_s) == (True, 0.0)
    told(lost, [2.0], in_flight=1)
    told(lost, [2.5, 3.0], in_flight=1)
    assert lost.slowdown_s == pytest.approx(1.5)
    told(lost, [2.25], in_flight=0)  # the save lasted until the step's end
    assert lost.slowdown_s == pytest.approx(1.75)
    told(lost, [9.0, 2.0], in_flight=0)
    assert lost.slowdown_s == pytest.approx(1.75)


def test_an_evaluation_and_the_fence_are_no_slow_down_and_two_saves_share_theirs():
    lost = LostTime()
    told(lost, [2.0] * 6, in_flight=0)
    told(lost, [2.0], in_flight=1)
    told(lost, [60.0], in_flight=1)
    assert lost.slowdown_s == 0.0
    told(lost, [5.0], in_flight=2, fence_s=3.0)
    assert lost.slowdown_s == 0.0
    told(lost, [3.0], in_flight=1, fence_s=3.0)
    assert lost.slowdown_s == pytest.approx(0.5)


def test_without_steps_between_saves_it_cannot_be_told():
    lost = LostTime()
    told(lost, [2.0] * 9, in_flight=1)
    assert (lost.can_tell, lost.slowdown_s) == (False, 0.0)
