"""Evaluate a stream of checkpoints, newest first, on engines that keep running.

Two checkpoints are in progress at the same time: while one is evaluated, the nodes read the next
one into memory, and harnesses build its requests. The next checkpoint is the newest one at the
moment of this choice. With `drop_stale`, a newer checkpoint is added at once, and the coordinator
drops older checkpoints whose evaluation has not begun.
"""

import asyncio
import logging
import queue
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from holdfast.checkpoint import scan
from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, HoldfastError, NotFound
from holdfast.core.ledger import Ledger
from holdfast.core.paths import EvaluationPaths, holdfast_home
from holdfast.evaluate.coordinator.config import LEFT, CoordinatorFiles
from holdfast.evaluate.policy.priors import encode_history
from holdfast.evaluate.run.checkpoint_annotations import wanted
from holdfast.evaluate.run.evaluate import Progress
from holdfast.evaluate.run.folder import holding
from holdfast.evaluate.run.judging import judging
from holdfast.evaluate.run.ledger import (
    history_of,
    keep,
    opened_ledger,
    saying_where_it_lies,
    sentence,
    state_of,
)
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.run.plan import Planned, describe_model, new_id
from holdfast.evaluate.run.session import Session
from holdfast.evaluate.run.summary import summarize, write_slice
from holdfast.evaluate.types.engine import WITHOUT_WEIGHTS
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.suite import Suite, load_suite
from holdfast.evaluate.types.timeline import Begin, TimelineReader, timeline_of
from holdfast.evaluate.wire.messages import AddModel, Message, ModelOutcome, Status, TaskOutcome

_LOOK_EVERY_S = 1.0
_GLANCE_EVERY_S = 0.1  # between checks whether the folder has changed
_AT_ONCE = 2  # one in evaluation, one in preparation
_TRAINER_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TRAINER_DONE = "trainer_state.json"  # the last file that transformers' Trainer writes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A complete checkpoint in the watched folder."""

    step: int
    path: Path


def checkpoints_in(folder: Path) -> list[Found]:
    """List a folder's complete checkpoints, newest first.

    These are Holdfast's checkpoints, and the folders `checkpoint-STEP` of transformers' Trainer.

    Raises:
        NotFound: the path is not a folder.
    """
    found = [
        Found(step=one.step, path=one.path)
        for one in scan(folder)
        if one.state in ("written", "verified")
    ]
    for path in folder.iterdir():
        match = _TRAINER_CHECKPOINT.fullmatch(path.name)
        if match and (path / _TRAINER_DONE).is_file():
            found.append(Found(step=int(match[1]), path=path))
    return sorted(found, key=lambda one: one.step, reverse=True)


def watch(
    suite: Suite | str | Sequence[str],
    folder: Path,
    *,
    options: EvaluateOptions | None = None,
    progress: Progress | None = None,
    once: bool = False,
    until: Path | None = None,
) -> Iterator[Evaluation]:
    """Evaluate each checkpoint of a folder, newest first; yield each evaluation when it ends.

    A checkpoint is skipped if the ledger has a finished evaluation of it with this suite. If a
    checkpoint fails, for example because it is damaged, its evaluation is yielded with the error,
    and the stream continues.

    Args:
        suite: as for `evaluate`.
        folder: the folder of the checkpoints; it may still be empty.
        options: as for `evaluate`; with `drop_stale`, a newer checkpoint replaces older ones whose
            evaluation has not begun.
        progress: called twice a second with the status.
        once: True to end when all present checkpoints are evaluated.
        until: end when this file exists and all checkpoints are evaluated; None to go on forever.

    Raises:
        BadUse: the suite or the options are wrong, including the options for conversion
            (`hf_config`, `name_map`).
        EvaluationError: the stream as a whole cannot continue.
    """
    options = options or EvaluateOptions()
    chosen = options.applied_to(suite if isinstance(suite, Suite) else load_suite(suite))
    if not folder.is_dir():
        raise NotFound(
            f"There is no folder {folder}. Give the folder into which checkpoints are saved."
        )
    if options.engine.kind in WITHOUT_WEIGHTS:
        raise BadUse(
            f"The engine {options.engine.kind} takes no weights, so it cannot follow {folder}. "
            "Use --engine hf or vllm, or evaluate the served model: holdfast eval run."
        )
    paths = EvaluationPaths(
        options.home or holdfast_home(), options.evaluation_id or new_id(f"{folder.name}-stream")
    )
    if CoordinatorFiles(paths.root).models.exists():
        raise BadUse(
            f"There is already a stream {paths.evaluation_id}. Leave its id out: the same command "
            "goes on."
        )
    with (
        holding(paths),
        opened_ledger(options, paths) as ledger,
        judging(options, paths) as environment,
    ):
        stream = _Stream(chosen, folder, options, paths, ledger, progress, environment)
        try:
            yield from stream.evaluations(once=once, until=until)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(
                "It was stopped. The same command goes on; nothing finished is redone."
            ) from error


@dataclass
class _Stream:
    suite: Suite
    folder: Path
    options: EvaluateOptions
    paths: EvaluationPaths
    ledger: Ledger
    progress: Progress | None
    environment: Mapping[str, str]
    _plans: dict[int, tuple[Planned, EvaluationPaths]] = field(default_factory=dict)
    """Plans of the checkpoints in progress.

    An entry of this field or of a field below is removed when its checkpoint ends.
    """
    _tasks: dict[int, dict[int, TaskOutcome]] = field(default_factory=dict)
    _undescribed: list[Evaluation] = field(default_factory=list)
    """Evaluations of checkpoints that failed before the session received them."""
    _heard: "queue.SimpleQueue[Message | BaseException | None]" = field(
        default_factory=queue.SimpleQueue
    )
    """Messages and errors from the session's thread; None at its end."""
    _passed_over: set[Path] = field(default_factory=set)
    _open: set[int] = field(default_factory=set)
    _holding: dict[int, ExitStack] = field(default_factory=dict)
    _added: int = 0
    _newest_step: int = -1
    _session: Session | None = None
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._timeline = TimelineReader(self.paths.timeline)

    def evaluations(self, *, once: bool, until: Path | None) -> Iterator[Evaluation]:
        """Yield the evaluations as `watch` describes."""
        try:
            while True:
                self._feed()
                undescribed, self._undescribed = self._undescribed, []
                yield from undescribed
                if not self._open and (once or (until is not None and until.exists())):
                    if self._session is None:
                        return
                    self._session.finish()
                try:
                    message = self._next_message()
                except queue.Empty:
                    continue
                if message is None:
                    return
                if isinstance(message, BaseException):
                    raise message
                if isinstance(message, ModelOutcome) and message.model in self._open:
                    self._open.discard(message.model)
                    yield from self._ended(message)
                elif isinstance(message, TaskOutcome) and message.model in self._open:
                    self._tasks.setdefault(message.model, {})[message.task] = message
                elif isinstance(message, Status) and self.progress:
                    self.progress(message)
        finally:
            if self._session is not None and self._thread is not None:
                self._session.leave()
                self._thread.join()
            for held in self._holding.values():
                held.close()

    def _next_message(self) -> Message | BaseException | None:
        """Return the next message from the session's thread.

        Raises:
            queue.Empty: the caller must look at the folder now, because a second has passed or the
                folder changed.
        """
        looked_at_s, changed_ns = time.monotonic(), self.folder.stat().st_mtime_ns
        while True:
            try:
                return self._heard.get(timeout=_GLANCE_EVERY_S)
            except queue.Empty:
                is_time = time.monotonic() - looked_at_s >= _LOOK_EVERY_S
                if is_time or self.folder.stat().st_mtime_ns != changed_ns:
                    raise

    def _feed(self) -> None:
        """Add checkpoints to the session as long as there are any and there is room."""
        while (len(self._open) < _AT_ONCE or self.options.drop_stale) and (added := self._next()):
            if self._session is None:
                self._session = self._start(added)
            self._session.add(added)
            self._open.add(added.model)

    def _start(self, first: AddModel) -> Session:
        plan, _ = self._plans[first.model]
        files = CoordinatorFiles(self.paths.root)
        files.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(files.history, encode_history(history_of(self.ledger, plan)))
        config = msgspec.structs.replace(plan.coordinator_config(self.paths), is_stream=True)
        session = Session(config, plan.nodes_wanted(self.environment), self._heard.put)

        def run() -> None:
            try:
                code = asyncio.run(session.run())
                self._heard.put(
                    EvaluationError("The stream was stopped.") if code == LEFT else None
                )
            except BaseException as error:
                self._heard.put(error)

        self._thread = threading.Thread(target=run, name="session", daemon=True)
        self._thread.start()
        return session

    def _next(self) -> AddModel | None:
        """Plan and record the newest checkpoint that is neither evaluated nor skipped.

        A checkpoint that cannot be described counts as failed and is not tried again.

        Returns:
            The message that adds the checkpoint to the session; None if no checkpoint is left.
        """
        while found := self._to_do():
            newest = found[0]
            self._passed_over.add(newest.path)
            options = replace(
                self.options,
                # Use the end of the stream's id, which is unique among streams.
                evaluation_id=f"{self.paths.evaluation_id[-40:].lstrip('-._')}-step-{newest.step}",
                step=newest.step,
                family=self.options.family or self.folder.absolute().name,
            )
            plan = Planned(suite=self.suite, model=str(newest.path), manifest=None, options=options)
            try:
                plan = replace(plan, manifest=describe_model(plan.model, options))
            except (HoldfastError, OSError) as error:
                if newest not in checkpoints_in(self.folder):  # retention deleted it first
                    continue
                if _is_of_the_command(error, newest.path, options):
                    raise
                self._undescribed.append(self._failed(plan, sentence(error)))
                continue
            self._newest_step = max(self._newest_step, newest.step)
            return self._begun(plan)
        return None

    def _to_do(self) -> list[Found]:
        """List the checkpoints that are neither evaluated nor skipped, newest first."""
        found = [one for one in checkpoints_in(self.folder) if one.path not in self._passed_over]
        if not found:  # the usual case; the ledger may be long
            return []
        records = self.ledger.evaluations(suite=self.suite.name)
        done = {record.model for record in records if record.state == "done"}
        running = {record.model for record in records if state_of(record) == "running"}
        self._passed_over.update(one.path for one in found if str(one.path) in done)
        # A checkpoint that was committed late is stale, and must not drop a newer one.
        if self.options.drop_stale:
            self._newest_step = max(
                [self._newest_step, *(one.step for one in found if str(one.path) in done)]
            )
            self._passed_over.update(one.path for one in found if one.step <= self._newest_step)
            found = [one for one in found if one.step > self._newest_step]
        return [one for one in found if str(one.path) not in done | running]

    def _begun(self, plan: Planned) -> AddModel:
        paths = self._paths_of(plan)
        number, self._added = self._added, self._added + 1
        held = self._holding[number] = ExitStack()
        held.enter_context(holding(paths))
        held.enter_context(wanted(plan.model, paths.evaluation_id))
        self.ledger.add_evaluation(plan.record(paths))
        plan.write(paths)
        self._plans[number] = (plan, paths)
        return plan.add_model(number, paths)

    def _failed(self, plan: Planned, why: str) -> Evaluation:
        """Record and return the evaluation of a checkpoint that failed before it began."""
        paths = self._paths_of(plan)
        begin = Begin(
            started_at_s=time.time(),
            suite=plan.suite.name,
            tasks=[entry.name for entry in plan.suite.entries],
        )
        outcome = ModelOutcome(model=self._added, error=why)
        with holding(paths), saying_where_it_lies(paths, "the same command"):
            self.ledger.add_evaluation(plan.record(paths))
            evaluation = summarize(
                plan.suite,
                plan.model,
                paths,
                {},
                outcome,
                plan.options,
                timeline=timeline_of([begin]),
            )
            keep(evaluation, plan, paths, self.ledger)
            self.ledger.set_evaluation(evaluation.id, outcome=why, ended_at_s=time.time())
        return evaluation

    def _paths_of(self, plan: Planned) -> EvaluationPaths:
        return EvaluationPaths(self.paths.home, str(plan.options.evaluation_id))

    def _ended(self, outcome: ModelOutcome) -> Iterator[Evaluation]:
        plan, paths = self._plans.pop(outcome.model)
        tasks = self._tasks.pop(outcome.model, {})
        # Remove the evaluation if its scores are no longer needed, because a newer checkpoint came
        # or retention deleted this one.
        is_gone = outcome.is_stale or (bool(outcome.error) and not Path(plan.model).exists())
        is_of_the_command = outcome.wrong_use and outcome.any_model and not tasks
        if is_gone or is_of_the_command:
            self.ledger.remove_evaluation(paths.evaluation_id)
            shutil.rmtree(paths.root, ignore_errors=True)
            if not is_gone:
                raise BadUse(outcome.error)
            _log.info("%s is passed over: %s", plan.model, outcome.error)
        else:
            with saying_where_it_lies(paths, f"holdfast eval resume {paths.evaluation_id}"):
                timeline = write_slice(self._timeline.read(), self.paths, paths, outcome.model)
                evaluation = summarize(
                    plan.suite, plan.model, paths, tasks, outcome, plan.options, timeline=timeline
                )
                keep(evaluation, plan, paths, self.ledger, session=self.paths)
                if outcome.error:
                    self.ledger.set_evaluation(
                        evaluation.id, outcome=outcome.error, ended_at_s=time.time()
                    )
            yield evaluation
        self._timeline.forget(outcome.model)
        self._holding.pop(outcome.model).close()


def _is_of_the_command(error: Exception, checkpoint: Path, options: EvaluateOptions) -> bool:
    """Return True if an error would occur for every checkpoint of the folder.

    Such an error concerns the command's options for conversion.
    """
    is_converted = _TRAINER_CHECKPOINT.fullmatch(checkpoint.name) is None
    converts = options.hf_config is not None or options.name_map is not None
    return isinstance(error, BadUse) and (is_converted or converts)
