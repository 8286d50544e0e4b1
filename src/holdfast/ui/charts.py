"""Draw the two charts of a run: the loss over the steps, and the attempts over time."""

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.core import page, words
from holdfast.core.accounting import Point, RunSummary
from holdfast.core.page import new_figure, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS_LIMIT = 800
"""The most points drawn of a curve; more points than pixels would only make the file larger."""
ROWS_LIMIT = 60
"""The most attempts that are drawn; the newest attempts are chosen."""
TALLEST_IN = 9.0
BADGES_LIMIT = 40
BADGE_LEVELS = 4


def loss_chart(summary: RunSummary, *, name: str, narrow: bool) -> str | None:
    """Draw the loss curve with lost segments, validation points and incidents.

    Returns:
        The chart as an `<svg>` element; None if no loss was reported.
    """
    curve = summary.loss
    finite = [point for point in curve.surviving if math.isfinite(point.value)]
    if not finite and not curve.lost and not curve.validation:
        return None
    figure = new_figure(4.3, 3.5) if narrow else new_figure(9.6, 3.9)
    axes = _axes(figure)
    for segment in curve.lost:
        # Broad and faint: if a job repeats its steps exactly, the surviving line covers the lost
        # line.
        _line(axes, segment.points, colour="lost", width=5.0, opacity=0.45)
    _line(axes, curve.surviving, colour="productive", width=1.3, opacity=1.0)
    points = [point for point in _thinned(curve.validation) if math.isfinite(point.value)]
    axes.plot(
        [point.step for point in points],
        [point.value for point in points],
        linestyle="none",
        marker="o",
        markersize=5.5,
        markerfacecolor=COLOUR["paper"],
        markeredgecolor=COLOUR["ink"],
        markeredgewidth=1.2,
        zorder=4,
    )
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.margins(x=0.015)
    _mark_incidents(axes, summary, narrow=narrow)
    label = html.escape(
        f"Loss over steps of run {summary.run.run_id}, with {words.count(len(summary.incidents), 'incident')} marked"
    )
    return inline_svg(figure, name=name, label=label)


def time_line(summary: RunSummary, *, name: str, narrow: bool) -> str | None:
    """Draw one bar for each attempt over the wall time; return None if no time has passed."""
    if not summary.phases:
        return None
    numbers = sorted({phase.attempt for phase in summary.phases})[-ROWS_LIMIT:]
    rows = {number: row for row, number in enumerate(numbers)}
    height_in = min(TALLEST_IN, 0.95 + 0.36 * len(numbers))
    width_in = 4.3 if narrow else 9.6
    figure = new_figure(width_in, height_in)
    axes = _axes(figure)
    unit, unit_s = words.unit_of_time(summary.wall_s)
    for phase in summary.phases:
        if phase.attempt in rows:
            axes.broken_barh(
                [(phase.start_s / unit_s, (phase.end_s - phase.start_s) / unit_s)],
                (rows[phase.attempt] - 0.31, 0.62),
                facecolors=COLOUR[phase.cause],
                edgecolors=COLOUR["paper"],
                linewidth=0.4,
                zorder=3,
            )
    _mark_ends(axes, summary, rows, unit_s)
    starts = {attempt.number: attempt.start_step for attempt in summary.attempts}
    every = max(1, math.ceil(len(numbers) / 26))
    shown = numbers[::every]
    labels = [
        f"{number}" if starts.get(number) is None else f"{number}, from step {starts[number]}"
        for number in shown
    ]
    axes.set_yticks(
        [rows[number] for number in shown],
        [label.split(",")[0] for label in labels] if narrow else labels,
    )
    axes.set_ylim(len(numbers) - 0.45, -0.55)
    axes.set_ylabel("attempt")
    axes.set_xlabel(f"time since the first start ({unit})")
    axes.set_xlim(0, max(summary.wall_s, 1e-3) / unit_s * 1.03)
    axes.grid(visible=False, axis="y")
    label = html.escape(
        f"Timeline of run {summary.run.run_id}: {words.count(len(summary.attempts), 'attempt')}"
    )
    return inline_svg(figure, name=name, label=label)


def _axes(figure: Any) -> "Axes":
    axes: Axes = figure.add_subplot()
    figure.patch.set_alpha(0)
    plain_axes(axes, COLOUR)
    return axes


def _line(
    axes: "Axes", points: Sequence[Point], *, colour: str, width: float, opacity: float
) -> None:
    thin = _thinned(points)
    axes.plot(
        [point.step for point in thin],
        # A gap where the loss was not a number.
        [point.value if math.isfinite(point.value) else math.nan for point in thin],
        color=COLOUR[colour],
        linewidth=width,
        alpha=opacity,
        solid_joinstyle="round",
        # A single point is no line; it shows as a dot.
        marker="." if len(thin) == 1 else None,
    )


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return at most `POINTS_LIMIT` points: the lowest and the highest of each group of neighbours.

    In this way no spike is lost.
    """
    if len(points) <= POINTS_LIMIT:
        return points
    buckets = POINTS_LIMIT // 2
    kept: list[Point] = []
    for index in range(buckets):
        bucket = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        ends = {
            min(bucket, key=lambda point: point.value),
            max(bucket, key=lambda point: point.value),
        }
        kept += sorted(ends, key=lambda point: point.step)
    return kept


def _mark_incidents(axes: "Axes", summary: RunSummary, *, narrow: bool) -> None:
    low, high = axes.get_xlim()
    room = (high - low) * (0.065 if narrow else 0.03)
    last_step, level = -math.inf, 0
    for cost in summary.incidents[:BADGES_LIMIT]:
        step = cost.incident.step
        if step is None:
            continue
        if cost.incident.restored_step is not None:
            axes.axvspan(
                cost.incident.restored_step,
                step,
                color=COLOUR["lost"],
                alpha=0.1,
                linewidth=0,
                zorder=1,
            )
        axes.axvline(step, color=COLOUR["lost"], linewidth=0.9, linestyle=(0, (4, 2)), zorder=2)
        # Badges of incidents close together stand above each other, as far as there is room.
        level = (level + 1) % BADGE_LEVELS if abs(step - last_step) < room else 0
        last_step = step
        _badge(axes, cost.number, (step, 1.0), (0, 9 + 15 * level), axes.get_xaxis_transform())


def _mark_ends(axes: "Axes", summary: RunSummary, rows: dict[int, int], unit_s: float) -> None:
    for cost in summary.incidents:
        ends_s = [phase.end_s for phase in summary.phases if phase.attempt == cost.incident.attempt]
        if cost.incident.attempt in rows and ends_s and len(rows) <= BADGES_LIMIT:
            _badge(
                axes,
                cost.number,
                (max(ends_s) / unit_s, rows[cost.incident.attempt]),
                (10, 0),
                "data",
            )


def _badge(
    axes: "Axes",
    number: int,
    at: tuple[float, float],
    offset: tuple[float, float],
    coordinates: Any,
) -> None:
    axes.annotate(
        str(number),
        xy=at,
        xycoords=coordinates,
        xytext=offset,
        textcoords="offset points",
        ha="center",
        va="center_baseline",
        fontsize=8.5,
        color=COLOUR["paper"],
        bbox={"boxstyle": "circle,pad=0.28", "facecolor": COLOUR["ink"], "edgecolor": "none"},
        annotation_clip=False,
        zorder=6,
    )


VARIABLES = (
    "ink",
    "muted",
    "hair",
    "paper",
    "productive",
    "lost",
    "detecting",
    "restarting",
    "starting",
    "checkpoint",
    "other",
)
COLOUR = page.stand_ins(VARIABLES)
"""The placeholder colour for each CSS variable, which matplotlib draws with."""


def inline_svg(figure: "Figure", *, name: str, label: str) -> str:
    """Render a figure that was drawn in the colours of `COLOUR` as an `<svg>` element."""
    return page.inline_svg(figure, name=name, label=label, variables=VARIABLES)
