"""The colours of the page about runs, as its drawings and its style sheet know them."""

from typing import TYPE_CHECKING

from holdfast.core import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
COLOUR = drawing.stand_ins(VARIABLES)
"""Stand-in colours: what to pass to matplotlib for each CSS variable."""


def inline_svg(figure: "Figure", *, name: str, label: str) -> str:
    """The figure, drawn in the colours of `COLOUR`, as an `<svg>` element: see `holdfast.core.drawing.inline_svg`."""
    return drawing.inline_svg(figure, name=name, label=label, variables=VARIABLES)
