"""Predict live runs: the storm of `chaos.py`, and the emulated evaluations of `evaluate.py`.

No input depends on the predicted figures. The storm's parameters are those of its script; the times
of detection and restart are those of `recover.json`, `detection.json` and `checkpoint.json`. The
storm's script draws its faults before the storm begins, so the number of faults of each kind is an
input. Their moments are drawn again, so the prediction is a mean of replications with a band.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import Final

from evaluation.emulation import FULL, Setting
from holdfast.core.accounting import LostCause
from holdfast.recover.leadership import SILENT_S
from holdfast.simulate.evaluate import simulate
from holdfast.simulate.pretrain import Rates, Scenario, run
from holdfast.simulate.pretrain.causes import DAY_S, Cause
from holdfast.simulate.pretrain.scenario import ALL, Hardware, Saves, Tier, Times
from holdfast.testing.injector import Kind, schedule
from simulating.cases import AT_ONCE

RESULTS: Final = Path(__file__).parents[1] / "results"
STORM_S: Final = 1800.0
MTBF_S: Final = 60.0
STEP_S: Final = 0.1
SAVE_EVERY: Final = 10
SPARES: Final = 2
BOOT_S: Final = 20.0
"""Seconds until a killed node is back. A test compares these six values with `chaos.py`."""
SEED: Final = 0
"""The seed of the recorded storm: the benchmark's default."""
RECOVER_STEP_S: Final = 0.06
"""The last step before the time `first new step` of `recover.json`."""
WITHIN: Final = 0.05
JOB: Final[Mapping[Kind, Cause]] = {
    "rank killed": Cause(name="rank killed", by_node=False),
    "damaged checkpoint": Cause(name="damaged checkpoint", by_node=False),
    "rank frozen": Cause(name="rank frozen", by_node=False, shows="hang"),
    "deadlock": Cause(name="deadlock", by_node=False, shows="hang"),
    "NaN gradients": Cause(name="NaN gradients", by_node=False, shows="nan", loses="none"),
}
"""The kinds of faults after which only the trainers start again."""
NODE: Final[Mapping[Kind, Cause]] = {
    "node killed": Cause(name="node killed", by_node=True, loses="node", needs_node=1.0),
    "network cut": Cause(
        name="network cut", by_node=True, shows="hang", loses="node", needs_node=1.0
    ),
    "shim killed": Cause(name="shim killed", by_node=True, needs_node=1.0),
    "launcher killed": Cause(name="launcher killed", by_node=True, needs_node=1.0),
}
"""The kinds of faults after which launchers start anew."""
HARMLESS: Final[frozenset[Kind]] = frozenset(
    {"agent killed", "supervisor killed", "writer killed", "disk full", "slow rank"}
)
"""The kinds of faults that end no rank.

A slow rank trains on: the fault is in the script, and tests find its node healthy.
"""
SPIKE: Final[Kind] = "bad batch"


@dataclass(frozen=True, kw_only=True)
class Storm:
    """The prediction of the storm: means over the replications.

    Attributes:
        ettr, ettr_low, ettr_high: the mean, and the band from 5 % to 95 %.
        attempts: launches.
        steps_again: steps that are computed again.
        lost_s: seconds of each rank, by cause.
    """

    ettr: float
    ettr_low: float
    ettr_high: float
    attempts: float
    steps_again: float
    lost_s: Mapping[LostCause, float]


def figures(name: str, results: Path = RESULTS) -> dict[str, float]:
    """Return our figures of a result file by measure."""
    rows = json.loads((results / f"{name}.json").read_text())
    return {row["measure"]: float(row["ours"]) for row in rows if row["ours"] is not None}


def faults() -> Counter[Kind]:
    """Return the number of faults of each kind that the storm's script draws."""
    return Counter(one.kind for one in schedule(SEED, mtbf_s=MTBF_S, duration_s=STORM_S))


def storm_scenario(results: Path = RESULTS) -> Scenario:
    """Return the storm as a scenario, with the times that other benchmarks measured."""
    recover, detection = figures("recover", results), figures("detection", results)
    checkpoint = figures("checkpoint", results)
    exit_s = recover["warm SIGKILL → detected, median"]
    counts = faults()
    ending = [*JOB, *NODE, SPIKE]
    damaged = counts["damaged checkpoint"] / sum(counts[kind] for kind in ending)

    def a_day(kinds: Collection[Kind]) -> float:
        return sum(counts[kind] for kind in kinds) * DAY_S / STORM_S

    return Scenario(
        name="storm",
        gpus=2,
        gpus_per_node=1,
        days=STORM_S / DAY_S,
        step_s=STEP_S,
        rates=Rates(
            name="storm",
            per_gpu_day=a_day(NODE) / 2,
            per_job_day=a_day(JOB),
            node_mix=tuple((one, float(counts[kind])) for kind, one in NODE.items()),
            job_mix=tuple((one, float(counts[kind])) for kind, one in JOB.items()),
        ),
        hangs=0.0,
        spikes_per_day=a_day([SPIKE]),
        bad_data=1.0,
        slow_per_node_day=0.0,
        saves=Saves(
            interval_s=SAVE_EVERY * STEP_S,
            # The storm's model writes buffers in forward, which the call copies.
            stall_s=checkpoint["buffers: call without buffers"] / 1000,
            # This fault damages the newest checkpoint and ends the processes that hold the others.
            damaged=damaged,
            tiers=(
                # `first new step` has the restore in it.
                Tier(
                    name="memory and peer",
                    outlives=ALL,
                    lag_s=checkpoint["many: durable after, median [torch.save + fsync]"],
                    restore_s=0.0,
                    finishes=True,
                ),
            ),
        ),
        times=Times(
            exit_s=exit_s,
            # One of the two nodes that train leads. Another node leads once the first one was
            # silent for so long.
            node_s=SILENT_S / 2,
            hang_s=recover["warm SIGSTOP → detected, median"],
            spike_s=detection["loss that jumps: steps to the alarm, slowest"] * STEP_S,
            start_in_place_s=recover["warm SIGKILL → first new step, median"]
            - exit_s
            - RECOVER_STEP_S,
            start_s=recover["node killed, spare there → first new step, median"] - RECOVER_STEP_S,
        ),
        people=AT_ONCE,
        hardware=Hardware(
            spares=SPARES,
            lemons=0.0,
            heat_every_days=0.0,
            finds_node=1.0,
            repair_s=BOOT_S,
            long_repairs=0.0,
            in_vain=0.0,
        ),
    )


def storm(replications: int, seed: int = 0, results: Path = RESULTS) -> Storm:
    """Predict the storm.

    Faults come for `STORM_S`. The run then makes the rest of its steps without any, so that the
    training that survives is `STORM_S` in the end.
    """
    one = storm_scenario(results)
    outcomes = [run(one, seed + number) for number in range(replications)]
    ettrs = [STORM_S / (STORM_S + (1 - each.ettr) * each.wall_s) for each in outcomes]
    bands = quantiles(ettrs, n=20) if replications > 1 else [ettrs[0]] * 19
    causes = sorted({name for each in outcomes for name in each.lost_time.by_cause})
    lost_s = {
        name: fmean(each.part(name) * each.wall_s for each in outcomes)
        for name in causes
        if name != "trained"
    }
    return Storm(
        ettr=fmean(ettrs),
        ettr_low=bands[0],
        ettr_high=bands[-1],
        attempts=fmean(each.restarts + 1 for each in outcomes),
        steps_again=lost_s.get("steps_again", 0.0) / STEP_S,
        lost_s=lost_s,
    )


def evaluation_name(setting: Setting, *, history: bool) -> str:
    """Return the words by which `evaluate.py` names an emulated evaluation."""
    nodes = f"{setting.nodes} node{'s' * (setting.nodes > 1)}"
    return f"{nodes}, {'history' if history else 'no history'}"


def emulated_s(setting: Setting, *, history: bool, results: Path = RESULTS) -> float:
    """Return the makespan of an emulated evaluation as it was measured, in seconds."""
    start = f"emulation: {evaluation_name(setting, history=history)}: makespan (peer:"
    (found,) = [s for name, s in figures("evaluate", results).items() if name.startswith(start)]
    return found


def evaluation_s(setting: Setting, *, history: bool, seed: int = 0) -> float:
    """Predict the makespan of an emulated evaluation, in seconds."""
    mini = setting.miniature(seed)
    known = mini.workload.history(0.2, seed) if history else ()
    return simulate(mini.workload, mini.cluster, history=known, seed=seed).makespan_s


EVALUATIONS: Final = tuple((setting, history) for setting in FULL for history in (True, False))
