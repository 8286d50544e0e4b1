"""Provide the reference engine: transformers in this process, on a CPU or one GPU.

In exact mode (`exact`), an answer has the same bits as in unmodified lm-eval with `--model hf` at
batch size 1, and does not depend on other requests. In free mode (`batching`), requests are batched
as they arrive.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.hf.adapter import adapter_numerics
from holdfast.evaluate.engines.hf.calls import Calls, calls_of, has_plain_cache
from holdfast.evaluate.engines.hf.curve import canary_of, measure
from holdfast.evaluate.engines.hf.sampling import Recipes
from holdfast.evaluate.engines.hf.weights import (
    Swapper,
    load_model,
    load_tokenizer,
    max_length_of,
    tokenizer_files,
)
from holdfast.evaluate.engines.hf.work import OneByOne, Together, Work
from holdfast.evaluate.types.engine import Curve, EngineSpec, Finished, SwapRefused
from holdfast.evaluate.types.requests import Request

_STEP_S = 0.05
_FREE_BATCH = 32


class TransformersEngine:
    """Answer requests with transformers; the methods implement `Engine`."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.tensor_parallel > 1:
            raise BadUse(
                f"The engine hf runs on one device; tensor_parallel is {spec.tensor_parallel}. Use "
                "the engine vllm."
            )
        if spec.mode not in ("exact", "free"):
            raise BadUse(f"The mode of an engine is exact or free, not {spec.mode!r}.")
        self._spec = spec
        self._device = _device_of(spec.device)
        if spec.threads:
            torch.set_num_threads(spec.threads)

    def load(self, folder: Path) -> None:
        """See `Engine.load`."""
        self._model = load_model(folder, self._spec, self._device)
        self._adapter_numerics = adapter_numerics(folder)
        self._swapper = Swapper(self._model, folder)
        self._ready(folder, load_tokenizer(folder))
        self._curve = measure(self._model, self._max_length, self._max_batch)

    def swap(self, folder: Path) -> None:
        """See `Engine.swap`."""
        same_tokens = tokenizer_files(folder) == self._tokenizer_files
        try:
            tokenizer = None if same_tokens else load_tokenizer(folder)
        except BadUse as error:
            raise SwapRefused(str(error)) from error
        self._swapper.swap(folder)
        if tokenizer is not None:
            self._ready(folder, tokenizer)

    def _ready(self, folder: Path, tokenizer: Any) -> None:
        self._tokenizer_files = tokenizer_files(folder)
        self._max_length = self._spec.max_length or max_length_of(self._model.config, tokenizer)
        recipes = Recipes(self._model, tokenizer)
        self._work: Work
        if self._spec.mode == "free" and has_plain_cache(self._model):
            self._max_batch = self._spec.max_batch or _FREE_BATCH
            self._work = Together(Calls(self._model), recipes, self._max_length, self._max_batch)
        else:
            self._max_batch = 1
            self._work = OneByOne(
                calls_of(self._model, self._max_length), recipes, self._max_length
            )

    def canary(self) -> list[float]:
        """See `Engine.canary`."""
        return canary_of(self._model, self._max_length)

    def numerics(self) -> str:
        """See `Engine.numerics`."""
        import transformers

        on_gpu = self._device.type == "cuda"
        return " ".join(
            (
                f"hf {self._spec.mode}",
                str(self._model.dtype).removeprefix("torch."),
                torch.cuda.get_device_name(self._device)
                if on_gpu
                else f"cpu {torch.backends.cpu.get_cpu_capability()}",
                f"threads {torch.get_num_threads()}",
                str(self._model.config._attn_implementation),
                f"torch {torch.__version__}",
                f"transformers {transformers.__version__}",
                f"limit {self._max_length}",
                *self._adapter_numerics,
            )
        )

    def max_length(self) -> int:
        """See `Engine.max_length`."""
        return self._max_length

    def curve(self) -> Curve:
        """See `Engine.curve`."""
        return self._curve

    def submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        """See `Engine.submit`."""
        self._work.submit(requests)

    def recall(self, ids: Sequence[int]) -> list[int]:
        """See `Engine.recall`."""
        return self._work.recall(ids)

    def step(self) -> list[Finished]:
        """See `Engine.step`; works for 0.05 s, or for one longer forward pass or batch."""
        return self._work.step(time.monotonic() + _STEP_S)

    def close(self) -> None:
        """See `Engine.close`."""
        del self._model, self._work, self._swapper


def _device_of(named: str) -> torch.device:
    """Return the device with the given name; without a name, a GPU if there is one.

    Raises:
        BadUse: the name is not a device, or this machine lacks the device.
    """
    if not named:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(named)
    except RuntimeError as error:
        raise BadUse(
            f"There is no device {named!r}. Give --device cpu or --device cuda."
        ) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type not in ("cpu", "cuda"):
        raise BadUse(f"The engine hf runs on cpu and cuda, not on {named}. Give one of these.")
    if device.type == "cuda" and (device.index or 0) >= count:
        has = f"{count} of them" if count else "no CUDA device that torch can use"
        raise BadUse(
            f"The device is {named}, and there is {has}. Give --device cpu, or another node."
        )
    return device
