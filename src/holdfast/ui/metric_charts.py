"""Draw small charts of a run's speed and metrics; the page shows the value under the pointer."""

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from holdfast.core import words
from holdfast.core.accounting import Point, RunSummary

PLACES: Final = 120
"""The most places of a chart.

A place with several points shows the range of their values, and the last one.
"""
CHARTS_LIMIT: Final = 24
_WIDTH, _HEIGHT, _TOP, _BOTTOM = 320.0, 110.0, 18.0, 94.0


@dataclass(frozen=True, kw_only=True)
class MetricChart:
    """The chart of one metric over the steps."""

    name: str
    last: str
    svg: Markup


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Neighbouring points that a chart shows as one: the last point, and the range of all."""

    step: int
    value: float
    low: float
    high: float


def metric_charts(summary: RunSummary) -> tuple[MetricChart, ...]:
    """Return charts of the steps per second, the loss, and each other reported number.

    Steps that do not survive are left out, and so are values that are not finite.
    """
    loss = {"loss": summary.loss.surviving} if summary.loss.surviving else {}
    charts = []
    for name, points in {**summary.metrics, **loss}.items():
        places = gathered(points)
        if len(places) > 1:
            svg = _svg(f"{name} of run {summary.run.run_id}", places)
            charts.append(MetricChart(name=name, last=_shown(places[-1].value), svg=svg))
    return tuple(charts[:CHARTS_LIMIT])


def gathered(points: Sequence[Point]) -> list[Place]:
    """Group finite points into at most `PLACES` places with equal numbers of points."""
    finite = [point for point in points if math.isfinite(point.value)]
    size = max(1, math.ceil(len(finite) / PLACES))
    places = []
    for start in range(0, len(finite), size):
        group = finite[start : start + size]
        values = [point.value for point in group]
        places.append(
            Place(step=group[-1].step, value=values[-1], low=min(values), high=max(values))
        )
    return places


def _svg(label: str, places: Sequence[Place]) -> Markup:
    first, last = places[0].step, places[-1].step
    low, high = min(place.low for place in places), max(place.high for place in places)

    def x(step: int) -> float:
        return (step - first) / max(last - first, 1) * _WIDTH

    def y(value: float) -> float:
        return _BOTTOM - (value - low) / ((high - low) or 1.0) * (_BOTTOM - _TOP)

    line = " ".join(f"{x(place.step):.1f},{y(place.value):.1f}" for place in places)
    band = [f"{x(place.step):.1f},{y(place.high):.1f}" for place in places]
    band += [f"{x(place.step):.1f},{y(place.low):.1f}" for place in reversed(places)]
    parts = [
        (
            f'<svg class="metric" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
            f'aria-label="{html.escape(words.clean(label))}: from {_shown(low)} to {_shown(high)}, '
            f'at last {_shown(places[-1].value)}">'
        ),
        f'<polygon class="range" points="{" ".join(band)}"/><polyline points="{line}"/>',
        (
            f'<text class="edge" y="12">{_shown(high)}</text>'
            f'<text class="edge" y="{_HEIGHT:g}">{_shown(low)}, step {first:,}</text>'
            f'<text class="edge end" x="{_WIDTH:g}" y="{_HEIGHT:g}">step {last:,}</text>'
        ),
    ]
    middles = [(x(left.step) + x(right.step)) / 2 for left, right in itertools.pairwise(places)]
    for place, left, right in zip(places, [0.0, *middles], [*middles, _WIDTH], strict=True):
        spread = (
            "" if place.low == place.high else f" ({_shown(place.low)} to {_shown(place.high)})"
        )
        parts.append(
            f'<g class="at"><rect x="{left:.1f}" y="0" width="{right - left:.1f}" '
            f'height="{_BOTTOM:g}"/><circle cx="{x(place.step):.1f}" cy="{y(place.value):.1f}" '
            f'r="3"/><text class="end" x="{_WIDTH:g}" y="12">step {place.step:,}: '
            f"{_shown(place.value)}{spread}</text></g>"
        )
    return Markup("".join([*parts, "</svg>"]))  # safe: only numbers and an escaped label


def _shown(value: float) -> str:
    """Format a value with four significant figures."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
