"""The ledger's side of an evaluation: what is recorded of it, and what earlier ones say of its costs."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from holdfast.core.ledger import Ledger
from holdfast.core.ledger.records import HISTORY_LIMIT_BYTES, EvaluationRecord, Prior
from holdfast.core.paths import EvaluationPaths, ledger_url
from holdfast.evaluate.coordinator.config import CoordinatorFiles, task_names
from holdfast.evaluate.policy.priors import TaskHistory, decode_history, encode_history
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.run.plan import Planned
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.scores import compact


@contextmanager
def opened_ledger(options: EvaluateOptions, paths: EvaluationPaths) -> Iterator[Ledger]:
    """The ledger that an evaluation is recorded in."""
    ledger = Ledger.open(options.ledger or ledger_url(paths.home))
    try:
        yield ledger
    finally:
        ledger.close()


def state_of(record: EvaluationRecord) -> Literal["running", "done", "failed", "stopped"]:
    """The state of an evaluation; "stopped" where the ledger says running and no command has it any more."""
    lock = Path(record.folder) / "state" / "lock"
    if record.state != "running" or not lock.exists():  # of another machine's disk
        return record.state
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "running"
    return "stopped"


def history_of(ledger: Ledger, plan: Planned) -> list[TaskHistory]:
    """What was seen of the suite's tasks with this family before."""
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
    """An evaluation ended; `paths` are its session's, which has learned what its samples cost."""
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
