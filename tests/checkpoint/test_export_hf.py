"""Test that a trained model, its checkpoint, and its Hugging Face folder are equal bit by bit."""

import json
import math
import os
import pickle
import signal
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from forked_work import exit_code_of
from safetensors import safe_open
from started_ranks import RANK, run_ranks

from deferred import Deferred, needs
from holdfast import Checkpointer
from holdfast.checkpoint.convert.export_hf import export_safetensors
from holdfast.checkpoint.convert.inspect import open_for_reading
from holdfast.checkpoint.convert.safetensors import Conversion
from holdfast.core.errors import BadUse, CheckpointError, NotFound

transformers = Deferred("transformers")
pytestmark = needs("transformers", "transformers is not installed")
TOKENS = torch.arange(24).reshape(2, 12)


def llama(*, tied=False, dtype="float32"):
    return transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=tied,
        dtype=dtype,
    )


def gpt2():
    return transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0
    )


def mixtral():
    return transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        num_local_experts=2,
    )


def trained(config):
    """Return a model after a step of training, and its optimizer."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(TOKENS).logits.float().square().mean().backward()
    optimizer.step()
    return model.eval(), optimizer


def config_folder(tmp_path, config):
    config.save_pretrained(tmp_path / "config")
    (tmp_path / "config/tokenizer.json").write_text("{}")
    (tmp_path / "config/pytorch_model.bin").write_bytes(b"not to be copied")
    (tmp_path / "config/model.py").write_text("not to be copied")
    return tmp_path / "config"


def saved(tmp_path, state):
    with Checkpointer(tmp_path / "checkpoints", every=1) as checkpointer:
        return Path(checkpointer.save(1, state).result())


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True
    ).eval()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_same_logits(model, folder):
    loaded = load(folder)
    with torch.no_grad():
        ours, theirs = model(TOKENS).logits, loaded(TOKENS).logits
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize(
    "make_config",
    [llama, partial(llama, tied=True), partial(llama, dtype="bfloat16"), gpt2, mixtral],
    ids=["llama", "tied", "bfloat16", "gpt2", "mixtral"],
)
def test_the_folder_gives_the_logits_of_the_trained_model_bit_for_bit(tmp_path, make_config):
    config = make_config()
    model, optimizer = trained(config)
    checkpoint = saved(tmp_path, {"model": model, "optimizer": optimizer, "step": 1})
    done = []
    exported = export_safetensors(
        checkpoint,
        tmp_path / "out",
        hf_config=config_folder(tmp_path, config),
        progress=lambda *both: done.append(both),
    )
    assert_same_logits(model, tmp_path / "out")
    assert done[-1][0] == done[-1][1]
    assert done == sorted(done)
    assert exported.files == ["model.safetensors"]
    assert names_in(tmp_path / "out") == ["config.json", "model.safetensors", "tokenizer.json"]
    assert names_in(tmp_path) == ["checkpoints", "config", "out"]


def test_lm_eval_scores_the_folder_as_the_trained_model(tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models, pre_tokenizers

    model, _ = trained(llama())
    hf_config = config_folder(tmp_path, llama())
    words = [f"w{number}" for number in range(63)]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate([*words, "</s>"])}, "</s>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>"
    ).save_pretrained(hf_config)
    export_safetensors(saved(tmp_path, {"model": model}), tmp_path / "out", hf_config=hf_config)
    harness = HFLM(pretrained=str(tmp_path / "out"), device="cpu", batch_size=1, dtype="auto")
    asked = Instance("loglikelihood", {}, ("w1 w2 w3", " w4 w5"), 0)
    ((score, _is_greedy),) = harness.loglikelihood([asked], disable_tqdm=True)
    with torch.no_grad():
        told = model(torch.tensor([[1, 2, 3, 4]])).logits.log_softmax(-1)
    assert score == (told[0, 2, 4] + told[0, 3, 5]).item()


def test_large_models_are_cut_into_files_with_an_index(tmp_path):
    config = llama()
    model, _ = trained(config)
    checkpoint = saved(tmp_path, {"model": model})
    hf_config = config_folder(tmp_path, config)
    exported = export_safetensors(
        checkpoint, tmp_path / "out", hf_config=hf_config, shard_bytes=20_000
    )
    assert_same_logits(model, tmp_path / "out")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    names = set()
    for file in exported.files[:-1]:
        assert (tmp_path / "out" / file).stat().st_size < 20_000 + 3000
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            inside = set(opened.keys())
        assert all(index["weight_map"][name] == file for name in inside)
        names |= inside
    assert names == set(model.state_dict()) == set(index["weight_map"])
    assert len(exported.files) > 3
    assert exported.tensors == len(names)
    assert exported.size_bytes == sum(
        (tmp_path / "out" / file).stat().st_size for file in exported.files
    )


def test_what_a_name_map_renames_and_turns_around(tmp_path):
    """A GPT-2 with nn.Linear layers, whose weights are transposed in transformers' Conv1D."""
    config = gpt2()
    model, _ = trained(config)
    own = {}
    for name, tensor in model.state_dict().items():
        new = name.replace("transformer.h.", "blocks.").replace("transformer.wte", "tokens")
        is_linear = tensor.dim() == 2 and "blocks" in new
        own[new] = tensor.t().contiguous() if is_linear else tensor
    own["mask"] = torch.ones(3)
    checkpoint = saved(tmp_path, {"net": own})
    (tmp_path / "map.toml").write_text(r"""
        prefix = "net."
        drop = ["mask"]
        transposed = ["blocks.{n}.{part}.{layer}.weight"]
        [names]
        "tokens.weight" = "transformer.wte.weight"
        [patterns]
        'blocks\.(\d+)\.(.*)' = 'transformer.h.\1.\2'
    """)
    hf_config = config_folder(tmp_path, config)
    export_safetensors(
        checkpoint, tmp_path / "out", hf_config=hf_config, name_map=tmp_path / "map.toml"
    )
    assert_same_logits(model, tmp_path / "out")


def test_tied_tensors_that_differ_are_not_silently_made_one(tmp_path):
    config = llama(tied=True)
    model, _ = trained(config)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"][3, 3] += 1
    checkpoint = saved(tmp_path, {"model": state})
    hf_config = config_folder(tmp_path, config)
    with pytest.raises(
        CheckpointError, match=r"ties 'model.lm_head.weight' and .* but they differ"
    ):
        export_safetensors(checkpoint, tmp_path / "out", hf_config=hf_config)
    assert names_in(tmp_path) == ["checkpoints", "config"]


SHARDED = """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
state = torch.load(folder + "/state.pt")
placed = {
    name: distribute_tensor(tensor, mesh, [Shard(tensor.dim() - 1) if tensor.dim() == 2 else Shard(0)])
    for name, tensor in state.items()
}
dcp.save({"module": {"_orig_mod": placed}}, checkpoint_id=folder + "/sharded")
dist.destroy_process_group()
"""


def test_tensors_sharded_over_ranks_come_out_whole(tmp_path):
    config = llama()
    model, _ = trained(config)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    (tmp_path / "rank.py").write_text(SHARDED)
    run_ranks(2, tmp_path / "rank.py", tmp_path, RANK)
    assert len(list((tmp_path / "sharded").glob("*.distcp"))) == 2
    (tmp_path / "state.pt").unlink()
    export_safetensors(
        tmp_path / "sharded", tmp_path / "out", hf_config=config_folder(tmp_path, config)
    )
    assert_same_logits(model, tmp_path / "out")


@pytest.fixture
def small(tmp_path):
    config = llama()
    model, optimizer = trained(config)
    return saved(tmp_path, {"model": model, "optimizer": optimizer}), config_folder(
        tmp_path, config
    )


def test_only_what_the_model_needs_is_read(small):
    checkpoint, hf_config = small
    metadata = open_for_reading(checkpoint).metadata
    from holdfast.checkpoint.convert.safetensors import settle_conversion
    from holdfast.checkpoint.state.name_map import NameMap

    conversion = settle_conversion(metadata, hf_config, NameMap(), checkpoint="c")
    (ranges,) = conversion.ranges(metadata).values()
    needed = sum(
        metadata.storage_data[index].length
        for index in metadata.storage_data
        if index.fqn.startswith("model.")
    )
    assert sum(size_bytes for _, size_bytes in ranges) == needed
    assert Conversion.from_text(conversion.as_text()) == conversion


def test_a_damaged_checkpoint_is_not_exported(small, tmp_path):
    checkpoint, hf_config = small
    (data,) = checkpoint.glob("*.distcp")
    content = bytearray(data.read_bytes())
    stored = open_for_reading(checkpoint).metadata.storage_data
    norm = next(each for index, each in stored.items() if index.fqn == "model.model.norm.weight")
    content[norm.offset + norm.length // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        export_safetensors(checkpoint, tmp_path / "out", hf_config=hf_config)
    data.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"bytes instead of"):
        export_safetensors(checkpoint, tmp_path / "out", hf_config=hf_config)
    (checkpoint / "holdfast.json").unlink()  # as a checkpoint of PyTorch alone
    with pytest.raises(CheckpointError, match=r"lies beyond the end"):
        export_safetensors(checkpoint, tmp_path / "out", hf_config=hf_config)
    assert not (tmp_path / "out").exists()


def test_a_tensor_of_which_a_shard_was_never_written(small, tmp_path):
    checkpoint, hf_config = small
    metadata = open_for_reading(checkpoint).metadata
    tensor = metadata.state_dict_metadata["model.model.norm.weight"]
    tensor.chunks[0].sizes = torch.Size([math.prod(tensor.size) // 2])
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    (checkpoint / "holdfast.json").unlink()
    with pytest.raises(CheckpointError, match="16 of its 32 values were written"):
        export_safetensors(checkpoint, tmp_path / "out", hf_config=hf_config)


def test_a_part_that_was_never_written_is_a_sentence(small, tmp_path):
    checkpoint, hf_config = small
    metadata = open_for_reading(checkpoint).metadata
    metadata.storage_data = {
        index: stored
        for index, stored in metadata.storage_data.items()
        if index.fqn != "model.model.norm.weight"
    }
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    (checkpoint / "holdfast.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"'model.model.norm.weight' was never written. Take another"
    ):
        export_safetensors(checkpoint, tmp_path / "out", hf_config=hf_config)


def test_what_others_left_beside_it_is_no_matter(small, tmp_path):
    checkpoint, hf_config = small
    (tmp_path / ".out[1].0123456789abcdef.tmp").touch()
    (tmp_path / ".out[1].01234567.tmp").mkdir()
    export_safetensors(checkpoint, tmp_path / "out[1]", hf_config=hf_config)
    assert (tmp_path / ".out[1].0123456789abcdef.tmp").exists()
    assert not (tmp_path / ".out[1].01234567.tmp").exists()


def test_metadata_that_would_run_code_is_refused(small, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    checkpoint, hf_config = small
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"\.metadata has \d+ bytes instead of"):
        export_safetensors(checkpoint, tmp_path / "out", hf_config=hf_config)
    (checkpoint / "holdfast.json").unlink()
    with pytest.raises(CheckpointError, match="made to run code"):
        export_safetensors(checkpoint, tmp_path / "out", hf_config=hf_config)
    assert not (tmp_path / "evil").exists()


def test_wrong_use_is_a_sentence_with_the_next_step(small, tmp_path):
    checkpoint, hf_config = small
    out = tmp_path / "out"
    (tmp_path / "there").mkdir()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/config.json").write_text('{"model_type": "no_such_model"}')
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom/config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}'
    )
    for error, said, arguments in [
        (BadUse, "exists already", (checkpoint, tmp_path / "there", hf_config)),
        (NotFound, "Make it first", (checkpoint, tmp_path / "no/out", hf_config)),
        (NotFound, "give one of them, such as", (checkpoint.parent, out, hf_config)),
        (NotFound, "There is no checkpoint", (tmp_path / "nothing", out, hf_config)),
        (NotFound, "There is no config.json in", (checkpoint, out, tmp_path)),
        (BadUse, "transformers cannot make a model of", (checkpoint, out, tmp_path / "strange")),
        (BadUse, "transformers cannot make a model of", (checkpoint, out, tmp_path / "custom")),
    ]:
        with pytest.raises(error, match=r"\.$") as raised:
            export_safetensors(arguments[0], arguments[1], hf_config=arguments[2])
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)
    other = llama()
    other.vocab_size = 65
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(
        BadUse, match=r"has the shape 64x32, the model's 'model.embed_tokens.weight' 65x32"
    ):
        export_safetensors(checkpoint, out, hf_config=tmp_path / "other")


def die_in_the_middle(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_export_killed_in_the_middle_leaves_nothing_that_looks_like_one(small, tmp_path):
    checkpoint, hf_config = small
    options = {"hf_config": hf_config, "progress": die_in_the_middle}
    killed = exit_code_of(export_safetensors, checkpoint, tmp_path / "out", **options)
    assert killed == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.glob(".out.*.tmp"))) == 1
    export_safetensors(checkpoint, tmp_path / "out", hf_config=hf_config)
    assert not list(tmp_path.glob(".out.*.tmp")), "cleared by the next"
    load(tmp_path / "out")


def test_the_command_says_what_it_wrote(small, tmp_path):
    from click.testing import CliRunner

    from holdfast.cli.main import cli

    checkpoint, hf_config = small
    command = [
        "checkpoint",
        "export",
        str(checkpoint),
        "--hf-config",
        str(hf_config),
        "--safetensors",
    ]
    with warnings.catch_warnings():
        result = CliRunner().invoke(
            cli, [*command, str(tmp_path / "a"), "--json"], standalone_mode=False
        )
    said = json.loads(result.stdout)
    assert (said["schema"], said["version"], said["files"]) == (
        "holdfast.export",
        1,
        ["model.safetensors"],
    )
    assert said["size_bytes"] == (tmp_path / "a/model.safetensors").stat().st_size
    result = CliRunner().invoke(cli, [*command, str(tmp_path / "b")], standalone_mode=False)
    assert (
        result.stdout == f"21 tensors, {said['size_bytes'] / 2**20:.1f} MiB, in {tmp_path / 'b'}\n"
    )
