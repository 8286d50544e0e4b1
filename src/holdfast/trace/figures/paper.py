"""PDF and PNG for a paper."""

import warnings
from pathlib import Path

from holdfast.core.atomic import write_atomic
from holdfast.trace import charts
from holdfast.trace.figures.drawing import draw

SINGLE_COLUMN_IN = 3.33
DOUBLE_COLUMN_IN = 7.0
"""Widths of a column and of a page of a paper in two columns (USENIX, ACM)."""
DOTS_PER_INCH = 300
_METADATA = {
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "png": {"Software": None},
}


def write_paper(figure: charts.Figure, stem: Path) -> tuple[Path, Path]:
    """Write the figure as PDF and PNG at the size it has in a paper: its fonts embedded, no title inside.

    One panel, or panels below one another, are as wide as a column; panels side by side as a page.

    Args:
        figure: what to draw.
        stem: the files' path without `.pdf` and `.png`; its folder exists.

    Returns:
        The PDF and the PNG.

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
