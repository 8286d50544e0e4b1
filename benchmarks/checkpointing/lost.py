"""Measure the training time lost to a save: ours and the peers', each case in its own process.

Lost time is the wall time of the steps with a save, less the time of as many steps before and after
without one. It counts from the call to the end of the step after the one in which the save became
durable, ten steps at most. So it includes the wait of a later save and the fence before the
optimizer's step. On a shared machine a step sometimes takes longer than a save costs. Hence the
figures are medians, of many measurements where little is lost.
"""

import shutil
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpointing import training
from checkpointing.child import in_child
from checkpointing.savers import ATTESTED, OURS, SHORT, WRITTEN
from checkpointing.sizes import Sizes, Training
from common.jobs import DoesNotWork, say
from common.machine import Quiet
from common.table import Must, Row

RESOLUTION_S = 0.05
"""The least lost time in a ratio: less is noise."""

TIMES = {
    "lost_s": "lost",
    "call_s": "call",
    "fence_s": "fence",
    "durable_s": "durable after",
    "first_s": "the first save durable after",
}


class Found:
    """The measurements of each case's processes, and the reasons for cases that do not run."""

    def __init__(self) -> None:
        self.times: dict[str, dict[str, list[Any]]] = {}
        self.reasons: dict[str, str] = {}

    def add(self, saver: str, answer: dict[str, Any]) -> None:
        """Add the answer of one process."""
        times = self.times.setdefault(saver, {})
        for name, value in answer.items():
            times.setdefault(name, []).extend(value if isinstance(value, list) else [value])

    def median(self, saver: str, name: str) -> float:
        """Return the median of all processes of a case."""
        return float(statistics.median(self.times[saver][name]))

    def best_peer(self, name: str) -> float | None:
        """Return the lowest figure of the peers; None if no peer runs."""
        return min(
            (self.median(saver, name) for saver in self.times if saver not in SHORT), default=None
        )


def large_rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Measure a state of a few hundred large tensors, in a model that trains."""
    found = find(folder, quiet, sizes.lost, rounds)
    yield from _about(found)
    peer_s, ours_s, least_s = (
        found.best_peer("lost_s"),
        found.median(OURS, "lost_s"),
        found.median(WRITTEN, "lost_s"),
    )
    written = "lost a save (limit: where a process only writes as much)"
    yield Row(
        measure=written, ours=ours_s, peer=peer_s, limit=least_s, unit="s", must=Must("<=", 0.15)
    )
    attested_s = found.median(ATTESTED, "lost_s")
    yield Row(
        measure="lost a save, attested",
        ours=attested_s,
        peer=peer_s,
        limit=least_s,
        unit="s",
        must=Must("<=", 0.35),
    )
    if peer_s is not None:
        ratio = peer_s / max(ours_s, RESOLUTION_S)
        yield Row(
            measure="lost a save: best peer ÷ ours",
            ours=ratio,
            peer=1,
            unit="ratio",
            must=Must(">=", 15),
        )
    yield call_row(found)
    yield from each(found, TIMES)


def many_rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Measure a state of very many small tensors, under a low limit of open files."""
    found = find(folder, quiet, sizes.many, rounds)
    yield from _about(found)
    ours_s, peer_s = found.median(OURS, "lost_s"), found.best_peer("lost_s")
    yield Row(
        measure="lost a save", ours=ours_s, peer=peer_s, limit=0, unit="s", must=Must("<=", 0.25)
    )
    yield Row(
        measure="longest gap of the main thread (limit: without a save)",
        ours=found.median(OURS, "gap_s") * 1000,
        peer=_ms(found.best_peer("gap_s")),
        limit=found.median(OURS, "plain_gap_s") * 1000,
        unit="ms",
        must=Must("<=", 20),
    )
    grown = max(found.times[OURS]["files"])
    yield Row(measure="growth of open files", ours=grown, peer=found.best_peer("files"), limit=0, unit="files",
              must=Must("=", 0))  # fmt: skip
    yield call_row(found)
    yield from each(found, {**TIMES, "gap_s": "longest gap"})


def find(folder: Path, quiet: Quiet, size: Training, rounds: int) -> Found:
    """Run every case in turn; report a case that does not run, and skip it in later rounds.

    Raises:
        DoesNotWork: Holdfast's case does not run.
    """
    found, amount = Found(), size.amount
    if size.forward_backward_s is not None:
        amount = in_child(training.calibrate, folder / "calibrate", **size.calibration())
    for number in range(rounds):
        # The first case changes each round, so that a drift of the machine affects all cases.
        first = number % len(size.savers)
        for saver in (*size.savers[first:], *size.savers[:first]):
            if saver in found.reasons:
                continue
            quiet.wait()
            place = folder / "case"
            try:
                answer = in_child(
                    training.measure,
                    place,
                    launcher=size.launcher,
                    **size.measurement(saver, place, amount),
                )
            except DoesNotWork as error:
                if saver in SHORT:
                    raise
                found.reasons[saver] = str(error)
                say(f"{saver}: {error}")
            else:
                found.add(saver, answer)
                say(f"{saver}: lost {statistics.median(answer['lost_s']):.2f} s a save")
            finally:
                shutil.rmtree(place)
    return found


def call_row(found: Found) -> Row:
    """Return the time for which `save` blocks the script."""
    calls_s = found.times[OURS]["every_call_s"]
    return Row(
        measure=f"blocking call, 99th percentile of {len(calls_s)} (peer: median)",
        ours=percentile_99(calls_s) * 1000,
        peer=_ms(found.best_peer("call_s")),
        unit="ms",
        must=Must("<=", 5),
    )


def percentile_99(values: list[float]) -> float:
    """Interpolate between neighbouring values."""
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


def _about(found: Found) -> Iterator[Row]:
    """Yield the trained model, and the spread of Holdfast's figures."""
    yield Row(measure="state", ours=found.median(OURS, "state_bytes") / 1e9, unit="GB")
    yield Row(
        measure="forward and backward, median",
        ours=found.median(OURS, "forward_backward_s"),
        unit="s",
    )
    first, _, third = statistics.quantiles(found.times[OURS]["lost_s"], n=4)
    for name, lost_s in (("first", first), ("third", third)):
        yield Row(measure=f"lost a save, {name} quartile", ours=lost_s, unit="s")


def each(found: Found, named: Mapping[str, str]) -> Iterator[Row]:
    """Yield medians of every case, or the reason for none."""
    yield from (
        Row(measure=f"{name}, median, attested", ours=found.median(ATTESTED, times), unit="s")
        for times, name in named.items()
        if ATTESTED in found.times
    )
    for saver in found.times:
        if saver not in SHORT:
            for times, name in named.items():
                ours, theirs = found.median(OURS, times), found.median(saver, times)
                yield Row(measure=f"{name}, median [{saver}]", ours=ours, peer=theirs, unit="s")
    for saver, reason in found.reasons.items():
        yield Row(measure=f"[{saver}] does not run: {reason}", unit="")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
