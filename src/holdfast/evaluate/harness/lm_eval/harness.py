"""Adapt lm-evaluation-harness as a `Harness`.

`simple_evaluate` runs unmodified, in a separate process for each entry.
"""

import contextlib
import functools
import hashlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.words import sentence
from holdfast.evaluate.harness.lm_eval.options import LmEvalOptions, options_of
from holdfast.evaluate.harness.lm_eval.results import plain, task_hash, write_samples
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import EngineClient, ModelFacts, TaskResult
from holdfast.evaluate.types.reads import package_versions
from holdfast.evaluate.types.requests import Answer
from holdfast.evaluate.types.scores import sanitized
from holdfast.evaluate.types.suite import TaskEntry

if TYPE_CHECKING:
    from holdfast.evaluate.harness.lm_eval.catalog import Catalog
    from holdfast.evaluate.harness.lm_eval.metrics import Exchange, RemoteLM


class LmEval:
    """Run lm-eval's tasks; see `Harness`.

    Args:
        include_paths: folders with the user's own tasks.
        confirm_unsafe_code: True to allow tasks to run a model's code, in the sandbox.
    """

    name = "lm-eval"

    def __init__(
        self, *, include_paths: Sequence[str] = (), confirm_unsafe_code: bool = False
    ) -> None:
        import lm_eval  # noqa: F401  a missing package is said here

        self._include_paths, self._confirmed = include_paths, confirm_unsafe_code
        self._catalog: Catalog | None = None
        self._measured: tuple[bytes, _Measuring] | None = None

    def version(self) -> str:
        """Return lm-eval's version."""
        return _version()

    def prepare(self, entries: Sequence[TaskEntry]) -> None:
        """Check that the task of every entry exists and is allowed.

        Raises:
            BadUse: a task does not exist or is not allowed; the message suggests similar names.
        """
        from holdfast.evaluate.harness.lm_eval.catalog import Catalog

        if self._catalog is None:
            self._catalog = Catalog(self._include_paths)
        for entry in entries:
            self._catalog.include(options_of(entry).include_paths)
        for entry in entries:
            self._catalog.check(entry.name)
            if not self._confirmed and self._catalog.runs_code(entry.name):
                raise BadUse(
                    f"The task {entry.name!r} runs code that the model writes, in a sandbox. Set "
                    "confirm_unsafe_code = true in the suite, or pass --confirm-unsafe-code, to "
                    "allow it."
                )

    def rehearse(self) -> None:
        """Import the modules that a run needs, and run two small tasks; see `Rehearsing`."""
        from holdfast.evaluate.harness.lm_eval import metrics, model, text_model  # noqa: F401
        from holdfast.evaluate.harness.lm_eval.rehearsal import rehearse

        self._set_up()
        rehearse()

    def run(self, entry: TaskEntry, client: EngineClient, folder: Path) -> TaskResult:
        """See `Harness.run`; samples are logged below `folder/samples`, in lm-eval's format."""
        from lm_eval import evaluator
        from lm_eval.utils import handle_non_serializable, sanitize_list

        from holdfast.evaluate.harness.lm_eval.metrics import Exchange, StreamedMetrics

        self._set_up()
        options, facts = options_of(entry), client.facts
        with _explained(entry):
            lm: Any = _model(facts, options)
            metrics = StreamedMetrics(
                _stands_for(facts, options), is_wanted=not options.predict_only
            )
            lm.exchange = Exchange(client, lm, metrics)
            # Keyed by the tasks' own names, since an entry may be a group or a file.
            chosen: dict[str, list[int]] = {}

            def on_load(loaded: Any) -> None:
                lm.exchange.tasks = loaded["tasks"]
                if options.samples is not None:
                    chosen.update(dict.fromkeys(loaded["tasks"], options.samples))
                for task in loaded["tasks"].values():
                    metrics.wrap(task)

            results = evaluator.simple_evaluate(
                model=lm,
                tasks=[entry.name],
                num_fewshot=entry.num_fewshot,
                batch_size=1,
                limit=int(entry.limit) if entry.limit and entry.limit >= 1 else entry.limit,
                bootstrap_iters=options.bootstrap_iters,
                log_samples=True,
                system_instruction=entry.system_instruction,
                apply_chat_template=entry.chat_template,
                fewshot_as_multiturn=options.fewshot_as_multiturn,
                gen_kwargs=options.gen_kwargs,
                predict_only=options.predict_only,
                samples=None if options.samples is None else chosen,
                task_manager=self._prepared().manager(_metadata(facts, options), on_load),
                random_seed=options.random_seed,
                numpy_random_seed=options.numpy_random_seed,
                torch_random_seed=options.torch_random_seed,
                fewshot_random_seed=options.fewshot_random_seed,
                confirm_run_unsafe_code=self._confirmed,
            )
        samples = results.pop("samples")
        results["task_hashes"] = {task: task_hash(rows) for task, rows in samples.items()}
        results |= _prompt_fields(entry, options, lm)
        place = folder / "samples" / f"{facts.model}-{sanitized(facts.name)}" / _folder_name(entry)
        paths = write_samples(
            place, samples, sanitize=sanitize_list, default=handle_non_serializable
        )
        shown = paths[0] if len(paths) == 1 else place
        return TaskResult(
            results=plain(results, handle_non_serializable),
            samples_file=str(shown.relative_to(folder)),
            notes=_notes(entry, lm.exchange),
        )

    def measure(
        self, entry: TaskEntry, sample: int, answers: Sequence[Answer], facts: ModelFacts
    ) -> bytes:
        """See `Harness.measure`.

        The result is empty if the metric failed, or if JSON cannot hold its values exactly; then
        the client computes the metric.
        """
        wanted = msgspec.msgpack.encode((entry, facts.tokenizer, facts.max_length))
        if self._measured is None or self._measured[0] != wanted:
            self._set_up()
            self._measured = wanted, _Measuring(entry, self._prepared(), facts)
        return self._measured[1].measure(sample, answers)

    def _set_up(self) -> None:
        """Adapt torch, tqdm and lm-eval to this process and its forks; further calls do no harm."""
        import torch
        import tqdm
        from lm_eval import evaluator

        from holdfast.evaluate.harness.lm_eval import code

        tqdm.tqdm.monitor_interval = 0  # tqdm's monitor is a thread, and this process forks
        # Use one thread: clients compute little, and more threads would only compete for cores.
        torch.set_num_threads(1)
        package_versions()  # cached here once for all clients
        code.install(confirmed=self._confirmed)
        evaluator.add_env_info, evaluator.get_git_commit_hash = _add_versions, _git_hash

    def _prepared(self) -> "Catalog":
        assert self._catalog is not None, "`prepare` comes first"
        return self._catalog


class _Measuring:
    """Hold the loaded tasks of an entry, to compute the metrics of many samples."""

    def __init__(self, entry: TaskEntry, catalog: "Catalog", facts: ModelFacts) -> None:
        import numpy as np
        import torch
        from lm_eval.utils import simple_parse_args_string

        from holdfast.evaluate.harness.lm_eval.metrics import numbered

        options = options_of(entry)
        random.seed(options.random_seed)  # as in `simple_evaluate` before it loads tasks
        np.random.seed(options.numpy_random_seed)
        if options.torch_random_seed is not None:
            torch.manual_seed(options.torch_random_seed)
        self._lm = _model(facts, options)
        loaded = catalog.manager(_metadata(facts, options), lambda _loaded: None).load([entry.name])
        self._tasks = list(numbered(loaded["tasks"]))
        self._documents: dict[int, Any] = {}
        given = options.gen_kwargs
        given = simple_parse_args_string(given) if isinstance(given, str) else given
        for _first, task in self._tasks:
            if given and task.get_config("output_type") == "generate_until":
                task.set_config(key="generation_kwargs", value=dict(given), update=True)

    def measure(self, sample: int, answers: Sequence[Answer]) -> bytes:
        from holdfast.evaluate.harness.lm_eval.metrics import measure

        first, task = max(
            (pair for pair in self._tasks if pair[0] <= sample), key=lambda pair: pair[0]
        )
        if first not in self._documents:
            self._documents[first] = task.eval_docs
        before = _Draws()
        try:
            measured = measure(
                task, sample - first, self._documents[first][sample - first], answers, self._lm
            )
        except Exception:
            return b""
        return b"" if before.were_made() else measured  # the client must draw, in lm-eval's order


class _Draws:
    """Detect whether code used Python's or numpy's global random number generator."""

    def __init__(self) -> None:
        self._before = self._state()

    def were_made(self) -> bool:
        return self._state() != self._before

    @staticmethod
    def _state() -> tuple[Any, ...]:
        import numpy as np

        of_numpy: Any = np.random.get_state()
        name, keys, *rest = of_numpy
        return random.getstate(), name, keys.tobytes(), *rest


def _notes(entry: TaskEntry, exchange: "Exchange") -> list[str]:
    """Return sentences on why scores may differ from lm-eval's.

    Only reasons are listed that hold even with equal weights and a batch size of one.
    """
    notes = []
    if exchange.is_sampled:
        notes.append(
            f"{entry.name} samples its answers, each from a seed of its own: lm-eval draws all "
            "from one stream, so its "
            "scores differ."
        )
    if exchange.splits_one_input:
        notes.append(
            f"{entry.name} has continuations of different length for one input: lm-eval's collator "
            "mixes them up, so "
            "its scores may differ."
        )
    return notes


def _model(facts: ModelFacts, options: LmEvalOptions) -> "RemoteLM":
    from holdfast.evaluate.harness.lm_eval.model import EngineLM
    from holdfast.evaluate.harness.lm_eval.text_model import TextLM

    if not facts.takes_text and not facts.tokenizer:
        raise BadUse(
            f"The model {facts.name} has no tokenizer. Name a folder with one, or an engine that "
            "takes text."
        )
    kind = TextLM if facts.takes_text else EngineLM
    return kind(facts, dict(options.model_args), options.torch_random_seed or 0)


def _metadata(facts: ModelFacts, options: LmEvalOptions) -> dict[str, Any]:
    """Return the metadata that lm-eval passes to tasks which make their own data.

    `pretrained` is the tokenizer's folder; the entry's own metadata override it.
    """
    return {**({"pretrained": facts.tokenizer} if facts.tokenizer else {}), **options.metadata}


def _stands_for(facts: ModelFacts, options: LmEvalOptions) -> bytes:
    """Return a digest of the packages, model arguments and tokenizer, which metrics depend on."""
    digest = hashlib.blake2b(package_versions().encode(), digest_size=16)
    digest.update(json.dumps(dict(options.model_args), sort_keys=True).encode())
    if facts.tokenizer:
        for path in sorted(Path(facts.tokenizer).glob("*token*")):
            digest.update(path.read_bytes())
    return digest.digest()


def _prompt_fields(entry: TaskEntry, options: LmEvalOptions, lm: Any) -> dict[str, Any]:
    """Return the fields about prompts that lm-eval's `GeneralConfigTracker` records."""
    template = lm.chat_template(entry.chat_template) if entry.chat_template else None
    shas = {
        f"{name}_sha": hashlib.sha256(text.encode()).hexdigest() if text else None
        for name, text in (
            ("system_instruction", entry.system_instruction),
            ("chat_template", template),
        )
    }
    return {
        "system_instruction": entry.system_instruction,
        "fewshot_as_multiturn": options.fewshot_as_multiturn,
        "chat_template": template,
        **shas,
    }


def _add_versions(storage: dict[str, Any]) -> None:
    """Add the versions of packages, in place of lm-eval's `add_env_info`.

    `add_env_info` runs pip and other programs, which takes a second in each process.
    """
    import platform

    import torch
    import transformers

    lines = [
        f"Python {platform.python_version()}",
        platform.platform(),
        f"torch {torch.__version__}",
    ]
    storage |= {
        "pretty_env_info": "\n".join(lines),
        "transformers_version": transformers.__version__,
        "lm_eval_version": _version(),
        "upper_git_hash": None,
    }


@functools.cache
def _version() -> str:
    """Read lm-eval's version from the package's files, once, before clients are forked."""
    return version("lm_eval")


@functools.cache
def _git_hash() -> Any:
    """Return the result of lm-eval's `get_git_commit_hash`, called once for all clients.

    The function starts a process.
    """
    from lm_eval.loggers.utils import get_git_commit_hash

    # Silence descriptor 2: outside of a repository, git writes an error directly to it.
    stderr_fd, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        return get_git_commit_hash()
    finally:
        os.dup2(stderr_fd, 2)
        os.close(stderr_fd)
        os.close(nowhere)


def _folder_name(entry: TaskEntry) -> str:
    digest = hashlib.blake2b(msgspec.msgpack.encode(entry), digest_size=4).hexdigest()
    return f"{sanitized(Path(entry.name).name)[:80]}-{digest}"


_OFFLINE = (
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "ConnectionError",
    "ConnectError",
    "MaxRetryError",
)


@contextlib.contextmanager
def _explained(entry: TaskEntry) -> Iterator[None]:
    """Replace a network error by the explanation that the task's data is not on this machine."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if type(cause).__name__ in _OFFLINE or "HF_HUB_OFFLINE" in str(cause):
                offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE")
                why = (
                    "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set"
                    if offline
                    else "the network does not answer"
                )
                raise EvaluationError(
                    f"The task {entry.name!r} needs data that is not on this machine, and {why}: "
                    f"{sentence(' '.join(str(error).split())[:300])} Fetch it once with the network, or "
                    "leave the task out."
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise
