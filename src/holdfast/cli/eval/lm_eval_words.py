"""Translate lm-eval's command line into Holdfast's suite, model and options.

lm-eval's own parser parses the command line. If an option requests what Holdfast always does, it is
accepted with a notice. If Holdfast cannot do what an option requests, the option is refused by
name, with an alternative.
"""

import argparse
import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.core.errors import BadUse

if TYPE_CHECKING:
    from holdfast.evaluate import Suite

_NATIVE = {"model", "limit", "num_fewshot", "include_path", "device"}
"""The options of lm-eval that `holdfast eval run` also has, with the same meaning."""
_LOCAL = {"hf": "hf", "hf-auto": "hf", "huggingface": "hf", "vllm": "vllm"}
_SERVERS = {
    "local-completions": "/completions",
    "local-chat-completions": "/chat/completions",
    "openai-completions": "/completions",
    "openai-chat-completions": "/chat/completions",
}
_OPENAI = "https://api.openai.com/v1"
_ALWAYS = {
    "log_samples": "Samples are always logged: in the evaluation's folder, and in that of -o.",
    "use_cache": "Every answer is always kept and reused; the path of --use_cache is not used.",
    "cache_requests": "Prompts are built anew each time; --cache_requests is ignored.",
    "batch_size": "Holdfast chooses batch sizes; --batch_size is ignored. Exact scores are those of size 1.",
    "max_batch_size": "Holdfast chooses batch sizes; --max_batch_size is ignored.",
    "verbosity": "The output of tasks is in the evaluation's folder logs; --verbosity is ignored.",
    "write_out": "Prompts are in the logged samples; --write_out is ignored.",
    "show_config": "Tasks' configurations are in the results; --show_config is ignored.",
    "check_integrity": "Tasks are checked before anything starts; --check_integrity is ignored.",
}
_NEVER = {
    "config": "Write a suite as a TOML file instead: docs/evaluation.md, Suites.",
    "wandb_args": "Log the files that -o FOLDER gets afterwards.",
    "wandb_config_args": "Log the files that -o FOLDER gets afterwards.",
    "trackio_args": "Log the files that -o FOLDER gets afterwards.",
    "hf_hub_log_args": "Upload the files that -o FOLDER gets afterwards: hf upload.",
    "trust_remote_code": "Holdfast does not run code that comes with a model; serve the model "
    "(vllm serve) and give --model local-completions.",
}
_MODEL_WAYS = {
    "trust_remote_code": _NEVER["trust_remote_code"],
    "tokenizer": "Put the tokenizer's files into the model's folder.",
    "parallelize": "Use --model vllm with tensor_parallel_size.",
    "load_in_4bit": "Serve the quantized model (vllm serve) and give --model local-completions.",
    "load_in_8bit": "Serve the quantized model (vllm serve) and give --model local-completions.",
}
_PASSED_OVER = {
    "batch_size",
    "max_batch_size",
    "max_retries",
    "tokenizer_backend",
    "tokenized_requests",
}
_OF_TASKS = (
    "samples",
    "gen_kwargs",
    "seed",
    "metadata",
    "predict_only",
    "system_instruction",
    "apply_chat_template",
)
_DTYPES = {"float": "float32", "half": "float16"}
_SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


@dataclass
class Line:
    """The translation of a command line of lm-eval.

    Attributes:
        suite: the tasks; None if the command line names no tasks of lm-eval.
        native: the remaining options, in the spelling of `holdfast eval run`.
        said: notices on options that request Holdfast's fixed behaviour.
        listing: the names of all tasks, if the command line requests a list of them.
    """

    suite: "Suite | None" = None
    native: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    listing: Sequence[str] = ()


def speaks_lm_eval(words: Sequence[str]) -> bool:
    """Return True if a command line of `holdfast eval run` has an option that only lm-eval has."""
    if not any(word.startswith("-") for word in words):
        return False
    parser = _parser()
    names = set(parser._option_string_actions)
    own = names - {f"--{name}" for name in _NATIVE} - {"--help", "-h", "-o"}
    return any(_name_of(word) in own for word in words)


def translate(words: Sequence[str]) -> Line:
    """Translate a command line of lm-eval into Holdfast's options.

    Raises:
        BadUse: Holdfast has no equivalent of an option; the message has an alternative.
    """
    words = list(words)
    if words[:2] == ["ls", "tasks"]:
        words[:2] = ["--tasks", "list"]
    if words[:1] == ["run"]:
        words = words[1:]
    elif words[:1] and not words[0].startswith("-"):
        raise BadUse(f"Holdfast has no {words[0]!r} of lm-eval. Run: lm-eval {' '.join(words)}")
    parser = _parser()
    names = parser._option_string_actions
    words = [_spelled(word, names) for word in words]
    folders, words = _include_path().parse_known_args(words)
    given, native = parser.parse_known_args(words)
    options = {name: it for name, it in vars(given).items() if it is not None and it is not False}
    options |= vars(folders)
    if options.get("tasks") in (["list"], ["list_groups"], ["list_tags"], ["list_subtasks"]):
        return Line(listing=task_names(options.get("include_path", ())))
    if "tasks" in options and any(_name_of(word) == "--suite" for word in native):
        raise BadUse("--suite and --tasks both name the tasks. Give one of them.")
    for name, way in _NEVER.items():
        if name in options:
            raise BadUse(f"--{name} of lm-eval is not supported. {way}")
    line = Line(native=native)
    line.said = [sentence for name, sentence in _ALWAYS.items() if name in options]
    entry_options = _model(options, line)
    _flags(options, line)
    if "tasks" in options:
        line.suite = _suite(options, entry_options)
    elif unused := [name for name in _OF_TASKS if name in options]:
        raise BadUse(
            f"--{unused[0]} needs --tasks. In a suite's file it is an option of the tasks."
        )
    return line


def task_names(include_paths: Sequence[str] = ()) -> list[str]:
    """Return the names of lm-eval's tasks, groups and tags, and of the tasks in `include_paths`."""
    from lm_eval.tasks import TaskManager

    return sorted(TaskManager(include_path=list(include_paths) or None).all_tasks)


def _parser() -> argparse.ArgumentParser:
    try:
        from lm_eval._cli.run import Run
    except ImportError as error:
        raise BadUse("This needs lm-eval. Run: pip install 'holdfast[eval]'") from error
    whole = argparse.ArgumentParser(prog="holdfast eval lm_eval")
    parser: argparse.ArgumentParser = Run.create(whole.add_subparsers())._parser
    parser.allow_abbrev = False

    def refuse(message: str) -> NoReturn:
        what, is_invalid, kind_and_value = message.partition(": invalid ")
        if is_invalid:  # argparse names the kind by a Python function
            message = f"{what} cannot be {kind_and_value.rpartition('value: ')[2]}"
        raise BadUse(f"lm-eval rejects these options: {message}. See lm-eval run --help.")

    parser.error = refuse  # type: ignore[method-assign]
    return parser


def _include_path() -> argparse.ArgumentParser:
    """Create a parser for the option `--include_path` only, which may be given more than once.

    lm-eval's own parser accepts the option only once.
    """
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--include_path", action="append")
    return parser


def _name_of(word: str) -> str:
    return "--" + word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else word


def _spelled(word: str, names: Mapping[str, Any]) -> str:
    """Return an option with underscores instead of dashes, as lm-eval spells it."""
    name = _name_of(word)
    return name + word[len(name) :] if name in names else word


def _model(options: Mapping[str, Any], line: Line) -> dict[str, Any]:
    """Add the model and its engine to `line`; return the model arguments that change requests."""
    from lm_eval.models import MODEL_MAPPING

    from holdfast.evaluate import MODEL_ARGS

    kind, arguments = options.get("model", "hf"), dict(options.get("model_args", {}))
    shaping = {name: arguments.pop(name) for name in MODEL_ARGS if name in arguments}
    if kind in _SERVERS:
        url = str(arguments.pop("base_url", _OPENAI)).rstrip("/").removesuffix(_SERVERS[kind])
        name = str(arguments.pop("model", "") or arguments.pop("pretrained", ""))
        if not name:
            raise BadUse(
                f"--model {kind} needs the model's name: --model_args model=NAME,base_url=URL"
            )
        line.native += ["--engine", "openai", "--url", url, "--model", name, "--model-name", name]
        flags = {"num_concurrent": "--max-batch", "max_length": "--max-length"}
        engine_options = {"tokenizer": "tokenizer", "timeout": "timeout_s"}
    elif kind in _LOCAL or (kind not in MODEL_MAPPING and "pretrained" not in arguments):
        if kind in _LOCAL and "pretrained" not in arguments:
            raise BadUse(f"--model {kind} needs its weights: --model_args pretrained=FOLDER")
        name = str(arguments.pop("pretrained", kind))
        revision = arguments.pop("revision", None)
        name = f"{name}@{revision}" if revision else name
        adapter = arguments.pop("peft", None)
        line.native += ["--model", str(adapter), "--base", name] if adapter else ["--model", name]
        line.native += ["--engine", _LOCAL.get(kind, "hf")] if kind in _LOCAL else []
        flags = {"dtype": "--dtype", "device": "--device", "max_length": "--max-length"}
        engine_options = {}
        if kind == "vllm":
            flags |= {
                "tensor_parallel_size": "--tp",
                "max_model_len": "--max-length",
                "data_parallel_size": "--engines-per-node",
            }
            if (share := arguments.pop("gpu_memory_utilization", None)) is not None:
                line.native.append(f"--engine-option=arguments=--gpu-memory-utilization {share}")
    else:
        raise BadUse(
            f"Holdfast has no model {kind!r} of lm-eval. It has {', '.join((*_LOCAL, *_SERVERS))}; start a server of "
            "others and give --model local-completions."
        )
    for name, value in arguments.items():
        if name in flags:
            line.native.append(f"{flags[name]}={_DTYPES.get(value, value)}")
        elif name in engine_options and value is not None:
            line.native.append(f"--engine-option={engine_options[name]}={value}")
        elif name in _PASSED_OVER:
            line.said.append(f"{name} of --model_args is ignored: Holdfast decides it.")
        elif value not in (None, False):
            way = _MODEL_WAYS.get(
                name, "Leave it out, or serve the model and give --model local-completions."
            )
            raise BadUse(f"{name}={value} of --model_args is not supported. {way}")
    return shaping


def _flags(options: Mapping[str, Any], line: Line) -> None:
    for name, flag in (
        ("limit", "--limit"),
        ("num_fewshot", "--num-fewshot"),
        ("device", "--device"),
    ):
        if name in options:
            line.native.append(f"{flag}={options[name]}")
    line.native += [f"--include-path={folder}" for folder in options.get("include_path", ())]
    if options.get("confirm_run_unsafe_code"):
        line.native.append("--confirm-unsafe-code")
    if "output_path" in options:
        path = Path(options["output_path"])
        line.native.append(f"--output={path.parent if path.suffix == '.json' else path}")


def _suite(chosen: Mapping[str, Any], model_args: Mapping[str, Any]) -> "Suite":
    from holdfast.evaluate import Suite, TaskEntry

    samples = _samples(chosen.get("samples"))
    options: dict[str, Any] = {"model_args": dict(model_args)} if model_args else {}
    for name in ("gen_kwargs", "metadata", "predict_only"):
        if name in chosen:
            options[name] = chosen[name]
    if isinstance(chosen.get("fewshot_as_multiturn"), bool):
        options["fewshot_as_multiturn"] = chosen["fewshot_as_multiturn"]
    options |= dict(zip(_SEEDS, chosen["seed"], strict=True)) if "seed" in chosen else {}
    entries = tuple(
        TaskEntry(
            name=name,
            chat_template=chosen.get("apply_chat_template", False),
            system_instruction=chosen.get("system_instruction"),
            options={**options, **({"samples": samples[name]} if name in samples else {})},
        )
        for name in _named(chosen["tasks"], chosen.get("include_path", ()))
    )
    if samples and (unknown := samples.keys() - {entry.name for entry in entries}):
        raise BadUse(f"--samples names {min(unknown)}, which is not in --tasks.")
    return Suite(name="+".join(entry.name for entry in entries[:3]), entries=entries)


def _named(tasks: Sequence[str], folders: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in tasks:
        if Path(name).is_file():
            found[str(Path(name).absolute())] = None
        elif any(sign in name for sign in "*?["):
            names = fnmatch.filter(task_names(folders), name)
            if not names:
                raise BadUse(
                    f"No task of lm-eval is named like {name!r}. List them: lm-eval ls tasks"
                )
            found |= dict.fromkeys(names)
        else:
            found[name] = None
    return list(found)


def _samples(value: Any) -> dict[str, list[int]]:
    if value is None:
        return {}
    try:
        if isinstance(value, str) and Path(value).is_file():
            value = json.loads(Path(value).read_text())
        return {str(task): [int(one) for one in wanted] for task, wanted in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise BadUse(
            "--samples is no JSON object of tasks with lists of numbers, nor a file with one. Give one: "
            "--samples '{\"gsm8k\": [0, 3]}'"
        ) from error
