"""`holdfast trace report | check | convert | query | twin | export | formats`."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import progress
from holdfast.cli.output import print_json, print_table
from holdfast.core.errors import BadUse, HoldfastError

if TYPE_CHECKING:
    from holdfast.trace import Note, Table, Trace

FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def command() -> None:
    """Show where a cluster's GPU time goes, from job records and telemetry.

    JOBS are files or folders of job records, or ledgers; `holdfast trace formats` lists the forms that are known.
    NAME=FILE gives its cluster a name.
    """


def _reads_jobs(function: Callable[..., Any]) -> Callable[..., Any]:
    """JOBS and the options of every command that reads them, gathered as `given` for `_loaded`."""
    decorators = (
        click.argument("jobs", nargs=-1, required=True, metavar="JOBS…"),
        click.option(
            "--metrics", multiple=True, metavar="[NAME=]WHERE", help="Telemetry: files, a folder, or a Prometheus URL."
        ),
        click.option("--format", "format", metavar="FORM", help="The form of JOBS, where it is not recognised."),
        click.option("--map", "column_map", type=FILE, help="A TOML file that says which column is what."),
        click.option("--types", "type_rules", type=FILE, help="A YAML file of rules that tell the type of a job."),
        click.option("--capacity", multiple=True, metavar="[NAME=]NODESxGPUS", help="How large a cluster is: 286x8."),
        click.option("--since", metavar="DATE", help="Only jobs submitted from then on (UTC)."),
        click.option("--until", metavar="DATE", help="Only jobs submitted before then (UTC)."),
        click.option(
            "--durations",
            "duration",
            type=click.Choice(["run", "released"]),
            default="run",
            help="What duration means: end minus start, or the source's own column.",
        ),
        click.option(
            "--bad-rows", type=click.Choice(["fail", "drop"]), default="fail", help="What to do with unreadable rows."
        ),
        click.option(
            "--memory", "memory_limit_mb", type=click.IntRange(200), default=700, show_default=True, metavar="MB",
            help="What the engine may hold in memory; the rest spills to disk.",
        ),
    )  # fmt: skip
    names = ("jobs", "metrics", "format", "column_map", "type_rules", "capacity", "since", "until", "duration",
             "bad_rows", "memory_limit_mb")  # fmt: skip

    @functools.wraps(function)
    def gathered(*arguments: Any, **given: Any) -> Any:
        return function(*arguments, given={name: given.pop(name) for name in names}, **given)

    return functools.reduce(lambda wrapped, decorate: decorate(wrapped), reversed(decorators), gathered)


@contextmanager
def _loaded(
    given: Mapping[str, Any], *, compare: Sequence[str] = (), workers: "Workers | None" = None, parts: Path | None = None
) -> "Iterator[tuple[Trace, progress.Progress]]":
    """The trace that a command reads, closed in the end."""
    with _extra_named():
        from holdfast.trace import attach, load
        from holdfast.trace.spread import load_spread
    options = dict(given)
    jobs = options.pop("jobs")
    metrics = _by_cluster(options.pop("metrics"))
    options["capacity"] = _by_cluster(options["capacity"])
    with progress.shown() as show:
        trace = load(*jobs, compare=compare, progress=show, **options)
        with trace:
            for cluster, places in metrics.items():
                for where in places:
                    attach(trace, where, cluster=cluster, progress=show)
            yield trace, show


@command.command()
@_reads_jobs
@click.option("--compare", multiple=True, metavar="NAME=JOBS", help="Another trace to stand beside; repeatable.")
@click.option("-o", "--output", type=FOLDER, default=Path("report"), show_default=True, help="Folder of the report.")
@click.option("--paper", is_flag=True, help="Also every figure as PDF and PNG fit for a paper.")
@click.option("--on", type=click.Choice(["here", "local", "slurm", "ray"]), default="here", help="Where the reading runs.")
@click.option("--workers", type=click.IntRange(1), help="At most so many tasks at a time with --on.")
@click.option("--pue", type=click.FloatRange(1.0), default=1.25, show_default=True, help="Power usage effectiveness.")
@click.option(
    "--grid-intensity", type=click.FloatRange(0.0), default=0.478, show_default=True, help="tCO2e per MWh of the grid."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def report(
    given: Mapping[str, Any],
    compare: tuple[str, ...],
    output: Path,
    paper: bool,
    on: str,
    workers: int | None,
    pue: float,
    grid_intensity: float,
    as_json: bool,
) -> None:
    """Read, check, analyse, and write one page with every figure and its data."""
    from holdfast.trace import Parameters, characterize, write_report

    parameters = Parameters(pue=pue, grid_t_per_mwh=grid_intensity)
    with _loaded(given, compare=compare) as (trace, show):
        answer = characterize(trace, parameters=parameters, progress=show)
        page = write_report(output, answer, paper=paper, progress=show)
    if as_json:
        print_json("trace.report", {"page": str(page), "findings": [vars(one) for one in answer.findings]})
        return
    click.echo(answer.headline)
    click.echo(f"Report: {page}")


@command.command()
@_reads_jobs
@click.option("--strict", is_flag=True, help="Leave with code 1 if anything was found.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def check(context: click.Context, given: Mapping[str, Any], strict: bool, as_json: bool) -> None:
    """Say what contradicts itself in the records, and how often."""
    with _loaded(given) as (trace, _):
        notes = list(trace.notes)
        jobs = int(trace.query("SELECT count(*) AS n FROM jobs")["n"][0])
    if as_json:
        print_json("trace.checks", {"jobs": jobs, "notes": [vars(note) for note in notes]})
    elif not notes:
        click.echo(f"{jobs:,} jobs; nothing contradicts itself.")
    else:
        click.echo(f"{jobs:,} jobs.")
        print_table(
            ["cluster", "check", "rows", "done", "what"],
            [(note.cluster, note.check, f"{note.rows:,}", note.action, _told(note)) for note in notes],
        )
    context.exit(1 if strict and notes else 0)


def _told(note: "Note") -> str:
    return note.sentence + (f" ({', '.join(note.examples)})" if note.examples else "")


@command.command()
@_reads_jobs
@click.option("-o", "--output", type=FOLDER, required=True, help="Folder of the converted trace.")
def convert(given: Mapping[str, Any], output: Path) -> None:
    """Convert to Parquet, once; the folder then stands for JOBS, and for --metrics."""
    from holdfast.trace import convert as convert_trace

    with _loaded(given) as (trace, show):
        convert_trace(trace, output, progress=show)
    click.echo(f"Converted: {output}")


@command.command()
@click.argument("sql")
@_reads_jobs
@click.option("--csv", "as_csv", is_flag=True, help="CSV.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def query(sql: str, given: Mapping[str, Any], as_csv: bool, as_json: bool) -> None:
    """Answer SQL over the normalised tables: jobs, clusters, and samples and devices where there is telemetry."""
    with _loaded(given) as (trace, _):
        answer = trace.query(sql)
    if as_json:
        print_json("trace.query", {"columns": list(answer.columns), "rows": [list(row) for row in answer.rows()]})
    elif as_csv:
        click.echo(answer.csv(), nl=False)
    else:
        print_table(list(answer.columns), answer.rows())
