"""Every form of `--model` through the whole system: one set of weights, so the same scores, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end_world import World

sys.path.insert(0, str(Path(__file__).parent / "weights"))  # the storage of its tests
from weights_world import Storage

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]  # real engines, real harness
TASKS = ("t_score", "t_generate")

# A training script: it saves what it trains, under transformers' names and under its own.
TRAIN = """
import sys

import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

import holdfast

hf, folder = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(hf)
optimizer = torch.optim.AdamW(model.parameters())
sum(parameter.sum() for parameter in model.parameters()).backward()
optimizer.zero_grad()  # it has seen the parameters, and leaves them as they are
checkpointer = holdfast.Checkpointer(f"{folder}/holdfast", every=1)
checkpointer.save(7, {"model": model, "optimizer": optimizer})
checkpointer.close()
dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/dcp")
own = {name.removeprefix("model.").replace("layers", "blocks"): value for name, value in model.state_dict().items()}
for name in [name for name in own if name.endswith("up_proj.weight")]:
    own[name] = own[name].T.contiguous()
own = {f"net.{name}": value for name, value in own.items()}
dcp.save(own, checkpoint_id=f"{folder}/own")
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
    folder = tmp_path_factory.mktemp("trained")
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(e2e.model()), str(folder)],
        env=e2e.environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "names.toml").write_text(NAMES)
    return folder


@pytest.fixture
def check(e2e: World, stock, tmp_path):
    """A run has stock lm-eval's scores of the Hugging Face folder."""

    def run(*words: object, **environment: str) -> dict:
        said = e2e.json(
            "run", "--suite", e2e.suite(TASKS, (), name="two"), "--threads", 1, *words,
            home=tmp_path / "home", **environment,
        )  # fmt: skip
        assert said["state"] == "done", said["errors"]
        found = said["results"]["results"]
        expected = {task: stock[0]["results"][task] for task in TASKS}
        assert json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
        return said

    return run


def test_a_holdfast_checkpoint(check, e2e, trained):
    [step] = (trained / "holdfast").glob("step-*")
    check("--model", step, "--hf-config", e2e.model())


def test_a_dcp_folder_and_one_whose_names_are_its_own(check, e2e, trained):
    check("--model", trained / "dcp", "--hf-config", e2e.model())
    check("--model", trained / "own", "--hf-config", e2e.model(), "--name-map", trained / "names.toml")
    _, err = e2e.run(
        "run", "--suite", "t_score", "--include-path", e2e.tasks, "--model", trained / "own", "--hf-config",
        e2e.model(), code=2,
    )  # fmt: skip
    assert "Give a name map" in err.splitlines()[-1]


def test_a_folder_over_http_and_in_a_bucket(check, e2e):
    storage = Storage(e2e.model().parent.parent, buckets=True)
    try:
        name = e2e.model().relative_to(storage.folder)
        check("--model", f"{storage.url}/{name}")
        assert any(path.endswith("model.safetensors") for _, path, _ in storage.requests)
        check(
            "--model", f"s3://{name}", AWS_ENDPOINT_URL=storage.url, AWS_ACCESS_KEY_ID="key",
            AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1", AWS_ALLOW_HTTP="true",
        )  # fmt: skip
    finally:
        storage.close()


def test_checkpoints_of_a_run_as_a_stream(e2e, stock, trained, tmp_path):
    out, _ = e2e.run(
        "watch", trained / "holdfast", "--once", "--suite", e2e.suite(TASKS, (), name="two"), "--hf-config",
        e2e.model(), "--threads", 1, "--json",
        home=tmp_path / "home",
    )  # fmt: skip
    [said] = [json.loads(line) for line in out.splitlines()]
    assert said["step"] == 7
    assert said["results"]["results"] == {task: stock[0]["results"][task] for task in TASKS}
