"""Score answers, and compute shares of right answers.

| answer | right if |
|---|---|
| reason | the label accepts the reason |
| root line | one of up to three cited lines is one of the label's, by number |
| scope | one or more of the label's things are named, and none contradicted (`scope_right`) |
| restart | `restart_helps` equals the label's, if the label has one |
| user must fix | not given for an infrastructure failure that a restart gets past |

The confidence of an answer counts as the probability of its reason.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diagnosing.cases import Case

MAX_NAMES = 4
"""An answer with more ranks, nodes or GPUs than this counts as one without any."""
MAX_LINES = 3
CONFIDENT = 0.8
BINS = 10


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A system's answer for a job."""

    reason: str
    root_lines: tuple[int, ...] = ()
    scope: Mapping[str, Any] = field(default_factory=dict)
    restart_helps: bool = True
    action: str = ""
    confidence: float | None = None
    """None: the system gives no confidence."""
    decided_by: str = ""


@dataclass(frozen=True)
class Tally:
    """A number of right answers among all."""

    right: int
    of: int

    @property
    def share(self) -> float | None:
        """Return the share; None for no answers."""
        return self.right / self.of if self.of else None


Judge = Callable[[Case, Answer], bool | None]
"""Returns whether an answer is right; None if the label does not decide."""


def reason_right(case: Case, answer: Answer) -> bool:
    """Return True if the label accepts the reason."""
    return answer.reason in case.accepted


def root_cited(case: Case, answer: Answer) -> bool | None:
    """Return True if a cited line states the root."""
    if not case.root_lines:
        return None
    return not case.root_lines.isdisjoint(answer.root_lines[:MAX_LINES])


def restart_right(case: Case, answer: Answer) -> bool | None:
    """Return True if the restart decision is the label's."""
    return None if case.restart_helps is None else answer.restart_helps is case.restart_helps


def not_put_on_the_user(case: Case, answer: Answer) -> bool | None:
    """Return True unless a user must fix an infrastructure failure that a restart gets past."""
    if case.category != "Infrastructure" or case.restart_helps is not True:
        return None
    return answer.action != "user_must_fix"


def scope_right(case: Case, answer: Answer) -> bool | None:
    """Return True if the answer names a thing of the label and contradicts none of them.

    - A node is its name up to the first dot (an address as it is), in any case.
    - A GPU is its index, or its bus and device without domain and function.
    - A rank also counts as a local rank, and a local rank as a rank, if the answer has only that.
    - A list of at most four names must have one of the label's.
    """
    if not case.faulty:
        return None
    verdicts = []
    for key, wanted in case.faulty.items():
        given = answer.scope.get(key)
        if given is None and key in _RANKS:
            given = answer.scope.get(_RANKS[key])
        if given is not None:
            verdicts.append(_names(given, wanted, key))
    return bool(verdicts) and all(verdicts)


_RANKS = {"rank": "local_rank", "local_rank": "rank"}
_PCI = re.compile(r"(?:[0-9a-f]{4,8}:)?([0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-9a-f])?")
_ADDRESS = re.compile(r"[\d.]+|[0-9a-f:]+")


def _names(given: object, wanted: object, key: str) -> bool:
    given_ = [_plain(one, key) for one in (given if isinstance(given, list | tuple) else [given])]
    wanted_ = {
        _plain(one, key) for one in (wanted if isinstance(wanted, list | tuple) else [wanted])
    }
    return len(given_) <= max(MAX_NAMES, len(wanted_)) and not wanted_.isdisjoint(given_)


def _plain(value: object, key: str) -> str:
    text = str(value).strip().lower()
    if key == "gpu" and (found := _PCI.fullmatch(text)):
        return found[1]
    if key == "node" and not _ADDRESS.fullmatch(text):
        return text.partition(".")[0]
    return text


def tally(cases: Iterable[Case], answers: Mapping[str, Answer], judge: Judge) -> Tally:
    """Count the right answers among the cases on which the labels decide."""
    verdicts = [judge(case, answers[case.id]) for case in cases if case.id in answers]
    decided = [verdict for verdict in verdicts if verdict is not None]
    return Tally(sum(decided), len(decided))


# Confidence


def calibration_error(said: Sequence[tuple[float, bool]], bins: int = BINS) -> float | None:
    """Return the expected calibration error.

    The error is |mean confidence - share right| over bins of equal width, weighted by size. Source:
    Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, equation 3.
    """
    if not said:
        return None
    by_bin: dict[int, list[tuple[float, bool]]] = {}
    for confidence, right in said:
        by_bin.setdefault(min(int(confidence * bins), bins - 1), []).append((confidence, right))
    return sum(
        abs(sum(confidence for confidence, _ in held) - sum(right for _, right in held))
        for held in by_bin.values()
    ) / len(said)


def confident_and_wrong(said: Sequence[tuple[float, bool]]) -> Tally:
    """Count the wrong answers with a confidence of 0.8 or more, among all answers."""
    return Tally(
        sum(confidence >= CONFIDENT and not right for confidence, right in said), len(said)
    )


def confidences(cases: Iterable[Case], answers: Mapping[str, Answer]) -> list[tuple[float, bool]]:
    """Return each answer's confidence, and whether its reason is right."""
    return [
        (confidence, reason_right(case, answers[case.id]))
        for case in cases
        if (confidence := answers[case.id].confidence) is not None
    ]


def mean_confidences(
    cases: Sequence[Case], answers: Mapping[str, Answer]
) -> tuple[float, float, Tally]:
    """Return the mean confidence with root lines and without, and the number of falls."""
    kept = {
        case.program: answers[case.id].confidence or 0.0
        for case in cases
        if case.kind == "recorded"
    }
    removed = {
        case.program: answers[case.id].confidence or 0.0 for case in cases if case.root_removed
    }
    both = sorted(kept.keys() & removed.keys())
    if not both:
        return 0.0, 0.0, Tally(0, 0)
    fell = sum(removed[program] < kept[program] for program in both)
    return (
        sum(kept[program] for program in both) / len(both),
        sum(removed[program] for program in both) / len(both),
        Tally(fell, len(both)),
    )
