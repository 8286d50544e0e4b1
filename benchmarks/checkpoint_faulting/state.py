"""Make the saved state: few bytes of every kind, all from a seed and a step."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

State = dict[str, Any]


@functools.lru_cache(maxsize=12)
def state_of(seed: int, step: int) -> State:
    """Return the whole state, not to be changed.

    The tensors are random bits, with NaNs of all kinds.
    """
    chance = torch.Generator().manual_seed(seed * 1_000_003 + step)

    def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        count = math.prod(shape) * dtype.itemsize
        raw = torch.randint(
            0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=chance
        )
        return raw.view(dtype).view(shape)

    return {
        "model": {
            "large": bits(torch.float32, 600, 500),
            "half": bits(torch.bfloat16, 333, 257),
            "bytes": bits(torch.int8, 70_001),
            "eighths": bits(torch.float8_e4m3fn, 40_000),
            "mask": bits(torch.bool, 9_001),
            "pairs": bits(torch.complex64, 50, 70),
            "turned": bits(torch.float32, 120, 150).T,
            "scalar": bits(torch.float64),
            "four": bits(torch.int32, 1),
            "empty": bits(torch.float32, 0, 3),
        },
        "optimizer": {
            "state": {
                number: {"step": bits(torch.float32), "average": bits(torch.float32, 40_000)}
                for number in (0, 1)
            },
            "param_groups": [
                {"lr": 1e-3 / step, "betas": (0.9, 0.999), "params": [0, 1], "name": None}
            ],
        },
        "sharded": {"rows": bits(torch.float32, 1001, 300)},
        "plain": {
            "step": step,
            "seed": seed,
            "text": f"run {seed}, step {step}, ü",
            "raw": bytes(range(256)),
            "on": True,
        },
    }


def per_rank_of(seed: int, step: int, rank: int) -> State:
    """Return the part of the state that differs by rank."""
    return {
        "position": 1_000_000 * rank + 1000 * step + seed,
        "order": torch.arange(500) * (rank + 2) + step,
    }


def on_ranks(state: State, world_size: int) -> State:
    """Return a state as one of several ranks has it, with a sharded part."""
    if world_size == 1:
        return state
    mesh = init_device_mesh("cpu", (world_size,))
    rows = distribute_tensor(state["sharded"]["rows"], mesh, [Shard(0)])
    return {**state, "sharded": {"rows": rows}}


def blank(value: Any) -> Any:
    """Return the same structure with blank values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, Mapping):
        return {key: blank(each) for key, each in value.items()}
    return [blank(each) for each in value] if isinstance(value, list) else type(value)()


def difference(left: Any, right: Any, where: str = "state") -> str:
    """Return the first place at which two states differ by a bit, a type or a key; else ""."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return where
        raw = [each.contiguous().flatten().view(torch.uint8) for each in (left, right)]
        return "" if torch.equal(*raw) else where
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if list(map(repr, left)) != list(map(repr, right)):
            return where
        return next(
            filter(None, (difference(left[key], right[key], f"{where}.{key}") for key in left)), ""
        )
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next(filter(None, (difference(*pair, f"{where}.{at}") for at, pair in pairs)), "")
    return "" if type(left) is type(right) and left == right else where
