"""Print the table of scores with lm-evaluation-harness's columns, and the errors of tasks."""

import sys
from collections.abc import Sequence

from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.scores import Score, scores_of

COLUMNS = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
ARROWS = {True: "\N{UPWARDS ARROW}", False: "\N{DOWNWARDS ARROW}", None: ""}
NUMBERS = (1, 3, 6, 8)
"""The indices of the right-aligned columns."""
_MAX_NAMED = 3  # tasks named for one error; the others are counted


def score_rows(scores: Sequence[Score]) -> list[tuple[str, ...]]:
    """Return the table's cells as lm-eval's `make_table` does.

    Numbers have four decimals, and each task's name appears once.
    """
    rows: list[tuple[str, ...]] = []
    before = None
    for score in scores:
        first, before = score.task != before, score.task
        rows.append(
            (
                _indented(score) if first else "",
                str(score.version) if first and score.version is not None else "",
                score.filter,
                "" if score.n_shot is None else str(score.n_shot),
                score.metric,
                ARROWS[score.higher_is_better],
                shown(score.value),
                "" if score.stderr is None else "\N{PLUS-MINUS SIGN}",
                shown(score.stderr),
            )
        )
    return rows


def shown(value: float | int | str | None) -> str:
    """Format a score or its standard error as lm-eval does: four decimals; text unchanged."""
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def print_scores(evaluation: Evaluation) -> None:
    """Print the tables of tasks and groups, then the errors of tasks.

    On a terminal, the tables are rich tables; otherwise they are Markdown.
    """
    tables = [
        ("Tasks", score_rows(evaluation.scores)),
        ("Groups", score_rows(scores_of(evaluation.results, "groups"))),
    ]
    show = _print_rich if sys.stdout.isatty() else _print_markdown
    for name, rows in tables:
        if rows:
            show((name, *COLUMNS[1:]), rows)
    for why in dict.fromkeys(evaluation.errors.values()):
        tasks = [task for task, its in evaluation.errors.items() if its == why]
        names = ", ".join(tasks[:_MAX_NAMED]) + (
            f" and {len(tasks) - _MAX_NAMED} more" * (len(tasks) > _MAX_NAMED)
        )
        sys.stdout.write(f"{names}: no scores: {why}\n")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table with aligned columns."""
    widths = [
        max(2, *(len(row[place]) for row in (columns, *rows))) for place in range(len(columns))
    ]
    ruler = [
        f"{'-' * (width - 1)}:" if place in NUMBERS else "-" * width
        for place, width in enumerate(widths)
    ]
    lines = [columns, ruler, *rows]
    return "".join(
        f"|{'|'.join(_cell(place, row, widths) for place in range(len(widths)))}|\n"
        for row in lines
    )


def _cell(place: int, row: Sequence[str], widths: Sequence[int]) -> str:
    text = row[place].replace("|", "\\|")
    return text.rjust(widths[place]) if place in NUMBERS else text.ljust(widths[place])


def _indented(score: Score) -> str:
    return f"{' ' * score.depth}- {score.alias}" if score.depth else score.alias


def _print_markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    sys.stdout.write(f"{markdown(columns, rows)}\n")


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place in NUMBERS else "left", overflow="fold")
    for row in rows:
        # Text, not markup: a task's name may hold brackets.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
