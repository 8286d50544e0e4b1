"""Define the interface between the scheduler of requests and the engines that answer them."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.evaluate.types.requests import Answer, Request, Scalar


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Define the kind of engine and its settings; sent to the engines' workers.

    Attributes:
        kind: "hf", "vllm", "openai", "simulated", or "module:Class" of an `Engine`.
        mode: "exact": each answer depends only on its request, bit for bit, because each batch
            holds one distinct input and the number of threads is fixed; "free": requests are
            batched as they arrive, so floats may differ in their last digits.
        device: "cpu" or "cuda"; empty to use a GPU if there is one.
        dtype: the dtype in transformers' spelling; "auto" for the checkpoint's own dtype.
        tensor_parallel: the number of GPUs that one engine uses.
        threads: the CPU threads of one engine; 0 to share the node's cores among its engines.
        max_batch: the largest number of sequences in one batch; 0 to let the engine choose.
        max_length: the largest number of tokens of prompt and generation together; 0 for the
            model's own limit.
        url: for "openai" only, the server's URL with the API version ("http://host:8000/v1").
        model_name: for "openai" only, the model's name on the server.
        options: options that only this kind of engine understands.
    """

    kind: str = "hf"
    mode: str = "exact"
    device: str = ""
    dtype: str = "auto"
    tensor_parallel: int = 1
    threads: int = 0
    max_batch: int = 0
    max_length: int = 0
    url: str = ""
    model_name: str = ""
    options: dict[str, Scalar] = {}


WITHOUT_WEIGHTS = ("openai", "simulated")
"""Kinds of engine that load no weights, so nothing is fetched for them and they need no GPU."""


def uses_gpus(spec: EngineSpec) -> bool:
    """Return True if engines of this kind use the GPUs of their node."""
    return spec.device != "cpu" and spec.kind not in WITHOUT_WEIGHTS and not spec.url


def engines_on(gpus: int, spec: EngineSpec, wanted: int = 0) -> int:
    """Return the number of engines on a node.

    The number is `wanted` if it is given. Otherwise as many engines run as fit on the node's GPUs,
    and one engine on a node without GPUs or for an engine that uses none.
    """
    return wanted or (max(1, gpus // spec.tensor_parallel) if uses_gpus(spec) else 1)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Predict how long an engine works on a request, from a measurement or from a first guess.

    Reading a prompt of `n` tokens takes `request_s + n / prefill_tokens_per_s`. Decoding the next
    token of all `b` sequences of a batch takes `step_base_s + b * step_sequence_s`.
    """

    prefill_tokens_per_s: float
    request_s: float
    step_base_s: float
    step_sequence_s: float
    max_batch: int

    def alone_s(self, prompt_tokens: float, new_tokens: float) -> float:
        """Return the seconds that a request takes when it is the only request in the engine."""
        prefill_s = self.request_s + prompt_tokens / self.prefill_tokens_per_s
        return prefill_s + new_tokens * (self.step_base_s + self.step_sequence_s)

    def saturated_s(self, prompt_tokens: float, new_tokens: float) -> float:
        """Return a request's engine-seconds in a full batch; no schedule needs fewer."""
        prefill_s = self.request_s + prompt_tokens / self.prefill_tokens_per_s
        return prefill_s + new_tokens * (self.step_base_s / self.max_batch + self.step_sequence_s)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the answer to one request, or the reason in `error` why this one request failed.

    `error` is one sentence. `started_s` and `finished_s` are the worker's `time.monotonic()` at the
    start and at the end of the engine's work on the request.
    """

    id: int
    answer: Answer | None = None
    error: str = ""
    started_s: float
    finished_s: float


class SwapRefused(Exception):
    """The running engine cannot take these weights; it is unchanged and must be restarted."""


class Engine(Protocol):
    """Answer requests with one model; called from one thread of a worker process.

    The constructor takes an `EngineSpec` and returns quickly.
    """

    def load(self, folder: Path) -> None:
        """Load the weights of a Hugging Face folder into a new engine.

        The folder is in this node's shared memory.

        Raises:
            BadUse: the model does not fit on the device, or the engine cannot run this model.
        """
        ...

    def swap(self, folder: Path) -> None:
        """Replace the weights of the idle engine in place by weights of the same shapes.

        Raises:
            SwapRefused: the shapes differ; load the weights in a new process.
        """
        ...

    def canary(self) -> list[float]:
        """Return log-probabilities of fixed prompts, to check a swap.

        After a swap, the values must equal the values of an engine that loaded the same weights
        afresh.
        """
        ...

    def numerics(self) -> str:
        """Name everything except weights and request that the bits of an answer depend on.

        These are the engine's kind, mode, dtype, device and the versions of its libraries.
        """
        ...

    def max_length(self) -> int:
        """Return the largest number of tokens that prompt and generation may have together."""
        ...

    def curve(self) -> Curve:
        """Return the cost curve of this engine."""
        ...

    def submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Queue requests, each with an id chosen by the caller, and return at once."""
        ...

    def recall(self, ids: Sequence[int]) -> list[int]:
        """Drop the given requests, except the requests that the engine has begun.

        Returns:
            The ids of the dropped requests.
        """
        ...

    def step(self) -> list[Finished]:
        """Work on the queued requests for at most about 0.1 s, or for one batch.

        Returns:
            The requests that finished in this step; empty if none did.
        """
        ...

    def close(self) -> None:
        """Free all memory; the engine is not used afterwards."""
        ...


class Wakeable(Protocol):
    """An engine whose `step` waits on a clock or a server, and whose wait can be interrupted.

    The worker sets `wake` when new messages for the engine have arrived.
    """

    wake: threading.Event
