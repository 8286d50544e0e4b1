"""Compute whether a model fits on a device, from the config and the headers of the weights."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import BadUse
from holdfast.evaluate.types.engine import EngineSpec

_RESERVED_SHARE = 0.1
"""The share of a device's memory that is reserved for activations and the runtime.

vLLM's default gpu_memory_utilization of 0.9 reserves the same share.
"""
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
# Only those dtypes of safetensors that a dtype setting converts.
_FILE_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LENGTH_NAMES = ("n_positions", "max_position_embeddings", "n_ctx")
_DEFAULT_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Describe how a model fits in the memory of one engine's devices.

    Attributes:
        weights_bytes: the size of the whole model, over all devices.
        kv_token_bytes: the size of one token's keys and values, over all devices.
        max_length: the largest number of tokens of one sequence.
        tokens: the number of tokens whose keys and values fit beside the weights.
        batch: the number of sequences of `max_length` tokens that fit beside the weights.
    """

    weights_bytes: int
    kv_token_bytes: int
    max_length: int
    tokens: int
    batch: int


def fits(model: Path | dict[str, Any], spec: EngineSpec, device_memory_bytes: int) -> Fit:
    """Compute how a model fits on an engine's devices, whose number is `spec.tensor_parallel`.

    Args:
        model: a Hugging Face folder; or the content of a config.json, from which the size of the
            weights is estimated.
        spec: the engine, of which dtype, tensor_parallel and max_length are used.
        device_memory_bytes: the memory of one device; if `spec.device` is "cpu", an engine's share
            of the node's memory.

    Raises:
        BadUse: not even one sequence of full length fits; the message names a setting with which
            the model fits.
    """
    config = _config_of(model) if isinstance(model, Path) else model
    text = config.get("text_config") or config
    weights_bytes = (
        _weights_bytes(model, spec)
        if isinstance(model, Path)
        else _estimated_bytes(config, text, spec)
    )
    kv_token_bytes = kv_bytes_a_token(text, _dtype_bytes(config, spec))
    max_length = spec.max_length or next(
        (text[name] for name in _LENGTH_NAMES if text.get(name)), _DEFAULT_LENGTH
    )
    need_bytes = weights_bytes + kv_token_bytes * max_length
    usable_bytes = device_memory_bytes * (1 - _RESERVED_SHARE)
    room_bytes = usable_bytes * spec.tensor_parallel - weights_bytes
    if room_bytes < kv_token_bytes * max_length:
        raise BadUse(
            f"The model needs {_gib(weights_bytes)} for its weights and "
            f"{_gib(kv_token_bytes * max_length)} for one "
            f"sequence of {max_length} tokens; {spec.tensor_parallel} x "
            f"{_gib(device_memory_bytes)} of memory "
            f"hold {_gib(int(usable_bytes * spec.tensor_parallel))} of it. "
            f"{_advice(text, spec, need_bytes / usable_bytes)}"
        )
    tokens = int(room_bytes // kv_token_bytes) if kv_token_bytes else max_length
    return Fit(
        weights_bytes=weights_bytes,
        kv_token_bytes=kv_token_bytes,
        max_length=max_length,
        tokens=tokens,
        batch=tokens // max_length,
    )


def kv_bytes_a_token(text: dict[str, Any], dtype_bytes: int) -> int:
    """Return the size of the keys and values of one token.

    The size is 2 x layers x key heads x head size x dtype size. Layers with multi-head latent
    attention (DeepSeek) keep one compressed vector instead, of size rank + rotary size.
    """
    layers = text.get("num_hidden_layers") or text.get("n_layer") or 0
    if text.get("kv_lora_rank"):
        return int(layers * (text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0)) * dtype_bytes)
    heads = text.get("num_attention_heads") or text.get("n_head") or 1
    head_size = (
        text.get("head_dim") or (text.get("hidden_size") or text.get("n_embd") or 0) // heads
    )
    return int(2 * layers * (text.get("num_key_value_heads") or heads) * head_size * dtype_bytes)


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise BadUse(
            f"{folder / 'config.json'} cannot be read: {error}. Give a Hugging Face folder."
        ) from error
    return config


def _weights_bytes(folder: Path, spec: EngineSpec) -> int:
    from holdfast.evaluate.engines.safetensors_files import tensors_of

    total = 0
    for place in tensors_of(folder).values():
        stored = _FILE_DTYPE_BYTES.get(place.dtype)
        converts = stored is not None and spec.dtype in _DTYPE_BYTES
        total += (
            place.size_bytes // stored * _DTYPE_BYTES[spec.dtype]
            if stored and converts
            else place.size_bytes
        )
    return total


def _estimated_bytes(config: dict[str, Any], text: dict[str, Any], spec: EngineSpec) -> int:
    """Estimate a plain transformer's size to a few percent: embeddings, attention, gated MLP."""
    hidden = text.get("hidden_size") or text.get("n_embd") or 0
    layers = text.get("num_hidden_layers") or text.get("n_layer") or 0
    heads = text.get("num_attention_heads") or text.get("n_head") or 1
    head_size = text.get("head_dim") or hidden // heads
    key_heads = text.get("num_key_value_heads") or heads
    experts = (
        text.get("num_local_experts")
        or text.get("num_experts")
        or text.get("n_routed_experts")
        or 1
    )
    inner = text.get("moe_intermediate_size") if experts > 1 else None
    inner = inner or text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    matrices = 3 if text.get("intermediate_size") else 2
    attention = hidden * head_size * (2 * heads + 2 * key_heads)
    embeddings = text.get("vocab_size", 0) * hidden * (1 if text.get("tie_word_embeddings") else 2)
    parameters = embeddings + layers * (attention + experts * matrices * hidden * inner)
    return int(parameters * _dtype_bytes(config, spec))


def _dtype_bytes(config: dict[str, Any], spec: EngineSpec) -> int:
    text = config.get("text_config") or {}
    names = (
        spec.dtype,
        config.get("dtype"),
        config.get("torch_dtype"),
        text.get("dtype"),
        "float32",
    )
    return next(_DTYPE_BYTES[name] for name in names if name in _DTYPE_BYTES)


def _advice(text: dict[str, Any], spec: EngineSpec, devices: float) -> str:
    if spec.device == "cpu":
        return "Use fewer engines a node, nodes with more memory, or a smaller --max-length."
    heads = text.get("num_attention_heads") or text.get("n_head") or 1
    wanted = math.ceil(devices)
    tensor_parallel = next(
        (count for count in range(wanted, heads + 1) if heads % count == 0), None
    )
    if tensor_parallel is None or wanted > heads:
        return "No tensor parallelism of its heads suffices: give a smaller max_length, or devices with more memory."
    engine = "--engine vllm " if spec.kind == "hf" else ""  # hf has one device
    return f"Use {engine}--tp {tensor_parallel}, or a smaller max_length."


def _gib(size_bytes: int) -> str:
    return (
        f"{size_bytes / 2**30:.1f} GiB"
        if size_bytes >= 2**30 / 10
        else f"{size_bytes / 2**20:.1f} MiB"
    )
