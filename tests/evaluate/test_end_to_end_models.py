"""Evaluate every form of a model, an adapter, and a training run's checkpoints as they come."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
from click.testing import CliRunner
from end_to_end_world import HOLDFAST, World, answers, entry, leftovers

from holdfast.cli.main import cli
from holdfast.core.errors import BadUse
from holdfast.evaluate.weights.stamp import SETTLED_AFTER_S

sys.path.insert(0, str(Path(__file__).parent / "weights"))  # the storage of its tests
from weights_world import storage_over_http

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
    pytest.mark.timeout(1200),  # a test does much, on a machine that runs other tests
]  # real engines, real harness
TASKS = ("t_score", "t_generate")

# A training script, which saves its initial weights under other names and then trains.
TRAIN = """
import sys

import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

import holdfast

hf, folder = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(hf)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
own = {name.removeprefix("model.").replace("layers", "blocks"): value for name, value in model.state_dict().items()}
for name in [name for name in own if name.endswith("up_proj.weight")]:
    own[name] = own[name].T.contiguous()
own = {f"net.{name}": value for name, value in own.items()}
dcp.save({**own, "optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/own")

run = holdfast.attach()
batch = torch.arange(3, 35)[None]
with holdfast.Checkpointer(f"{folder}/holdfast", every=1) as checkpointer:
    for step in (1, 2):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(step, loss=loss)
        checkpointer.save(step, {"model": model, "optimizer": optimizer})
"""
NAMES = """\
prefix = "net."
transposed = ["blocks.{n}.mlp.up_proj.weight"]

[names]
"embed_tokens.weight" = "model.embed_tokens.weight"
"norm.weight" = "model.norm.weight"
"blocks.{n}.input_layernorm.weight" = "model.layers.{n}.input_layernorm.weight"
"blocks.{n}.post_attention_layernorm.weight" = "model.layers.{n}.post_attention_layernorm.weight"
"blocks.{n}.self_attn.q_proj.weight" = "model.layers.{n}.self_attn.q_proj.weight"
"blocks.{n}.self_attn.k_proj.weight" = "model.layers.{n}.self_attn.k_proj.weight"
"blocks.{n}.self_attn.v_proj.weight" = "model.layers.{n}.self_attn.v_proj.weight"
"blocks.{n}.self_attn.o_proj.weight" = "model.layers.{n}.self_attn.o_proj.weight"
"blocks.{n}.mlp.gate_proj.weight" = "model.layers.{n}.mlp.gate_proj.weight"
"blocks.{n}.mlp.up_proj.weight" = "model.layers.{n}.mlp.up_proj.weight"
"blocks.{n}.mlp.down_proj.weight" = "model.layers.{n}.mlp.down_proj.weight"
"""


@pytest.fixture(scope="module")
def trained(e2e: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the script by `holdfast run` with an evaluation; return checkpoints and home."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "train.py").write_text(TRAIN)
    (folder / "names.toml").write_text(NAMES)
    wish = ["--eval-suite", e2e.suite(TASKS, (), name="two"), "--eval-option=--threads=1"]
    wish += [f"--eval-option=--hf-config={e2e.model()}"]
    job = [sys.executable, folder / "train.py", e2e.model(), folder]
    done = subprocess.run(
        [*HOLDFAST, "run", "--name", "trained", "--nproc", "1", *map(str, [*wish, "--", *job])],
        env=e2e.environment(folder / "home"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "holdfast: the evaluation" not in done.stderr, "it has nothing to say of"
    assert leftovers(folder) == []
    return folder


@pytest.fixture
def check(e2e: World, tmp_path):
    """Check that an engine receives the Hugging Face folder bit for bit, from any form."""
    suite = tmp_path / "one.toml"
    suite.write_text(entry("a"))

    def run(*words: object, **more: str) -> dict:
        copy = tmp_path / "copy"
        engine = ["--engine", "copying_engine:CopyingEngine", "--engine-option", f"copy={copy}"]
        said = e2e.json("run", "--suite", suite, *engine, *words, home=tmp_path / "home", **more)
        assert said["state"] == "done", said["errors"]
        assert contents(copy) == contents(e2e.model())
        shutil.rmtree(copy)
        return said

    return run


def contents(folder: Path) -> dict[str, object]:
    """Return files by name, and the weights by tensor."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    tensors = safetensors.torch.load(files.pop("model.safetensors"))
    return {
        **files,
        **{name: (tensor.shape, tensor.numpy().tobytes()) for name, tensor in tensors.items()},
    }


def test_the_checkpoints_of_a_run_are_scored_as_what_they_export_to(e2e, stock_lm_eval, trained):
    steps = (1, 2)
    exported = [trained / f"exported-{step}" for step in steps]
    for step, folder in zip(steps, exported, strict=True):
        [checkpoint] = (trained / "holdfast").glob(f"step-*{step}")
        words = [
            "checkpoint",
            "export",
            checkpoint,
            "--safetensors",
            folder,
            "--hf-config",
            e2e.model(),
        ]
        CliRunner().invoke(
            cli, list(map(str, words)), standalone_mode=False, catch_exceptions=False
        )
    expected = [found["results"] for [found] in stock_lm_eval([(TASKS, False)], *exported)]
    assert expected[0] != expected[1]

    home = trained / "home"
    evaluations = json.loads(e2e.look("ls", "--run", "trained", "--json", home=home))["evaluations"]
    found = {
        one["step"]: json.loads((Path(one["folder"]) / "results.json").read_text())
        for one in evaluations
    }
    assert sorted(found) == list(steps)
    for step, scores in zip(steps, expected, strict=True):
        assert json.dumps(found[step]["results"]["results"], sort_keys=True) == json.dumps(
            scores, sort_keys=True
        )

    comparison = json.loads(e2e.look("compare", "--run", "trained", "--json", home=home))
    assert comparison["labels"] == ["step 1", "step 2"]
    rows = {(row["task"], row["metric"]): row["values"] for row in comparison["rows"]}
    perplexity = "perplexity,none"
    assert rows["t_score", perplexity] == [scores["t_score"][perplexity] for scores in expected]


def test_a_dcp_folder_whose_names_are_its_own(check, e2e, trained):
    own = ["--model", trained / "own", "--hf-config", e2e.model()]
    check(*own, "--name-map", trained / "names.toml")
    with pytest.raises(BadUse, match="Give a name map"):
        e2e.look("run", "--suite", "t_score", *own, home=trained)


def test_storage_over_http_and_a_bucket_where_a_third_of_reads_fail(check, e2e):
    model = e2e.model()
    size_bytes = sum(path.stat().st_size for path in model.iterdir())
    # config.json is read once more, before any node starts: to see that the model continues text.
    sent_bytes = size_bytes + (model / "config.json").stat().st_size
    folder = model.parent.parent
    name = model.relative_to(folder)
    with storage_over_http(folder, failing=0.3, buckets=True) as storage:
        said = check("--model", f"{storage.url}/{name}")
        assert storage.failed > 5
        assert said["remote_bytes"] == size_bytes
        assert storage.sent_bytes == sent_bytes, "each byte once, also by the storage's count"
        said = check(
            "--model", f"s3://{name}", AWS_ENDPOINT_URL=storage.url, AWS_ACCESS_KEY_ID="key",
            AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1", AWS_ALLOW_HTTP="true",
        )  # fmt: skip
        assert said["remote_bytes"] == size_bytes
        assert storage.sent_bytes == 2 * sent_bytes


@pytest.fixture(scope="module")
def adapter(e2e, tmp_path_factory):
    """Make an adapter, as a training job saves it, that names its base."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(e2e.model()), config)
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    # Files that were just written cannot be recognised by their times.
    newest_s = max(file.stat().st_ctime for file in folder.iterdir())
    while time.time() < newest_s + SETTLED_AFTER_S:
        time.sleep(0.1)
    return folder


def engine_logs(home, evaluation):
    return sorted(path.name for path in (home / "evaluations" / evaluation / "logs").glob("node-*"))


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)  # peft 0.21 reads it of transformers 5.23
def test_an_adapter_has_the_scores_of_stock_and_is_known_the_second_time(
    e2e, stock_lm_eval, adapter, tmp_path
):
    base, home = e2e.model(), tmp_path / "home"
    [[adapted], [plain]] = stock_lm_eval([(TASKS, False)], f"{base}+{adapter}", base)
    assert adapted["results"] != plain["results"]
    names = ["--tasks", ",".join(TASKS), "--include_path", e2e.tasks, "--device", "cpu"]
    lm_eval = ["--model_args", f"pretrained={base},peft={adapter}", *names]
    theirs = ["run", "--model", "hf", *lm_eval, "--threads", 1, "--mode", "exact"]
    first = e2e.json(*theirs, "--id", "first", home=home)
    assert json.dumps(first["results"]["results"], sort_keys=True) == json.dumps(
        adapted["results"], sort_keys=True
    )
    adapter_bytes = sum(
        (adapter / f"adapter_{name}").stat().st_size
        for name in ("config.json", "model.safetensors")
    )
    base_bytes = sum(path.stat().st_size for path in base.iterdir())
    assert first["remote_bytes"] == base_bytes + adapter_bytes
    assert engine_logs(home, "first") == ["node-0-0.log"]

    own = ["run", "--suite", ",".join(TASKS), "--include-path", e2e.tasks, "--model", adapter]
    own += ["--device", "cpu", "--threads", 1, "--id", "again"]
    out, _ = e2e.run(*own, home=home)
    assert "Nothing had to be run: all answers were known." in out
    assert engine_logs(home, "again") == []
    assert answers(home / "evaluations" / "again") == 0
    again = json.loads((home / "evaluations" / "again" / "results.json").read_text())
    assert again["results"]["results"] == first["results"]["results"]
    assert (again["digest"], again["remote_bytes"]) == (first["digest"], 0)
