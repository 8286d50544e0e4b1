"""What `holdfast eval` says of evaluations there were: `why | compare | ls | show`."""

from pathlib import Path
from typing import Any

import click

from holdfast.cli.eval_options import JSON
from holdfast.cli.main import Place
from holdfast.cli.output import print_json, print_table, seconds, shorten, when
from holdfast.core.errors import BadUse
from holdfast.core.ledger import EvaluationRecord, Ledger

SUITE = click.option("--suite", metavar="SUITE", help="Of this suite only.")
RUN = click.option("--run", "run_id", metavar="RUN", help="Of checkpoints of this training run only.")


@click.command()
@SUITE
@RUN
@click.option("--family", metavar="NAME", help="Of this family of models only.")
@JSON
@click.pass_obj
def ls(place: Place, /, as_json: bool, **wanted: str | None) -> None:
    """List the evaluations, newest first."""
    with Ledger.open(place.ledger) as ledger:
        found = ledger.evaluations(**{name: value for name, value in wanted.items() if value is not None})
    if as_json:
        print_json("evaluations", {"evaluations": [_row(one) for one in found]})
        return
    if not found:
        click.echo("No evaluations. Start one: holdfast eval run --suite TASKS --model MODEL")
        return
    print_table(
        ["evaluation", "state", "started", "suite", "step", "took", "of bound", "tasks", "failed", "model"],
        [
            (
                one.evaluation_id,
                _state(one),
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


def _state(one: EvaluationRecord) -> str:
    from holdfast.evaluate.records import state_of

    return state_of(one)


def _row(one: EvaluationRecord) -> dict[str, Any]:
    said = {name: value for name, value in vars(one).items() if name != "evaluation_id"}
    return {"id": one.evaluation_id, **said, "state": _state(one)}


@click.command()
@click.argument("evaluation_id", metavar="ID")
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), help="Write lm-eval's files there.")
@JSON
@click.pass_obj
def show(place: Place, evaluation_id: str, output: Path | None, as_json: bool) -> None:
    """Show an evaluation's scores."""
    from holdfast.evaluate.evaluation import read_evaluation

    with Ledger.open(place.ledger) as ledger:
        record = ledger.evaluation(evaluation_id)
    if output is not None:
        from holdfast.evaluate.report.results import write_results

        written = write_results(read_evaluation(Path(record.folder)), output)
        click.echo(f"Results: {written}", err=True)
    if as_json:
        print_json("evaluations.one", {"evaluation": _row(record)})
        return
    _print_facts(record)
    if record.scores or record.failed_tasks:
        from holdfast.evaluate.report.table import print_scores

        print_scores(read_evaluation(Path(record.folder)))


def _print_facts(record: EvaluationRecord) -> None:
    state = _state(record)
    click.echo(f"{record.evaluation_id}: {state}")
    if record.outcome:
        click.echo(record.outcome)
    elif state == "stopped":
        click.echo(f"Its command ended before it did. Go on with: holdfast eval resume {record.evaluation_id}")
    facts = {
        "suite": record.suite,
        "model": record.model,
        "weights": record.digest,
        "numerics": f"{record.mode}: {record.numerics}" if record.numerics else record.mode,
        "run": " ".join(str(part) for part in (record.run_id, record.step) if part is not None),
        "started": when(record.started_at_s),
        "took": seconds(record.makespan_s) + (f", {_ratio(record)} times its bound" if _ratio(record) else ""),
        "folder": record.folder,
    }
    for name, value in facts.items():
        if value:
            click.echo(f"{name:<10}{value}")


@click.command()
@click.argument("evaluation_id", metavar="ID")
@JSON
@click.pass_obj
def why(place: Place, evaluation_id: str, as_json: bool) -> None:
    """Say where an evaluation's time went, against what no schedule could have gone below."""
    from holdfast.evaluate.evaluation import read_evaluation
    from holdfast.evaluate.report.why import why as told

    with Ledger.open(place.ledger) as ledger:
        record = ledger.evaluation(evaluation_id)
    evaluation = read_evaluation(Path(record.folder))
    if as_json:
        said = evaluation.to_json()
        names = ("id", "makespan_s", "bound_s", "ratio", "bound", "engine_seconds", "account", "critical_path")
        print_json("eval.why", {name: said[name] for name in names})
        return
    click.echo(told(evaluation), nl=False)
    click.echo(f"\nPage: {Path(record.folder) / 'report.html'}")


@click.command()
@click.argument("evaluation_ids", metavar="[ID]…", nargs=-1)
@SUITE
@RUN
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="A plot: .svg, .png or .pdf.")
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
    """Put scores side by side, and say which differences are more than chance.

    Either by id, or all complete evaluations of --suite or --run, a step the newest only.
    """
    from holdfast.evaluate.report.compare import compare as put_side_by_side
    from holdfast.evaluate.report.compare import plot

    if bool(evaluation_ids) == bool(suite or run_id):
        raise BadUse("Give ids, or --suite or --run. `holdfast eval ls` lists the evaluations.")
    with Ledger.open(place.ledger) as ledger:
        if evaluation_ids:
            found = [ledger.evaluation(evaluation_id) for evaluation_id in evaluation_ids]
        else:
            wanted = {name: value for name, value in (("suite", suite), ("run_id", run_id)) if value}
            found = newest_of_each(ledger.evaluations(state="done", **wanted))
    comparison = put_side_by_side(found)
    left_out = 0 if output is None else plot(comparison, output)
    if as_json:
        print_json("eval.comparison", {**comparison.to_json(), "plot": None if output is None else str(output)})
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
        click.echo(f"Plot: {output}" + (f", without {left_out} tasks that did not fit" if left_out else ""))


def newest_of_each(found: list[EvaluationRecord]) -> list[EvaluationRecord]:
    """Of evaluations, newest first, the newest of each model and step; the oldest of these first."""
    kept: dict[tuple[str, str, int | None], EvaluationRecord] = {}
    for one in found:
        kept.setdefault((one.suite, one.model, one.step), one)
    return list(reversed(kept.values()))


def _with_stderr(value: Any) -> str:
    if value is None:
        return ""
    return f"{value.value:.4f}" + ("" if value.stderr is None else f" ± {value.stderr:.4f}")
