"""Record an evaluation in the ledger and in its folder, and read the costs of earlier ones.

The end of an evaluation is reported even if the disk or the ledger cannot be written.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.ledger.records import HISTORY_LIMIT_BYTES, EvaluationRecord, Prior
from holdfast.core.paths import EvaluationPaths, ledger_url
from holdfast.evaluate.coordinator.config import CoordinatorFiles, task_names
from holdfast.evaluate.policy.priors import TaskHistory, decode_history, encode_history
from holdfast.evaluate.report import write_reports
from holdfast.evaluate.report.compare import previous_of
from holdfast.evaluate.run.checkpoint_annotations import note_scores
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.run.plan import Planned
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.evaluation import Evaluation, write_evaluation
from holdfast.evaluate.types.scores import compact


@contextmanager
def opened_ledger(options: EvaluateOptions, paths: EvaluationPaths) -> Iterator[Ledger]:
    """Open the ledger of an evaluation inside a `with` block."""
    ledger = Ledger.open(options.ledger or ledger_url(paths.home))
    try:
        yield ledger
    finally:
        ledger.close()


def state_of(record: EvaluationRecord) -> Literal["running", "done", "failed", "stopped"]:
    """Return the state of an evaluation.

    An evaluation that is "running" by the ledger is "stopped" if no command holds its lock.
    """
    lock = Path(record.folder) / "state" / "lock"
    if record.state != "running" or not lock.exists():  # the folder is on another machine's disk
        return record.state
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "running"
    return "stopped"


def history_of(ledger: Ledger, plan: Planned) -> list[TaskHistory]:
    """Return the recorded costs of the suite's tasks for the plan's family of models."""
    known = ledger.latest_priors(plan.family)
    history = []
    for name in task_names(plan.suite):
        harness, _, task = name.partition(":")
        if prior := known.get((harness, task)):
            history += decode_history(prior.history)
    return history


def record_end(
    ledger: Ledger, plan: Planned, paths: EvaluationPaths, evaluation: Evaluation
) -> None:
    """Record the end of an evaluation and the costs of its samples in the ledger.

    `paths` are the paths of the session, in which the measured costs are.
    """
    now_s = time.time()
    ledger.set_evaluation(
        evaluation.id,
        state=evaluation.state,
        ended_at_s=now_s,
        digest=evaluation.digest,
        numerics=evaluation.numerics,
        harness_versions=evaluation.harness_versions,
        makespan_s=evaluation.makespan_s,
        bound_s=evaluation.bound_s or None,
        engines=evaluation.engines,
        nodes=evaluation.nodes,
        engine_seconds=evaluation.engine_seconds,
        account=evaluation.account,
        scores=compact(evaluation.scores),
        failed_tasks=evaluation.errors,
    )
    learned = CoordinatorFiles(paths.root).learned
    if not learned.exists():
        return
    priors = []
    for task in decode_history(learned.read_bytes()):
        harness, _, name = task.task.partition(":")
        packed = encode_history([task])
        if len(packed) <= HISTORY_LIMIT_BYTES:
            priors.append(
                Prior(
                    family=plan.family,
                    harness=harness,
                    task=name,
                    recorded_at_s=now_s,
                    evaluation_id=evaluation.id,
                    history=packed,
                )
            )
    ledger.add_priors(priors)


def keep(
    evaluation: Evaluation,
    plan: Planned,
    paths: EvaluationPaths,
    ledger: Ledger,
    *,
    session: EvaluationPaths | None = None,
) -> None:
    """Write an evaluation's result and reports to its folder, and record it in the ledger.

    `session` has the paths of the session of `holdfast eval watch` that made the evaluation; None if
    the evaluation was run alone.
    """
    write_evaluation(evaluation, paths.root)
    previous = last_checkpoint(evaluation, plan, ledger)
    write_reports(evaluation, plan.options.output, previous=previous)
    record_end(ledger, plan, session or paths, evaluation)
    note_scores(evaluation, plan.suite)


def last_checkpoint(
    evaluation: Evaluation, plan: Planned, ledger: Ledger
) -> EvaluationRecord | None:
    """Return the evaluation of the last checkpoint; None if there is none or the ledger fails.

    If the ledger cannot be read, the page is written without differences. The error is reported
    later, when the result is recorded.
    """
    try:
        found = ledger.evaluations(suite=evaluation.suite, family=plan.family, state="done")
    except HoldfastError:
        return None
    return previous_of(evaluation, found)


def with_next_step(why: str, paths: EvaluationPaths) -> str:
    """Append to the reason for an evaluation's end the command that resumes the evaluation."""
    return f"{why} Go on with: holdfast eval resume {paths.evaluation_id}"


def recorded(ledger: Ledger, paths: EvaluationPaths, state: str, outcome: str) -> str:
    """Record the end of an evaluation in the ledger.

    Returns:
        `outcome`, followed by the ledger's error if the ledger could not be written.
    """
    try:
        ledger.set_evaluation(
            paths.evaluation_id, state=state, ended_at_s=time.time(), outcome=outcome
        )
    except HoldfastError as error:
        return f"{outcome}\n{error} Finished results are in {paths.root}."
    return outcome


@contextmanager
def saying_where_it_lies(paths: EvaluationPaths, again: str) -> Iterator[None]:
    """Convert errors in a `with` block to an error with the results' folder and the next step.

    The outcomes of the tasks are already on disk. So the user must learn where they are, even if
    the disk is full.

    Raises:
        EvaluationError: the block could not write or record the results.
    """
    try:
        yield
    except (HoldfastError, OSError) as error:
        raise EvaluationError(
            f"Its tasks have ended and their results are in {paths.root}, but not all of it "
            "could be recorded: "
            f"{sentence(error)} Then go on with: {again}"
        ) from error


def sentence(error: BaseException) -> str:
    """Return an error as a sentence for the user."""
    return (
        f"{error}. Check that the disk has room and is writable."
        if isinstance(error, OSError)
        else str(error)
    )
