"""Numbers and durations as ticks and labels show them."""

import math

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS_OF_TIME = (
    (86400.0, "d"),
    (3600.0, "h"),
    (60.0, "min"),
    (1.0, "s"),
    (1e-3, "ms"),
    (1e-6, "µs"),
)
_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def duration(seconds: float) -> str:
    """Seconds in their largest unit: `10 min`, `1.5 d`; three figures."""
    if seconds == 0 or not math.isfinite(seconds):
        return "0" if seconds == 0 else "\N{EN DASH}"
    size = abs(seconds)
    unit_s, unit = next(
        (pair for pair in _UNITS_OF_TIME if size >= pair[0] * 0.9995), _UNITS_OF_TIME[-1]
    )
    return f"{_plain(seconds / unit_s)} {unit}"


def number(value: float) -> str:
    """A number to three figures with k, M or G; powers of ten beyond."""
    if not math.isfinite(value):
        return "\N{EN DASH}"
    size = abs(value)
    if size and not 1e-4 <= size < 1e12:
        exponent = math.floor(math.log10(size))
        digits = _plain(value / 10.0**exponent)
        power = f"10{str(exponent).translate(_SUPERSCRIPT)}"
        return power if digits == "1" else f"{digits}·{power}"
    if size < 9999.5:
        return f"{value:,.0f}".replace("-", "\N{MINUS SIGN}") if size >= 999.5 else _plain(value)
    unit, suffix = next(pair for pair in _SUFFIXES if size >= pair[0] * 0.9995)
    return _plain(value / unit) + suffix


def _plain(value: float) -> str:
    """Three figures, no exponent, no trailing zeros."""
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:.{min(decimals, 12)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return ("0" if text in ("", "-0") else text).replace("-", "\N{MINUS SIGN}")
