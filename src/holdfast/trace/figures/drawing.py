"""Arrange panels side by side and draw them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.core.page import new_figure
from holdfast.trace import charts
from holdfast.trace.figures.bars import plan_bars, plan_boxes
from holdfast.trace.figures.curves import plan_curves
from holdfast.trace.figures.frame import Frame, draw_frame, frame
from holdfast.trace.figures.heatmap import plan_heatmap
from holdfast.trace.figures.look import Look, paper_look
from holdfast.trace.figures.plan import Plan

if TYPE_CHECKING:
    from matplotlib import figure as mpl

PANEL_IN = 4.2
"""Width of a panel on the page. Two panels fit side by side on a desktop, and one fills a phone."""
WIDE_IN = 7.4
"""Width of a single panel whose x axis is time or which has many columns."""
_GAP_IN = 0.22
_ROW_GAP_IN = 0.16


@dataclass(frozen=True)
class Placed:
    """A panel with its frame, its width, and the height of its axes."""

    framed: Frame
    width_in: float
    axes_in: float

    @property
    def height_in(self) -> float:
        """Return the height of the panel with everything around its axes, in inches."""
        return self.axes_in + (self.framed.margins.top + self.framed.margins.bottom) / 72


def draw(
    figure: charts.Figure, *, look: Look | None = None, width_in: float | None = None
) -> "mpl.Figure":
    """Draw a figure with matplotlib, without using pyplot's global state.

    Args:
        figure: a figure with at least one panel.
        look: colours and sizes; by default the look of a paper.
        width_in: width of the whole figure in inches; by default the width of a panel times the
            number of columns.

    Raises:
        HoldfastError: matplotlib is not installed.
    """
    columns = _columns(figure)
    if width_in is None:
        width_in = panel_width_in(figure) * columns + _GAP_IN * (columns - 1)
    look = look or paper_look()
    return _draw_rows(
        layout(figure, look, width_in=(width_in - _GAP_IN * (columns - 1)) / columns), look
    )


def draw_panels(
    figure: charts.Figure, look: Look
) -> Iterator[tuple[Placed, "mpl.Figure", dict[str, str]]]:
    """Draw each panel as a separate matplotlib figure, as the page shows them.

    Yields:
        The panel, its figure, and the titles to show on hover, by the gid of the drawn element.
    """
    for row in layout(figure, look, width_in=panel_width_in(figure)):
        for placed in row:
            drawn = new_figure(placed.width_in, placed.height_in, layout=None)
            drawn.patch.set_alpha(0)
            titles = draw_frame(
                drawn,
                placed.framed,
                look,
                left_in=0,
                top_in=0,
                width_in=placed.width_in,
                height_in=placed.axes_in,
            )
            yield placed, drawn, titles


def panel_width_in(figure: charts.Figure) -> float:
    """Return the width of each panel on the page, in inches."""
    if len(figure.panels) > 1 and _columns(figure) > 1:
        return PANEL_IN
    wide = [
        (isinstance(panel, charts.Lines) and panel.x.scale == "time")
        or (isinstance(panel, charts.Heatmap) and panel.values.shape[1] > 16)
        for panel in figure.panels
    ]
    return WIDE_IN if all(wide) else PANEL_IN


def layout(figure: charts.Figure, look: Look, *, width_in: float) -> list[list[Placed]]:
    """Lay out the panels in rows.

    The axes of all panels in a row have the same top and bottom. The axes of all panels in a column
    have the same left edge, if they are curves.
    """
    assert figure.panels, "a figure has at least one panel"
    letters = "abcdefghijklmnopqrstuvwxyz" if len(figure.panels) > 1 else ""
    frames = [
        frame(
            _plan(panel, look, width_in),
            look,
            width_in=width_in,
            letter=letters[number : number + 1],
        )
        for number, panel in enumerate(figure.panels)
    ]
    columns = _columns(figure)
    for number in range(columns):
        column = frames[number::columns]
        if all(isinstance(panel, charts.Lines) for panel in figure.panels[number::columns]):
            frames[number::columns] = _shared(column, "left", "right")
    rows = [
        _shared(frames[start : start + columns], "top", "bottom")
        for start in range(0, len(frames), columns)
    ]
    return [
        [Placed(framed, width_in, max(each.plan.height_in for each in row)) for framed in row]
        for row in rows
    ]


def _columns(figure: charts.Figure) -> int:
    return max(1, min(figure.columns, len(figure.panels)))


def _plan(panel: charts.Panel, look: Look, width_in: float) -> Plan:
    if isinstance(panel, charts.Lines):
        return plan_curves(panel, look, width_in=width_in)
    if isinstance(panel, charts.Bars):
        return plan_bars(panel, look, width_in=width_in)
    if isinstance(panel, charts.Boxes):
        return plan_boxes(panel, look, width_in=width_in)
    return plan_heatmap(panel, look, width_in=width_in)


def _shared(frames: Sequence[Frame], *sides: str) -> list[Frame]:
    """Widen the given margins of all frames to the widest among them."""
    widest = {side: max(getattr(framed.margins, side) for framed in frames) for side in sides}
    return [replace(framed, margins=replace(framed.margins, **widest)) for framed in frames]


def _draw_rows(rows: list[list[Placed]], look: Look) -> "mpl.Figure":
    heights = [max(placed.height_in for placed in row) for row in rows]
    width_in = max(
        sum(placed.width_in for placed in row) + _GAP_IN * (len(row) - 1) for row in rows
    )
    drawn = new_figure(width_in, sum(heights) + _ROW_GAP_IN * (len(rows) - 1), layout=None)
    top_in = 0.0
    for row, height_in in zip(rows, heights, strict=True):
        left_in = 0.0
        for placed in row:
            draw_frame(
                drawn, placed.framed, look,
                left_in=left_in, top_in=top_in, width_in=placed.width_in, height_in=placed.axes_in,
            )  # fmt: skip
            left_in += placed.width_in + _GAP_IN
        top_in += height_in + _ROW_GAP_IN
    return drawn
