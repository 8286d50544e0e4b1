"""Measure the gain of a model over the rules: a perfect, a small real, and a wrong model.

A case is open if the rules leave it to a model. An answer is worse than that of the rules if its
reason or restart decision is wrong and that of the rules was right.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from common.jobs import say
from common.table import Must, Row
from diagnosing.cases import Case
from diagnosing.models import SmallModel, Words, lying, perfect
from diagnosing.scoring import Answer, reason_right, restart_right
from diagnosing.systems import answer_of

STEPS: Final = 150
"""Training steps of the small model in a full run."""
QUICK_CASES: Final = 4
PATIENCE_S: Final = 600.0
"""The limit for an answer; a model on a busy machine is slow, and speed is not measured here."""


def rows(cases: Sequence[Case], *, quick: bool, seed: int) -> Iterator[Row]:
    """Yield the gain of each model on open cases, and the gain of a confirmed answer."""
    files = [case for case in cases if case.path.is_file()]
    studied = {case.id: _by_rules(case.path) for case in files}
    left_open = [case for case in files if _is_open(studied[case.id])]
    left_open = left_open[:QUICK_CASES] if quick else left_open
    yield Row(
        measure=f"logs that the rules leave open, of {len(files)}", ours=len(left_open), unit="logs"
    )
    if not left_open:
        return
    models: dict[str, Callable[[Case], Words]] = {"perfect": perfect, "wrong": lying}
    if not quick:  # it takes minutes to make
        small = SmallModel(steps=STEPS, seed=seed)
        say(f"agents: the small model is made, loss {small.loss:.2f} a byte")
        models["small"] = lambda _: small
    before = {case.id: answer_of(studied[case.id][0]) for case in left_open}
    after: dict[str, dict[str, Answer]] = {name: {} for name in models}
    for case in left_open:
        for name, make in models.items():
            after[name][case.id] = _asked(studied[case.id], make(case), name)
        told = "; ".join(f"{name}: {_told(case, after[name][case.id])}" for name in models)
        say(f"agents: {case.id} ({case.reason}): rules: {_told(case, before[case.id])}; {told}")
    right = sum(reason_right(case, before[case.id]) for case in left_open)
    yield Row(measure="right of these, rules alone", ours=right, unit="logs")
    for name in models:
        answers = after[name]
        count = sum(reason_right(case, answers[case.id]) for case in left_open)
        least = Must(">=", right)
        yield Row(
            measure=f"right of these, with a {name} model", ours=count, unit="logs", must=least
        )
        worse = [
            case.id for case in left_open if _is_worse(case, before[case.id], answers[case.id])
        ]
        named = f" [{', '.join(worse[:3])}]" if worse else ""
        yield Row(
            measure=f"answers that a {name} model worsened{named}",
            ours=len(worse),
            unit="logs",
            must=Must("=", 0),
        )
    yield from _learned_rows(files, left_open, before, after["perfect"])


def _told(case: Case, answer: Answer) -> str:
    mark = "right" if reason_right(case, answer) else "wrong"
    return f"{answer.reason} {answer.confidence:.2f} {mark}"


def _is_worse(case: Case, before: Answer, after: Answer) -> bool:
    return any(
        bool(judge(case, before)) and judge(case, after) is False
        for judge in (reason_right, restart_right)
    )


def _by_rules(path: Path) -> tuple[Any, Any]:
    """Return the diagnosis of a log by rules alone, and the compressed log."""
    from holdfast.diagnose import compress, find_files, packaged_rules, scan
    from holdfast.diagnose.explain.answer import conclude

    files = find_files([path]).files
    events = scan(files, packaged_rules())
    return conclude(events), compress(files, events)


def _is_open(studied: tuple[Any, Any]) -> bool:
    from holdfast.diagnose.explain.compress import worth_reading

    return worth_reading(studied[0])


def _asked(studied: tuple[Any, Any], words: Words, name: str) -> Answer:
    """Return the answer with a model behind HTTP."""
    from holdfast.diagnose.agents import Endpoint, consult
    from holdfast.testing import model_endpoint

    with model_endpoint.ModelServer(lambda asked: model_endpoint.Words(words(asked))) as server:
        endpoint = Endpoint(
            url=server.url, model=name, try_timeout_s=PATIENCE_S, budget_s=PATIENCE_S
        )
        return answer_of(consult(*studied, endpoint))


def _learned_rows(
    cases: Sequence[Case],
    left_open: Sequence[Case],
    before: Mapping[str, Answer],
    after: Mapping[str, Answer],
) -> Iterator[Row]:
    """Confirm the answers of the perfect model; then measure rules and memory without a model."""
    from diagnosing.learning import good_runs
    from diagnosing.systems import our_answers
    from holdfast.diagnose import packaged_rules
    from holdfast.diagnose.memory import Case as Incident
    from holdfast.diagnose.memory import Known, learn

    won = [
        case
        for case in left_open
        if reason_right(case, after[case.id]) and not reason_right(case, before[case.id])
    ]
    rules = packaged_rules()
    incidents = [
        Incident.of_log(
            case.path,
            reason=after[case.id].reason,
            root_lines=after[case.id].root_lines,
            rules=rules,
            key=case.id,
        )
        for case in won
    ]
    known = Known.of(learn(incidents, rules, good=good_runs()), incidents)
    plain, taught = our_answers(cases), our_answers(cases, known=known)
    again = sum(reason_right(case, taught[case.id]) for case in won)
    yield Row(measure="answered only with the perfect model", ours=len(won), unit="logs")
    yield Row(
        measure="of these, answered without it once confirmed",
        ours=again,
        unit="logs",
        must=Must(">=", len(won)),
    )
    worse = [case.id for case in cases if _is_worse(case, plain[case.id], taught[case.id])]
    named = f" [{', '.join(worse[:3])}]" if worse else ""
    yield Row(
        measure=f"other answers worsened by what was learned{named}",
        ours=len(worse),
        unit="logs",
        must=Must("=", 0),
    )
