"""Simulate training jobs: figures, speed, and distance from published and measured figures.

- speed: the CPU time of a simulated year of 16,384 GPUs, with the failure rate of RSC-1.
- validation: closed forms and published figures as `peer`, the simulator's as `ours`.
- live: live runs as `peer`, predicted from other benchmarks' times: the storm of `chaos.py`, and
  the emulated evaluations of `evaluate.py`.
- cluster: the jobs of the Kalos twin replayed: waits beside the twin's own, speed beside a plain
  simulator.
- million: the CPU time and the memory of a million of these.
- story: restarts by hand, the study's system and ours at 1,024 to 100,000 GPUs, the mean of
  simulated months.

The same seed gives the same figures, except for the speed.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common.parts import run_parts
from common.table import Must, Row, parse_arguments, report
from holdfast.simulate.pretrain import rates_named, replicate, run
from holdfast.simulate.pretrain.formulas import daly_ettr, meta_ettr
from holdfast.simulate.pretrain.scenario import holdfast
from simulating import cases, cluster, live, story

PARTS = ("speed", "validation", "live", "cluster", "million", "story")
YEAR_S = 5.0
REGIMES = {
    "a day between failures": (86400.0, 10.0, 1300.0, 300.0),
    "two hours between failures": (6480.0, 10.0, 360.0, 600.0),
    "half an hour between failures": (1800.0, 60.0, 400.0, 600.0),
}
"""Mean time to failure, stall, interval, restart, in seconds."""


def speed(rounds: int) -> Iterator[Row]:
    """Return the CPU time of a year."""
    one = holdfast(16_384, days=365.0, rates=rates_named("rsc-1"))
    took_s, failures, decisions = [], [], []
    for seed in range(rounds):
        began_s = time.process_time()
        outcome = run(one, seed)
        took_s.append(time.process_time() - began_s)
        failures.append(len(outcome.incidents))
        decisions.append(outcome.decisions)
    must = Must("<=", YEAR_S)
    yield Row(
        measure=f"a year of 16,384 GPUs, slowest of {rounds}",
        ours=max(took_s),
        unit="CPU s",
        must=must,
    )
    yield Row(measure="failures in it, mean", ours=sum(failures) / rounds, unit="failures")
    yield Row(
        measure="decisions of the live policy, mean", ours=sum(decisions) / rounds, unit="decisions"
    )


def validation(replications: int) -> Iterator[Row]:
    """Yield the simulator's figures beside published ones."""
    for name, (mean_s, stall_s, interval_s, restart_s) in REGIMES.items():
        one = cases.one_cause(mean_s, stall_s=stall_s, interval_s=interval_s, restart_s=restart_s)
        peer = daly_ettr(interval_s, stall_s, mean_s, restart_s)
        ours = replicate(one, replications).ettr.mean
        yield Row(measure=f"Daly, complete, {name}: ETTR", ours=ours, peer=peer, unit="")
        if mean_s == 86400.0:
            peer = meta_ettr(interval_s, stall_s, mean_s, restart_s)
            yield Row(measure="Meta's formula, small losses: ETTR", ours=ours, peer=peer, unit="")
    for name, published in cases.AIRESIM.items():
        outcome = run(cases.airesim(published), 0)
        yield Row(
            measure=f"AIReSim, 4,096 servers, {name}: ETR",
            ours=outcome.ettr,
            peer=published.ettr,
            unit="",
        )
        yield Row(
            measure=f"AIReSim, 4,096 servers, {name}: failures",
            ours=len(outcome.incidents),
            peer=published.failures,
            unit="failures",
        )
    band = replicate(cases.llama3(own_rate=False), 4 * replications, uncertain=True).failures
    for name, ours in (("mean", band.mean), ("5 %", band.low), ("95 %", band.high)):
        yield Row(
            measure=f"Llama 3, 54 days, other clusters' rates: interruptions, {name}",
            ours=ours,
            peer=419,
            unit="",
        )
    own = replicate(cases.llama3(own_rate=True), replications)
    yield Row(
        measure="Llama 3, its own rate: interruptions, mean",
        ours=own.failures.mean,
        peer=419,
        unit="",
    )
    yield Row(
        measure="Llama 3, 3 % spares: ETTR, 5 %",
        ours=own.ettr.low,
        peer=0.90,
        unit="",
        must=Must(">=", 0.90),
    )
    ours = cases.rsc_mean_time_to_failure_h(1024, replications)
    yield Row(
        measure="RSC-1, 1024 GPUs: mean time to failure, as measured there",
        ours=ours,
        peer=7.9,
        unit="h",
    )
    # The projection of Kokolis et al. is 1 / (nodes x rate of a node): no failure of software is in
    # it.
    ours = cases.rsc_mean_time_to_failure_h(16_384, replications, of_hardware=True)
    yield Row(
        measure="RSC-1, 16384 GPUs: mean time to failure of hardware, as projected there",
        ours=ours,
        peer=1.8,
        unit="h",
    )
    ours = cases.rsc_mean_time_to_failure_h(16_384, replications)
    yield Row(measure="RSC-1, 16384 GPUs: mean time to failure of any cause", ours=ours, unit="h")
    for minutes in (15, 30):
        ours = cases.torchpass_ratio(10 * replications, 60.0 * minutes)
        yield Row(
            measure=f"TorchPass's run, restarts of {minutes} min: wall time with faults ÷ without",
            ours=ours,
            peer=cases.TORCHPASS_RATIO,
            unit="ratio",
        )


def of_live_runs(replications: int, seed: int, *, quick: bool) -> Iterator[Row]:
    """Yield the predictions of live runs beside the measurements."""
    found, measured = live.storm(replications, seed), live.figures("chaos")
    ettr = measured["storm: ETTR, by the lost-time account"]
    yield Row(measure="storm of faults: ETTR", ours=found.ettr, peer=ettr, unit="")
    yield Row(measure="storm of faults: ETTR, 5 %", ours=found.ettr_low, peer=ettr, unit="")
    yield Row(measure="storm of faults: ETTR, 95 %", ours=found.ettr_high, peer=ettr, unit="")
    yield Row(
        measure="storm of faults: ETTR, off by",
        ours=abs(found.ettr / ettr - 1),
        limit=0,
        unit="share",
        must=Must("<=", live.WITHIN),
    )
    again = next(s for name, s in measured.items() if name.startswith("storm: steps computed"))
    yield Row(
        measure="storm of faults: steps computed again",
        ours=found.steps_again,
        peer=again,
        unit="steps",
    )
    yield Row(
        measure="storm of faults: attempts",
        ours=found.attempts,
        peer=measured["storm: attempts"],
        unit="attempts",
    )
    yield Row(
        measure="storm of faults: time lost",
        ours=live.STORM_S * (1 / found.ettr - 1),
        peer=live.STORM_S * (1 / ettr - 1),
        unit="s",
    )
    for name, seconds in found.lost_s.items():
        peer = measured.get(f"storm: time of each rank, {name}")
        yield Row(measure=f"storm of faults: time, {name}", ours=seconds, peer=peer, unit="s")
    for setting, history in live.EVALUATIONS[: 2 if quick else None]:
        name = live.evaluation_name(setting, history=history)
        ours = live.evaluation_s(setting, history=history, seed=seed)
        peer = live.emulated_s(setting, history=history)
        yield Row(measure=f"evaluation on {name}: makespan", ours=ours, peer=peer, unit="s")
        yield Row(
            measure=f"evaluation on {name}: makespan, off by",
            ours=abs(ours / peer - 1),
            limit=0,
            unit="share",
            must=Must("<=", live.WITHIN),
        )


def told(replications: int, seed: int) -> Iterator[Row]:
    """Return the rows of the story."""
    for rates in story.RATES:
        for gpus in story.SIZES:
            found = story.answers(rates, gpus, replications, seed)
            for figure, by_scenario in story.figures(found):
                for name, ours in by_scenario.items():
                    yield Row(
                        measure=f"{rates}, {gpus} GPUs: {figure} [{name}]", ours=ours, unit=""
                    )


def main() -> int:
    args = parse_arguments(__doc__ or "", rounds=5, parts=PARTS)
    chosen = args.only or PARTS
    failures: list[str] = []

    def rows_of(name: str, _folder: Path) -> Iterator[Row]:
        if name == "speed":
            return speed(1 if args.quick else args.rounds)
        if name == "validation":
            return validation(3 if args.quick else 12)
        if name == "live":
            return of_live_runs(4 if args.quick else 200, args.seed, quick=args.quick)
        if name == "cluster":
            return cluster.rows(quick=args.quick, seed=args.seed)
        if name == "million":
            return cluster.million(quick=args.quick)
        return told(1 if args.quick else 40, args.seed)

    rows = run_parts(chosen, rows_of, file=args.json, failures=failures)
    report(
        "Simulated training jobs",
        rows,
        notes=[
            "peer: the closed form, the published figure or the live run",
            "peer of `cluster`: the trace's own figure, or a plain simulator",
            *failures,
        ],
    )
    return 1 if failures or any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
