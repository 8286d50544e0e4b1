"""Measure learning: remove half of the reasons from the rules, then confirm incidents.

One and five incidents per reason are confirmed. Each of the 29 reasons is removed once, in one of
two folds. A quarter of a reason's programs is tested in each turn; the confirmed incidents are of
the other programs. A confirmed incident has its reason and the lines of its root. Incidents are
given all at once, with incidents of the kept reasons and routine output of good runs. A proposed
rule may spoil none of these.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from common.jobs import say
from common.table import Must, Row
from diagnosing.cases import Case, of_kind, places
from diagnosing.scoring import Answer, reason_right
from diagnosing.systems import our_answers

LESSONS: Final[Mapping[int, float]] = {1: 0.5, 5: 0.9}
"""Confirmed incidents per reason, and the share of the gap that they must close."""
KINDS: Final = ("recorded", "noisy", "permuted")
"""The kinds of whole logs, with the lines of the root and the lines after them."""
FOLDS: Final = 2
TURNS: Final = 4
LEFT_IN: Final = "Others"
"""A reason outside of the table, which is never removed."""
GOOD_LINES: Final = 400
_LISTED: Final = 3


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The results of one set of removed reasons in one turn: numbers of right answers."""

    asked: int
    with_all: int
    without: int
    after: Mapping[int, int]
    """Right answers by the number of confirmed incidents per reason."""
    worsened: Mapping[int, Sequence[str]]
    """Incidents in the memory with a right answer before and a wrong one after."""
    unjudged_worsened: Mapping[int, Sequence[str]]
    """Logs outside of the memory with a right answer before and a wrong one after."""


def rows(cases: Sequence[Case], *, quick: bool) -> Iterator[Row]:
    """Yield the share of the gap that is closed, and the answers that became worse."""
    used = of_kind(cases, "recorded") if quick else of_kind(cases, *KINDS)
    everything = our_answers(used)
    folds: list[Fold] = []
    for number in range(FOLDS):
        for one in _folds(used, number, everything, turns=1 if quick else TURNS):
            folds.append(one)
            say(f"learning: {len(folds)} of {FOLDS * (1 if quick else TURNS)} done")
    asked = sum(one.asked for one in folds)
    yield Row(
        measure=f"accuracy with all rules ({asked} logs)",
        ours=_part(folds, "with_all", asked),
        unit="",
    )
    yield Row(
        measure="accuracy without the reasons' rules", ours=_part(folds, "without", asked), unit=""
    )
    for count, least in LESSONS.items():
        many = f"{count} confirmed incident{'s' * (count > 1)} a reason"
        after = sum(one.after[count] for one in folds)
        yield Row(measure=f"accuracy after {many}", ours=after / asked if asked else None, unit="")
        yield Row(
            measure=f"gap closed by {many}",
            ours=gap_closed(folds, count),
            unit="",
            must=Must(">=", least),
        )
        worse = [name for one in folds for name in one.worsened[count]]
        named = f" [{', '.join(worse[:_LISTED])}]" if worse else ""
        yield Row(
            measure=f"earlier answers worsened by {many}{named}",
            ours=len(worse),
            unit="logs",
            must=Must("=", 0),
        )
        unjudged = sum(len(one.unjudged_worsened[count]) for one in folds)
        yield Row(
            measure=f"answers that nobody had judged worsened by {many}", ours=unjudged, unit="logs"
        )


def _part(folds: Sequence[Fold], what: str, asked: int) -> float | None:
    return sum(getattr(one, what) for one in folds) / asked if asked else None


def gap_closed(folds: Sequence[Fold], count: int) -> float | None:
    """Return (after - without) / (all rules - without) over all folds; None without a gap."""
    gap = sum(one.with_all - one.without for one in folds)
    return sum(one.after[count] - one.without for one in folds) / gap if gap > 0 else None


def fold_of(reason: str) -> int:
    """Return the fold in which a reason is removed, by its name alone; -1 for none."""
    return -1 if reason == LEFT_IN else hashlib.sha256(reason.encode()).digest()[0] % FOLDS


def lessons(cases: Sequence[Case], reason: str, count: int) -> list[Case]:
    """Return the incidents to confirm of a reason, of as many programs as possible.

    Recorded logs come first, then their variants.
    """
    of_reason = [case for case in cases if case.reason == reason]
    return sorted(of_reason, key=lambda case: (KINDS.index(case.kind), case.program))[:count]


def _folds(
    cases: Sequence[Case], number: int, everything: Mapping[str, Answer], *, turns: int
) -> Iterator[Fold]:
    """Yield the turns of one fold."""
    place = places(cases)
    rules = _without({case.reason for case in cases if fold_of(case.reason) == number})
    removed = [case for case in cases if fold_of(case.reason) == number]
    left_in = [case for case in of_kind(cases, "recorded") if fold_of(case.reason) != number]
    before = our_answers(cases, rules)
    for turn in range(turns):
        taught = [case for case in removed if place[case.program] % TURNS != turn]
        asked = [case for case in removed if place[case.program] % TURNS == turn]
        stored = [
            case
            for case in left_in
            if place[case.program] % TURNS != turn and reason_right(case, before[case.id])
        ]
        after: dict[int, int] = {}
        worsened: dict[bool, dict[int, list[str]]] = {False: {}, True: {}}
        for count in LESSONS:
            reasons = sorted({case.reason for case in asked})
            confirmed = [one for reason in reasons for one in lessons(taught, reason, count)]
            told = our_answers(cases, known=_learned([*confirmed, *stored], rules))
            after[count] = _right(asked, told)
            worse = [
                case
                for case in cases
                if reason_right(case, before[case.id]) and not reason_right(case, told[case.id])
            ]
            remembered = {one.id for one in (*confirmed, *stored)}
            for judged in (True, False):
                worsened[judged][count] = [
                    one.id for one in worse if (one.id in remembered) is judged
                ]
        yield Fold(
            asked=len(asked), with_all=_right(asked, everything), without=_right(asked, before), after=after,
            worsened=worsened[True], unjudged_worsened=worsened[False],
        )  # fmt: skip


def _right(cases: Sequence[Case], answers: Mapping[str, Answer]) -> int:
    return sum(reason_right(case, answers[case.id]) for case in cases)


def _without(reasons: set[str]) -> Any:
    """Return the packaged rules without the rules of `reasons`."""
    from holdfast.diagnose.rules.packaged import packaged_topics
    from holdfast.diagnose.rules.rules import RuleSet

    topics = [
        replace(topic, rules=tuple(rule for rule in topic.rules if rule.reason not in reasons))
        for topic in packaged_topics()
    ]
    return RuleSet(topic for topic in topics if topic.rules)


def _learned(confirmed: Sequence[Case], rules: Any) -> Any:
    """Return the accepted rules and the memory after the confirmed incidents."""
    from holdfast.diagnose.memory import Case as Incident
    from holdfast.diagnose.memory import Known, learn

    incidents = [
        Incident.of_log(
            case.path,
            reason=case.reason,
            root_lines=sorted(case.root_lines),
            rules=rules,
            key=case.id,
        )
        for case in confirmed
    ]
    return Known.of(learn(incidents, rules, good=good_runs()), incidents, base=rules.topics)


def good_runs() -> list[str]:
    """Return lines of runs that ended well, one of each trainer."""
    from failure_lab import noise
    from failure_lab.routines import NOISE

    draw = random.Random("good runs")
    return [line for trainer in NOISE for line in noise.routine(trainer, draw, GOOD_LINES)]
