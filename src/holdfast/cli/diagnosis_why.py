"""Explain why a line was chosen as the root: list the candidates and the points against each."""

from typing import Any, Final

from rich.table import Table
from rich.text import Text

from holdfast.core.words import clean, percent, plainly, shorten
from holdfast.diagnose import Cluster, Explanation, Reckoning

SHOWN: Final = 4
"""The most candidates that are printed for a person."""
_LISTED: Final = 8
"""The most candidates in the JSON output."""
_NAMED: Final = 4
"""The most rules that are named for each relation between a candidate and other lines."""
INTRODUCTION: Final = (
    "Each line that may have begun the failure is scored as the root: the points against it are added"
    " up, and 1 point more is 2.7 times less likely. The root is the line with the least sum; the"
    " place of a line in the log plays no part."
)
HOW: Final = {
    "follows": "would follow from it",
    "unrelated": "would have nothing to do with it",
    "by itself": "would be a separate fault",
}


def in_words(explanation: Explanation) -> Table:
    """Return a table of the most likely candidates, for printing."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    if not explanation.ranked:
        table.add_row("", "No line is known that could begin a failure.")
    for cluster, share, sums in _candidates(explanation, SHOWN):
        table.add_row(
            Text(f"{sums.total:.1f}", style="bold"), Text(_headline(cluster, share), style="bold")
        )
        table.add_row(f"{sums.alone:.1f}", "that it began by itself" + _doubts(cluster))
        table.add_row(f"{sums.end:.1f}", "that it led to the end of the job")
        for how, words in HOW.items():
            others = [(one, cost) for one, manner, cost in sums.others if manner == how]
            if others:
                table.add_row(
                    f"{sum(cost for _, cost in others):.1f}", Text(f"{_named(others)} {words}")
                )
        table.add_row("", "")
    if (left := len(explanation.ranked) - SHOWN) > 0:
        table.add_row("", f"{plainly(left, 'further candidate')} with higher sums.")
    return table


def as_json(explanation: Explanation) -> list[dict[str, Any]]:
    """Return the most likely candidates for the JSON output; the first one is the root."""
    return [
        {
            "rule": cluster.first.rule.id,
            "reason": cluster.first.rule.reason,
            **_place(cluster),
            "text": cluster.first.cited,
            "ranks": sorted(cluster.ranks),
            "share": round(share, 4),
            "cost": round(sums.total, 3),
            "alone": round(sums.alone, 3),
            "end": round(sums.end, 3),
            "others": [
                {"rule": one.first.rule.id, **_place(one), "how": how, "cost": round(cost, 3)}
                for one, how, cost in sums.others
            ],
        }
        for cluster, share, sums in _candidates(explanation, _LISTED)
    ]


def _candidates(explanation: Explanation, most: int) -> list[tuple[Cluster, float, Reckoning]]:
    return list(zip(explanation.ranked, explanation.shares, explanation.reckonings, strict=True))[
        :most
    ]


def _place(cluster: Cluster) -> dict[str, Any]:
    return {"file": cluster.first.file, "line": cluster.first.line}


def _headline(cluster: Cluster, share: float) -> str:
    first = cluster.first
    where = clean(f"{first.file}:{first.line}" if first.line else first.file or "seen from outside")
    quoted = shorten(clean(first.text.strip()), 90)
    return f"{percent(share)}  {first.rule.reason} (rule {first.rule.id}, {where}): {quoted}"


def _doubts(cluster: Cluster) -> str:
    """Return a clause on the extra points against a candidate; empty if there are none."""
    if cluster.first.demoted:
        return ", though another line of the same traceback is more specific"
    if cluster.first.recovered:
        return ", though training went on after it"
    return ""


def _named(others: list[tuple[Cluster, float]]) -> str:
    others = sorted(others, key=lambda one: -one[1])
    names = list(dict.fromkeys(one.first.rule.id for one, _ in others))
    listed = ", ".join(names[:_NAMED]) + (
        f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    )
    return f"{plainly(len(others), 'other')} ({listed})"
