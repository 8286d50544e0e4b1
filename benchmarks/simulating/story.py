"""Tell the study's story by simulation: restarts by hand, the study's system, and ours, at four sizes.

    python benchmarks/simulating/story.py

writes the table of `docs/simulation.md` from `benchmarks/results/simulate.json`.
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
BEGIN, END = "<!-- story: begin -->\n", "<!-- story: end -->\n"
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


def main() -> int:
    page = PAGE.read_text("utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(head + BEGIN + table(json.loads(RESULTS.read_text())) + END + tail, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
