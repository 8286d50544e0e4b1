"""How an evaluation is run: where, by which engines, within which limits. Checked before any work is done."""

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
    """A model-as-judge behind an OpenAI-compatible server, and what it may be asked. None: no limit.

    Tasks reach it through a proxy that holds these limits; which model judges is the task's to say.
    """

    url: str
    """Up to and with its version: `http://host:8000/v1`."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds its key; a key is never in a file or a flag."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrency: int = 32
    """Requests at a time."""
    cost_limit: float | None = None
    """Of the whole evaluation, in the currency of the prices."""
    input_price: float = 0.0
    """Of a million tokens of prompts."""
    output_price: float = 0.0
    """Of a million tokens of answers."""

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
                f"judge.cost_limit is {self.cost_limit:g}, but its tokens have no price. Give --judge-input-price and "
                "--judge-output-price, of a million tokens."
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """How to evaluate. The defaults run in exact mode, on this machine, with as many engines as it has devices for.

    Raises:
        BadUse: a field is not allowed; the sentence names it, its value and what is.
    """

    evaluation_id: str | None = None
    """None: made of the model's name and the time."""
    home: Path | None = None
    """Where evaluations lie; None: `$HOLDFAST_HOME`, else `.holdfast`."""
    ledger: str | None = None
    """URL; None: the home's own."""
    output: Path | None = None
    """A folder that also gets the results in lm-eval's own layout."""

    engine: EngineSpec = field(default_factory=EngineSpec)
    on: Place = "local"
    nodes: int = 1
    """With `on="local"`, so many on this one machine, for trials."""
    engines_per_node: int = 0
    """0: one for each set of `tensor_parallel` GPUs; without GPUs, one."""
    sbatch_options: tuple[str, ...] = ()
    """As sbatch takes them (`--partition=p`); with `on="slurm"` only."""

    hf_config: Path | None = None
    """For a Holdfast or DCP checkpoint: a folder with the model's config and tokenizer."""
    name_map: Path | None = None
    """For a Holdfast or DCP checkpoint whose names are not transformers': which is which."""
    family: str = ""
    """Whose history predicts this model's costs; empty: the model's shape decides."""
    run_id: str | None = None
    """The training run that the model is a checkpoint of, for the ledger."""
    step: int | None = None
    """The steps completed in it, for the ledger."""

    limit: float | None = None
    """Samples of each task; below 1, a share of them. None: as the suite says."""
    num_fewshot: int | None = None
    """None: as the suite says."""
    chat_template: bool | None = None
    """None: as the suite says."""
    include_paths: tuple[str, ...] = ()
    """Folders with lm-eval tasks of one's own, besides the suite's."""
    confirm_unsafe_code: bool = False
    """Whether tasks that run what the model wrote may do so (in the sandbox)."""
    judge: JudgeLimits | None = None

    metric_slots: int = 0
    """Metrics at a time on a node; 0: its cores."""
    max_read_mib_s: float = 0.0
    """At which each node gets the next checkpoint while the one before is evaluated; 0: no limit."""
    drop_stale: bool = False
    """Of a stream of checkpoints: whether a newer one replaces those that have not begun."""
    linger_s: float = 60.0
    """How long engines go on with what they hold when the command is gone."""
    silent_s: float = 30.0
    """How long an engine may be silent before it is taken for hung and started anew."""

    def __post_init__(self) -> None:
        if self.evaluation_id is not None:
            EvaluationPaths(Path(), self.evaluation_id)  # raises where it is none
        _check_one_of("engine.mode", self.engine.mode, MODES)
        if self.engine.kind == "hf":
            _check_one_of("engine.dtype", self.engine.dtype, DTYPES)
        if self.engine.kind not in ENGINES and ":" not in self.engine.kind:
            raise BadUse(
                f"engine.kind is {self.engine.kind!r}. Allowed: {', '.join(ENGINES)}, or module:Class of your own."
            )
        check_options(self.engine)
        if self.engine.kind == "openai":
            _check_url("engine.url", self.engine.url)
        elif self.engine.url and self.engine.kind == "hf":
            raise BadUse(
                f"engine.url is {self.engine.url!r}, but hf has no server. Leave --url out, or --engine openai."
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
                f"sbatch_options are given, but on is {self.on!r}. Give --on slurm, or leave them out."
            )
        if self.name_map is not None and self.hf_config is None:
            raise BadUse(
                "name_map is given without hf_config. Give --hf-config DIR with the model's config too."
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
        """The suite with what these options say of every task; a suite's own word holds where they say nothing."""
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
        """JSON values from which `options_of` makes equal options."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        built: dict[str, Any] = msgspec.to_builtins(said, enc_hook=str)
        return built


def options_of(said: dict[str, Any]) -> EvaluateOptions:
    """The options of `to_json`.

    Raises:
        BadUse: a field is not allowed.
        msgspec.ValidationError: a field is of another type.
    """
    return msgspec.convert(said, EvaluateOptions, dec_hook=lambda kind, value: kind(value))


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
