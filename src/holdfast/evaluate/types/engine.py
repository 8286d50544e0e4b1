"""Define the interface between the scheduler of requests and the engines that answer them."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.evaluate.types.requests import Answer, Request, Scalar


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Choose an engine; sent to the workers.

    Attributes:
        kind: "hf", "vllm", "openai", "simulated", or "module:Class" of an `Engine`.
        mode: "exact": an answer depends on its request alone, bit for bit (each batch is one
            distinct input, threads fixed); "free": requests are batched as they arrive, and floats
            may differ in their last digits.
        device: "cpu" or "cuda"; empty for the available device.
        dtype: the dtype in transformers' spelling; "auto" for the checkpoint's.
        tensor_parallel: the GPUs of one engine.
        threads: the CPU threads of an engine; 0 to share the node's cores among its engines.
        max_batch: the most sequences in one batch; 0 for the kind's own choice.
        max_length: the most tokens of prompt and generation; 0 for the model's own limit.
        url: "openai" only: the server with the version ("http://host:8000/v1").
        model_name: "openai" only: the model's name on the server.
        options: options that one kind alone understands.
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
"""Kinds that take no weights: nothing is fetched for them, and they need no GPU."""


def uses_gpus(spec: EngineSpec) -> bool:
    """Return True if engines use the GPUs of their node."""
    return spec.device != "cpu" and spec.kind not in WITHOUT_WEIGHTS and not spec.url


def engines_on(gpus: int, spec: EngineSpec, wanted: int = 0) -> int:
    """Count a node's engines: `wanted`, else as many as fit its GPUs, else one."""
    return wanted or (max(1, gpus // spec.tensor_parallel) if uses_gpus(spec) else 1)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Predict the seconds of an engine's work, by measurement or by a guess to correct.

    A batch of `b` sequences takes `step_base_s + b * step_sequence_s` for each token of all. A
    prompt of `n` tokens takes `request_s + n / prefill_tokens_per_s`.
    """

    prefill_tokens_per_s: float
    request_s: float
    step_base_s: float
    step_sequence_s: float
    max_batch: int

    def alone_s(self, prompt_tokens: float, new_tokens: float) -> float:
        """Return the seconds of a request that has the engine to itself."""
        prefill_s = self.request_s + prompt_tokens / self.prefill_tokens_per_s
        return prefill_s + new_tokens * (self.step_base_s + self.step_sequence_s)

    def saturated_s(self, prompt_tokens: float, new_tokens: float) -> float:
        """Return the engine-seconds of a request in a full batch: the least of any schedule."""
        prefill_s = self.request_s + prompt_tokens / self.prefill_tokens_per_s
        return prefill_s + new_tokens * (self.step_base_s / self.max_batch + self.step_sequence_s)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was answered, or that failed alone with `error`, one sentence.

    `started_s` and `finished_s` are `time.monotonic()` of the worker, at the start and at the end
    of the engine's work.
    """

    id: int
    answer: Answer | None = None
    error: str = ""
    started_s: float
    finished_s: float


class SwapRefused(Exception):
    """The weights do not fit into the running engine, which is unchanged and must be restarted."""


class Engine(Protocol):
    """Serve one model; called from one thread, in a process of its own (`worker`).

    A constructor takes an `EngineSpec` and returns quickly.
    """

    def load(self, folder: Path) -> None:
        """Load a Hugging Face folder's weights (in this node's memory) into a new engine.

        Raises:
            BadUse: the model does not fit the device, or the engine cannot run this model.
        """
        ...

    def swap(self, folder: Path) -> None:
        """Replace the weights of the idle engine in place by others of the same shapes.

        Raises:
            SwapRefused: the weights do not fit; load them in a new process.
        """
        ...

    def canary(self) -> list[float]:
        """Return log-probabilities of fixed prompts; after a swap they must equal a fresh load's."""
        ...

    def numerics(self) -> str:
        """Name all that an answer's bits depend on, except weights and request.

        These are the kind, mode, dtype, device and versions.
        """
        ...

    def max_length(self) -> int:
        """Return the most tokens of prompt and generation together."""
        ...

    def curve(self) -> Curve:
        """Return the cost curve of this engine."""
        ...

    def submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Queue requests, each under an id of the caller's, and return at once."""
        ...

    def recall(self, ids: Sequence[int]) -> list[int]:
        """Drop the requests among `ids` that have not begun.

        Returns:
            The ids of the dropped requests.
        """
        ...

    def step(self) -> list[Finished]:
        """Work for a moment (at most about 0.1 s, or one batch).

        Returns:
            The requests that finished; may be empty.
        """
        ...

    def close(self) -> None:
        """Free everything; the engine is not used again."""
        ...


class Wakeable(Protocol):
    """Let others interrupt the wait of an `Engine.step` on a clock or a server.

    `wake` is set when there are new messages for the engine.
    """

    wake: threading.Event
