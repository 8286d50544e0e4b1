"""Write the text of `holdfast eval why`: the lower bound, the ratio, and the engine-seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core import words
from holdfast.evaluate.policy import account
from holdfast.evaluate.types.evaluation import BoundTerm, Evaluation, PathStep

BOUND_MEANINGS = {
    "engines": "all requests, at the cost that each has in a full batch, over the engines, once "
    "started",
    "sample": "the sample that takes longest, alone on an engine once started, with its metric",
    "metrics": "all metrics, over the CPU slots there were",
    "judge": "all requests to the judge, at its quota",
    "pace": "long answers need small batches to end in time, which cost more of an engine",
    "storage": "engine start, then the weights, once, over the bandwidth",
}
"""The terms of the lower bound, with their meanings for display."""
CAUSES = {
    account.USEFUL: ("Useful work", "answering, at the cost a request has in a full batch"),
    account.UNDERFILLED: ("Batches not full", "answering, beyond what it costs in a full batch"),
    account.REDONE: (
        "Done twice",
        "answered again after an engine was lost, or stolen in the tail",
    ),
    account.WEIGHTS: ("Waiting for weights", "the model was not in the node's memory yet"),
    account.START: ("Starting", "engines starting, with fresh weights"),
    account.SWAP: ("Swapping", "weights swapped in running engines"),
    account.BEFORE: (
        "No requests yet",
        "idle while the harness was still building the first requests",
    ),
    account.BETWEEN: ("Waiting", "idle between requests"),
    account.TAIL_SAMPLE: ("Tail", "idle while others generated the last samples"),
    account.TAIL_METRIC: ("Tail, metrics", "idle while the last metrics and scores were computed"),
    account.TAIL_JUDGE: ("Tail, judge", "idle while the last answers were judged"),
    account.LOST: (
        "Lost engines",
        "from an engine's last message until its loss was detected",
    ),
    account.ABSENT: ("Not there", "before the engine was ordered, or after it had left"),
    "busy": ("Answering", "at work on at least one request"),
    "idle": ("Idle", "without any request"),
}
"""The causes of engine-seconds, each with the name and the meaning to display."""
WORK = (account.USEFUL, "busy")
"""The causes of engine-seconds that are not losses."""
LOSSES_SHOWN = 3
MIN_SHARE_SHOWN = 0.0005
PATH_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class LostTime:
    """One cause of engine-seconds, with its share of all engine-seconds."""

    cause: str
    name: str
    meaning: str
    seconds: float
    share: float


def lost_time(evaluation: Evaluation) -> list[LostTime]:
    """List the causes of engine-seconds: first useful work, then the losses, the largest first."""
    total_s = sum(evaluation.account.values()) or 1.0
    ordered = sorted(
        evaluation.account.items(), key=lambda item: (item[0] not in WORK, -item[1], item[0])
    )
    return [
        LostTime(
            cause=cause,
            name=CAUSES.get(cause, (named(cause), ""))[0],
            meaning=CAUSES.get(cause, ("", ""))[1],
            seconds=seconds,
            share=seconds / total_s,
        )
        for cause, seconds in ordered
    ]


def losses(evaluation: Evaluation) -> str:
    """Summarize useful time and the largest losses in one line; empty if nothing was lost."""
    if all_known(evaluation):
        return ""
    rows = lost_time(evaluation)
    useful = sum(row.share for row in rows if row.cause in WORK)
    lost = [row for row in rows if row.cause not in WORK and row.share >= MIN_SHARE_SHOWN][
        :LOSSES_SHOWN
    ]
    if not lost:
        return ""
    listed = "; ".join(f"{row.name[0].lower()}{row.name[1:]} {row.share:.1%}" for row in lost)
    return f"Useful work was {useful:.1%} of the engines' time. Most of the rest: {listed}."


def bound_terms(evaluation: Evaluation) -> list[tuple[BoundTerm, str]]:
    """List the terms of the lower bound with their meanings, the largest first."""
    terms = sorted(evaluation.bound, key=lambda term: -term.seconds)
    return [(term, term.detail or BOUND_MEANINGS.get(term.name, "")) for term in terms]


def named(name: str) -> str:
    """Format an identifier of the policy for display: `engine_lost` becomes `Engine lost`."""
    return name.replace("_", " ").capitalize()


def verdict(evaluation: Evaluation) -> str:
    """State the makespan, the lower bound, and their ratio in one sentence."""
    verb = "would take" if evaluation.state == "planned" else "took"
    took = (
        f"{evaluation.suite} on {evaluation.model} {verb} {words.duration(evaluation.makespan_s)}"
    )
    if known := all_known(evaluation):
        return f"{took}. {known}".replace(words.NBSP, " ")
    if evaluation.ratio is None:
        return f"{took}; no lower bound is known.".replace(words.NBSP, " ")
    decides = max(evaluation.bound, key=lambda term: term.seconds)
    return (
        f"{took}, {evaluation.ratio:.2f} times its lower bound of "
        f"{words.duration(evaluation.bound_s)} "
        f"({named(decides.name).lower()})."
    ).replace(words.NBSP, " ")


def all_known(evaluation: Evaluation) -> str:
    """Return a sentence if every answer was reused; empty if an engine answered any request."""
    is_known = evaluation.state == "done" and evaluation.reused > 0 and not evaluation.requests
    return "Nothing had to be run: all answers were known." if is_known else ""


def why(evaluation: Evaluation) -> str:
    """Return the whole text, as plain lines."""
    lines = [verdict(evaluation), ""]
    if evaluation.bound:
        lines += ["Lower bounds of every schedule:"]
        lines += _table(
            [(named(term.name), _s(term.seconds), shown) for term, shown in bound_terms(evaluation)]
        )
        lines += [""]
    if evaluation.account:
        engines = words.plainly(evaluation.engines, "engine")
        lines += [
            f"Where the {sum(evaluation.account.values()):,.1f} engine-seconds of {engines} went:"
        ]
        lines += _table(
            [
                (row.name, f"{row.seconds:,.1f} s", f"{row.share:.1%}", row.meaning)
                for row in lost_time(evaluation)
            ]
        )
        lines += [""]
    if evaluation.critical_path:
        lines += ["Critical path, backwards from the end:"]
        lines += _table([_path_row(step) for step in longest_waits(evaluation.critical_path)])
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def longest_waits(path: Sequence[PathStep]) -> list[PathStep]:
    """Return the steps of the critical path, the latest first.

    If there are many steps, only the longest ones are returned.
    """
    kept = sorted(path, key=lambda step: step.t0 - step.t1)[:PATH_SHOWN]
    return sorted(kept, key=lambda step: -step.t1)


def _path_row(step: PathStep) -> tuple[str, ...]:
    return (f"at {_s(step.t0)}", named(step.what), _s(step.t1 - step.t0), step.detail)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns of a table: numbers to the right; the last column is not padded."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    return [
        "  "
        + "  ".join(
            [*(_padded(cell, width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    ]


def _padded(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)


def _s(seconds: float) -> str:
    return words.duration(seconds).replace(words.NBSP, " ")
