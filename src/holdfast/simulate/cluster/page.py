"""Write the answer of a replay as an HTML page.

The page shows the waits of the trace beside the simulated waits, utilisation, fragmentation and
evaluations.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from holdfast.core.page import KeyFigure, template, write_page
from holdfast.simulate.cluster.answers import ClusterAnswer, Variant, Waits

TEMPLATE: Final = Path(__file__).parent / "templates" / "cluster.html.j2"


def write_cluster(path: Path, answer: ClusterAnswer, assumed: Sequence[str]) -> None:
    """Write the page to `path`.

    Args:
        path: the HTML file to write.
        answer: the figures of the replay.
        assumed: the assumptions beyond the trace, one sentence each.

    Raises:
        HoldfastError: jinja2 is not installed.
        OSError: the page could not be written; an earlier file at `path` is left unchanged.
    """
    filled = template(TEMPLATE)
    one, first = answer.replayed, answer.variants[0]
    trace = answer.trace_utilisation
    figures = [
        KeyFigure("jobs", f"{first.jobs:,}", f"{sum(one.left_out.values()):,} left out"),
        KeyFigure(
            "GPUs in use",
            f"{first.utilisation:.1%}",
            "" if trace is None else f"{trace:.1%} in the trace",
        ),
        KeyFigure("nodes partly used", f"{first.partly_used_nodes:.1%}", "mean of the hours"),
        KeyFigure("ended for others", f"{first.restarts:,}", "best-effort runs"),
    ]
    write_page(
        path,
        filled.render(
            headline=f"{one.cluster}: {one.nodes:,} nodes of {one.gpus_per_node} GPUs",
            context="The jobs of the trace, replayed under the policy below.",
            key_figures=figures,
            policy=policy_facts(answer),
            variants=[(variant.name, wait_rows(variant)) for variant in answer.variants],
            names=[variant.name for variant in answer.variants],
            compared=compared_rows(answer),
            assumed=assumed,
        ),
    )


def policy_facts(answer: ClusterAnswer) -> list[tuple[str, str]]:
    """Return the settings of the policy as pairs of a name and a value."""
    policy = answer.policy

    def listed(of: dict[str, int], unit: str) -> str:
        return ", ".join(f"{name} {number:,} {unit}" for name, number in of.items()) or "none"

    return [
        ("reserved", listed(dict(policy.reserved_nodes), "nodes")),
        ("limits", listed(dict(policy.limit_gpus), "GPUs")),
        ("evaluation", policy.mode),
    ]


def wait_rows(variant: Variant) -> list[list[str]]:
    """Return the cells of one row per type of job.

    The cells are texts: the number of jobs; the mean and the median simulated wait; the mean and
    the median wait in the trace; both distances.
    """

    def pair(waits: Waits) -> list[str]:
        return [in_seconds(waits.mean_s), in_seconds(waits.median_s), in_seconds(waits.p95_s)]

    return [
        [
            one.type,
            f"{one.jobs:,}",
            *pair(one.simulated),
            *pair(one.trace),
            "" if one.distance is None else f"{one.distance.ks:.2f}",
            "" if one.distance is None else in_seconds(one.distance.wasserstein_s),
        ]
        for one in variant.types
    ]


def compared_rows(answer: ClusterAnswer) -> list[list[str]]:
    """Return one row per figure, with the value of each variant, as texts."""
    figures: list[tuple[str, Callable[[Variant], str]]] = [
        ("GPUs in use until the last submission", lambda one: f"{one.utilisation:.2%}"),
        ("GPU-hours of runs that ended", lambda one: f"{one.useful_gpu_hours:,.0f}"),
        ("GPU-hours of runs ended for others", lambda one: f"{one.lost_gpu_hours:,.0f}"),
        ("runs ended for others", lambda one: f"{one.restarts:,}"),
        ("jobs backfilled", lambda one: f"{one.backfilled:,}"),
        ("nodes partly used, mean", lambda one: f"{one.partly_used_nodes:.2%}"),
        ("GPUs free on these, mean", lambda one: f"{one.free_on_partly_used:,.1f}"),
        ("largest job that fits, median GPUs", lambda one: f"{one.largest_fit_median:,.0f}"),
    ]
    rows = [[name, *map(figure, answer.variants)] for name, figure in figures]
    found = [one.evaluations for one in answer.variants]
    for name, texts in (
        ("checkpoints evaluated", [one and f"{one.checkpoints:,}" for one in found]),
        ("GPU-hours for these", [one and f"{one.gpu_hours:,.0f}" for one in found]),
        ("to the last score, mean", [one and in_seconds(one.mean_s) for one in found]),
        ("to the last score, median", [one and in_seconds(one.median_s) for one in found]),
    ):
        if found[0] is not None:
            rows.append([name, *(text or "" for text in texts)])
    return rows


def in_seconds(value_s: float | None) -> str:
    """Return a number of seconds as a text; an empty text for None."""
    return "" if value_s is None else f"{value_s:,.0f} s"
