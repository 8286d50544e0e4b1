"""Set up published cases, as far as their inputs are known."""

from dataclasses import dataclass, replace
from typing import Any

from holdfast.recover.policy import RestartLimits
from holdfast.simulate.pretrain import Outcome, Rates, Scenario, rates_named, run
from holdfast.simulate.pretrain.causes import DAY_S, cause, pooled
from holdfast.simulate.pretrain.scenario import (
    DISK,
    Hardware,
    People,
    Saves,
    Times,
    holdfast,
)

AT_ONCE = People(response_s=0.0, awake=(0.0, 24.0))
NO_WAITS = RestartLimits(backoff_first_s=0.0, outside_wait_s=0.0)
FREE = (replace(DISK, restore_s=0.0),)
QUIET: dict[str, Any] = {"hangs": 0.0, "spikes_per_day": 0.0, "slow_per_node_day": 0.0}
OTHERS = ("rsc-1", "rsc-2", "h200")
"""Clusters whose rates are not Llama 3's."""
EXPOSED = ("trained", "steps_again", "saves", "start", "restore", "first_step")
"""The classes of time in which failures strike."""


@dataclass(frozen=True)
class Airesim:
    """AIReSim (arXiv 2603.07041) at 4,096 servers: its figures before and after a repair."""

    long_repairs: float
    in_vain: float
    ettr: float
    failures: int


AIRESIM = {
    "as first published": Airesim(0.80, 0.24, 0.623, 11_146),
    "after the repair of its repair shop": Airesim(0.32, 0.144, 0.625, 11_062),
}


def airesim(version: Airesim) -> Scenario:
    """Return AIReSim's default scenario.

    All work up to a failure is kept, and no failure strikes its 20-minute recovery.
    """
    return Scenario(
        name="airesim",
        gpus=4096,
        gpus_per_node=1,
        days=1000.0,
        work_s=256 * DAY_S,
        rates=Rates(
            name="airesim",
            per_gpu_day=0.01 * (1 + 0.15 * 5),
            per_job_day=0.0,
            node_mix=((cause("node lost"), 1.0),),
            job_mix=(),
        ),
        loses_work=False,
        saves=Saves(interval_s=DAY_S, stall_s=0.0, tiers=FREE),
        times=Times(diagnosis_s=1200.0),
        people=AT_ONCE,
        limits=NO_WAITS,
        hardware=Hardware(
            spares=264,
            lemons=0.15,
            lemon_factor=6.0,
            heat_every_days=0.0,
            finds_node=1.0,
            repair_s=7200.0,
            long_repairs=version.long_repairs,
            in_vain=version.in_vain,
        ),
        **QUIET,
    )


def llama3(*, own_rate: bool) -> Scenario:
    """Return 54 days of 16,384 GPUs with 3 % spares, at the rate of Llama 3 or of others."""
    rates = rates_named("llama3") if own_rate else pooled(OTHERS)
    return holdfast(16_384, days=54.0, rates=rates, spikes_per_day=0.0)


def rsc_mean_time_to_failure_h(gpus: int, replications: int, *, of_hardware: bool = False) -> float:
    """Return the mean time to failure of simulated jobs with RSC-1's rates, in hours.

    Args:
        gpus: of the job.
        replications: simulated runs.
        of_hardware: leave out the failures that do not grow with the job, as the authors'
            projection does.
    """
    rates = rates_named("rsc-1")
    one = holdfast(
        gpus,
        days=20.0,
        rates=replace(rates, per_job_day=0.0) if of_hardware else rates,
        in_vain=0.0,
        finds_node=1.0,
        lemons=0.0,
        recognised=1.0,
        heat_every_days=0.0,
        **QUIET,
    )
    outcomes = [run(one, seed) for seed in range(replications)]
    exposed_s = sum(exposed(one) for one in outcomes)
    return exposed_s / sum(len(one.incidents) for one in outcomes) / 3600.0


def exposed(outcome: Outcome) -> float:
    """Return the seconds in which failures could strike."""
    return sum(outcome.part(name) for name in EXPOSED) * outcome.wall_s  # type: ignore[arg-type]


def one_cause(
    mean_s: float,
    *,
    stall_s: float,
    interval_s: float,
    restart_s: float,
    failures: int = 1500,
    **changes: Any,
) -> Scenario:
    """Return a job with one cause of failures, immediate restarts, and unlimited spares."""
    return Scenario(
        name="one cause",
        gpus=8,
        days=failures * mean_s / DAY_S,
        rates=Rates(
            name="one",
            per_gpu_day=0.0,
            per_job_day=DAY_S / mean_s,
            node_mix=(),
            job_mix=((cause("software"), 1.0),),
        ),
        saves=Saves(interval_s=interval_s, stall_s=stall_s, tiers=FREE),
        times=Times(start_s=restart_s, start_in_place_s=restart_s),
        people=AT_ONCE,
        limits=NO_WAITS,
        hardware=Hardware(lemons=0.0, heat_every_days=0.0),
        **QUIET,
    ).varied(**changes)


TORCHPASS_RATIO = 818 / 405
TORCHPASS_RESTART_S = 1800.0


def torchpass_ratio(replications: int, restart_s: float = TORCHPASS_RESTART_S) -> float:
    """Return the wall time with checkpoint restarts over that without losses.

    64 H200 make 3,000 steps in 405 min without losses. Faults come once an hour, saves each 100
    steps. The time of a restart is not published; 30 min is the upper end of what HyperPod
    publishes for restarts by hand.
    """
    work_s = 405 * 60.0
    one = one_cause(
        3600.0,
        stall_s=0.0,
        interval_s=work_s / 30,
        restart_s=restart_s,
        days=10.0,
        gpus=64,
        work_s=work_s,
    )
    walls_s = [run(one, seed).wall_s - restart_s for seed in range(replications)]
    return sum(walls_s) / len(walls_s) / work_s
