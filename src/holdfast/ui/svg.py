"""A matplotlib figure as inline SVG that follows the page's colours, in light and in dark.

Figures are drawn in stand-in colours, one for each of the page's CSS variables, and the SVG's stand-ins are then
replaced by those variables. So one drawing serves both schemes, and equal figures give equal bytes.
"""

import io
import re
from typing import TYPE_CHECKING

from holdfast.core.errors import HoldfastError

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
COLOUR = {name: f"#0000{index:02x}" for index, name in enumerate(VARIABLES, start=1)}
"""Stand-in colours: what to pass to matplotlib for each CSS variable."""

_VARIABLE = {stand_in: f"var(--{name})" for name, stand_in in COLOUR.items()}


def new_figure(width_in: float, height_in: float) -> "Figure":
    """An empty figure without any global state of pyplot.

    Raises:
        HoldfastError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib") from error
    return Figure(figsize=(width_in, height_in), layout="constrained")


def missing_extra(package: str) -> HoldfastError:
    """The error for a package of the extra that is not installed."""
    return HoldfastError(f"The report needs {package}, which is not installed. Run: pip install 'holdfast[report]'")


def inline_svg(figure: "Figure", *, name: str, label: str) -> str:
    """The figure as an `<svg>` element for an HTML page.

    Args:
        figure: drawn in the colours of `COLOUR`.
        name: unique on the page; the element's ids begin with it.
        label: what a reader hears who cannot see it; HTML-escaped by the caller.
    """
    import matplotlib as mpl

    target = io.BytesIO()
    # Text stays text; salted hashes instead of random ids; no date.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(target, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = target.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # HTML knows these namespaces by itself, and a page without a network address is easy to check.
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg role="img" aria-label="{label}" \1>', text, count=1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    # The page's own font, at the sizes matplotlib laid out.
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"#0000[0-9a-f]{2}", lambda found: _VARIABLE.get(found[0], found[0]), text)
    # Two decimals are a hundredth of a point.
    text = re.sub(r"(\d+\.\d{2})\d+", r"\1", text)
    return re.sub(r"\n\s*", "\n", text).strip()
