"""Define the options of `holdfast checkpoint prune`, and convert them to a retention policy."""

import re
from collections.abc import Callable
from typing import Any, Literal

import click

from holdfast.checkpoint import Best, Retention
from holdfast.core.errors import BadUse

_UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h|d|w)")
_LESS_IS_BETTER = {"loss", "perplexity", "ppl", "error"}
_MORE_IS_BETTER = {"acc", "accuracy", "match", "f1", "score", "reward"}
_SAY_NOTHING = {"norm", "none"}
"""Words in a metric's name that do not show whether more is better, and are skipped.

lm-evaluation-harness appends them for the normalisation and the filter.
"""
_OPTIONS = (
    click.option("--last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N."),
    click.option(
        "--every",
        "every_steps",
        type=click.IntRange(min=1),
        metavar="K",
        help="Keep checkpoints whose step is a multiple of K.",
    ),
    click.option(
        "--best",
        multiple=True,
        metavar="METRIC[:min|max]=N",
        help="Keep the N with the least or largest value of a metric (loss:min=3); repeatable.",
    ),
    click.option(
        "--within",
        metavar="TIME",
        help="Keep checkpoints of the last 90s, 30min, 12h, 7d or 2w.",
    ),
)


def RULES(function: Callable[..., Any]) -> Callable[..., Any]:  # noqa: N802 - beside the other options
    """Add the options for retention rules to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def policy_of(
    *, last: int | None, every_steps: int | None, best: tuple[str, ...], within: str | None
) -> Retention:
    """Return the retention policy that the options describe.

    Raises:
        BadUse: an option is malformed.
    """
    return Retention(
        last=last,
        every_steps=every_steps,
        within_s=None if within is None else _seconds(within),
        best=tuple(_best(text) for text in best),
    )


def _seconds(text: str) -> float:
    match = _TIME.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise BadUse(
            f"--within {text} is not a duration. Write a number and s, min, h, d or w, such as 12h."
        )
    return float(match[1]) * _UNITS_S[match[2]]


def _best(text: str) -> Best:
    named, equals, count = text.rpartition("=")
    if not equals or not count.isdecimal():
        raise BadUse(
            f"--best {text} is malformed. Write METRIC:min=N or METRIC:max=N, such as loss:min=3."
        )
    metric, colon, mode = named.rpartition(":")
    if colon and mode in ("min", "max"):
        return Best(metric=metric, mode="min" if mode == "min" else "max", count=int(count))
    return Best(metric=named, mode=_mode_of(named), count=int(count))


def _mode_of(metric: str) -> Literal["min", "max"]:
    """Return "min" if smaller values of a metric are better, "max" if larger ones are.

    Raises:
        BadUse: the name does not show which; a wrong guess would delete the best checkpoint.
    """
    words = [
        word
        for word in re.split(r"[^a-z0-9]+", metric.lower())
        if word and word not in _SAY_NOTHING
    ]
    less, more = (
        bool(words) and words[-1] in known for known in (_LESS_IS_BETTER, _MORE_IS_BETTER)
    )
    other = _MORE_IS_BETTER if less else _LESS_IS_BETTER
    if less == more or not other.isdisjoint(words):
        raise BadUse(
            f"The name {metric!r} does not show whether more is better. Write {metric}:max=N or {metric}:min=N."
        )
    return "min" if less else "max"
