"""Check the fit of models, from headers alone."""

import json
import subprocess
import sys

import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.fit import fits, kv_bytes_a_token
from holdfast.evaluate.types.engine import EngineSpec

GIB = 2**30
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def test_a_known_model_has_its_known_size():
    fit = fits(LLAMA_8B, EngineSpec(kind="vllm"), 80 * GIB)
    assert fit.weights_bytes == pytest.approx(
        8.03e9 * 2, rel=0.01
    )  # its parameters, by its model card
    assert fit.kv_token_bytes == 2 * 32 * 8 * 128 * 2
    assert fit.max_length == 8192
    assert fit.tokens == int((80 * GIB * 0.9 - fit.weights_bytes) // fit.kv_token_bytes)
    assert fit.batch == fit.tokens // 8192 > 40


def test_what_does_not_fit_names_the_tensor_parallelism_that_would():
    with pytest.raises(BadUse, match=r"131.4 GiB for its weights .* Use --tp 2, or a smaller"):
        fits(LLAMA_70B, EngineSpec(kind="vllm"), 80 * GIB)
    assert fits(LLAMA_70B, EngineSpec(kind="vllm", tensor_parallel=2), 80 * GIB).batch >= 1
    with pytest.raises(BadUse, match="Use --tp 8"):
        fits(LLAMA_70B, EngineSpec(kind="vllm"), 24 * GIB)
    with pytest.raises(BadUse, match="devices with more memory"):
        fits(LLAMA_70B, EngineSpec(kind="vllm"), GIB)


def test_dtype_and_length_of_the_spec_count():
    half, full = (
        fits(LLAMA_8B, EngineSpec(dtype=dtype), 80 * GIB) for dtype in ("auto", "float32")
    )
    assert full.weights_bytes == 2 * half.weights_bytes
    assert full.kv_token_bytes == 2 * half.kv_token_bytes
    assert fits(LLAMA_8B, EngineSpec(max_length=100), 80 * GIB).batch > 80 * half.batch


def test_keys_and_values_of_other_families():
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
    assert kv_bytes_a_token(gpt2, 4) == 2 * 12 * 768 * 4
    deepseek = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kv_bytes_a_token(deepseek, 2) == 61 * 576 * 2


def test_a_folder_is_measured_by_its_headers(models):
    folder = models["llama"]
    fit = fits(folder, EngineSpec(), GIB)
    size_bytes = (folder / "model.safetensors").stat().st_size
    assert 0.9 * size_bytes < fit.weights_bytes < size_bytes
    assert fits(folder, EngineSpec(dtype="bfloat16"), GIB).weights_bytes * 2 == fit.weights_bytes
    assert fit.max_length == 96
    config = json.loads((folder / "config.json").read_text())
    assert fits(config, EngineSpec(), GIB).weights_bytes == pytest.approx(
        fit.weights_bytes, rel=0.02
    )
    with pytest.raises(BadUse, match="MiB"):
        fits(folder, EngineSpec(), fit.weights_bytes)


def test_a_folder_without_a_config_is_said(tmp_path):
    with pytest.raises(BadUse, match=r"config\.json"):
        fits(tmp_path, EngineSpec(), GIB)


@pytest.mark.parametrize("module", ["fit", "simulated", "worker", "openai", "vllm"])
def test_what_does_not_compute_does_not_import_torch(module):
    code = f"import sys, holdfast.evaluate.engines.{module}; sys.exit('torch' in sys.modules or 'aiohttp' in sys.modules)"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
