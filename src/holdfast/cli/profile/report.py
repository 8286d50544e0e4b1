"""Provide `holdfast profile report`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json, print_table
from holdfast.cli.output_paths import OUTPUT_FILE
from holdfast.core.errors import BadUse
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RUN_ID, EvaluationPaths, RunPaths

if TYPE_CHECKING:
    from holdfast.profile.report import ProfileSummary

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("target", metavar="RUN|FOLDER")
@click.option("--compare", metavar="RUN|FOLDER", help="Another recording to compare with.")
@click.option(
    "--job",
    "job_file",
    type=FILE,
    help="The model, its layout and the GPU.  [default: job.toml in the recording's folder]",
)
@click.option(
    "--peak-tflops", type=float, help="The GPU's dense peak in the precision of the job, TFLOP/s."
)
@click.option(
    "--perfetto", type=OUTPUT_FILE, help="Also write counters, phases and incidents to this file."
)
@click.option(
    "-o", "--output", type=OUTPUT_FILE, help="The HTML page.  [default: in the run's folder]"
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def report(
    place: Place,
    target: str,
    compare: str | None,
    job_file: Path | None,
    peak_tflops: float | None,
    perfetto: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write a page about a recording: where the time, the memory and the energy went.

    \b
    holdfast profile report RUN
    holdfast profile report RUN --compare OTHER_RUN

    RUN is a run or an evaluation; FOLDER holds a recording.
    """
    from holdfast.profile import report as reports

    folder, page = _found(place, target)
    summary = _summary(place, target, job_file, peak_tflops)
    other = None if compare is None else _summary(place, compare, None, peak_tflops)
    page = output or page
    reports.write_report(page, summary, other)
    if perfetto is not None:
        reports.write_perfetto(perfetto, summary.recording, title=summary.name)
    if as_json:
        fields = {
            **reports.as_json(summary),
            "folder": str(folder),
            "page": str(page),
            "perfetto": perfetto and str(perfetto),
            "compared": other and reports.as_json(other),
        }
        print_json("profile", fields)
        return
    for line in reports.sentences(summary):
        click.echo(line)
    if other is not None:
        rows = [
            (row.name, row.one, row.other, row.change) for row in reports.comparison(summary, other)
        ]
        print_table(["", summary.name, other.name, "change"], rows)
    click.echo(f"Report: {page}")
    if perfetto is not None:
        click.echo(f"Perfetto: {perfetto}")


def _summary(
    place: Place, target: str, job_file: Path | None, peak_tflops: float | None
) -> "ProfileSummary":
    from holdfast.profile import Recording, incidents_of
    from holdfast.profile.report import Job, summarize

    folder, _ = _found(place, target)
    incidents = []
    if _is_run(place, target):
        with Ledger.open(place.ledger) as ledger:
            incidents = incidents_of(ledger, target)
    recording = Recording.read(folder, incidents)
    job = None
    if job_file is not None or (folder / "job.toml").exists():
        job = Job.read(job_file or folder / "job.toml")
    named = folder.resolve().parent if folder.name == "profile" else folder.resolve()
    name = target if RUN_ID.fullmatch(target) else named.name
    if peak_tflops is not None and job is None:
        raise BadUse(
            "--peak-tflops gives no MFU without the model and its layout. Name a file by --job,"
            f" or write {folder / 'job.toml'}."
        )
    return summarize(recording, name=name, job=job, peak_tflops=peak_tflops)


def _is_run(place: Place, target: str) -> bool:
    return bool(RUN_ID.fullmatch(target)) and RunPaths(place.home, target).root.is_dir()


def _found(place: Place, target: str) -> tuple[Path, Path]:
    """Return the folder of a recording, and the default path of its page."""
    if _is_run(place, target):
        paths = RunPaths(place.home, target)
        return paths.profile, paths.report.with_name("profile.html")
    if RUN_ID.fullmatch(target) and EvaluationPaths(place.home, target).root.is_dir():
        root = EvaluationPaths(place.home, target).root
        return root / "profile", root / "profile.html"
    folder = Path(target)
    if (folder / "profile").is_dir():
        folder /= "profile"
    return folder, folder / "profile.html"
