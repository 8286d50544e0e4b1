"""Print a diagnosis for a person: cause, faulty part, action and the log lines that show them."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holdfast.cli.diagnosis_why import INTRODUCTION, in_words
from holdfast.cli.output import PIPE_WIDTH, when
from holdfast.core.words import clean
from holdfast.diagnose import ENDS_IN_WORDS, Advice, Cluster, Diagnosis, LogLine, Outcome, Role
from holdfast.diagnose.study import Study

ACTIONS: Final[Mapping[Advice, str]] = {
    "none": "Nothing",
    "restart": "Start the job again",
    "exclude_and_restart": "Exclude the faulty node or GPU, then start the job again",
    "reset_gpu": "Reset the GPU, then start the job again",
    "wait_and_retry": "Wait until the failed service is back, then start the job again",
    "change_config": "Change the job's configuration, then start the job again",
    "user_must_fix": "Fix the program or its input first",
}
OUTCOMES: Final[Mapping[Outcome, str]] = {
    "completed": "completed",
    "completed_teardown_failed": "completed, but the teardown failed",
    "stopped": "stopped by somebody",
    "failed": "failed",
    "running": "running",
    "unknown": "unknown",
}
FOLLOWED_SHOWN: Final = 8
ASIDE_SHOWN: Final = 2
"""The most lines to show of recovered failures, and of the job's teardown."""
_RANGE_SHOWN: Final = 16
"""The most parts to show of a list of ranges of ranks."""


def print_diagnosis(study: Study, *, why: bool = False) -> None:
    """Print a diagnosis on standard output.

    Args:
        study: the diagnosis and its explanation.
        why: True to also print how the rules found the root.
    """
    console = Console(
        width=None if sys.stdout.isatty() else PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
    # Capture the output, since rich pads each line to the full width.
    with console.capture() as written:
        _print(console, study, why=why)
    click.echo("\n".join(line.rstrip() for line in written.get().splitlines()))


def _print(console: Console, study: Study, *, why: bool) -> None:
    found = study.diagnosis
    console.print(Text(_headline(found), style="bold"))
    console.print()
    console.print(Padding(_facts(study), (0, 0, 0, 2)))
    sections = (
        (_root_title(found), _root(study)),
        ("Consequences", _rows(list(_followed(study)), FOLLOWED_SHOWN)),
        ("Recovered from earlier", _cited(study, "recovered")),
        ("Teardown", _cited(study, "teardown")),
        ("It might also be", _alternatives(found)),
        ("Seen before", _similar(found.similar)),
        ("Notes", _notes(found.notes)),
    )
    for title, content in sections:
        if content is not None and content.row_count:
            _print_section(console, title, content)
    if why:
        _print_section(console, "Why", in_words(study.explanation), INTRODUCTION)


def _headline(found: Diagnosis) -> str:
    """Return one sentence on how the job ended or why it failed."""
    unknown = found.reason == "Unknown" and not found.root_text
    if found.outcome not in ENDS_IN_WORDS and unknown:
        return "No cause was found."
    return clean(found.summary)


def _print_section(console: Console, title: str, content: Table, introduction: str = "") -> None:
    console.print()
    console.print(Text(title, style="bold"))
    if introduction:
        console.print(Padding(Text(introduction), (0, 0, 1, 2)))
    console.print(Padding(content, (0, 0, 0, 2)))


def _facts(study: Study) -> Table:
    found = study.diagnosis
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("outcome", Text(clean(_outcome(study))))
    if found.action == "none":
        table.add_row("do", Text(clean(found.mitigation)))
        _add_hint(table, study)
        return table
    category = "" if found.category == found.reason else f" ({found.category})"
    table.add_row(
        "reason",
        Text(f"{found.reason}{category}, confidence {found.confidence:.2f}: {_sure(found)}"),
    )
    table.add_row("at fault", Text(at_fault(found.scope)))
    helps = "a restart helps" if found.restart_helps else "a restart alone does not help"
    table.add_row("do", Text(f"{ACTIONS[found.action]} ({found.action}; {helps})."))
    table.add_row("", Text(clean(found.mitigation)))
    _add_hint(table, study)
    return table


def _add_hint(table: Table, study: Study) -> None:
    found = study.diagnosis
    if not found.ended_well and found.reason == "Unknown" and study.bytes_in:
        table.add_row(
            "", Text("The same command with --compressed prints the few lines that stand out.")
        )


def _outcome(study: Study) -> str:
    """Return text on how the job ended, with the log line that states the end."""
    found = study.diagnosis
    name = OUTCOMES[found.outcome]
    return name if found.end_line is None else f"{name} ({_place(study, found.end_line)})"


def _sure(found: Diagnosis) -> str:
    if found.confidence >= 0.8:
        return "sure"
    return "likely" if found.confidence >= 0.5 else "a guess, look for yourself"


def at_fault(scope: Mapping[str, Any]) -> str:
    """Format the place of the fault, such as `rank 3, node gn07, GPU 0000:b3:00`."""
    names = {
        "rank": "rank",
        "local_rank": "local rank",
        "node": "node",
        "gpu": "GPU",
        "link": "link",
    }
    parts = []
    for key, name in names.items():
        values = scope.get(key)
        if values is None:
            continue
        values = values if isinstance(values, list) else [values]
        numbers = all(isinstance(value, int) for value in values)
        parts.append(
            f"{name}{'s' * (len(values) > 1)} {ranges(values) if numbers else clean(', '.join(map(str, values)))}"
        )
    return ", ".join(parts) or "the logs do not say"


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges, such as `0-3, 7` for 0, 1, 2, 3, 7; cut a list that is too long."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    shown = ["-".join(map(str, part)) for part in parts]
    return ", ".join(shown[:_RANGE_SHOWN]) + (" …" if len(shown) > _RANGE_SHOWN else "")


def _root_title(found: Diagnosis) -> str:
    what = "The root" if found.outcome == "failed" else "What stopped it"
    if found.outcome == "completed_teardown_failed":
        what = "Failure after the work was done"
    if found.root_line is None:
        return what
    return f"{what}: {clean(found.root_line.file)}, line {found.root_line.line}"


def _root(study: Study) -> Table | None:
    found = study.diagnosis
    if found.root_line is None:
        if not found.root_text:
            return None
        return _grid([("", Text(clean(f"{found.root_text.strip()} (not stated in any log line)")))])
    root = found.root_line
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bold red" if found.outcome == "failed" else "bold", no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    around = study.around or [(root.line, root.text)]
    stating = {line.line for line in found.root_lines if line.file == root.file}
    for number, text in around:
        if number == root.line:
            table.add_row(">", Text(str(number)), Text(clean(text), style="bold"))
        else:
            table.add_row(">" if number in stating else "", Text(str(number)), _one_line(text))
    for other in found.root_lines[1:]:
        if other.file != root.file or other.line not in dict(around):
            table.add_row("", "", _one_line(f"also {_place(study, other)}", "dim"))
    return table


def _followed(study: Study) -> Iterator[tuple[str, Text]]:
    """Yield the consequences of the root: one row for each rule, with the number of ranks."""
    if not study.by_rules:  # memory or a model decided: only the diagnosis has evidence
        for one in study.diagnosis.evidence:
            if one.role == "cascade":
                yield "", _one_line(_place(study, one))
        return
    by_rule: dict[str, list[Cluster]] = {}
    root = study.explanation.ranked[0]
    for cluster in study.explanation.ranked:
        if (
            id(cluster) in study.explanation.caused
            and cluster.first.line > 0
            and not cluster.first.recovered
        ):
            by_rule.setdefault(cluster.first.rule.id, []).append(cluster)
    by_rule.pop(root.first.rule.id, None)  # the root's other lines report the same for other ranks
    for clusters in by_rule.values():
        first = clusters[0].first
        yield (
            _times(clusters),
            _one_line(_place(study, LogLine(file=first.file, line=first.line, text=first.cited))),
        )


def _times(clusters: Sequence[Cluster]) -> str:
    """Return on how many ranks the lines occur, such as `x 8 ranks`.

    If the ranks are unknown, return in how many logs the lines occur. For one, return no text.
    """
    events = [event for cluster in clusters for event in cluster.events]
    ranks = {rank for cluster in clusters for rank in cluster.ranks}
    for event in events:
        ranks |= set(event.log.reporters.get(event.rule.id, ()))
    logs = {event.file for event in events}
    if len(ranks) > 1:
        return f"x {len(ranks)} ranks"
    return f"x {len(logs)} logs" if len(logs) > 1 else ""


def _cited(study: Study, role: Role) -> Table:
    lines = [one for one in study.diagnosis.evidence if one.role == role]
    return _rows([("", _one_line(_place(study, one))) for one in lines], ASIDE_SHOWN)


def _place(study: Study, line: LogLine) -> str:
    """Return a line with its line number; if there are several logs, with its file as well.

    The file's path is shown relative to the common folder of the logs.
    """
    if len(study.files) == 1:
        return f"line {line.line}: {line.text}"
    folder = os.path.commonpath([file.path.parent.absolute() for file in study.files])
    path = Path(line.file).absolute()
    within = folder != os.sep and path.is_relative_to(folder)
    return f"{path.relative_to(folder) if within else line.file}:{line.line}: {line.text}"


def _rows(rows: Sequence[tuple[str, Text]], limit: int) -> Table:
    more = [("", Text(f"and {len(rows) - limit} more", style="dim"))] if len(rows) > limit else []
    return _grid([*rows[:limit], *more])


def _grid(rows: Iterable[tuple[str, Text]]) -> Table:
    rows = list(rows)
    table = Table.grid(padding=(0, 1))
    if any(mark for mark, _ in rows):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for mark, text in rows:
        table.add_row(*([mark] if len(table.columns) > 1 else []), text)
    return table


def _alternatives(found: Diagnosis) -> Table:
    return _grid(
        (f"{one.confidence:.2f}", Text(f"{one.reason} (rule {one.decided_by})"))
        for one in found.alternatives
    )


def _similar(incidents: Iterable[Mapping[str, Any]]) -> Table:
    return _grid((f"{one['similarity']:.2f}", Text(clean(_incident(one)))) for one in incidents)


def _incident(one: Mapping[str, Any]) -> str:
    confirmed = ", confirmed" if one.get("confirmed") else ""
    line = f"incident {one['id']} ({when(one.get('when_s'))}{confirmed}): {one['reason']}"
    return line + "".join(f"; {one[key]}" for key in ("root", "done") if one.get(key))


def _notes(notes: Iterable[str]) -> Table:
    return _grid(("", Text(clean(note))) for note in notes)


def _one_line(text: str, style: str = "") -> Text:
    """Return a text that the terminal cuts at its width instead of wrapping it."""
    return Text(clean(text).replace("\n", " "), style=style, no_wrap=True, overflow="ellipsis")
