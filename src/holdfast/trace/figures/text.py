"""Measure and shorten text, and clean untrusted text for display."""

import warnings
from collections.abc import Sequence
from functools import lru_cache

from holdfast.core import words


def shown(text: str, limit: int = 160) -> str:
    """Return untrusted text on one line, without control characters, cut at `limit` characters."""
    line = " ".join(words.clean(str(text)).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def width_pt(text: str, size_pt: float, fonts: Sequence[str]) -> float:
    """Return the width of drawn text in points, which is the width of its widest line."""
    return max(_line_width_pt(line, tuple(fonts)) for line in text.split("\n")) * size_pt


def cut(text: str, size_pt: float, fonts: Sequence[str], limit_pt: float) -> str:
    """Shorten text with an ellipsis if it is wider than `limit_pt`."""
    if width_pt(text, size_pt, fonts) <= limit_pt:
        return text
    while len(text) > 1 and width_pt(text + "…", size_pt, fonts) > limit_pt:
        text = text[:-1].rstrip()
    return text + "…"


@lru_cache(maxsize=4096)
def _line_width_pt(text: str, fonts: tuple[str, ...]) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    if not text:
        return 0.0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        width, _, _ = text_to_path.get_text_width_height_descent(
            text, FontProperties(family=list(fonts), size=100), False
        )
    return float(width) / 100
