"""The seam between whoever schedules requests and whatever answers them."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.evaluate.types.requests import Answer, Request, Scalar


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which engine, as a person chooses it; it travels to the workers.

    Attributes:
        kind: "hf", "vllm", "openai", "simulated", or "module:Class" of an `Engine`.
        mode: "exact": an answer depends on its request alone, bit for bit (each batch is one distinct input, threads
            fixed); "free": batched as it comes, floats may differ in their last digits.
        device: "cpu", "cuda"; empty for what there is.
        dtype: as transformers names it; "auto" takes the checkpoint's.
        tensor_parallel: GPUs an engine spans.
        threads: CPU threads of an engine; 0 shares the node's cores out among its engines.
        max_batch: sequences in one batch at most; 0 for the kind's own choice.
        max_length: of prompt and generation, in tokens; 0 for the model's own.
        url: "openai" only: the server, up to and with its version ("http://host:8000/v1").
        model_name: "openai" only: as the server knows the model.
        options: what one kind alone understands.
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
    """Whether engines take the GPUs that their node has."""
    return spec.device != "cpu" and spec.kind not in WITHOUT_WEIGHTS and not spec.url


def engines_on(gpus: int, spec: EngineSpec, wanted: int = 0) -> int:
    """How many engines a node has: as many as are `wanted`, else as its GPUs have room for, one where they use none."""
    return wanted or (max(1, gpus // spec.tensor_parallel) if uses_gpus(spec) else 1)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's work costs, in seconds; measured where it can be, else a guess to be corrected.

    A batch of `b` sequences takes `step_base_s + b * step_sequence_s` a token each; reading a prompt of `n` tokens
    takes `request_s + n / prefill_tokens_per_s` of the engine's time.
    """

    prefill_tokens_per_s: float
    request_s: float
    step_base_s: float
    step_sequence_s: float
    max_batch: int

    def alone_s(self, prompt_tokens: float, new_tokens: float) -> float:
        """How long a request takes with the engine to itself."""
        prefill_s = self.request_s + prompt_tokens / self.prefill_tokens_per_s
        return prefill_s + new_tokens * (self.step_base_s + self.step_sequence_s)

    def saturated_s(self, prompt_tokens: float, new_tokens: float) -> float:
        """The engine-seconds a request takes when the batch is always full: what no schedule can go below."""
        prefill_s = self.request_s + prompt_tokens / self.prefill_tokens_per_s
        return prefill_s + new_tokens * (self.step_base_s / self.max_batch + self.step_sequence_s)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was answered, or could not be (`error`, one sentence; it concerns this request alone).

    Times are `time.monotonic()` of the worker: when the engine took it up and when it had the answer.
    """

    id: int
    answer: Answer | None = None
    error: str = ""
    started_s: float
    finished_s: float


class SwapRefused(Exception):
    """These weights do not fit into the running engine; it must be started anew. The engine is as before."""


class Engine(Protocol):
    """One model, ready to answer. Called from one thread; the process around it (`worker`) is its own.

    A constructor takes an `EngineSpec` and does nothing that takes long.
    """

    def load(self, folder: Path) -> None:
        """Start with the weights of a Hugging Face folder (already in this node's memory), fresh.

        Raises:
            BadUse: the model does not fit the device, or is not one this engine runs.
        """
        ...

    def swap(self, folder: Path) -> None:
        """Put other weights of the same shapes into the running engine, in place; it is idle.

        Raises:
            SwapRefused: they do not fit; load in a new process instead.
        """
        ...

    def canary(self) -> list[float]:
        """Log-probabilities of fixed prompts, to tell whether a swap was right: equal to those of a fresh load."""
        ...

    def numerics(self) -> str:
        """What the bits of an answer depend on besides weights and request: kind, mode, dtype, device, versions."""
        ...

    def max_length(self) -> int:
        """The most tokens of prompt and generation together."""
        ...

    def curve(self) -> Curve:
        """What work costs on this engine."""
        ...

    def submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Take requests, each under an id of the caller's, behind those it has; returns at once."""
        ...

    def recall(self, ids: Sequence[int]) -> list[int]:
        """Give up those of `ids` that are not begun; returns which."""
        ...

    def step(self) -> list[Finished]:
        """Go on for a moment (at most about 0.1 s, or one batch); what was finished by it, maybe nothing."""
        ...

    def close(self) -> None:
        """Free everything. The engine is not used again."""
        ...


class Wakeable(Protocol):
    """What an `Engine` also has whose `step` waits, for a clock or a server: `wake`, set when there is news for it."""

    wake: threading.Event
