"""Provide `holdfast simulate cluster`: how long jobs would wait under a scheduling policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from holdfast.cli import progress as progress_of
from holdfast.cli.output import print_json, print_table
from holdfast.cli.output_paths import OUTPUT_FILE
from holdfast.cli.trace_jobs import loaded, reads_jobs
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.words import plainly

if TYPE_CHECKING:
    from holdfast.simulate.cluster import ClusterAnswer

PRETRAINING = "Pretrain"


@click.command("cluster")
@reads_jobs
@click.option(
    "--reserve",
    multiple=True,
    metavar="NAME=NODES",
    help="Nodes reserved for jobs of this type or pool; 0: none.  [default: the peak of Pretrain]",
)
@click.option(
    "--limit",
    multiple=True,
    metavar="NAME=GPUS",
    help="GPUs that jobs of this type or pool may hold or queue for.",
)
@click.option(
    "--evaluation",
    "mode",
    type=click.Choice(["preemptible", "idle"]),
    default="preemptible",
    show_default=True,
    help="Run evaluations preemptibly on any idle GPU, or last on idle unreserved GPUs.",
)
@click.option(
    "--decoupled", is_flag=True, help="Replay again with a coordinator for each evaluation."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The seed of all random draws."
)
@click.option(
    "--page",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Write an HTML page to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def cluster(
    jobs: tuple[str, ...],
    reading: dict[str, Any],
    reserve: Sequence[str],
    limit: Sequence[str],
    mode: Literal["preemptible", "idle"],
    decoupled: bool,
    seed: int,
    page: Path | None,
    as_json: bool,
) -> None:
    """Replay a trace's jobs: waits by type, use of the GPUs, and the effect of evaluation on both.

    JOBS are job records in a form that `holdfast trace` recognises, or a synthetic trace of
    `holdfast trace twin`.

    \b
    holdfast simulate cluster twin/trace_kalos.csv --decoupled
    holdfast simulate cluster jobs.csv --capacity 286x8 --reserve Pretrain=200 --limit Evaluation=256
    """
    try:
        import duckdb  # noqa: F401 - what reads the records
    except ImportError as error:
        raise HoldfastError(
            f"This needs {error.name}, which is not installed. Run: pip install 'holdfast[trace]'"
        ) from error
    from holdfast.simulate.cluster import (
        Policy,
        answer,
        assumptions,
        jobs_of,
        usual_reserve,
        write_cluster,
    )

    reserved, limits = _numbers("--reserve", reserve), _numbers("--limit", limit)
    with loaded(jobs, reading) as trace:
        replayed = jobs_of(trace)
    if not reserve:
        nodes = usual_reserve(
            replayed.jobs, PRETRAINING, nodes=replayed.nodes, gpus_per_node=replayed.gpus_per_node
        )
        reserved = {PRETRAINING: nodes}
    policy = Policy(
        reserved_nodes={name: number for name, number in reserved.items() if number},
        limit_gpus=limits,
        mode=mode,
    )
    with progress_of.shown() as progress:
        found = answer(replayed, policy, decoupled=decoupled, seed=seed, progress=progress)
    assumed = assumptions(found, reserve_given=bool(reserve))
    if page is not None:
        write_cluster(page, found, assumed)
    if as_json:
        print_json(
            "simulate.cluster",
            {
                "seed": seed,
                **found.to_json(),
                "assumptions": list(assumed),
                "page": None if page is None else str(page),
            },
        )
        return
    _show(found, assumed)
    if page is not None:
        click.echo(f"Page: {page}")


def _numbers(option: str, given: Sequence[str]) -> dict[str, int]:
    """Parse the values of an option, each of the form NAME=NUMBER.

    Raises:
        BadUse: a value has another form.
    """
    found: dict[str, int] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal():
            raise BadUse(f"{option} is {text!r}. Give NAME=NUMBER, such as Pretrain=200.")
        found[name] = int(number)
    return found


def _show(found: "ClusterAnswer", assumed: Sequence[str]) -> None:
    from holdfast.simulate.cluster import compared_rows, policy_facts, wait_rows

    one = found.replayed
    left_out = ", ".join(f"{number:,} {reason}" for reason, number in one.left_out.items())
    click.echo(
        f"{one.cluster}: {plainly(len(one.jobs), 'GPU job')} on {plainly(one.nodes, 'node')} of "
        f"{plainly(one.gpus_per_node, 'GPU')}" + (f"; left out: {left_out}." if left_out else ".")
    )
    click.echo("; ".join(f"{name}: {value}" for name, value in policy_facts(found)) + ".")
    for variant in found.variants:
        print_table(
            [
                f"waits, {variant.name}", "jobs", "mean", "median", "95 %", "trace: mean", "median", "95 %", "KS",
                "Wasserstein",
            ],
            wait_rows(variant),
        )  # fmt: skip
    print_table(["", *(variant.name for variant in found.variants)], compared_rows(found))
    if found.trace_utilisation is not None:
        click.echo(f"GPUs in use in the trace: {found.trace_utilisation:.2%}.")
    for sentence in assumed:
        click.echo(f"Assumed: {sentence}")
