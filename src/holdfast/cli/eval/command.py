"""Provide `holdfast eval run | plan | resume | watch | rescore | why | compare | ls | show`."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.eval import progress as eval_progress
from holdfast.cli.eval.lm_eval_words import Line, speaks_lm_eval, translate
from holdfast.cli.eval.options import (
    FOLDER,
    HOW,
    JSON,
    JSON_LINES,
    NO_PROGRESS,
    OUTPUT,
    PLACING,
    SHOWING,
    SUITE,
    is_given,
    options_from,
    takes,
)
from holdfast.cli.eval.report import compare, ls, show, why
from holdfast.cli.main import Place
from holdfast.cli.output import print_json
from holdfast.cli.output_paths import OUTPUT_FILE
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.evaluate import Evaluation, Plan

INCOMPLETE = 4
"""The exit code if a task has no scores."""
ID = click.option(
    "--id",
    "evaluation_id",
    metavar="ID",
    help="The evaluation's id.  [default: the model's name and the time]",
)
PAGE = click.option(
    "--page",
    type=OUTPUT_FILE,
    help="Write an HTML page with the Gantt chart to this file.",
)
MEMORY = click.option(
    "--device-memory-gib",
    type=float,
    metavar="N",
    help="Memory of one GPU, or with --device cpu of one node.  [default: this machine's]",
)
ARRIVALS = click.option(
    "--arrivals",
    metavar="JOBS",
    help="Job records whose submissions stand for arriving checkpoints; any form `trace` reads.",
)
STREAM = (
    click.option("--once", is_flag=True, help="Evaluate the checkpoints that exist, then exit."),
    click.option(
        "--until-file",
        "until",
        type=click.Path(path_type=Path),
        help="Exit once this file exists and every checkpoint is evaluated.",
    ),
    click.option(
        "--drop-stale",
        is_flag=True,
        help="Drop waiting checkpoints when a newer one appears.",
    ),
)
MODEL = click.option(
    "--model",
    required=True,
    metavar="MODEL",
    help="A Hugging Face folder, its URL, or a Holdfast or DCP checkpoint.",
)


@click.group()
def command() -> None:
    """Evaluate checkpoints: the harness's own scores, in the shortest time.

    \b
    holdfast eval run --suite gsm8k,mmlu:0.1 --model ./llama
    holdfast eval watch checkpoints/ --suite nightly.toml --hf-config ./llama

    SUITE is a TOML file, or task names of lm-evaluation-harness separated by commas. `inspect:NAME`
    is a task of inspect-ai.
    """
    _check_installed()


def _check_installed() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise HoldfastError(
            "This needs lm_eval, which is not installed. Run: pip install 'holdfast[eval]'"
        )


class LmEvalWords(click.Command):
    """A command that accepts lm-eval's options as well as its own.

    If `always` is True, the command accepts only lm-eval's options.
    """

    always = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Translate lm-eval's options into Holdfast's options, and then parse the command line."""
        if not {"--help", "-h"} & set(args) and (self.always or speaks_lm_eval(args)):
            as_json = ["--json"] if "--json" in args else []
            line = ctx.meta[Line.__name__] = translate(args)
            args = line.native
            if line.suite is not None:
                args = [*args, "--suite", line.suite.name]
            if line.listing:
                args = ["--suite", "list", "--model", "none", *as_json]
            for sentence in line.said:
                click.echo(sentence, err=True)
        return super().parse_args(ctx, args)


class LmEvalLine(LmEvalWords):
    """A command that accepts the command line of lm-eval without changes."""

    always = True


def _run(
    place: Place, suite: str, model: str, as_json: bool, no_progress: bool, how: dict[str, Any]
) -> int:
    from holdfast.evaluate import evaluate

    line: Line | None = click.get_current_context().meta.get(Line.__name__)
    if line is not None and line.listing:
        if as_json:
            print_json("eval.tasks", {"tasks": list(line.listing)})
        else:
            click.echo("\n".join(line.listing))
        return 0
    chosen = suite if line is None or line.suite is None else line.suite
    with eval_progress.shown(quiet=no_progress or as_json) as progress:
        evaluation = evaluate(chosen, model, options=options_from(place, how), progress=progress)
    return _print(evaluation, as_json=as_json)


@command.command("lm_eval", cls=LmEvalLine)
@takes(SUITE, MODEL, *HOW, ID, *SHOWING)
@click.pass_obj
def lm_eval(
    place: Place, /, suite: str, model: str, as_json: bool, no_progress: bool, **how: Any
) -> int:
    """Run a command line of lm-eval without changes.

    \b
    holdfast eval lm_eval --model hf --model_args pretrained=./llama --tasks gsm8k --num_fewshot 5
    """
    return _run(place, suite, model, as_json, no_progress, how)


@command.command(cls=LmEvalWords)
@takes(SUITE, MODEL, *HOW, ID, *SHOWING)
@click.pass_obj
def run(
    place: Place, /, suite: str, model: str, as_json: bool, no_progress: bool, **how: Any
) -> int:
    """Run a suite on a model. The options of lm-eval's command are also accepted.

    \b
    holdfast eval run --suite gsm8k,mmlu:0.1 --model ./llama
    holdfast eval run --suite nightly.toml --model ckpt/step-0000001000 --hf-config ./llama --on slurm --nodes 4
    holdfast eval run --tasks gsm8k --model hf --model_args pretrained=./llama --num_fewshot 5
    """
    return _run(place, suite, model, as_json, no_progress, how)


@command.command()
@takes(SUITE, MODEL, *HOW, MEMORY, ARRIVALS, PAGE, JSON)
@click.pass_obj
def plan(
    place: Place,
    /,
    suite: str,
    model: str,
    device_memory_gib: float | None,
    arrivals: str | None,
    page: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Predict the time of an evaluation, and its lower bound for any schedule; nothing is run.

    \b
    holdfast eval plan --suite gsm8k,mmlu:0.1 --model ./llama --nodes 4
    holdfast simulate evaluate --suite gsm8k --model ./llama --nodes 4
    """
    _check_installed()  # also called as `holdfast simulate evaluate`
    from holdfast.simulate.plan import plan as make_plan

    options = options_from(place, how)
    stream: dict[str, Any] = {}
    if arrivals is not None:
        from holdfast.simulate.plan import arrivals_of

        stream["arrivals_s"] = arrivals_of(arrivals)
    made: Plan = make_plan(
        suite, model, options=options, device_memory_gib=device_memory_gib, **stream
    )
    if page is not None:
        from holdfast.evaluate import write_page

        write_page(page, made.evaluation, made.timeline)
    if as_json:
        print_json("eval.plan", {**made.to_json(), "page": None if page is None else str(page)})
        return
    from holdfast.evaluate import why as told

    click.echo(told(made.evaluation), nl=False)
    for note in made.notes:
        click.echo(note)
    if page is not None:
        click.echo(f"Page: {page}")


@command.command()
@click.argument("evaluation_id", metavar="ID")
@takes(*PLACING, OUTPUT, *SHOWING)
@click.pass_obj
def resume(
    place: Place, /, evaluation_id: str, as_json: bool, no_progress: bool, **placing: Any
) -> int:
    """Resume an evaluation that was stopped; finished work is not done again.

    \b
    holdfast eval resume ID

    The evaluation keeps its options. The nodes and the output folder may change.
    """
    from holdfast.evaluate import resume as go_on

    changes = {name: value for name, value in placing.items() if is_given(value)}
    with eval_progress.shown(quiet=no_progress or as_json) as progress:
        evaluation = go_on(evaluation_id, home=place.home, progress=progress, **changes)
    return _print(evaluation, as_json=as_json)


@command.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@takes(SUITE, *HOW, *STREAM, JSON_LINES, NO_PROGRESS)
@click.pass_obj
def watch(
    place: Place,
    /,
    folder: Path,
    suite: str,
    once: bool,
    until: Path | None,
    as_json: bool,
    no_progress: bool,
    **how: Any,
) -> int:
    """Evaluate each checkpoint that appears in DIR, the newest first, on engines that stay warm.

    \b
    holdfast eval watch checkpoints/ --suite nightly.toml --hf-config ./llama
    """
    from holdfast.evaluate import watch as follow

    codes = []
    with eval_progress.shown(quiet=no_progress or as_json) as progress:
        options = options_from(place, how)
        for evaluation in follow(
            suite, folder, options=options, progress=progress, once=once, until=until
        ):
            codes.append(_print(evaluation, as_json=as_json))
    if not codes:
        click.echo(
            f"{folder} holds no whole checkpoint that this suite has not been run on.", err=True
        )
    return max(codes, default=0)


@command.command()
@click.argument("evaluation_id", metavar="ID")
@takes(*SHOWING)
@click.pass_obj
def rescore(place: Place, /, evaluation_id: str, as_json: bool, no_progress: bool) -> int:
    """Compute an evaluation's metrics again from its stored answers; no engine is started.

    \b
    holdfast eval rescore ID
    """
    from holdfast.evaluate import rescore as score_again

    with eval_progress.shown(quiet=no_progress or as_json) as progress:
        evaluation = score_again(evaluation_id, home=place.home, progress=progress)
    return _print(evaluation, as_json=as_json)


for _command in (why, compare, ls, show):
    command.add_command(_command)


def _print(evaluation: "Evaluation", *, as_json: bool) -> int:
    """Print the result of an evaluation; return the command's exit code."""
    if as_json:
        fields = evaluation.to_json()
        print_json(
            "evaluation",
            {name: value for name, value in fields.items() if name not in ("schema", "version")},
        )
    else:
        from holdfast.evaluate import losses, print_scores, verdict

        print_scores(evaluation)
        click.echo(verdict(evaluation))
        if lost := losses(evaluation):
            click.echo(lost)
        for note in evaluation.notes:
            click.echo(note)
        click.echo(f"Page: {Path(evaluation.folder) / 'report.html'}")
        if evaluation.errors:
            click.echo(f"Try the failed tasks again: holdfast eval resume {evaluation.id}")
    return INCOMPLETE if evaluation.errors or evaluation.state != "done" else 0
