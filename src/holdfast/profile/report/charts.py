"""Draw a run: activity and phases over time, memory over time, memory by pipeline stage."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from holdfast.core import page, words
from holdfast.profile.columns import Columns, column
from holdfast.profile.recording import Series
from holdfast.profile.report.summary import ProfileSummary, RankMemory
from holdfast.profile.valleys import UNKNOWN, Stretch, local_ranks, phases_of_rank, ranks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEVICES_LIMIT: Final = 4
"""The most devices drawn. Of a larger number of devices, an evenly spaced selection is drawn."""
POINTS_LIMIT: Final = 700
STRIP_LIMIT: Final = 200
"""The most phases drawn below one curve, since more could not be told apart."""
BARS_LIMIT: Final = 32
MIN_POINTS: Final = 4
"""The fewest samples for which a curve is drawn."""
GB: Final = 1e9

KINDS: Final = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered layers",
    "activations": "activations",
    "output": "output layer and loss",
}
"""The kinds of memory of a pipeline stage and their display names, in stacking order."""
PHASE_COLOURS: Final = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "communication",
    "checkpoint_stall",
    "evaluation",
    "load",
    "preprocess",
    "prefill",
    "decode",
    "metric",
    "incident",
    "pipeline_bubble",
    "unknown",
)
VARIABLES: Final = (
    *("ink", "muted", "hair", "paper", "activity"),
    *(f"phase-{name}" for name in PHASE_COLOURS),
    *(f"memory-{name}" for name in KINDS),
)
"""The CSS variables for colours that the page defines."""
COLOUR: Final = page.stand_ins(VARIABLES)


def activity(
    summary: ProfileSummary, *, name: str, narrow: bool, window_ns: tuple[int, int] | None = None
) -> str | None:
    """Draw the devices' activity over time, with phases below and idle valleys shaded by cause.

    Args:
        summary: the summary of the run.
        name: an id for the chart, unique on the page.
        narrow: True to draw for the width of a phone.
        window_ns: the part of the run to draw, in Unix ns; None draws the whole run.

    Returns:
        An SVG element; None if no utilisation was recorded.
    """
    if summary.valleys.metric is None:
        return None
    start_ns, end_ns = window_ns or (summary.start_ns, summary.end_ns)
    # A rank that moved has a series on each of its nodes.
    recorded = [
        one
        for one in summary.recording.of(summary.valleys.metric)
        if len(one.times_ns) and one.times_ns[0] <= end_ns and one.times_ns[-1] >= start_ns
    ]
    devices = spread(recorded, DEVICES_LIMIT)
    if not devices:
        return None
    unit, unit_s = words.unit_of_time((end_ns - start_ns) / 1e9)
    local = local_ranks(summary.recording)
    drawn = [
        [
            one
            for one in zip(series.times_ns, series.values, strict=True)
            if start_ns <= one[0] <= end_ns
        ]
        for series in devices
    ]
    # Steps may be shorter than the time between two samples; then only the phases are drawn.
    bare = max(map(len, drawn)) < MIN_POINTS
    figure = page.new_figure(*_size(narrow, 0.75 + (0.5 if bare else 1.15) * len(devices)))
    figure.patch.set_alpha(0)
    grid = figure.subplots(len(devices), 1, sharex=True, squeeze=False)
    highest = max((max(one.values, default=0.0) for one in devices), default=0.0)
    top = 100.0 if highest <= 100 else highest * 1.05
    at = _scale(summary.start_ns, unit_s)
    for axes, series, samples in zip(grid[:, 0], devices, drawn, strict=True):
        page.plain_axes(axes, COLOUR)
        ranks = ranks_of(series, local)
        _valleys(axes, summary, series, at)
        points = thinned([(at(moment), value) for moment, value in samples])
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.fill_between(xs, ys, color=COLOUR["activity"], alpha=0.14, linewidth=0, zorder=2)
        axes.plot(xs, ys, color=COLOUR["activity"], linewidth=1.1, zorder=3)
        for one in summary.recording.incidents:
            if start_ns <= one.start_ns <= end_ns:
                axes.axvline(at(one.start_ns), color=COLOUR["phase-incident"], linewidth=1.2)
                axes.annotate(
                    str(one.incident_id),
                    (at(one.start_ns), top),
                    xytext=(2, -9),
                    textcoords="offset points",
                    fontsize=8,
                    color=COLOUR["phase-incident"],
                )
        striped = False
        if len(ranks) == 1:
            # A restart may move a rank to another node.
            own = summary.recording.spans_of(ranks[0])
            if set(column(own, "node")) - {series.node}:
                own = [span for span in own if span.node == series.node]
            striped = _strip(axes, phases_of_rank(own), (start_ns, end_ns), at, top)
        axes.set_ylim(-0.16 * top if striped else 0, -0.03 * top if bare and striped else top)
        axes.set_yticks([] if bare else [0, top / 2, top])
        axes.set_title(
            _device_name(series, ranks),
            loc="left",
            fontsize=9,
            color=COLOUR["muted"],
            pad=3,
            parse_math=False,
        )
    grid[-1, 0].set_xlim(at(start_ns), at(end_ns))
    grid[-1, 0].set_xlabel(f"time since the start ({unit})")
    shown = f"{summary.valleys.metric} of {words.plainly(len(devices), 'device')} over time"
    return _svg(figure, name, shown)


def side_by_side(
    one: ProfileSummary, other: ProfileSummary, *, name: str, narrow: bool
) -> str | None:
    """Draw the first device of two runs, one run above the other, over the same time span."""
    runs = [run for run in (one, other) if run.valleys.metric is not None]
    if len(runs) < 2:
        return None
    window_s = min(run.wall_s for run in runs)
    if one.speed and other.speed:
        window_s = min(window_s, 3 * max(one.speed.median_step_s, other.speed.median_step_s))
    unit, unit_s = words.unit_of_time(window_s)
    figure = page.new_figure(*_size(narrow, 3.4))
    figure.patch.set_alpha(0)
    grid = figure.subplots(2, 1, sharex=True)
    for axes, run in zip(grid, runs, strict=True):
        page.plain_axes(axes, COLOUR)
        assert run.valleys.metric is not None
        series = run.recording.of(run.valleys.metric)[0]
        at = _scale(run.start_ns, unit_s)
        points = thinned(
            [
                (at(moment), value)
                for moment, value in zip(series.times_ns, series.values, strict=True)
                if moment - run.start_ns <= window_s * 1e9
            ]
        )
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.fill_between(xs, ys, color=COLOUR["activity"], alpha=0.14, linewidth=0)
        axes.plot(xs, ys, color=COLOUR["activity"], linewidth=1.1)
        _valleys(axes, run, series, at)
        axes.set_ylim(0, max(100.0, max(ys, default=0.0)))
        axes.set_title(
            f"{run.name}, {_device_name(series, [])}",
            loc="left",
            fontsize=9,
            color=COLOUR["muted"],
            pad=3,
            parse_math=False,
        )
    grid[-1].set_xlim(0, window_s / unit_s)
    grid[-1].set_xlabel(f"time since the start ({unit})")
    return _svg(figure, name, f"Activity of {one.name} and of {other.name} over time")


def memory_over_time(summary: ProfileSummary, *, name: str, narrow: bool) -> str | None:
    """Draw allocated, reserved and peak memory of the rank with the highest peak.

    Bands in the background show the theoretical memory by kind.
    """
    if not summary.memory:
        return None
    fullest = max(summary.memory, key=lambda one: one.peak_bytes)
    rows = summary.recording.memory_of(fullest.rank)
    times_ns = column(rows, "at_ns")
    unit, unit_s = words.unit_of_time((rows[-1].at_ns - summary.start_ns) / 1e9)
    at = _scale(summary.start_ns, unit_s)
    figure = page.new_figure(*_size(narrow, 3.1))
    figure.patch.set_alpha(0)
    axes: Axes = figure.add_subplot()
    page.plain_axes(axes, COLOUR)
    if fullest.theory is not None:
        floor = 0.0
        for kind, amount in fullest.theory.by_kind().items():
            if amount:
                axes.axhspan(
                    floor / GB,
                    (floor + amount) / GB,
                    color=COLOUR[f"memory-{kind}"],
                    alpha=0.3,
                    linewidth=0,
                )
            floor += amount
    lines = (
        ("reserved_bytes", "muted", (0, (4, 2))),
        ("peak_bytes", "muted", (0, (1, 1.5))),
        ("allocated_bytes", "ink", "solid"),
    )
    for field, colour, style in lines:
        points = thinned(Columns(lambda *pair: pair, {"x": times_ns, "y": column(rows, field)}))
        axes.plot(
            [at(x) for x, _ in points],
            [y / GB for _, y in points],
            color=COLOUR[colour],
            linewidth=1.2,
            linestyle=style,
        )
    axes.set_ylim(0, None)
    axes.margins(x=0.01)
    axes.set_xlabel(f"time since the start ({unit})")
    axes.set_ylabel("GB")
    return _svg(figure, name, f"Memory of rank {fullest.rank} over time")


def memory_by_rank(summary: ProfileSummary, *, name: str, narrow: bool) -> str | None:
    """Draw the measured peak memory of each stage or rank beside the theory, stacked by kind."""
    rows = one_a_stage(summary.memory)
    if not rows:
        return None
    figure = page.new_figure(*_size(narrow, 3.1))
    figure.patch.set_alpha(0)
    axes: Axes = figure.add_subplot()
    page.plain_axes(axes, COLOUR)
    for at, row in enumerate(rows):
        measured_at = at if row.theory is None else at - 0.2
        axes.bar(measured_at, row.peak_bytes / GB, width=0.36, color=COLOUR["ink"], zorder=3)
        if row.theory is None:
            continue
        floor = 0.0
        for kind, amount in row.theory.by_kind().items():
            axes.bar(
                at + 0.2,
                amount / GB,
                width=0.36,
                bottom=floor / GB,
                color=COLOUR[f"memory-{kind}"],
                zorder=3,
            )
            floor += amount
    staged = len({row.stage for row in rows} - {None}) == len(rows) > 1
    labels = [f"stage {row.stage}" if staged else f"rank {row.rank}" for row in rows]
    every = max(1, math.ceil(len(rows) / (6 if narrow else 16)))
    axes.set_xticks(range(0, len(rows), every), labels[::every])
    axes.set_ylabel("GB")
    axes.margins(y=0.08)
    axes.grid(visible=False, axis="x")
    return _svg(figure, name, "Peak memory beside the theory")


def one_a_stage(rows: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the rank with the highest peak memory of each stage.

    If the stages are unknown, or there is only one, return the first `BARS_LIMIT` ranks.
    """
    if any(row.stage is None for row in rows) or len({row.stage for row in rows}) < 2:
        return list(rows[:BARS_LIMIT])
    fullest: dict[int | None, RankMemory] = {}
    for row in rows:
        if row.stage not in fullest or row.peak_bytes > fullest[row.stage].peak_bytes:
            fullest[row.stage] = row
    return [fullest[stage] for stage in sorted(fullest, key=lambda stage: stage or 0)]


def spread(series: Sequence[Series], limit: int) -> list[Series]:
    """Return at most `limit` series, evenly spaced in the given sequence."""
    if len(series) <= limit:
        return list(series)
    return [series[at * (len(series) - 1) // (limit - 1)] for at in range(limit)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a curve to at most `POINTS_LIMIT` points.

    The points are split into equal groups, and each group keeps its lowest and highest point.
    """
    if len(points) <= POINTS_LIMIT:
        return list(points)
    buckets = POINTS_LIMIT // 2
    kept: list[tuple[float, float]] = []
    for index in range(buckets):
        part = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        ends = {min(part, key=lambda one: one[1]), max(part, key=lambda one: one[1])}
        kept += sorted(ends)
    return kept


def _device_name(series: Series, ranks: Sequence[int]) -> str:
    rank = f"rank {ranks[0]}, " if len(ranks) == 1 else ""
    device = "" if series.device is None else f", GPU {series.device}"
    return words.clean(f"{rank}{series.node}{device}")


def _valleys(axes: "Axes", summary: ProfileSummary, series: Series, at: Any) -> None:
    for valley in summary.valleys.found:
        if (valley.node, valley.device) == (series.node, series.device):
            cause = valley.cause if valley.cause in PHASE_COLOURS else UNKNOWN
            axes.axvspan(
                at(valley.start_ns),
                at(valley.end_ns),
                ymin=0,
                color=COLOUR[f"phase-{cause}"],
                alpha=0.42,
                linewidth=0,
                zorder=1,
            )


def _strip(
    axes: "Axes", stretches: Sequence[Stretch], window_ns: tuple[int, int], at: Any, top: float
) -> bool:
    """Draw the phases of one rank as a strip below its curve.

    Return False, and draw nothing, if there is no phase or more than `STRIP_LIMIT` phases.
    """
    start_ns, end_ns = window_ns
    inside = [one for one in stretches if one.end_ns > start_ns and one.start_ns < end_ns]
    if not 0 < len(inside) <= STRIP_LIMIT:
        return False
    by_phase: dict[str, list[tuple[float, float]]] = {}
    for one in inside:
        left, right = at(max(one.start_ns, start_ns)), at(min(one.end_ns, end_ns))
        by_phase.setdefault(one.label, []).append((left, right - left))
    for phase, bars in by_phase.items():
        axes.broken_barh(
            bars,
            (-0.145 * top, 0.1 * top),
            facecolors=COLOUR[f"phase-{phase}"],
            linewidth=0,
            zorder=3,
        )
    return True


def _scale(start_ns: int, unit_s: float) -> Callable[[float], float]:
    """Return a function that maps Unix ns to a position on the time axis."""
    return lambda moment_ns: (moment_ns - start_ns) / 1e9 / unit_s


def _size(narrow: bool, height_in: float) -> tuple[float, float]:
    return (4.3, height_in) if narrow else (9.6, height_in)


def _svg(figure: Any, name: str, label: str) -> str:
    return page.inline_svg(figure, name=name, label=html.escape(label), variables=VARIABLES)


def legend(summary: ProfileSummary) -> Mapping[str, str]:
    """Return the names of the phases and causes that a run's charts show, with display names."""
    shown = {phase.name for phase in summary.phases} | set(summary.valleys.seconds_by_cause())
    return {name: name.replace("_", " ") for name in PHASE_COLOURS if name in shown}
