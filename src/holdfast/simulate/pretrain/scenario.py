"""Define a scenario: the job, its checkpoints, the duration of each phase, people and hardware."""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from holdfast.core.errors import BadUse
from holdfast.recover.policy import RestartLimits
from holdfast.simulate.pretrain.causes import DAY_S, TABLE3, LostMemory, Rates, rates_named
from holdfast.simulate.pretrain.formulas import daly_interval_s


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A place that keeps saves, such as the memory of the nodes or a disk."""

    name: str
    outlives: frozenset[LostMemory]
    """The losses of memory that the saves in this place survive."""
    lag_s: float = 0.0
    """Seconds from the end of the stall until the save can be restored."""
    restore_s: float = 60.0
    every: int = 1
    """One in this many saves goes to this place."""
    finishes: bool = False
    """True if a separate process finishes a save in flight when only the trainer processes die."""


SHORTEST_S, LONGEST_S = 60.0, 3600.0
"""The shortest and the longest interval between saves, in seconds, that is chosen automatically
from the failure rate.
"""
ALL: Final[frozenset[LostMemory]] = frozenset({"process", "node", "none"})
DISK: Final = Tier(name="disk", outlives=ALL)


@dataclass(frozen=True, kw_only=True)
class Saves:
    """The saving of checkpoints.

    Attributes:
        interval_s: seconds of training between the end of one save and the start of the next.
        stall_s: seconds for which a save stops training.
        tiers: the places that keep saves.
        damaged: the share of saves that cannot be restored.
        verifies: True if a damaged save is detected before the restore, and an older save is
            restored instead; if False, a person is needed.
    """

    interval_s: float = 1800.0
    stall_s: float = 60.0
    tiers: tuple[Tier, ...] = (DISK,)
    damaged: float = 0.0
    verifies: bool = True


@dataclass(frozen=True, kw_only=True)
class Times:
    """The seconds that detection and restart take.

    Attributes:
        exit_s, node_s: until the exit of a rank, or the loss of a node, is detected.
        hang_s, spike_s, slow_s: until a hang, a broken loss, or a slow node is detected. If people
            must notice these faults (`Scenario.by_hand`), it is the mean delay until somebody
            notices; a fault is noticed only in the hours in which people are awake.
        teardown_s, diagnosis_s: from detection until the last process has ended, and from then
            until the policy decides.
        node_tests_s: for testing the nodes after a failure that hardware may have caused.
        start_s, start_in_place_s: for a start with new launchers, and for a start of trainers below
            launchers that were kept.
        first_step_s: from the end of the restore to the start of the first step.
    """

    exit_s: float = 0.0
    node_s: float = 0.0
    hang_s: float = 0.0
    spike_s: float = 0.0
    slow_s: float = 0.0
    teardown_s: float = 0.0
    diagnosis_s: float = 0.0
    node_tests_s: float = 0.0
    start_s: float = 0.0
    start_in_place_s: float = 0.0
    first_step_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class People:
    """The people who act if the job needs a person.

    Attributes:
        response_s: the mean time in seconds until a person responds who is awake.
        awake: the hours of the day at which people wake up and go to sleep; 0 and 24 if there is a
            night shift.
        person_finds_node: the share of node failures in which a person identifies the node.
    """

    response_s: float = 900.0
    awake: tuple[float, float] = (8.0, 23.0)
    person_finds_node: float = 0.95

    def awake_at(self, at_s: float) -> float:
        """Return the first time, `at_s` or later, at which people are awake.

        Times are in seconds since midnight of the first day.
        """
        begins_s, ends_s = (hour * 3600.0 for hour in self.awake)
        of_day_s = at_s % DAY_S
        if begins_s <= of_day_s < ends_s:
            return at_s
        wait_s = begins_s - of_day_s
        return at_s + (wait_s if wait_s >= 0 else wait_s + DAY_S)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The reliability of nodes, the number of spares, and the repair shop.

    Attributes:
        spares: the number of spare nodes; a node does not fail while it is a spare.
        lemons, lemon_factor: the share of nodes that fail more often, and the factor on their rate.
        heat_every_days, heat_days, heat_factor: the mean time between heat waves, their length, and
            the factor on the rate of hardware failures during a heat wave.
        finds_node: the share of node failures in which the tests identify the node.
        blames_other: the share of node failures in which the tests blame a healthy node.
        again_s: the mean seconds to the next failure of a broken node that was not taken out.
        repair_s, long_repair_s, long_repairs: the mean seconds of a repair, the mean additional
            seconds if the repair needs a technician on site, and the share of such repairs.
        in_vain: the share of repairs after which a lemon is still a lemon.
        technicians: the largest number of repairs at the same time; None for no limit.
    """

    spares: int = 0
    lemons: float = 0.012
    lemon_factor: float = 10.0
    heat_every_days: float = 60.0
    heat_days: float = 4.0
    heat_factor: float = 2.0
    finds_node: float = 0.9
    blames_other: float = 0.02
    again_s: float = 900.0
    repair_s: float = 7200.0
    long_repair_s: float = 2 * DAY_S
    long_repairs: float = 0.32
    in_vain: float = 0.14
    technicians: int | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All inputs of a simulation, except the seed.

    Attributes:
        gpus, gpus_per_node, days, step_s: the size of the job, the simulated days, and the seconds
            of a training step.
        work_s: the seconds of training, at full speed, after which the run ends; None to end after
            `days`.
        rates: the failure rates by cause.
        hangs: the share of failures in which the job hangs, although their cause normally ends a
            process.
        spikes_per_day, bad_data: loss spikes per day, and the share of them that bad data cause,
            which recur until the data are left out.
        slow_per_node_day, slow_speed: the rate at which a node becomes slow, per day, and the
            relative speed of the job on a slow node.
        recognised: the share of failures with a correct diagnosis. A wrong diagnosis errs about
            whether a restart helps.
        loses_work: False if a failure loses no training.
    """

    name: str = "own"
    gpus: int = 1024
    gpus_per_node: int = 8
    days: float = 30.0
    step_s: float = 10.0
    work_s: float | None = None
    rates: Rates = field(default_factory=lambda: rates_named(TABLE3))
    hangs: float = 0.1
    spikes_per_day: float = 0.05
    bad_data: float = 0.7
    slow_per_node_day: float = 1e-4
    slow_speed: float = 0.8
    recognised: float = 1.0
    loses_work: bool = True
    saves: Saves = field(default_factory=Saves)
    times: Times = field(default_factory=Times)
    people: People = field(default_factory=People)
    hardware: Hardware = field(default_factory=Hardware)
    limits: RestartLimits = field(default_factory=RestartLimits)
    by_hand: bool = False
    """True if people, who look at the job now and then, must notice hangs, loss spikes and slow
    nodes.
    """

    def __post_init__(self) -> None:
        _check(self)

    @property
    def nodes(self) -> int:
        """The number of nodes of the job, without spares."""
        return math.ceil(self.gpus / self.gpus_per_node)

    def mean_time_to_failure_s(self) -> float:
        """Return the mean training time between failures, in seconds; infinite if nothing fails."""
        a_second = 1.0 / self.rates.mean_time_to_failure_s(self.gpus) + self.spikes_per_day / DAY_S
        return 1.0 / a_second if a_second > 0 else math.inf

    def varied(self, **changes: Any) -> "Scenario":
        """Return a copy with changed fields.

        The fields can belong to the scenario or to one of its parts, such as `interval_s`, `spares`
        and `start_s`.
        """
        own = {one.name for one in fields(self)}
        for part in ("saves", "times", "people", "hardware", "limits"):
            of_part = {one.name for one in fields(getattr(self, part))}
            inner = {name: changes.pop(name) for name in list(changes) if name in of_part - own}
            if inner:
                changes[part] = replace(changes.get(part, getattr(self, part)), **inner)
        return replace(self, **changes)


MOST: Final = 1_000_000
"""Limits on the number of GPUs and of spare nodes: more than any cluster has. A limit is needed
because each node costs memory.
"""
_ABOVE_0: Final = frozenset(
    {
        "gpus",
        "gpus_per_node",
        "days",
        "step_s",
        "work_s",
        "interval_s",
        "again_s",
        "technicians",
        "lemon_factor",
        "heat_factor",
    }
)
_PARTS_OF_1: Final = frozenset(
    {
        "hangs",
        "bad_data",
        "recognised",
        "damaged",
        "lemons",
        "finds_node",
        "blames_other",
        "in_vain",
        "long_repairs",
        "person_finds_node",
    }
)


def _check(one: Scenario) -> None:
    for part in (one, one.saves, one.times, one.people, one.hardware, one.limits):
        for name in (each.name for each in fields(part)):
            value = getattr(part, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name in _ABOVE_0 and not (math.isfinite(value) and value > 0):
                raise BadUse(f"{name} is {value}. Give a number above 0.")
            if name in _PARTS_OF_1 and not 0.0 <= value <= 1.0:
                raise BadUse(f"{name} is {value}. Give a part, from 0 to 1.")
            if not (math.isfinite(value) and value >= 0):
                raise BadUse(f"{name} is {value}. Give a number of 0 or more.")
    for name, value in (("gpus", one.gpus), ("spares", one.hardware.spares)):
        if value > MOST:
            raise BadUse(f"{name} is {value:,}. Give {MOST:,} at most.")
    if one.saves.damaged == 1.0:
        raise BadUse("damaged is 1, so no save can be restored. Give a part below 1.")
    if not any(tier.outlives == ALL for tier in one.saves.tiers):
        raise BadUse("No tier survives the loss of a node. Add one, such as disk.")
    if not 0 < one.slow_speed <= 1:
        raise BadUse(f"slow_speed is {one.slow_speed}. Give a part above 0, up to 1.")
    begins, ends = one.people.awake
    if not 0 <= begins < ends <= 24:
        raise BadUse(
            f"Awake from {begins} to {ends} is not a valid span. Give two hours, such as 8 and 23."
        )


@cache
def measured_times() -> Mapping[str, Mapping[str, float]]:
    """Return the packaged table of measured and assumed times."""
    path = resources.files("holdfast.simulate.pretrain").joinpath("tables", "times.toml")
    table: dict[str, dict[str, float]] = tomllib.loads(path.read_text("utf-8"))
    return table


def manual(gpus: int, **changes: Any) -> Scenario:
    """Return the baseline of the study: synchronous saves, and restarts by people, who also sleep."""
    assumed = measured_times()["assumed"]
    times = Times(
        exit_s=0.0,
        node_s=0.0,
        hang_s=assumed["collective_timeout_s"],
        spike_s=assumed["look_s"],
        slow_s=assumed["slow_look_s"],
        teardown_s=0.0,
        diagnosis_s=0.0,
        **_starts(gpus),
    )
    saves = Saves(
        interval_s=assumed["interval_s"],
        stall_s=assumed["synchronous_stall_s"],
        tiers=(replace(DISK, restore_s=assumed["disk_restore_s"]),),
        verifies=False,
    )
    one = Scenario(
        name="manual",
        gpus=gpus,
        saves=saves,
        times=times,
        limits=RestartLimits(max_restarts=0),
        by_hand=True,
    )
    return one.varied(spares=spares_for(gpus)).varied(**changes)


def study(gpus: int, **changes: Any) -> Scenario:
    """Return the system of the study: asynchronous saves, diagnosis, node tests and restarts."""
    table = measured_times()
    assumed = table["assumed"]
    times = Times(
        exit_s=assumed["study_detection_s"],
        node_s=assumed["study_detection_s"],
        hang_s=assumed["collective_timeout_s"],
        spike_s=assumed["study_spike_s"],
        slow_s=assumed["slow_look_s"],
        teardown_s=assumed["teardown_s"],
        diagnosis_s=assumed["study_diagnosis_s"],
        node_tests_s=assumed["node_tests_s"],
        **_starts(gpus),
    )
    saves = Saves(
        interval_s=assumed["interval_s"],
        stall_s=assumed["synchronous_stall_s"] / assumed["study_save_gain"],
        tiers=(
            replace(
                DISK, restore_s=assumed["disk_restore_s"], lag_s=assumed["synchronous_stall_s"]
            ),
        ),
        verifies=False,
    )
    one = Scenario(
        name="study",
        gpus=gpus,
        saves=saves,
        times=times,
        recognised=assumed["study_recognised"],
    )
    return one.varied(spares=spares_for(gpus)).varied(**changes)


def holdfast(gpus: int, **changes: Any) -> Scenario:
    """Return Holdfast with its defaults: measured times, and an interval from the failure rate."""
    table = measured_times()
    assumed, measured = table["assumed"], table["measured"]
    starts = _starts(gpus)
    # The launchers are kept, and only the trainers start again. A trainer is forked from a process
    # that has already imported its modules.
    starts["start_in_place_s"] = max(0.0, starts["start_s"] - assumed["import_s"])
    times = Times(
        exit_s=measured["exit_s"],
        node_s=assumed["node_s"],
        hang_s=measured["hang_after_limit_s"] + assumed["hang_limit_s"],
        spike_s=assumed["spike_steps"] * 10.0,
        slow_s=assumed["slow_steps"] * 10.0,
        teardown_s=assumed["teardown_s"],
        diagnosis_s=assumed["diagnosis_s"],
        node_tests_s=assumed["node_tests_s"],
        **starts,
    )
    tiers = (
        Tier(
            name="memory",
            outlives=frozenset({"process", "none"}),
            lag_s=measured["durable_s"],
            restore_s=measured["memory_restore_s"],
            finishes=True,
        ),
        Tier(
            name="peer",
            outlives=ALL,
            lag_s=measured["durable_s"] + measured["peer_lag_s"],
            restore_s=measured["peer_restore_s"],
            finishes=True,
        ),
        replace(
            DISK,
            restore_s=assumed["disk_restore_s"],
            lag_s=assumed["synchronous_stall_s"],
            finishes=True,
        ),
    )
    one = Scenario(
        name="holdfast",
        gpus=gpus,
        saves=Saves(stall_s=measured["stall_s"], tiers=tiers),
        times=times,
        recognised=measured["restart_decision"],
    )
    one = one.varied(spares=spares_for(gpus)).varied(**changes)
    if "interval_s" in changes or "saves" in changes:
        return one
    interval_s = daly_interval_s(one.saves.stall_s, one.mean_time_to_failure_s())
    return one.varied(interval_s=min(max(interval_s, SHORTEST_S), LONGEST_S))


SCENARIOS: Final[Mapping[str, Callable[..., Scenario]]] = {
    "manual": manual,
    "study": study,
    "holdfast": holdfast,
}


def spares_for(gpus: int) -> int:
    """Return the number of spares: 3 % of the nodes of the job, but at least one."""
    return max(1, math.ceil(gpus / 8 * 0.03))


def _starts(gpus: int) -> dict[str, float]:
    """Return the times of a start, which grow with the logarithm of the number of GPUs."""
    assumed = measured_times()["assumed"]
    doublings = max(0.0, math.log2(gpus / 8))
    start_s = assumed["start_s"] + assumed["start_s_per_doubling"] * doublings
    return {
        "start_s": start_s,
        "start_in_place_s": start_s,
        "first_step_s": assumed["first_step_s"],
    }
