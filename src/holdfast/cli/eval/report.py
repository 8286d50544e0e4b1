"""Provide `holdfast eval why | compare | ls | show`, which report on recorded evaluations."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.eval.options import JSON
from holdfast.cli.main import Place
from holdfast.cli.output import print_json, print_table, seconds, when
from holdfast.cli.output_paths import OUTPUT_FILE, OUTPUT_FOLDER
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import EvaluationRecord, Ledger
from holdfast.core.words import shorten

if TYPE_CHECKING:
    from holdfast.evaluate import Evaluation

SUITE = click.option("--suite", metavar="SUITE", help="Only evaluations of this suite.")
RUN = click.option("--run", "run_id", metavar="RUN", help="Only checkpoints of this training run.")


@click.command()
@SUITE
@RUN
@click.option("--family", metavar="NAME", help="Only this family of models.")
@JSON
@click.pass_obj
def ls(place: Place, /, as_json: bool, **wanted: str | None) -> None:
    """List the evaluations, newest first.

    \b
    holdfast eval ls
    holdfast eval ls --suite nightly
    """
    with Ledger.open(place.ledger) as ledger:
        found = ledger.evaluations(
            **{name: value for name, value in wanted.items() if value is not None}
        )
        found = [_as_it_is(one, ledger) for one in found]
    if as_json:
        print_json("evaluations", {"evaluations": [_row(one) for one in found]})
        return
    if not found:
        click.echo(
            "No evaluation matches. List all: holdfast eval ls"
            if any(wanted.values())
            else "No evaluations. Start one: holdfast eval run --suite TASKS --model MODEL"
        )
        return
    print_table(
        [
            "evaluation",
            "state",
            "started",
            "suite",
            "step",
            "took",
            "of bound",
            "tasks",
            "failed",
            "model",
        ],
        [
            (
                one.evaluation_id,
                one.state,
                when(one.started_at_s),
                shorten(one.suite, 40),
                one.step,
                seconds(one.makespan_s),
                _ratio(one),
                len(one.scores),
                len(one.failed_tasks) or "",
                one.model,
            )
            for one in found
        ],
    )


def _ratio(one: EvaluationRecord) -> str:
    return f"{one.makespan_s / one.bound_s:.2f}" if one.makespan_s and one.bound_s else ""


def _as_it_is(one: EvaluationRecord, ledger: Ledger) -> EvaluationRecord:
    """Return the record with the evaluation's actual state."""
    from holdfast.evaluate import state_of

    # A command that is gone may have recorded its end after `one` was read.
    if (state := state_of(one)) != one.state:
        one = ledger.evaluation(one.evaluation_id)
        state = state_of(one)
    return replace(one, state=state)


def _row(one: EvaluationRecord) -> dict[str, Any]:
    return {
        "id": one.evaluation_id,
        **{name: value for name, value in vars(one).items() if name != "evaluation_id"},
    }


def _ended(one: EvaluationRecord) -> "Evaluation":
    """Return the result of an evaluation that has ended.

    Raises:
        NotFound: the evaluation is still running.
    """
    from holdfast.evaluate import read_evaluation

    if one.state == "running":
        raise NotFound(
            f"{one.evaluation_id} is running, so there are no results yet. Wait until it has ended."
        )
    return read_evaluation(Path(one.folder))


@click.command()
@click.argument("evaluation_id", metavar="ID")
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FOLDER,
    help="Write lm-eval's files there.",
)
@JSON
@click.pass_obj
def show(place: Place, evaluation_id: str, output: Path | None, as_json: bool) -> None:
    """Show an evaluation's scores.

    \b
    holdfast eval show ID
    """
    with Ledger.open(place.ledger) as ledger:
        record = _as_it_is(ledger.evaluation(evaluation_id), ledger)
    if output is not None:
        from holdfast.evaluate import write_results

        written = write_results(_ended(record), output)
        click.echo(f"Results: {written}", err=True)
    if as_json:
        print_json("evaluations.one", {"evaluation": _row(record)})
        return
    _print_facts(record)
    if record.state != "running" and (record.scores or record.failed_tasks):
        from holdfast.evaluate import print_scores

        print_scores(_ended(record))


def _print_facts(record: EvaluationRecord) -> None:
    click.echo(f"{record.evaluation_id}: {record.state}")
    if record.outcome:
        click.echo(record.outcome)
    elif record.state == "stopped":
        click.echo(
            "The command ended before the evaluation did. "
            f"Continue with: holdfast eval resume {record.evaluation_id}"
        )
    facts = {
        "suite": record.suite,
        "model": record.model,
        "weights": record.digest,
        "numerics": f"{record.mode}: {record.numerics}" if record.numerics else record.mode,
        "run": " ".join(str(part) for part in (record.run_id, record.step) if part is not None),
        "started": when(record.started_at_s),
        "took": seconds(record.makespan_s)
        + (f", {_ratio(record)} times its bound" if _ratio(record) else ""),
        "folder": record.folder,
        "page": _there(record, "report.html"),
        "samples": _there(record, "samples"),
        "inspect": _there(record, "inspect"),  # `inspect view --log-dir` shows it
    }
    for name, value in facts.items():
        if value:
            click.echo(f"{name:<10}{value}")


def _there(record: EvaluationRecord, name: str) -> str:
    """Return the path of a file or folder of an evaluation; empty if it does not exist."""
    path = Path(record.folder) / name
    return str(path) if path.exists() else ""


@click.command()
@click.argument("evaluation_id", metavar="ID")
@JSON
@click.pass_obj
def why(place: Place, evaluation_id: str, as_json: bool) -> None:
    """Show where an evaluation's time went, beside the lower bound for any schedule.

    \b
    holdfast eval why ID
    """
    from holdfast.evaluate import why as told

    with Ledger.open(place.ledger) as ledger:
        record = _as_it_is(ledger.evaluation(evaluation_id), ledger)
    evaluation = _ended(record)
    if as_json:
        fields = evaluation.to_json()
        names = (
            "id",
            "makespan_s",
            "bound_s",
            "ratio",
            "bound",
            "engine_seconds",
            "account",
            "critical_path",
        )
        print_json("eval.why", {name: fields[name] for name in names})
        return
    click.echo(told(evaluation), nl=False)
    click.echo(f"\nPage: {Path(record.folder) / 'report.html'}")


@click.command()
@click.argument("evaluation_ids", metavar="[ID]…", nargs=-1)
@SUITE
@RUN
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FILE,
    help="A plot: .svg, .png or .pdf.",
)
@JSON
@click.pass_obj
def compare(
    place: Place,
    evaluation_ids: tuple[str, ...],
    suite: str | None,
    run_id: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Put scores side by side, and mark the differences that are more than chance.

    \b
    holdfast eval compare
    holdfast eval compare ID OTHER_ID

    Without IDs, compare the newest complete evaluation of each step of --suite or --run.
    """
    from holdfast.evaluate import compare as put_side_by_side
    from holdfast.evaluate import plot

    if bool(evaluation_ids) == bool(suite or run_id):
        raise BadUse("Give ids, or --suite or --run. `holdfast eval ls` lists the evaluations.")
    with Ledger.open(place.ledger) as ledger:
        if evaluation_ids:
            found = [ledger.evaluation(evaluation_id) for evaluation_id in evaluation_ids]
        else:
            wanted = {
                name: value for name, value in (("suite", suite), ("run_id", run_id)) if value
            }
            found = newest_of_each(ledger.evaluations(state="done", **wanted))
            if len(found) < 2:
                of = " and ".join(
                    f"{name.removesuffix('_id')} {value}" for name, value in wanted.items()
                )
                raise BadUse(
                    f"Of {of} there are {len(found)} complete evaluations, and two or more can be compared. "
                    "`holdfast eval ls` lists what there is."
                )
    comparison = put_side_by_side(found)
    left_out = 0 if output is None else plot(comparison, output)
    if as_json:
        print_json(
            "eval.comparison",
            {**comparison.to_json(), "plot": None if output is None else str(output)},
        )
        return
    print_table(
        ["task", "metric", *comparison.labels, "difference", "stderr", ""],
        [
            (
                row.task,
                row.metric.removesuffix(",none"),
                *(_with_stderr(value) for value in row.values),
                "" if row.difference is None else f"{row.difference:+.4f}",
                "" if row.stderr is None else f"{row.stderr:.4f}",
                row.verdict,
            )
            for row in comparison.rows
        ],
    )
    for note in comparison.notes:
        click.echo(note)
    if output is not None:
        click.echo(
            f"Plot: {output}" + (f", without {left_out} tasks that did not fit" if left_out else "")
        )


def newest_of_each(found: list[EvaluationRecord]) -> list[EvaluationRecord]:
    """Return the newest evaluation of each model and step, oldest first.

    `found` is sorted from the newest to the oldest evaluation.
    """
    kept: dict[tuple[str, str, int | None], EvaluationRecord] = {}
    for one in found:
        kept.setdefault((one.suite, one.model, one.step), one)
    return list(reversed(kept.values()))


def _with_stderr(value: Any) -> str:
    if value is None:
        return ""
    return f"{value.value:.4f}" + ("" if value.stderr is None else f" ± {value.stderr:.4f}")
