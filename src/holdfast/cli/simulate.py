"""Provide `holdfast simulate`: simulate a cluster's jobs, a training job or an evaluation."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import progress as progress_of
from holdfast.cli.eval.command import plan as plan_evaluation
from holdfast.cli.main import Place
from holdfast.cli.output import print_json, print_table, seconds
from holdfast.cli.plan import TRACE, records_of
from holdfast.cli.simulate_cluster import cluster
from holdfast.core.errors import BadUse

if TYPE_CHECKING:
    from holdfast.simulate.pretrain import Answer, Rates

NAMES = ("manual", "study", "holdfast")
OWN = "own"
SHOWN = 8
"""The most causes of failures that are printed."""


@click.group()
def command() -> None:
    """Run the policies under a virtual clock: thousands of GPUs for months, in seconds.

    \b
    holdfast simulate pretrain --gpus 16384 --scenario study --scenario holdfast
    """


# A copy with its own name, since the site's reference reads names from commands.
evaluate = copy(plan_evaluation)
evaluate.name = "evaluate"
command.add_command(evaluate)
command.add_command(cluster)


@command.command()
@click.option("--gpus", type=click.IntRange(1), required=True, metavar="N", help="GPUs of the job.")
@click.option(
    "--days",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="D",
    help="The job's length in days.",
)
@click.option(
    "--scenario",
    "names",
    type=click.Choice(NAMES),
    multiple=True,
    help="What to simulate; repeatable: all scenarios get the same failures.  [default: holdfast]",
)
@click.option(
    "--rates",
    default="table3",
    show_default=True,
    metavar="NAME",
    help="Failure rates: table3, llama3, rsc-1, rsc-2, h200, opt; own: from the ledger or --trace.",
)
@TRACE
@click.option(
    "--interval-s", type=click.FloatRange(1), metavar="S", help="Seconds of training between saves."
)
@click.option(
    "--spares",
    type=click.IntRange(0),
    metavar="N",
    help="Spare nodes.  [default: 3 % of the nodes]",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an assumption, such as stall_s=2 or repair_s=3600; a wrong NAME lists them all.",
)
@click.option(
    "--replications",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="Runs, for the mean and the 5 % to 95 % band.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The seed of all random draws."
)
@click.option(
    "--search",
    is_flag=True,
    help="Find the best interval, and the spares needed, as well.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def pretrain(
    place: Place,
    /,
    gpus: int,
    days: float,
    names: Sequence[str],
    rates: str,
    trace: str | None,
    interval_s: float | None,
    spares: int | None,
    changes: Sequence[str],
    replications: int,
    seed: int,
    search: bool,
    as_json: bool,
) -> None:
    """Simulate a pretraining job: effective time, losses by cause, people needed.

    \b
    holdfast simulate pretrain --gpus 16384 --days 54 --rates llama3
    holdfast simulate pretrain --gpus 2048 --scenario manual --scenario holdfast
    """
    from holdfast.simulate.pretrain import (
        SCENARIOS,
        best_interval,
        replicate,
        spares_needed,
    )

    if trace is not None and rates != OWN:
        raise BadUse(f"--trace gives rates of its own, but --rates is {rates}. Add --rates own.")
    found = _rates(place, rates, trace, gpus)
    given: dict[str, Any] = {"days": days, "rates": found}
    if interval_s is not None:
        given["interval_s"] = interval_s
    if spares is not None:
        given["spares"] = spares
    given |= _wanted(changes)
    scenarios = [SCENARIOS[name](gpus, **given) for name in names or NAMES[-1:]]
    few = max(replications // 2, 4)
    answers, searches = [], []
    with progress_of.shown() as progress:
        for one in scenarios:
            answers.append(
                replicate(one, replications, seed=seed, uncertain=rates == OWN, progress=progress)
            )
            if search:
                best_s, tried = best_interval(one, few, seed=seed, progress=progress)
                needed, _ = spares_needed(
                    one.varied(interval_s=best_s), few, seed=seed, progress=progress
                )
                searches.append(
                    {
                        "interval_s": best_s,
                        "ettr": tried[best_s],
                        "ettr_by_interval": {f"{at:.6g}": ettr for at, ettr in tried.items()},
                        "spares": needed,
                    }
                )
    if as_json:
        results = [answer.to_json() for answer in answers]
        for one_result, of_search in zip(results, searches, strict=False):
            one_result["best"] = of_search
        print_json("simulate.pretrain", {"seed": seed, "answers": results})
        return
    _show(answers, searches)


def _rates(place: Place, name: str, trace: str | None, gpus: int) -> "Rates":
    from holdfast.simulate.pretrain import rates_named

    if name != OWN:
        return rates_named(name)
    from holdfast.simulate.pretrain import own_rates, prior_rates

    records = records_of(place, (), trace)
    if records.runs == 0:
        raise BadUse(
            f"{trace or place.ledger} has no run. Choose published rates, such as --rates llama3."
        )
    return own_rates(
        records.reasons,
        gpu_days=records.gpu_days,
        job_days=records.job_days,
        prior=prior_rates(),
        gpus=gpus,
    )


def _wanted(changes: Sequence[str]) -> dict[str, Any]:
    """Return the assumptions that `--set` changes, with their new values.

    Raises:
        BadUse: a name or a value is wrong.
    """
    from holdfast.simulate.pretrain import Scenario

    one = Scenario()
    parts = (one, one.saves, one.times, one.people, one.hardware, one.limits)
    known: dict[str, Callable[[str], Any]] = {}
    for part in parts:
        for field in fields(part):
            if field.name in ("gpus", "days"):
                continue
            value = getattr(part, field.name)
            if isinstance(value, bool):
                known[field.name] = _yes_or_no
            elif isinstance(value, int | float):
                known[field.name] = type(value)
            elif value is None:
                known[field.name] = int if field.name == "technicians" else float
    wanted: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in known:
            raise BadUse(
                f"--set {change}: there is no assumption {name!r}. Choose one of {', '.join(sorted(known))}."
            )
        try:
            wanted[name] = known[name](text)
        except BadUse:
            raise
        except ValueError:
            raise BadUse(f"--set {change}: {text!r} is not a value. Give a number.") from None
    return wanted


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise BadUse(f"{text!r} is neither yes nor no. Give one of them.")
    return text == "yes"


def _show(answers: "Sequence[Answer]", searches: Sequence[dict[str, Any]]) -> None:
    first = answers[0].scenario
    click.echo(
        f"{first.gpus:,} GPUs for {first.days:g} days, {len(answers[0].outcomes)} replications; rates: "
        f"{first.rates.name}, a failure every {first.mean_time_to_failure_s() / 3600:.1f} h of training."
    )
    rows = []
    for answer in answers:
        one = answer.scenario
        rows.append(
            [
                one.name,
                seconds(one.saves.interval_s),
                one.hardware.spares,
                _band(answer.ettr.mean, answer.ettr.low, answer.ettr.high, "{:.2%}"),
                f"{answer.goodput.mean:.2%}",
                f"{answer.failures.mean:,.1f}",
                _band(
                    answer.interventions.mean,
                    answer.interventions.low,
                    answer.interventions.high,
                    "{:,.1f}",
                ),
            ]
        )
    print_table(
        [
            "scenario",
            "saves every",
            "spares",
            "ETTR (5 % - 95 %)",
            "goodput",
            "failures",
            "people needed",
        ],
        rows,
    )
    for answer in answers:
        _show_losses(answer)
    for answer, found in zip(answers, searches, strict=False):
        click.echo(
            f"{answer.scenario.name}: the best interval is {seconds(found['interval_s'])}, with an ETTR of "
            f"{found['ettr']:.2%}; {found['spares']} spare nodes are enough."
        )
    click.echo(f"Rates: {first.rates.source}.")


def _show_losses(answer: "Answer") -> None:
    from holdfast.core.accounting import LOST_CAUSES

    hours = answer.gpu_hours_by_class()
    total = sum(hours.values())
    name = answer.scenario.name
    print_table(
        [f"{name}: GPU-hours", "", "share", ""],
        [
            [cause, f"{value:,.0f}", f"{value / total:.2%}", LOST_CAUSES[cause]]  # type: ignore[index]
            for cause, value in hours.items()
        ],
    )
    counts = answer.failures_by_cause()
    failures = list(answer.gpu_hours_by_failure().items())
    print_table(
        [f"{name}: failures", "number", "GPU-hours lost"],
        [[cause, f"{counts[cause]:,.1f}", f"{value:,.0f}"] for cause, value in failures[:SHOWN]],
    )
    if len(failures) > SHOWN:
        click.echo(f"and {len(failures) - SHOWN} more causes; --json has all.")


def _band(mean: float, low: float, high: float, form: str) -> str:
    return f"{form.format(mean)} ({form.format(low)} - {form.format(high)})"
