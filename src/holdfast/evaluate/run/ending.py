"""How an evaluation's end is kept and told, whatever disk and ledger do then."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.report import write_reports
from holdfast.evaluate.run.checkpoint_annotations import note_scores
from holdfast.evaluate.run.ledger import record_end
from holdfast.evaluate.run.plan import Planned
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.evaluation import Evaluation, write_evaluation


def keep(
    evaluation: Evaluation,
    plan: Planned,
    paths: EvaluationPaths,
    ledger: Ledger,
    *,
    session: EvaluationPaths | None = None,
) -> None:
    """Write and record what an evaluation came to; `session` are the files of a stream that it was part of."""
    write_evaluation(evaluation, paths.root)
    write_reports(evaluation, plan.options.output)
    record_end(ledger, plan, session or paths, evaluation)
    note_scores(evaluation, plan.suite)


def with_next_step(why: str, paths: EvaluationPaths) -> str:
    """Why it ended, and how to go on."""
    return f"{why} Go on with: holdfast eval resume {paths.evaluation_id}"


def recorded(ledger: Ledger, paths: EvaluationPaths, state: str, outcome: str) -> str:
    """Record how it ended; the outcome, and behind it what keeps the ledger from having it."""
    try:
        ledger.set_evaluation(
            paths.evaluation_id, state=state, ended_at_s=time.time(), outcome=outcome
        )
    except HoldfastError as error:
        return f"{outcome}\n{error} What was finished is in {paths.root} all the same."
    return outcome


@contextmanager
def saying_where_it_lies(paths: EvaluationPaths, again: str) -> Iterator[None]:
    """What is scored is kept by its tasks already: a disk that is full hides neither that nor the next step.

    Raises:
        EvaluationError: it could not be written or recorded.
    """
    try:
        yield
    except (HoldfastError, OSError) as error:
        raise EvaluationError(
            f"Its tasks have ended and what they came to is in {paths.root}, but not all of it could be recorded: "
            f"{sentence(error)} Then go on with: {again}"
        ) from error


def sentence(error: BaseException) -> str:
    """An error as a person is told of it."""
    return (
        f"{error}. See that there is room and that it can be written."
        if isinstance(error, OSError)
        else str(error)
    )
