"""List failing programs, record them, and make variants: `python -m failure_lab`."""

import signal
import sys
import time
from pathlib import Path

import click

from failure_lab.programs import PROGRAMS
from failure_lab.record import AT_ONCE, Outcome, record
from failure_lab.variants import write_variants

INCOMPLETE = 4


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def lab() -> None:
    """Small programs that really fail, and the labelled logs they leave."""


@lab.command()
def ls() -> None:
    """List the programs."""
    for program in PROGRAMS.values():
        ranks = f"{program.ranks} rank{'s' * (program.ranks > 1)}"
        click.echo(
            f"{program.id:32} {program.reason:20} {program.launcher:9} {ranks:8} {program.cause}"
        )


@lab.command(name="record")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Where the logs go.",
)
@click.option(
    "--only", multiple=True, metavar="ID", type=click.Choice(list(PROGRAMS)), help="Run only these."
)
@click.option("--at-once", default=AT_ONCE, show_default=True, type=click.IntRange(1, 8))
def record_command(out: Path, only: tuple[str, ...], at_once: int) -> None:
    """Run programs and record their output."""
    chosen = [PROGRAMS[name] for name in only] if only else list(PROGRAMS.values())
    # As Ctrl-C does: end after the runs under way, and leave no process behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in record(chosen, out, at_once=at_once):
        outcomes.append(outcome)
        said = "skipped: " if outcome.skipped else "FAILED: " if outcome.problem else ""
        done = f"{len(outcomes):3}/{len(chosen)}"
        click.echo(
            f"{done} {outcome.program:32} {outcome.wall_s:5.1f} s  {said}{outcome.problem or ''}"
        )
    recorded = sum(outcome.problem is None for outcome in outcomes)
    skipped = sum(outcome.skipped for outcome in outcomes)
    click.echo(
        f"{recorded} recorded, {skipped} skipped of {len(chosen)} in {time.monotonic() - start:.0f} s: {out}"
    )
    if recorded + skipped < len(chosen):
        sys.exit(INCOMPLETE)


@lab.command()
@click.option(
    "--from", "source", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Where the variants go.",
)
@click.option("--seed", default=0, show_default=True)
def variants(source: Path, out: Path, seed: int) -> None:
    """Make variants of recorded logs, with labels of their own."""
    click.echo(f"{write_variants(source, out, seed)} variants: {out}")


if __name__ == "__main__":
    lab()
