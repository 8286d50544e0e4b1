"""Show the progress of work that takes over two seconds: a bar, or lines without a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

QUIET_S = 2.0
"""Work shorter than this, in seconds, shows no progress; also the time between plain lines."""

Progress = Callable[[str, float, float | None], None]
"""`progress(what, done, total)`: the name and the amount of the work; total is None if unknown."""


@contextmanager
def shown() -> Iterator[Progress]:
    """Yield a `Progress` function that shows the progress on standard error."""
    if not sys.stderr.isatty():
        yield _plain_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bars.add_task("", total=None, visible=False)
    began_s = time.monotonic()

    def progress(what: str, done: float, total: float | None) -> None:
        bars.update(
            task,
            description=what,
            completed=done,
            total=total,
            visible=time.monotonic() - began_s > QUIET_S,
        )

    with bars:
        yield progress


def _plain_lines() -> Progress:
    last_s, last_what = time.monotonic(), ""

    def progress(what: str, done: float, total: float | None) -> None:
        nonlocal last_s, last_what
        now_s = time.monotonic()
        if now_s - last_s > QUIET_S:
            share = f" {done / total:.0%}" if total else ""
            if (line := f"{what}{share}") != last_what:
                click.echo(line, err=True)
            last_s, last_what = now_s, line

    return progress
