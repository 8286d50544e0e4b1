"""Draw a Gantt chart as SVG: engines over time by activity, with lanes for other work.

The SVG is written directly instead of by matplotlib, so that a chart of thousands of engines stays
within half a megabyte. For this, time is cut into slices, engines beyond `ROWS` share rows, and
neighbouring slices that look equal are drawn as one shape. The colours are CSS classes of the page.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.core import words
from holdfast.evaluate.report.occupation import Occupation, Values, held, most_at_once, occupation
from holdfast.evaluate.types.timeline import Span, Timeline

SLICES = 240
ROWS = 64
"""The largest number of rows; if there are more engines, several engines share a row."""
WIDTH, LEFT, TOP = 960, 84, 6
LANE_HEIGHT, STRIP_HEIGHT, GAP = 34, 74, 12
PICTURE_ROWS_HEIGHT = 420
FAINT = (0.08, 0.38, 0.7)
"""The shares of occupied time from which on a cell is drawn faint, medium and full."""
SERIES = 7
"""The number of different colours for tasks."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A Gantt chart and the meaning of its colours."""

    svg: str
    legend: tuple[tuple[str, str, str], ...]
    """For each colour its CSS class, its name, and its share of the engines' time."""
    note: str
    """A sentence on how many engines a row shows; empty if each row is one engine."""


def gantt(timeline: Timeline, *, name: str = "gantt") -> Picture | None:
    """Draw a timeline; return None if no engine did anything.

    Args:
        timeline: the timeline.
        name: the id of the chart, unique on the page.

    Names of tasks occur only in the legend, where they are not escaped; the SVG has none.
    """
    found = occupation(timeline, slices=SLICES)
    if not found.engines:
        return None
    colours = _colours(found)
    shapes: list[str] = []
    y = float(TOP)
    shapes.append(_strip(found, colours, y))
    shapes.append(_label(y + STRIP_HEIGHT / 2, "all engines"))
    y += STRIP_HEIGHT + GAP
    rows, engines_a_row = _rows(found)
    height = min(22.0, max(5.0, PICTURE_ROWS_HEIGHT / len(rows)))
    every = math.ceil(11 / height)
    for number, (label, shares) in enumerate(rows):
        shapes.append(_row(shares, found.kinds, colours, y, height * 0.86))
        if number % every == 0:
            shapes.append(_label(y + height * 0.43, label))
        y += height
    y += GAP
    for label, spans in _lanes(timeline):
        shapes.append(_lane(held(spans, found.edges_s), y))
        shapes.append(_label(y + LANE_HEIGHT / 2 - 6, label))
        shapes.append(_label(y + LANE_HEIGHT / 2 + 6, f"at most {most_at_once(spans):,}"))
        y += LANE_HEIGHT + GAP
    axis, y = _axis(found, y)
    engines = words.plainly(len(found.engines), "engine")
    label = f"Engines over time: {engines} over {words.duration(timeline.makespan_s)}"
    svg = (
        f'<svg id="{name}" class="gantt" role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {y:g}">'
        f"{axis}{''.join(shapes)}</svg>"
    )
    note = f"A row is {words.plainly(engines_a_row, 'engine')}." if engines_a_row > 1 else ""
    return Picture(svg=svg, legend=_legend(found, colours), note=note)


def _colours(found: Occupation) -> dict[str, str]:
    """Return the CSS class of each kind of activity."""
    own = {"load": "load", "swap": "swap", "lost": "lost", "idle": "idle"}
    tasks = [kind for kind in found.kinds if kind not in own]
    return own | {task: f"s{place % SERIES + 1}" for place, task in enumerate(tasks)}


def _legend(found: Occupation, colours: dict[str, str]) -> tuple[tuple[str, str, str], ...]:
    names = {"load": "loading", "swap": "swapping weights", "lost": "lost engines", "idle": "idle"}
    seconds = found.seconds()
    total = sum(seconds.values()) or 1.0
    return tuple(
        (colours[kind], names.get(kind, kind), words.percent(seconds[kind] / total))
        for kind in (*found.kinds[4:], *found.kinds[:4])
        if seconds[kind] > 0
    )


def _strip(found: Occupation, colours: dict[str, str], y: float) -> str:
    """Draw all engines together, as stacked shares of the largest number of engines.

    Tasks are at the bottom and idle time is at the top.
    """
    total = found.shares.sum(axis=0) / len(found.engines)
    order = [*range(4, len(found.kinds)), 0, 1, 2]
    base = np.zeros(total.shape[1])
    shapes = []
    for kind in order:
        top = base + total[kind]
        if total[kind].any():
            shapes.append(
                f'<path class="{colours[found.kinds[kind]]}" d="{_area(base, top, y, STRIP_HEIGHT)}"/>'
            )
        base = top
    return (
        f'<rect class="idle" x="{LEFT}" y="{y:g}" width="{WIDTH - LEFT}" height="{STRIP_HEIGHT}"/>'
        + "".join(shapes)
    )


def _lane(amounts: Values, y: float) -> str:
    most = amounts.max() or 1.0
    return (
        f'<path class="lane" d="{_area(np.zeros(len(amounts)), amounts / most, y, LANE_HEIGHT)}"/>'
        f'<path class="rule" d="M{LEFT} {y + LANE_HEIGHT:g}H{WIDTH}"/>'
    )


def _area(low: Values, high: Values, y: float, height: float) -> str:
    """Return the SVG path of the area between the step functions `low` and `high`.

    Both are shares of the height. Each run of slices with a visible area is one shape.
    """
    pieces = []
    filled = high - low > 1e-4
    begin = 0
    while begin < len(filled):
        if not filled[begin]:
            begin += 1
            continue
        end = begin
        while end < len(filled) and filled[end]:
            end += 1
        there = [f"V{_y(high[at], y, height)}H{_x(at + 1)}" for at in range(begin, end)]
        back = [f"V{_y(low[at], y, height)}H{_x(at)}" for at in range(end - 1, begin - 1, -1)]
        pieces.append(f"M{_x(begin)} {_y(low[begin], y, height)}{''.join(there)}{''.join(back)}Z")
        begin = end
    return "".join(pieces)


def _rows(found: Occupation) -> tuple[list[tuple[str, Values]], int]:
    """Return each row's label and shares of each activity, and the number of engines per row."""
    each = math.ceil(len(found.engines) / ROWS)
    rows = []
    for begin in range(0, len(found.engines), each):
        engines = found.engines[begin : begin + each]
        label = f"engine {engines[0]}" if len(engines) == 1 else f"{engines[0]} to {engines[-1]}"
        rows.append((label, found.shares[begin : begin + each].mean(axis=0)))
    return rows, each


def _row(
    shares: Values, kinds: Sequence[str], colours: dict[str, str], y: float, height: float
) -> str:
    """Draw the cells of a row.

    The colour shows the main activity, and the strength of the colour shows the share of occupied
    time.
    """
    occupied = np.delete(shares, kinds.index("idle"), axis=0)
    names = [kind for kind in kinds if kind != "idle"]
    most = occupied.argmax(axis=0)
    level = np.searchsorted(FAINT, occupied.sum(axis=0), side="right")
    there = shares.sum(axis=0) > 0
    paths: dict[str, list[str]] = {}
    for begin, end in _runs(np.where(there, 1, 0)):
        if there[begin]:
            paths.setdefault("idle", []).append(_cell(begin, end, y, height))
    for begin, end in _runs(np.where(level > 0, most * (len(FAINT) + 1) + level, 0)):
        if level[begin]:
            strength = f"{colours[names[most[begin]]]} l{level[begin]}"
            paths.setdefault(strength, []).append(_cell(begin, end, y, height))
    return "".join(
        f'<path class="{colour}" d="{"".join(cells)}"/>' for colour, cells in paths.items()
    )


def _runs(values: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Iterable[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(values)) + 1
    return zip([0, *edges.tolist()], [*edges.tolist(), len(values)], strict=True)


def _cell(begin: int, end: int, y: float, height: float) -> str:
    return f"M{_x(begin)} {y:.4g}H{_x(end)}v{height:.3g}H{_x(begin)}z"


def _lanes(timeline: Timeline) -> list[tuple[str, Sequence[Span]]]:
    """List the lanes for work that is not done by engines: label and spans."""
    lanes: list[tuple[str, Sequence[Span]]] = [
        ("nodes reading", [span for span in timeline.nodes if span.what == "fetch"]),
        ("metrics", timeline.metrics),
        ("judge", timeline.judged),
    ]
    return [lane for lane in lanes if lane[1]]


def _axis(found: Occupation, y: float) -> tuple[str, float]:
    """Draw the time axis and its grid lines; return them with the total height of the chart."""
    longest_s = float(found.edges_s[-1])
    unit, unit_s = words.unit_of_time(longest_s)
    step = _step(longest_s / unit_s)
    shapes = []
    for number in range(int(longest_s / unit_s / step + 1e-9) + 1):
        x = LEFT + (WIDTH - LEFT) * number * step * unit_s / longest_s
        anchor = ' style="text-anchor:end"' if x > WIDTH - 16 else ""
        shapes.append(f'<path class="rule" d="M{x:.1f} {TOP}V{y:g}"/>')
        shapes.append(
            f'<text class="tick" x="{x:.1f}" y="{y + 15:g}"{anchor}>{number * step:g}</text>'
        )
    shapes.append(f'<text class="name" x="{LEFT - 8}" y="{y + 15:g}">time ({unit})</text>')
    return "".join(shapes), y + 20


def _step(longest: float) -> float:
    """Return a round distance between ticks, so that there are 5 to 10 ticks."""
    rough = longest / 6
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _label(y: float, text: str) -> str:
    return f'<text class="name" x="{LEFT - 8}" y="{y + 3.5:.4g}">{text}</text>'


def _x(slice_: int) -> str:
    return f"{LEFT + (WIDTH - LEFT) * slice_ / SLICES:.4g}"


def _y(share: float, y: float, height: float) -> str:
    return f"{y + height * (1 - min(max(share, 0.0), 1.0)):.4g}"
