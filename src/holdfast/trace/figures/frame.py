"""Lay out and draw margins, axes, legend keys and titles around a plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.trace.figures.look import Look
from holdfast.trace.figures.plan import Key, Plan
from holdfast.trace.figures.text import cut, width_pt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINE_KEY_PT, _AREA_KEY_PT, _POINT_KEY_PT = 17.0, 12.0, 6.0
_KEY_GAP_PT, _COLUMN_GAP_PT = 4.0, 13.0
_LEAD = 1.42
"""Line spacing of text, as a multiple of the text size."""
_TILT_DEGREES = 40
_BOLD = 1.16
"""Largest ratio between the widths of bold and regular text, measured on DejaVu Sans."""
_LEFT_SHARE = 0.42
"""Largest share of the panel's width that the labels on the left may take."""


@dataclass(frozen=True)
class Margins:
    """The space around the axes, in points."""

    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True)
class Frame:
    """A plan with its labels and margins."""

    plan: Plan
    title: str
    left_labels: Sequence[str]
    tilted: bool
    """True if the labels of the x axis are tilted, because they do not fit side by side."""
    margins: Margins


def frame(plan: Plan, look: Look, *, width_in: float, letter: str = "") -> Frame:
    """Compute the labels and margins of a panel of the given width."""
    size, width = look.text_pt, width_in * 72
    limit = width * _LEFT_SHARE
    labels = [cut(text, size, look.fonts, limit) for _, text in plan.y.ticks]
    left = max((width_pt(text, size, look.fonts) for text in labels), default=0.0) + 6
    right = 5.0
    below = [width_pt(text, size, look.fonts) for _, text in plan.x.ticks]
    tilted = (
        plan.x.category and len(below) > 1 and sum(below) + 6 * len(below) > width - left - right
    )
    if tilted:
        longest = min(max(below), 110.0)
        bottom = longest * math.sin(math.radians(_TILT_DEGREES)) + size * 1.6
    else:
        lines = max((text.count("\n") + 1 for _, text in plan.x.ticks), default=0)
        bottom = lines * size * 1.2 + 5
        if plan.x.ticks:  # The first and last labels reach beyond the ends of the axis.
            end, overhang = plan.x.place(plan.x.ticks[-1][0]), below[-1] / 2
            right = max(right, overhang - (1 - end) * (width - left - right) + 2)
            left = max(
                left, below[0] / 2 - plan.x.place(plan.x.ticks[0][0]) * (width - left - right) + 2
            )
    for at, length in plan.beside:
        end = max(plan.x.place(at), 0.05)
        right = max(right, (end * (width - left) + length - (width - left)) / end)
    if plan.x.label:
        bottom += size * 1.3
    title = f"({letter}) {plan.title}".strip() if letter else plan.title
    top = 3.0
    top += look.title_pt * _LEAD + 2 if title else 0
    top += _key_rows(plan.keys, look, width) * size * _LEAD
    top += _above_axes(plan, size)
    return Frame(plan, title, labels, tilted, Margins(left, right, top, bottom))


def _above_axes(plan: Plan, size: float) -> float:
    """Return the space between legend and axes in points; it holds the label of the y axis."""
    return size * (_LEAD + 0.55) if plan.y.label else size * 0.5


def _key_places(keys: Sequence[Key], look: Look, width: float) -> list[tuple[int, float]]:
    """Return the position of each legend key: its row, and its start within the row in points.

    Keys of curves are aligned in as many columns as fit. Keys of areas follow one another like
    words.
    """
    entries = [
        _key_pt(key) + width_pt(key.label, look.text_pt, look.fonts) + _COLUMN_GAP_PT
        for key in keys
    ]
    if any(key.kind == "area" for key in keys):
        return _flowing(entries, width)
    for columns in range(len(keys), 1, -1):
        widths = [max(entries[number::columns]) for number in range(columns)]
        if sum(widths) - _COLUMN_GAP_PT <= width:
            return [
                (number // columns, sum(widths[: number % columns])) for number in range(len(keys))
            ]
    return [(number, 0.0) for number in range(len(keys))]


def _flowing(entries: Sequence[float], width: float) -> list[tuple[int, float]]:
    places: list[tuple[int, float]] = []
    row, x = 0, 0.0
    for entry in entries:
        if x and x + entry - _COLUMN_GAP_PT > width:
            row, x = row + 1, 0.0
        places.append((row, x))
        x += entry
    return places


def _key_rows(keys: Sequence[Key], look: Look, width: float) -> int:
    return max((row + 1 for row, _ in _key_places(keys, look, width)), default=0)


def _key_pt(key: Key) -> float:
    """Return the distance from the left end of a legend key to its label, in points."""
    return {"line": _LINE_KEY_PT, "area": _AREA_KEY_PT, "points": _POINT_KEY_PT}[
        key.kind
    ] + _KEY_GAP_PT


def draw_frame(
    figure: "Figure",
    framed: Frame,
    look: Look,
    *,
    left_in: float,
    top_in: float,
    width_in: float,
    height_in: float,
) -> dict[str, str]:
    """Draw a panel into a box of the figure.

    Args:
        figure: the matplotlib figure.
        framed: the panel.
        look: colours and sizes.
        left_in: left edge of the box, from the figure's left edge, in inches.
        top_in: top edge of the box, from the figure's top edge, in inches.
        width_in: width of the box, in inches.
        height_in: height of the axes without the margins, in inches.

    Returns:
        The titles to show on hover, by the gid of the drawn element.
    """
    plan, margins = framed.plan, framed.margins
    total_width, total_height = figure.get_size_inches()
    x0, y1 = left_in * 72 + margins.left, top_in * 72 + margins.top
    box = (
        x0 / 72 / total_width,
        1 - (y1 / 72 + height_in) / total_height,
        (width_in * 72 - margins.left - margins.right) / 72 / total_width,
        height_in / total_height,
    )
    axes = figure.add_axes(box)
    _axes(axes, framed, look)
    titles = plan.draw(axes)
    axes.set_xlim(plan.x.low, plan.x.high)
    axes.set_ylim(plan.y.low, plan.y.high)
    _around(
        figure,
        framed,
        look,
        left=left_in * 72,
        top=top_in * 72,
        width=width_in * 72,
        height=height_in * 72,
    )
    return titles


def _axes(axes: "Axes", framed: Frame, look: Look) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    plan = framed.plan
    axes.patch.set_alpha(0)
    for axis, side, set_scale in (
        (axes.xaxis, plan.x, axes.set_xscale),
        (axes.yaxis, plan.y, axes.set_yscale),
    ):
        if side.scale != "linear":
            linear: dict[str, Any] = (
                {"linthresh": side.linear_within}
                if side.scale == "symlog"
                else {"nonpositive": "mask"}
            )
            set_scale(side.scale, **linear)
        labels = framed.left_labels if side is plan.y else [text for _, text in side.ticks]
        axis.set_major_locator(FixedLocator([at for at, _ in side.ticks]))
        axis.set_major_formatter(FixedFormatter(list(labels)))
        axis.set_minor_locator(NullLocator())
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom" and plan.framed)
        spine.set_color(look.colours["muted"])
        spine.set_linewidth(0.7)
    for name in ("x", "y"):
        if plan.grid in (name, "both"):
            axes.grid(visible=True, axis=name, color=look.colours["hair"], linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", pad=5)
    axes.tick_params(length=0, labelsize=look.text_pt, labelcolor=look.colours["muted"])
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontfamily(list(look.fonts))
        label.set_parse_math(False)
    if framed.tilted:
        for label in axes.get_xticklabels():
            label.set(rotation=_TILT_DEGREES, ha="right", rotation_mode="anchor")


def _around(
    figure: "Figure",
    framed: Frame,
    look: Look,
    *,
    left: float,
    top: float,
    width: float,
    height: float,
) -> None:
    """Draw title, legend and labels from the top of the panel's box down, in points."""
    plan, margins = framed.plan, framed.margins
    total_width, total_height = (side * 72 for side in figure.get_size_inches())

    def write(x: float, y: float, text: str, *, size: float, colour: str, **more: Any) -> None:
        figure.text(
            x / total_width, 1 - y / total_height, text, fontsize=size, color=look.colours[colour],
            family=list(look.fonts), parse_math=False, **more,
        )  # fmt: skip

    size, y = look.text_pt, top + 2
    if framed.title:
        y += look.title_pt
        title = cut(framed.title, look.title_pt * _BOLD, look.fonts, width)
        write(left, y, title, size=look.title_pt, colour="ink", weight="bold")
        y += look.title_pt * (_LEAD - 1) + 2
    for key, (row, offset) in zip(plan.keys, _key_places(plan.keys, look, width), strict=True):
        x, line = left + offset, y + row * size * _LEAD + size
        _draw_key(figure, key, x / total_width, 1 - (line - size * 0.36) / total_height, look)
        label = cut(key.label, size, look.fonts, width - _key_pt(key))
        write(x + _key_pt(key), line, label, size=size, colour="ink")
    if plan.y.label:
        label = cut(plan.y.label, size, look.fonts, width)
        write(left, top + margins.top - size * 0.85, label, size=size, colour="muted")
    if plan.x.label:
        middle = left + (margins.left + width - margins.right) / 2
        label = cut(plan.x.label, size, look.fonts, width)
        half = width_pt(label, size, look.fonts) / 2
        middle = min(max(middle, left + half), left + width - half)
        write(
            middle,
            top + margins.top + height + margins.bottom - size * 0.25,
            label,
            size=size,
            colour="muted",
            ha="center",
        )


def _draw_key(figure: "Figure", key: Key, x: float, y: float, look: Look) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    width, height = (side * 72 for side in figure.get_size_inches())
    if key.kind == "area":
        tall = look.text_pt * 0.86
        figure.add_artist(
            Rectangle(
                (x, y - tall / 2 / height), _AREA_KEY_PT / width, tall / height, facecolor=key.colour,
                alpha=key.opacity, hatch=key.hatch, edgecolor=look.colours["paper"], linewidth=0,
            )
        )  # fmt: skip
    elif key.kind == "points":
        figure.add_artist(
            Line2D(
                [x + _POINT_KEY_PT / 2 / width], [y], linestyle="none", marker=key.marker, markersize=4,
                color=key.colour, markeredgewidth=0,
            )
        )  # fmt: skip
    else:
        figure.add_artist(
            Line2D(
                [x, x + _LINE_KEY_PT / width], [y, y], color=key.colour, linewidth=key.width_pt, linestyle=key.dash,
                alpha=key.opacity,
            )
        )  # fmt: skip
