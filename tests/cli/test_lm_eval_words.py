"""Translation of lm-eval's command lines, most from its documentation."""

import json
import shlex

import pytest
from click.testing import CliRunner

import holdfast.evaluate
from holdfast.cli.eval.lm_eval_words import speaks_lm_eval, translate
from holdfast.cli.main import cli
from holdfast.core.errors import BadUse

HF = ["--engine", "hf"]


def served(url, model):
    return ["--engine", "openai", "--url", url, "--model", model, "--model-name", model]


# README.md, docs/interface.md and docs/API_guide.md of lm-evaluation-harness 0.4.13.
DOCUMENTED = [
    ("--model hf --model_args pretrained=EleutherAI/gpt-j-6B --tasks hellaswag --device cuda:0 --batch_size 8",
     ["hellaswag"], ["--model", "EleutherAI/gpt-j-6B", *HF, "--device=cuda:0"]),
    ("--model hf --model_args pretrained=EleutherAI/pythia-160m,revision=step100000,dtype=float --tasks lambada_openai,hellaswag --device cuda:0 --batch_size 8",  # noqa: E501
     ["lambada_openai", "hellaswag"],
     ["--model", "EleutherAI/pythia-160m@step100000", *HF, "--dtype=float32", "--device=cuda:0"]),
    ("--model hf --model_args pretrained=EleutherAI/pythia-160m,dtype=float --tasks lambada_openai --batch_size auto:4",
     ["lambada_openai"], ["--model", "EleutherAI/pythia-160m", *HF, "--dtype=float32"]),
    ("run --model hf --model_args pretrained=gpt2 dtype=float32 --tasks hellaswag",
     ["hellaswag"], ["--model", "gpt2", *HF, "--dtype=float32"]),
    ("run --model vllm --model_args pretrained=EleutherAI/gpt-j-6B --tasks arc_easy arc_challenge --num_fewshot 5",
     ["arc_easy", "arc_challenge"], ["--model", "EleutherAI/gpt-j-6B", "--engine", "vllm", "--num-fewshot=5"]),
    ("run --model hf --model_args pretrained=gpt2 --tasks lambada --gen_kwargs temperature=0.8 top_p=0.95",
     ["lambada"], ["--model", "gpt2", *HF]),
    ("--model vllm --model_args pretrained=m,tensor_parallel_size=2,dtype=auto,gpu_memory_utilization=0.8,data_parallel_size=4 --tasks lambada_openai --batch_size auto",  # noqa: E501
["lambada_openai"],
     ["--model", "m", "--engine", "vllm", "--engine-option=arguments=--gpu-memory-utilization 0.8", "--tp=2",
      "--dtype=auto", "--engines-per-node=4"]),
    ("--model local-completions --tasks gsm8k --model_args model=facebook/opt-125m,base_url=http://localhost:8000/v1/completions,num_concurrent=1,max_retries=3,tokenized_requests=False",
     ["gsm8k"], [*served("http://localhost:8000/v1", "facebook/opt-125m"), "--max-batch=1"]),
    ("--model local-chat-completions --tasks gsm8k --model_args model=m,base_url=http://localhost:8000/v1/chat/completions --apply_chat_template",  # noqa: E501
     ["gsm8k"], served("http://localhost:8000/v1", "m")),
    ("--model openai-chat-completions --model_args model=o4 --tasks gsm8k --apply_chat_template",
     ["gsm8k"], served("https://api.openai.com/v1", "o4")),
    ("--model openai-completions --model_args model=davinci-002 --tasks lambada_openai,hellaswag",
     ["lambada_openai", "hellaswag"], served("https://api.openai.com/v1", "davinci-002")),
    ("--model hf --model_args pretrained=m --tasks mmlu --num_fewshot 5 --fewshot_as_multiturn --apply_chat_template",
     ["mmlu"], ["--model", "m", *HF, "--num-fewshot=5"]),
    ("--model hf --model_args pretrained=m --tasks hellaswag --log_samples --output_path results",
     ["hellaswag"], ["--model", "m", *HF, "--output=results"]),
    ("--model hf --model_args pretrained=m --tasks hellaswag --limit 10",
     ["hellaswag"], ["--model", "m", *HF, "--limit=10.0"]),
    ("--model hf --model_args pretrained=m --tasks mine --include_path /path/to/yaml",
     ["mine"], ["--model", "m", *HF, "--include-path=/path/to/yaml"]),
    ("--model hf --model_args pretrained=m --tasks humaneval --confirm_run_unsafe_code",
     ["humaneval"], ["--model", "m", *HF, "--confirm-unsafe-code"]),
    ("--model hf --model_args pretrained=m --tasks hellaswag --use_cache /tmp/cache --seed 0,None,8,52",
     ["hellaswag"], ["--model", "m", *HF]),
    ("--model hf --model_args pretrained=m --tasks arc_easy --predict_only", ["arc_easy"], ["--model", "m", *HF]),
    ("--model hf --model_args pretrained=m --tasks arc_easy --check_integrity --write_out --show_config",
     ["arc_easy"], ["--model", "m", *HF]),
    ("-M hf -a pretrained=m -t gsm8k -f 8 -L 0.5 -b 16 -o out -s", ["gsm8k"],
     ["--model", "m", *HF, "--limit=0.5", "--num-fewshot=8", "--output=out"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "tasks", "native"), DOCUMENTED)
def test_a_line_of_theirs_runs_as_it_stands(line, tasks, native, tmp_path, monkeypatch):
    words = shlex.split(line)
    found = translate(words)
    assert [entry.name for entry in found.suite.entries] == tasks
    assert found.native == native
    assert (
        translate([word.replace("_", "-") if word.startswith("--") else word for word in words])
        == found
    )

    asked = []
    monkeypatch.setattr(holdfast.evaluate, "evaluate", lambda *a, **_: asked.append(a) or 1 / 0)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yaml").mkdir()
    words = [word.replace("/path/to/yaml", "yaml") for word in words]
    for command in (["lm_eval"], ["run"] if words[0] != "run" else []):
        if command:
            done = CliRunner().invoke(cli, ["eval", *command, *words])
            assert isinstance(done.exception, ZeroDivisionError), done.output + repr(done.exception)
    assert {model for _suite, model in asked} == {native[native.index("--model") + 1]}
    assert all([entry.name for entry in suite.entries] == tasks for suite, _model in asked)


def test_what_shapes_prompts_goes_to_the_tasks(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("task: own")
    found = translate(
        [
            "--model",
            "hf",
            "--model_args",
            "pretrained=m,add_bos_token=True",
            "--tasks",
            f"arc_easy,{own}",
            "--system_instruction",
            "Be brief.",
            "--apply_chat_template",
            "tool",
            "--seed",
            "7",
            "-x",
            "--gen_kwargs",
            "temperature=0.8",
            "--samples",
            '{"arc_easy": [0, 3]}',
        ]
    )
    first, second = found.suite.entries
    assert (first.system_instruction, first.chat_template) == ("Be brief.", "tool")
    assert first.options == {
        "model_args": {"add_bos_token": True}, "gen_kwargs": {"temperature": 0.8}, "predict_only": True,
        "random_seed": 7, "numpy_random_seed": 7, "torch_random_seed": 7, "fewshot_random_seed": 7, "samples": [0, 3],
    }  # fmt: skip
    assert second.name == str(own)
    assert "samples" not in second.options


def test_holdfasts_own_words_stand_beside_theirs():
    words = shlex.split("--tasks a --model ./m --mode free --on slurm --nodes 2")
    assert speaks_lm_eval(words)
    assert translate(words).native == [
        "--mode",
        "free",
        "--on",
        "slurm",
        "--nodes",
        "2",
        "--model",
        "./m",
    ]
    served_here = "--engine openai --url http://h:1/v1 --model-name tiny"
    found = translate(shlex.split(f"--tasks a --model tiny {served_here}"))
    assert found.native == [*served_here.split(), "--model", "tiny"]
    found = translate(["--tasks", "a", "--model", "hf", "--model_args", "pretrained=m,peft=x"])
    assert found.native == ["--model", "x", "--base", "m", "--engine", "hf"]
    folders = ["--include-path=x", "--include-path=y"]
    found = translate(["--tasks", "a", "--model", "m", "--model_args", "dtype=float", *folders])
    assert found.native == ["--model", "m", "--dtype=float32", *folders]
    assert not speaks_lm_eval(shlex.split("--suite a --model ./m --num-fewshot 2 --limit 3"))


def test_what_is_always_done_is_said():
    found = translate(
        shlex.split(
            "--model_args pretrained=m --tasks a --log_samples --use_cache x --batch_size 4"
        )
    )
    assert [sentence.split(";")[0].split(":")[0] for sentence in found.said] == [
        "Samples are always logged", "Every answer is always kept and reused", "Holdfast chooses batch sizes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "way"),
    [
        ("--model hf --tasks a", "pretrained=FOLDER"),
        ("--model local-completions --model_args base_url=http://h:1/v1 --tasks a", "model=NAME"),
        ("--model_args pretrained=m,load_in_4bit=True --tasks a", "local-completions"),
        ("--model_args pretrained=m,parallelize=True --tasks a", "--model vllm"),
        ("--model sglang --model_args pretrained=m --tasks a", "--model local-completions"),
        ("--model_args pretrained=m --tasks a --wandb_args project=x", "-o FOLDER"),
        ("--config c.yaml", "TOML"),
        ("--model_args pretrained=m --system_instruction x", "needs --tasks"),
        ('--model_args pretrained=m --tasks a --samples {"b":[1]}', "not in --tasks"),
        ("--model_args pretrained=m --tasks b --samples {'b':3}", "--samples/-E cannot be"),
        ('--model_args pretrained=m --tasks b --samples {"b":3}', "no JSON object of tasks"),
        ('--model_args pretrained=m --tasks b --samples {"b":["x"]}', "no JSON object of tasks"),
        ("--model_args pretrained=m --tasks b --samples no.json", "no JSON object of tasks"),
        ("--model_args pretrained=m --tasks b --seed x", "--seed cannot be 'x'. See"),
        ("--tasks a --suite nightly.toml --model ./m", "Give one of them"),
        ("validate --tasks a", "lm-eval validate --tasks a"),
        ("--model_args pretrained=m --tasks", "expected at least one argument"),
    ],
)
def test_what_is_not_supported_is_named_with_the_way(line, way):
    with pytest.raises(BadUse) as refused:
        translate(line.split())
    assert way in str(refused.value)


def test_tasks_are_named_by_globs_and_listed(monkeypatch):
    from holdfast.cli.eval import lm_eval_words

    monkeypatch.setattr(
        lm_eval_words, "task_names", lambda folders: ["arc_c", "arc_e", "mmlu", *folders]
    )
    found = translate(shlex.split("--model_args pretrained=m --tasks arc_*,mmlu"))
    assert [entry.name for entry in found.suite.entries] == ["arc_c", "arc_e", "mmlu"]
    with pytest.raises(BadUse, match="No task of lm-eval is named like"):
        translate(shlex.split("--model_args pretrained=m --tasks zz*"))
    everything = ["arc_c", "arc_e", "mmlu", "own"]
    assert translate(shlex.split("--tasks list --include_path own")).listing == everything
    assert translate(shlex.split("ls tasks --include_path own")).listing == everything
    printed = CliRunner().invoke(cli, ["eval", "run", "--tasks", "list", "--json"]).stdout
    assert json.loads(printed)["tasks"] == ["arc_c", "arc_e", "mmlu"]
