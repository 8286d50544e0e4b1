"""Evaluate a suite on a model; resume an evaluation, or compute its scores again."""

import asyncio
import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, HoldfastError, LedgerError, NotFound
from holdfast.core.ledger import Ledger
from holdfast.core.paths import EvaluationPaths, holdfast_home
from holdfast.evaluate.coordinator.config import LEFT, CoordinatorFiles
from holdfast.evaluate.policy.priors import encode_history
from holdfast.evaluate.report import write_reports
from holdfast.evaluate.run.checkpoint_annotations import wanted
from holdfast.evaluate.run.folder import check_is_ours, check_output, holding
from holdfast.evaluate.run.judging import judging
from holdfast.evaluate.run.ledger import (
    history_of,
    keep,
    last_checkpoint,
    opened_ledger,
    recorded,
    saying_where_it_lies,
    sentence,
    with_next_step,
)
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.run.plan import Planned, describe_model, new_id
from holdfast.evaluate.run.session import Session
from holdfast.evaluate.run.summary import results_of, summarize
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.evaluation import Evaluation, read_evaluation, write_evaluation
from holdfast.evaluate.types.scores import compact
from holdfast.evaluate.types.suite import Suite, load_suite
from holdfast.evaluate.types.timeline import read_timeline
from holdfast.evaluate.wire.messages import AddModel, Message, ModelOutcome, Status, TaskOutcome

Progress = Callable[[Status], None]

_log = logging.getLogger(__name__)


def evaluate(
    suite: Suite | str | Sequence[str],
    model: str,
    *,
    options: EvaluateOptions | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Run a suite on a model and return the scores, which equal the harness's own scores.

    Args:
        suite: a suite, the path of a suite's TOML file, or task names.
        model: the path or URL of a Hugging Face folder; or a Holdfast or DCP checkpoint, with
            `options.hf_config`; or, with `engine.kind="openai"`, the model's name on the server.
        options: how to evaluate; by default in exact mode on this machine.
        progress: called twice a second with the status.

    Raises:
        BadUse: the suite, model or options are wrong; nothing was started.
        EvaluationError: the evaluation failed; finished work is kept, and `resume` continues it.
    """
    options = options or EvaluateOptions()
    chosen = options.applied_to(suite if isinstance(suite, Suite) else load_suite(suite))
    if not model:
        raise BadUse("No model is named. Give its folder or URL.")
    check_output(options)
    paths = EvaluationPaths(options.home or holdfast_home(), options.evaluation_id or new_id(model))
    check_is_ours(paths)
    manifest = describe_model(model, options)
    plan = Planned(
        suite=chosen,
        model=model,
        manifest=manifest,
        options=options,
        directory=str(Path.cwd()),
    )
    with holding(paths):
        if paths.suite.exists():
            raise BadUse(
                f"There is already an evaluation {paths.evaluation_id}. Go on with it: holdfast "
                "eval resume "
                f"{paths.evaluation_id}, or choose another --id."
            )
        with opened_ledger(options, paths) as ledger:
            plan.write(paths)
            try:
                ledger.add_evaluation(plan.record(paths))
            except HoldfastError:
                shutil.rmtree(paths.root)
                raise
            try:
                return _run(plan, paths, ledger, progress)
            except BadUse as error:  # nothing was recorded, so the id stays free
                shutil.rmtree(paths.root)
                try:
                    ledger.remove_evaluation(paths.evaluation_id)
                except HoldfastError as another:
                    raise BadUse(f"{error} {another}") from error
                raise


def resume(
    evaluation_id: str,
    *,
    home: Path | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> Evaluation:
    """Continue a stopped evaluation without repeating finished work.

    Args:
        evaluation_id: the id of the evaluation.
        home: the folder of all evaluations; None for `$HOLDFAST_HOME`, else `.holdfast`.
        progress: as for `evaluate`.
        changes: options to replace (`nodes`, `on`, …).

    Raises:
        NotFound: the evaluation does not exist.
        BadUse, EvaluationError: as for `evaluate`.
    """
    paths = EvaluationPaths((home or holdfast_home()).absolute(), evaluation_id)
    plan = Planned.read(paths)
    plan = replace(plan, options=replace(plan.options, home=paths.home, **changes))
    check_output(plan.options)
    with holding(paths), opened_ledger(plan.options, paths) as ledger:
        _demand_record(ledger, plan, paths)
        ended = paths.results.exists() and read_evaluation(paths.root)
        if ended and ended.state == "done" and not ended.errors:
            # The evaluation's former command could not record the end.
            if ledger.evaluation(evaluation_id).state != "done":
                keep(ended, plan, paths, ledger)
            return ended
        _forget_failures(paths)
        _go_on_with_time(paths)
        return _run(plan, paths, ledger, progress)


def rescore(
    evaluation_id: str, *, home: Path | None = None, progress: Progress | None = None
) -> Evaluation:
    """Compute an evaluation's scores again from its answers in the journal, without engines.

    Raises:
        NotFound: the evaluation does not exist, or has no answers.
        BadUse, EvaluationError: as for `evaluate`.
    """
    paths = EvaluationPaths((home or holdfast_home()).absolute(), evaluation_id)
    plan = Planned.read(paths)
    folder = paths.root / "rescore"
    with holding(paths), opened_ledger(plan.options, paths) as ledger:
        before = read_evaluation(paths.root)
        if not before.numerics:
            raise NotFound(
                f"{evaluation_id} has no answers to score. Go on with it: holdfast eval resume "
                f"{evaluation_id}"
            )
        _demand_record(ledger, plan, paths)
        shutil.rmtree(folder, ignore_errors=True)  # the coordinator's own state, useless afterwards
        listener = OutcomeCollector(progress)
        model = msgspec.structs.replace(
            plan.add_model(0, paths), digest=before.digest, numerics=before.numerics
        )
        config = msgspec.structs.replace(
            plan.coordinator_config(paths), folder=str(folder), rescore=True
        )
        with judging(plan.options, paths) as environment, _called_from(plan.directory):
            _run_session(Session(config, plan.nodes_wanted(environment), listener), model)
        shutil.rmtree(folder)
        scored = results_of(plan.suite, listener.tasks, before)
        for task in [entry.name for entry in plan.suite.entries]:
            if task in scored["errors"] and task not in before.errors:
                raise EvaluationError(
                    f"{task} cannot be scored again: {scored['errors'][task]} The scores of "
                    f"{evaluation_id} are "
                    "unchanged."
                )
        evaluation = replace(before, **scored)
        with saying_where_it_lies(paths, f"holdfast eval rescore {evaluation_id}"):
            write_evaluation(evaluation, paths.root)
            previous = last_checkpoint(evaluation, plan, ledger)
            write_reports(evaluation, plan.options.output, previous=previous)
            ledger.set_evaluation(
                evaluation.id,
                state=evaluation.state,
                scores=compact(evaluation.scores),
                failed_tasks=evaluation.errors,
                harness_versions=evaluation.harness_versions,
            )
        return evaluation


@dataclass
class OutcomeCollector:
    """Collect the outcomes that the coordinator sends, and pass its status to `progress`."""

    progress: Progress | None
    tasks: dict[int, TaskOutcome] = field(default_factory=dict)
    model: ModelOutcome | None = None

    def __call__(self, message: Message) -> None:
        """Record a message."""
        match message:
            case TaskOutcome():
                self.tasks[message.task] = message
            case ModelOutcome():
                self.model = message
            case Status() if self.progress:
                self.progress(message)


def _run(
    plan: Planned, paths: EvaluationPaths, ledger: Ledger, progress: Progress | None
) -> Evaluation:
    """Run an evaluation until it ends, and write and record its result."""
    listener = OutcomeCollector(progress)
    try:
        write_atomic(CoordinatorFiles(paths.root).history, encode_history(history_of(ledger, plan)))
        ledger.set_evaluation(paths.evaluation_id, state="running", outcome="")
        with (
            wanted(plan.model, paths.evaluation_id),
            judging(plan.options, paths) as environment,
            _called_from(plan.directory),
        ):
            session = Session(
                plan.coordinator_config(paths), plan.nodes_wanted(environment), listener
            )
            _run_session(session, plan.add_model(0, paths))
    except BaseException as error:
        why = sentence(error) or (
            "It was stopped." if isinstance(error, KeyboardInterrupt) else type(error).__name__
        )
        outcome = recorded(ledger, paths, "stopped", with_next_step(why, paths))
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(outcome) from error
        if isinstance(error, EvaluationError | LedgerError | OSError):
            raise EvaluationError(outcome) from error
        raise
    if listener.model is not None and listener.model.error:
        if listener.model.wrong_use and not listener.tasks:
            raise BadUse(recorded(ledger, paths, "failed", listener.model.error))
        raise EvaluationError(
            recorded(ledger, paths, "failed", with_next_step(listener.model.error, paths))
        )
    with saying_where_it_lies(paths, f"holdfast eval resume {paths.evaluation_id}"):
        evaluation = summarize(
            plan.suite, plan.model, paths, listener.tasks, listener.model, plan.options
        )
        keep(evaluation, plan, paths, ledger)
    return evaluation


def _demand_record(ledger: Ledger, plan: Planned, paths: EvaluationPaths) -> None:
    """Add the evaluation's record to the ledger if it is missing, as in a new ledger."""
    try:
        ledger.evaluation(paths.evaluation_id)
    except NotFound:
        ledger.add_evaluation(plan.record(paths))


@contextlib.contextmanager
def _called_from(directory: str) -> Iterator[None]:
    """Change to the folder in which the evaluation was started, so that relative paths hold."""
    if not Path(directory).is_dir():
        _log.warning("%s no longer exists; paths relative to it cannot be found.", directory)
        directory = ""
    with contextlib.chdir(directory or "."):
        yield


def _run_session(session: Session, model: AddModel) -> None:
    session.add(model)
    session.finish()
    if asyncio.run(session.run()) == LEFT:
        raise EvaluationError("The evaluation was stopped.")


def _forget_failures(paths: EvaluationPaths) -> None:
    """Delete the outcomes of failed tasks and models, so that these run again.

    The outcomes of tasks with scores stay.
    """
    for path in (paths.state / "results").glob("*.outcome"):
        if msgspec.msgpack.decode(path.read_bytes(), type=TaskOutcome).error:
            path.unlink()
    for path in (paths.state / "models").glob("*.ended"):
        path.unlink()


def _go_on_with_time(paths: EvaluationPaths) -> None:
    """Move the recorded start time, so that the timeline continues at its end after a pause.

    The new start time is the present time minus the makespan so far.
    """
    record = paths.state / "started.json"
    if record.exists():
        started = json.loads(record.read_bytes())
        started["started_at_s"] = time.time() - read_timeline(paths.timeline).makespan_s
        write_atomic(record, json.dumps(started).encode())
