"""Provide `holdfast diagnose`: find why a job failed, and a safe next action."""

import glob
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import error_object, print_json
from holdfast.cli.progress import Progress, shown
from holdfast.core.errors import BadUse, HoldfastError

if TYPE_CHECKING:
    from holdfast.core.ledger import Ledger
    from holdfast.diagnose import Compressed, Diagnosis, RuleSet
    from holdfast.diagnose.agents import Endpoint
    from holdfast.diagnose.memory import Known
    from holdfast.diagnose.study import Study

STDIN = "-"


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """The options that apply to each diagnosed job."""

    around: bool
    explain: bool
    compressed: bool
    rules: "RuleSet"
    ledger: "Ledger | None"
    """The ledger that holds past incidents and records this one; None: no ledger."""
    known: "Known | None"
    """The rules and incidents that were learned from past incidents; None without a ledger."""
    endpoint: "Endpoint | None"
    """The endpoint of a language model to ask; None: no model."""

    @property
    def needs_text(self) -> bool:
        """True if the diagnosis needs the compressed log."""
        return self.compressed or self.ledger is not None or self.endpoint is not None


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--explain", is_flag=True, help="Also print the points for and against each candidate."
)
@click.option(
    "--each",
    is_flag=True,
    help="Treat each PATH as a separate job; print one JSON object a line, with its path.",
)
@click.option(
    "--compressed",
    is_flag=True,
    help="Print only the few lines that matter; with --json, add them to the answer.",
)
@click.option(
    "--remember",
    is_flag=True,
    help="Compare with the incidents in the ledger, and add this one.",
)
@click.option(
    "--model/--no-model",
    default=False,
    help="Query the model at $HOLDFAST_LLM_URL when the rules are uncertain.",
)
@click.option(
    "--rules", metavar="DIR", type=click.Path(path_type=Path), help="A folder with your own rules."
)
@click.pass_obj
def command(
    place: Place,
    *,
    paths: tuple[str, ...],
    as_json: bool,
    explain: bool,
    each: bool,
    compressed: bool,
    remember: bool,
    model: bool,
    rules: Path | None,
) -> int:
    """Show how a job ended and why it failed, with cited lines, the faulty part and the next step.

    \b
    holdfast diagnose job.log
    holdfast diagnose logs/ dmesg.txt sacct.json
    kubectl logs job/train --prefix | holdfast diagnose -

    All PATHs belong to one job: its log, one file for each rank, its output folder, a kernel log,
    the output of sacct --json, Flight Recorder dumps. A file may be plain, .gz or .zst. A PATH may
    be a pattern in quotes, or - for standard input. The exit code is 0 for every diagnosis, also
    for Unknown. With --json, an error is also printed as a JSON object.
    """
    as_json |= each
    if compressed and explain and not as_json:
        raise BadUse("--compressed prints the lines alone. Leave out --explain, or add --json.")
    if "" in paths:
        raise BadUse(
            "A PATH is empty: perhaps a variable that is not set. Give a log file, or the folder of its logs."
        )
    if STDIN in paths and sys.stdin is None:
        raise BadUse("Standard input is closed. Pipe the log into this command, or give its path.")
    with ExitStack() as stack:
        ledger = stack.enter_context(_open(place.ledger)) if remember else None
        known = _known(ledger, place) if ledger else None
        wanted = DiagnoseOptions(
            around=not as_json and not compressed,
            explain=explain,
            compressed=compressed,
            rules=_rules(known, rules),
            ledger=ledger,
            known=known,
            endpoint=requested_endpoint() if model else None,
        )
        if each:
            return _print_each(_expanded(paths), wanted)
        stack.enter_context(_readable(paths, wanted))
        try:
            study = _studied(paths, wanted)
        except BadUse as error:
            if not as_json:
                raise
            _print_object(error_object(str(error)))
            return error.exit_code
        if as_json:
            _print_object(_fields(study, wanted))
        elif compressed and study.compressed is not None:
            click.echo(os.fsencode(study.compressed.text), nl=False)
        else:
            from holdfast.cli.diagnosis_view import print_diagnosis

            print_diagnosis(study, why=explain)
    return 0


def _print_object(fields: dict[str, Any]) -> None:
    from holdfast.diagnose import VERSION

    print_json("diagnosis", fields, version=VERSION)


def _print_each(paths: Iterable[str], wanted: DiagnoseOptions) -> int:
    """Print one line for each path; return 0 if at least one path could be diagnosed."""
    answered = False
    for path in paths:
        fields: dict[str, Any]
        try:
            with _readable([path], wanted):
                fields = _fields(_studied([path], wanted), wanted)
            answered = True
        except OSError as error:
            fields = error_object(f"{error}.", "Check that path and its permissions.")
        except HoldfastError as error:
            fields = error_object(str(error))
        # Print after the progress bar has ended: the bar redirects standard output to itself.
        _print_object({"path": path, **fields})
    return 0 if answered else BadUse.exit_code


def _expanded(paths: Iterable[str]) -> list[str]:
    """Replace each pattern among the paths with the paths that it matches."""
    found = []
    for path in paths:
        fits = (
            []
            if path == STDIN or os.path.lexists(path)
            else sorted(glob.glob(path, recursive=True))  # noqa: PTH207
        )
        found += fits or [path]
    return found


@contextmanager
def _readable(paths: Iterable[str], wanted: DiagnoseOptions) -> Iterator[None]:
    """Make standard input readable twice if the command must read it twice.

    The lines around the root and the compressed log each need a second pass over the input.
    """
    from holdfast.diagnose.study import stdin_kept

    with ExitStack() as stack:
        if STDIN in paths and (wanted.around or wanted.needs_text):
            with shown() as show:
                stack.enter_context(stdin_kept(show))
        yield


def _studied(paths: Iterable[str], wanted: DiagnoseOptions) -> "Study":
    from holdfast.diagnose.study import study, surroundings

    filters = () if wanted.known is None else wanted.known.filters
    with shown() as show:
        found = study(
            list(paths), wanted.rules, show, compressed=wanted.needs_text, filters=filters
        )
        if found.compressed is not None:
            found = replace(
                found, diagnosis=_beyond_rules(found.diagnosis, found.compressed, wanted, show)
            )
        if wanted.around and found.diagnosis.root_line is not None:
            found = replace(found, around=surroundings(found.diagnosis.root_line, show))
    return found


def _beyond_rules(
    diagnosis: "Diagnosis", compressed: "Compressed", wanted: DiagnoseOptions, show: Progress
) -> "Diagnosis":
    """Add what past incidents and the model contribute to a diagnosis, if requested."""
    suggested = None
    if diagnosis.ended_well:  # there is no cause to look for, and no incident
        return diagnosis
    if wanted.endpoint is not None:
        from holdfast.diagnose.agents import consultation

        show("Asking the model", 0, None)
        similar = None
        if wanted.known is not None:  # a confirmed incident counts more than a model's opinion
            diagnosis = wanted.known.recall(diagnosis, lambda: compressed.lines)
            similar = wanted.known.memory.similar
        result = consultation(
            diagnosis, compressed, wanted.endpoint, similar=similar, rules=wanted.rules
        )
        diagnosis, suggested = result.diagnosis, result.proposed_rule
    if wanted.ledger is not None:
        from holdfast.diagnose.memory import remember

        show("Remembering", 0, None)
        diagnosis = remember(wanted.ledger, diagnosis, compressed, suggested=suggested)
    return diagnosis


def _open(ledger_url: str) -> "Ledger":
    from holdfast.core.ledger import Ledger

    return Ledger.open(ledger_url)


def _known(ledger: "Ledger", place: Place) -> "Known":
    from holdfast.diagnose.memory import Known

    return Known.of_ledger(ledger, place.home)


def _rules(known: "Known | None", folder: Path | None) -> "RuleSet":
    from holdfast.diagnose import packaged_rules
    from holdfast.diagnose.study import with_own_rules

    return with_own_rules(packaged_rules() if known is None else known.rules, folder)


def requested_endpoint() -> "Endpoint":
    """Return the endpoint of the model that `--model` uses.

    Raises:
        BadUse: the environment names no model, or one that cannot be used.
    """
    from holdfast.diagnose.agents import endpoint_from_environment

    found = endpoint_from_environment()
    if found is None:
        raise BadUse(
            "No model is named. Set HOLDFAST_LLM_URL and HOLDFAST_LLM_MODEL, or leave out --model."
        )
    return found


def _fields(study: "Study", wanted: DiagnoseOptions) -> dict[str, Any]:
    """Return the diagnosis as fields for JSON, with the extras that the options request."""
    fields = study.diagnosis.to_json()
    if wanted.explain:
        from holdfast.cli.diagnosis_why import as_json

        fields["candidates"] = as_json(study.explanation)
    if wanted.compressed and study.compressed is not None:
        fields["compressed"] = study.compressed.text
    return fields
