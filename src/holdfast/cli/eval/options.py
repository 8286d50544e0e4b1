"""Define the options of `holdfast eval` on how to evaluate; convert them to `EvaluateOptions`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.output_paths import OUTPUT_FOLDER
from holdfast.core.errors import BadUse

if TYPE_CHECKING:
    from holdfast.cli.main import Place
    from holdfast.evaluate import EvaluateOptions

FOLDER = click.Path(path_type=Path, file_okay=False)
GIVEN_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)
GIVEN_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)

SUITE = click.option(
    "--suite", required=True, metavar="SUITE", help="A TOML file, or task names: gsm8k,mmlu:100."
)
PLACING = (
    click.option(
        "--on",
        type=click.Choice(["local", "slurm", "ray"]),
        help="Where the engines run.  [default: local]",
    ),
    click.option("--nodes", type=int, metavar="N", help="Number of nodes.  [default: 1]"),
    click.option(
        "--engines-per-node",
        type=int,
        metavar="N",
        help="Engines on each node.  [default: as its GPUs allow; 1 without GPUs]",
    ),
    click.option(
        "--sbatch-option",
        "sbatch_options",
        multiple=True,
        metavar="OPTION",
        help="An option for sbatch (--sbatch-option=--partition=gpu); repeatable; with --on slurm.",
    ),
)
ENGINE = (
    click.option(
        "--engine",
        "kind",
        metavar="KIND",
        help="hf, vllm, openai, simulated, module:Class.  [default: hf]",
    ),
    click.option(
        "--mode",
        type=click.Choice(["exact", "free"]),
        help="exact: the harness's own scores, bit for bit; free: any batch size.  [default: exact]",
    ),
    click.option(
        "--device", metavar="DEVICE", help="cpu or cuda.  [default: cuda if there are GPUs]"
    ),
    click.option(
        "--dtype",
        metavar="DTYPE",
        help="The dtype, as transformers names it.  [default: the checkpoint's]",
    ),
    click.option(
        "--tp",
        "tensor_parallel",
        type=int,
        metavar="N",
        help="GPUs of one node that an engine spans; vllm only.  [default: 1]",
    ),
    click.option(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of an engine.  [default: its share of the cores]",
    ),
    click.option(
        "--max-batch",
        type=int,
        metavar="N",
        help="Most sequences in a batch.  [default: the engine's own]",
    ),
    click.option(
        "--max-length",
        type=int,
        metavar="N",
        help="Most tokens in a prompt and its answer.  [default: the model's own]",
    ),
    click.option("--url", metavar="URL", help="With openai: the server's base URL, ending in /v1."),
    click.option(
        "--model-name", metavar="NAME", help="With openai: the model, as the server names it."
    ),
    click.option(
        "--engine-option",
        "options",
        multiple=True,
        metavar="KEY=VALUE",
        help="An option of this kind of engine (patience_s=900); repeatable.",
    ),
)
MODEL = (
    click.option(
        "--hf-config",
        type=GIVEN_FOLDER,
        help="For a DCP checkpoint: the folder with config.json and the tokenizer.",
    ),
    click.option(
        "--name-map",
        type=GIVEN_FILE,
        help="For a DCP checkpoint: a TOML file that maps tensor names to transformers' names.",
    ),
    click.option(
        "--base",
        metavar="FOLDER",
        help="For a PEFT adapter: its base.  [default: the one that the adapter names]",
    ),
    click.option(
        "--family",
        metavar="NAME",
        help="Models whose past evaluations predict this one's costs.  [default: those of its shape]",
    ),
    click.option(
        "--run",
        "run_id",
        metavar="RUN",
        help="The training run of the checkpoint, for the ledger.",
    ),
    click.option(
        "--step",
        type=int,
        metavar="N",
        help="The training step of the checkpoint; orders `compare`.",
    ),
)
TASKS = (
    click.option(
        "--limit",
        type=float,
        metavar="N",
        help="Samples of each task; below 1, a share of them (0.1 is a tenth).",
    ),
    click.option(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="Examples in each prompt.  [default: the task's own]",
    ),
    click.option(
        "--chat-template/--no-chat-template",
        default=None,
        help="Prompts through the model's chat template.",
    ),
    click.option(
        "--include-path",
        "include_paths",
        multiple=True,
        type=GIVEN_FOLDER,
        help="Folder of lm-eval tasks; repeatable.",
    ),
    click.option(
        "--confirm-unsafe-code",
        is_flag=True,
        help="Let tasks run what the model writes, in the sandbox.",
    ),
)
JUDGE = (
    click.option(
        "--judge-url",
        metavar="URL",
        help="Model-as-judge: an OpenAI-compatible server's base URL, ending in /v1.",
    ),
    click.option(
        "--judge-api-key-env",
        metavar="NAME",
        help="Variable with its key.  [default: OPENAI_API_KEY]",
    ),
    click.option(
        "--judge-requests-per-minute",
        type=float,
        metavar="N",
        help="Requests in any 60 s, at most.  [default: no limit]",
    ),
    click.option(
        "--judge-tokens-per-minute",
        type=float,
        metavar="N",
        help="Tokens in any 60 s, at most.  [default: no limit]",
    ),
    click.option(
        "--judge-concurrency", type=int, metavar="N", help="Requests at a time.  [default: 32]"
    ),
    click.option(
        "--judge-cost-limit",
        type=float,
        metavar="COST",
        help="Most that the judge may cost; needs both prices.  [default: no limit]",
    ),
    click.option(
        "--judge-input-price", type=float, metavar="COST", help="Price of a million prompt tokens."
    ),
    click.option(
        "--judge-output-price", type=float, metavar="COST", help="Price of a million answer tokens."
    ),
)
LIMITS = (
    click.option(
        "--metric-slots",
        type=int,
        metavar="N",
        help="Metrics computed at once on a node.  [default: its cores]",
    ),
    click.option(
        "--max-read-mib-s",
        type=float,
        metavar="N",
        help="Most MiB/s to fetch the next checkpoint during an evaluation.  [default: no limit]",
    ),
    click.option(
        "--linger-s",
        type=float,
        metavar="S",
        help="Seconds that engines keep working after this command ends.  [default: 60]",
    ),
    click.option(
        "--silent-s",
        type=float,
        metavar="S",
        help="Seconds of silence until an engine process is restarted.  [default: 30]",
    ),
)
OUTPUT = click.option(
    "-o", "--output", type=OUTPUT_FOLDER, help="Folder for lm-eval's own files of results."
)
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object.")
JSON_LINES = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object a line, one for each evaluation."
)
NO_PROGRESS = click.option("--no-progress", is_flag=True, help="Do not show the progress.")
SHOWING = (JSON, NO_PROGRESS)
HOW = (*ENGINE, *PLACING, *MODEL, *TASKS, *JUDGE, *LIMITS, OUTPUT)


def takes(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options to a command, in the order of its `--help`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def options_from(place: "Place", how: Mapping[str, Any], **more: Any) -> "EvaluateOptions":
    """Convert the options that were given to `EvaluateOptions`.

    The home and the ledger come from `place`.

    Raises:
        BadUse: an option is not allowed.
    """
    from holdfast.evaluate import EngineSpec, EvaluateOptions, JudgeLimits

    how = {name: value for name, value in how.items() if is_given(value)}
    engine = {name: how.pop(name) for name in EngineSpec.__struct_fields__ if name in how}
    if "options" in engine:
        engine["options"] = dict(_engine_option(option) for option in engine["options"])
    judge = {
        name.removeprefix("judge_"): how.pop(name)
        for name in tuple(how)
        if name.startswith("judge_")
    }
    if judge and "url" not in judge:
        raise BadUse("A judge's limits are given, but no judge. Give --judge-url URL too.")
    how["include_paths"] = tuple(str(path.absolute()) for path in how.get("include_paths", ()))
    if "output" in how:  # a resume may start in another folder
        how["output"] = how["output"].absolute()
    return EvaluateOptions(
        home=place.home,
        ledger=place.ledger,
        engine=EngineSpec(**engine),
        judge=JudgeLimits(**judge) if judge else None,
        **how,
        **more,
    )


def is_given(value: Any) -> bool:
    """Return True if an option was given: its value is neither None nor an empty tuple."""
    return value is not None and value != ()


def _engine_option(option: str) -> tuple[str, str | int | float | bool]:
    name, equals, value = option.partition("=")
    if not equals or not name:
        raise BadUse(
            f"--engine-option {option!r} is not KEY=VALUE. Give one: --engine-option patience_s=900"
        )
    if value in ("true", "false"):
        return name, value == "true"
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            continue
    return name, value
