"""Show the progress of an evaluation: a bar on a terminal, plain lines elsewhere."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from holdfast.core import words

if TYPE_CHECKING:
    from holdfast.evaluate import Status

RATE_WINDOW_S = 10.0
"""The period, in seconds, over which the rate of samples is measured."""
PLAIN_EVERY_S = 10.0
"""The least time between two plain lines about the same state, in seconds."""

Show = Callable[["Status"], None]


@contextmanager
def shown(*, quiet: bool) -> Iterator[Show | None]:
    """Yield a function that shows a `Status` on standard error; yield None if `quiet`."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _plain_lines()


class Rate:
    """Measure the rate of samples per second over the last `RATE_WINDOW_S` seconds.

    Samples that were answered before this run of the evaluation do not count.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def after(self, status: "Status") -> float | None:
        """Record `status`, and return the rate; None before the second status."""
        self._seen.append((status.now_s, status.samples_done))
        while len(self._seen) > 2 and self._seen[1][0] <= status.now_s - RATE_WINDOW_S:
            self._seen.popleft()
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


def sentence(status: "Status", rate: float | None) -> str:
    """Format a status and the rate as one line."""
    done = f"{status.samples_done:,} of {words.plainly(status.samples, 'sample')}"
    parts = [f"{status.state}: {done if status.samples else 'tasks are being prepared'}"]
    if rate is not None and rate > 0:
        parts.append(f"{rate:,.1f} a second")
    if status.time_left_s > 0:
        parts.append(f"{words.duration(status.time_left_s)} left")
    if status.bound_s > 0:
        parts.append(f"bound {words.duration(status.bound_s)}")
    if status.engines or status.state != "running":
        parts.append(f"{status.engines_ready} of {words.plainly(status.engines, 'engine')} ready")
    else:
        parts.append("no engine needed so far")
    if status.engines_ready:
        parts.append(f"{words.percent(status.busy_share)} busy")
    if status.reused:
        parts.append(f"{words.plainly(status.reused, 'answer')} reused")
    return ", ".join(parts).replace(words.NBSP, " ")


def _plain_lines() -> Show:
    rate = Rate()
    last_s, last_state = float("-inf"), ""

    def show(status: "Status") -> None:
        nonlocal last_s, last_state
        now = rate.after(status)
        if status.state != last_state or status.now_s - last_s >= PLAIN_EVERY_S:
            click.echo(sentence(status, now), err=True)
            last_s, last_state = status.now_s, status.state

    return show


@contextmanager
def _bar() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    rate = Rate()
    bars = Progress(
        BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
    )
    with bars:
        task = bars.add_task("starting", total=None)

        def show(status: "Status") -> None:
            total = status.samples or None
            text = sentence(status, rate.after(status)).replace("[", "\\[")
            bars.update(task, description=text, completed=status.samples_done, total=total)

        yield show
