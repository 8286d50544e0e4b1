"""Describe a decoder-only transformer and the layout that trains it in parallel."""

from dataclasses import dataclass
from typing import Literal

from holdfast.core.errors import BadUse

Recompute = Literal["none", "selective", "full"]
"""The activations that the backward pass computes again.

`selective` recomputes only the attention matrices, `full` whole layers. Flash attention never
stores the attention matrices, so a job with flash attention counts as `selective`.
"""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Hold the shape of a decoder-only transformer.

    Raises:
        BadUse: a size is not positive, or no head size is given and the number of heads does not
            divide the hidden size.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    ffn: int = 0
    """Inner size of the feed-forward layer; 0 means four times `hidden`."""
    kv_heads: int = 0
    """Number of key and value heads; 0 means as many as `heads`."""
    head_size: int = 0
    """Size of one head; 0 means `hidden / heads`."""
    gated: bool = False
    """True if the feed-forward layer has a third matrix, as SwiGLU has."""
    tied: bool = False
    """True if the output layer shares the weights of the input embedding."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise BadUse(f"model.{name} is {getattr(self, name)}. Give a whole number above 0.")
        if not self.head_size and self.hidden % self.heads:
            raise BadUse(
                f"model.hidden {self.hidden} is not a multiple of model.heads {self.heads}."
                " Give model.head_size too."
            )

    @property
    def ffn_size(self) -> int:
        """Return the inner size of the feed-forward layer."""
        return self.ffn or 4 * self.hidden

    @property
    def attention_size(self) -> int:
        """Return the number of heads times their size: H·Q in the FLOPs formula."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def layer_parameters(self) -> int:
        """Return one layer's parameter count: attention, feed-forward, two norms, no biases."""
        keys = self.attention_size * (self.kv_heads or self.heads) // self.heads
        attention = self.hidden * (2 * self.attention_size + 2 * keys)
        feed_forward = (3 if self.gated else 2) * self.hidden * self.ffn_size
        return attention + feed_forward + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Return the number of parameters of the input embedding; the output layer has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the whole model, including the final norm."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    @property
    def matmul_parameters(self) -> int:
        """Return N of the FLOPs formula: the number of parameters without the input embedding.

        If the output layer shares the embedding's weights, these count once, because the output
        layer multiplies by them.
        """
        return self.parameters - (0 if self.tied else self.embedding_parameters)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Hold the parallel layout of a job: how a model is spread over GPUs, and the batch size.

    Raises:
        BadUse: a degree of parallelism is not positive, or the degrees are incompatible.
    """

    sequence: int
    """Tokens per sequence."""
    microbatch: int = 1
    """Sequences per microbatch."""
    microbatches: int = 1
    """Microbatches per step on each data-parallel replica."""
    data: int = 1
    """Number of data-parallel replicas."""
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    """Model chunks per stage; more than 1 means interleaved 1F1B."""
    sequence_parallel: bool = False
    recompute: Recompute = "selective"
    zero: int = 0
    """ZeRO stage, 0 to 3. Megatron's distributed optimizer counts as stage 1."""
    shards: int = 0
    """Number of ranks over which ZeRO shards one copy of a state; 0 means `data`.

    Hierarchical ZeRO shards over fewer ranks than `data`.
    """
    fp32_gradients: bool = False
    """True if gradients take 4 bytes each, as in Megatron; False if they take 2."""

    def __post_init__(self) -> None:
        for name in (
            "sequence",
            "microbatch",
            "microbatches",
            "data",
            "tensor",
            "pipeline",
            "chunks",
        ):
            if getattr(self, name) < 1:
                raise BadUse(
                    f"layout.{name} is {getattr(self, name)}. Give a whole number above 0."
                )
        if self.zero not in (0, 1, 2, 3):
            raise BadUse(f"layout.zero is {self.zero}. Give 0, 1, 2 or 3.")
        if self.recompute not in ("none", "selective", "full"):
            raise BadUse(f"layout.recompute is {self.recompute!r}. Give none, selective or full.")
        if self.shards < 0 or (self.shards and self.data % self.shards):
            raise BadUse(
                f"layout.shards {self.shards} does not divide layout.data {self.data}."
                " Give a divisor of it."
            )
        if self.chunks > 1 and self.microbatches % self.pipeline:
            raise BadUse(
                f"Interleaved 1F1B needs microbatches in multiples of its {self.pipeline} stages,"
                f" and layout.microbatches is {self.microbatches}. Change one of them."
            )

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the job."""
        return self.data * self.tensor * self.pipeline

    @property
    def tokens_a_step(self) -> int:
        """Return the number of tokens in one optimizer step, over all replicas."""
        return self.sequence * self.microbatch * self.microbatches * self.data

    @property
    def shard_count(self) -> int:
        """Return the number of ranks over which ZeRO shards one copy of a state."""
        return self.shards or self.data
