"""Provide `holdfast trace report | check | convert | query | twin | export | formats`."""

import math
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import progress
from holdfast.cli.output import print_json, print_table
from holdfast.cli.output_paths import OUTPUT_FILE, OUTPUT_FOLDER
from holdfast.cli.trace_jobs import (
    GIVEN_FILE,
    lacks_gpus,
    loaded,
    reads_jobs,
    refuse_nothing,
)
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.words import plainly

if TYPE_CHECKING:
    from holdfast.trace import Note

FOLDER = click.Path(path_type=Path, file_okay=False)
TWINS = ("seren", "kalos")
TWIN_SAMPLES = 1000
"""The default number of samples for each device, which is four hours."""
SIMULATORS = ("sia", "helios", "tiresias", "tethys", "swf")


class _Interruptible(click.Group):
    """A command group that removes its scratch folder on Ctrl-C and on `scancel`'s SIGTERM."""

    def invoke(self, context: click.Context) -> Any:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))
        try:
            return super().invoke(context)
        except Exception as error:
            if engine_error := _of_the_engine(error):
                raise engine_error from error
            raise


def _of_the_engine(error: Exception) -> BaseException | None:
    """Convert an error of DuckDB to an error for the user; None if DuckDB's own text suffices."""
    message = str(error).partition("\n")[0]
    # DuckDB raises this error if a signal handler raised any exception.
    if isinstance(error, RuntimeError) and message == "Query interrupted":
        return KeyboardInterrupt()
    if not type(error).__module__.endswith("duckdb"):
        return None
    if "No space left on device" in message:
        return HoldfastError(
            f"The disk is full: {message}. Free some of it, or set TMPDIR to a larger one."
        )
    if type(error).__name__ == "OutOfMemoryException":
        return HoldfastError(f"The engine ran out of memory: {message}. Give it more by --memory.")
    return None


@click.group(cls=_Interruptible)
def command() -> None:
    """Show where a cluster's GPU time goes, from job records and telemetry.

    \b
    holdfast trace report jobs.txt -o report
    holdfast trace twin --like seren

    JOBS are files or folders of job records, or ledgers. `holdfast trace formats` lists the
    supported forms. NAME=FILE sets the name of the cluster that a file is from.
    """
    try:
        import duckdb  # noqa: F401 - what every command here needs first
    except ImportError as error:
        raise HoldfastError(
            f"This needs {error.name}, which is not installed. Run: pip install 'holdfast[trace]'"
        ) from error


@command.command()
@reads_jobs
@click.option(
    "--compare",
    multiple=True,
    metavar="NAME=JOBS",
    help="Another trace to compare with; repeatable.",
)
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FOLDER,
    default=Path("report"),
    show_default=True,
    help="The report's folder.",
)
@click.option(
    "--paper", is_flag=True, help="Also write every figure as PDF and PNG, sized for a paper."
)
@click.option("--title", default="", help="The title of the page.")
@click.option(
    "--pue", type=click.FloatRange(1.0), help="Power usage effectiveness.  [default: 1.25]"
)
@click.option(
    "--grid-intensity",
    type=click.FloatRange(0.0),
    help="The grid's carbon, tCO2e/MWh.  [default: 0.478]",
)
@click.option(
    "--carbon-free",
    type=click.FloatRange(0.0, 1.0),
    help="Carbon-free share of the electricity.  [default: 0.3061]",
)
@click.option(
    "--on",
    type=click.Choice(["local", "slurm", "ray"]),
    help="Read the trace in parts, on several workers.",
)
@click.option("--workers", type=click.IntRange(1), help="With --on: most parts read at once.")
@click.option(
    "--parts",
    type=FOLDER,  # written only with --on
    default=Path("report-parts"),
    show_default=True,
    help="With --on: a folder shared by all workers, for the results of parts; reruns reuse them.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def report(
    context: click.Context,
    jobs: tuple[str, ...],
    reading: dict[str, Any],
    compare: tuple[str, ...],
    output: Path,
    paper: bool,
    title: str,
    pue: float | None,
    grid_intensity: float | None,
    carbon_free: float | None,
    on: str | None,
    workers: int | None,
    parts: Path,
    as_json: bool,
) -> None:
    """Read, check, analyse, and write one page with every figure and its data.

    \b
    holdfast trace report jobs.txt -o report
    holdfast trace report jobs.csv --map columns.toml --capacity Borealis=286x8

    The exit code is 4 if a source has a field for GPUs, but no job of the source has a GPU. The
    page then contains nothing about the GPUs of that source.
    """
    from holdfast.trace import (
        Assumptions,
        characterize,
        load,
        overviews,
        require_report_folder,
        write_report,
    )

    require_report_folder(output)
    assumed = {"pue": pue, "intensity_t_per_mwh": grid_intensity, "carbon_free_share": carbon_free}
    assumptions = Assumptions(
        **{name: value for name, value in assumed.items() if value is not None}
    )
    with progress.shown() as show:
        if on:
            from holdfast.cluster import workers as workers_named
            from holdfast.trace import load_spread

            trace = load_spread(
                *jobs,
                compare=compare,
                workers=workers_named(on, limit=workers),
                folder=parts,
                progress=show,
                **reading,
            )
        else:
            trace = load(*jobs, compare=compare, progress=show, **reading)
        with trace:
            lacking = lacks_gpus(trace)
            answer = characterize(trace, assumptions=assumptions, title=title, progress=show)
        refuse_nothing(sum(read.jobs for read in answer.clusters), reading)
        page = write_report(output, answer, paper=paper, progress=show)
    if as_json:
        found = [{name: getattr(one, name) for name in FINDING_FIELDS} for one in answer.findings]
        left_out = {
            entry.analysis.name: entry.left_out for entry in answer.entries if entry.left_out
        }
        print_json("trace.report", {"page": str(page), "findings": found, "left_out": left_out})
        context.exit(4 if lacking else 0)
    for note in lacking:
        click.echo(f"{note.cluster}: {note.sentence}")
    for one in overviews(answer):
        for place, action in enumerate(one.actions, start=1):
            click.echo(f"{one.cluster}, to do {place}: {action.do} {action.why}")
    click.echo(f"Report: {page}")
    context.exit(4 if lacking else 0)


FINDING_FIELDS = ("id", "sentence", "value", "unit", "study", "holds", "why")


@command.command()
@reads_jobs
@click.option("--strict", is_flag=True, help="Exit with code 1 if a check found anything.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def check(
    context: click.Context,
    jobs: tuple[str, ...],
    reading: dict[str, Any],
    strict: bool,
    as_json: bool,
) -> None:
    """List the contradictions in the records, and how often each occurs.

    \b
    holdfast trace check jobs.txt --strict

    The exit code is 4 if a source has a field for GPUs, but no job of the source has a GPU.
    """
    from holdfast.trace import beyond_capacity

    with loaded(jobs, reading) as trace:
        notes = [*trace.notes, *beyond_capacity(trace)]
        lacking = lacks_gpus(trace)
        (number,) = trace.query("SELECT count(*) AS n FROM jobs")["n"].tolist()
    if as_json:
        print_json("trace.checks", {"jobs": number, "notes": [vars(note) for note in notes]})
    elif not notes:
        click.echo(f"{plainly(number, 'job')}; no contradictions found.")
    else:
        click.echo(f"{plainly(number, 'job')}.")
        print_table(
            ["cluster", "check", "rows", "done", "what"],
            [
                (note.cluster, note.check, f"{note.rows:,}", note.action, _note_line(note))
                for note in notes
            ],
        )
    context.exit(4 if lacking else 1 if strict and notes else 0)


def _note_line(note: "Note") -> str:
    return note.sentence + (f" ({', '.join(note.examples)})" if note.examples else "")


@command.command()
@reads_jobs
@click.option(
    "-o", "--output", type=OUTPUT_FOLDER, required=True, help="Folder of the converted trace."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def convert(jobs: tuple[str, ...], reading: dict[str, Any], output: Path, as_json: bool) -> None:
    """Convert job records and telemetry to Parquet, once.

    \b
    holdfast trace convert jobs.txt --metrics telemetry/ -o store

    Other commands then accept the folder in place of JOBS and --metrics.
    """
    from holdfast.trace import by_cluster, telemetry
    from holdfast.trace import convert as convert_jobs

    places = reading.pop("metrics")
    with loaded(jobs, reading) as trace, progress.shown() as show:
        found = by_cluster(places, list(trace.clusters), trace.compared)
        if len({cluster for cluster, _ in found}) > 1:
            raise BadUse(
                "A converted folder holds the telemetry of one cluster. Convert each cluster into its own."
            )
        for _, place in found:
            telemetry.convert(place, output, progress=show)
        convert_jobs(trace, output, progress=show)
    if as_json:
        print_json("trace.convert", {"path": str(output)})
    else:
        click.echo(f"Converted: {output}")


@command.command()
@click.argument("sql")
@reads_jobs
@click.option("--csv", "as_csv", is_flag=True, help="CSV.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def query(
    sql: str, jobs: tuple[str, ...], reading: dict[str, Any], as_csv: bool, as_json: bool
) -> None:
    """Answer a SELECT over the normalised tables: jobs; with telemetry, samples and devices.

    \b
    holdfast trace query "SELECT type, count(*) FROM jobs GROUP BY type" jobs.txt
    """
    if len(sql.split()) == 1 and Path(sql).exists():
        raise BadUse(
            f"{sql} is a file, where the question was expected. Give the SELECT first, then JOBS."
        )
    with loaded(jobs, reading) as trace:
        answer = trace.select(sql)
    if as_json:
        print_json(
            "trace.query",
            {
                "columns": list(answer.columns),
                "rows": [_finite(list(row)) for row in answer.rows()],
            },
        )
    elif as_csv:
        click.echo(answer.csv(), nl=False)
    else:
        print_table(list(answer.columns), (list(map(_known, row)) for row in answer.rows()))


def _known(cell: Any) -> Any:
    """Return None for NaN, which NumPy uses for a missing value."""
    return None if isinstance(cell, float) and math.isnan(cell) else cell


def _finite(value: Any) -> Any:
    """Return a value for JSON; None replaces NaN and infinity, which JSON does not have."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [_finite(one) for one in value]
        case dict():
            return {str(name): _finite(one) for name, one in value.items()}
        case _ if hasattr(value, "tolist"):
            return _finite(value.tolist())
        case _:
            return value


@command.command()
@click.option(
    "--like",
    required=True,
    metavar="seren|kalos|JOBS",
    help="The trace to imitate: a published one, or yours.",
)
@click.option(
    "-n",
    "--jobs",
    "number",
    type=click.IntRange(1),
    metavar="JOBS",
    help="Number of jobs.  [default: as in the trace]",
)
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FOLDER,
    default=Path("twin"),
    show_default=True,
    help="The twin's folder.",
)
@click.option(
    "--telemetry",
    type=click.IntRange(0),
    metavar="SAMPLES",
    help=f"Samples a device, 15 s apart.  [default: {TWIN_SAMPLES}; 0 for your own trace]",
)
@click.option(
    "--gpus",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Number of GPUs with telemetry.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The same seed draws the same twin."
)
@click.option(
    "--map",
    "column_map",
    type=GIVEN_FILE,
    help="A TOML file that maps your columns to Holdfast's.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def twin(
    like: str,
    number: int | None,
    output: Path,
    telemetry: int | None,
    gpus: int,
    seed: int,
    column_map: Path | None,
    as_json: bool,
) -> None:
    """Draw a synthetic trace that follows the counts of a trace, but contains none of its rows.

    \b
    holdfast trace twin --like seren
    holdfast trace twin --like jobs.txt -n 10000
    """
    from holdfast.trace.twin import (
        calibration,
        draw,
        fit,
        jobs_of,
        write_jobs,
        write_mark,
        write_reasons,
        write_telemetry,
    )

    with progress.shown() as show:
        if like in TWINS:
            calibrated = calibration(like)
        else:
            from holdfast.trace import load

            with load(like, column_map=column_map, progress=show) as trace:
                cluster, columns = jobs_of(trace)
            zone = _offset(cluster.utc_offset_h)
            calibrated = fit(columns, name=cluster.name, zone=zone, capacity_gpus=cluster.gpu_num)
        show("Drawing", 0, None)
        drawn = draw(calibrated, number, seed=seed)
        output.mkdir(parents=True, exist_ok=True)
        path = output / f"trace_{drawn.cluster.lower()}.csv"
        show("Writing", 0, None)
        write_jobs(drawn, path)
        if (drawn.reason != "").any():
            write_reasons(drawn, output / f"reasons_{drawn.cluster.lower()}.csv")
        samples = telemetry if telemetry is not None else TWIN_SAMPLES if like in TWINS else 0
        if samples:
            folder = output / "utilization" / drawn.cluster.lower()
            write_telemetry(calibrated, folder, samples=samples, seed=seed, gpus=gpus)
        write_mark(output, like if like in TWINS else "a trace", seed=seed)
    if as_json:
        print_json(
            "trace.twin", {"path": str(path), "jobs": len(drawn.job_id), "like": like, "seed": seed}
        )
    else:
        click.echo(f"Twin: {path} ({plainly(len(drawn.job_id), 'job')})")


def _offset(utc_offset_h: float) -> str:
    sign, minutes = "-" if utc_offset_h < 0 else "+", round(abs(utc_offset_h) * 60)
    return f"{sign}{minutes // 60:02d}:{minutes % 60:02d}"


@command.command()
@reads_jobs
@click.option(
    "--to", "form", type=click.Choice(SIMULATORS), required=True, help="The simulator's form."
)
@click.option("-o", "--output", type=OUTPUT_FILE, required=True, help="The file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def export(
    jobs: tuple[str, ...], reading: dict[str, Any], form: str, output: Path, as_json: bool
) -> None:
    """Write the jobs in the input format of a scheduling simulator.

    \b
    holdfast trace export jobs.txt --to swf -o jobs.swf
    """
    from holdfast.trace.twin import export as write_form
    from holdfast.trace.twin import jobs_of

    with loaded(jobs, reading) as trace:
        cluster, columns = jobs_of(trace)
        written = write_form(
            columns, output, form, name=cluster.name, zone=_offset(cluster.utc_offset_h)
        )
        left_out = len(columns["gpu_num"]) - written
    if as_json:
        fields = {"path": str(output), "format": form, "jobs": written, "left_out": left_out}
        print_json("trace.export", fields)
        return
    note = f", {left_out:,} without GPUs or a known time left out" if left_out else ""
    click.echo(f"Written: {output} ({plainly(written, 'job')}{note})")


@command.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def formats(as_json: bool) -> None:
    """List the supported forms of job records, and the supported metrics of telemetry.

    \b
    holdfast trace formats
    """
    from holdfast.trace import adapters
    from holdfast.trace.telemetry import METRICS

    forms = {source.name: source.title for source in adapters()}
    if as_json:
        metrics = [
            {"name": metric.name, "unit": metric.unit, "title": metric.title}
            for metric in METRICS.values()
        ]
        print_json("trace.formats", {"forms": forms, "metrics": metrics})
        return
    print_table(["--format", "job records"], forms.items())
    print_table(
        ["metric", "unit", "telemetry"],
        [(metric.name, metric.unit, metric.title) for metric in METRICS.values()],
    )
