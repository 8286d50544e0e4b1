"""Write the report on a period, as Markdown or as one HTML page with the same sections."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core import words
from holdfast.core.accounting import gpu_hours
from holdfast.core.accounting.records import Cause
from holdfast.core.page import template
from holdfast.ui.period import Period, PeriodIncident

TEMPLATE = Path(__file__).parent / "templates" / "period_report.html.j2"
ROWS_LIMIT = 30
"""The most rows of a table; a sentence states the number of further rows."""
TEXT_LIMIT = 160
CAUSES: dict[Cause, str] = {
    "productive": "steps that survive",
    "lost": "steps rolled back or broken off",
    "detecting": "detecting",
    "restarting": "restarting",
    "starting": "first start",
    "checkpoint": "stalls for checkpoints",
    "other": "checkpoints, evaluations and other",
}
MARKUP = str.maketrans(
    {character: f"\\{character}" for character in "\\`*_[]<>|~#"} | {"&": "&amp;"}
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table of the report, with its title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    empty: str
    """The sentence to show if the table has no rows."""
    left_out: int = 0
    """The number of rows that are not in the table."""


def period_markdown(period: Period) -> str:
    """Return the report as Markdown; text from logs cannot become markup."""
    lines = [f"# {title(period)}", "", *(_escaped(one) for one in headline(period))]
    for section in sections(period):
        lines += ["", f"## {section.title}", ""]
        if not section.rows:
            lines.append(section.empty)
            continue
        lines.append(_row(section.columns))
        lines.append(_row(["---"] * len(section.columns)))
        lines += [_row([_escaped(cell) for cell in row]) for row in section.rows]
        if section.left_out:
            lines += ["", f"{section.left_out:,} more are left out."]
    return "\n".join(lines) + "\n"


def period_html(period: Period) -> str:
    """Return the report as an HTML page that needs no network.

    Raises:
        HoldfastError: jinja2 is not installed.
    """
    return template(TEMPLATE).render(
        title=title(period), headline=headline(period), sections=sections(period)
    )


def title(period: Period) -> str:
    """Return the title of the report, which has the dates."""
    return f"Holdfast, {words.moment(period.since_s)} to {words.moment(period.until_s)}"


def headline(period: Period) -> list[str]:
    """Return a few sentences that sum up the period."""
    if not period.runs:
        return ["No run was going on."]
    said = [
        f"{words.plainly(len(period.runs), 'run')}, {_hours(period.gpu_hours)}. "
        + (
            "The share of steps that survive is unknown."
            if period.ettr is None
            else f"{period.ettr:.1%} of the time went into steps that survive (ETTR {period.ettr:.3f})."
        )
    ]
    incidents = period.incidents
    recovered = sum(one.is_recovered for one in incidents)
    lost = sum(one.story.lost_gpu_hours for one in incidents)
    by_people = sum(one.interventions for one in period.runs)
    said.append(
        f"{words.plainly(len(incidents), 'incident')}: {recovered} recovered without a person, "
        f"{_hours(lost)} lost. People stopped or started a run {words.plainly(by_people, 'time')}."
        if incidents
        else f"No incident. People stopped or started a run {words.plainly(by_people, 'time')}."
    )
    return said


def sections(period: Period) -> list[Section]:
    """Return the tables of the report."""
    return [
        _section(
            "Runs",
            ("run", "state", "GPUs", "GPU-hours", "ETTR", "step", "incidents", "note"),
            [
                (
                    one.run.run_id,
                    one.state,
                    f"{one.ranks:,}",
                    f"{one.gpu_hours:,.4g}",
                    "unknown" if one.ettr is None else f"{one.ettr:.3f}",
                    f"{one.final_step:,}",
                    str(len(one.incidents)),
                    one.why_unknown or one.run.outcome,
                )
                for one in sorted(period.runs, key=lambda one: -one.gpu_hours)
            ],
            "None.",
        ),
        _time(period),
        _section(
            "Causes",
            ("cause", "incidents", "recovered without a person", "GPU-hours lost"),
            _causes(period.incidents),
            "No incident.",
        ),
        _section(
            "The costliest incidents",
            ("time", "run", "failure", "cause", "done", "effect", "GPU-hours lost"),
            [
                (
                    words.moment(one.story.at_s),
                    one.run_id,
                    one.story.what,
                    one.story.cause,
                    one.story.done,
                    one.story.check,
                    f"{one.story.lost_gpu_hours:,.3g}",
                )
                for one in sorted(period.incidents, key=lambda one: -one.story.lost_gpu_hours)
            ],
            "No incident.",
        ),
        _section(
            "Nodes cordoned in this time",
            ("node", "by", "since", "reason"),
            [
                (one.name, one.cordoned_by, words.moment(one.cordoned_at_s or 0.0), one.why)
                for one in period.cordoned
            ],
            "None.",
        ),
        _section(
            "Evaluations",
            ("evaluation", "suite", "model", "state", "took", "bound"),
            [
                (
                    one.evaluation_id,
                    one.suite,
                    one.model,
                    one.state,
                    "" if one.makespan_s is None else words.duration(one.makespan_s),
                    "" if one.bound_s is None else words.duration(one.bound_s),
                )
                for one in period.evaluations
            ],
            "None.",
        ),
    ]


def _time(period: Period) -> Section:
    total_s = sum(period.rank_seconds.values())
    rows = [
        (name, f"{gpu_hours(seconds):,.4g}", f"{seconds / total_s:.1%}")
        for cause, name in CAUSES.items()
        if (seconds := period.rank_seconds.get(cause, 0.0)) > 0
    ]
    return _section(
        "Where the time went", ("time", "GPU-hours", "share"), rows, "No steps are known."
    )


def _causes(incidents: Sequence[PeriodIncident]) -> list[tuple[str, ...]]:
    counts = Counter(one.reason for one in incidents)
    return [
        (
            reason,
            str(count),
            str(sum(one.is_recovered for one in incidents if one.reason == reason)),
            f"{sum(one.story.lost_gpu_hours for one in incidents if one.reason == reason):,.3g}",
        )
        for reason, count in counts.most_common()
    ]


def _section(
    name: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], empty: str
) -> Section:
    shown = tuple(tuple(_plain(cell) for cell in row) for row in rows[:ROWS_LIMIT])
    return Section(
        title=name,
        columns=columns,
        rows=shown,
        empty=empty,
        left_out=max(0, len(rows) - ROWS_LIMIT),
    )


def _plain(text: str) -> str:
    """Return any text as one short line without control characters."""
    return words.shorten(" ".join(words.clean(text).split()), TEXT_LIMIT)


def _hours(hours: float) -> str:
    return f"{hours:,.4g} GPU-hours"


def _escaped(text: str) -> str:
    return text.translate(MARKUP)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
