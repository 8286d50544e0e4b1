"""Compute the texts and figures of each section, so that the template only places them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from holdfast.core import words
from holdfast.core.accounting import LOST_CAUSES, AttemptCheckpoints, LostCause, RunSummary
from holdfast.core.page import KeyFigure, TimeBars, time_bars
from holdfast.ui.cards import Card, incident_card
from holdfast.ui.charts import loss_chart, time_line
from holdfast.ui.headline import context, headline, key_figures
from holdfast.ui.metric_charts import MetricChart, metric_charts

CARDS_LIMIT = 100
WHOLE = re.compile(r"(\d+ \S+|[^\s-]+-\S+)")
"""Match a text that must stay on one line: a number with its noun, or a word with a hyphen."""

CAUSES = {
    "productive": ("Steps that survive", "training time of the final state"),
    "lost": ("Lost steps", "executed and rolled back, or broken off"),
    "detecting": ("Detecting", "from a fault to its detection"),
    "restarting": ("Restarting", "from a detection to the next completed step"),
    "starting": ("First start", "from the start to the first completed step"),
    "checkpoint": ("Checkpoint stalls", "training stood still for a save"),
    "other": ("Evaluation and other", "sections without steps, and the run's end"),
}


COLOURS: Mapping[LostCause, str] = {
    "trained": "productive",
    "steps_again": "lost",
    "saves": "checkpoint",
    "sections": "other",
    "detection": "detecting",
    "not_running": "other",
    "after_end": "other",
    "unexplained": "other",
}
"""The timeline cause whose colour each cause of the account uses.

Causes that are not listed belong to a restart and use its colour.
"""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of comparing the final weights with the weights of the reference run."""

    identical: bool
    rows: tuple[tuple[str, str], ...]
    sha256: str
    reference_sha256: str
    reference_run: str


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The texts and figures that the page shows about one run."""

    key: str
    """A prefix, unique on the page, of the ids of the run's elements."""
    run_id: str
    state: str
    headline: str
    headline_parts: Sequence[tuple[str, bool]]
    """The parts of the headline, each with True if it must stay on one line."""
    context: str
    key_figures: list[KeyFigure]
    outcome: str
    exit_code: int | None
    loss_charts: Sequence[tuple[str, Markup]]
    metrics: tuple[MetricChart, ...]
    time_lines: Sequence[tuple[str, Markup]]
    legend: Sequence[tuple[str, str]]
    """The causes that the timeline shows, each with its name."""
    has_lost: bool
    has_validation: bool
    cards: tuple[Card, ...]
    cards_left_out: int
    stalls: tuple[Mapping[str, str], ...]
    stall_note: str
    times: TimeBars
    rank_times: TimeBars
    """Bars of the lost-time account, as the mean over the ranks."""
    ettr: str
    proof: Proof | None
    origin: tuple[tuple[str, str], ...]


def run_view(summary: RunSummary, *, key: str, home: Path | None = None) -> RunView:
    """Collect everything that a page shows about one run.

    `home` is the folder above the run's folder, where the logs are (see `incident_card`).

    Raises:
        HoldfastError: matplotlib is not installed.
    """
    drawn = {phase.cause for phase in summary.phases}
    times = _times(summary)
    answer = headline(summary)
    productive = next(bar for bar in times.bars if bar.key == "productive")
    return RunView(
        key=key,
        run_id=summary.run.run_id,
        state=summary.run.state,
        headline=answer,
        headline_parts=[
            (part, bool(WHOLE.fullmatch(part))) for part in WHOLE.split(answer) if part
        ],
        context=context(summary),
        key_figures=key_figures(summary),
        outcome=summary.run.outcome,
        exit_code=summary.run.exit_code,
        loss_charts=_both_widths(loss_chart, summary, f"{key}-loss"),
        metrics=metric_charts(summary),
        time_lines=_both_widths(time_line, summary, f"{key}-time"),
        legend=[(cause, name) for cause, (name, _) in CAUSES.items() if cause in drawn],
        has_lost=bool(summary.loss.lost),
        has_validation=bool(summary.loss.validation),
        cards=tuple(
            incident_card(cost, summary, home=home) for cost in summary.incidents[:CARDS_LIMIT]
        ),
        cards_left_out=max(0, len(summary.incidents) - CARDS_LIMIT),
        stalls=tuple(_stalls(row) for row in _with_overall(summary)),
        stall_note=_stall_note(summary),
        times=times,
        rank_times=_rank_times(summary),
        ettr=f"{productive.amount} {times.unit} ÷ {times.total} {times.unit} = {words.percent(summary.ettr)}",
        proof=None if summary.proof is None else _proof(summary.proof),
        origin=_origin(summary),
    )


def _both_widths(draw: Any, summary: RunSummary, name: str) -> Sequence[tuple[str, Markup]]:
    """Draw a chart twice, for a wide page and for a phone; CSS shows one of the two."""
    drawings = []
    for width in ("wide", "narrow"):
        svg = draw(summary, name=f"{name}-{width}", narrow=width == "narrow")
        if svg is not None:
            drawings.append((width, Markup(svg)))  # drawn by matplotlib; `charts` escapes the label
    return drawings


def _with_overall(summary: RunSummary) -> Iterable[AttemptCheckpoints]:
    rows = summary.checkpoints
    return [*rows.by_attempt, *([rows.overall] if rows.overall else [])]


def _stalls(row: AttemptCheckpoints) -> Mapping[str, str]:
    return {
        "attempt": "all" if row.attempt == 0 else str(row.attempt),
        "count": str(row.count),
        "steps": f"{row.first_step}\N{EN DASH}{row.last_step}"
        if row.first_step != row.last_step
        else str(row.first_step),
        "median": f"{row.median_stall_s * 1000:.0f}",
        "mean": f"{row.mean_stall_s * 1000:.0f}",
        "max": f"{row.max_stall_s * 1000:.0f}",
        "total": f"{row.total_stall_s:.2f}",
        "size": words.size(row.size_bytes),
    }


def _stall_note(summary: RunSummary) -> str:
    rows = summary.checkpoints
    note = f"Training stood still for {words.percent(rows.share_of_wall)} of the wall time."
    return note + (
        f" {words.count(rows.damaged, 'checkpoint')} found damaged since." if rows.damaged else ""
    )


def _times(summary: RunSummary) -> TimeBars:
    return time_bars(
        [
            (str(cause), *CAUSES[str(cause)], part_s)
            for cause, part_s in summary.breakdown.by_cause().items()
        ],
        longest_s=summary.wall_s,
    )


def _rank_times(summary: RunSummary) -> TimeBars:
    lost = summary.lost_time
    return time_bars(
        [
            (
                COLOURS.get(cause, "restarting"),
                cause.replace("_", " ").capitalize(),
                meaning,
                lost.by_cause[cause] / lost.ranks,
            )
            for cause, meaning in LOST_CAUSES.items()
            if cause in lost.by_cause
        ],
        longest_s=summary.wall_s,
    )


def _proof(data: Mapping[str, Any]) -> Proof:
    rows = []
    if isinstance(data.get("step"), int):
        rows.append(("Step compared", str(data["step"])))
    if isinstance(data.get("tensors"), int):
        rows.append(("Tensors", words.count(data["tensors"], "tensor")))
    if isinstance(data.get("bytes"), int):
        rows.append(
            ("Bytes hashed", f"{words.count(data['bytes'], 'byte')} ({words.size(data['bytes'])})")
        )
    if data.get("loaded_with"):
        rows.append(("Loaded with", str(data["loaded_with"])))
    return Proof(
        identical=data.get("identical") is True,
        rows=tuple(rows),
        sha256=str(data.get("sha256", "")),
        reference_sha256=str(data.get("reference_sha256", "")),
        reference_run=str(data.get("reference_run", "")),
    )


def _origin(summary: RunSummary) -> tuple[tuple[str, str], ...]:
    run = summary.run
    step = "unknown" if summary.median_step_s is None else words.duration(summary.median_step_s)
    return (
        ("Run", run.run_id),
        ("Command", " ".join(run.command)),
        ("Host", run.host),
        ("Folder", run.cwd),
        ("Started", words.moment(run.started_at_s)),
        ("Ended", "still running" if run.ended_at_s is None else words.moment(run.ended_at_s)),
        ("Exit code", "none yet" if run.exit_code is None else str(run.exit_code)),
        ("Median step", step),
    )
