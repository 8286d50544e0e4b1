"""Export a figure as compact SVG (inline for the page, or as a file), and as PDF and PNG."""

import html
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core import page
from holdfast.core.atomic import write_atomic
from holdfast.trace import charts
from holdfast.trace.figures.drawing import PANEL_IN, draw, draw_panels
from holdfast.trace.figures.look import LIGHT, PAGE

_VARIABLES = tuple(LIGHT)
_PATH = re.compile(r'(<path (?:id="[^"]*" )?)d="([^"]*)"')
_STYLE = re.compile(r'style="([^"]*)"')
_TAG = re.compile(r"<[^>]*>")
_TENTHS = re.compile(r"(?<=\d\.\d)\d+(?=[ \",)])")
_WHOLE = re.compile(r"\.0(?=[ \",)])")
_GAP_PT, _ROW_GAP_PT = 16.0, 12.0


@dataclass(frozen=True)
class Drawn:
    """A panel drawn as SVG, with its size in points."""

    svg: str
    width_pt: float
    height_pt: float
    box: tuple[float, float, float, float]
    """Left, top, right and bottom of the axes, as shares of the panel's size."""
    x_ends: tuple[float, float]
    y_ends: tuple[float, float]
    """Ends of the vertical axis in data coordinates; `x_ends` has the horizontal axis' ends."""
    wide: bool
    """True if the panel is as wide as the page."""


def panels(figure: charts.Figure, name: str, label: str) -> list[Drawn]:
    """Draw each panel as a separate `<svg>` element that uses the page's CSS variables.

    With separate elements, a narrow page can stack the panels.

    Args:
        figure: the figure.
        name: a slug that is unique on the page; the ids of the elements begin with it.
        label: plain text for screen readers.
    """
    made = []
    for number, (placed, drawn, titles) in enumerate(draw_panels(figure, PAGE)):
        suffix = f", panel {number + 1} of {len(figure.panels)}" if len(figure.panels) > 1 else ""
        own = f"{name}-{number}"
        with warnings.catch_warnings():
            # The font used for the layout may lack a glyph. The page's own font then shows the
            # glyph, or a box.
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
            text = page.inline_svg(
                drawn, name=own, label=html.escape(label + suffix), variables=_VARIABLES
            )
        width_in, height_in = drawn.get_size_inches()
        width, height, margins, plan = (
            width_in * 72,
            height_in * 72,
            placed.framed.margins,
            placed.framed.plan,
        )
        made.append(
            Drawn(
                svg=_compact(_titled(text, own, titles)),
                width_pt=width,
                height_pt=height,
                box=(
                    margins.left / width,
                    margins.top / height,
                    1 - margins.right / width,
                    1 - margins.bottom / height,
                ),
                x_ends=(plan.x.low, plan.x.high),
                y_ends=(plan.y.low, plan.y.high),
                wide=placed.width_in > PANEL_IN,
            )
        )
    return made


def svg(figure: charts.Figure, name: str, label: str) -> str:
    """Draw the whole figure as one inline `<svg>` element.

    The element uses the page's CSS variables; see `panels`.
    """
    return joined(panels(figure, name, label), figure.columns, label)


def joined(drawn: Sequence[Drawn], columns: int, label: str) -> str:
    """Combine panels into one `<svg>` element, `columns` panels per row."""
    columns = max(1, min(columns, len(drawn)))
    parts, top = [], 0.0
    for start in range(0, len(drawn), columns):
        row = drawn[start : start + columns]
        left = 0.0
        for panel in row:
            place = f'<svg x="{left:g}" y="{top:.1f}" width="{panel.width_pt:.1f}" height="{panel.height_pt:.1f}"'
            parts.append(re.sub(r'^<svg role="img" aria-label="[^"]*"', place, panel.svg))
            left += panel.width_pt + _GAP_PT
        top += max(panel.height_pt for panel in row) + _ROW_GAP_PT
    width = max(panel.width_pt for panel in drawn) * columns + _GAP_PT * (columns - 1)
    box = f"0 0 {width:.1f} {top - _ROW_GAP_PT:.1f}"
    return (
        f'<svg role="img" aria-label="{html.escape(label)}" viewBox="{box}">'
        + "\n".join(parts)
        + "</svg>"
    )


def standalone(inline: str) -> str:
    """Convert an inline `<svg>` to a complete SVG file.

    The file has the colours for light paper, a font, a namespace and a size.
    """
    text = re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found[1]], inline)
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert found, "an SVG element of this module has a viewBox"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{found[1]}pt" height="{found[2]}pt" font-family="Helvetica, Arial, Liberation Sans, sans-serif"'
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text.replace("<svg", head, 1)}\n'


def _titled(text: str, name: str, titles: dict[str, str]) -> str:
    """Insert a `<title>` into each element in `titles`; a browser shows the title on hover."""
    for gid, title in titles.items():
        opening = f'<g id="{name}-{gid}">'
        text = text.replace(opening, f"<g><title>{html.escape(title)}</title>", 1)
    return text


def _compact(text: str) -> str:
    """Shrink an SVG to a third of its size.

    Coordinates become relative and are rounded to tenths of a point. Unused attributes are removed.
    """
    text = _PATH.sub(lambda found: f'{found[1]}d="{_relative(found[2])}"', text)
    text = _STYLE.sub(lambda found: _attributes(found[1]), text)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    # Shorten numbers inside tags only; numbers in texts and in the label stay.
    head, rest = text.split(">", 1)
    text = f"{head}>{_TAG.sub(lambda tag: _WHOLE.sub('', _TENTHS.sub('', tag[0])), rest)}"
    text = re.sub(r"<g>\s*(<path [^>]*/>)\s*</g>", r"\1", text)
    text = re.sub(r"<g>\s*(<text [^>]*>[^<]*</text>)\s*</g>", r"\1", text)
    text = re.sub(r"<defs>\s*</defs>|<g>\s*</g>", "", text)
    return re.sub(r"\n+", "\n", text)


def _attributes(style: str) -> str:
    """Remove properties that have their default value from a style attribute."""
    idle = {
        "stroke-linejoin: miter", "stroke-linejoin: round", "stroke-linecap: butt", "fill-opacity: 1",
        "stroke-opacity: 1", "stroke-dashoffset: 0",
    }  # fmt: skip
    kept = [part.strip() for part in style.split(";") if part.strip() and part.strip() not in idle]
    return f'style="{";".join(part.replace(": ", ":") for part in kept)}"'


def _relative(path: str) -> str:
    """Convert path data to relative coordinates in tenths of a point.

    Rounding errors do not accumulate along the path.
    """
    out: list[str] = []
    tokens = path.split()
    index, x, y, begin = 0, 0, 0, (0, 0)
    command = ""
    while index < len(tokens):
        token = tokens[index]
        if token in ("M", "L"):
            to_x, to_y = round(float(tokens[index + 1]) * 10), round(float(tokens[index + 2]) * 10)
            index += 3
            if token == "M":
                out.append(f"M{_tenths(to_x)} {_tenths(to_y)}")
                begin = (to_x, to_y)
                command = "M"
            elif (to_x, to_y) == (x, y) and command != "M":
                continue
            else:
                dx, dy = to_x - x, to_y - y
                if dy == 0:
                    out.append(f"h{_tenths(dx)}")
                elif dx == 0:
                    out.append(f"v{_tenths(dy)}")
                else:
                    second = _tenths(dy)
                    out.append(f"l{_tenths(dx)}{second if second[0] == '-' else ' ' + second}")
                command = "L"
            x, y = to_x, to_y
        elif token in ("z", "Z"):
            out.append("z")
            (x, y), command = begin, "z"
            index += 1
        else:
            return path.strip()  # Curves are markers, which are already small.
    return "".join(out)


def _tenths(value: int) -> str:
    whole, rest = divmod(abs(value), 10)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole or ''}.{rest}" if rest else f"{sign}{whole}"


SINGLE_COLUMN_IN = 3.33
DOUBLE_COLUMN_IN = 7.0
"""Width of a double-column figure in a two-column paper (USENIX, ACM), in inches.

`SINGLE_COLUMN_IN` is the width of one column.
"""
DOTS_PER_INCH = 300
_METADATA = {
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "png": {"Software": None},
}


def write_paper(figure: charts.Figure, stem: Path) -> tuple[Path, Path]:
    """Write the figure as PDF and PNG at its size in a paper, with embedded fonts and no title.

    A figure with one panel per row is as wide as one column. A figure with panels side by side is
    as wide as the page.

    Args:
        figure: the figure.
        stem: the path of the files without `.pdf` and `.png`; its folder must exist.

    Returns:
        The paths of the PDF and the PNG.

    Raises:
        HoldfastError: matplotlib is not installed.
        OSError: a file could not be written.
    """
    import io

    import matplotlib as mpl

    single = min(figure.columns, len(figure.panels)) <= 1
    drawn = draw(figure, width_in=SINGLE_COLUMN_IN if single else DOUBLE_COLUMN_IN)
    paths = []
    for form, metadata in _METADATA.items():
        target = io.BytesIO()
        with (
            mpl.rc_context({"pdf.fonttype": 42, "hatch.linewidth": 0.5}),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
            drawn.savefig(
                target, format=form, dpi=DOTS_PER_INCH, metadata=metadata, facecolor="white"
            )
        path = stem.with_name(f"{stem.name}.{form}")
        write_atomic(path, target.getvalue())
        paths.append(path)
    return paths[0], paths[1]
