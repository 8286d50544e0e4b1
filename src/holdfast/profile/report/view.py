"""Phrase a summary as sentences and table rows, for the page, the terminal and a comparison."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.core import words
from holdfast.core.page import KeyFigure, TimeBars, time_bars
from holdfast.profile.columns import column
from holdfast.profile.formulas.pipeline import bubble_over_ideal
from holdfast.profile.report.charts import PHASE_COLOURS, one_a_stage
from holdfast.profile.report.summary import FORMULA, ProfileSummary

LONGEST_LIMIT: Final = 10
"""The most valleys that are listed individually."""
MEANINGS: Final = {
    "data": "waiting for the next batch",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer step",
    "communication": "collectives that no computation hides",
    "checkpoint_stall": "training stood still for a save",
    "evaluation": "evaluation between steps",
    "load": "weights are read",
    "preprocess": "requests are built and tokenized",
    "prefill": "prompts are read by the model",
    "decode": "answers are generated",
    "metric": "answers are scored",
    "incident": "an incident of the run",
    "pipeline_bubble": "a stage waits for another stage",
    "unknown": "no phase and no incident covers most of it",
    "between phases": "no phase was recorded",
}


@dataclass(frozen=True, kw_only=True)
class ValleyRow:
    """Hold one idle valley, formatted as text."""

    at: str
    length: str
    where: str
    cause: str
    covered: str


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Hold the memory of one rank beside the theory, formatted as text."""

    rank: str
    stage: str
    measured: str
    reserved: str
    theory: str
    residual: str


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Hold one figure of two runs, formatted as text."""

    name: str
    one: str
    other: str
    change: str


def headline(summary: ProfileSummary) -> str:
    """Return the main result in one line: speed, share of the peak, share of idle time."""
    parts = [f"{percent(share)} {name}" for name, share in evaluation_shares(summary)]
    if summary.utilization is not None:
        parts.append(f"{percent(summary.utilization.mfu_causal)} MFU (causal)")
    if summary.speed is not None:
        speed = summary.speed
        rate = speed.tokens_per_s
        parts.append(
            f"{words.duration(speed.median_step_s)} a step"
            if rate is None
            else f"{_rate(rate)} tokens/s"
        )
    if summary.idle_share is not None:
        device = "GPU" if summary.valleys.metric in ("gpu_sm_active", "gpu_utilization") else "CPU"
        parts.append(f"{device} idle for {percent(summary.idle_share)} of the time")
    return ", ".join(parts) or f"{words.duration(summary.wall_s)} recorded, nothing measured"


def context(summary: ProfileSummary) -> str:
    """Return one sentence about the size of the recording."""
    recording = summary.recording
    devices = {(one.node, one.device) for one in recording.series if one.device is not None}
    nodes = {one.node for one in recording.series} | {*column(recording.spans, "node")}
    counted = ((len(recording.ranks), "rank"), (len(devices), "GPU"), (len(nodes), "node"))
    parts = [words.count(number, of) for number, of in counted if number]
    parts.append(words.duration(summary.wall_s))
    if summary.job is not None:
        parts.append(f"{summary.job.model.parameters / 1e9:.1f}{words.NBSP}B parameters")
        parts.append(f"a job of {words.count(summary.job.layout.gpus, 'GPU')}")
    return "Recorded: " + ", ".join(parts) + "."


def evaluation_shares(summary: ProfileSummary) -> list[tuple[str, float]]:
    """Return the shares of an evaluation's time: loading, inference and scoring.

    Returns:
        A name and a share from 0 to 1 for each; empty if the recording is of training.
    """
    if not summary.evaluation:
        return []
    shares = {phase.name: phase.share for phase in summary.phases}
    parts = {
        "load and preprocess": ("load", "preprocess"),
        "inference": ("prefill", "decode"),
        "metric": ("metric",),
    }
    return [(name, sum(shares.get(one, 0.0) for one in of)) for name, of in parts.items()]


def key_figures(summary: ProfileSummary) -> list[KeyFigure]:
    """Return the key figures for the top of the page."""
    figures = [
        KeyFigure(name, percent(share), "of the time") for name, share in evaluation_shares(summary)
    ]
    if summary.speed is not None:
        step = words.duration(summary.speed.median_step_s)
        figures.append(KeyFigure("median step", step, words.count(summary.speed.steps, "step")))
        if summary.speed.tokens_per_s is not None:
            figures.append(KeyFigure("tokens/s", _rate(summary.speed.tokens_per_s), "whole job"))
    if summary.utilization is not None:
        use = summary.utilization
        note = f"full {percent(use.mfu_full)}"
        figures.append(KeyFigure("MFU, causal", percent(use.mfu_causal), note))
        note = f"full {percent(use.hfu_full)}"
        figures.append(KeyFigure("HFU, causal", percent(use.hfu_causal), note))
    if summary.idle_share is not None:
        note = words.count(len(summary.valleys.found), "valley")
        figures.append(KeyFigure("idle", percent(summary.idle_share), note))
    if summary.memory:
        peak = max(one.peak_bytes for one in summary.memory)
        figures.append(KeyFigure("peak memory", words.size(peak), "fullest rank"))
    if summary.energy is not None:
        energy = summary.energy
        whole = energy.joules_a_step is None
        joules = energy.joules if energy.joules_a_step is None else energy.joules_a_step
        name = "energy" if whole else "energy a step"
        figures.append(KeyFigure(name, _joules(joules), words.count(energy.gpus, "recorded GPU")))
    return figures


def valley_bars(summary: ProfileSummary) -> TimeBars:
    """Return the seconds of idle valleys by cause, as bars."""
    return time_bars(
        [
            (_colour(cause), cause.replace("_", " "), MEANINGS.get(cause, ""), seconds)
            for cause, seconds in summary.valleys.seconds_by_cause().items()
        ]
    )


def longest_valleys(summary: ProfileSummary) -> list[ValleyRow]:
    """Return the `LONGEST_LIMIT` longest valleys, the longest first."""
    longest = sorted(summary.valleys.found, key=lambda one: (-one.seconds, one.start_ns))
    return [
        ValleyRow(
            at=words.duration((one.start_ns - summary.start_ns) / 1e9),
            length=words.duration(one.seconds),
            where=(f"rank {one.rank}" if one.rank is not None else one.node)
            + ("" if one.device is None else f", GPU {one.device}"),
            cause=one.cause.replace("_", " ") + (f" {one.detail}" if one.detail else ""),
            covered=percent(one.covered),
        )
        for one in longest[:LONGEST_LIMIT]
    ]


def phase_bars(summary: ProfileSummary) -> TimeBars:
    """Return the seconds of each phase, averaged over the ranks, with the share of idle time."""
    return time_bars(
        [
            (
                _colour(phase.name),
                phase.name.replace("_", " "),
                MEANINGS.get(phase.name, "")
                + (
                    ""
                    if phase.idle_share is None
                    else f"; device idle for {percent(phase.idle_share)} of it"
                ),
                phase.seconds,
            )
            for phase in summary.phases
        ]
    )


def memory_rows(summary: ProfileSummary) -> list[MemoryRow]:
    """Return the table of memory: the rank with the highest peak of each stage.

    If the stages are unknown, the table has the first ranks.
    """
    return [
        MemoryRow(
            rank=str(one.rank),
            stage="" if one.stage is None else str(one.stage),
            measured=words.size(one.peak_bytes),
            reserved=words.size(one.reserved_bytes),
            theory="" if one.theory is None else words.size(round(one.theory.total)),
            residual=""
            if one.residual_bytes is None
            else ("-" if one.residual_bytes < 0 else "+")
            + words.size(abs(round(one.residual_bytes))),
        )
        for one in one_a_stage(summary.memory)
    ]


def formulas(summary: ProfileSummary) -> list[tuple[str, str]]:
    """Return the formulas and inputs behind the figures, as pairs of a name and a text."""
    valleys = summary.valleys
    rows = []
    if valleys.metric is not None:
        rule = f"two samples or more of {valleys.metric} below 10 % of the median"
        rows.append(("Idle valley", f"{rule}, which is {valleys.median:.1f} %"))
    if summary.job is not None:
        model, layout = summary.job.model, summary.job.layout
        shape = f"{model.layers} layers, hidden {model.hidden}, {model.heads} heads"
        rows.append(("Model", f"{shape}, vocabulary {model.vocabulary}"))
        degrees = f"tensor {layout.tensor}, pipeline {layout.pipeline}, data {layout.data}"
        rest = f"ZeRO {layout.zero}, recompute {layout.recompute}"
        rows.append(("Layout", f"{layout.gpus} GPUs: {degrees}, {rest}"))
        if layout.pipeline > 1:
            bubble = bubble_over_ideal(layout.pipeline, layout.microbatches, layout.chunks)
            rows.append(("Bubble in theory", f"(p - 1)/(v·m) = {percent(bubble)} of the busy time"))
    if summary.speed is not None:
        rows.append(("Steps", f"from {summary.speed.source.replace('_', ' ')}"))
    if summary.utilization is not None:
        rows.append(("MFU", f"{FORMULA}, times tokens/s a GPU, over the peak"))
        rows.append(("HFU", "as MFU, with the forward passes that are computed again"))
        peak = summary.utilization.peak
        rows.append(("Peak", f"{peak.tflops:g} TFLOP/s, {peak.source}"))
    if summary.energy is not None:
        rows.append(("Energy", f"from {summary.energy.source}"))
    return rows


def sources(summary: ProfileSummary) -> list[tuple[str, str, str, str]]:
    """Return each metric with its unit, its source and its sample interval."""
    rows = {
        (one.metric, one.unit, one.source, f"{one.interval_s:g} s")
        for one in summary.recording.series
    }
    return sorted(rows)


def comparison(one: ProfileSummary, other: ProfileSummary) -> list[Compared]:
    """Return the figures of two runs side by side, except figures that neither run has."""
    rows = []
    for name, of, shown in _figures():
        left, right = of(one), of(other)
        if left is None and right is None:
            continue
        change = "" if not left or right is None else f"{100 * (right / left - 1):+.1f} %"
        rows.append(
            Compared(
                name=name,
                one="" if left is None else shown(left),
                other="" if right is None else shown(right),
                change=change,
            )
        )
    causes = dict.fromkeys((*one.valleys.seconds_by_cause(), *other.valleys.seconds_by_cause()))
    for cause in causes:
        shares = [
            run.valleys.seconds_by_cause().get(cause, 0.0) / run.valleys.watched_s
            if run.valleys.watched_s
            else 0.0
            for run in (one, other)
        ]
        rows.append(
            Compared(
                name=f"idle: {cause.replace('_', ' ')}",
                one=percent(shares[0]),
                other=percent(shares[1]),
                change="",
            )
        )
    return rows


def sentences(summary: ProfileSummary) -> Iterator[str]:
    """Yield the lines that the terminal shows."""
    yield f"{summary.name}: {headline(summary)}"
    yield context(summary)
    for figure in key_figures(summary):
        yield f"  {figure.name:<16}{figure.value}" + (f"  ({figure.note})" if figure.note else "")
    by_cause = summary.valleys.seconds_by_cause()
    if by_cause:
        yield "Idle by cause:"
        total_s = sum(by_cause.values())
        for cause, seconds in by_cause.items():
            name = cause.replace("_", " ")
            yield f"  {name:<16}{words.duration(seconds)}  ({percent(seconds / total_s)})"
    for reason in summary.missing:
        yield f"Missing: {reason}"


def percent(share: float) -> str:
    """Return a share in percent, to one decimal."""
    return f"{100 * share:.1f}{words.NBSP}%"


def _figures() -> tuple[
    tuple[str, Callable[[ProfileSummary], float | None], Callable[[float], str]], ...
]:
    return (
        ("median step", lambda run: run.speed and run.speed.median_step_s, words.duration),
        ("tokens/s", lambda run: run.speed and run.speed.tokens_per_s, _rate),
        ("MFU, causal", lambda run: run.utilization and run.utilization.mfu_causal, percent),
        ("MFU, full", lambda run: run.utilization and run.utilization.mfu_full, percent),
        ("HFU, causal", lambda run: run.utilization and run.utilization.hfu_causal, percent),
        ("mean activity", mean_activity, lambda value: f"{value:.1f}{words.NBSP}%"),
        ("idle", lambda run: run.idle_share, percent),
        (
            "peak memory",
            lambda run: max((one.peak_bytes for one in run.memory), default=None),
            lambda value: words.size(round(value)),
        ),
        ("energy a step", lambda run: run.energy and run.energy.joules_a_step, _joules),
    )


def mean_activity(summary: ProfileSummary) -> float | None:
    """Return the mean of all samples of the activity metric, in %; None without samples."""
    if summary.valleys.metric is None:
        return None
    series = summary.recording.of(summary.valleys.metric)
    values = sum(len(one.values) for one in series)
    return sum(sum(one.values) for one in series) / values if values else None


def _colour(name: str) -> str:
    return f"phase-{name if name in PHASE_COLOURS else 'unknown'}"


def _rate(value: float) -> str:
    return f"{value:,.0f}".replace(",", words.NBSP)


def _joules(value: float) -> str:
    if value < 999.5:
        return f"{value:.0f}{words.NBSP}J"
    return f"{value / 1000:.1f}{words.NBSP}kJ"
