"""Measure the idle time of engines between the checkpoints of a stream."""

import itertools
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from common.jobs import say
from common.machine import Quiet
from common.table import Must, Row
from evaluation.miniature import MODEL_BYTES, PACE, miniature
from evaluation.ours import Emulated, emulate, scores_alone
from holdfast.simulate.evaluate import simulate

ALLOWED_S = 0.5
"""The allowed time beyond the swap."""
SPARE_S = 60.0


def rows(folder: Path, quiet: Quiet, *, quick: bool, rounds: int, seed: int) -> Iterator[Row]:
    """Yield gaps, loading, bytes and scores of checkpoints that arrive while the first runs."""
    models, nodes, tasks = (2, 1, 4) if quick else (4, 4, 20)
    mini = (
        miniature(seed=seed, pace=PACE / 8 if quick else PACE / 2, tasks=tasks).on(nodes).of(models)
    )
    truth = scores_alone(mini.workload)
    known = mini.workload.history(0.2, seed)
    predicted_s = simulate(mini.workload, mini.cluster, history=known, seed=seed).makespan_s
    runs: list[Emulated] = []
    for number in range(rounds):
        quiet.wait()
        place = folder / f"stream-{number}"
        runs.append(
            emulate(
                mini, history=True, folder=place, timeout_s=SPARE_S + 3 * predicted_s, seed=seed
            )
        )
        shutil.rmtree(place)
        say(
            f"stream, round {number + 1} of {rounds}: {max(gaps_s(runs[-1])):.2f} s the longest gap"
        )
    swap_s = mini.cluster.swap_s
    named = f"{models} checkpoints, {nodes} node{'s' * (nodes > 1)}, {mini.cluster.engines} engines"
    all_gaps_s = [gap_s for one in runs for gap_s in gaps_s(one)]
    yield Row(
        measure=f"{named}: gap of an engine, median (limit: the swap)",
        ours=statistics.median(all_gaps_s),
        limit=swap_s,
        unit="s",
    )
    yield Row(
        measure=f"{named}: gap of an engine, longest of {len(all_gaps_s)} (limit: the swap)",
        ours=max(all_gaps_s),
        limit=swap_s,
        unit="s",
        must=None if quick else Must("<=", round(swap_s + ALLOWED_S, 6)),
    )
    late_s = max(max(0.0, late) for one in runs for late in loaded_late_s(one))
    yield Row(
        measure=f"{named}: loading that was not hidden, most",
        ours=late_s,
        limit=0,
        unit="s",
        must=None if quick else Must("<=", 0),
    )
    yield Row(
        measure=f"{named}: engines started anew for a checkpoint, most of a run",
        ours=max(restarts(one) for one in runs),
        limit=0,
        unit="engines",
    )
    yield Row(
        measure=f"{named}: makespan of all as simulated beforehand (limit: as emulated)",
        ours=predicted_s,
        limit=statistics.median(one.makespan_s for one in runs),
        unit="s",
    )
    yield Row(
        measure=f"{named}: bytes read from storage over the checkpoints' size, most of a run",
        ours=round(max(one.remote_bytes for one in runs) / (models * MODEL_BYTES), 3),
        limit=1,
        unit="copies",
        must=Must("=", 1),
    )
    right = sum(one.scores == truth for one in runs)
    yield Row(measure=f"{named}: runs with every score as computed alone, of {rounds}", ours=right, limit=rounds,
              unit="runs", must=Must("=", rounds))  # fmt: skip


def gaps_s(run: Emulated) -> list[float]:
    """Return each engine's time between its last answer to a model and its first to the next."""
    spans: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for span in run.timeline.requests:
        first, last = spans[span.engine].get(span.model, (span.t0, span.t1))
        spans[span.engine][span.model] = min(first, span.t0), max(last, span.t1)
    return [
        later[0] - earlier[1]
        for by_model in spans.values()
        for earlier, later in itertools.pairwise(sorted(by_model.values()))
    ]


def loaded_late_s(run: Emulated) -> list[float]:
    """Return each node's delay of a model's weights after the last answer of the model before."""
    last_answer_s: dict[int, float] = {}
    for span in run.timeline.requests:
        last_answer_s[span.model] = max(last_answer_s.get(span.model, 0.0), span.t1)
    fetches = [span for span in run.timeline.nodes if span.what == "fetch" and span.model > 0]
    return [span.t1 - last_answer_s[span.model - 1] for span in fetches] or [0.0]


def restarts(run: Emulated) -> int:
    """Count the engines loaded for a later model; a spare that certifies swaps does not count."""
    return sum(span.what == "load" and span.model > 0 for span in run.timeline.engines)
