"""Make notes about contradictory, missing, dropped and mended telemetry, with counts."""

import datetime as dt
from collections.abc import Iterator
from typing import Final

import numpy as np

from holdfast.core.words import plainly
from holdfast.trace.notes import Note
from holdfast.trace.telemetry.metrics import RATIO, Metric
from holdfast.trace.telemetry.scan import Scan

EXAMPLES: Final = 5
STUCK_H: Final = 1.0
"""Hours of equal values after which a device counts as stuck, for metrics that always vary."""


def unit_sentence(metric: Metric) -> str:
    """Return the sentence for a source that uses a coarser unit of the metric."""
    most, factor = metric.coarse or (1.0, RATIO)
    what = "ratios" if metric.unit == "%" else "MB/s"
    return f"no sample exceeded {most:,.0f}, so {metric.name} was read as {what} and multiplied by {factor:,.0f}."


def notes_of(scan: Scan, cluster: str) -> list[Note]:
    """Return the notes about one wide file."""
    if not scan.rows:
        return [empty_note(scan.wide.path.name, cluster)]
    return [*_of_values(scan, cluster), *_of_times(scan, cluster), *_of_devices(scan, cluster)]


def empty_note(name: str, cluster: str) -> Note:
    """Return the note about a telemetry source that has no samples."""
    sentence = f"{name}: the file has no samples."
    return Note(cluster=cluster, check="telemetry-empty", sentence=sentence, rows=0, action="kept")


def _of_values(scan: Scan, cluster: str) -> Iterator[Note]:
    metric, name = scan.metric, scan.wide.path.name
    if sentinels := scan.dropped["sentinel"]:
        sentence = f"{name}: {plainly(sentinels, 'sample')} held DCGM's marker for no value."
        yield Note(
            cluster=cluster,
            check="telemetry-sentinel",
            sentence=sentence,
            rows=sentinels,
            action="dropped",
        )
    if out := scan.dropped["out-of-range"]:
        between = f"{metric.low:g} to {metric.high:g} {metric.unit}"
        sentence = f"{name}: {plainly(out, 'sample')} of {metric.name} lay outside {between}."
        yield Note(
            cluster=cluster,
            check="telemetry-out-of-range",
            sentence=sentence,
            rows=out,
            action="dropped",
        )
    if scan.factor != 1:
        kept = int(scan.counts.result()[1].sum())
        sentence = f"{name}: {unit_sentence(metric)}"
        yield Note(
            cluster=cluster, check="telemetry-unit", sentence=sentence, rows=kept, action="mended"
        )


def _of_times(scan: Scan, cluster: str) -> Iterator[Note]:
    name = scan.wide.path.name
    if scan.duplicates:
        rows = len(scan.duplicates)
        sentence = (
            f"{name}: {plainly(rows, 'row')} repeated a time; the first row of each time was kept."
        )
        examples = tuple(_shown(at_us) for at_us in scan.duplicates[:EXAMPLES])
        yield Note(
            cluster=cluster, check="telemetry-duplicate-time", sentence=sentence, rows=rows, action="dropped",
            examples=examples,
        )  # fmt: skip
    if steps := scan.backward_steps:
        sentence = f"{name}: the clock stepped backwards {plainly(steps, 'time')} from one row to the next."
        yield Note(
            cluster=cluster,
            check="telemetry-clock-backwards",
            sentence=sentence,
            rows=steps,
            action="kept",
        )
    if len(scan.offsets) > 1:
        offsets = ", ".join(offset or "none" for offset in sorted(scan.offsets))
        sentence = f"{name}: its times have several offsets from UTC ({offsets}); a time without one was taken as UTC."
        yield Note(
            cluster=cluster,
            check="telemetry-offsets",
            sentence=sentence,
            rows=scan.rows,
            action="kept",
        )


def _of_devices(scan: Scan, cluster: str) -> Iterator[Note]:
    totals, names, file = scan.totals, scan.wide.devices, scan.wide.path.name
    if totals is None:
        return
    if len(silent := np.flatnonzero(totals.n == 0)):
        sentence = f"{file}: {len(silent):,} of {plainly(len(names), 'device')} never reported."
        yield _about(
            cluster,
            "telemetry-silent-device",
            sentence,
            len(silent),
            [names[i] for i in silent[:EXAMPLES]],
        )
    if count := int(totals.gaps.sum()):
        longest = [names[i] for i in np.argsort(-totals.gap_s)[:EXAMPLES] if totals.gaps[i]]
        gaps, hours = plainly(count, "gap"), totals.gap_s.sum() / 3600
        sentence = (
            f"{file}: {gaps} of more than two sampling intervals, {hours:,.1f} device hours in all."
        )
        yield _about(cluster, "telemetry-gap", sentence, count, longest)
    if not scan.metric.constant_is_normal and scan.wide.interval_s == scan.wide.interval_s:
        enough = totals.n * scan.wide.interval_s > STUCK_H * 3600
        if len(stuck := np.flatnonzero(enough & (totals.min == totals.max) & (totals.max != 0))):
            devices = plainly(len(stuck), "device")
            sentence = f"{file}: {devices} reported one and the same {scan.metric.name} throughout."
            yield _about(
                cluster,
                "telemetry-stuck",
                sentence,
                len(stuck),
                [names[i] for i in stuck[:EXAMPLES]],
            )


def _about(cluster: str, check: str, sentence: str, rows: int, examples: list[str]) -> Note:
    return Note(
        cluster=cluster,
        check=check,
        sentence=sentence,
        rows=rows,
        action="kept",
        examples=tuple(examples),
    )


def _shown(at_us: int) -> str:
    return dt.datetime.fromtimestamp(at_us / 1e6, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
