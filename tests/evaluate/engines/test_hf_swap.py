"""Check swaps into a running engine: the bits of a fresh load, or a refusal without changes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.hf.engine import TransformersEngine
from holdfast.evaluate.types.engine import EngineSpec, SwapRefused
from holdfast.evaluate.types.requests import Request, Sampling, pack_tokens

SPEC = EngineSpec(device="cpu", threads=1)


def loaded(folder, spec=SPEC):
    engine = TransformersEngine(spec)
    engine.load(folder)
    return engine


def answers(engine):
    requests = [
        Request(
            kind="loglikelihood", prompt=pack_tokens([5, 9, 3]), continuation=pack_tokens([4, 4])
        ),
        Request(
            kind="generate", prompt=pack_tokens([5, 9, 3]), sampling=Sampling(max_new_tokens=20)
        ),
    ]
    engine.submit(list(enumerate(requests)))
    found = {}
    while len(found) < len(requests):
        found |= {one.id: one.answer for one in engine.step()}
    return found


@pytest.mark.parametrize("mode", ["exact", "free"])
@pytest.mark.parametrize(("first", "second"), [("llama", "llama-2"), ("gpt2", "gpt2-2")])
def test_a_swap_has_the_bits_of_a_fresh_load(models, first, second, mode):
    spec = EngineSpec(device="cpu", threads=1, mode=mode)
    engine, fresh = loaded(models[first], spec), loaded(models[second], spec)
    before = engine.canary()
    assert len(before) == 8
    assert before == loaded(models[first], spec).canary()
    answers(engine)
    engine.swap(models[second])
    assert engine.canary() == fresh.canary() != before
    assert answers(engine) == answers(fresh)
    engine.swap(models[first])
    assert engine.canary() == before
    assert engine.numerics() == fresh.numerics()


def test_a_swap_writes_into_the_same_memory(models):
    engine = loaded(models["gpt2"])
    places = [parameter.data_ptr() for parameter in engine._model.parameters()]
    engine.swap(models["gpt2-2"])
    assert [parameter.data_ptr() for parameter in engine._model.parameters()] == places
    assert (
        engine._model.lm_head.weight.data_ptr() == engine._model.transformer.wte.weight.data_ptr()
    )


def edited(folder, to, *, tensors=None, config=None):
    shutil.copytree(folder, to)
    if tensors:
        weights = load_file(to / "model.safetensors")
        tensors(weights)
        save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    if config:
        settings = json.loads((to / "config.json").read_text()) | config
        (to / "config.json").write_text(json.dumps(settings))
    return to


def drop(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def rename(weights):
    weights["model.layers.1.mlp.up.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")


def narrow(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()


def round_off(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tensors": drop}, "nothing as model.layers.1.mlp.up_proj.weight"),
        ({"tensors": rename}, "as model.layers.1.mlp.up.weight"),
        ({"tensors": narrow}, r"F32 \[31\] as model.norm.weight, the running model has F32 \[32\]"),
        ({"tensors": round_off}, "BF16"),
        ({"config": {"rms_norm_eps": 0.1}}, "rms_norm_eps=0.1"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_engine_is_as_before(models, tmp_path, change, said):
    engine = loaded(models["llama"])
    before = engine.canary()
    with pytest.raises(SwapRefused, match=said):
        engine.swap(edited(models["llama-2"], tmp_path / "other", **change))
    assert engine.canary() == before
    engine.swap(models["llama-2"])
    assert engine.canary() == loaded(models["llama-2"]).canary()


def test_another_tokenizer_comes_with_its_weights(models, tmp_path):
    other = edited(models["llama-2"], tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text()) | {"eos_token": "<s>"}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    engine = loaded(models["llama"])
    engine.swap(other)
    assert answers(engine) == answers(loaded(other))


def test_pickles_are_neither_loaded_nor_swapped(models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models["llama"], other)
    weights = load_file(other / "model.safetensors")
    (other / "model.safetensors").unlink()
    torch.save(weights, other / "pytorch_model.bin")
    with pytest.raises(BadUse, match=r"pytorch_model.bin, a pickle.* save_pretrained"):
        loaded(other)
    engine = loaded(models["llama"])
    with pytest.raises(SwapRefused, match="a pickle"):
        engine.swap(other)


def test_what_is_no_model_is_said_in_a_sentence(models, tmp_path):
    with pytest.raises(BadUse, match=r"no \*.safetensors"):
        loaded(tmp_path)
    torn = edited(models["llama"], tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:100])
    with pytest.raises(BadUse, match="cannot be read"):
        loaded(torn)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(
        (models["llama"] / "model.safetensors").read_bytes()
    )
    (tmp_path / "other" / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(BadUse, match="no_such_model"):
        loaded(tmp_path / "other")


def test_sharded_and_tied_checkpoints_swap(tmp_path, llama_of):
    from transformers import LlamaForCausalLM

    folders = []
    for seed in (0, 1):
        folder = llama_of(tmp_path / f"{seed}", seed=seed, tie_word_embeddings=True)
        LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")
        (folder / "model.safetensors").unlink()
        folders.append(folder)
    assert len(list(folders[0].glob("*.safetensors"))) > 1
    engine = loaded(folders[0])
    engine.swap(folders[1])
    assert engine.canary() == loaded(folders[1]).canary()


def test_wrong_settings_are_refused_before_anything_is_loaded():
    with pytest.raises(BadUse, match="vllm"):
        TransformersEngine(EngineSpec(tensor_parallel=2))
    with pytest.raises(BadUse, match="exact or free"):
        TransformersEngine(EngineSpec(mode="fast"))


def test_numerics_name_all_that_bits_depend_on(models):
    said = loaded(models["llama"]).numerics()
    for part in (
        "hf exact",
        "float32",
        "cpu",
        "threads 1",
        "sdpa",
        f"torch {torch.__version__}",
        "transformers 5",
    ):
        assert part in said
    assert (
        said != loaded(models["llama"], EngineSpec(device="cpu", threads=1, mode="free")).numerics()
    )


def test_the_curve_is_measured_and_in_exact_mode_of_one_sequence(models):
    curve = loaded(models["llama"]).curve()
    assert curve.max_batch == 1
    assert 0 < curve.alone_s(50, 10) < 10
    assert curve.saturated_s(50, 10) == pytest.approx(curve.alone_s(50, 10))
    assert (
        loaded(models["llama"], EngineSpec(device="cpu", threads=1, mode="free", max_batch=4))
        .curve()
        .max_batch
        == 4
    )
