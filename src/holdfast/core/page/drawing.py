"""Draw a matplotlib figure as inline SVG in a page's colours, for light and dark mode.

Matplotlib draws the figure in placeholder colours, one for each CSS variable of the page. Then each
placeholder in the SVG is replaced by its variable. So one drawing serves both modes, and equal
figures give equal bytes.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TAG = re.compile(r"<[^>]*>")
_DECIMALS = re.compile(r"(\d+\.\d{2})\d+")


def stand_ins(variables: Sequence[str]) -> dict[str, str]:
    """Return a placeholder colour for each CSS variable, to pass to matplotlib."""
    return {name: f"#0000{index:02x}" for index, name in enumerate(variables, start=1)}


def new_figure(
    width_in: float, height_in: float, *, layout: Literal["constrained"] | None = "constrained"
) -> "Figure":
    """Create an empty figure of a size in inches, without pyplot's global state.

    Raises:
        HoldfastError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib") from error
    return Figure(figsize=(width_in, height_in), layout=layout)


def plain_axes(axes: "Axes", colours: Mapping[str, str]) -> None:
    """Style axes for a page: no background, only the bottom spine, a faint grid.

    Args:
        axes: the axes to style.
        colours: the placeholder colours of the variables `muted` and `hair`, from `stand_ins`.
    """
    axes.patch.set_alpha(0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colours["muted"])
        spine.set_linewidth(0.8)
    axes.grid(visible=True, color=colours["hair"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=colours["muted"], labelsize=9, length=3, width=0.8)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.label.set(color=colours["muted"], fontsize=9.5)
    axes.yaxis.label.set(color=colours["muted"], fontsize=9.5)


def missing_extra(package: str, *, extra: str = "report") -> HoldfastError:
    """Create the error for a missing package, with the command that installs its extra."""
    return HoldfastError(
        f"This needs {package}, which is not installed. Run: pip install 'holdfast[{extra}]'"
    )


def inline_svg(figure: "Figure", *, name: str, label: str, variables: Sequence[str]) -> str:
    """Render the figure as an `<svg>` element for an HTML page.

    Args:
        figure: a figure drawn in the colours of `stand_ins(variables)`.
        name: a name, unique on the page, that becomes the prefix of the ids in the element.
        label: the description for screen readers; the caller has escaped it for HTML.
        variables: the page's CSS variables, as passed to `stand_ins`.
    """
    import matplotlib as mpl

    target = io.BytesIO()
    # Text stays text; salted hashes instead of random ids; no date.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(
            target, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = target.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Two decimals are a hundredth of a point. Only numbers in tags are cut, not numbers in text.
    text = _TAG.sub(lambda tag: _DECIMALS.sub(r"\1", tag[0]), text)
    # HTML has these namespaces built in, and a page without URLs is easy to check for network use.
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        rf'<svg role="img" aria-label="{label}" \1>',
        text,
        count=1,
    )
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    # The page's own font, at the sizes of matplotlib's layout.
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    variable = {stand_in: f"var(--{name})" for name, stand_in in stand_ins(variables).items()}
    text = re.sub(r"#0000[0-9a-f]{2}", lambda found: variable.get(found[0], found[0]), text)
    return re.sub(r"\n\s*", "\n", text).strip()
