"""Adapt inspect-ai as a `Harness`: run its `eval` unmodified, each entry in its own process."""

import hashlib
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.core.clock import Clock, SystemClock
from holdfast.evaluate.harness.inspect.options import options_of
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import EngineClient, ModelFacts, TaskResult
from holdfast.evaluate.types.requests import Answer
from holdfast.evaluate.types.suite import TaskEntry

if TYPE_CHECKING:
    from inspect_ai import Task
    from inspect_ai.model import Model


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog


_ERRORS = ("stderr",)  # inspect's metrics for the uncertainty of other metrics


def results_of(logs: "list[EvalLog]") -> dict[str, Any]:
    """Convert inspect's logs to a results object in lm-eval's form.

    For each task, the metrics have the keys `"METRIC,SCORER"` and `"METRIC_stderr,SCORER"`. If a
    scorer reduces several epochs in several ways, SCORER/REDUCER stands in place of SCORER, one for
    each reducer.
    """
    results: dict[str, Any] = {
        "results": {},
        "group_subtasks": {},
        "configs": {},
        "versions": {},
        "n-shot": {},
    }
    results |= {"higher_is_better": {}, "n-samples": {}, "config": {}}
    for log in logs:
        task = log.eval.task.rpartition("/")[2]
        results["results"][task] = {"alias": task, **_row(log)}
        results["group_subtasks"][task] = []
        results["configs"][task] = {
            "task": log.eval.task,
            "task_args": log.eval.task_args,
            "generate": log.plan.config.model_dump(exclude_none=True),
            "solver": [step.solver for step in log.plan.steps],
            "metadata": {"version": log.eval.task_version, "harness": "inspect"},
        }
        results["versions"][task] = log.eval.task_version
        results["n-shot"][task] = 0
        results["higher_is_better"][task] = {}
        whole, taken = log.eval.dataset.samples, log.eval.dataset.sample_ids
        results["n-samples"][task] = {
            "original": whole,
            "effective": whole if taken is None else len(taken),
        }
    results["date"] = min(datetime.fromisoformat(log.eval.created).timestamp() for log in logs)
    return results


def _row(log: "EvalLog") -> dict[str, float]:
    scores = log.results.scores if log.results else []
    names = [score.name for score in scores]
    row: dict[str, float] = {}
    for score in scores:
        scorer = (
            f"{score.name}/{score.reducer}"
            if score.reducer and names.count(score.name) > 1
            else score.name
        )
        measured = [name for name in score.metrics if name not in _ERRORS]
        for name, metric in score.metrics.items():
            label = f"{measured[0]}_{name}" if name in _ERRORS and measured else name
            row[f"{label},{scorer}"] = metric.value
    return row


_AT_ONCE = 4096  # waiting samples of a task at most; each takes some 100 KB of inspect's state
_PROVIDER = "holdfast"


class Inspect:
    """Run inspect-ai's tasks; see `Harness`.

    Inspect computes metrics itself while answers arrive, so `measure` is not used.

    Args:
        include_paths: folders with task files.
        clock: gives the time for chat templates, read once in an evaluation.
    """

    name = "inspect"

    def __init__(self, *, include_paths: Sequence[str] = (), clock: Clock | None = None) -> None:
        if find_spec("inspect_ai") is None:
            raise ModuleNotFoundError("No module named 'inspect_ai'", name="inspect_ai")
        self._include_paths = include_paths
        self._clock: Clock = clock or SystemClock()
        self._tasks: dict[bytes, list[Task]] = {}

    def version(self) -> str:
        """Return inspect-ai's version."""
        return version("inspect_ai")

    def prepare(self, entries: Sequence[TaskEntry]) -> None:
        """Import inspect and load every entry's task with its dataset, for forked processes.

        Raises:
            BadUse: a task does not exist (the message suggests similar names), cannot be loaded, or
                needs a container.
        """
        from holdfast.evaluate.harness.inspect import text_model  # noqa: F401
        from holdfast.evaluate.harness.inspect.tasks import find_tasks

        if find_spec("torch") is not None:  # without torch, no engine takes tokens
            from holdfast.evaluate.harness.inspect import token_model  # noqa: F401
        for entry in entries:
            self._tasks[_key(entry)] = find_tasks(entry, self._include_paths)

    def run(self, entry: TaskEntry, client: EngineClient, folder: Path) -> TaskResult:
        """See `Harness.run`; inspect's own log is written below `folder/inspect`.

        Raises:
            EvaluationError: the task failed; the message includes inspect's message.
        """
        import inspect_ai

        if _key(entry) not in self._tasks:
            self.prepare([entry])
        options, tasks = options_of(entry), self._tasks[_key(entry)]
        place = (
            folder
            / "inspect"
            / f"{client.facts.model}-{_slug(client.facts.name)}"
            / _folder_name(entry)
        )
        place.mkdir(parents=True, exist_ok=True)
        earlier = set(place.glob("*.eval"))
        # Give each run its own cache, since the key of inspect's cache has only the model's name,
        # and would mix checkpoints. Write inspect's trace, which is meant for use on a terminal,
        # beside the log.
        os.environ |= {
            "INSPECT_CACHE_DIR": str(place / "cache"),
            "INSPECT_TRACE_FILE": str(place / "trace.log"),
        }
        model = self._model(
            client, {"system_message": entry.system_instruction, **options.generate}, folder
        )
        logs = []
        for task in tasks:
            logs += inspect_ai.eval(
                task,
                model=model,
                model_roles=_roles(options.judge),
                limit=_limit(entry.limit, len(task.dataset)),
                epochs=options.epochs,
                max_samples=_AT_ONCE,
                max_connections=_AT_ONCE,
                display="none",
                log_dir=str(place),
                log_format="eval",
                log_realtime=False,
                acp_server=False,
                ctl_server=False,
                score_display=False,
            )
        for log in logs:
            _raise_failure(log, entry)
        for old in earlier:  # from an attempt that was cut off
            old.unlink()
        for new in place.glob("trace.log*"):
            new.unlink()
        where = Path(logs[0].location.removeprefix("file://")) if len(logs) == 1 else place
        return TaskResult(
            results=results_of(logs), samples_file=str(where.relative_to(folder.absolute()))
        )

    def measure(
        self, entry: TaskEntry, sample: int, answers: Sequence[Answer], facts: ModelFacts
    ) -> bytes:
        """Raise an error: samples of inspect's tasks never request a metric."""
        raise EvaluationError(
            f"Inspect computes metrics itself: none of {len(answers)} answers of sample {sample} "
            f"of {entry.name}, by "
            f"{facts.name}, is measured apart."
        )

    def _model(self, client: EngineClient, generate: dict[str, Any], folder: Path) -> "Model":
        from inspect_ai.model import GenerateConfig, get_model, modelapi

        if client.facts.takes_text:
            from holdfast.evaluate.harness.inspect.text_model import TextModel as Kind
        else:
            from holdfast.evaluate.harness.inspect.token_model import TokenModel as Kind  # type: ignore[assignment]
        # Bind the client to a new class, not through the model's arguments, which inspect logs.
        bound = type("Holdfast", (Kind,), {"client": client, "began": _began(folder, self._clock)})
        modelapi(name=_PROVIDER)(bound)
        config = GenerateConfig(**generate)
        return get_model(f"{_PROVIDER}/{client.facts.name}", config=config, memoize=False)


def _roles(judge: str) -> dict[str, Any] | None:
    """Make the judge model the grader of the task; without a judge, the model grades itself."""
    if not os.environ.get("OPENAI_BASE_URL"):
        return None
    from inspect_ai.model import get_model

    return {"grader": get_model(f"openai/{judge}", responses_api=False, memoize=False)}


def _limit(limit: float | None, samples: int) -> int | None:
    """Return the number of samples under a limit; a share is rounded as lm-eval does."""
    if limit is None:
        return None
    return math.ceil(samples * limit) if limit < 1 else int(limit)


def _raise_failure(log: Any, entry: TaskEntry) -> None:
    if log.status == "success":
        return
    reason = log.error.message if log.error else f"it was {log.status}"
    if "No sandbox environment" in reason or "sandbox environment has been provided" in reason:
        from holdfast.evaluate.harness.inspect.tasks import needs_sandbox

        raise EvaluationError(
            str(needs_sandbox(entry.name, "a tool that the task gives the model"))
        )
    raise EvaluationError(f"The inspect task {entry.name!r} failed: {' '.join(reason.split())}")


def _began(folder: Path, clock: Clock) -> datetime:
    """Return the evaluation's start time, for chat templates; a resume returns the same time."""
    path = folder / "inspect" / "began"
    if not path.exists():
        draft = path.with_name(f"began.{os.getpid()}")
        # Use local time, as transformers passes local time to templates.
        write_atomic(draft, datetime.fromtimestamp(clock.now_s()).isoformat().encode())  # noqa: DTZ006
        with suppress(FileExistsError):  # another task's process was first
            path.hardlink_to(draft)
        draft.unlink()
    return datetime.fromisoformat(path.read_text())


def _key(entry: TaskEntry) -> bytes:
    return msgspec.msgpack.encode(entry, order="deterministic")


def _folder_name(entry: TaskEntry) -> str:
    return f"{_slug(Path(entry.name).name)}-{hashlib.sha256(_key(entry)).hexdigest()[:8]}"


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-@" else "_" for letter in name)[-80:]
