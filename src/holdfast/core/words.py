"""Format quantities and untrusted text for pages."""

import math
import re
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime

NBSP = "\N{NO-BREAK SPACE}"
LINE_LIMIT = 2000
"""The most characters of a log line that are shown."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")


def duration(seconds: float | None) -> str:
    """Format seconds in the unit that suits the length, with two or three digits."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}{NBSP}ms"
    if seconds < 119.95:
        return f"{seconds:.1f}{NBSP}s"
    if seconds < 7170:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}{NBSP}min{NBSP}{rest:02d}{NBSP}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}{NBSP}h{NBSP}{minutes:02d}{NBSP}min"


def percent(share: float | None) -> str:
    """Format a share (0 to 1) as a whole percentage; below 10 %, with one decimal."""
    if share is None:
        return "unknown"
    digits = 1 if 0 < share < 0.0995 else 0
    return f"{share * 100:.{digits}f}{NBSP}%"


def size(size_bytes: int) -> str:
    """Format a number of bytes in decimal units."""
    value, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return (
        f"{value:.0f}{NBSP}{unit}" if unit == "B" or value >= 99.95 else f"{value:.1f}{NBSP}{unit}"
    )


def count(number: int, one: str, many: str | None = None) -> str:
    """Format a count with its noun, such as `1 fault` or `3 faults`.

    Non-breaking spaces separate the thousands.
    """
    return f"{number:,}".replace(",", NBSP) + NBSP + (one if number == 1 else many or one + "s")


def plainly(number: int, one: str, many: str | None = None) -> str:
    """Format a count as `count` does, such as `3,000 faults`, but without non-breaking spaces.

    Text in this form can be searched.
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def moment(unix_s: float) -> str:
    """Format a Unix time as date and time in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def unit_of_time(longest_s: float) -> tuple[str, float]:
    """Choose the unit for times up to `longest_s`; return it with its length in seconds."""
    if longest_s < 300:
        return "s", 1.0
    return ("min", 60.0) if longest_s < 3 * 3600 else ("h", 3600.0)


def adding_up(parts: Mapping[str, float], digits: int) -> dict[str, str]:
    """Round numbers so that the rounded numbers add up to the rounded total.

    This is the largest remainder method: round all numbers down, then add one unit of the last
    digit to the numbers that lost most by the rounding.
    """
    scale = 10**digits
    exact = {name: value * scale for name, value in parts.items()}
    whole = {name: math.floor(value) for name, value in exact.items()}
    missing = round(sum(exact.values())) - sum(whole.values())
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[:missing]:
        whole[name] += 1
    return {name: f"{value / scale:.{digits}f}" for name, value in whole.items()}


def clean(text: str) -> str:
    """Make log text safe to show: no colours, visible control characters, limited length."""
    text = _ANSI.sub("", text)
    if len(text) > LINE_LIMIT:
        text = f"{text[:LINE_LIMIT]} … ({len(text) - LINE_LIMIT} more characters)"
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    return f"\\u{ord(character):04x}"


def sentence(text: str) -> str:
    """Return the text, with a full stop added if it does not end in a punctuation mark."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def shorten(text: str, characters: int = 140) -> str:
    """Cut a text that is longer than `characters`, and let it end in an ellipsis."""
    return text if len(text) <= characters else text[: characters - 1] + "…"
