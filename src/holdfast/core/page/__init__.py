"""Provide the shared parts of HTML pages: page frame, styles, key figures, bars, drawings.

Each room's page is a template that extends `page.html.j2`, adds the room's own styles, and uses the
macros of `parts.html.j2`. A page works without a network. The modules:

| module | one idea |
|---|---|
| `rendering` | fill a template, with every text escaped and cleaned; write the page |
| `parts` | the colours of every page, key figures, and bars that show where time went |
| `vendor` | uPlot, which draws charts in a browser |
| `drawing` | a matplotlib figure as inline SVG in the page's colours |
"""

from holdfast.core.page.drawing import inline_svg, missing_extra, new_figure, plain_axes, stand_ins
from holdfast.core.page.parts import DARK, LIGHT, Bar, KeyFigure, TimeBars, time_bars
from holdfast.core.page.rendering import (
    UPLOT_SCRIPT,
    UPLOT_STYLE,
    environment,
    template,
    write_page,
)

__all__ = [
    "DARK",
    "LIGHT",
    "UPLOT_SCRIPT",
    "UPLOT_STYLE",
    "Bar",
    "KeyFigure",
    "TimeBars",
    "environment",
    "inline_svg",
    "missing_extra",
    "new_figure",
    "plain_axes",
    "stand_ins",
    "template",
    "time_bars",
    "write_page",
]
