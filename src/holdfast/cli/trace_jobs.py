"""Read job records for `holdfast trace`, from the argument JOBS and the options for reading."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import progress
from holdfast.cli.output_paths import OUTPUT_FOLDER
from holdfast.core.errors import BadUse

if TYPE_CHECKING:
    from holdfast.trace import Note, Trace

GIVEN_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)

READING = (
    click.option(
        "--metrics",
        multiple=True,
        metavar="[NAME=]WHERE",
        help="Telemetry: a file, folder or Prometheus URL.",
    ),
    click.option(
        "--step",
        "metrics_step_s",
        type=click.FloatRange(1),
        default=15.0,
        show_default=True,
        metavar="S",
        help="Seconds between the points requested from Prometheus.",
    ),
    click.option(
        "--fetched",
        "metrics_folder",
        type=OUTPUT_FOLDER,
        help="Folder for telemetry from Prometheus; a rerun continues the download.",
    ),
    click.option(
        "--format", "format", metavar="FORM", help="The format of JOBS, if it is not recognised."
    ),
    click.option(
        "--map",
        "column_map",
        type=GIVEN_FILE,
        help="A TOML file that maps your columns to Holdfast's.",
    ),
    click.option(
        "--reasons",
        multiple=True,
        metavar="[NAME=]FILE",
        help="Why jobs failed: a CSV of job_id, reason.",
    ),
    click.option("--types", type=GIVEN_FILE, help="A YAML file with rules for the type of a job."),
    click.option(
        "--capacity",
        multiple=True,
        metavar="[NAME=]NODESxGPUS",
        help="The size of a cluster: 286x8.",
    ),
    click.option("--zone", metavar="ZONE", help="Time zone of times without one: Asia/Shanghai."),
    click.option(
        "--since", metavar="DATE", help="Only jobs submitted on or after this date (UTC)."
    ),
    click.option("--until", metavar="DATE", help="Only jobs submitted before this date (UTC)."),
    click.option(
        "--durations",
        "duration",
        type=click.Choice(["run", "released"]),
        default="run",
        show_default=True,
        help="Duration: end minus start (run), or the source's own column (released).",
    ),
    click.option(
        "--bad-rows",
        type=click.Choice(["fail", "drop"]),
        default="fail",
        show_default=True,
        help="What to do with rows that cannot be read.",
    ),
    click.option(
        "--memory",
        "memory_limit_mb",
        type=click.IntRange(200),
        default=700,
        show_default=True,
        metavar="MB",
        help="Most memory for the query engine; the rest spills to disk.",
    ),
)
"""The options for reading job records, named like the fields of `holdfast.trace.LoadOptions`."""
READING_NAMES = (
    "metrics", "metrics_step_s", "metrics_folder", "format", "column_map", "reasons", "types", "capacity", "zone",
    "since", "until", "duration", "bad_rows", "memory_limit_mb",
)  # fmt: skip


def reads_jobs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument JOBS and the options of `READING` to a command.

    The command receives them as `jobs` and `reading`.
    """

    @functools.wraps(function)
    def gathered(*arguments: Any, **given: Any) -> Any:
        return function(
            *arguments, reading={name: given.pop(name) for name in READING_NAMES}, **given
        )

    decorated: Callable[..., Any] = gathered
    for decorate in reversed(
        (click.argument("jobs", nargs=-1, required=True, metavar="JOBS…"), *READING)
    ):
        decorated = decorate(decorated)
    return decorated


@contextmanager
def loaded(jobs: tuple[str, ...], reading: Mapping[str, Any]) -> "Iterator[Trace]":
    """Read the trace of JOBS, with the options of `READING`.

    Raises:
        BadUse: no job is between --since and --until, or for a reason of `holdfast.trace.load`.
    """
    from holdfast.trace import load

    with progress.shown() as show, load(*jobs, progress=show, **reading) as trace:
        (number,) = trace.query("SELECT count(*) AS n FROM jobs")["n"].tolist()
        refuse_nothing(number, reading)
        yield trace


def refuse_nothing(jobs: int, reading: Mapping[str, Any]) -> None:
    """Raise BadUse if no job is between --since and --until."""
    if not jobs and (reading["since"] or reading["until"]):
        given = " and ".join(
            f"{name} {reading[name]}" for name in ("since", "until") if reading[name]
        )
        raise BadUse(f"No job was submitted {given}. Give a wider span; its times are UTC.")


def lacks_gpus(trace: "Trace") -> "list[Note]":
    """Return the notes on sources that have a field for GPUs, but no job with a GPU.

    Clusters that are only read for comparison do not count.
    """
    from holdfast.trace import NO_GPUS

    return [note for note in trace.notes if note.check == NO_GPUS]
