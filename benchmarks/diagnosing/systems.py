"""Run the systems: Holdfast, the baselines, and NVIDIA's restart agent."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diagnosing import nvrx
from diagnosing.baselines import BASELINES
from diagnosing.cases import Case
from diagnosing.scoring import Answer

PEER = "NVRx"
Answers = Mapping[str, Answer]


def ours(path: Path, rules: Any = None, known: Any = None) -> Answer:
    """Return Holdfast's answer for a log or a folder, by `rules` or with `known` if given."""
    from holdfast.diagnose import diagnose
    from holdfast.diagnose.explain.answer import conclude
    from holdfast.diagnose.explain.scan import scan
    from holdfast.diagnose.logs.files import find_files

    if rules is not None:
        said = conclude(scan(find_files([path]).files, rules))
    else:
        said = diagnose(path) if known is None else diagnose(path, known=known)
    return answer_of(said)


def answer_of(said: Any) -> Answer:
    """Convert a `Diagnosis` to the answer that is scored."""
    return Answer(
        reason=said.reason,
        root_lines=tuple(line.line for line in said.root_lines),
        scope=dict(said.scope),
        restart_helps=said.restart_helps,
        action=said.action,
        confidence=said.confidence,
        decided_by=said.decided_by[0] if said.decided_by else "",
    )


def our_answers(cases: Sequence[Case], rules: Any = None, known: Any = None) -> dict[str, Answer]:
    """Return Holdfast's answer for each case."""
    return {case.id: ours(case.path, rules, known) for case in cases}


def peers_answers(cases: Sequence[Case], checkout: Path | None) -> dict[str, Answers]:
    """Return each peer's answers for the cases of one file; NVIDIA's need a checkout."""
    files = [case for case in cases if case.path.is_file()]
    found: dict[str, Answers] = {}
    if nvrx.missing(checkout) is None and checkout is not None and files:
        answered = nvrx.answers(checkout, [case.path for case in files])
        found[PEER] = {case.id: answer for case, answer in zip(files, answered, strict=True)}
    for name, baseline in BASELINES.items():
        found[name] = {case.id: baseline(case.path) for case in files}
    return found
