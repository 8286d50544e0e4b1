"""Simulate the study's story: restarts by hand, the study's system, and ours, at four sizes.

    python benchmarks/simulating/story.py

writes the tables of `docs/simulation.md` from `benchmarks/results/simulate.json`.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.simulate.pretrain import SCENARIOS, Answer, rates_named, replicate

SIZES = (1024, 2048, 16_384, 100_000)
RATES = ("table3", "rsc-1")
NAMES = ("manual", "study", "holdfast")
DAYS = 30.0
PAGE = Path(__file__).parents[2] / "docs/simulation.md"
RESULTS = Path(__file__).parents[1] / "results/simulate.json"
MARKS = "<!-- {name}: begin -->\n", "<!-- {name}: end -->\n"
FIGURES = ("ETTR, %", "people a month", "fewer than by hand, %", "GPU-hours lost a month")


def answers(rates: str, gpus: int, replications: int, seed: int) -> dict[str, Answer]:
    """Return the answer of each scenario; all meet the same failures."""
    return {
        name: replicate(
            SCENARIOS[name](gpus, days=DAYS, rates=rates_named(rates)), replications, seed=seed
        )
        for name in NAMES
    }


def figures(found: Mapping[str, Answer]) -> Iterator[tuple[str, dict[str, float]]]:
    """Return each figure of a size by scenario."""
    people = {name: one.interventions.mean for name, one in found.items()}
    yield FIGURES[0], {name: one.ettr.mean * 100 for name, one in found.items()}
    yield FIGURES[1], people
    # By failure: a job that is sooner back trains more, and meets more failures.
    each = {name: one.interventions.mean / one.failures.mean for name, one in found.items()}
    yield FIGURES[2], {name: 100 * (1 - each[name] / each["manual"]) for name in found}
    lost = {}
    for name, one in found.items():
        hours = one.gpu_hours_by_class()
        lost[name] = sum(hours.values()) - hours["trained"]
    yield FIGURES[3], lost


def table(rows: list[dict[str, object]]) -> str:
    """Return the Markdown table of the rows that the benchmark wrote."""
    by_measure = {str(row["measure"]): row["ours"] for row in rows}
    lines = [
        "| rates | GPUs | | by hand | the study's system | Holdfast |",
        "|---|---|---|---|---|---|",
    ]
    for rates in RATES:
        for gpus in SIZES:
            for figure in FIGURES:
                cells = [
                    by_measure.get(f"story: {rates}, {gpus} GPUs: {figure} [{name}]")
                    for name in NAMES
                ]
                said = [
                    "-" if not isinstance(cell, int | float) else _number(float(cell))
                    for cell in cells
                ]
                if figure == FIGURES[2]:
                    said[0] = "-"
                first = f"{rates} | {gpus:,}" if figure == FIGURES[0] else " | "
                lines.append(f"| {first} | {figure} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def comparison_table(rows: list[dict[str, object]], part: str, peers: str) -> str:
    """Return the Markdown table of a part's rows with a peer, with the heading `peers`."""
    lines = [f"| | simulated | {peers} | apart |", "|---|---|---|---|"]
    for row in rows:
        measure, ours, peer = str(row["measure"]), row["ours"], row["peer"]
        if not measure.startswith(f"{part}: ") or peer is None:
            continue
        assert isinstance(ours, int | float)
        assert isinstance(peer, int | float)
        said = [f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" for value in (ours, peer)]
        apart = f"{(ours / peer - 1) * 100:+.1f} %"
        lines.append(f"| {measure.partition(': ')[2]} | {said[0]} | {said[1]} | {apart} |")
    return "\n".join(lines) + "\n"


def cluster_table(rows: list[dict[str, object]]) -> str:
    """Return the table of the replayed jobs."""
    lines = ["| | Holdfast | beside it | |", "|---|---|---|---|"]
    for row in rows:
        part, _, measure = str(row["measure"]).partition(": ")
        if part in ("cluster", "million"):
            beside = row["peer"] if row["peer"] is not None else row["limit"]
            lines.append(
                f"| {measure} | {_cluster_figure(row['ours'])} | {_cluster_figure(beside)} | {row['unit']} |"
            )
    return "\n".join(lines) + "\n"


def _cluster_figure(value: object) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rewritten(page: str, tables_of: Mapping[str, str]) -> str:
    """Return the page with each table between its marks."""
    for name, table_of in tables_of.items():
        begin, end = (mark.format(name=name) for mark in MARKS)
        head, mark, rest = page.partition(begin)
        _, other, tail = rest.partition(end)
        if not mark or not other:
            raise ValueError(
                f"The page has no marks of {name!r}. Add {begin.strip()} and {end.strip()}."
            )
        page = head + begin + table_of + end + tail
    return page


def tables(rows: list[dict[str, object]]) -> dict[str, str]:
    """Return all tables of the page by their marks."""
    return {
        "story": table(rows),
        "validation": comparison_table(rows, "validation", "published or computed"),
        "live": comparison_table(rows, "live", "live"),
        "cluster": cluster_table(rows),
    }


def main() -> int:
    rows = json.loads(RESULTS.read_text())
    PAGE.write_text(rewritten(PAGE.read_text("utf-8"), tables(rows)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
