"""Define the options of an evaluation, and check them before any work begins."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.core.errors import BadUse
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.engines.choose import check_options
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.suite import Suite

Place = Literal["local", "slurm", "ray"]
PLACES: tuple[Place, ...] = ("local", "slurm", "ray")
MODES = ("exact", "free")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
ENGINES = ("hf", "vllm", "openai", "simulated")


@dataclass(frozen=True, kw_only=True)
class JudgeLimits:
    """Limit the use of a judge model on an OpenAI-compatible server; None means no limit.

    Tasks reach the server through a proxy that enforces the limits. Each task names the judge model
    that it uses.
    """

    url: str
    """The server's URL including the API version: `http://host:8000/v1`."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable with the server's API key; keys are never in a file or an option."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrency: int = 32
    """The largest number of requests in flight."""
    cost_limit: float | None = None
    """The largest cost of the whole evaluation, in the currency of the prices."""
    input_price: float = 0.0
    """The price of a million prompt tokens."""
    output_price: float = 0.0
    """The price of a million answer tokens."""

    def __post_init__(self) -> None:
        _check_url("judge.url", self.url)
        _check_least("judge.concurrency", self.concurrency, 1)
        for name in ("requests_per_minute", "tokens_per_minute", "cost_limit"):
            value = getattr(self, name)
            if value is not None:
                _check_above(f"judge.{name}", value, 0.0)
        for name in ("input_price", "output_price"):
            _check_least(f"judge.{name}", getattr(self, name), 0.0)
        if self.cost_limit is not None and not (self.input_price or self.output_price):
            raise BadUse(
                f"judge.cost_limit is {self.cost_limit:g}, but its tokens have no price. Give "
                "--judge-input-price and "
                "--judge-output-price, of a million tokens."
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Define how to evaluate.

    The defaults evaluate in exact mode on this machine, with one engine for each GPU.

    Raises:
        BadUse: a field is not allowed; the message names the field, its value and the allowed
            values.
    """

    evaluation_id: str | None = None
    """The id of the evaluation; None to derive it from the model's name and the time."""
    home: Path | None = None
    """The folder of all evaluations; None for `$HOLDFAST_HOME`, else `.holdfast`."""
    ledger: str | None = None
    """The ledger's URL; None for the ledger in the home folder."""
    output: Path | None = None
    """A folder into which results are also written in lm-eval's layout."""

    engine: EngineSpec = field(default_factory=EngineSpec)
    on: Place = "local"
    nodes: int = 1
    """The number of nodes; with `on="local"`, simulated nodes on this machine, for trials."""
    engines_per_node: int = 0
    """The number of engines on each node.

    0 means one engine for each set of `tensor_parallel` GPUs, or one engine on a node without GPUs.
    """
    sbatch_options: tuple[str, ...] = ()
    """Options in the form of sbatch (`--partition=p`); only with `on="slurm"`."""

    hf_config: Path | None = None
    """For a Holdfast or DCP checkpoint, a folder with the model's config and tokenizer."""
    name_map: Path | None = None
    """For a Holdfast or DCP checkpoint whose tensors are not named as in transformers.

    This is the file that maps the names.
    """
    base: str | None = None
    """For a PEFT adapter, the path or URL of its base model; None for the base that it names."""
    family: str = ""
    """The family of models whose recorded costs predict the costs of this model.

    Empty for the family of models with the same shape.
    """
    run_id: str | None = None
    """The training run that the checkpoint belongs to, for the ledger."""
    step: int | None = None
    """The number of completed steps of the training run, for the ledger."""

    limit: float | None = None
    """The number of samples of each task; below 1, a share of them; None for the suite's value."""
    num_fewshot: int | None = None
    """The number of examples in each prompt; None for the suite's value."""
    chat_template: bool | None = None
    """True to format prompts by the model's chat template; None for the suite's value."""
    include_paths: tuple[str, ...] = ()
    """Folders with the user's own lm-eval tasks, in addition to the suite's folders."""
    confirm_unsafe_code: bool = False
    """True to allow tasks that run code from the model, in the sandbox."""
    judge: JudgeLimits | None = None

    metric_slots: int = 0
    """The number of metrics that a node computes at the same time; 0 for its number of cores."""
    max_read_mib_s: float = 0.0
    """The limit in MiB/s at which each node reads the next checkpoint; 0 for no limit.

    The limit applies while another checkpoint is evaluated.
    """
    drop_stale: bool = False
    """In a stream of checkpoints, True to cancel older checkpoints when a newer one comes.

    Only checkpoints whose evaluation has not begun are cancelled.
    """
    linger_s: float = 60.0
    """The seconds for which engines continue their requests after the command has died."""
    silent_s: float = 30.0
    """The seconds of silence after which an engine counts as hung and is restarted."""

    def __post_init__(self) -> None:
        if self.evaluation_id is not None:
            EvaluationPaths(Path(), self.evaluation_id)  # raises if the id is not valid
        _check_one_of("engine.mode", self.engine.mode, MODES)
        if self.engine.kind == "hf":
            _check_one_of("engine.dtype", self.engine.dtype, DTYPES)
        if self.engine.kind not in ENGINES and ":" not in self.engine.kind:
            raise BadUse(
                f"engine.kind is {self.engine.kind!r}. Allowed: {', '.join(ENGINES)}, or "
                "module:Class of your own."
            )
        check_options(self.engine)
        if self.engine.kind == "openai":
            _check_url("engine.url", self.engine.url)
        elif self.engine.url and self.engine.kind == "hf":
            raise BadUse(
                f"engine.url is {self.engine.url!r}, but hf has no server. Leave --url out, or "
                "--engine openai."
            )
        for name, least in (
            ("tensor_parallel", 1),
            ("threads", 0),
            ("max_batch", 0),
            ("max_length", 0),
        ):
            _check_least(f"engine.{name}", getattr(self.engine, name), least)
        _check_one_of("on", self.on, PLACES)
        for name, least in (
            ("nodes", 1),
            ("engines_per_node", 0),
            ("metric_slots", 0),
            ("max_read_mib_s", 0),
        ):
            _check_least(name, getattr(self, name), least)
        if self.sbatch_options and self.on != "slurm":
            raise BadUse(
                f"sbatch_options are given, but on is {self.on!r}. Give --on slurm, or leave them "
                "out."
            )
        if self.name_map is not None and self.hf_config is None:
            raise BadUse(
                "name_map is given without hf_config. Give --hf-config DIR with the model's config "
                "too."
            )
        if self.limit is not None:
            _check_above("limit", self.limit, 0.0)
            if self.limit > 1 and self.limit != int(self.limit):
                raise BadUse(f"limit is {self.limit:g}. Give whole samples, or a share below 1.")
        if self.num_fewshot is not None:
            _check_least("num_fewshot", self.num_fewshot, 0)
        _check_least("linger_s", self.linger_s, 0.0)
        _check_above("silent_s", self.silent_s, 0.0)

    def applied_to(self, suite: Suite) -> Suite:
        """Return the suite with these options applied to each task.

        The suite's own value stays where an option is not set.
        """
        given: dict[str, Any] = {
            name: value
            for name in ("limit", "num_fewshot", "chat_template")
            if (value := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(
            suite,
            entries=tuple(msgspec.structs.replace(entry, **given) for entry in suite.entries),
            include_paths=tuple(dict.fromkeys((*suite.include_paths, *self.include_paths))),
            confirm_unsafe_code=suite.confirm_unsafe_code or self.confirm_unsafe_code,
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values from which `options_of` creates equal options."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        built: dict[str, Any] = msgspec.to_builtins(values, enc_hook=str)
        return built


def options_of(values: dict[str, Any]) -> EvaluateOptions:
    """Create options from the values that `to_json` returned.

    Raises:
        BadUse: a field is not allowed.
        msgspec.ValidationError: a field has another type.
    """
    return msgspec.convert(values, EvaluateOptions, dec_hook=lambda kind, value: kind(value))


def _check_one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    if value not in (known := tuple(allowed)):
        raise BadUse(f"{name} is {value!r}. Allowed: {', '.join(known)}.")


def _check_least(name: str, value: float, least: float) -> None:
    if not least <= value < float("inf"):
        raise BadUse(f"{name} is {value:g}. Give a number of at least {least:g}.")


def _check_above(name: str, value: float, bound: float) -> None:
    if not bound < value < float("inf"):
        raise BadUse(f"{name} is {value:g}. Give a number above {bound:g}.")


def _check_url(name: str, url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise BadUse(
            f"{name} is {url!r}. Give the server's address with its version: http://host:8000/v1"
        )
