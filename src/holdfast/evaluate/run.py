"""`evaluate(suite, model) -> Evaluation`, and its relatives: go on with one, follow a training run, score again."""

import asyncio
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import Ledger
from holdfast.core.ledger.records import HISTORY_LIMIT_BYTES, EvaluationRecord, Prior
from holdfast.core.paths import EvaluationPaths, holdfast_home, ledger_url
from holdfast.evaluate.coordinator.config import LEFT, CoordinatorConfig, CoordinatorFiles, task_names
from holdfast.evaluate.coordinator.wire import AddModel, Message, ModelOutcome, Status, TaskOutcome
from holdfast.evaluate.errors import EvaluationError
from holdfast.evaluate.evaluation import Evaluation, read_evaluation, write_evaluation
from holdfast.evaluate.options import EvaluateOptions, options_of
from holdfast.evaluate.policy.priors import TaskHistory, decode_history, encode_history
from holdfast.evaluate.report import write_reports
from holdfast.evaluate.scores import compact
from holdfast.evaluate.session import NodesWanted, Session
from holdfast.evaluate.suite import Suite, load_suite
from holdfast.evaluate.summary import summarize
from holdfast.evaluate.weights.manifest import ModelManifest

Progress = Callable[[Status], None]


def evaluate(
    suite: Suite | str | Sequence[str],
    model: str,
    *,
    options: EvaluateOptions | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Run a suite on a model and return its scores, exactly the harness's own.

    Args:
        suite: a suite, a TOML file of one, or task names.
        model: a Hugging Face folder or its URL; a Holdfast or DCP checkpoint, with `options.hf_config`; with
            `engine.kind="openai"` the server's name of it.
        options: how; the defaults run in exact mode on this machine.
        progress: called twice a second with how far it is.

    Raises:
        BadUse: suite, model or options are wrong; nothing was done.
        EvaluationError: it could not be done; what was finished is kept, and `resume` goes on.
    """
    options = options or EvaluateOptions()
    chosen = options.applied_to(suite if isinstance(suite, Suite) else load_suite(suite))
    paths = EvaluationPaths(options.home or holdfast_home(), options.evaluation_id or new_id(model))
    manifest = _describe(model, options)
    plan = Planned(suite=chosen, model=model, manifest=manifest, options=options)
    with _holding(paths):
        if paths.suite.exists():
            raise BadUse(
                f"There is already an evaluation {paths.evaluation_id}. Go on with it: holdfast eval resume "
                f"{paths.evaluation_id}, or choose another --id."
            )
        with _ledger(options, paths) as ledger:
            ledger.add_evaluation(plan.record(paths))
            plan.write(paths)
            return _run(plan, paths, ledger, progress)


def resume(
    evaluation_id: str, *, home: Path | None = None, progress: Progress | None = None, **changes: Any
) -> Evaluation:
    """Go on with an evaluation that was stopped; what it had finished is not done again.

    Args:
        evaluation_id: which.
        home: where evaluations lie; None for `$HOLDFAST_HOME`, else `.holdfast`.
        progress: as `evaluate`.
        changes: options that shall be others now (`nodes`, `on`, …).

    Raises:
        NotFound: there is no such evaluation.
        BadUse, EvaluationError: as `evaluate`.
    """
    paths = EvaluationPaths(home or holdfast_home(), evaluation_id)
    plan = Planned.read(paths)
    plan = replace(plan, options=replace(plan.options, home=paths.home, **changes))
    with _holding(paths), _ledger(plan.options, paths) as ledger:
        ended = paths.results.exists() and read_evaluation(paths.root)
        if ended and ended.state == "done" and not ended.errors:
            return ended
        _forget_failures(paths)
        return _run(plan, paths, ledger, progress)


def rescore(evaluation_id: str, *, home: Path | None = None, progress: Progress | None = None) -> Evaluation:
    """Compute an evaluation's scores again from the answers it got: no engine is started.

    Raises:
        NotFound: there is no such evaluation, or it got no answers.
        BadUse, EvaluationError: as `evaluate`.
    """
    paths = EvaluationPaths(home or holdfast_home(), evaluation_id)
    plan = Planned.read(paths)
    before = _outcome_of(paths)
    if before is None or not before.numerics:
        raise NotFound(f"{evaluation_id} has no answers to score. Go on with it: holdfast eval resume {evaluation_id}")
    with _holding(paths), _ledger(plan.options, paths) as ledger:
        for path in [*(paths.state / "results").glob("*"), *(paths.state / "models").glob("*")]:
            path.unlink()
        return _run(plan, paths, ledger, progress, before=before)


def new_id(model: str) -> str:
    """A name for an evaluation: the model's last name and the time."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rsplit("/", 1)[-1]).strip("-._") or "model"
    return f"{name[:40]}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(2).hex()}"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What an evaluation is, as its folder keeps it."""

    suite: Suite
    model: str
    manifest: ModelManifest | None
    options: EvaluateOptions

    def write(self, paths: EvaluationPaths) -> None:
        """Keep it, so that it can be gone on with. The suite comes last: where it is, all is."""
        options = {**self.options.to_json(), "evaluation_id": paths.evaluation_id}
        said = {"model": self.model, "options": options}
        write_atomic(paths.state / "asked.json", json.dumps(said, indent=1).encode())
        write_atomic(paths.state / "manifest", msgspec.msgpack.encode(self.manifest))
        write_atomic(paths.suite, msgspec.json.format(msgspec.json.encode(self.suite)))

    @classmethod
    def read(cls, paths: EvaluationPaths) -> "Planned":
        """What was asked for.

        Raises:
            NotFound: there is no such evaluation.
        """
        if not paths.suite.exists():
            raise NotFound(f"There is no evaluation {paths.evaluation_id!r}. `holdfast eval ls` lists those there are.")
        asked = json.loads((paths.state / "asked.json").read_bytes())
        return cls(
            suite=msgspec.json.decode(paths.suite.read_bytes(), type=Suite),
            model=asked["model"],
            manifest=msgspec.msgpack.decode((paths.state / "manifest").read_bytes(), type=ModelManifest | None),
            options=options_of(asked["options"]),
        )

    @property
    def family(self) -> str:
        """Whose history predicts this model's costs: as told, else models of the same shape."""
        return self.options.family or _family(self.model, self.manifest)

    def record(self, paths: EvaluationPaths) -> EvaluationRecord:
        """The ledger's first entry of it."""
        return EvaluationRecord(
            evaluation_id=paths.evaluation_id,
            suite=self.suite.name,
            model=self.model,
            family=self.family,
            state="running",
            started_at_s=time.time(),
            folder=str(paths.root),
            mode=self.options.engine.mode,
            run_id=self.options.run_id,
            step=self.options.step,
        )

    def coordinator_config(self, paths: EvaluationPaths, *, rescore: bool = False) -> CoordinatorConfig:
        """What its coordinator is told."""
        options = self.options
        return CoordinatorConfig(
            evaluation_id=paths.evaluation_id,
            suite=self.suite,
            spec=options.engine,
            engines_per_node=options.engines_per_node,
            nodes=options.nodes,
            folder=str(paths.root),
            journals=str(paths.answers),
            listen_host="127.0.0.1" if options.on == "local" else "0.0.0.0",  # whoever connects needs the token
            metric_slots=options.metric_slots,
            linger_s=options.linger_s,
            silent_s=options.silent_s,
            max_read_mib_s=options.max_read_mib_s,
            drop_stale=options.drop_stale,
            rescore=rescore,
        )

    def nodes_wanted(self) -> NodesWanted:
        """Where its agents run."""
        options = self.options
        gpus = options.engine.tensor_parallel * options.engines_per_node if options.engine.device == "cuda" else 0
        return NodesWanted(
            on=options.on, nodes=options.nodes, gpus_per_node=gpus, sbatch_options=options.sbatch_options
        )


@dataclass
class Heard:
    """What the coordinator said of one evaluation."""

    progress: Progress | None
    tasks: dict[int, TaskOutcome] = field(default_factory=dict)
    model: ModelOutcome | None = None

    def __call__(self, message: Message) -> None:
        """Hear a message."""
        match message:
            case TaskOutcome():
                self.tasks[message.task] = message
            case ModelOutcome():
                self.model = message
            case Status() if self.progress:
                self.progress(message)


def _run(
    plan: Planned,
    paths: EvaluationPaths,
    ledger: Ledger,
    progress: Progress | None,
    before: ModelOutcome | None = None,
) -> Evaluation:
    """Run it to its end and keep what came of it. `before`: score again what that has answered."""
    files = CoordinatorFiles(paths.root)
    write_atomic(files.history, encode_history(_history(ledger, plan)))
    heard = Heard(progress)
    session = Session(plan.coordinator_config(paths, rescore=before is not None), plan.nodes_wanted(), heard)
    stored = {"digest": before.digest, "numerics": before.numerics} if before else {}
    session.add(AddModel(model=0, name=plan.model, manifest=plan.manifest, **stored))
    session.finish()
    ledger.set_evaluation(paths.evaluation_id, state="running", outcome="")
    try:
        _run_loop(session)
    except BaseException as error:
        outcome = f"{error or type(error).__name__} Go on with: holdfast eval resume {paths.evaluation_id}"
        ledger.set_evaluation(paths.evaluation_id, state="stopped", ended_at_s=time.time(), outcome=outcome)
        raise
    if heard.model is not None and heard.model.error:
        ledger.set_evaluation(paths.evaluation_id, state="failed", ended_at_s=time.time(), outcome=heard.model.error)
        raise EvaluationError(f"{heard.model.error} Go on with: holdfast eval resume {paths.evaluation_id}")
    evaluation = summarize(plan.suite, plan.model, paths, heard.tasks, heard.model, plan.options)
    write_evaluation(evaluation, paths.root)
    write_reports(evaluation, plan.options.output)
    _record(ledger, plan, paths, evaluation)
    return evaluation


def _run_loop(session: Session) -> None:
    code = asyncio.run(session.run())
    if code == LEFT:
        raise EvaluationError("The evaluation was stopped.")


def _record(ledger: Ledger, plan: Planned, paths: EvaluationPaths, evaluation: Evaluation) -> None:
    now_s = time.time()
    ledger.set_evaluation(
        paths.evaluation_id,
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
                    evaluation_id=paths.evaluation_id,
                    history=packed,
                )
            )
    ledger.add_priors(priors)


def _history(ledger: Ledger, plan: Planned) -> list[TaskHistory]:
    """What was seen of the suite's tasks with this family before."""
    known = ledger.latest_priors(plan.family)
    history = []
    for name in task_names(plan.suite):
        harness, _, task = name.partition(":")
        if prior := known.get((harness, task)):
            history += decode_history(prior.history)
    return history


def _forget_failures(paths: EvaluationPaths) -> None:
    """Tasks that failed and a model that was given up are tried again; what has scores stays."""
    for path in (paths.state / "results").glob("*.outcome"):
        if msgspec.msgpack.decode(path.read_bytes(), type=TaskOutcome).error:
            path.unlink()
    for path in (paths.state / "models").glob("*.ended"):
        path.unlink()


def _outcome_of(paths: EvaluationPaths) -> ModelOutcome | None:
    for path in (paths.state / "models").glob("*.ended"):
        return msgspec.msgpack.decode(path.read_bytes(), type=ModelOutcome)
    return None


def _describe(model: str, options: EvaluateOptions) -> ModelManifest | None:
    if options.engine.kind in ("openai", "simulated"):
        return None
    from holdfast.evaluate.weights.describe import describe

    config = str(options.hf_config) if options.hf_config else None
    return describe(model, hf_config=config, name_map=str(options.name_map) if options.name_map else None)


def _family(model: str, manifest: ModelManifest | None) -> str:
    """Type, width and depth of a model, since models of one shape cost the same; else its name."""
    config = None
    if manifest is not None and manifest.form == "dcp":
        config = manifest.hf_config.get("config.json")
    elif manifest is not None and (path := Path(manifest.source) / "config.json").is_file():
        config = path.read_bytes()
    if config is None:
        return model.rstrip("/").rsplit("/", 1)[-1]
    said = json.loads(config)
    shape = [said.get("model_type", "model")]
    shape += [str(said[name]) for name in ("hidden_size", "n_embd", "num_hidden_layers", "n_layer") if name in said]
    return "-".join(shape)


@contextmanager
def _holding(paths: EvaluationPaths) -> Iterator[None]:
    """One command at a time has an evaluation.

    Raises:
        BadUse: another has it, or the folder cannot be written.
    """
    try:
        paths.state.mkdir(parents=True, exist_ok=True)
        file = os.open(paths.state / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise BadUse(f"{paths.root}: {error.strerror}. Set HOLDFAST_HOME to a folder of yours.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise BadUse(f"{paths.evaluation_id} is running. Wait for it, or stop the command that runs it.") from error
    try:
        yield
    finally:
        os.close(file)


@contextmanager
def _ledger(options: EvaluateOptions, paths: EvaluationPaths) -> Iterator[Ledger]:
    ledger = Ledger.open(options.ledger or ledger_url(paths.home))
    try:
        yield ledger
    finally:
        ledger.close()
