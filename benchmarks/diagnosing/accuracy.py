"""Score the dev cases and the laboratory: reason, root lines, fault, action, confidence."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.table import Must, Row
from diagnosing.cases import Case, of_kind
from diagnosing.scoring import (
    Answer,
    Judge,
    Tally,
    calibration_error,
    confidences,
    confident_and_wrong,
    mean_confidences,
    not_put_on_the_user,
    reason_right,
    restart_right,
    root_cited,
    scope_right,
    tally,
)
from diagnosing.systems import PEER, Answers

MIN_LOGS: Final = 400


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Cases with the answers of all systems."""

    cases: Sequence[Case]
    ours: Answers
    peers: Mapping[str, Answers]


def dev_rows(judged: Judged) -> Iterator[Row]:
    """Yield the rows of the dev cases."""
    clean, noisy = of_kind(judged.cases, "clean"), of_kind(judged.cases, "noisy")
    first = [case for case in noisy if case.cascade_first]
    yield from _rows(judged, "reason, noisy", noisy, reason_right, Must(">=", 0.90))
    yield from _rows(judged, "reason, cascade printed first", first, reason_right, Must(">=", 0.85))
    yield from _rows(judged, "reason, clean", clean, reason_right, Must(">=", 0.93))
    yield from _rows(judged, "root line cited, noisy", noisy, root_cited, Must(">=", 0.90))
    yield from _rows(judged, "rank, node or GPU, noisy", noisy, scope_right, Must(">=", 0.85))
    yield from _rows(judged, "rank, node or GPU, clean", clean, scope_right, Must(">=", 0.85))
    both = [*clean, *noisy]
    yield from _rows(judged, "restart decision", both, restart_right, Must(">=", 0.92))
    yield _misplaced(judged, both)
    yield _confidently_wrong(judged, both)


def laboratory_rows(judged: Judged) -> Iterator[Row]:
    """Yield the rows of the laboratory's logs by kind, and the rows of confidence."""
    whole = [case for case in judged.cases if not case.root_removed]
    kept = [case for case in whole if case.kind != "ranks"]  # the peers read one file
    yield Row(
        measure="logs, with variants",
        ours=len(judged.cases),
        unit="logs",
        must=Must(">=", MIN_LOGS),
    )
    yield from _rows(judged, "reason", kept, reason_right, None)
    noisy = of_kind(kept, "noisy")
    first = [case for case in noisy if case.cascade_first]
    yield from _rows(judged, "reason, noisy", noisy, reason_right, Must(">=", 0.90))
    yield from _rows(judged, "reason, cascade printed first", first, reason_right, Must(">=", 0.85))
    yield from _rows(
        judged, "reason, as recorded", of_kind(kept, "recorded"), reason_right, Must(">=", 0.93)
    )
    for kind in sorted({case.kind for case in whole} - {"noisy", "recorded"}):
        yield _row(judged, f"reason, {kind}", of_kind(whole, kind), reason_right)
    yield from _rows(judged, "root line cited", kept, root_cited, Must(">=", 0.90))
    yield from _rows(judged, "rank, node or GPU", kept, scope_right, Must(">=", 0.85))
    yield _row(judged, "rank, one file a rank", of_kind(whole, "ranks"), scope_right)
    yield from _rows(judged, "restart decision", whole, restart_right, Must(">=", 0.92))
    yield _misplaced(judged, whole)
    yield from confidence_rows(judged)


def confidence_rows(judged: Judged) -> Iterator[Row]:
    """Yield the rows of Holdfast's confidence, also on logs without their root.

    No log of the laboratory calibrated the confidence.
    """
    said = confidences(judged.cases, judged.ours)
    yield Row(
        measure=f"expected calibration error, 10 bins [{len(said)} logs]",
        ours=calibration_error(said), unit="", must=Must("<=", 0.08),
    )  # fmt: skip
    wrong = confident_and_wrong(said)
    yield Row(
        measure="confident (0.8) and wrong, of all logs",
        ours=wrong.share,
        unit="",
        must=Must("<=", 0.03),
    )
    sure = [one for one in said if one[0] >= 0.8]
    yield Row(measure="wrong, of the confident", ours=confident_and_wrong(sure).share, unit="")
    kept, removed, fell = mean_confidences(judged.cases, judged.ours)
    yield Row(measure="mean confidence, root lines kept", ours=kept, unit="")
    yield Row(
        measure="mean confidence, root lines removed",
        ours=removed,
        unit="",
        must=Must("<=", kept / 2),
    )
    yield Row(
        measure=f"confidence fell without the root [{fell.of} logs]", ours=fell.share, unit=""
    )


def _rows(
    judged: Judged, what: str, cases: Sequence[Case], judge: Judge, must: Must | None
) -> Iterator[Row]:
    """Yield Holdfast's row beside NVIDIA's with the must, then the baselines' rows without one."""
    yield _row(judged, what, cases, judge, must)
    for name, answers in judged.peers.items():
        if name != PEER and (theirs := tally(cases, answers, judge)).of:
            yield Row(measure=f"{what} [{name}]", peer=theirs.share, unit="")


def _row(
    judged: Judged, what: str, cases: Sequence[Case], judge: Judge, must: Must | None = None
) -> Row:
    ours, theirs = tally(cases, judged.ours, judge), tally(cases, judged.peers.get(PEER, {}), judge)
    name = f"{what} ({ours.right} of {ours.of})"
    return Row(
        measure=name, ours=ours.share, peer=theirs.share, unit="", must=must if ours.of else None
    )


def _misplaced(judged: Judged, cases: Sequence[Case]) -> Row:
    def wrong(answers: Answers) -> Tally:
        right = tally(cases, answers, not_put_on_the_user)
        return Tally(right.of - right.right, right.of)

    ours = wrong(judged.ours)
    return Row(
        measure=f"user_must_fix said of infrastructure that recovers ({ours.right} of {ours.of})",
        ours=ours.share, peer=wrong(judged.peers.get(PEER, {})).share, unit="",
        must=Must("<=", 0.02) if ours.of else None,
    )  # fmt: skip


def _confidently_wrong(judged: Judged, cases: Sequence[Case]) -> Row:
    wrong = confident_and_wrong(confidences(cases, judged.ours))
    name = f"confident (0.8) and wrong ({wrong.right} of {wrong.of})"
    return Row(measure=name, ours=wrong.share, unit="")


# Misses


def misses(judged: Judged) -> Iterator[dict[str, Any]]:
    """Yield Holdfast's wrong answers by case, for their repair."""
    judges: dict[str, Judge] = {
        "reason": reason_right, "root": root_cited, "scope": scope_right, "restart": restart_right,
        "user": not_put_on_the_user,
    }  # fmt: skip
    for case in judged.cases:
        answer = judged.ours[case.id]
        wrong = [name for name, judge in judges.items() if judge(case, answer) is False]
        if case.root_removed:
            wrong = ["reason"] if (answer.confidence or 0) >= 0.8 and "reason" in wrong else []
        if wrong:
            yield {
                "id": case.id,
                "log": str(case.path),
                "kind": case.kind,
                "wrong": wrong,
                **_told(case, answer),
            }


def _told(case: Case, answer: Answer) -> dict[str, Any]:
    return {
        "reason": answer.reason, "accepted": sorted(case.accepted),
        "root_lines": list(answer.root_lines), "label_lines": sorted(case.root_lines),
        "scope": dict(answer.scope), "faulty": dict(case.faulty),
        "restart": answer.restart_helps, "label_restart": case.restart_helps, "action": answer.action,
        "confidence": round(answer.confidence or 0.0, 3), "decided_by": answer.decided_by,
    }  # fmt: skip
