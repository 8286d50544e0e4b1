"""Measure makespan over the lower bound on an emulated cluster, beside the paper's policy.

Runs are with and without history. The bound is computed here from the emulator's true costs
(`simulate.ideal.bound_of`), not from measurements. The simulator predicts before the emulation
runs, for the same workload and cluster.
"""

import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.jobs import say
from common.machine import Quiet
from common.table import Must, Row
from evaluation.miniature import MODEL_BYTES, PACE, Miniature, miniature
from evaluation.ours import Emulated, emulate, scores_alone
from evaluation.paper import POOL_PROCESSES, PaperRun, run_paper
from holdfast.simulate.evaluate import simulate
from holdfast.simulate.ideal import bound_of

COORDINATOR_MOST = 0.30
"""The most load of a core by the coordinator: above it, the emulated engines oversleep."""
WITHIN = 0.05
SPARE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of cluster.

    `times_paper`: the must against the paper's policy; None: no comparison.
    """

    nodes: int
    tasks: int | None
    pace: float
    times_paper: float | None

    def miniature(self, seed: int) -> Miniature:
        """Return the emulated cluster and workload."""
        return miniature(seed=seed, pace=self.pace, tasks=self.tasks).on(self.nodes)


# Fewer nodes have less to do in a second, which may be shorter then; one node has a quarter of the
# datasets.
FULL = (
    Setting(nodes=1, tasks=15, pace=PACE / 2, times_paper=None),
    Setting(nodes=4, tasks=None, pace=PACE / 2, times_paper=2.0),
    Setting(nodes=16, tasks=None, pace=PACE, times_paper=5.0),
)
QUICK = (Setting(nodes=2, tasks=4, pace=PACE / 4, times_paper=1.0),)


def rows(folder: Path, quiet: Quiet, *, quick: bool, rounds: int, seed: int) -> Iterator[Row]:
    """Yield all rows, size by size, with Holdfast and the paper's policy interleaved."""
    for setting in QUICK if quick else FULL:
        yield from _rows_of(setting, folder, quiet, rounds=rounds, seed=seed, quick=quick)


def _rows_of(
    setting: Setting, folder: Path, quiet: Quiet, *, rounds: int, seed: int, quick: bool
) -> Iterator[Row]:
    asks, kinds = not quick, (True,) if quick else (True, False)
    mini = setting.miniature(seed)
    bound_s = bound_of(mini.workload, mini.cluster).seconds
    truth = scores_alone(mini.workload)
    known = mini.workload.history(0.2, seed)
    predicted_s = {
        history: simulate(
            mini.workload, mini.cluster, history=known if history else (), seed=seed
        ).makespan_s
        for history in kinds
    }
    runs: dict[bool, list[Emulated]] = {True: [], False: []}
    papers: list[PaperRun] = []
    for number in range(rounds):
        for history in kinds:
            quiet.wait()
            place = folder / f"nodes-{setting.nodes}-{number}-{history}"
            timeout_s = SPARE_S + 3 * predicted_s[history]
            one = emulate(mini, history=history, folder=place, timeout_s=timeout_s, seed=seed)
            shutil.rmtree(place)
            runs[history].append(one)
            _say(
                setting,
                number,
                rounds,
                "history" if history else "no history",
                one.makespan_s,
                bound_s,
            )
        if setting.times_paper is not None:
            quiet.wait()
            place = folder / f"paper-{setting.nodes}-{number}"
            papers.append(run_paper(mini, place, timeout_s=SPARE_S + 20 * bound_s))
            shutil.rmtree(place)
            _say(setting, number, rounds, "the paper's policy", papers[-1].makespan_s, bound_s)
    everyone = runs[True] + runs[False]
    nodes = f"{setting.nodes} node{'s' * (setting.nodes > 1)}"
    peer_s = statistics.median(one.makespan_s for one in papers) if papers else None
    for history in kinds:
        name, most = ("history", 1.10) if history else ("no history", 1.30)
        makespan_s = statistics.median(one.makespan_s for one in runs[history])
        yield Row(measure=f"{nodes}, {name}: makespan (peer: the paper's policy; limit: the bound)",
                  ours=makespan_s, peer=peer_s, limit=bound_s, unit="s")  # fmt: skip
        yield Row(
            measure=f"{nodes}, {name}: makespan over bound",
            ours=makespan_s / bound_s,
            peer=None if peer_s is None else peer_s / bound_s,
            limit=1,
            unit="ratio",
            must=Must("<=", most) if asks else None,
        )
        yield Row(measure=f"{nodes}, {name}: makespan as simulated beforehand (limit: as emulated)",
                  ours=predicted_s[history], limit=makespan_s, unit="s")  # fmt: skip
        yield Row(
            measure=f"{nodes}, {name}: simulated over emulated makespan, off by",
            ours=abs(predicted_s[history] / makespan_s - 1),
            limit=0,
            unit="share",
            must=Must("<=", WITHIN) if asks else None,
        )
        yield Row(
            measure=f"{nodes}, {name}: the same of the round that it is furthest from",
            ours=max(abs(predicted_s[history] / one.makespan_s - 1) for one in runs[history]),
            limit=0,
            unit="share",
        )
        if history and peer_s is not None:
            yield Row(
                measure=f"{nodes}: times as fast as the paper's policy",
                ours=peer_s / makespan_s,
                limit=peer_s / bound_s,
                unit="x",
                must=Must(">=", setting.times_paper or 0.0) if asks else None,
            )
            pooled_s = statistics.median(one.pooled_s for one in papers)
            yield Row(
                measure=f"{nodes}: the same, were its metrics computed in {POOL_PROCESSES} processes a job",
                ours=pooled_s / makespan_s,
                limit=pooled_s / bound_s,
                unit="x",
            )
    yield Row(
        measure=f"{nodes}: bytes read from storage over the checkpoint's size, most of {len(everyone)} runs",
        ours=round(max(one.remote_bytes for one in everyone) / MODEL_BYTES, 3),
        peer=max((round(one.remote_bytes / MODEL_BYTES, 3) for one in papers), default=None),
        limit=1,
        unit="copies",
        must=Must("=", 1),
    )
    right = sum(
        scores == truth
        for scores in [one.scores for one in everyone] + [one.scores for one in papers]
    )
    yield Row(
        measure=f"{nodes}: runs with every score as computed alone, of {len(everyone) + len(papers)}",
        ours=right,
        limit=len(everyone) + len(papers),
        unit="runs",
        must=Must("=", len(everyone) + len(papers)),
    )
    yield Row(
        measure=f"{nodes}: the coordinator's CPU, most of {len(everyone)} runs",
        ours=max(one.coordinator_share for one in everyone),
        limit=None,
        unit="cores",
        must=Must("<=", COORDINATOR_MOST) if asks else None,
    )
    yield Row(
        measure=f"{nodes}: this machine's cores busy meanwhile, others' work included, median",
        ours=statistics.median(one.busy_share for one in everyone),
        unit="share",
    )


def _say(
    setting: Setting, number: int, rounds: int, what: str, makespan_s: float, bound_s: float
) -> None:
    say(
        f"{setting.nodes} nodes, round {number + 1} of {rounds}: {what}: {makespan_s:.1f} s, "
        f"{makespan_s / bound_s:.3f} of the bound"
    )
