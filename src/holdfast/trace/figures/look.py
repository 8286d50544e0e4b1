"""Define colours, dashes and sizes, for the page (light and dark) and for a paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.core import page
from holdfast.core.page import stand_ins

SERIES_COLOURS: Final = 7

_OF_THE_PAGE: Final = ("ink", "muted", "hair", "paper")
LIGHT: Final = {name: page.LIGHT[name] for name in _OF_THE_PAGE} | {
    # The palette of Okabe and Ito, 2008 ("Color Universal Design"), without yellow, which is hard
    # to see on white.
    "s1": "#0072b2",
    "s2": "#d55e00",
    "s3": "#009e73",
    "s4": "#cc79a7",
    "s5": "#e69f00",
    "s6": "#56b4e9",
    "s7": "#44474d",
}
"""The page's CSS variables for colours, with their values in light mode."""

DARK: Final = {name: page.DARK[name] for name in _OF_THE_PAGE} | {
    "s1": "#4ea8e6",
    "s2": "#f08a4b",
    "s3": "#35c49a",
    "s4": "#e59cc5",
    "s5": "#f0c545",
    "s6": "#a9dbff",
    "s7": "#c9c7c0",
}
"""The same variables with their lighter values for dark mode."""

DASHES: Final[Sequence[Any]] = (
    "solid",
    (0, (5.5, 1.7)),
    (0, (1.3, 1.3)),
    (0, (7, 1.6, 1.3, 1.6)),
    (0, (3, 1.2)),
)
"""Dash patterns of curves.

Five dash patterns and seven colours give 35 different pairs, so curves differ in greyscale too.
"""
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
HATCHES: Final = ("", "/////", "....", "xxxx", "-----", "\\\\\\\\\\", "++++")


OUTCOMES: Final[Mapping[str, int]] = {"completed": 2, "failed": 1, "cancelled": 6, "preempted": 4}
"""Colour index of parts that have these names, in every chart.

Only completed jobs are green.
"""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The style of a figure; sizes are in points."""

    colours: Mapping[str, str]
    """The matplotlib colour for each name in `LIGHT`."""
    fonts: Sequence[str]
    text_pt: float = 8.2
    """Size of tick labels, legend keys and axis labels."""
    title_pt: float = 9.0
    line_pt: float = 1.5
    compared_pt: float = 1.0
    hatched: bool = False
    """True if areas are hatched, for print in greyscale."""

    def series(self, index: int) -> str:
        """Return the colour of the series or part with this index."""
        return self.colours[f"s{index % SERIES_COLOURS + 1}"]

    def part(self, name: str, index: int) -> str:
        """Return the colour of a part of bars; each name in `OUTCOMES` has a fixed colour."""
        return self.series(OUTCOMES.get(name, index))


PAGE: Final = Look(colours=stand_ins(tuple(LIGHT)), fonts=("DejaVu Sans",))
"""The look of the page.

Its colours are stand-ins that are later replaced by CSS variables. The layout uses matplotlib's
wide font, so the text also fits in the page's own font.
"""


def paper_look() -> Look:
    """Return the look of a paper: white background, and the first common sans serif installed."""
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = [
        name
        for name in ("Helvetica", "Arial", "Liberation Sans", "Nimbus Sans")
        if name in installed
    ]
    return Look(
        colours=LIGHT
        | {"ink": "#000000", "muted": "#222222", "hair": "#d9d9d9", "paper": "#ffffff"},
        fonts=(*fonts[:1], "DejaVu Sans"),
        text_pt=7.0,
        title_pt=7.5,
        line_pt=1.2,
        compared_pt=0.8,
        hatched=True,
    )
