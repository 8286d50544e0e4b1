"""The simulator agrees with closed forms, within confidence intervals of its replications."""

import math
import statistics

import pytest

from holdfast.simulate.pretrain import Rates, Scenario, run
from holdfast.simulate.pretrain.causes import DAY_S, cause
from holdfast.simulate.pretrain.fleet import RepairShop
from holdfast.simulate.pretrain.formulas import (
    daly_ettr,
    daly_interval_s,
    erlang_b,
    machine_repair,
    meta_ettr,
    nvidia_period_s,
    poisson_spares,
    young_interval_s,
)
from holdfast.simulate.pretrain.scenario import Hardware, Saves
from holdfast.simulate.pretrain.streams import draws, exponential


def within(values, expected, *, slack=0.0):
    """Return True if `expected` is within `slack` of the 99 % confidence interval of the mean."""
    mean = statistics.fmean(values)
    half = 2.9 * statistics.stdev(values) / math.sqrt(len(values))
    assert abs(mean - expected) <= half + slack, (mean, half, expected)


REGIMES = [
    pytest.param(86400.0, 10.0, 1300.0, 300.0, id="failures are rare"),
    pytest.param(6480.0, 10.0, 360.0, 600.0, id="two hours between failures"),
    pytest.param(1800.0, 60.0, 400.0, 600.0, id="restarts fail as well"),
]


@pytest.mark.parametrize(("mean_s", "stall_s", "interval_s", "restart_s"), REGIMES)
def test_daly_complete(cases, mean_s, stall_s, interval_s, restart_s):
    one = cases.one_cause(mean_s, stall_s=stall_s, interval_s=interval_s, restart_s=restart_s)
    ettrs = [run(one, seed).ettr for seed in range(12)]
    within(ettrs, daly_ettr(interval_s, stall_s, mean_s, restart_s), slack=0.001)


@pytest.mark.parametrize(("mean_s", "stall_s", "interval_s", "restart_s"), [
    (28 * 3600.0, 60.0, 3600.0, 300.0),
    (6480.0, 0.1, 60.0, 5.0),
])  # fmt: skip
def test_meta_ettr_where_losses_are_small(cases, mean_s, stall_s, interval_s, restart_s):
    one = cases.one_cause(mean_s, stall_s=stall_s, interval_s=interval_s, restart_s=restart_s)
    ettrs = [run(one, seed).ettr for seed in range(8)]
    within(ettrs, meta_ettr(interval_s, stall_s, mean_s, restart_s), slack=0.002)


@pytest.mark.parametrize(
    ("formula", "mean_s", "stall_s"),
    [
        (young_interval_s, 86400.0, 10.0),
        (daly_interval_s, 21600.0, 30.0),
        (young_interval_s, 6480.0, 10.0),
    ],
)
def test_young_and_daly_intervals_beat_those_a_factor_of_two_away(cases, formula, mean_s, stall_s):
    best_s = formula(stall_s, mean_s)
    _is_best(cases, best_s, mean_s, stall_s, restart_s=300.0)


@pytest.mark.parametrize(
    ("mean_s", "stall_s", "restart_s"),
    [(6480.0, 10.0, 600.0), (21600.0, 60.0, 1800.0)],
)
def test_nvidia_period_beats_those_a_factor_of_two_away(cases, mean_s, stall_s, restart_s):
    period_s = nvidia_period_s(stall_s, mean_s, restart_s)
    _is_best(cases, period_s - stall_s, mean_s, stall_s, restart_s=restart_s)


def _is_best(cases, best_s, mean_s, stall_s, *, restart_s):
    def ettrs(interval_s):
        one = cases.one_cause(
            mean_s, stall_s=stall_s, interval_s=interval_s, restart_s=restart_s, failures=500
        )
        return [run(one, seed).ettr for seed in range(6)]

    at_best = ettrs(best_s)
    for other_s in (best_s / 2, best_s * 2):
        gains = [best - other for best, other in zip(at_best, ettrs(other_s), strict=True)]
        half = 2.9 * statistics.stdev(gains) / math.sqrt(len(gains))
        assert statistics.fmean(gains) > half, (best_s, other_s, gains)


@pytest.mark.parametrize(("machines", "technicians", "load"), [(6, 1, 0.3), (10, 2, 0.2), (4, 4, 1.0)])  # fmt: skip
def test_machine_repair(machines, technicians, load):
    """Machines that fail while they run, and the shop that the fleet uses."""
    parts = []
    for seed in range(8):
        shop, now_s, busy_s = RepairShop(technicians), 0.0, [0.0] * (machines + 1)
        draw = draws(seed, "machines", 0)
        for _ in range(4000):
            up = machines - shop.held
            fails_s = now_s + exponential(draw.random(), 1.0 / up) if up else math.inf
            back_s = shop.next_s if shop.next_s is not None else math.inf
            next_s = min(fails_s, back_s)
            busy_s[shop.held] += next_s - now_s
            now_s = next_s
            if fails_s <= back_s:
                shop.take(0, now_s, exponential(draw.random(), load))
            else:
                shop.returned(now_s)
        parts.append([part / now_s for part in busy_s])
    expected = machine_repair(machines, technicians, load)
    for broken in range(machines + 1):
        within([one[broken] for one in parts], expected[broken], slack=0.004)


def breaking(cases, spares, *, failures, repair_s=7200.0):
    """A job whose every failure takes a node out, so that spares and repairs alone decide."""
    return Scenario(
        gpus=800,
        days=failures * 3600.0 / DAY_S,
        rates=Rates(
            name="nodes",
            per_gpu_day=DAY_S / 3600.0 / 800,
            per_job_day=0.0,
            node_mix=((cause("node lost"), 1.0),),
            job_mix=(),
        ),
        hangs=0.0,
        spikes_per_day=0.0,
        slow_per_node_day=0.0,
        loses_work=False,
        saves=Saves(stall_s=0.0, tiers=cases.FREE),
        people=cases.AT_ONCE,
        limits=cases.NO_WAITS,
        hardware=Hardware(
            spares=spares,
            lemons=0.0,
            heat_every_days=0.0,
            finds_node=1.0,
            repair_s=repair_s,
            long_repairs=0.0,
        ),
    )


@pytest.mark.parametrize("spares", [1, 6])
def test_spares_under_repair_are_poisson_until_none_is_left(cases, spares):
    """Failures once an hour and repairs of two hours: a loss system, without spares by Erlang's B."""
    missing = []
    for seed in range(12):
        outcome = run(breaking(cases, spares, failures=1200), seed)
        missing.append(outcome.part("nodes_missing"))
    within(missing, erlang_b(spares + 1, 2.0), slack=0.004)
    assert poisson_spares(2.0, 0.99) == 6


def test_spares_of_the_poisson_quantile_are_enough():
    for load, confidence, spares in ((2.0, 0.95, 5), (10.0, 0.95, 15), (0.1, 0.95, 1)):
        assert poisson_spares(load, confidence) == spares
        covered = sum(math.exp(-load) * load**k / math.factorial(k) for k in range(spares + 1))
        assert (
            covered
            >= confidence
            > covered - math.exp(-load) * load**spares / math.factorial(spares)
        )
