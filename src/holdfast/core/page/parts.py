"""Define the colours of every page, the key figures, and the bars that show where time went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.core import words

LIGHT: Final[Mapping[str, str]] = {
    "ink": "#1b1c1f",
    "muted": "#5c6068",
    "hair": "#dddcd6",
    "paper": "#fcfcfa",
    "panel": "#f5f5f1",
}
"""The CSS variables that every page has, with their colours in light mode."""
DARK: Final[Mapping[str, str]] = {
    "ink": "#e7e5df",
    "muted": "#a2a6ad",
    "hair": "#34383e",
    "paper": "#15171a",
    "panel": "#1c1f23",
}
"""The same CSS variables with their colours in dark mode."""


@dataclass(frozen=True)
class KeyFigure:
    """A number to show large, with its name and a note in small print."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of a bar chart, with an amount and its share of the total."""

    key: str
    """The CSS class that sets the bar's colour."""
    name: str
    meaning: str
    amount: str
    share: str
    width: str
    """The width as a CSS percentage."""


@dataclass(frozen=True, kw_only=True)
class TimeBars:
    """The bars of one chart; the printed amounts and shares add up to the printed total."""

    bars: tuple[Bar, ...]
    total: str
    unit: str


def time_bars(
    rows: Sequence[tuple[str, str, str, float]], *, longest_s: float | None = None
) -> TimeBars:
    """Create the bars of a chart that shows where time went.

    Args:
        rows: for each bar, the CSS class, the name, the meaning and the seconds.
        longest_s: the time, in seconds, by which the unit is chosen; None: the sum of all rows.
    """
    total_s = sum(seconds for *_, seconds in rows)
    unit, unit_s = words.unit_of_time(total_s if longest_s is None else longest_s)
    shares = [seconds / total_s if total_s > 0 else 0.0 for *_, seconds in rows]
    amounts = words.adding_up({str(at): row[3] / unit_s for at, row in enumerate(rows)}, 1)
    percents = words.adding_up({str(at): share * 100 for at, share in enumerate(shares)}, 1)
    bars = tuple(
        Bar(
            key=key,
            name=name,
            meaning=meaning,
            amount=amounts[str(at)],
            share=percents[str(at)],
            width=f"{shares[at] * 100:.2f}%",
        )
        for at, (key, name, meaning, _) in enumerate(rows)
    )
    return TimeBars(bars=bars, total=words.adding_up({"": total_s / unit_s}, 1)[""], unit=unit)
